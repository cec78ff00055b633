"""What KubeVirt's DomainSpec keeps of a domain XML that it parses and prints; must not ask libvirt.

Between two hook calls virt-launcher holds the domain in a Go struct.  Whatever has no field there
is gone in the next call.  STRUCTS names the fields in the order in which Go prints them; what a
KubeVirt version lacks is taken out by _structs().  Two things are easy to forget:

  - Go matches names without their namespace, but "qemu:commandline" is literally the name of the
    field, so nothing is ever parsed into it before main of July 2026;
  - a value that is no pointer is printed even if nothing was parsed: <driver type="">, <bios>.

One field a word:

    @name     attribute          name        element with text only
    .         the element's text name:Type   element that is a struct of that type

and at its end: nothing = left out if empty or absent; "!" = always printed; "*" = any number of
them; "#" = a number, left out if absent; "#0" = a number, left out if zero; "#!" = a number, always
printed.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cache
from xml.sax.saxutils import escape

from lxml import etree

QEMU_NAMESPACE = "http://libvirt.org/schemas/domain/qemu/1.0"
KUBEVIRT_NAMESPACE = "http://kubevirt.io"


class Family(Enum):
    """KubeVirt versions that lose the same things between two hook calls.

    MAIN is the development branch of August 2026: it loses what v1.9 loses, except
    qemu:commandline and a port's hotplug, and reads back from libvirt before its last call even if
    there were no placeholders.
    """

    V1_0 = "v1.0-v1.5"
    V1_6 = "v1.6-v1.7"
    V1_8 = "v1.8"
    V1_9 = "v1.9"
    MAIN = "main"

    def since(self, first: "Family") -> bool:
        order = list(Family)
        return order.index(self) >= order.index(first)


class NotParsed(Exception):
    """Go cannot parse this, so KubeVirt fails the start of the VM."""


STRUCTS = {
    "Domain": """
        @type! name! uuid memory:Memory! currentMemory:Memory maxMemory:MaxMemory
        memoryBacking:MemoryBacking os:OS! sysinfo:SysInfo devices:Devices! clock:Clock
        resource:Resource metadata:Metadata! features:Features cpu:CPU! vcpu:VCPU vcpus:VCPUs
        cputune:CPUTune numatune:NUMATune iothreads:IOThreads launchSecurity:LaunchSecurity
        iommufd:IOMMUFD""",
    "Memory": "@unit! .#",
    "MaxMemory": "@unit! @slots#! .#",
    "MemoryBacking": """
        hugepages:HugePages source:MemorySource access:Mode allocation:Mode nosharepages:Empty""",
    "HugePages": "page:HugePage*",
    "HugePage": "@size! @unit! @nodeset!",
    "MemorySource": "@type!",
    "Mode": "@mode!",
    "Empty": "",
    "State": "@state",
    # --- outside <devices>
    "OS": """
        type:OSType! acpi:OSACPI smbios:Mode boot:Boot* bootmenu:BootMenu bios:BIOS loader:Loader
        nvram:NVRAM kernel initrd cmdline""",
    "OSType": "@arch @machine .",
    "OSACPI": "table:ACPITable*",
    "ACPITable": "@type .",
    "Boot": "@dev!",
    "BootMenu": "@enable! @timeout#",
    "BIOS": "@useserial",
    "Loader": "@readonly @secure @type .",
    "NVRAM": "@template .",
    "SysInfo": "@type! system:Entries! bios:Entries! baseBoard:Entries! chassis:Entries!",
    "Entries": "entry:Entry*",
    "Entry": "@name! .",
    "Clock": "@offset @timezone @adjustment timer:Timer*",
    "Timer": "@name! @tickpolicy @present @track @frequency",
    "Resource": "partition!",
    "Metadata": f"{{{KUBEVIRT_NAMESPACE}}}kubevirt:KubeVirt!",
    "KubeVirt": "uid! graceperiod:GracePeriod",
    "GracePeriod": "deletionGracePeriodSeconds#! deletionTimestamp markedForGracefulShutdown",
    "Features": """
        acpi:Empty apic:Empty hyperv:HyperV smm:Empty kvm:KVM pvspinlock:State pmu:State
        vmport:State""",
    "HyperV": """
        @mode relaxed:State vapic:State spinlocks:Spinlocks vpindex:State runtime:State synic:State
        stimer:SyNICTimer reset:State vendor_id:VendorID frequencies:State reenlightenment:State
        tlbflush:State ipi:State evmcs:State""",
    "Spinlocks": "@state @retries#",
    "SyNICTimer": "@state direct:State",
    "VendorID": "@state @value",
    "KVM": "hidden:State hint-dedicated:State",
    "CPU": "@mode model feature:CPUFeature* topology:CPUTopology numa:NUMA",
    "CPUFeature": "@name! @policy",
    "CPUTopology": "@sockets#0 @cores#0 @threads#0",
    "NUMA": "cell:Cell*",
    "Cell": "@id! @cpus! @memory#0 @unit @memAccess distances:Distances",
    "Distances": "sibling:Sibling*",
    "Sibling": "@id! @value#!",
    "VCPU": "@placement! .#",
    "VCPUs": "vcpu:VCPUsVCPU*",
    "VCPUsVCPU": "@id#! @enabled @hotpluggable @order#0",
    "CPUTune": "vcpupin:VCPUPin* iothreadpin:IOThreadPin* emulatorpin:CPUSet",
    "VCPUPin": "@vcpu#! @cpuset!",
    "IOThreadPin": "@iothread#! @cpuset!",
    "CPUSet": "@cpuset!",
    "NUMATune": "memory:NUMATuneMemory! memnode:MemNode*",
    "NUMATuneMemory": "@mode! @nodeset!",
    "MemNode": "@cellid#! @mode! @nodeset!",
    "IOThreads": ".#",
    "LaunchSecurity": "@type! dhCert session cbitpos reducedPhysBits policy",
    "IOMMUFD": "@enabled @fdgroup",
    # --- <devices>
    "Devices": """
        emulator interface:Interface* channel:Channel* hostdev:HostDevice* panic:Panic*
        controller:Controller* video:Video* graphics:Graphics* memballoon:MemBalloon disk:Disk*
        input:Input* serial:Serial* console:Console* watchdog:Watchdog* rng:Rng
        filesystem:Filesystem* redirdev:Redir* sound:Sound* tpm:TPM* vsock:VSock
        memory:MemoryDevice iommu:IOMMU*""",
    "Address": """
        @type @domain @bus @slot @function @controller @target @unit @uuid @device @cssid @ssid
        @devno""",
    "Alias": "@name!",
    "Interface": """
        @type! @trustGuestRxFilters address:Address source:InterfaceSource! target:InterfaceTarget
        model:Model mac:MAC mtu:MTU bandwidth:Empty boot:BootOrder link:LinkState
        filterref:FilterRef alias:Alias driver:InterfaceDriver rom:Rom acpi:InterfaceACPI
        backend:InterfaceBackend portForward:PortForward*""",
    "InterfaceSource": "@network @dev @bridge @mode address:Address",
    "InterfaceTarget": "@dev! @managed",
    "Model": "@type!",
    "MAC": "@address!",
    "MTU": "@size!",
    "BootOrder": "@order#!",
    "LinkState": "@state!",
    "FilterRef": "@filter!",
    "InterfaceDriver": "@name! @queues# @iommu",
    "Rom": "@enabled!",
    "InterfaceACPI": "@index#!",
    "InterfaceBackend": "@type @logFile",
    "PortForward": "@proto! @address @dev range:PortForwardRange*",
    "PortForwardRange": "@start#! @end#0 @to#0 @exclude",
    "Channel": "@type! source:ChannelSource target:ChannelTarget",
    "ChannelSource": "@mode! @path!",
    "ChannelTarget": "@name @type! @address @port#0 @state",
    "HostDevice": """
        @type! @managed @mode @model @display @ramfb source:HostDeviceSource! boot:BootOrder
        address:Address alias:Alias driver:HostDeviceDriver acpi:HostDeviceACPI""",
    "HostDeviceSource": "address:Address",
    "HostDeviceDriver": "@iommufd",
    "HostDeviceACPI": "@nodeset",
    "Panic": "@model",
    "Controller": """
        @type! @index! @model driver:ControllerDriver alias:Alias address:Address
        pcihole64:PCIHole64 target:ControllerTarget""",
    "ControllerDriver": "@iothread# @queues# @iommu",
    "PCIHole64": "@unit .#",
    "ControllerTarget": "@busNr# @hotplug node#",
    "Video": "model:VideoModel!",
    "VideoModel": "@type! @heads# @ram# @vram# @vgamem#",
    "Graphics": "@autoport @defaultMode @passwdValidTo @port#0 @tlsPort#0 @type! listen:Listen",
    "Listen": "@type! @address @socket",
    "MemBalloon": "@model! @freePageReporting stats:Stats address:Address driver:IOMMUFlag",
    "Stats": "@period#!",
    "IOMMUFlag": "@iommu",
    "Disk": """
        @device! @snapshot @type! @model source:DiskSource! target:DiskTarget! serial
        driver:DiskDriver readonly:Empty auth:DiskAuth alias:Alias backingStore:BackingStore
        boot:BootOrder address:Address blockio:BlockIO filesystemOverhead capacity#
        expandDisksEnabled shareable:Empty""",
    "DiskSource": """
        @dev @file @startupPolicy @protocol @name host:DiskSourceHost reservations:Reservations
        slices:Slices* dataStore:DataStore""",
    "DiskSourceHost": "@name! @port",
    "Reservations": "@managed source:ReservationsSource",
    "ReservationsSource": "@type! @path @mode",
    "Slices": "slice:Slice!",
    "Slice": "@type! @offset#! @size#!",
    "DataStore": "@type format:Format source:DiskSource",
    "Format": "@type!",
    "DiskTarget": "@bus @dev @tray",
    "DiskDriver": """
        @cache @error_policy @io @name! @type! @iothread# @queues# @discard @iommu
        iothreads:DiskIOThreads""",
    "DiskIOThreads": "iothread:DiskIOThread*",
    "DiskIOThread": "@id#!",
    "DiskAuth": "@username! secret:DiskSecret",
    "DiskSecret": "@type! @usage @uuid",
    "BackingStore": "@type format:Format source:DiskSource",
    "BlockIO": "@logical_block_size#0 @physical_block_size#0 @discard_granularity#",
    "Input": "@type! @bus! @model alias:Alias address:Address",
    "Serial": "@type! target:SerialTarget source:CharSource alias:Alias log:SerialLog",
    "SerialTarget": "@port#",
    "CharSource": "@mode @path",
    "SerialLog": "@file @append",
    "Console": "@type! target:ConsoleTarget source:CharSource alias:Alias",
    "ConsoleTarget": "@type @port#",
    "Watchdog": "@model! @action! alias:Alias address:Address",
    "Rng": "@model! backend:RngBackend address:Address driver:IOMMUFlag",
    "RngBackend": "@model! .",
    "Filesystem": """
        @type! @accessMode! source:FilesystemSource target:FilesystemTarget driver:FilesystemDriver
        binary:FilesystemBinary""",
    "FilesystemSource": "@dir! @socket",
    "FilesystemTarget": "@dir",
    "FilesystemDriver": "@type! @queue",
    "FilesystemBinary": "@path @xattr cache:FilesystemCache lock:FilesystemLock",
    "FilesystemCache": "@mode",
    "FilesystemLock": "@posix @flock",
    "Redir": "@type! @bus! source:ChannelSource!",
    "Sound": "@model! alias:Alias",
    "TPM": "@model! backend:TPMBackend!",
    "TPMBackend": "@type! @version! @persistent_state",
    "VSock": "@model cid:CID!",
    "CID": "@auto! @address#0",
    "MemoryDevice": "@model! target:MemoryTarget alias:Alias address:Address",
    "MemoryTarget": """
        size:Memory! requested:Memory! current:Memory! node! block:Memory! address:MemoryAddress""",
    "MemoryAddress": "@base!",
    "IOMMU": "@model! driver:IOMMUDriver",
    "IOMMUDriver": "@pciBus",
}

# (struct, field): the first family whose struct has it.  The address's attributes are kept by all,
# but the older ones print them even if empty.
_ADDED = {
    ("Controller", "pcihole64:PCIHole64"): Family.V1_6,
    ("Devices", "panic:Panic*"): Family.V1_6,
    ("Controller", "target:ControllerTarget"): Family.V1_8,
    ("HostDevice", "driver:HostDeviceDriver"): Family.V1_9,
    ("HostDevice", "acpi:HostDeviceACPI"): Family.V1_9,
    ("Cell", "distances:Distances"): Family.V1_9,
    ("Devices", "iommu:IOMMU*"): Family.V1_9,
    ("Domain", "iommufd:IOMMUFD"): Family.V1_9,
    ("ControllerTarget", "@hotplug"): Family.MAIN,
}


class _Part(Enum):
    ATTRIBUTE = auto()
    ELEMENT = auto()
    TEXT = auto()


@dataclass(frozen=True, slots=True)
class _Field:
    part: _Part
    name: str
    # A struct's name; empty if there is only text.
    type: str
    # "" "!" "*" "#" "#0" "#!": see the module's docstring.
    end: str

    @property
    def number(self) -> bool:
        return self.end.startswith("#")


_WORD = re.compile(r"(?P<at>@?)(?P<name>(?:{[^}]*})?[\w.-]*)(?::(?P<type>\w+))?(?P<end>[!*#0]*)")


def _field(word: str) -> _Field:
    match = _WORD.fullmatch(word)
    assert match, word
    if match["name"] == ".":
        part = _Part.TEXT
    else:
        part = _Part.ATTRIBUTE if match["at"] else _Part.ELEMENT
    return _Field(part, match["name"], match["type"] or "", match["end"])


@cache
def _structs(family: Family) -> dict[str, tuple[_Field, ...]]:
    structs = {
        name: [word for word in words.split() if family.since(_ADDED.get((name, word), Family.V1_0))]
        for name, words in STRUCTS.items()
    }
    if not family.since(Family.V1_8):
        always = {"@type": "@type!", "@bus": "@bus!"}
        structs["Address"] = [always.get(word, word) for word in structs["Address"]]
    return {name: tuple(map(_field, words)) for name, words in structs.items()}


@dataclass(slots=True)
class _Value:
    """A parsed struct: attributes and texts by name, the element's own text by ".", and structs."""

    texts: dict[str, str] = field(default_factory=dict)
    structs: dict[str, list["_Value"]] = field(default_factory=dict)


class _Spec:
    def __init__(self, family: Family) -> None:
        self.structs = _structs(family)

    def parse(self, type_: str, element: etree._Element, value: _Value) -> _Value:
        """Read element into value, over what is there: Go does so if a field comes twice."""
        fields = self.structs[type_]
        by_name = {(each.part, each.name): each for each in fields}
        for key, text in _attributes(element):
            found = by_name.get((_Part.ATTRIBUTE, etree.QName(key).localname))
            if found:
                value.texts[f"@{found.name}"] = self._text(found, text, element)
        for child in element.iterchildren(etree.Element):
            found = by_name.get((_Part.ELEMENT, str(child.tag))) or by_name.get(
                (_Part.ELEMENT, etree.QName(child).localname)
            )
            if not found:
                continue
            if not found.type:
                value.texts[found.name] = self._text(found, _direct_text(child), child)
                continue
            already = value.structs.setdefault(found.name, [])
            if found.end == "*" or not already:
                already.append(_Value())
            self.parse(found.type, child, already[-1])
        found = by_name.get((_Part.TEXT, "."))
        if found:
            value.texts["."] = self._text(found, _direct_text(element), element)
        return value

    @staticmethod
    def _text(found: _Field, text: str, element: etree._Element) -> str:
        if not found.number:
            return text
        # Go reads an absent or empty number as 0, and knows decimal ones only.
        stripped = text.strip() or "0"
        if not re.fullmatch(r"-?[0-9]+", stripped):
            raise NotParsed(f"<{etree.QName(element).localname}> {found.name}: {text!r}")
        return str(int(stripped))

    def build(self, type_: str, tag: str, value: _Value) -> etree._Element:
        element = etree.Element(tag)
        # What is below <kubevirt> is in its namespace, though no field says so.
        namespace = etree.QName(tag).namespace

        def inside(name: str) -> str:
            return f"{{{namespace}}}{name}" if namespace and "}" not in name else name

        for each in self.structs[type_]:
            if each.part is _Part.ATTRIBUTE:
                text = self._printed(each, value.texts.get(f"@{each.name}"))
                if text is not None:
                    element.set(each.name, text)
            elif each.part is _Part.TEXT:
                element.text = value.texts.get(".") or ("0" if each.number else None)
            elif each.type:
                structs = value.structs.get(each.name, [])
                if not structs and each.end == "!":
                    structs = [_Value()]
                tag = inside(each.name)
                element.extend([self.build(each.type, tag, one) for one in structs])
            else:
                text = self._printed(each, value.texts.get(each.name))
                if text is not None:
                    etree.SubElement(element, inside(each.name)).text = text
        return element

    @staticmethod
    def _printed(each: _Field, text: str | None) -> str | None:
        """None if the field is left out."""
        match each.end:
            case "":
                return text or None
            case "!":
                return text or ""
            case "#":
                return text
            case "#0":
                return None if text in (None, "0") else text
            case "#!":
                return text or "0"
        raise AssertionError(each)


def _attributes(element: etree._Element) -> list[tuple[str, str]]:
    return [(str(key), str(text)) for key, text in element.attrib.items()]


def _direct_text(element: etree._Element) -> str:
    return (element.text or "") + "".join(child.tail or "" for child in element)


def parse(xml: bytes) -> etree._Element:
    # Go skips comments and processing instructions, and no struct keeps white space.
    parser = etree.XMLParser(remove_blank_text=True, remove_comments=True, remove_pis=True, resolve_entities=False)
    return etree.fromstring(xml, parser)


def reprint_element(element: etree._Element, type_: str, family: Family) -> etree._Element:
    """The element after it was parsed into the struct of that type and printed again."""
    spec = _Spec(family)
    return spec.build(type_, etree.QName(element).localname, spec.parse(type_, element, _Value()))


def reprint(xml: bytes, family: Family) -> bytes:
    """What parsing xml into that family's DomainSpec and printing it gives."""
    domain = parse(xml)
    printed = reprint_element(domain, "Domain", family)
    if family is Family.MAIN:
        for commandline in domain.iterchildren(f"{{{QEMU_NAMESPACE}}}commandline"):
            printed.append(commandline)
    # A namespace that is only declared is lost as well: its field has the name "xmlns:qemu".
    return to_bytes(printed)


def to_bytes(domain: etree._Element) -> bytes:
    """Print as Go's encoding/xml does with MarshalIndent("", "\\t")."""
    return "\n".join(_lines(domain, "", None)).encode()


def _lines(element: etree._Element, indent: str, outer: str | None) -> Iterator[str]:
    name = etree.QName(element)
    local, declared = name.localname, ""
    if name.namespace == QEMU_NAMESPACE:
        local = f"qemu:{local}"
    elif name.namespace != outer:
        declared = f' xmlns="{name.namespace or ""}"'
    attributes = "".join(f' {key}="{_escape(text)}"' for key, text in _attributes(element))
    is_root = element.getparent() is None
    uses_qemu = element.nsmap.get("qemu") == QEMU_NAMESPACE or any(
        etree.QName(child).namespace == QEMU_NAMESPACE for child in element
    )
    if is_root and uses_qemu:
        attributes += f' xmlns:qemu="{QEMU_NAMESPACE}"'
    start = f"{indent}<{local}{declared}{attributes}>"
    children = [child for child in element if isinstance(child.tag, str)]
    if children:
        yield start
        for child in children:
            yield from _lines(child, f"{indent}\t", name.namespace)
        yield f"{indent}</{local}>"
    else:
        yield f"{start}{_escape(element.text or '')}</{local}>"


def _escape(text: str) -> str:
    return escape(text, {'"': "&#34;", "'": "&#39;", "\t": "&#x9;", "\n": "&#xA;", "\r": "&#xD;"})
