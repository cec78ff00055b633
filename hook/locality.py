"""How far two PCI functions are from each other, as nvidia-smi and NCCL see it; must not know plans or policy.

The same rules serve a host, a planned guest and a booted guest: all are a HostTopology.
Numbers and vendors of buses do not enter, only the tree and NUMA nodes compared as same or not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from hook.address import PciAddress
from hook.host import HostTopology, PciFunction
from hook.layout import fused_bridges, upstream_ports


class Distance(IntEnum):
    """The classes of `nvidia-smi topo -m`, nearest first. Source: its legend, and NVML's topology levels."""

    X = 0  # the same function
    PIX = 1  # at most one bridge between the lowest common bridge and either device
    PXB = 2  # several bridges, but not the host bridge
    PHB = 3  # the host bridge
    NODE = 4  # another host bridge of the same NUMA node
    SYS = 5  # another NUMA node


class NcclPath(IntEnum):
    """NCCL's own path types between PCI devices. Source: NCCL src/graph/topo.h and paths.cc (2.30)."""

    LOC = 0  # the same PCI device
    PIX = 4  # one common switch
    PXB = 5  # several switches
    PHB = 8  # through a CPU, which for NCCL is a NUMA node
    SYS = 9  # through several CPUs


def distance(host: HostTopology, a: PciAddress, b: PciAddress) -> Distance:
    """The nvidia-smi class of a pair; two unknown nodes count as the same one, as for NVML.

    Raises:
        KeyError: the host has no such function.
    """
    first, second = host.functions[a], host.functions[b]
    if a == b:
        return Distance.X
    if first.root != second.root:
        return Distance.NODE if first.numa_node == second.numa_node else Distance.SYS
    common = _common(first.bridges, second.bridges)
    if not common:
        return Distance.PHB
    return Distance.PIX if max(len(first.bridges), len(second.bridges)) - common <= 1 else Distance.PXB


def nccl_path(host: HostTopology, a: PciAddress, b: PciAddress) -> NcclPath:
    """The class that NCCL gives a pair, on which GPUDirect RDMA and peer-to-peer depend (on up to PXB).

    NCCL walks up two functions at a time, so it sees a switch as its upstream port and does not
    see root ports; it takes all functions of a network card, and its VFs, for one.

    Raises:
        KeyError: the host has no such function.
    """
    if a == b or (_card(host.functions[a]) == _card(host.functions[b]) is not None):
        return NcclPath.LOC
    first, second = _switches(host, a), _switches(host, b)
    for steps, switch in enumerate(first.switches):
        if switch in second.switches:
            return NcclPath.PIX if steps + second.switches.index(switch) == 0 else NcclPath.PXB
    return NcclPath.PHB if first.numa_node == second.numa_node else NcclPath.SYS


@dataclass(frozen=True, slots=True)
class _NcclBranch:
    switches: tuple[PciAddress, ...]  # nearest first
    numa_node: int | None  # of the last function on the way up


def _switches(host: HostTopology, address: PciAddress) -> _NcclBranch:
    function = host.functions[address]
    bridges = fused_bridges(host, function)
    switches = tuple(bridges[position] for position in reversed(upstream_ports(bridges)))
    top = host.functions.get(switches[-1]) if switches else function
    return _NcclBranch(switches, top.numa_node if top is not None else function.numa_node)


def top_switch(function: PciFunction) -> PciAddress | None:
    """The outermost switch (upstream port) above a function; functions that share it are PXB or nearer to NCCL."""
    return next((function.bridges[position] for position in upstream_ports(function.bridges)), None)


def _card(function: PciFunction) -> tuple[int, int, int] | None:
    """What NCCL takes for one network card: bus and slot of its functions, the PF's of its VFs; None for others.

    Source: NCCL src/transport/net_ib (NCCL_IB_MERGE_VFS, NCCL_IB_MERGE_NICS).
    """
    if not function.is_network:
        return None
    address = function.physical_function or function.address
    return address.domain, address.bus, address.slot


def _common(first: Sequence[PciAddress], second: Sequence[PciAddress]) -> int:
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count


def distance_matrix(host: HostTopology, addresses: Sequence[PciAddress]) -> tuple[tuple[Distance, ...], ...]:
    """All pairs, row by row in the order given."""
    return tuple(tuple(distance(host, a, b) for b in addresses) for a in addresses)
