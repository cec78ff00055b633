"""Read what a test guest said, and hold it against the plan; must not boot anything."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lxml import etree

from hook.address import PciAddress
from hook.define import Outcome
from hook.host import HostTopology
from hook.locality import distance_matrix, nccl_path
from hook.sysfs import NODES, PCI_DEVICES, MemoryTree, all_functions, read_host
from tests.boot.boot import StandIn

_UNSET = 0x20000000  # IORESOURCE_UNSET, include/linux/ioport.h
_MEM_OR_IO = 0x300  # IORESOURCE_MEM, IORESOURCE_IO
_BARS = 6
_BRIDGE_CLASS = 0x060400


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the guest's sysfs says, read by the hook's own reader."""

    topology: HostTopology
    bars: Mapping[PciAddress, tuple[int, ...]]  # numbers of the BARs that have an address
    lost: tuple[PciAddress, ...]  # functions with a BAR that sysfs shows without an address
    memory_kib: Mapping[int, int]  # by node
    troubles: tuple[str, ...]  # lines of the kernel's log


def sysfs(console: str, report: int = 0) -> MemoryTree:
    """The guest's sysfs, from what init.c prints; report: which one, from 0."""
    files: dict[str, bytes] = {}
    links: dict[str, str] = {}
    folder = ""
    for line in _report(console, report).splitlines():
        if line.startswith("@dir "):
            folder = line.removeprefix("@dir ")
            if not folder.startswith(NODES):
                links[f"{PCI_DEVICES}/{folder.rpartition('/')[2]}"] = f"../../../{folder}"
        elif " = " in line and not line.startswith("@"):
            name, _, value = line.partition(" = ")
            files[f"{folder}/{name}"] = value.replace("\\n", "\n").encode()
    return MemoryTree(files, links)


def _report(console: str, report: int) -> str:
    return console.split("@begin\n")[1 + report].partition("@end")[0]


def parse(console: str, report: int = 0) -> Report:
    """Parse what init.c prints."""
    tree = sysfs(console, report)
    addresses = all_functions(tree)
    resources = {a: _resource(tree.read(f"{PCI_DEVICES}/{a}/resource") or b"") for a in addresses}
    nodes = read_host(tree, addresses, ())
    return Report(
        topology=nodes,
        bars={
            a: tuple(n for n, (start, flags) in bars.items() if start and not flags & _UNSET)
            for a, bars in resources.items()
        },
        lost=tuple(
            a for a, bars in resources.items() if any(not start or flags & _UNSET for start, flags in bars.values())
        ),
        memory_kib={
            node: int(match[1])
            for node in nodes.nodes
            if (match := re.search(r"MemTotal:\s+(\d+) kB", (tree.read(f"{NODES}/node{node}/meminfo") or b"").decode()))
        },
        troubles=tuple(
            line.removeprefix("@log ") for line in _report(console, report).splitlines() if line.startswith("@log ")
        ),
    )


def _resource(content: bytes) -> dict[int, tuple[int, int]]:
    """Start and flags of each BAR that is in use."""
    found: dict[int, tuple[int, int]] = {}
    for number, line in enumerate(content.decode().splitlines()[:_BARS]):
        start, _, flags = (int(word, 16) for word in line.split())
        if flags & _MEM_OR_IO:
            found[number] = start, flags
    return found


def differences(outcome: Outcome, devices: Mapping[str, StandIn], report: Report) -> list[str]:
    """Where the guest is not what was planned, a line each; empty when plan and guest agree."""
    planned = outcome.plan.guest_topology(outcome.host)
    return [
        *_misplaced(planned, report.topology),
        *_strangers(outcome, planned, report.topology),
        *_without_bars(outcome, devices, report),
        *_nodes(outcome.xml, report),
        *_matrix(outcome, planned, report.topology),
    ]


def _misplaced(planned: HostTopology, guest: HostTopology) -> Iterator[str]:
    for address, wanted in sorted(planned.functions.items()):
        found = guest.functions.get(address)
        if found is None:
            yield f"{address} is not there"
            continue
        for name in ("root", "bridges", "numa_node"):
            if getattr(found, name) != getattr(wanted, name):
                yield f"{address} {name}: {getattr(found, name)}, planned {getattr(wanted, name)}"
        if (found.class_code == _BRIDGE_CLASS) is not (wanted.class_code == _BRIDGE_CLASS):
            yield f"{address} class: {found.class_code}, planned {wanted.class_code}"


def _strangers(outcome: Outcome, planned: HostTopology, guest: HostTopology) -> Iterator[str]:
    roots = {f"devices/pci0000:{expander.bus_nr:02x}" for expander in outcome.plan.expanders}
    for address, function in sorted(guest.functions.items()):
        if function.root in roots and address not in planned.functions:
            yield f"{address} is below an expander of the hook"


def _without_bars(outcome: Outcome, devices: Mapping[str, StandIn], report: Report) -> Iterator[str]:
    for device in outcome.plan.devices:
        if device.place is not None:
            address = device.place.guest_bdf
            found, wanted = report.bars.get(address, ()), devices[str(device.hostdev.source)].bars
            if found != wanted:
                yield f"{address} has the BARs {found}, its stand-in has {wanted}"
    for address in report.lost:
        yield f"{address} has a BAR without an address"


def _nodes(xml: bytes, report: Report) -> Iterator[str]:
    """One vCPU a cell, as in boot.small; distances as written, else QEMU's own (10 and 20)."""
    for number, cell in enumerate(etree.fromstring(xml).iterfind("cpu/numa/cell")):
        node = report.topology.nodes.get(int(cell.get("id", number)))
        if node is None:
            yield f"cell {number} is not a node"
            continue
        if node.cpus != {number}:
            yield f"node {node.id} has the CPUs {sorted(node.cpus)}"
        if not report.memory_kib.get(node.id):
            yield f"node {node.id} has no memory"
        written = {int(s.get("id", -1)): int(s.get("value", -1)) for s in cell.iterfind("distances/sibling")}
        wrong = {other: value for other, value in written.items() if node.distances.get(other) != value}
        if wrong:
            yield f"node {node.id} has the distances {dict(node.distances)}, written are {written}"


def _matrix(outcome: Outcome, planned: HostTopology, guest: HostTopology) -> Iterator[str]:
    """The classes of all pairs, from the guest's sysfs and from the plan."""
    addresses = [d.place.guest_bdf for d in outcome.plan.devices if d.place is not None]
    if not all(address in guest.functions for address in addresses):
        return  # said already
    if distance_matrix(guest, addresses) != distance_matrix(planned, addresses):
        yield "the matrix of nvidia-smi is not the planned one"
    pairs = [(a, b) for a in addresses for b in addresses]
    if [nccl_path(guest, a, b) for a, b in pairs] != [nccl_path(planned, a, b) for a, b in pairs]:
        yield "the matrix of NCCL is not the planned one"
