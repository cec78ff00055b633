"""Random hosts and random VMs on them, as the builders of tests/build.py write them; must not know what the hook does.

Large things come from few choices ("a card with 64 VFs"), so that hypothesis can make them and take them apart again:
a failure ends in the smallest input, printed as a case for tests/test_cases.py.

FUZZ=20 in the environment means 20 times as many inputs, other ones each time; else they are always the same.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from hook.address import format_cpu_list
from tests.build import controller, host, hostdev, mdev, nic, vm
from tests.test_cases import Case

FUZZ = int(os.environ.get("FUZZ", "0"))

MAX_NODES = 16
MAX_DEVICES = 200
MAX_DEPTH = 5
MAX_CONTROLLERS = 240


def examples(count: int) -> settings:
    """How many inputs a property is tried on, and whether they are the same each time."""
    return settings(
        max_examples=count * max(1, FUZZ),
        derandomize=not FUZZ,
        database=None,
        deadline=None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )


@dataclass(frozen=True)
class HostParts:
    """The arguments of build.host, and what can be passed through."""

    devices: Mapping[str, Mapping[str, object]]  # attributes by path below /sys/devices
    nodes: Mapping[int, str]
    distances: Mapping[int, str] | None
    functions: Sequence[str] = ()  # addresses of the functions that are no bridges
    mediated_devices: Mapping[str, str] = field(default_factory=dict)  # path of the parent by UUID

    def recording(self) -> str:
        return host(self.devices, nodes=self.nodes, distances=self.distances, extra=self._mdevs())

    def used_nodes(self) -> set[int]:
        """The nodes of the devices."""
        return {int(str(attributes["numa_node"])) for attributes in self.devices.values()} & set(self.nodes)

    def _mdevs(self) -> str:
        return "".join(
            f"bus/mdev/devices/{uuid} -> ../../../devices/{parent}/{uuid}\n"
            for uuid, parent in self.mediated_devices.items()
        )

    def __repr__(self) -> str:
        extra = f", extra={self._mdevs()!r}" if self.mediated_devices else ""
        distances = f", distances={dict(self.distances)!r}" if self.distances is not None else ""
        return f"host({dict(self.devices)!r}, nodes={dict(self.nodes)!r}{distances}{extra})"


@dataclass(frozen=True)
class Situation:
    """A VM on a host; printed, it is a case."""

    host: HostParts
    devices: Sequence[str]  # children of <devices>
    vm: Mapping[str, Any]  # the other arguments of build.vm
    flags: Mapping[str, Any] = field(default_factory=dict)
    vmi: Mapping[str, Any] = field(default_factory=dict)

    @property
    def case(self) -> Case:
        return Case("random", vm(self.devices, **self.vm), self.host.recording(), self.flags, self.vmi)

    def __repr__(self) -> str:
        rest = "".join(f", {key}={value!r}" for key, value in self.vm.items())
        tail = f", flags={self.flags!r}" * bool(self.flags) + f", vmi={self.vmi!r}" * bool(self.vmi)
        return f'"name-the-oddity": Case("say what is odd", vm({list(self.devices)!r}{rest}), {self.host!r}{tail}),'

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        del cycle
        printer.text(repr(self))

    def without(self, devices: Sequence[str]) -> "Situation":
        return replace(self, devices=[device for device in self.devices if device not in devices])


# --- hosts

_BRIDGE = "0x060400"
_CLASSES = ("0x030200", "0x020000", "0x120000", "0x010802", "0x068000", "0x040300")
_BROADCOM = {"vendor": "0x1000", "device": "0xc030", "subsystem_vendor": "0x1000"}
# Three BARs as the kernel shows them: 16 MiB below 4 GiB, 64 GiB and 32 MiB prefetchable above.
_LARGE = (
    "0x00000000f0000000 0x00000000f0ffffff 0x0000000000040200\\n"
    "0x0000002000000000 0x0000002fffffffff 0x000000000014220c\\n"
    "0x0000000000000000 0x0000000000000000 0x0000000000000000\\n"
    "0x0000003000000000 0x0000003001ffffff 0x000000000014220c"
)
_RESOURCES = (None, None, None, _LARGE, "0x0000000000003000 0x000000000000307f 0x0000000000040101")
_ARRANGEMENTS = ("ports", "switch", "card", "virtual functions", "mediated devices", "integrated")


@dataclass
class _Bus:
    """A bus that devices can hang below."""

    path: str
    domain: int
    number: int
    depth: int  # bridges above
    root: "_Root"
    next_slot: int = 0


@dataclass
class _Root:
    last_bus: int  # the highest number that its buses may have
    next_bus: int
    node: int


@dataclass
class _HostBuilder:
    devices: dict[str, dict[str, object]] = field(default_factory=dict)
    functions: list[str] = field(default_factory=list)
    mediated_devices: dict[str, str] = field(default_factory=dict)
    buses: list[_Bus] = field(default_factory=list)

    def has_room(self, bus: _Bus, buses: int = 0) -> bool:
        return (
            bus.next_slot < 32
            and bus.root.next_bus + buses <= bus.root.last_bus + 1
            and len(self.functions) + len(self.mediated_devices) < MAX_DEVICES
        )

    def function(self, bus: _Bus, attributes: Mapping[str, object], slot: int, function: int = 0) -> str:
        path = f"{bus.path}/{bus.domain:04x}:{bus.number:02x}:{slot:02x}.{function}"
        self.devices[path] = {key: value for key, value in attributes.items() if value is not None}
        if attributes["class"] != _BRIDGE:
            self.functions.append(path.rpartition("/")[2])
        return path

    def device(self, bus: _Bus, attributes: Mapping[str, object]) -> str:
        """A function in a slot of its own."""
        bus.next_slot += 1
        return self.function(bus, attributes, bus.next_slot - 1)

    def bridge(self, bus: _Bus, attributes: Mapping[str, object]) -> _Bus:
        path = self.device(bus, {**attributes, "class": _BRIDGE, "resource": None})
        below = _Bus(path, bus.domain, bus.root.next_bus, bus.depth + 1, bus.root)
        bus.root.next_bus += 1
        self.buses.append(below)
        return below

    def group(self, bus: _Bus, arrangement: str, count: int, attributes: Mapping[str, object]) -> None:
        """Hang some devices below a bus, as many as there is room for."""
        match arrangement:
            case "ports" if bus.depth < MAX_DEPTH:
                for _ in range(count):
                    if self.has_room(bus, 1):
                        self.device(self.bridge(bus, attributes), attributes)
            case "switch" if bus.depth + 3 <= MAX_DEPTH and self.has_room(bus, count + 2):
                inner = self.bridge(self.bridge(bus, attributes), {**attributes, **_BROADCOM})
                for _ in range(count):
                    if self.has_room(inner, 1):
                        self.device(self.bridge(inner, attributes), attributes)
            case "card" if self.has_room(bus):
                for function in range(min(count, 8)):
                    self.function(bus, attributes, bus.next_slot, function)
                bus.next_slot += 1
            case "virtual functions" if self.has_room(bus):
                physical = self.device(bus, attributes).rpartition("/")[2]
                for number in range(count):
                    if self.has_room(bus):
                        virtual = {**attributes, "physfn": physical, "numa_node": -1, "resource": None}
                        self.function(bus, virtual, bus.next_slot, number % 8)
                        bus.next_slot += number % 8 == 7
                bus.next_slot += 1
            case "mediated devices" if self.has_room(bus):
                parent = self.device(bus, attributes)
                for _ in range(count):
                    uuid = f"4b20d080-1b54-4048-85b3-{len(self.mediated_devices):012x}"
                    self.mediated_devices[uuid] = parent
            case _:
                for _ in range(count):
                    if self.has_room(bus):
                        self.device(bus, attributes)


@st.composite
def hosts(draw: st.DrawFn) -> HostParts:
    """Up to 16 nodes with holes in their ids, up to 200 devices in several domains, up to 5 bridges deep."""
    ids = draw(st.lists(st.integers(0, 31), min_size=1, max_size=MAX_NODES, unique=True))
    no_cpus = draw(st.sets(st.sampled_from(ids), max_size=3))
    step = draw(st.sampled_from((1, len(ids))))  # CPUs numbered node by node, or dealt like cards
    nodes = {
        node: ""
        if node in no_cpus
        else format_cpu_list(frozenset((place * 4 + n) if step == 1 else (place + n * step) for n in range(4)))
        for place, node in enumerate(ids)
    }
    builder = _HostBuilder()
    roots = draw(st.lists(st.tuples(st.sampled_from((0, 0, 0, 1, 0x10000)), st.sampled_from([*ids, -1])), max_size=6))
    for place, (domain, node) in enumerate(roots or [(0, ids[0])]):
        # Not bus 0: libvirt looks at the configuration space of a device that this machine happens to have.
        first = 0x10 + place * 0x26
        root = _Root(last_bus=first + 0x25, next_bus=first + 1, node=node)
        builder.buses.append(_Bus(f"pci{domain:04x}:{first:02x}", domain, first, 0, root))
    groups = draw(
        st.lists(
            st.tuples(
                st.integers(0, 30),
                st.sampled_from(_ARRANGEMENTS),
                st.sampled_from((1, 1, 2, 3, 8, 33, 64)),
                st.sampled_from(_CLASSES),
                st.sampled_from((None, None, None, None, -1, *ids, 99)),
                st.sampled_from(_RESOURCES),
                st.sampled_from((None, None, *nodes.values(), "0-63")),
            ),
            min_size=1,
            max_size=8,
        )
    )
    for where, arrangement, count, class_code, node_of_its_own, resource, local_cpus in groups:
        bus = builder.buses[where % len(builder.buses)]
        attributes = {
            "numa_node": bus.root.node if node_of_its_own is None else node_of_its_own,
            "class": class_code,
            "resource": resource,
            "local_cpulist": local_cpus,
        }
        builder.group(bus, arrangement, count, attributes)
    return HostParts(
        devices=builder.devices,
        nodes=nodes,
        distances=_distances(ids, draw(st.sampled_from(("absent", "near and far", "all equal")))),
        functions=builder.functions,
        mediated_devices=builder.mediated_devices,
    )


def _distances(ids: Sequence[int], kind: str) -> Mapping[int, str] | None:
    if kind == "absent":
        return None
    step = 2 if kind == "near and far" else 0
    # The kernel prints one number for each node in ascending order.
    return {a: " ".join("10" if a == b else str(20 + step * abs(a - b)) for b in sorted(ids)) for a in ids}


# --- VMs

_DISK = '<disk type="file"{model}><source file="/d{n}.img"/><target dev="vd{letters}" bus="virtio"/></disk>'
_OTHERS: Mapping[str, Callable[[int], str]] = {
    "virtio NIC": lambda n: nic(dev=f"tap{n}"),
    "transitional NIC": lambda n: nic("virtio-transitional", f"tap{n}"),
    "e1000e NIC": lambda n: nic("e1000e", f"tap{n}"),
    "conventional NIC": lambda n: nic("e1000", f"tap{n}"),
    "virtio disk": lambda n: _DISK.format(n=n, letters=_letters(n), model=""),
    "transitional disk": lambda n: _DISK.format(n=n, letters=_letters(n), model=' model="virtio-transitional"'),
    "virtio controller": lambda n: f'<controller type="scsi" index="{n}" model="virtio-non-transitional"/>',
    "random numbers": lambda _: '<rng model="virtio"><backend model="random">/dev/urandom</backend></rng>',
    "tablet": lambda _: '<input type="tablet" bus="virtio"/>',
}
# Conventional devices beyond the 31 of one bridge make libvirt add another, which the hook does not foresee.
_MOST = {"transitional NIC": 9, "conventional NIC": 9, "transitional disk": 9}
# Those of which there can be one.
_SINGLES = (
    '<memballoon model="none"/>',
    '<memballoon model="virtio"/>',
    '<watchdog model="i6300esb" action="reset"/>',
    '<video><model type="virtio"/></video>',
    '<video><model type="bochs"/></video>',
    '<controller type="virtio-serial" index="0"/>',
)
_PREFIXES = ("ua-gpu-", "ua-hostdevice-", "ua-sriov-", "ua-dra-gpu-", "", "interface")


def _letters(number: int) -> str:
    return (_letters(number // 26 - 1) if number >= 26 else "") + chr(ord("a") + number % 26)


def _passed_through(source: str, form: str, name: str, address: str = "") -> str:
    if "-" in source:
        return mdev(source, name)
    if form == "interface":
        # KubeVirt writes hostdevs; <interface type='hostdev'> is what other managers write.
        text = (
            hostdev(source, address=address).replace("<hostdev ", "<interface ").replace("</hostdev>", "</interface>")
        )
        return text.replace('type="pci" managed', 'type="hostdev" managed', 1)
    return hostdev(source, name if form else None, prefix=form, address=address)


@dataclass
class _Places:
    """Controllers that are there already, and free places below them for passed-through devices."""

    controllers: list[str] = field(default_factory=list)
    free: list[str] = field(default_factory=list)
    next_index: int = 1
    next_slot: int = 2

    def add(self, model: str, address: str = "", **rest: Any) -> int:
        self.controllers.append(controller(self.next_index, model, address, **rest))
        self.next_index += 1
        return self.next_index - 1

    def root_slot(self) -> str:
        self.next_slot += 1
        return f"00:{self.next_slot - 1:02x}.0"

    def beyond(self, *gaps: int) -> list[str]:
        """Addresses that a user can give: libvirt adds their ports, and all ports below."""
        return [f"{self.next_index + gap:02x}:00.0" for gap in gaps if self.next_index + gap <= 255]

    def ports(self, count: int, *, addressed: bool) -> None:
        """Root ports, eight to a slot where they have an address, for which there are 26 slots."""
        first = self.next_slot
        count = min(count, 120) if addressed else count
        for number in range(count):
            address = f"00:{first + number // 8:02x}.{number % 8}" if addressed else ""
            index = self.add("pcie-root-port", address)
            if number < 3:
                self.free.append(f"{index:02x}:00.0")
        self.next_slot += -(-count // 8) if addressed else 0

    def expander(self, bus_nr: int, node: int | None, count: int) -> None:
        expander = self.add("pcie-expander-bus", self.root_slot(), bus_nr=bus_nr, node=node)
        for slot in range(count):
            port = self.add("pcie-root-port", f"{expander:02x}:{slot:02x}.0")
            self.free.append(f"{port:02x}:00.0")

    def switch(self) -> None:
        upstream = self.add("pcie-switch-upstream-port", f"{self.add('pcie-root-port', self.root_slot()):02x}:00.0")
        self.free.append(f"{self.add('pcie-switch-downstream-port', f'{upstream:02x}:00.0'):02x}:00.0")


@st.composite
def _places(draw: st.DrawFn, cells: Sequence[int]) -> _Places:
    """Whatever stands in the domain already: ports, expanders and switches of somebody else."""
    places = _Places()
    if draw(st.booleans()):
        places.controllers.append(controller(0, "pcie-root"))
    if draw(st.booleans()):
        return places
    bus_nr = draw(st.sampled_from((40, 100, 200)))
    for _ in range(draw(st.integers(0, 2))):
        count = draw(st.sampled_from((0, 1, 2, 7)))
        places.expander(bus_nr, draw(st.sampled_from([None, *cells])), count)
        bus_nr += count + 1 + draw(st.integers(0, 20))
    if draw(st.booleans()):
        places.switch()
    if draw(st.booleans()):
        places.ports(
            draw(st.sampled_from((1, 5, 16, 16, 40, 120, 190, MAX_CONTROLLERS))), addressed=draw(st.booleans())
        )
        places.next_index += draw(st.sampled_from((0, 0, 1, 9)))
        places.ports(draw(st.sampled_from((0, 1))), addressed=False)
    return places


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    """A VM as KubeVirt or another manager could write it, on a random host, with a random policy."""
    parts = draw(hosts())
    arch, machine = draw(
        st.sampled_from((("x86_64", "q35"), ("x86_64", "q35"), ("x86_64", "q35"), ("aarch64", "virt")))
    )
    nodes = draw(
        st.one_of(
            st.permutations(sorted(parts.used_nodes())),
            st.permutations(list(parts.nodes)),
            st.lists(st.sampled_from(list(parts.nodes)), max_size=8),
        )
    )
    cells = draw(st.permutations(range(len(nodes))))
    memnodes, pins = {}, {}
    for cell, node in zip(cells, nodes, strict=True):
        bound_by = draw(
            st.sampled_from(("memory",) * 4 + ("memory and CPUs", "memory and CPUs", "CPUs", "two nodes", "nothing"))
        )
        if "memory" in bound_by:
            memnodes[cell] = str(node)
        if bound_by == "two nodes":
            memnodes[cell] = f"{node},{draw(st.sampled_from(nodes))}"
        if "CPUs" in bound_by and parts.nodes[node]:
            pins[cell] = parts.nodes[node]
    places = draw(_places(cells))
    passed = draw(_hostdevs(parts, [*places.free, *places.beyond(7)]))
    others = []
    wanted = st.tuples(st.sampled_from(list(_OTHERS)), st.sampled_from((1, 1, 2, 9, 30)))
    for kind, count in draw(st.lists(wanted, max_size=4, unique_by=_kind)):
        others += [_OTHERS[kind](n + 30 * list(_OTHERS).index(kind)) for n in range(min(count, _MOST.get(kind, count)))]
    others += draw(st.lists(st.sampled_from(_SINGLES), max_size=3, unique_by=lambda text: text[:12]))
    chosen = draw(st.sampled_from(("", "", "00:1e.0", "00:1c.0", *places.beyond(0, 4))))
    if chosen:
        bus, _, slot = chosen.removesuffix(".0").partition(":")
        address = f'<address type="pci" domain="0" bus="0x{bus}" slot="0x{slot}" function="0"/></disk>'
        others.append(_DISK.format(n="u", letters="zzz", model="").replace("</disk>", address))
    devices = [*passed, *others] if draw(st.booleans()) else [*others, *passed]
    return Situation(
        host=parts,
        devices=[*places.controllers, *devices],
        vm={
            "memnodes": memnodes,
            "cells": {cell: str(cell) for cell in cells},
            "pins": pins,
            "arch": arch,
            "machine": machine,
        },
        flags=draw(_flags(parts)),
        vmi=draw(_vmis),
    )


def _kind(item: tuple[str, int]) -> str:
    return item[0]


@st.composite
def _hostdevs(draw: st.DrawFn, parts: HostParts, free: Sequence[str]) -> list[str]:
    """Some or all devices of the host in any order, the first of them with an address."""
    sources = [*parts.functions, *parts.mediated_devices, "0000:f7:1f.7"]  # the last is unknown to sysfs
    chosen = draw(
        st.one_of(
            st.lists(st.sampled_from(sources), max_size=12, unique=True),
            st.sampled_from((sources[:-1], sources[::-1], sources[-2::-1])),
        )
    )
    forms = draw(st.lists(st.sampled_from(_PREFIXES), min_size=1, max_size=3))
    addresses = draw(st.lists(st.sampled_from([*free, "", "", "00:17.0"]), max_size=4, unique=True))
    given = dict(zip([source for source in chosen if "-" not in source], addresses, strict=False))
    return [
        _passed_through(source, forms[n % len(forms)], f"d{n}", given.get(source, ""))
        for n, source in enumerate(chosen)
    ]


@st.composite
def _flags(draw: st.DrawFn, parts: HostParts) -> Mapping[str, Any]:
    names = st.sampled_from(["d0", "d1", "d5", *parts.functions[:3], "nobody"])
    wanted = {
        "layout": draw(st.sampled_from((None, "host-bridge", "switch", "switch"))),
        "devices": draw(st.sampled_from((None, None, None, "gpu"))),
        "unaligned": draw(st.sampled_from((None, None, "leave"))),
        "distances": draw(st.sampled_from((None, None, "auto"))),
        "maxphysaddr": draw(st.sampled_from((None, None, "auto"))),
        "exclude": draw(st.lists(names, max_size=1)) or None,
        "numa-node": [
            f"{name}={node}"
            for name, node in draw(st.lists(st.tuples(names, st.sampled_from(list(parts.nodes))), max_size=1))
        ]
        or None,
    }
    return {name: value for name, value in wanted.items() if value is not None}


_vmis: st.SearchStrategy[Mapping[str, Any]] = st.sampled_from(
    (
        {},
        {},
        {},
        {"metadata": {"annotations": {"pcie-numa-hook/layout": "node", "pcie-numa-hook/speed": "fast"}}},
        {"metadata": {"annotations": {"pcie-numa-hook/numa-node.d0": "0"}}},
        {"spec": {"domain": {"devices": {"interfaces": [{"name": "d1", "pciAddress": "0000:07:00.0"}]}}}},
    )
)
