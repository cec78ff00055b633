"""Shows hosts, guests and plans to people (rich trees, XML diff) and machines (JSON); must not decide anything."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from lxml import etree
from rich.text import Text
from rich.tree import Tree

from hook.address import PciAddress, format_cpu_list
from hook.define import Outcome
from hook.errors import Finding, Severity
from hook.guest import Controller, GuestAddress, GuestDomain, Hostdev, Kind, Model
from hook.host import HostTopology, PciFunction
from hook.locality import Distance, NcclPath, distance_matrix, nccl_path
from hook.pci_ids import PciIds
from hook.plan import Action, DevicePlan, map_cells

NO_NAMES = PciIds()

_ACTION_STYLE = {Action.PLACED: "green", Action.KEPT: "cyan", Action.LEFT: "yellow", Action.EXCLUDED: "dim"}


def plan_json(outcome: Outcome) -> dict[str, Any]:
    """The plan in the stable schema of docs/plan-json.md."""
    plan = outcome.plan
    guest = plan.guest_topology(outcome.host)
    return {
        "changed": plan.is_changed,
        "layout": str(plan.layout),
        "expanders": [
            {
                "index": expander.index,
                "cell": expander.cell,
                "bus_nr": expander.bus_nr,
                "buses": expander.buses,
                "host_bridges": list(expander.host_bridges),
            }
            for expander in plan.expanders
        ],
        "controllers": [
            {
                "index": controller.index,
                "model": str(controller.model),
                "parent": controller.address.bus if controller.address is not None else None,
                "slot": controller.address.slot if controller.address is not None else None,
                "function": controller.address.function if controller.address is not None else None,
            }
            for controller in plan.controllers
        ],
        "devices": [_device_json(device, outcome.host, guest) for device in plan.devices],
        "findings": [
            {"severity": str(f.severity), "code": f.code, "subject": f.subject, "message": f.message}
            for f in plan.findings
        ],
    }


def _device_json(device: DevicePlan, host: HostTopology, guest: HostTopology) -> dict[str, Any]:
    hostdev, place = device.hostdev, device.place
    address = device.address
    function = device.function(host)
    # What a mediated device shows in the guest is its driver's business; its parent says nothing about it.
    shown = function if hostdev.kind is Kind.PCI else None
    bridges = guest.functions[place.guest_bdf].bridges if place is not None else None
    return {
        "name": hostdev.name,
        "alias": hostdev.alias,
        "kind": str(hostdev.kind),
        "source": str(hostdev.source),
        "host_node": device.host_node,
        "host_node_from": str(device.host_node_from) if device.host_node_from is not None else None,
        "cell": device.cell,
        "action": str(device.action),
        "guest_address": None
        if address is None
        else {"bus": address.bus, "slot": address.slot, "function": address.function},
        "guest_bdf": str(place.guest_bdf) if place is not None else None,
        "guest_bridges": [str(bridge) for bridge in bridges] if bridges is not None else None,
        "vendor": shown.vendor if shown is not None else None,
        "device": shown.device if shown is not None else None,
        "class": function.class_code if function is not None else None,
        "bars": [asdict(region) for region in shown.regions] if shown is not None else None,
        "reason": device.reason,
    }


def plan_tree(outcome: Outcome, guest: GuestDomain, ids: PciIds = NO_NAMES) -> Tree:
    """The plan as a tree: cells, expanders, ports and devices, then what is not placed, then findings.

    guest: the domain that the plan was made for.
    """
    plan = outcome.plan
    verb = "changed" if plan.is_changed else "unchanged"
    tree = Tree(Text.assemble((outcome.domain_name or "domain", "bold"), f": {verb}, layout {plan.layout}"))
    nodes = map_cells(guest, outcome.host).node_of_cell
    branches: dict[int, Tree] = {}
    for cell in guest.cells:
        stands_for = f"host node {nodes[cell.id]}" if cell.id in nodes else "no single host node"
        branch = tree.add(f"cell {cell.id} ({stands_for}, vCPUs {format_cpu_list(cell.vcpus) or 'none'})")
        for expander in plan.expanders:
            if expander.cell == cell.id:
                branches[expander.index] = branch.add(
                    f"expander {expander.index}, busNr {expander.bus_nr}..{expander.bus_nr + expander.buses - 1}"
                    f" (host {', '.join(expander.host_bridges)})"
                )
    for controller in plan.controllers:
        if controller.address is not None and controller.address.bus in branches:
            branches[controller.index] = branches[controller.address.bus].add(_controller_text(controller))
    rest: Tree | None = None
    for device in sorted(plan.devices, key=lambda d: (d.place is None, d.place and d.place.guest_bdf, d.hostdev.key)):
        if device.place is not None and device.place.address.bus in branches:
            branches[device.place.address.bus].add(_device_text(device, device.function(outcome.host), ids))
        else:
            rest = rest or tree.add("not behind an expander of the hook")
            rest.add(_device_text(device, device.function(outcome.host), ids))
    if plan.findings:
        branch = tree.add("findings")
        for finding in plan.findings:
            branch.add(finding_text(finding))
    return tree


def controller_name(controller: Controller) -> str:
    """Model and index of a controller."""
    words = {Model.ROOT_PORT: "root port", Model.UPSTREAM_PORT: "switch", Model.DOWNSTREAM_PORT: "downstream port"}
    return f"{words.get(Model(controller.model), controller.model)} {controller.index}"


def _controller_text(controller: Controller) -> str:
    slot = f", slot {controller.address.slot:#04x}" if controller.address is not None else ""
    function = f".{controller.address.function}" if controller.address and controller.address.function else ""
    return f"{controller_name(controller)}{slot}{function}"


def _device_text(device: DevicePlan, function: PciFunction | None, ids: PciIds) -> Text:
    text = Text.assemble((device.hostdev.name, "bold"))
    if str(device.hostdev.source) != device.hostdev.name:
        text.append(f" {device.hostdev.source}")
    if device.place is not None:
        text.append(f" → {device.place.guest_bdf}")
    text.append(f"  {device.action}", style=_ACTION_STYLE[device.action])
    text.append(f": {device.reason}")
    name = ids.device(function.vendor, function.device) if function is not None else None
    if name is not None:
        text.append(f" ({name})", style="dim")
    return text


def finding_text(finding: Finding) -> Text:
    """One finding on one line."""
    style = "yellow" if finding.severity is Severity.WARNING else "dim"
    subject = f"{finding.subject}: " if finding.subject else ""
    return Text.assemble((f"{finding.severity} [{finding.code}]", style), f" {subject}{finding.message}")


def host_tree(host: HostTopology, names: Mapping[PciAddress, str], ids: PciIds = NO_NAMES) -> Tree:
    """The read part of a host: nodes, host bridges, bridges and devices; `names` are added to devices."""
    tree = Tree(Text("host", "bold"))
    by_node: dict[int | None, list[PciFunction]] = {}
    for function in host.functions.values():
        found = host.node_of(function.address)
        by_node.setdefault(found[0] if found else None, []).append(function)
    for node in sorted({*host.nodes, *by_node}, key=lambda n: (n is None, n)):
        known = host.nodes.get(node) if node is not None else None
        cpus = f"CPUs {format_cpu_list(known.cpus) or 'none'}" if known is not None else "unknown to sysfs"
        branch = tree.add("no known node" if node is None else f"node {node} ({cpus})")
        branches: dict[tuple[str, PciAddress | None], Tree] = {}
        for function in sorted(by_node.get(node, ()), key=lambda f: (f.root, f.bridges, f.address)):
            root = function.root.rpartition("/")[2]
            above = branches.get((root, None)) or branch.add(f"host bridge {root}")
            branches[(root, None)] = above
            for bridge in (*function.bridges, function.address):
                inner = branches.get((root, bridge))
                if inner is None:
                    inner = above.add(_function_text(host.functions.get(bridge), bridge, names, ids))
                    branches[(root, bridge)] = inner
                above = inner
    return tree


def _function_text(
    function: PciFunction | None, address: PciAddress, names: Mapping[PciAddress, str], ids: PciIds
) -> Text:
    text = Text(str(address))
    if function is not None and (kind := kind_of(function, ids)):
        text.append(f" {kind}")
    if function is not None and function.is_virtual_function:
        text.append(f" VF of {function.physical_function}")
    if address in names:
        text.append(f"  {names[address]}", style="bold green")
    return text


def kind_of(function: PciFunction, ids: PciIds) -> str:
    """Class, vendor and device as `lspci -nn` prints them, or their numbers alone; empty when nothing is known."""
    name = ids.device(function.vendor, function.device)
    has_ids = function.vendor is not None and function.device is not None
    numbers = f"[{function.vendor:04x}:{function.device:04x}]" if has_ids else ""
    if function.class_code is None:
        return f"{name or ''} {numbers}".strip()
    code = f"{function.class_code >> 8:04x}"
    if name is None:
        return f"{numbers} class {code}".strip()
    return f"{ids.class_name(function.class_code) or 'class'} [{code}]: {name} {numbers}"


def guest_tree(guest: GuestDomain, title: str) -> Tree:
    """The guest's PCI tree as the XML says it: controllers with a passed-through device below, and those devices."""
    tree = Tree(Text(title, "bold"))
    root = tree.add("pcie.0 (no NUMA node)")
    branches: dict[int, Tree] = {0: root}
    by_index = {controller.index: controller for controller in guest.controllers}
    for hostdev in sorted(guest.hostdevs, key=_by_address):
        branch = _branch(branches, by_index, hostdev.address)
        where = f"at {hostdev.address}" if hostdev.address is not None else "wherever libvirt puts it"
        branch.add(Text.assemble((hostdev.name, "bold"), f" {hostdev.source}  {where}"))
    return tree


def _by_address(hostdev: Hostdev) -> tuple[bool, GuestAddress | None, int]:
    return hostdev.address is None, hostdev.address, hostdev.key


def _branch(branches: dict[int, Tree], by_index: Mapping[int, Controller], address: GuestAddress | None) -> Tree:
    if address is None or address.bus in branches:
        return branches[address.bus if address is not None else 0]
    controller = by_index.get(address.bus)
    above = _branch(branches, by_index, controller.address if controller is not None else None)
    if controller is None:
        label = f"bus {address.bus}"
    elif controller.model == Model.EXPANDER:
        node = "no NUMA node" if controller.cell is None else f"NUMA node {controller.cell}"
        label = f"expander {controller.index} ({node}, busNr {controller.bus_nr})"
    else:
        label = _controller_text(controller)
    branches[address.bus] = above.add(label)
    return branches[address.bus]


def xml_diff(before: bytes, after: bytes) -> str:
    """Unified diff of two documents, printed alike first, so that only real differences show."""
    old, new = (_printed(document).splitlines(keepends=True) for document in (before, after))
    return "".join(difflib.unified_diff(old, new, fromfile="from KubeVirt", tofile="from the hook", n=2))


def _printed(document: bytes) -> str:
    parser = etree.XMLParser(resolve_entities=False, no_network=True, remove_blank_text=True)
    return etree.tostring(etree.fromstring(document, parser), encoding="unicode", pretty_print=True)


def diff_text(diff: str) -> Text:
    """A unified diff in colour."""
    styles = {"+": "green", "-": "red", "@": "cyan"}
    text = Text()
    for line in diff.splitlines(keepends=True):
        text.append(line, style=styles.get(line[:1], ""))
    return text


def device_names(hostdevs: Iterable[Hostdev], host: HostTopology) -> dict[PciAddress, str]:
    """NAMEs by host address, for host_tree; several mdevs of one parent share a line."""
    names: dict[PciAddress, str] = {}
    for hostdev in hostdevs:
        source = hostdev.source
        address = source if isinstance(source, PciAddress) else host.mediated_devices.get(source)
        if address is not None:
            names[address] = f"{names[address]}, {hostdev.name}" if address in names else hostdev.name
    return names


def matrix_text(names: Sequence[str], matrix: Sequence[Sequence[Distance | NcclPath]]) -> str:
    """A table like `nvidia-smi topo -m`."""
    rows = [["", *names], *([name, *(cell.name for cell in row)] for name, row in zip(names, matrix, strict=True))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n" for row in rows
    )


LEGEND = """\
X     the same device
PIX   at most one PCIe bridge in between
PXB   several PCIe bridges, but not the host bridge
PHB   the host bridge of the CPU
NODE  another host bridge of the same NUMA node
SYS   another NUMA node
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrices:
    """The placed devices by guest address, with the class of each pair on the host and in the guest."""

    names: tuple[str, ...]
    on_host: tuple[tuple[Distance, ...], ...]
    in_guest: tuple[tuple[Distance, ...], ...]
    differing: tuple[str, ...]  # a line for each pair that nvidia-smi or NCCL sees differently
    absent: tuple[str, ...]  # NAMEs of devices that are not placed


def matrices(outcome: Outcome) -> Matrices:
    """Compare host and guest, as nvidia-smi and NCCL see them."""
    host, guest = outcome.host, outcome.plan.guest_topology(outcome.host)
    pairs = [
        (device.hostdev.name, function.address, device.place.guest_bdf)
        for device in outcome.plan.devices
        if device.place is not None and (function := device.function(host)) is not None
    ]
    pairs.sort(key=lambda pair: pair[2])
    on_host = distance_matrix(host, [address for _, address, _ in pairs])
    in_guest = distance_matrix(guest, [bdf for _, _, bdf in pairs])
    lines = []
    for first, second in combinations(range(len(pairs)), 2):
        (name, a, guest_a), (other, b, guest_b) = pairs[first], pairs[second]
        before, after = on_host[first][second], in_guest[first][second]
        nccl_before, nccl_after = nccl_path(host, a, b), nccl_path(guest, guest_a, guest_b)
        if before != after or nccl_before != nccl_after:
            has_gpu = host.functions[a].is_gpu or host.functions[b].is_gpu
            direct = " (no longer direct for NCCL)" if has_gpu and nccl_before <= NcclPath.PXB < nccl_after else ""
            nccl = f"NCCL {nccl_before.name} -> {nccl_after.name}{direct}"
            lines.append(f"{name} - {other}: {before.name} -> {after.name}, {nccl}")
    return Matrices(
        names=tuple(name for name, _, _ in pairs),
        on_host=on_host,
        in_guest=in_guest,
        differing=tuple(lines),
        absent=tuple(d.hostdev.name for d in outcome.plan.devices if d.place is None),
    )


def plan_matrices(outcome: Outcome) -> str:
    """Host and guest matrices of the placed devices, and the pairs that differ."""
    shown = matrices(outcome)
    text = f"host\n{matrix_text(shown.names, shown.on_host)}\n"
    text += f"guest, layout {outcome.plan.layout}\n{matrix_text(shown.names, shown.in_guest)}\n"
    text += "pairs that differ (nvidia-smi, NCCL)\n" + ("".join(f"{line}\n" for line in shown.differing) or "none\n")
    text += "NCCL reads the topology file instead, which has the host's tree\n" if outcome.plan.fw_cfg else ""
    if shown.absent:
        text += f"\nnot in the matrices, because the hook does not place them: {', '.join(shown.absent)}\n"
    return f"{text}\n{LEGEND}"


# Base classes that a host's matrix shows: network, display, accelerators (1200, and 0b40 for co-processors).
_MATRIX_NAMES = {0x0200: "NIC", 0x0207: "NIC", 0x0280: "NIC", 0x0300: "GPU", 0x0302: "GPU", 0x0380: "GPU"}
_MATRIX_NAMES |= {0x1200: "ACC", 0x0B40: "ACC"}
NO_CARDS = "the host has no GPU, accelerator or network card\n"


def host_names(host: HostTopology) -> tuple[tuple[str, PciAddress], ...]:
    """A host's GPUs, accelerators and network cards by address, named GPU0, ACC0, NIC0."""
    counts: dict[str, int] = {}
    names: list[tuple[str, PciAddress]] = []
    for address, function in sorted(host.functions.items()):
        kind = _MATRIX_NAMES.get((function.class_code or 0) >> 8)
        if kind is not None:
            names.append((f"{kind}{counts.setdefault(kind, 0)}", address))
            counts[kind] += 1
    return tuple(names)


def host_matrix(host: HostTopology) -> str:
    """The matrix of a host's GPUs, accelerators and network cards, with their addresses."""
    names = host_names(host)
    if not names:
        return NO_CARDS
    text = matrix_text([name for name, _ in names], distance_matrix(host, [address for _, address in names]))
    return text + "\n" + "".join(f"{name}  {address}\n" for name, address in names) + f"\n{LEGEND}"


def host_json(host: HostTopology) -> dict[str, Any]:
    """The host as the hook reads it; absent attributes are null."""
    return {
        "nodes": [
            {
                "id": node.id,
                "cpus": format_cpu_list(node.cpus),
                "distances": {str(k): v for k, v in node.distances.items()},
            }
            for _, node in sorted(host.nodes.items())
        ],
        "functions": [
            {
                "address": str(address),
                "host_bridge": function.root.rpartition("/")[2],
                "bridges": [str(bridge) for bridge in function.bridges],
                "vendor": function.vendor,
                "device": function.device,
                "class": function.class_code,
                "numa_node": function.numa_node,
                "host_node": found[0] if (found := host.node_of(address)) else None,
                "host_node_from": str(found[1]) if found else None,
                "physical_function": str(function.physical_function) if function.physical_function else None,
            }
            for address, function in sorted(host.functions.items())
        ],
    }
