"""Reads domain XML into a GuestDomain and writes a Plan into it; the only user of lxml, and it decides nothing.

The document is edited in place and never rebuilt: the hook's own controllers are replaced, the
addresses of placed devices are set, everything else stays as it was.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from lxml import etree

from hook import clique, slots
from hook.address import CpuLists, CpuSet, PciAddress
from hook.errors import DomainXmlError, DomainXmlTooLarge
from hook.guest import (
    AddressSpace,
    Cell,
    Controller,
    Endpoint,
    FwCfgLine,
    GuestAddress,
    GuestDomain,
    Hostdev,
    Kind,
)
from hook.plan import Plan

# 64 MB hold lxml's tree of about 1.5 MB of XML (measured: 23-25 MB of memory for each MB of XML).
MAX_DOMAIN_XML_BYTES = 1 << 20

# KubeVirt's parser reads nothing else (Go encoding/xml without a CharsetReader).
_ENCODINGS = ("UTF-8", "UTF8", "US-ASCII", "ASCII")

# KubeVirt's user aliases: ua-gpu-NAME, ua-hostdevice-NAME, ua-sriov-NAME, ua-dra-gpu-NAME, ua-dra-hostdevice-NAME.
_USER_ALIAS = re.compile(r"ua-(?:dra-)?(?:gpu|hostdevice|sriov)-(.+)", re.DOTALL)
_SRIOV_ALIAS = "ua-sriov-"
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_QEMU = "http://libvirt.org/schemas/domain/qemu/1.0"
_INDENT = re.compile(r"\n[ \t]*")


@dataclass(frozen=True, slots=True)
class ParsedDomain:
    """A domain and the tree that it was read from."""

    name: str
    guest: GuestDomain
    tree: "etree._ElementTree[etree._Element]"
    source: bytes

    @classmethod
    def nothing(cls, source: bytes) -> "ParsedDomain":
        """A domain of which nothing is known."""
        root = etree.Element("domain")
        return cls(name="", guest=_guest(root), tree=root.getroottree(), source=source)


def parse(domain_xml: bytes) -> ParsedDomain:
    """Parse the domain XML of a hook call.

    Raises:
        DomainXmlTooLarge: it is over MAX_DOMAIN_XML_BYTES.
        DomainXmlError: it is empty, malformed, has a DOCTYPE, or is no `<domain>` that libvirt could mean.
    """
    if len(domain_xml) > MAX_DOMAIN_XML_BYTES:
        raise DomainXmlTooLarge(
            f"cannot read the domain XML: it has {len(domain_xml)} bytes, at most {MAX_DOMAIN_XML_BYTES} are accepted"
        )
    if b"\0" in domain_xml:
        raise DomainXmlError("cannot parse the domain XML: it has NUL bytes, expected UTF-8")
    parser = etree.XMLParser(
        resolve_entities=False, no_network=True, load_dtd=False, huge_tree=False, strip_cdata=False
    )
    try:
        root = etree.fromstring(domain_xml, parser)
    except (etree.XMLSyntaxError, ValueError) as error:
        text = error.msg if isinstance(error, etree.XMLSyntaxError) else error
        raise DomainXmlError(f"cannot parse the domain XML: {text}") from None
    tree = root.getroottree()
    encoding = tree.docinfo.encoding or "UTF-8"
    if encoding.upper() not in _ENCODINGS:
        raise DomainXmlError(f"cannot use the domain XML: its encoding is {encoding}, expected UTF-8")
    if tree.docinfo.doctype:
        raise DomainXmlError("cannot use the domain XML: it has a DOCTYPE, expected none")
    if root.tag != "domain":
        raise DomainXmlError(f"cannot use the domain XML: its root is <{root.tag!s}>, expected <domain>")
    return ParsedDomain(name=root.findtext("name", ""), guest=_guest(root), tree=tree, source=domain_xml)


def apply(domain: ParsedDomain, plan: Plan) -> bytes:
    """Write the plan into the domain's tree and print it; an unchanged plan returns the very bytes that came in.

    <hostdev>…</hostdev>                        <hostdev>…<address type="pci" … bus="0x12" …/></hostdev>
                                          →     <controller type="pci" index="17" model="pcie-expander-bus">…
                                                <controller type="pci" index="18" model="pcie-root-port">…
    """
    if not plan.is_changed:
        return domain.source
    devices = domain.tree.getroot().find("devices")
    if devices is None:
        return domain.source
    keys = {device.hostdev.key for device in plan.devices}
    elements = {key: element for key, element in enumerate(devices) if key in keys}
    for device in plan.devices:
        element = elements[device.hostdev.key]
        if device.place is not None:
            _set_address(element, device.place.address, is_multifunction=device.place.is_multifunction)
        elif device.address is None and device.hostdev.address is not None:
            _remove(element.find("address"))
    for element in devices.findall("controller"):
        if (controller := _pci_controller(element)) is not None and controller.is_own:
            _remove(element)
    _insert_controllers(devices, plan.controllers)
    _write_distances(domain.tree.getroot(), plan.distances)
    _write_fw_cfg(domain.tree.getroot(), plan.fw_cfg)
    _write_cliques(domain.tree.getroot(), plan.cliques)
    cpu = domain.tree.getroot().find("cpu")
    if plan.is_maxphysaddr_added and cpu is not None:
        _append(cpu, etree.Element("maxphysaddr", mode="passthrough"))
    return etree.tostring(domain.tree, encoding="UTF-8", xml_declaration=domain.source.lstrip().startswith(b"<?xml"))


def _guest(root: etree._Element) -> GuestDomain:
    os_type = root.find("os/type")
    devices = root.find("devices")
    # Only what may have a PCI address: a document has room for 260,000 elements.
    elements = (
        [(key, element) for key, element in enumerate(devices) if element.tag in slots.ORDER]
        if devices is not None
        else []
    )
    arch = _text(os_type, "arch") if os_type is not None else None
    machine = _text(os_type, "machine") if os_type is not None else None
    facts = [
        slots.DeviceFacts(
            key=key,
            tag=str(element.tag),
            type=_text(element, "type"),
            model=_model(element),
            bus=_text(element.find("target"), "bus") or _text(element, "bus"),
            target=_text(element.find("target"), "type"),
            index=_number(_text(element, "index")),
            address=_guest_address(element)[0],
            is_pci_addressable=_is_pci_addressable(element),
        )
        for key, element in elements
    ]
    endpoints: tuple[Endpoint, ...] = slots.endpoints(arch or "", facts)
    controllers = tuple(
        controller
        for _, element in elements
        if element.tag == "controller" and (controller := _pci_controller(element)) is not None
    )
    lists = CpuLists()
    own_aliases = {controller.alias for controller in controllers if controller.is_own}
    aliases = {alias.get("name", "") for alias in root.iterfind("devices/*/alias")}
    return GuestDomain(
        arch=arch or "",
        machine=machine or "",
        cells=tuple(
            Cell(id=cell_id, vcpus=_cpus(lists, _text(cell, "cpus")), has_distances=cell.find("distances") is not None)
            for position, cell in enumerate(root.iterfind("cpu/numa/cell"))
            if (cell_id := _cell_id(cell, position)) is not None
        ),
        memnodes=_memnodes(root, lists),
        pins=_pins(root, lists),
        controllers=controllers,
        hostdevs=tuple(hostdev for key, element in elements if (hostdev := _hostdev(key, element)) is not None),
        endpoints=endpoints,
        address_space=_address_space(root),
        aliases=frozenset(aliases - own_aliases),
        is_grace=root.find("devices/iommu[@model='smmuv3']") is not None
        or root.find("devices/hostdev/acpi[@nodeset]") is not None,
        cliques={
            device.get("alias", ""): found.get("value", "")
            for device in root.iterfind(f"{{{_QEMU}}}override/{{{_QEMU}}}device")
            for found in device.iterfind(f"{{{_QEMU}}}frontend/{{{_QEMU}}}property[@name='{clique.PROPERTY}']")
        },
        has_raw_cliques=any(
            clique.PROPERTY in argument.get("value", "")
            for argument in root.iterfind(f"{{{_QEMU}}}commandline/{{{_QEMU}}}arg")
        ),
    )


_DIGITS = 18  # of any number that is worth converting; memory in bytes has at most these

# libvirt's units of memory, whose case does not count (virScaleInteger): 4 k and 4 KiB are 4096 bytes, 4 KB are 4000.
_UNITS = {"b": 1, "byte": 1, "bytes": 1} | {
    f"{letter}{rest}": base**power
    for power, letter in enumerate("kmgtpe", start=1)
    for rest, base in (("", 1024), ("ib", 1024), ("b", 1000))
}


def _address_space(root: etree._Element) -> AddressSpace:
    memory = root.find("memory")
    unit = _UNITS.get((_text(memory, "unit") or "KiB").lower(), 1 << 10)
    digits = root.findtext("memory", "").strip()
    maxphysaddr = root.find("cpu/maxphysaddr")
    is_emulated = _text(maxphysaddr, "mode") == "emulate"
    return AddressSpace(
        memory_bytes=int(digits) * unit if digits.isascii() and digits.isdecimal() and len(digits) <= _DIGITS else 0,
        is_efi=root.find("os[@firmware='efi']") is not None or root.find("os/loader[@type='pflash']") is not None,
        cpu_mode=_text(root.find("cpu"), "mode"),
        has_maxphysaddr=maxphysaddr is not None,
        emulated_bits=_number(_text(maxphysaddr, "bits"), 64) if is_emulated else None,
    )


def _text(element: etree._Element | None, attribute: str) -> str | None:
    """An attribute, None when it is absent or empty (KubeVirt prints `type=""` for absent ones before v1.8)."""
    value = element.get(attribute) if element is not None else None
    return value or None


def _number(text: str | None, maximum: int = 0xFFFF_FFFF) -> int | None:
    """A number as libvirt writes it: decimal, or hex after 0x; anything else, or one too large, is None."""
    if text is None or not text.isascii():
        return None
    digits, base = (text[2:], 16) if text[:2] in ("0x", "0X") else (text, 10)
    if not digits.isalnum() or len(digits) > _DIGITS:
        return None
    try:
        number = int(digits, base)
    except ValueError:
        return None
    return number if number <= maximum else None


def _cell_id(cell: etree._Element, position: int) -> int | None:
    """The id of a cell; libvirt numbers cells without one in their order (formatdomain.html#guest-numa-topology)."""
    given = _text(cell, "id")
    return position if given is None else _number(given)


def _cpus(lists: CpuLists, text: str | None) -> CpuSet:
    try:
        return lists.parse(text or "")
    except ValueError:
        return frozenset()


def _memnodes(root: etree._Element, lists: CpuLists) -> Mapping[int, frozenset[int]]:
    memnodes: dict[int, frozenset[int]] = {}
    for memnode in root.iterfind("numatune/memnode"):
        cell = _number(_text(memnode, "cellid"))
        if cell is not None:
            memnodes[cell] = _cpus(lists, _text(memnode, "nodeset"))
    return memnodes


def _pins(root: etree._Element, lists: CpuLists) -> Mapping[int, CpuSet]:
    pins: dict[int, CpuSet] = {}
    for pin in root.iterfind("cputune/vcpupin"):
        vcpu = _number(_text(pin, "vcpu"))
        if vcpu is not None:
            pins[vcpu] = _cpus(lists, _text(pin, "cpuset"))
    return pins


def _model(element: etree._Element) -> str | None:
    """The model of a device: an attribute, or the child that interfaces, videos and others have."""
    model = element.find("model")
    return _text(element, "model") or _text(model, "type") or _text(model, "name")


def _is_pci_addressable(element: etree._Element) -> bool:
    """False when the device has an address that is not PCI (virtio-mmio, ccw, …)."""
    address = element.find("address")
    return address is None or _text(address, "type") in (None, "pci")


def _guest_address(element: etree._Element) -> tuple[GuestAddress | None, bool]:
    """The PCI address of a device and its multifunction flag.

    What is left out is 0, and bus 0 slot 0 asks libvirt for a place: virPCIDeviceAddressIsEmpty.
    """
    address = element.find("address")
    if address is None or _text(address, "type") not in (None, "pci"):
        return None, False
    bus, slot, function = (
        _number(_text(address, name) or "0", maximum) for name, maximum in (("bus", 255), ("slot", 31), ("function", 7))
    )
    if bus is None or slot is None or function is None or (bus, slot) == (0, 0):
        return None, False
    return GuestAddress(bus, slot, function), _text(address, "multifunction") == "on"


def _pci_controller(element: etree._Element) -> Controller | None:
    index = _number(_text(element, "index"), 255)
    if _text(element, "type") != "pci" or index is None:
        return None
    address, is_multifunction = _guest_address(element)
    target = element.find("target")
    return Controller(
        index=index,
        model=_text(element, "model") or "",
        alias=_text(element.find("alias"), "name"),
        address=address,
        is_multifunction=is_multifunction,
        bus_nr=_number(_text(target, "busNr"), 255),
        cell=_number(target.findtext("node", "").strip()) if target is not None else None,
        is_hotplug_off=_text(target, "hotplug") == "off",
    )


def _hostdev(key: int, element: etree._Element) -> Hostdev | None:
    """A passed-through PCI device or vfio-pci mdev; other hostdevs are none of the hook's business."""
    source = element.find("source/address")
    if source is None or element.tag not in ("hostdev", "interface"):
        return None
    kind = _text(element, "type")
    identity: PciAddress | str | None = None
    if kind == ("hostdev" if element.tag == "interface" else "pci"):
        identity = _host_address(source)
    elif kind == "mdev" and element.tag == "hostdev" and _text(element, "model") == "vfio-pci":
        uuid = (_text(source, "uuid") or "").lower()
        identity = uuid if _UUID.fullmatch(uuid) else None
    if identity is None:
        return None
    alias = _text(element.find("alias"), "name")
    named = _USER_ALIAS.fullmatch(alias or "")
    address, is_multifunction = _guest_address(element)
    return Hostdev(
        key=key,
        kind=Kind.MDEV if isinstance(identity, str) else Kind.PCI,
        name=named[1] if named is not None else str(identity),
        alias=alias,
        source=identity,
        address=address,
        is_multifunction=is_multifunction,
        is_virtual_function=element.tag == "interface" or (alias or "").startswith(_SRIOV_ALIAS),
    )


def _host_address(source: etree._Element) -> PciAddress | None:
    """The host address of a source; a domain and a function that are left out are 0."""
    domain, function = _number(_text(source, "domain") or "0"), _number(_text(source, "function") or "0", 7)
    bus, slot = _number(_text(source, "bus"), 255), _number(_text(source, "slot"), 31)
    if domain is None or bus is None or slot is None or function is None:
        return None
    return PciAddress(domain, bus, slot, function)


def _set_address(element: etree._Element, address: GuestAddress, *, is_multifunction: bool) -> None:
    """Set a device's guest address, in place where it has one, else as the last child."""
    child = element.find("address")
    if child is None:
        child = etree.Element("address")
        _append(element, child)
    for name in list(child.attrib):
        del child.attrib[name]
    child.set("type", "pci")
    child.set("domain", "0x0000")
    child.set("bus", f"{address.bus:#04x}")
    child.set("slot", f"{address.slot:#04x}")
    child.set("function", f"{address.function:#x}")
    if is_multifunction:
        child.set("multifunction", "on")


def _write_distances(root: etree._Element, distances: Mapping[int, Mapping[int, int]]) -> None:
    """Write `<cell id="0" …><distances><sibling id="1" value="21"/>…</distances></cell>` for each cell."""
    for position, cell in enumerate(root.iterfind("cpu/numa/cell")):
        cell_id = _cell_id(cell, position)
        row = distances.get(cell_id, {}) if cell_id is not None else {}
        if row:
            element = etree.Element("distances")
            _append(cell, element)
            for sibling, value in row.items():
                _append(element, etree.Element("sibling", id=str(sibling), value=str(value)))


def _write_fw_cfg(root: etree._Element, lines: tuple[FwCfgLine, ...]) -> None:
    """Write `<sysinfo type="fwcfg"><entry name="…">line</entry>…</sysinfo>`, in front of other `<sysinfo>`.

    KubeVirt holds one `<sysinfo>` and reads all that it finds into it, so the type of the last one must be the one
    that it had; lines of others in the same entry stay.
    """
    if not lines:
        return
    sysinfo = root.find("sysinfo[@type='fwcfg']")
    if sysinfo is None:
        sysinfo = etree.Element("sysinfo", type="fwcfg")
        first = root.find("sysinfo")
        _insert(root, len(root) if first is None else root.index(first), sysinfo)
    for line in lines:
        entry = next((e for e in sysinfo.iterfind("entry") if e.get("name") == line.entry), None)
        if entry is None:
            entry = etree.Element("entry", name=line.entry)
            _append(sysinfo, entry)
        others = [other for other in (entry.text or "").splitlines() if not other.startswith(line.start)]
        entry.text = "\n".join([*others, line.text])


def _write_cliques(root: etree._Element, cliques: Mapping[str, int]) -> None:
    """Write `<qemu:override>` with a property for each alias; what else is overridden stays."""
    if not cliques:
        return
    override = _qemu_child(root, "override")
    for alias, number in cliques.items():
        devices = (e for e in override.iterfind(f"{{{_QEMU}}}device") if e.get("alias") == alias)
        device = next(devices, None)
        if device is None:
            device = etree.Element(f"{{{_QEMU}}}device", alias=alias)
            _append(override, device)
        frontend = _qemu_child(device, "frontend")
        if frontend.find(f"{{{_QEMU}}}property[@name='{clique.PROPERTY}']") is None:
            _append(
                frontend,
                etree.Element(f"{{{_QEMU}}}property", name=clique.PROPERTY, type="unsigned", value=str(number)),
            )


def _qemu_child(parent: etree._Element, name: str) -> etree._Element:
    """The child of libvirt's namespace for QEMU, which is made when it is not there."""
    child = parent.find(f"{{{_QEMU}}}{name}")
    if child is None:
        child = etree.Element(f"{{{_QEMU}}}{name}", nsmap={"qemu": _QEMU})
        _append(parent, child)
    return child


def _insert_controllers(devices: etree._Element, controllers: tuple[Controller, ...]) -> None:
    """Put the hook's controllers behind the last controller of the domain."""
    others = devices.findall("controller")
    position = devices.index(others[-1]) + 1 if others else len(devices)
    for controller in controllers:
        element = etree.Element("controller", type="pci", index=str(controller.index), model=controller.model)
        _insert(devices, position, element)
        position += 1
        _fill(element, controller)


def _fill(element: etree._Element, controller: Controller) -> None:
    children: list[etree._Element] = []
    if controller.bus_nr is not None or controller.cell is not None or controller.is_hotplug_off:
        target = etree.Element("target")
        if controller.bus_nr is not None:
            target.set("busNr", str(controller.bus_nr))
        if controller.is_hotplug_off:
            target.set("hotplug", "off")
        children.append(target)
    children.append(etree.Element("alias", name=controller.alias or ""))
    for child in children:
        _append(element, child)
    if controller.cell is not None:
        node = etree.Element("node")
        node.text = str(controller.cell)
        _append(children[0], node)
    if controller.address is not None:
        _set_address(element, controller.address, is_multifunction=controller.is_multifunction)


def _insert(parent: etree._Element, position: int, child: etree._Element) -> None:
    """Insert a child on a line of its own, where the document has lines."""
    if position == len(parent):
        _append(parent, child)
    else:
        parent.insert(position, child)
        child.tail = parent[position - 1].tail if position else parent.text


def _append(parent: etree._Element, child: etree._Element) -> None:
    """Append a child on a line of its own, where the document has lines."""
    outer = _indent_of(parent)
    if outer is not None:
        inner = parent.text if len(parent) and parent.text and _INDENT.fullmatch(parent.text) else outer + "\t"
        if len(parent):
            parent[-1].tail = inner
        else:
            parent.text = inner
        child.tail = outer
    parent.append(child)


def _indent_of(element: etree._Element) -> str | None:
    """Newline and indentation in front of an element, or None where the document is on one line."""
    previous = element.getprevious()
    parent = element.getparent()
    text = previous.tail if previous is not None else parent.text if parent is not None else "\n"
    return text if text is not None and _INDENT.fullmatch(text) else None


def _remove(element: etree._Element | None) -> None:
    """Remove an element and the white space before it; text around it is kept."""
    if element is None or (parent := element.getparent()) is None:
        return
    previous = element.getprevious()
    before = (parent.text if previous is None else previous.tail) or ""
    after = (before if before.strip() else "") + (element.tail or "")
    if previous is None:
        parent.text = after or None
    else:
        previous.tail = after or None
    parent.remove(element)
