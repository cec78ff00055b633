"""Foresees which PCI places libvirt hands out to devices without an address; must not place anything itself.

libvirt walks the devices in a fixed order. A PCIe device takes the free port with the lowest
index; a conventional one takes a slot of a PCI bridge, and when there is none, libvirt adds a
root port and a pcie-to-pci-bridge at the next two indexes. Index gaps become root ports.
Source: libvirt src/qemu/qemu_domain_address.c (qemuDomainAssignDevicePCISlots,
qemuDomainDeviceCalculatePCIConnectFlags, virDomainPCIAddressSetGrow); seen with 9.0 and 11.3.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hook.guest import Connection, Controller, Endpoint, GuestAddress, Model

# Ports that a VM with little memory gets from KubeVirt >= 1.6, and what it keeps free on a busy one
# (pkg/virt-launcher/virtwrap/manager.go, hotplug ports "v3").
KUBEVIRT_PORTS = 16
KUBEVIRT_FREE_PORTS = 6
# KubeVirt adds hotplug ports only up to this index (maxPCIBusIndex).
KUBEVIRT_LAST_PORT_INDEX = 31

# The order in which libvirt gives addresses to devices of these elements.
ORDER = (
    "filesystem",
    "interface",
    "sound",
    "controller",
    "disk",
    "hostdev",
    "memballoon",
    "rng",
    "watchdog",
    "video",
    "shmem",
    "input",
    "serial",
    "vsock",
    "memory",
    "crypto",
)
# Virtio devices are PCIe unless they are transitional, which need a conventional slot.
_VIRTIO = ("filesystem", "disk", "memballoon", "rng", "input", "vsock", "memory", "crypto")
_NO_PCI_CONTROLLERS = ("fdc", "ccid", "xenbus", "isa")
_PCIE_MODELS = ("e1000e", "igb", "nec-xhci", "qemu-xhci", "bochs")
_NO_PCI_MODELS = ("none", "usb-net", "ramfb", "sb16", "pcspk", "usb", "ich7", "dimm", "nvdimm", "sgx-epc")

_PORTS = (Model.ROOT_PORT, Model.DOWNSTREAM_PORT)
_CONVENTIONAL_MODELS = (Model.PCI_BRIDGE, "dmi-to-pci-bridge", "pci-bridge")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """What decides where libvirt looks for a place for a device; None is an attribute that is not there."""

    key: int  # as Hostdev.key
    tag: str
    type: str | None  # @type
    model: str | None  # @model, model/@type or model/@name
    bus: str | None  # target/@bus or @bus
    target: str | None  # target/@type
    index: int | None  # @index
    address: GuestAddress | None
    is_pci_addressable: bool  # False with an address of another type


def endpoints(arch: str, devices: Sequence[DeviceFacts]) -> tuple[Endpoint, ...]:
    """Sort the devices as libvirt does and say what each one looks for.

    On x86_64 a missing balloon, and on aarch64 a missing SATA controller that a disk needs, are
    added as libvirt adds them; KubeVirt writes everything else.
    """
    is_q35 = arch == "x86_64"
    first_video = next((d.key for d in devices if d.tag == "video"), None)
    found: list[tuple[int, int, Endpoint]] = []
    for device in devices:
        is_pci_controller = device.tag == "controller" and device.type == "pci"  # they are Controllers
        if device.tag not in ORDER or is_pci_controller or not device.is_pci_addressable:
            continue
        is_hostdev = device.tag == "interface" and device.type == "hostdev"
        rank = ORDER.index("hostdev" if is_hostdev else device.tag)
        connection = Connection.PORT if is_hostdev else _connection(device, is_q35=is_q35)
        if is_q35 and device.key == first_video:
            connection = Connection.NONE  # 00:01.0
        if connection is not Connection.NONE or device.address is not None:
            found.append((rank, device.key, Endpoint(connection=connection, address=device.address, key=device.key)))
    last = len(devices) + max((device.key for device in devices), default=0)
    has_sata_disk = any(d.tag == "disk" and d.bus == "sata" for d in devices)
    has_sata = any(d.tag == "controller" and d.type == "sata" for d in devices)
    if has_sata_disk and not has_sata and not is_q35:
        implied = Endpoint(connection=Connection.CONVENTIONAL, address=None, key=None)
        found.append((ORDER.index("controller"), last, implied))
    if is_q35 and not any(device.tag == "memballoon" for device in devices):
        implied = Endpoint(connection=Connection.PORT, address=None, key=None)
        found.append((ORDER.index("memballoon"), last, implied))
    return tuple(endpoint for _, _, endpoint in sorted(found, key=lambda item: item[:2]))


def _connection(device: DeviceFacts, *, is_q35: bool) -> Connection:
    model = device.model or ""
    if model in _NO_PCI_MODELS:
        return Connection.NONE
    if model in _PCIE_MODELS:
        return Connection.PORT
    by_virtio = Connection.CONVENTIONAL if model.endswith("virtio-transitional") else Connection.PORT
    if device.tag in _VIRTIO:
        is_virtio = device.bus == "virtio" if device.tag in ("disk", "input") else True
        return by_virtio if is_virtio else Connection.NONE
    match device.tag:
        case "hostdev":
            return by_virtio if device.type in ("pci", "mdev", "scsi_host") else Connection.NONE
        case "controller":
            return _controller_connection(device, by_virtio, is_q35=is_q35)
        case "serial":
            return Connection.CONVENTIONAL if device.target == "pci-serial" else Connection.NONE
        case "watchdog":
            return Connection.CONVENTIONAL if model == "i6300esb" else Connection.NONE
        case "sound":
            return Connection.NONE if is_q35 and model == "ich9" else Connection.CONVENTIONAL
        case _:  # interface, video, shmem
            return by_virtio if model.startswith("virtio") else Connection.CONVENTIONAL


def _controller_connection(device: DeviceFacts, by_virtio: Connection, *, is_q35: bool) -> Connection:
    model = device.model or ""
    match device.type:
        case kind if kind in _NO_PCI_CONTROLLERS:
            return Connection.NONE
        case "virtio-serial":
            return by_virtio
        case "scsi" if model.startswith("virtio"):
            return by_virtio
        case "sata" | "usb" if is_q35 and not device.index:
            return Connection.NONE  # 00:1f.2, and 00:1d.x or 00:1a.x
        case _:
            return Connection.CONVENTIONAL


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What libvirt will do with one domain.

    ports: root ports on pcie.0 that hold a device or a bridge once `moved` devices are gone.
    bridge_index: index at which libvirt would add a pcie-to-pci-bridge, or None if it needs none.
    """

    ports: int
    bridge_index: int | None


def forecast(controllers: Sequence[Controller], endpoints: Sequence[Endpoint], moved: Collection[int]) -> Forecast:
    """Foresee the places of a domain whose devices `moved` (Endpoint.key) go elsewhere.

    The bridge's index is the one that it has when nothing is moved, because it is what the guest
    sees of it that must not change.
    """
    has_bridge = any(controller.model in _CONVENTIONAL_MODELS for controller in controllers)
    others = {controller.index: controller for controller in controllers if not controller.is_own}
    own = {controller.index for controller in controllers} - others.keys()
    # What sits behind the hook's controllers would not be there without them.
    given = [e.address for e in endpoints if e.key not in moved or e.address is None or e.address.bus not in own]
    given += [controller.address for controller in others.values()]
    used = {address.bus for address in given if address is not None}
    # libvirt adds what an address refers to first (qemuDomainAssignPCIAddresses).
    last_index = max(others.keys() | used, default=0)
    free = sum(
        index not in used and (index not in others or others[index].model in _PORTS)
        for index in range(1, last_index + 1)
    )
    waiting = [endpoint for endpoint in endpoints if endpoint.address is None]
    bridge_index = None
    if not has_bridge:
        before = 0
        for endpoint in waiting:
            if endpoint.connection is Connection.CONVENTIONAL:
                bridge_index = last_index + max(0, before - free) + 2
                break
            before += endpoint.connection is Connection.PORT
    ports = sum(
        endpoint.connection is Connection.PORT and endpoint.key not in moved
        for endpoint in endpoints
        if endpoint.address is None or endpoint.address.bus != 0
    )
    return Forecast(ports=ports + (bridge_index is not None or has_bridge), bridge_index=bridge_index)


def first_index(seen: Forecast, foreign: Collection[int]) -> int:
    """The lowest controller index that leaves all indexes below to libvirt and KubeVirt.

    foreign: indexes of the controllers of others, and those that addresses refer to.
    Everything below becomes a root port on pcie.0, so NICs, disks and controllers find the same
    port as without the hook, and at least as many ports stay free for hotplug. Devices that come
    after the hostdevs in libvirt's order (balloon, rng, virtio input, video on aarch64) move
    down into the ports that the hostdevs leave. To hold them too, the hook's controllers would
    have to take the very indexes of the hostdevs, and then a wrong forecast would move a NIC.
    """
    wanted = (KUBEVIRT_PORTS, seen.ports + KUBEVIRT_FREE_PORTS, seen.bridge_index or 0, *foreign)
    return max(wanted) + 1
