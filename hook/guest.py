"""What the domain says about cells, controllers and devices, in numbers; must not read XML or decide anything.

In the guest the `bus` of an address is the `index` of the controller above the device. It is
never the bus number that the guest's kernel shows.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from hook.address import CpuSet, PciAddress

MARKER = "ua-pcie-numa-"  # alias prefix of controllers that the hook made; user aliases survive every KubeVirt


class Model(StrEnum):
    """The libvirt PCI controller models that the hook deals with (formatdomain.html#controllers)."""

    ROOT = "pcie-root"
    EXPANDER = "pcie-expander-bus"
    ROOT_PORT = "pcie-root-port"
    UPSTREAM_PORT = "pcie-switch-upstream-port"
    DOWNSTREAM_PORT = "pcie-switch-downstream-port"
    PCI_BRIDGE = "pcie-to-pci-bridge"


@dataclass(frozen=True, slots=True, order=True)
class GuestAddress:
    """Where a device sits: bus is a controller index 0..255, slot 0..31, function 0..7."""

    bus: int
    slot: int
    function: int = 0

    def __str__(self) -> str:
        return f"{self.bus:02x}:{self.slot:02x}.{self.function}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Controller:
    """A `<controller type='pci'>`; None is an attribute that is not there."""

    index: int  # @index
    model: str  # @model; a Model, or one that the hook never makes
    alias: str | None = None  # alias/@name
    address: GuestAddress | None = None  # address
    is_multifunction: bool = False  # address/@multifunction = on
    bus_nr: int | None = None  # target/@busNr
    cell: int | None = None  # target/node
    is_hotplug_off: bool = False  # target/@hotplug = off

    @property
    def is_own(self) -> bool:
        """True for a controller that the hook made on an earlier call."""
        return self.alias is not None and self.alias.startswith(MARKER)


class Kind(StrEnum):
    """How a passed-through device is named by its source."""

    PCI = "pci"
    MDEV = "mdev"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hostdev:
    """A passed-through device: `<hostdev>` of type pci or mdev, or `<interface type='hostdev'>`."""

    key: int  # position among the children of <devices>; identifies it within one document
    kind: Kind
    name: str  # NAME in the VMI, else the host address or UUID
    alias: str | None
    source: PciAddress | str  # host address, or mdev UUID in lower case
    address: GuestAddress | None = None
    is_multifunction: bool = False
    is_virtual_function: bool = False  # the XML says so: KubeVirt's SR-IOV alias, or <interface type='hostdev'>


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A guest NUMA cell."""

    id: int  # cpu/numa/cell/@id
    vcpus: CpuSet  # @cpus; empty for a memory-only cell
    has_distances: bool = False  # distances


class Connection(StrEnum):
    """Which free place libvirt looks for when a device has no address."""

    PORT = "port"  # a PCIe port of its own
    CONVENTIONAL = "conventional"  # a slot of a conventional PCI bridge
    NONE = "none"  # none: no PCI device, or a fixed place on pcie.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Any device that libvirt gives a PCI address, in the order in which libvirt does so."""

    connection: Connection
    address: GuestAddress | None
    key: int | None  # as Hostdev.key; None for a device that libvirt adds by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressSpace:
    """What decides how much room firmware has for large BARs."""

    memory_bytes: int  # memory
    is_efi: bool  # os/@firmware = efi, or os/loader of type pflash
    cpu_mode: str | None  # cpu/@mode
    has_maxphysaddr: bool  # cpu/maxphysaddr
    emulated_bits: int | None  # cpu/maxphysaddr[@mode='emulate']/@bits


@dataclass(frozen=True, slots=True, kw_only=True)
class FwCfgLine:
    """A line of a `<sysinfo type='fwcfg'>` entry, which the guest can read below /sys/firmware/qemu_fw_cfg."""

    entry: str  # its name
    start: str  # lines that start like this are the hook's; those of others stay
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestDomain:
    """The part of a domain that the plan depends on."""

    arch: str  # os/type/@arch
    machine: str  # os/type/@machine
    cells: tuple[Cell, ...]
    memnodes: Mapping[int, frozenset[int]]  # numatune/memnode: cell -> host nodes
    pins: Mapping[int, CpuSet]  # cputune/vcpupin: vCPU -> host CPUs
    controllers: tuple[Controller, ...]
    hostdevs: tuple[Hostdev, ...]
    endpoints: tuple[Endpoint, ...]  # in the order in which libvirt gives out addresses
    aliases: frozenset[str]  # of everything but the hook's own controllers
    address_space: AddressSpace
    is_grace: bool  # KubeVirt's own Grace placement (VEP 199): <iommu model='smmuv3'> or <acpi nodeset>
    cliques: Mapping[str, str] = field(default_factory=dict)  # x-nv-gpudirect-clique in qemu:override, by alias
    has_raw_cliques: bool = False  # qemu:commandline speaks of x-nv-gpudirect-clique
