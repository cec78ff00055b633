"""Gives a tree shape its controller indexes, bus numbers, slots and aliases; must not choose the shape.

A window is the run of guest bus numbers that one expander owns: busNr for the expander itself,
then one bus for each bridge below it (root port, upstream port, downstream port), which firmware
numbers depth first in the order of slot and function. Measured with SeaBIOS 1.16 and OVMF 2022/2025.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from hook.address import MAX_BUS, MAX_FUNCTION, MAX_SLOT, PciAddress
from hook.guest import MARKER, Controller, GuestAddress, Model
from hook.layout import ExpanderShape, Slot, Switch

# q35 puts SATA and LPC on 0x1f, ICH9 USB on 0x1a and 0x1d, ICH9 sound on 0x1b and the first video on 0x01
# (libvirt qemuDomainValidateDevicePCISlotsQ35); 0x00 is the host bridge.
_RESERVED_ROOT_SLOTS = frozenset({0x00, 0x01, 0x1A, 0x1B, 0x1D, 0x1F})
_SLOTS = MAX_SLOT + 1
_FUNCTIONS = MAX_FUNCTION + 1

_ALIAS_WORDS = {
    Model.EXPANDER: "expander",
    Model.ROOT_PORT: "port",
    Model.UPSTREAM_PORT: "upstream",
    Model.DOWNSTREAM_PORT: "downstream",
    Model.PCI_BRIDGE: "bridge",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a domain leaves free for the hook's controllers.

    Every index below first_index and every taken one may be a bridge of pcie.0, so first_bus is above them all.
    Indexes end at 255 as buses do: where there are enough buses in a row, there are enough indexes.
    """

    first_index: int  # where to look for free indexes
    taken_indexes: frozenset[int]
    taken_root_slots: frozenset[int]  # slots of pcie.0
    seated_ports: tuple[GuestAddress, ...]  # root ports of others on pcie.0
    waiting_ports: int  # root ports that libvirt has yet to seat there
    first_bus: int  # lowest guest bus number that pcie.0 can never reach
    windows: tuple[tuple[int, int], ...]  # first and last bus of every other expander
    aliases: frozenset[str]  # of everything else


@dataclass(frozen=True, slots=True, kw_only=True)
class Expander:
    """One numbered expander bus."""

    index: int
    cell: int
    bus_nr: int
    buses: int  # size of its window
    host_bridges: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one device goes."""

    address: GuestAddress
    is_multifunction: bool
    guest_bdf: PciAddress  # what the guest's kernel will show


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbered:
    """A tree that fits."""

    controllers: tuple[Controller, ...]
    expanders: tuple[Expander, ...]
    places: Mapping[int, Place]  # by Hostdev.key
    bridge_bdfs: Mapping[int, PciAddress]  # what the guest's kernel will show, by controller index


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why a tree does not fit."""

    what: str
    needed: int
    available: int

    def __str__(self) -> str:
        return f"it needs {self.needed} {self.what}, {self.available} are free"


def bridge_count(children: Sequence[Slot | Switch]) -> int:
    """Bridges that stand for these children: a port each, and one upstream port for each switch."""
    return sum(1 if isinstance(child, Slot) else 2 + bridge_count(child.children) for child in children)


def own_alias(model: str, index: int, taken: Collection[str]) -> str:
    """The marker alias of a controller; libvirt refuses two equal ones, so a taken one is avoided."""
    alias = f"{MARKER}{_ALIAS_WORDS[Model(model)]}-{index}"
    while alias in taken:
        alias += "-"
    return alias


def number(shapes: Sequence[ExpanderShape], room: Room) -> Numbered | Shortage:
    """Number the whole tree, or say what is missing; nothing is ever numbered in part."""
    buses = [1 + bridge_count(shape.children) for shape in shapes]
    first_bus = _free_buses(room, sum(buses))
    if first_bus is None:
        return Shortage("guest bus numbers in a row", sum(buses), _free_bus_count(room))
    root_slots = _root_slots(room)
    if len(shapes) > len(root_slots):
        return Shortage("slots of pcie.0 for expanders", len(shapes), len(root_slots))
    run = _Run(aliases=room.aliases, next_index=_free_block(room, sum(buses)))
    for shape, window, slot in zip(shapes, buses, root_slots, strict=False):
        run.expander(shape, GuestAddress(0, slot), first_bus, window)
        first_bus += window
    return Numbered(
        controllers=tuple(run.controllers),
        expanders=tuple(run.expanders),
        places=run.places,
        bridge_bdfs=run.bridge_bdfs,
    )


def _root_slots(room: Room) -> list[int]:
    """Free slots of pcie.0, highest first, less those that libvirt will need for ports, of which eight share a slot.

    A port that finds no place on pcie.0 goes to an expander, and takes a bus that the window has not.
    """
    free = [slot for slot in range(MAX_SLOT, -1, -1) if slot not in room.taken_root_slots | _RESERVED_ROOT_SLOTS]
    slots = {address.slot for address in room.seated_ports}
    waiting = room.waiting_ports - (_FUNCTIONS * len(slots) - len(room.seated_ports))
    # Ports in slots that count as reserved leave others free, and are counted as if they sat there.
    needed = -(-max(0, waiting) // _FUNCTIONS) + len(slots & _RESERVED_ROOT_SLOTS)
    return free[: max(0, len(free) - needed)]


def _free_buses(room: Room, size: int) -> int | None:
    """The highest run of free buses, as far as possible from pcie.0, which may still grow."""
    for last in sorted({MAX_BUS, *(first - 1 for first, _ in room.windows)}, reverse=True):
        first = last + 1 - size
        if first >= room.first_bus and not any(first <= end and start <= last for start, end in room.windows):
            return first
    return None


def _free_bus_count(room: Room) -> int:
    used = {bus for start, end in room.windows for bus in range(start, end + 1)}
    return sum(bus not in used for bus in range(room.first_bus, MAX_BUS + 1))


def _free_block(room: Room, size: int) -> int:
    """The lowest index from the first one on where `size` indexes in a row are free."""
    start = room.first_index
    for index in sorted(room.taken_indexes):
        if index < start:
            continue
        if index - start >= size:
            break
        start = index + 1
    return start


@dataclass
class _Run:
    """The counters of one numbering."""

    aliases: frozenset[str]
    next_index: int
    controllers: list[Controller] = field(default_factory=list)
    expanders: list[Expander] = field(default_factory=list)
    places: dict[int, Place] = field(default_factory=dict)
    bridge_bdfs: dict[int, PciAddress] = field(default_factory=dict)
    next_bus: int = 0

    def expander(self, shape: ExpanderShape, address: GuestAddress, bus_nr: int, buses: int) -> None:
        index = self._add(Model.EXPANDER, address, bus_nr=bus_nr, cell=shape.cell)
        self.next_bus = bus_nr + 1
        self.expanders.append(
            Expander(index=index, cell=shape.cell, bus_nr=bus_nr, buses=buses, host_bridges=shape.host_bridges)
        )
        self._children(shape.children, index, bus_nr, Model.ROOT_PORT)

    def _children(self, children: Sequence[Slot | Switch], parent: int, parent_bus: int, port: Model) -> None:
        for child, (address, is_multifunction) in zip(children, _port_addresses(parent, len(children)), strict=True):
            index = self._add(port, address, is_multifunction=is_multifunction, is_hotplug_off=True)
            self.bridge_bdfs[index] = PciAddress(0, parent_bus, address.slot, address.function)
            bus = self._take_bus()
            if isinstance(child, Slot):
                for function, key in child.devices:
                    self.places[key] = Place(
                        address=GuestAddress(index, 0, function),
                        is_multifunction=function == 0 and len(child.devices) > 1,
                        guest_bdf=PciAddress(0, bus, 0, function),
                    )
                continue
            upstream = self._add(Model.UPSTREAM_PORT, GuestAddress(index, 0))
            self.bridge_bdfs[upstream] = PciAddress(0, bus, 0, 0)
            self._children(child.children, upstream, self._take_bus(), Model.DOWNSTREAM_PORT)

    def _take_bus(self) -> int:
        self.next_bus += 1
        return self.next_bus - 1

    def _add(
        self,
        model: Model,
        address: GuestAddress,
        *,
        is_multifunction: bool = False,
        bus_nr: int | None = None,
        cell: int | None = None,
        is_hotplug_off: bool = False,
    ) -> int:
        index = self.next_index
        self.next_index += 1
        self.controllers.append(
            Controller(
                index=index,
                model=model,
                alias=own_alias(model, index, self.aliases),
                address=address,
                is_multifunction=is_multifunction,
                bus_nr=bus_nr,
                cell=cell,
                is_hotplug_off=is_hotplug_off,
            )
        )
        return index


def _port_addresses(parent: int, count: int) -> list[tuple[GuestAddress, bool]]:
    """A slot for each port while they last, else eight ports to a slot; True where multifunction is on.

    There are fewer ports than 32 slots of 8, because each takes a bus.
    """
    if count <= _SLOTS:
        return [(GuestAddress(parent, slot), False) for slot in range(count)]
    places = (divmod(port, _FUNCTIONS) for port in range(count))
    return [(GuestAddress(parent, slot, function), function == 0) for slot, function in places]
