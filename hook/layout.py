"""Chooses the shape of the guest's PCIe tree from the host's; must not number anything.

node         expander (cell) ── port ── device            one expander for each cell
host-bridge  expander (cell, host bridge) ── port ── device
switch       as host-bridge, and a switch where placed devices share a bridge below the root bus
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hook.address import PciAddress
from hook.config import Layout
from hook.host import HostTopology, PciFunction


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A device that gets a place: key as Hostdev.key, function is the host function it stands for."""

    key: int
    cell: int
    function: PciFunction
    is_whole: bool  # False for an mdev and a VF, which have a port each


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """What sits behind one port: devices by guest function number; one, or the functions of one card."""

    devices: tuple[tuple[int, int], ...]  # (guest function, Placed.key), function 0 first


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """An emulated switch behind a port, with one downstream port for each child."""

    children: tuple["Slot | Switch", ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpanderShape:
    """One expander bus: a cell, the host bridges that it stands for, and what is below."""

    cell: int
    host_bridges: tuple[str, ...]  # such as pci0000:80, sorted
    children: tuple[Slot | Switch, ...]


def shape(layout: Layout, host: HostTopology, devices: Iterable[Placed]) -> tuple[ExpanderShape, ...]:
    """Arrange the devices; the order of the answer is by cell, then by host address."""
    groups: dict[tuple[int, str], list[Placed]] = {}
    for device in sorted(devices, key=lambda d: (d.cell, d.function.address, d.key)):
        bridge = "" if layout is Layout.NODE else device.function.root
        groups.setdefault((device.cell, bridge), []).append(device)
    return tuple(
        ExpanderShape(
            cell=cell,
            host_bridges=tuple(sorted({d.function.root.rpartition("/")[2] for d in members})),
            children=_switched(host, members) if layout is Layout.SWITCH else tuple(_cards(members)),
        )
        for (cell, _), members in groups.items()
    )


def _cards(members: Iterable[Placed]) -> dict[Slot, Placed]:
    """One slot for each card, with its first device: functions of one host slot together, VFs and mdevs alone."""
    cards: dict[tuple[int, ...], list[Placed]] = {}
    for device in members:
        address = device.function.address
        card: tuple[int, ...] = address.card
        # What stands twice in the domain can share no slot with itself.
        is_there = any(other.function.address == address for other in cards.get(card, ()))
        if not device.is_whole or is_there:
            card = (*card, address.function, device.key)
        cards.setdefault(card, []).append(device)
    return {Slot(devices=_functions(functions)): functions[0] for functions in cards.values()}


def _functions(card: Sequence[Placed]) -> tuple[tuple[int, int], ...]:
    """Keep the function numbers, because drivers look for their sibling by it; something must be function 0."""
    first, *others = card
    return ((0, first.key), *((other.function.address.function, other.key) for other in others))


def _switched(host: HostTopology, members: Iterable[Placed]) -> tuple[Slot | Switch, ...]:
    """A port for each bridge of the root bus that has placed devices; a switch behind it where there are several."""
    ports: dict[PciAddress, list[_Leaf]] = {}
    for slot, device in _cards(members).items():
        bridges = fused_bridges(host, device.function)
        ports.setdefault(bridges[0] if bridges else device.function.address, []).append(_Leaf(slot, bridges))
    return tuple(
        leaves[0].slot if len(leaves) == 1 else Switch(children=_children(leaves)) for leaves in ports.values()
    )


@dataclass(frozen=True, slots=True)
class _Leaf:
    slot: Slot
    bridges: tuple[PciAddress, ...]


def _children(leaves: Sequence[_Leaf]) -> tuple[Slot | Switch, ...]:
    """What is below the switch that stands for the lowest bridge that all leaves share.

    nvidia-smi calls a pair PIX when neither device has more than one bridge between itself and
    the lowest common bridge. Such devices become siblings; deeper ones go below a switch of their
    own, so that they stay PXB to everything else. The first of them can do without, when it has
    no sibling that it could be mistaken to be PIX with.
    """
    depth = len(_common_bridges(leaves))
    groups: dict[PciAddress | None, list[_Leaf]] = {}  # None: the near ones
    for leaf in leaves:
        is_near = len(leaf.bridges) - depth <= 1
        groups.setdefault(None if is_near else leaf.bridges[depth], []).append(leaf)
    children: list[Slot | Switch] = []
    has_bare = None in groups
    for bridge, group in groups.items():
        if bridge is None:
            children.extend(leaf.slot for leaf in group)
        elif len(group) > 1:
            children.append(Switch(children=_children(group)))
        else:
            children.append(Switch(children=(group[0].slot,)) if has_bare else group[0].slot)
            has_bare = True
    return tuple(children)


def _common_bridges(leaves: Sequence[_Leaf]) -> tuple[PciAddress, ...]:
    shortest = min((leaf.bridges for leaf in leaves), key=len)
    for depth, bridge in enumerate(shortest):
        if any(leaf.bridges[depth] != bridge for leaf in leaves):
            return shortest[:depth]
    return shortest


def upstream_ports(bridges: Sequence[PciAddress]) -> range:
    """Positions of the switches among the bridges above a function, outermost first.

    NCCL takes every second bridge for one, counted from the device: port, switch, port, switch.
    Source: NCCL src/graph/xml.cc (2.30).
    """
    return range(len(bridges) % 2, len(bridges) - 1, 2)


def fused_bridges(host: HostTopology, function: PciFunction) -> tuple[PciAddress, ...]:
    """The bridges above a function, with switch chips that NCCL takes for one counted once.

    Cascades of Broadcom Gen4 (1000:c010) and Gen5 (1000:c030) switches are one chip that shows
    itself as several. Source: NCCL src/graph/topo.cc, ncclTopoFlattenBcmSwitches (2.30).
    """
    bridges = function.bridges
    dropped: set[int] = set()
    for parent, child in pairwise(upstream_ports(bridges)):
        if parent not in dropped and _is_one_chip(
            host.functions.get(bridges[parent]), host.functions.get(bridges[child])
        ):
            dropped |= {parent + 1, child}
    return tuple(bridge for position, bridge in enumerate(bridges) if position not in dropped)


def _is_one_chip(parent: PciFunction | None, child: PciFunction | None) -> bool:
    if parent is None or child is None:
        return False
    chips = {(f.vendor, f.device, f.subsystem_vendor) for f in (parent, child)}
    revisions = tuple((f.subsystem_device or 0) >> 12 for f in (parent, child))
    return (chips == {(0x1000, 0xC010, 0x1000)} and revisions == (0xA, 0xA)) or (
        chips == {(0x1000, 0xC030, 0x1000)} and revisions == (0x0, 0x1)
    )
