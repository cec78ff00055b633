"""Compares a guest's sysfs with the hook's plan, in the guest; must not change anything or need more than Python 3.6.

    pcie-numa-hook plan --format json --domain vm.xml --sysfs host.sysfs > plan.json     outside
    python3 verify.py --plan plan.json                                                   in the guest

This one file can be copied alone: it imports the standard library only.
"""

import argparse
import collections
import itertools
import json
import os
import re
import sys
import textwrap
from typing import TYPE_CHECKING, Any, Dict, FrozenSet, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

if TYPE_CHECKING:
    from hook.sysfs import SysfsTree

EXIT_DIFFERENT, EXIT_INPUT = 1, 3

_PCI_DEVICES = "bus/pci/devices"
_NODES = "devices/system/node"
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_NODE = re.compile(r"node(\d+)")
_BARS = 6
_IORESOURCE_MEM = 0x200  # include/linux/ioport.h
_IORESOURCE_UNSET = 0x20000000
_NETWORK_CLASS = 0x02
_GPU_CLASSES = (0x03, 0x12)

# What can be wrong with a device, with the advice that belongs to it.
WRONG_NODE = "NUMA placement wrong"
WRONG_PLACE = "wrong place in the PCIe tree"
MISSING = "device missing (bus or MMIO window)"
NO_ROOM = "BAR without an address (MMIO window)"
_ADVICE = {
    WRONG_NODE: "the guest does not see the NUMA node of the expander above the device. Compare the running domain"
    " (virsh dumpxml) with the plan; look for numa=off or acpi=off on the guest's kernel command line; and see that"
    " the plan was made for this VM on the node where it runs.",
    WRONG_PLACE: "the guest's firmware or kernel numbered the buses in another way, or the domain is not the planned"
    " one. Locality between devices may differ, NUMA may still be right.",
    MISSING: "this is not about NUMA. Look for the bus and for its windows in the guest: dmesg | grep -iE"
    " 'busn_res|no space|failed to assign|conflict'; a device that is dead on the host (vfio, reset) looks alike.",
    NO_ROOM: "this is not about NUMA: firmware or kernel found no room for the BAR. The guest may need"
    " more physical address bits (option maxphysaddr), other firmware, or pci=realloc. OVMF of"
    " 2022 gives no BARs behind expanders when a device there has an I/O BAR: exclude that device.",
}
_FABRIC = (
    "NUMA and PCIe are placed right. If GPUs still do not reach each other as expected, that is another matter: NVLink,"
    " NVSwitch and XGMI are a fabric beside PCIe, and sysfs does not show it. See nvidia-smi topo -m, nvidia-smi nvlink"
    " --status and the Fabric state in nvidia-smi -q (Fabric Manager), or amd-smi topology."
)
_NOT_APPLIED = (
    "No device is where it is planned: has the hook run for this VM (kubectl logs POD -c hook-sidecar-0), and with mode"
    " apply?"
)


class InputError(Exception):
    """The plan or the sysfs cannot be used; the text is one line for users."""


class Function(NamedTuple):
    """A PCI function as the guest shows it, or as it is planned. None is not known, and then not compared."""

    address: str
    above: Tuple[str, ...]  # the root bus, such as pci0000:fc, then the bridges, outermost first
    numa_node: Optional[int]
    vendor: Optional[int]
    device: Optional[int]
    class_code: Optional[int]  # 24 bits
    memory_bars: Optional[Tuple[int, ...]]  # sizes in bytes of those that have an address


class Planned(NamedTuple):
    """A device that the hook places: its name, and the function that the guest shall show."""

    name: str
    function: Function


class Plan(NamedTuple):
    """The part of a plan that a guest can be held against."""

    placed: List[Planned]  # by guest address
    others: "collections.Counter[Tuple[Optional[int], Optional[int]]]"  # devices that are not placed, by ids


class Guest(NamedTuple):
    """What a guest's sysfs says."""

    functions: Dict[str, Function]
    nodes: FrozenSet[int]


class Difference(NamedTuple):
    """One thing about one device, or about the guest, that is not as planned."""

    kind: str  # a key of the advice
    subject: str
    message: str


class Row(NamedTuple):
    """A planned device, the function in the guest that is it (None: not found), and what is different about it."""

    planned: Planned
    found: Optional[Function]
    differences: List[Difference]


class Directory:
    """A sysfs tree in a directory, with the methods of the hook's other trees."""

    def __init__(self, root: str) -> None:
        self._root = os.path.realpath(root)

    def read(self, path: str) -> Optional[bytes]:
        """The bytes of an attribute; None when it cannot be read."""
        try:
            with open(os.path.join(self._root, path), "rb") as file:
                return file.read()
        except OSError:
            return None

    def resolve(self, path: str) -> Optional[str]:
        """The path with all links followed; None when there is nothing."""
        real = os.path.realpath(os.path.join(self._root, path))
        return os.path.relpath(real, self._root) if os.path.exists(real) else None

    def names(self, path: str) -> Tuple[str, ...]:
        """Names in a directory, sorted; empty when there is none."""
        try:
            return tuple(sorted(os.listdir(os.path.join(self._root, path))))
        except OSError:
            return ()


def read_guest(tree: "SysfsTree") -> Guest:
    """Read all PCI functions and NUMA nodes.

    Raises:
        InputError: the tree has no PCI functions.
    """
    functions = {}
    for address in tree.names(_PCI_DEVICES):
        path = tree.resolve(_PCI_DEVICES + "/" + address)
        if path is None or not _ADDRESS.fullmatch(address):
            continue
        parts = path.split("/")[:-1]
        roots = [position for position, part in enumerate(parts) if part.startswith("pci")]
        functions[address] = Function(
            address=address,
            above=tuple(parts[roots[-1] :]) if roots else (),
            numa_node=_number(tree, path + "/numa_node", 10),
            vendor=_number(tree, path + "/vendor", 16),
            device=_number(tree, path + "/device", 16),
            class_code=_number(tree, path + "/class", 16),
            memory_bars=_memory_bars(tree, path + "/resource"),
        )
    if not functions:
        raise InputError("cannot read the guest's sysfs: it has no PCI functions in " + _PCI_DEVICES)
    found = (_NODE.fullmatch(name) for name in tree.names(_NODES))
    return Guest(functions, frozenset(int(match.group(1)) for match in found if match))


def _text(tree: "SysfsTree", path: str) -> Optional[str]:
    content = tree.read(path)
    return None if content is None else content.decode("utf-8", "replace").strip("\0 \t\r\n")


def _number(tree: "SysfsTree", path: str, base: int) -> Optional[int]:
    try:
        number = int(_text(tree, path) or "", base)
    except ValueError:
        return None
    return number if number >= 0 else None  # numa_node is -1 when nothing says which


def _memory_bars(tree: "SysfsTree", path: str) -> Optional[Tuple[int, ...]]:
    """Sizes of the BARs in memory that have an address; the kernel shows one without as zeros, or marks it."""
    text = _text(tree, path)
    if text is None:
        return None
    sizes = []
    for line in text.splitlines()[:_BARS]:
        try:
            start, end, flags = (int(word, 16) for word in line.split())
        except ValueError:
            return None
        if flags & _IORESOURCE_MEM and not flags & _IORESOURCE_UNSET and start and end > start:
            sizes.append(end - start + 1)
    return tuple(sizes)


def read_plan(text: str) -> Plan:
    """Take the devices from the JSON of `plan --format json`.

    Raises:
        InputError: the text is no such JSON, or of a hook before this file's.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"cannot read the plan: {error}, expected the JSON of plan --format json") from None
    try:
        devices = document["devices"]
        placed = [_planned(device) for device in devices if device["guest_bdf"] is not None]
        return Plan(
            placed=sorted(placed, key=lambda planned: planned.function.address),
            others=collections.Counter((d["vendor"], d["device"]) for d in devices if d["guest_bdf"] is None),
        )
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise InputError(
            f"cannot use the plan: found no {error}, expected the JSON of plan --format json of this version"
        ) from None


def _planned(device: Dict[str, Any]) -> Planned:
    bridges = [str(bridge) for bridge in device["guest_bridges"]]
    # The first bridge is a port of the expander, so its bus is the root bus.
    root = "pci" + bridges[0].rpartition(":")[0]
    bars = device["bars"]
    return Planned(
        name=str(device["name"]),
        function=Function(
            address=str(device["guest_bdf"]),
            above=(root, *bridges),
            numa_node=int(device["cell"]),
            vendor=device["vendor"],
            device=device["device"],
            class_code=device["class"],
            memory_bars=None if bars is None else tuple(bar["size_bytes"] for bar in bars if not bar["is_io"]),
        ),
    )


def compare(plan: Plan, guest: Guest) -> List[Row]:
    """Find each planned device in the guest, and what is different about it."""
    here = {p.function.address: _at_its_address(p.function, guest) for p in plan.placed}
    taken = {found.address for found in here.values() if found is not None}
    rows = []
    for planned in plan.placed:
        found = here[planned.function.address] or _elsewhere(planned.function, plan, guest, taken)
        if found is not None:
            taken.add(found.address)
        rows.append(Row(planned, found, list(_differences(planned, found, guest))))
    return rows


def _at_its_address(wanted: Function, guest: Guest) -> Optional[Function]:
    found = guest.functions.get(wanted.address)
    return found if found is not None and _is_same_kind(wanted, found) else None


def _is_same_kind(wanted: Function, found: Function) -> bool:
    pairs = ((wanted.vendor, found.vendor), (wanted.device, found.device))
    return all(a is None or b is None or a == b for a, b in pairs)


def _elsewhere(wanted: Function, plan: Plan, guest: Guest, taken: Iterable[str]) -> Optional[Function]:
    """Another function with the ids of a device that is not at its address; none that may be an unplaced device."""
    ids = wanted.vendor, wanted.device
    alike = [
        f for address, f in sorted(guest.functions.items()) if (f.vendor, f.device) == ids and address not in taken
    ]
    return alike[0] if None not in ids and len(alike) > plan.others[ids] else None


def _differences(planned: Planned, found: Optional[Function], guest: Guest) -> Iterator[Difference]:
    wanted, name = planned.function, planned.name
    if found is None:
        yield Difference(MISSING, name, _why_missing(wanted, guest))
        return
    if found.numa_node != wanted.numa_node:
        yield Difference(WRONG_NODE, name, f"on {_node(found.numa_node)}, planned is {_node(wanted.numa_node)}")
    if found.address != wanted.address:
        yield Difference(WRONG_PLACE, name, f"a device like it is at {_path(found)}, planned is {_path(wanted)}")
    elif found.above != wanted.above:
        yield Difference(WRONG_PLACE, name, f"it is at {_path(found)}, planned is {_path(wanted)}")
    bars, planned_bars = found.memory_bars, wanted.memory_bars
    # Their number counts: a driver on the host may have resized one since the plan was made.
    if bars is not None and planned_bars is not None and len(bars) < len(planned_bars):
        lost = collections.Counter(planned_bars) - collections.Counter(bars)
        sizes = ", ".join(_bytes(size) for size in sorted(lost.elements()))
        yield Difference(NO_ROOM, name, f"no address for {sizes}")


def _why_missing(wanted: Function, guest: Guest) -> str:
    root, port = wanted.above[0], wanted.above[-1]
    if not any(function.above[:1] == (root,) for function in guest.functions.values()):
        return f"the guest has no root bus {root}, so the expander is not there"
    other = guest.functions.get(wanted.address)
    if other is not None:
        return f"another device is at {wanted.address}: {other.vendor or 0:04x}:{other.device or 0:04x}"
    if port not in guest.functions:
        return f"nothing is at {wanted.address}, nor is there the port {port} above it"
    return f"nothing is at {wanted.address}, though the port {port} above it is there"


def _node(node: Optional[int]) -> str:
    return "no node" if node is None else f"node {node}"


def _path(function: Function) -> str:
    return " > ".join((*function.above, function.address))


def _bytes(size: int) -> str:
    for shift, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >> shift and not size & ((1 << shift) - 1):
            return f"{size >> shift} {unit}"
    return f"{size} bytes"


def distance(a: Function, b: Function) -> str:
    """The class of a pair as `nvidia-smi topo -m` has it: X, PIX, PXB, PHB, NODE, SYS."""
    if a.address == b.address:
        return "X"
    if a.above[:1] != b.above[:1]:
        return "NODE" if a.numa_node == b.numa_node else "SYS"
    common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a.above, b.above)))
    if common <= 1:
        return "PHB"
    return "PIX" if max(len(a.above), len(b.above)) - common <= 1 else "PXB"


def nccl_path(a: Function, b: Function) -> str:
    """The class of a pair as NCCL has it, in a guest: LOC, PIX, PXB, PHB, SYS.

    NCCL takes every second bridge, counted from the device, for a switch, and the functions of a
    network card for one. All bridges below an expander have its node.
    """
    if a.address == b.address or (_is_network(a) and _is_network(b) and a.address[:-1] == b.address[:-1]):
        return "LOC"
    first, second = a.above[1:-1][::-1][::2], b.above[1:-1][::-1][::2]
    for steps, switch in enumerate(first):
        if switch in second:
            return "PIX" if steps + second.index(switch) == 0 else "PXB"
    return "PHB" if a.numa_node == b.numa_node else "SYS"


def _is_network(function: Function) -> bool:
    return function.class_code is not None and function.class_code >> 16 == _NETWORK_CLASS


def verify(plan_text: str, tree: "SysfsTree") -> Tuple[str, bool]:
    """Compare, and say what was found; the second value is True when all is as planned.

    Raises:
        InputError: the plan or the tree cannot be used.
    """
    plan, guest = read_plan(plan_text), read_guest(tree)
    if not plan.placed:
        return "The plan places no device, so there is nothing to compare.\n", True
    rows = compare(plan, guest)
    differences = [difference for _, _, found in rows for difference in found]
    cells = {p.function.numa_node for p in plan.placed if p.function.numa_node is not None}
    differences += [
        Difference(WRONG_NODE, "guest", f"it has no NUMA node {cell}, but the plan has a cell {cell}")
        for cell in sorted(cells - guest.nodes)
    ]
    pairs, wrong_pairs = _pairs(rows)
    parts = [_table(rows), pairs]
    if differences:
        parts.append(_explained(differences))
    is_as_planned = not differences and not wrong_pairs
    if is_as_planned:
        parts.append("As planned.\n")
        if any((planned.function.class_code or 0) >> 16 in _GPU_CLASSES for planned in plan.placed):
            parts.append(_wrapped(_FABRIC))
    elif all(found is None or found.address != p.function.address for p, found, _ in rows):
        parts.append(_wrapped(_NOT_APPLIED))
    elif not any(difference.kind == WRONG_NODE for difference in differences):
        parts.append("NUMA placement is right for every device that is there.\n")
    return "\n".join(parts), is_as_planned


def _table(rows: Sequence[Row]) -> str:
    lines = [("device", "planned", "node", "found", "node", "result")]
    for planned, found, differences in rows:
        kinds = list(collections.OrderedDict.fromkeys(difference.kind for difference in differences))
        lines.append(
            (
                planned.name,
                planned.function.address,
                str(planned.function.numa_node),
                found.address if found is not None else "-",
                "-" if found is None or found.numa_node is None else str(found.numa_node),
                "; ".join(kinds) or "as planned",
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() + "\n" for line in lines)


def _pairs(rows: Sequence[Row]) -> Tuple[str, List[str]]:
    """The line about pairs, and those that differ; a pair of which one is missing is not compared."""
    there = [(planned, found) for planned, found, _ in rows if found is not None]
    counts = collections.Counter()  # type: collections.Counter[str]
    wrong = []
    for (planned, found), (other, other_found) in itertools.combinations(there, 2):
        wanted = [classify(planned.function, other.function) for classify in (distance, nccl_path)]
        seen = [classify(found, other_found) for classify in (distance, nccl_path)]
        counts[seen[0]] += 1
        if wanted != seen:
            text = "  {} - {}: {} (NCCL {}), planned {} (NCCL {})"
            wrong.append(text.format(planned.name, other.name, *(seen + wanted)))
    total = sum(counts.values())
    if not total:
        return "No pair of devices to compare.\n", []
    shown = ", ".join(f"{name} {counts[name]}" for name in ("PIX", "PXB", "PHB", "NODE", "SYS") if counts[name])
    return f"{total - len(wrong)} of {total} pairs as planned ({shown})\n" + "".join(
        text + "\n" for text in wrong
    ), wrong


def _explained(differences: Sequence[Difference]) -> str:
    lines = []
    for kind, advice in _ADVICE.items():
        of_kind = [difference for difference in differences if difference.kind == kind]
        if of_kind:
            lines.append(kind)
            lines += [f"  {difference.subject}: {difference.message}" for difference in of_kind]
            lines.append(_wrapped(advice, "  -> ").rstrip())
    return "".join(line + "\n" for line in lines)


def _wrapped(text: str, indent: str = "") -> str:
    width, below = 100, " " * len(indent)
    return textwrap.fill(text, width, initial_indent=indent, subsequent_indent=below, break_on_hyphens=False) + "\n"


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the command line; the exit status."""
    parser = argparse.ArgumentParser(
        prog="verify.py",
        description="Compare this guest's PCI and NUMA sysfs with the plan of pcie-numa-hook.",
        epilog="Exit status: 0 as planned, 1 a difference, 2 usage, 3 bad input.",
    )
    parser.add_argument(
        "--plan", required=True, metavar="FILE", help="what `pcie-numa-hook plan --format json` printed, - for stdin"
    )
    parser.add_argument("--sysfs", default="/sys", metavar="PATH", help="the guest: a directory like /sys (default)")
    given = parser.parse_args(arguments)
    try:
        with sys.stdin if given.plan == "-" else open(given.plan, encoding="utf-8") as file:
            plan_text = file.read()
        text, is_as_planned = verify(plan_text, Directory(given.sysfs))
    except (InputError, OSError, UnicodeDecodeError) as error:
        sys.stderr.write(f"verify.py: {error}\n")
        return EXIT_INPUT
    sys.stdout.write(text)
    return 0 if is_as_planned else EXIT_DIFFERENT


if __name__ == "__main__":
    sys.exit(main())
