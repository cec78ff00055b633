"""NCCL's own work, done again from the rules of its source: read a file, look at sysfs, rate paths; must not use hook.nccl.

Sources: NCCL src/graph/xml.cc and xml.h (reader, detection), topo.cc (graph), paths.cc (paths), topo.h (figures), 2.30.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hook.address import PciAddress
from hook.guest import Model
from hook.host import HostTopology, PciFunction
from hook.plan import Plan

MAX_STR_LEN, MAX_ATTRIBUTES, MAX_SUBS, MAX_NODES = 255, 16, 640, 256
VERSIONS = {"NCCL": "1", "RCCL": "2"}

# Which elements the reader takes below which; it drops every other with all that is below it.
NESTING = {
    None: ("system",),
    "system": ("cpu",),
    "cpu": ("pci", "nic"),
    "pci": ("pci", "gpu", "nic", "pcilink"),
    "gpu": ("nvlink", "c2c"),
    "nic": ("net",),
}
# Without these NCCL stops: what it reads with xmlGetAttrStr or xmlGetAttrInt and does not fill in by itself.
REQUIRED = {"system": ("version",), "cpu": ("numaid",), "pci": ("busid", "class", "link_speed", "link_width")}
FORMS = {
    "version": r"[12]",
    "numaid": r"-1|\d{1,4}",
    "affinity": r"[0-9a-f]{8}(,[0-9a-f]{8})*",
    "busid": r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]",
    "class": r"0x[0-9a-f]{6}",
    "vendor": r"0x[0-9a-f]{4}",
    "device": r"0x[0-9a-f]{4}",
    "subsystem_vendor": r"0x[0-9a-f]{4}",
    "subsystem_device": r"0x[0-9a-f]{4}",
    "link_speed": r"(\d+(\.\d)? GT/s( PCIe)?)?",
    "link_width": r"\d{1,2}",
}
# kvDictPciGen: a text that starts with one of these has that speed, in 100 Mbit/s a lane; every other has the last.
SPEEDS = {"2.5 GT/s": 15, "5 GT/s": 30, "8 GT/s": 60, "16 GT/s": 120, "32 GT/s": 240}
SPEEDS |= {"5.0 GT/s PCIe": 30, "8.0 GT/s PCIe": 60, "16.0 GT/s PCIe": 120, "32.0 GT/s PCIe": 240}
SPEEDS |= {"64.0 GT/s PCIe": 480}
DEFAULT_SPEED, DEFAULT_WIDTH = 60, 16
LOCAL_GBS = 5000.0
# Between sockets, by the oldest model of a vendor: SKL_QPI_BW, AMD_ZEN12_BW. The same for host and guest.
SOCKET_GBS = {"intel": 10.0, "amd": 16.0}


class Refused(Exception):
    """NCCL's reader would stop, or would drop something silently."""


@dataclass(eq=False)
class Element:
    """An element of the file, as NCCL holds it."""

    name: str
    attributes: dict[str, str]
    children: list["Element"] = field(default_factory=list)

    def walk(self) -> Iterable["Element"]:
        yield self
        for child in self.children:
            yield from child.walk()


class _Reader:
    """Character by character, as xml.cc does: it knows no entities, no text and no white space but blanks and newlines."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.count = 0

    def next(self) -> str:
        if self.position >= len(self.text):
            raise Refused("unexpected end")
        self.position += 1
        return self.text[self.position - 1]

    def token(self) -> tuple[str, str | None, str]:
        """A name up to blank, `>`, `/` or newline, or a name with its value; and the character after it."""
        name = ""
        while True:
            c = self.next()
            if c == "=":
                quote = self.next()
                if quote not in "\"'":
                    raise Refused(f"{name}: expected a quote")
                value = ""
                while (c := self.next()) != quote:
                    value += c
                self._check(value)
                return name, value, self.next()
            if c in " >/\n\r":
                return name, None, c
            name += c
            self._check(name)

    @staticmethod
    def _check(text: str) -> None:
        if len(text) >= MAX_STR_LEN:
            raise Refused(f"{text[:20]}… is longer than {MAX_STR_LEN - 1}")

    def node(self) -> tuple[str, str, dict[str, str]] | None:
        """open, close or single; name; attributes. None at the end."""
        while self.position < len(self.text) and self.text[self.position] in " \n\r":
            self.position += 1
        if self.position >= len(self.text):
            return None
        if (c := self.next()) != "<":
            raise Refused(f"expected '<', got {c!r}")
        name, _, c = self.token()
        if name == "" and c == "/":
            name, _, c = self.token()
            if c != ">":
                raise Refused(f"trailing {c!r} in a closing tag")
            return "close", name, {}
        attributes: dict[str, str] = {}
        while c == " ":
            key, value, c = self.token()
            if value is None or key in attributes:
                raise Refused(f"<{name}> {key!r}: no value, or twice")
            attributes[key] = value
        if len(attributes) > MAX_ATTRIBUTES:
            raise Refused(f"<{name}> has {len(attributes)} attributes")
        kind = "open"
        if c == "/":
            kind = "single"
            _, _, c = self.token()
        if c != ">":
            raise Refused(f"expected '>', got {c!r}")
        return kind, name, attributes

    def load(self, head: Element | None) -> list[Element]:
        found: list[Element] = []
        while (read := self.node()) is not None:
            kind, name, attributes = read
            if kind == "close":
                if head is None or name != head.name:
                    raise Refused(f"</{name}> does not close <{head.name if head else ''}>")
                return found
            if name not in NESTING.get(head.name if head else None, ()):
                raise Refused(f"<{name}> would be dropped below <{head.name if head else ''}>")
            self.count += 1
            if self.count > MAX_NODES or len(found) == MAX_SUBS:
                raise Refused("too many nodes")
            element = Element(name, attributes)
            found.append(element)
            if kind == "open":
                element.children = self.load(element)
        if head is not None:
            raise Refused(f"<{head.name}> is not closed")
        return found


def read(text: str, library: str = "NCCL") -> Element:
    """Read a whole file.

    Raises:
        Refused: NCCL would stop, or drop something; or an attribute is missing, has another form, or is unknown.
    """
    found = _Reader(text).load(None)
    if [element.name for element in found] != ["system"]:
        raise Refused("expected one <system>")
    seen: set[str] = set()
    for element in found[0].walk():
        for name in REQUIRED.get(element.name, ()):
            if name not in element.attributes:
                raise Refused(f"<{element.name}> has no {name}")
        for name, value in element.attributes.items():
            if not re.fullmatch(FORMS.get(name, "$^"), value):
                raise Refused(f"<{element.name}> {name}={value!r}")
        name = element.attributes.get("busid", "cpu" + element.attributes.get("numaid", ""))
        if element.name in ("pci", "cpu") and name in seen:
            raise Refused(f"{name} is there twice")
        seen.add(name)
    if found[0].attributes["version"] != VERSIONS[library]:
        raise Refused(f"version {found[0].attributes['version']}, {VERSIONS[library]} needed")
    return found[0]


# sysfs, where NCCL looks for what is not in the file.


def card(function: PciFunction, address: PciAddress) -> PciAddress:
    """The function by which NCCL looks for a device: slot 0 function 0 for a VF, function 0 for a network card.

    On a host the VF's card is its physical function; a guest sees VFs as devices of their own.
    """
    if not function.is_network:
        return address
    return replace(function.physical_function or address, function=0)


@dataclass(frozen=True)
class Ports:
    """Guest bridges as QEMU emulates them, by address: what they say of their link."""

    links: Mapping[PciAddress, tuple[int | None, int | None]]


# Seen in guests of QEMU 7.2 and 10.0: max_link_speed in MT/s and max_link_width.
EMULATED: Mapping[str, tuple[int | None, int | None]] = {
    Model.ROOT_PORT: (16000, 32),
    Model.UPSTREAM_PORT: (2500, 1),
    Model.DOWNSTREAM_PORT: (None, None),
}


def guest_sysfs(plan: Plan, host: HostTopology) -> HostTopology:
    """The guest as its sysfs will show it, with the links of QEMU's ports."""
    guest = plan.guest_topology(host)
    models = {c.index: c.model for c in plan.controllers}
    links = {bdf: EMULATED[models[index]] for index, bdf in plan.bridge_bdfs.items() if models[index] in EMULATED}
    return replace(
        guest,
        functions={
            address: replace(function, max_speed_mts=links[address][0], max_width=links[address][1])
            if address in links
            else function
            for address, function in guest.functions.items()
        },
    )


def _speed_text(mts: int | None) -> str:
    return f"{mts / 1000:.1f} GT/s PCIe" if mts is not None else ""


def _fill(element: Element, sysfs: HostTopology, address: PciAddress) -> None:
    """ncclTopoGetXmlFromSys: set what the file does not say."""
    function = sysfs.functions.get(address)
    port = sysfs.functions.get(function.bridges[-1]) if function is not None and function.bridges else None
    if function is not None:
        element.attributes["class"] = f"{function.class_code or 0:#08x}"
        for name in ("vendor", "device", "subsystem_vendor", "subsystem_device"):
            if getattr(function, name) is not None:
                element.attributes.setdefault(name, f"{getattr(function, name):#06x}")
    speeds = [end.max_speed_mts for end in (function, port) if end is not None and end.max_speed_mts is not None]
    widths = [end.max_width or 0 if end is not None else 0 for end in (function, port)]
    element.attributes.setdefault("link_speed", _speed_text(min(speeds, default=None)))
    element.attributes.setdefault("link_width", str(min(widths)) if function is not None else "")


def complete(system: Element, sysfs: HostTopology, devices: Iterable[PciAddress]) -> None:
    """Add the devices that are not in the file, with the switches above them: two steps up for each."""
    for device in devices:
        address, child = device, None
        while True:
            element = _find(system, address)
            is_new = element is None
            if element is None:
                element = Element("pci", {"busid": str(address)})
            _fill(element, sysfs, address)
            if child is not None:
                element.children.append(child)
            if not is_new:
                for above in _chain(system, element)[:-1]:
                    if above.name == "pci":
                        _fill(above, sysfs, PciAddress.parse(above.attributes["busid"]))
                break
            child = element
            function = sysfs.functions.get(address)
            if function is None or len(function.bridges) < 2:
                numa = function.numa_node if function is not None and function.numa_node is not None else -1
                cpu = next((c for c in system.children if c.attributes["numaid"] == str(numa)), None)
                if cpu is None:
                    cpu = Element("cpu", {"numaid": str(numa)})
                    system.children.append(cpu)
                cpu.children.append(element)
                break
            address = function.bridges[-2]


def _find(system: Element, address: PciAddress) -> Element | None:
    return next((e for e in system.walk() if e.attributes.get("busid") == str(address)), None)


def _chain(top: Element, wanted: Element) -> list[Element]:
    """The elements from the top down to this one."""
    if top is wanted:
        return [top]
    for child in top.children:
        below = _chain(child, wanted)
        if below:
            return [top, *below]
    return []


# The graph, and paths in it.


@dataclass(eq=False)
class Node:
    """A node of NCCL's graph."""

    name: str
    type: str  # CPU, PCI (a switch) or DEV (a GPU or NIC)
    device: int = 0  # vendor, device, subsystem vendor, subsystem device; of a switch
    links: list[tuple["Node", str, float]] = field(default_factory=list)  # to, PCI or SYS, GB/s

    def connect(self, other: "Node", kind: str, gbs: float) -> None:
        self.links.append((other, kind, gbs))


def _gbs(element: Element) -> float:
    text = element.attributes["link_speed"]
    speed = next((value for start, value in SPEEDS.items() if text.startswith(start)), DEFAULT_SPEED)
    width = int(element.attributes["link_width"] or 0) or DEFAULT_WIDTH
    return width * speed / 80


def graph(system: Element, devices: Iterable[PciAddress], vendor: str) -> dict[str, Node]:
    """The nodes by busid or `cpuN`, without branches that lead to no device, with switches fused as NCCL does.

    vendor: intel or amd, of the CPU.
    """
    wanted = {str(device) for device in devices}
    nodes: dict[str, Node] = {}

    def add(element: Element, parent: Node) -> None:
        busid = element.attributes["busid"]
        if not wanted & {e.attributes.get("busid") for e in element.walk()}:
            return
        names = ("vendor", "device", "subsystem_vendor", "subsystem_device")
        ids = [int(element.attributes.get(name, "0"), 16) for name in names]
        device = ids[0] << 48 | ids[1] << 32 | ids[2] << 16 | ids[3]
        node = nodes[busid] = Node(busid, "DEV" if busid in wanted else "PCI", device)
        for child in element.children:
            if child.name == "pci":
                add(child, node)
        node.connect(parent, "PCI", _gbs(element))
        parent.connect(node, "PCI", _gbs(element))

    cpus = []
    for element in system.children:
        cpu = Node(f"cpu{element.attributes['numaid']}", "CPU")
        for child in element.children:
            add(child, cpu)
        if cpu.links:
            nodes[cpu.name] = cpu
            cpus.append(cpu)
    _flatten(nodes)
    for cpu in cpus:
        for other in cpus:
            if cpu is not other:
                cpu.connect(other, "SYS", SOCKET_GBS[vendor])
    return nodes


def _generation(device: int, level: int) -> int:
    """getBcmGen."""
    if device & ~0xFFF == 0x1000_C010_1000_A000:
        return 4
    return 5 if device & ~0xFFF == 0x1000_C030_1000_0000 | level * 0x1000 else 0


def _flatten(nodes: dict[str, Node]) -> None:
    """ncclTopoFlattenBcmSwitches: a chip that shows itself as a switch below a switch is one."""
    while True:
        found = next((n for n in nodes.values() if n.type == "PCI" and _generation(n.device, 0)), None)
        if found is None:
            return
        generation = _generation(found.device, 0)
        subs = [n for n, _, _ in found.links if n.type == "PCI" and _generation(n.device, 1) == generation]
        for sub in subs:
            found.links = [link for link in found.links if link[0] is not sub]
            for below, kind, gbs in sub.links:
                if below is not found:
                    found.links.append((below, kind, gbs))
                    below.links = [(found if n is sub else n, k, bw) for n, k, bw in below.links]
            del nodes[sub.name]
        found.device |= 0xFFFF


ORDER = ("LOC", "PIX", "PXB", "PHB", "SYS")


def paths(start: Node) -> dict[str, tuple[str, float]]:
    """Class and GB/s of the path to every node (ncclTopoSetPaths)."""
    found: dict[Node, tuple[int, float, int]] = {start: (0, LOCAL_GBS, 0)}  # hops, GB/s, class
    todo = [start]
    while todo:
        following: list[Node] = []
        for node in todo:
            hops, gbs, level = found[node]
            if node.type == "DEV" and node is not start:
                continue
            for other, kind, link_gbs in node.links:
                bandwidth = min(gbs, link_gbs)
                known_hops, known_gbs, _ = found.get(other, (0, 0.0, 0))
                if not ((known_gbs == 0 or known_hops > hops) and known_gbs < bandwidth):
                    continue
                step = "PIX" if kind == "PCI" else "SYS"
                if node.type == other.type == "PCI":
                    step = "PXB"
                if kind == "PCI" and "CPU" in (node.type, other.type):
                    step = "PHB"
                found[other] = hops + 1, bandwidth, max(level, ORDER.index(step))
                if other not in following:
                    following.append(other)
        todo = following
    return {node.name: (ORDER[level], gbs) for node, (_, gbs, level) in found.items()}


Rating = tuple[str, float]  # class, GB/s


def ratings(
    file: str | None, sysfs: HostTopology, devices: Sequence[PciAddress], vendor: str, library: str = "NCCL"
) -> dict[tuple[int, int], Rating]:
    """How NCCL rates the pairs of these devices, by their positions, when it finds this file and this sysfs."""
    cards = [card(sysfs.functions[device], device) for device in devices]
    system = read(file, library) if file is not None else Element("system", {"version": VERSIONS[library]})
    complete(system, sysfs, cards)
    nodes = graph(system, cards, vendor)
    rated: dict[tuple[int, int], Rating] = {}
    for position, one in enumerate(cards):
        found = paths(nodes[str(one)])
        rated |= {(position, other): found[str(cards[other])] for other in range(position + 1, len(cards))}
    return rated
