"""What the host is: PCI functions with the bridges above them, and NUMA nodes; must not read files or know guests."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from hook.address import CpuSet, PciAddress

# PCI base classes (PCI Code and ID Assignment 1.15).
_NETWORK_CLASS = 0x02
_GPU_CLASSES = (0x03, 0x12)
_COPROCESSOR_CLASS = 0x0B40

SELF_DISTANCE = 10  # ACPI SLIT: the distance of a node to itself


class NodeSource(StrEnum):
    """Where the host node of a device was taken from, best first."""

    OVERRIDE = "override"
    NUMA_NODE = "numa_node"
    PHYSICAL_FUNCTION = "physical-function"
    BRIDGE = "bridge"
    SINGLE_NODE = "single-node"
    LOCAL_CPULIST = "local-cpulist"


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaNode:
    """One host NUMA node. Source: Documentation/ABI/stable/sysfs-devices-node."""

    id: int
    cpus: CpuSet  # node/nodeN/cpulist; empty for a memory-only node
    distances: Mapping[int, int]  # node/nodeN/distance, by node id; empty when the file is absent


@dataclass(frozen=True, slots=True, order=True)
class PciRegion:
    """One BAR that is in use. Flags: include/linux/ioport.h."""

    size_bytes: int
    is_io: bool
    is_64bit_prefetchable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PciFunction:
    """One PCI function. Source: Documentation/ABI/testing/sysfs-bus-pci.

    An attribute that the kernel does not show, or shows as unknown (numa_node -1), is None.
    """

    address: PciAddress
    root: str  # path of the root bus, such as `devices/pci0000:80`; a VMD child domain has its own
    above: tuple[PciAddress, ...]  # every function above this one, outermost first
    bridges: tuple[PciAddress, ...]  # those of `above` that are below the root bus
    vendor: int | None = None  # vendor
    device: int | None = None  # device
    subsystem_vendor: int | None = None  # subsystem_vendor
    subsystem_device: int | None = None  # subsystem_device
    class_code: int | None = None  # class, 24 bits
    numa_node: int | None = None  # numa_node
    local_cpus: CpuSet | None = None  # local_cpulist
    physical_function: PciAddress | None = None  # physfn, the target's name
    regions: tuple[PciRegion, ...] = ()  # resource, the six BARs
    rom_bytes: int = 0  # resource, the expansion ROM behind them
    max_speed_mts: int | None = None  # max_link_speed in MT/s: 2.5 GT/s is 2500
    max_width: int | None = None  # max_link_width, lanes
    iommu_group: int | None = None  # iommu_group, the target's name

    @property
    def base_class(self) -> int | None:
        """The first byte of class (PCI Code and ID Assignment 1); None if unknown."""
        return self.class_code >> 16 if self.class_code is not None else None

    @property
    def is_gpu(self) -> bool:
        """True for display controllers and processing accelerators."""
        return self.base_class in _GPU_CLASSES

    @property
    def is_network(self) -> bool:
        """True for network controllers."""
        return self.base_class == _NETWORK_CLASS

    @property
    def has_io_bar(self) -> bool:
        """True when a BAR is in I/O space."""
        return any(region.is_io for region in self.regions)

    @property
    def is_coprocessor(self) -> bool:
        """True for co-processors that are neither display controllers nor processing accelerators."""
        return self.class_code is not None and self.class_code >> 8 == _COPROCESSOR_CLASS

    @property
    def is_virtual_function(self) -> bool:
        """True for an SR-IOV VF."""
        return self.physical_function is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTopology:
    """The part of a host that was read: the wanted functions, everything above them, all nodes."""

    functions: Mapping[PciAddress, PciFunction]
    mediated_devices: Mapping[str, PciAddress]  # UUID in lower case -> parent function
    nodes: Mapping[int, NumaNode]
    problems: tuple[str, ...] = ()  # attributes that were there and made no sense

    @classmethod
    def empty(cls) -> "HostTopology":
        """A host of which nothing was read."""
        return cls(functions={}, mediated_devices={}, nodes={})

    def function_of(self, source: PciAddress | str) -> PciFunction | None:
        """The function that a hostdev's source names: itself, or the parent of an mdev; None if unknown."""
        address = source if isinstance(source, PciAddress) else self.mediated_devices.get(source)
        return self.functions.get(address) if address is not None else None

    def physical_of(self, function: PciFunction) -> PciFunction | None:
        """The physical function of a VF; None for others, and if unknown."""
        address = function.physical_function
        return self.functions.get(address) if address is not None else None

    def node_of(self, address: PciAddress) -> tuple[int, NodeSource] | None:
        """Host node of a function and what says so, or None when nothing does.

        -1 is not a node. Then, in this order: the physical function of a VF, the nearest bridge
        above that knows its node, the only node of a single-node host, the one node that holds
        all of local_cpulist (a list that several nodes share says nothing).
        """
        function = self.functions.get(address)
        if function is None:
            return None
        if function.numa_node is not None:
            return function.numa_node, NodeSource.NUMA_NODE
        physical = self.physical_of(function)
        if physical is not None and physical.numa_node is not None:
            return physical.numa_node, NodeSource.PHYSICAL_FUNCTION
        for bridge in reversed(function.above):
            above = self.functions.get(bridge)
            if above is not None and above.numa_node is not None:
                return above.numa_node, NodeSource.BRIDGE
        if len(self.nodes) == 1:
            return next(iter(self.nodes)), NodeSource.SINGLE_NODE
        local = self.node_within(function.local_cpus or frozenset())
        return None if local is None else (local, NodeSource.LOCAL_CPULIST)

    def node_within(self, cpus: CpuSet) -> int | None:
        """The one node whose CPU list holds all of these CPUs, or None; no CPUs are in no node."""
        holders = [node.id for node in self.nodes.values() if cpus and cpus <= node.cpus]
        return holders[0] if len(holders) == 1 else None

    def nearest(self, origin: int, candidates: frozenset[int]) -> int | None:
        """The candidate node strictly nearest to origin by the host's distance table, or None."""
        node = self.nodes.get(origin)
        if node is None:
            return None
        known = sorted((node.distances[c], c) for c in candidates if c in node.distances)
        if not known or len(known) < len(candidates) or (len(known) > 1 and known[0][0] == known[1][0]):
            return None
        return known[0][1]
