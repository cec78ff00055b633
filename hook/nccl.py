"""Describes the PCIe tree of a host or guest as NCCL's topology file does; must not read files or place anything.

    <system version="1">
      <cpu numaid="0" affinity="00ff">                          a NUMA node: host node, or guest cell
        <pci busid="ffff:ff:00.0" class="0x060400" …>           a switch; the guest's have made-up addresses
          <pci busid="0000:fd:00.0" class="0x030200" …/>        a GPU or a NIC

NCCL adds everything else itself: nodes of GPUs and NICs that are not in the file, NVLinks, the CPU's model.
Source of the format: NCCL src/graph/xml.cc, xml.h and topo.cc (2.30).
"""

from binascii import b2a_base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hook.address import CpuSet, PciAddress
from hook.config import Config, Mode, TopologyFile
from hook.errors import Finding, Severity
from hook.guest import FwCfgLine, GuestDomain
from hook.host import HostTopology, PciFunction
from hook.layout import fused_bridges, upstream_ports
from hook.plan import LOST_RDMA, Action, Plan

# Where NCCL looks when NCCL_TOPO_FILE is not set (src/graph/topo.cc, ncclTopoGetSystem).
PATH = "/run/nvidia-topologyd/virtualTopology.xml"
# systemd makes a tmpfiles.d file of this credential, from version 252 on (systemd.system-credentials(7)).
CREDENTIAL = "opt/io.systemd.credentials/tmpfiles.extra"
RAW_ENTRY = "opt/org.pcie-numa-hook/nccl-topology"

MAX_NODES = 256  # NCCL_TOPO_XML_MAX_NODES (src/graph/topo.h)
MAX_VALUE_LENGTH = 254  # MAX_STR_LEN with its NUL (src/graph/xml.h)
MAX_ARGUMENT_BYTES = (128 << 10) - 1  # MAX_ARG_STRLEN with its NUL: one word of a command line (execve(2))

_NVIDIA, _AMD = 0x10DE, 0x1002
# NCCL refuses a file of another version, and so does RCCL, whose version is 2 (NCCL_TOPO_XML_VERSION in xml.h).
_NCCL_VERSION, _RCCL_VERSION = 1, 2
_SWITCH_CLASS = 0x060400
# A domain that no guest of QEMU has; the file of a guest names its switches there, as those of clouds do.
_MADE_UP_DOMAIN, _MADE_UP_BUS = 0xFFFF, 0xFF
_MAX_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The link above a device or switch, as both ends have it; None is what neither end says."""

    speed_mts: int | None
    width: int | None  # lanes


@dataclass(frozen=True, slots=True, kw_only=True)
class PciNode:
    """A `<pci>` element: a device, or a switch, which NCCL sees as its upstream port."""

    address: PciAddress
    class_code: int
    link: Link
    ids: tuple[int, ...] = ()  # vendor, device, subsystem vendor and device; empty: NCCL reads them from sysfs
    children: tuple["PciNode", ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuNode:
    """A `<cpu>` element, which is a NUMA node."""

    numa_id: int  # -1: unknown
    affinity: str | None  # a mask as in the kernel's cpumap; None: NCCL reads it from sysfs
    children: tuple[PciNode, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclSystem:
    """A whole file."""

    version: int
    cpus: tuple[CpuNode, ...]

    @property
    def node_count(self) -> int:
        """Elements that NCCL's reader has to hold."""

        def count(nodes: Iterable[PciNode]) -> int:
            return sum(1 + count(node.children) for node in nodes)

        return 1 + sum(1 + count(cpu.children) for cpu in self.cpus)

    def text(self) -> str:
        """The file; nothing in it needs to be escaped, because everything is made of numbers."""
        lines = [f'<system version="{self.version}">']
        for cpu in self.cpus:
            affinity = f' affinity="{cpu.affinity}"' if cpu.affinity is not None else ""
            lines.append(f'  <cpu numaid="{cpu.numa_id}"{affinity}>')
            for child in cpu.children:
                lines += _lines(child, "    ")
            lines.append("  </cpu>")
        return "\n".join([*lines, "</system>", ""])


def _lines(node: PciNode, indent: str) -> list[str]:
    names = ("vendor", "device", "subsystem_vendor", "subsystem_device")
    ids = "".join(f' {name}="{value:#06x}"' for name, value in zip(names, node.ids, strict=False))
    speed = f"{node.link.speed_mts / 1000:.1f} GT/s PCIe" if node.link.speed_mts is not None else ""
    start = (
        f'{indent}<pci busid="{node.address}" class="{node.class_code:#08x}"{ids}'
        f' link_speed="{speed}" link_width="{node.link.width or 0}"'
    )
    if not node.children:
        return [f"{start}/>"]
    inner = [line for child in node.children for line in _lines(child, f"{indent}  ")]
    return [f"{start}>", *inner, f"{indent}</pci>"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leaf:
    """A device, with the host's switches above it, outermost first."""

    numa_id: int
    switches: tuple[PciAddress, ...]
    function: PciFunction  # of the host
    node: PciNode


def _is_listed(function: PciFunction) -> bool:
    return function.is_gpu or function.is_network or function.is_coprocessor


def _linked(host: HostTopology, function: PciFunction) -> PciFunction:
    """The function whose link this one uses: a VF has none of its own."""
    return host.physical_of(function) or function


def _link(host: HostTopology, function: PciFunction | None) -> Link:
    """What both ends can do, of what they say; the port is the directory above, as NCCL reads it."""
    port = host.functions.get(function.bridges[-1]) if function is not None and function.bridges else None
    ends = [end for end in (function, port) if end is not None]
    return Link(
        speed_mts=min((end.max_speed_mts for end in ends if end.max_speed_mts is not None), default=None),
        width=min((end.max_width for end in ends if end.max_width is not None), default=None),
    )


def _ids(function: PciFunction | None) -> tuple[int, ...]:
    if function is None:
        return ()
    ids = (function.vendor, function.device, function.subsystem_vendor, function.subsystem_device)
    known = tuple(value for value in ids if value is not None)
    return known if len(known) == len(ids) else ()


def _cpu_mask(cpus: CpuSet, highest: int) -> str | None:
    """The kernel's cpumap: groups of 32 CPUs, highest first; None when it is longer than NCCL reads."""
    mask = sum(1 << cpu for cpu in cpus)
    text = ",".join(f"{mask >> 32 * group & 0xFFFF_FFFF:08x}" for group in range(highest // 32, -1, -1))
    return text if len(text) <= MAX_VALUE_LENGTH else None


def host_system(host: HostTopology) -> NcclSystem:
    """A host as NCCL finds it: every switch, and one node for each network card, with the host's addresses."""
    cards = {a for a, function in host.functions.items() if function.is_network and a.function == 0}
    leaves = []
    for address, function in sorted(host.functions.items()):
        card = replace(address, function=0)
        is_merged = function.is_virtual_function or (function.is_network and address not in cards and card in cards)
        # NCCL has room for four digits of a domain.
        if not _is_listed(function) or is_merged or address.domain > _MADE_UP_DOMAIN:
            continue
        bridges = function.bridges
        switches = tuple(bridges[position] for position in upstream_ports(bridges))
        top = host.functions.get(switches[0], function) if switches else function
        leaves.append(
            _Leaf(
                numa_id=top.numa_node if top.numa_node is not None else -1,
                switches=switches,
                function=function,
                node=PciNode(
                    address=address,
                    class_code=function.class_code or 0,
                    link=_link(host, function),
                    ids=_ids(function),
                ),
            )
        )
    highest = max((cpu for node in host.nodes.values() for cpu in node.cpus), default=0)
    affinities = {node.id: _cpu_mask(node.cpus, highest) for node in host.nodes.values()}
    return _system(host, leaves, affinities, None)


def guest_system(plan: Plan, guest: GuestDomain, host: HostTopology) -> NcclSystem:
    """The placed devices of a guest at their guest addresses, in their cells, below the host's switches and links.

    Cascades of switches that NCCL takes for one chip are one; network functions of one guest slot are one node.
    """
    leaves = []
    for device in plan.devices:
        function = device.function(host)
        if device.place is None or device.cell is None or function is None or not _is_listed(function):
            continue
        bdf = device.place.guest_bdf
        if function.is_network and bdf.function != 0:
            continue  # NCCL asks for function 0, which is placed whenever this one is
        linked = _linked(host, function)
        bridges = fused_bridges(host, linked)
        leaves.append(
            _Leaf(
                numa_id=device.cell,
                switches=tuple(bridges[position] for position in upstream_ports(bridges)),
                function=function,
                node=PciNode(address=bdf, class_code=function.class_code or 0, link=_link(host, linked)),
            )
        )
    leaves.sort(key=lambda leaf: (leaf.numa_id, leaf.function.address, leaf.node.address))
    highest = max((vcpu for cell in guest.cells for vcpu in cell.vcpus), default=0)
    affinities = {cell.id: _cpu_mask(cell.vcpus, highest) for cell in guest.cells}
    switches = sorted({(leaf.numa_id, switch) for leaf in leaves for switch in leaf.switches})
    names = {
        key: PciAddress(_MADE_UP_DOMAIN, _MADE_UP_BUS - position // 32, position % 32, 0)
        for position, key in enumerate(switches)
    }
    return _system(host, leaves, affinities, names)


def _system(
    host: HostTopology,
    leaves: Sequence[_Leaf],
    affinities: Mapping[int, str | None],
    names: Mapping[tuple[int, PciAddress], PciAddress] | None,
) -> NcclSystem:
    """Names: of switches in the file, by NUMA id and host address; None: their own."""
    vendors = {leaf.function.vendor for leaf in leaves if leaf.function.is_gpu}
    by_numa: dict[int, list[_Leaf]] = {}
    for leaf in leaves:
        by_numa.setdefault(leaf.numa_id, []).append(leaf)
    return NcclSystem(
        version=_RCCL_VERSION if _AMD in vendors and _NVIDIA not in vendors else _NCCL_VERSION,
        cpus=tuple(
            CpuNode(numa_id=numa_id, affinity=affinities.get(numa_id), children=_children(host, members, 0, names))
            for numa_id, members in sorted(by_numa.items())
        ),
    )


def _children(
    host: HostTopology,
    leaves: Sequence[_Leaf],
    depth: int,
    names: Mapping[tuple[int, PciAddress], PciAddress] | None,
) -> tuple[PciNode, ...]:
    """The devices that have this many switches above them, and the next switches of the others, by host address."""
    nodes = [(leaf.function.address, leaf.node) for leaf in leaves if len(leaf.switches) == depth]
    below: dict[PciAddress, list[_Leaf]] = {}
    for leaf in leaves:
        if len(leaf.switches) > depth:
            below.setdefault(leaf.switches[depth], []).append(leaf)
    for switch, members in below.items():
        function = host.functions.get(switch)  # None: its link in bus/pci/devices is missing
        node = PciNode(
            address=switch if names is None else names[members[0].numa_id, switch],
            class_code=_SWITCH_CLASS,
            link=_link(host, function),
            ids=_ids(function) if names is None else (),
            children=_children(host, members, depth + 1, names),
        )
        nodes.append((switch, node))
    return tuple(node for _, node in sorted(nodes, key=lambda pair: pair[0]))


def fw_cfg_lines(text: str) -> tuple[FwCfgLine, ...]:
    """What brings a file into the guest: for systemd, and as it is for everything else; base64, for it has `<`."""
    encoded = b2a_base64(text.encode(), newline=False).decode()
    start = f"f~ {PATH} "
    return (
        FwCfgLine(entry=CREDENTIAL, start=start, text=f"{start}0644 root root - {encoded}"),
        FwCfgLine(entry=RAW_ENTRY, start="", text=encoded),
    )


def obstacle(system: NcclSystem, lines: Sequence[FwCfgLine]) -> str | None:
    """Why this file cannot be given to a guest; None if it can."""
    if system.node_count > MAX_NODES:
        return f"it has {system.node_count} nodes, and NCCL reads at most {MAX_NODES}"
    longest = max(len(f"name={line.entry},string={line.text}") for line in lines)
    if longest > MAX_ARGUMENT_BYTES:
        return f"QEMU's argument for it has {longest} bytes, and Linux takes at most {MAX_ARGUMENT_BYTES}"
    return None


def with_topology_file(plan: Plan, guest: GuestDomain, host: HostTopology, config: Config) -> Plan:
    """The plan with the file, when the option asks for it and it can be given; else with the reason."""
    if config.topology_file is TopologyFile.OFF or config.mode is Mode.OFF or not guest.hostdevs:
        return plan
    placed = [f for d in plan.devices if d.place is not None and (f := d.function(host)) is not None]
    if not any(function.is_gpu for function in placed):
        message = "no GPU is placed, so there is none"
        return _with_findings(plan, [Finding(Severity.INFO, "topology-file-without-gpu", "", message)])
    system = guest_system(plan, guest, host)
    lines = fw_cfg_lines(system.text())
    why_not = obstacle(system, lines)
    if {_NVIDIA, _AMD} <= {function.vendor for function in placed if function.is_gpu}:
        why_not = "NCCL and RCCL look in the same place and refuse each other's files; the VM has GPUs of both"
    if why_not is not None:
        message = f"the NCCL topology file is left out: {why_not}"
        return _with_findings(plan, [Finding(Severity.WARNING, "topology-file-dropped", "", message)])
    findings = [
        Finding(
            Severity.INFO,
            "not-in-topology-file",
            device.hostdev.name,
            "the hook does not place it, so its guest address is unknown; NCCL takes it as the guest's sysfs shows it",
        )
        for device in plan.devices
        if device.place is None
        and device.action is not Action.EXCLUDED
        and ((function := device.function(host)) is None or _is_listed(function))
    ]
    unknown = _without_speed(plan, host)
    if unknown:
        more = f" and {len(unknown) - _MAX_NAMED} more" if len(unknown) > _MAX_NAMED else ""
        message = (
            f"the host does not say the link speed of {', '.join(map(str, unknown[:_MAX_NAMED]))}{more};"
            " NCCL takes 8 GT/s for it, as on the host"
        )
        findings.append(Finding(Severity.INFO, "link-speed-unknown", "", message))
    # NCCL believes the file, not the tree.
    kept = tuple(finding for finding in plan.findings if finding.code != LOST_RDMA)
    return replace(plan, findings=(*kept, *findings), fw_cfg=lines, is_changed=True)


def _without_speed(plan: Plan, host: HostTopology) -> list[PciAddress]:
    """Host addresses of the devices and switches in the file whose link speed neither end knows."""
    used: set[PciAddress] = set()
    for device in plan.devices:
        function = device.function(host)
        if device.place is not None and function is not None and _is_listed(function):
            linked = _linked(host, function)
            bridges = fused_bridges(host, linked)
            used |= {linked.address, *(bridges[position] for position in upstream_ports(bridges))}
    return sorted(a for a in used if _link(host, host.functions.get(a)).speed_mts is None)


def _with_findings(plan: Plan, findings: Sequence[Finding]) -> Plan:
    return replace(plan, findings=(*plan.findings, *findings))
