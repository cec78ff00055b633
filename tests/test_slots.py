"""The forecast of what libvirt does, with libvirt as the judge; and what the hook concludes from it."""

from collections import Counter

import pytest
from lxml import etree

from hook import domain
from hook.guest import Connection, Controller, Endpoint, GuestAddress, Model
from hook.slots import Forecast, first_index, forecast
from tests.build import hostdev, mdev, vm
from tests.system.kubevirt import for_libvirt
from tests.system.oracle import Oracle

Places = tuple[Connection, ...]
NONE: Places = ()
PORT: Places = (Connection.PORT,)
CONVENTIONAL: Places = (Connection.CONVENTIONAL,)
XHCI = '<controller type="usb" index="0" model="qemu-xhci"/>'


def nic(model: str) -> str:
    return f'<interface type="ethernet"><model type="{model}"/></interface>'


def disk(bus: str, model: str = "") -> str:
    attribute = f' model="{model}"' if model else ""
    return (
        f'<disk type="file" device="disk"{attribute}><source file="/a"/><target dev="{bus[0]}da" bus="{bus}"/></disk>'
    )


def rng(model: str) -> str:
    return f'<rng model="{model}"><backend model="random">/dev/urandom</backend></rng>'


# One device, and what it looks for on q35 and on virt.
DEVICES: dict[str, tuple[str, Places, Places]] = {
    "a virtio NIC": (nic("virtio"), PORT, PORT),
    "a modern virtio NIC": (nic("virtio-non-transitional"), PORT, PORT),
    "a transitional NIC": (nic("virtio-transitional"), CONVENTIONAL, CONVENTIONAL),
    "an e1000 NIC": (nic("e1000"), CONVENTIONAL, CONVENTIONAL),
    "an rtl8139 NIC": (nic("rtl8139"), CONVENTIONAL, CONVENTIONAL),
    "an e1000e NIC": (nic("e1000e"), PORT, PORT),
    "a virtio disk": (disk("virtio"), PORT, PORT),
    "a transitional disk": (disk("virtio", "virtio-transitional"), CONVENTIONAL, CONVENTIONAL),
    "a SATA disk": (disk("sata"), NONE, CONVENTIONAL),  # libvirt adds the controller
    "a SCSI controller": ('<controller type="scsi" index="0" model="virtio-scsi"/>', PORT, PORT),
    "a modern SCSI controller": ('<controller type="scsi" index="0" model="virtio-non-transitional"/>', PORT, PORT),
    "a transitional SCSI controller": (
        '<controller type="scsi" index="0" model="virtio-transitional"/>',
        CONVENTIONAL,
        CONVENTIONAL,
    ),
    "an LSI SCSI controller": ('<controller type="scsi" index="0" model="lsilogic"/>', CONVENTIONAL, CONVENTIONAL),
    "a serial controller": ('<controller type="virtio-serial" index="0"/>', PORT, PORT),
    "a transitional serial controller": (
        '<controller type="virtio-serial" index="0" model="virtio-transitional"/>',
        CONVENTIONAL,
        CONVENTIONAL,
    ),
    "the first SATA controller": ('<controller type="sata" index="0"/>', NONE, CONVENTIONAL),
    "a second SATA controller": ('<controller type="sata" index="1"/>', CONVENTIONAL, CONVENTIONAL),
    "an xHCI controller": (XHCI, PORT, PORT),
    "a card reader": ('<controller type="ccid" index="0"/>', NONE, NONE),
    "a random number device": (rng("virtio"), PORT, PORT),
    "a transitional random number device": (rng("virtio-transitional"), CONVENTIONAL, CONVENTIONAL),
    "a balloon": ('<memballoon model="virtio-non-transitional"/>', PORT, PORT),
    "a transitional balloon": ('<memballoon model="virtio-transitional"/>', CONVENTIONAL, CONVENTIONAL),
    "a shared folder": (
        '<filesystem type="mount"><driver type="virtiofs"/><source dir="/a"/><target dir="a"/></filesystem>',
        PORT,
        PORT,
    ),
    "an i6300esb watchdog": ('<watchdog model="i6300esb"/>', CONVENTIONAL, CONVENTIONAL),
    "an ICH9 sound card": ('<sound model="ich9"/>', NONE, CONVENTIONAL),
    "an AC97 sound card": ('<sound model="ac97"/>', CONVENTIONAL, CONVENTIONAL),
    "a VGA screen": ('<video><model type="vga"/></video>', NONE, CONVENTIONAL),
    "a virtio screen": ('<video><model type="virtio"/></video>', NONE, PORT),
    "a bochs screen": ('<video><model type="bochs"/></video>', NONE, PORT),
    "a second screen": (
        '<video><model type="virtio" primary="yes"/></video><video><model type="virtio"/></video>',
        PORT,
        PORT + PORT,
    ),
    "a virtio tablet": ('<input type="tablet" bus="virtio"/>', PORT, PORT),
    "a USB tablet": ('<input type="tablet" bus="usb"/>', NONE, NONE),
    "a socket to the host": ('<vsock model="virtio-non-transitional"><cid auto="yes"/></vsock>', PORT, PORT),
    "a serial port": ('<serial type="pty"/>', NONE, NONE),
    "a PCI serial port": (
        '<serial type="pty"><target type="pci-serial" port="0"/></serial>',
        CONVENTIONAL,
        CONVENTIONAL,
    ),
    "shared memory": (
        '<shmem name="a"><model type="ivshmem-plain"/><size unit="M">4</size></shmem>',
        CONVENTIONAL,
        CONVENTIONAL,
    ),
    "a passed-through device": (
        '<hostdev mode="subsystem" type="pci"><source><address bus="0x41" slot="0"/></source></hostdev>',
        PORT,
        PORT,
    ),
    "a mediated device": (mdev("4b20d080-1b54-4048-85b3-a6a62d165c01"), PORT, PORT),
    "a passed-through USB device": (
        '<hostdev mode="subsystem" type="usb"><source><address bus="1" device="2"/></source></hostdev>',
        NONE,
        NONE,
    ),
    "a vhost SCSI device": (
        '<hostdev mode="subsystem" type="scsi_host"><source protocol="vhost" wwpn="naa.5123456789abcde0"/></hostdev>',
        PORT,
        PORT,
    ),
    "hot-pluggable memory": (
        '<memory model="virtio-mem"><target><size unit="MiB">256</size><node>0</node><block unit="MiB">2</block>'
        '<requested unit="MiB">0</requested></target></memory>',
        PORT,
        PORT,
    ),
}
MACHINES = {"x86_64": "q35", "aarch64": "virt"}
# Devices that need USB, and so its controller.
WITH_USB = ("a card reader", "a USB tablet", "a passed-through USB device")


def with_device(name: str, arch: str) -> bytes:
    """A VM with this device, and nothing beside it that looks for a place but the USB controller."""
    device = DEVICES[name][0] + ("" if "balloon" in name else '<memballoon model="none"/>')
    xml = vm([device], arch=arch, machine=MACHINES[arch]).decode()
    if name in WITH_USB or XHCI in device:
        xml = xml.replace('<controller type="usb" index="0" model="none"/>', XHCI if name in WITH_USB else "")
    xml = xml.replace("<os>", '<memoryBacking><source type="memfd"/><access mode="shared"/></memoryBacking>\n\t<os>')
    return xml.replace("<memory unit", '<maxMemory slots="4" unit="GiB">32</maxMemory>\n\t<memory unit', 1).encode()


def foreseen(xml: bytes) -> Counter[Connection]:
    """Where devices look for a place, without those that do not."""
    places = Counter(endpoint.connection for endpoint in domain.parse(xml).guest.endpoints)
    del places[Connection.NONE]
    return places


def found(xml: bytes) -> Counter[Connection]:
    """Where libvirt put the devices: root ports and PCI bridges, not pcie.0."""
    root = etree.fromstring(xml)
    controllers = root.findall("devices/controller[@type='pci']")
    models = {controller.get("index"): controller.get("model") for controller in controllers}
    places: Counter[Connection] = Counter()
    for address in root.iterfind("devices/*/address[@type='pci']"):
        model = models[str(int(address.get("bus", ""), 16))]
        if address.getparent() not in controllers and model != "pcie-root":
            places[Connection.PORT if model == "pcie-root-port" else Connection.CONVENTIONAL] += 1
    return places


def test_the_order_is_libvirts_with_a_passed_through_nic_among_the_hostdevs() -> None:
    nic_by_vfio = '<interface type="hostdev"><source><address type="pci" bus="1" slot="0"/></source></interface>'
    disk = '<disk type="file"><source file="/a"/><target dev="vda" bus="virtio"/></disk>'
    devices = ['<memballoon model="virtio"/>', nic_by_vfio, disk, nic("virtio"), hostdev("0000:41:00.0")]
    guest = domain.parse(vm(devices)).guest

    assert [endpoint.key for endpoint in guest.endpoints] == [4, 3, 2, 5, 1]


def test_on_aarch64_a_sata_controller_is_added_only_where_there_is_none() -> None:
    disk = '<disk type="file"><target dev="sda" bus="sata"/></disk>'
    sata = '<controller type="sata" index="0"/>'

    assert [e.key for e in domain.parse(vm([disk], arch="aarch64")).guest.endpoints] == [None]
    assert [e.key for e in domain.parse(vm([disk, sata], arch="aarch64")).guest.endpoints] == [2]


def test_a_watchdog_of_the_chipset_looks_for_nothing() -> None:
    assert foreseen(vm(['<watchdog model="itco"/>', '<memballoon model="none"/>'])) == Counter()


def test_a_usb_controller_of_the_chipset_has_a_place_of_its_own() -> None:
    usb = vm(['<controller type="usb" index="0" model="ich9-ehci1"/>', '<memballoon model="none"/>'])
    usb = usb.replace(b'<controller type="usb" index="0" model="none"/>', b"")

    assert foreseen(usb) == Counter()
    assert foreseen(usb.replace(b'index="0"', b'index="1"')) == Counter(CONVENTIONAL)


@pytest.mark.parametrize("arch", MACHINES)
@pytest.mark.parametrize("name", DEVICES)
def test_what_a_device_looks_for(name: str, arch: str) -> None:
    _, on_q35, on_virt = DEVICES[name]
    wanted = on_q35 if arch == "x86_64" else on_virt

    assert foreseen(with_device(name, arch)) == Counter(wanted + (PORT if name in WITH_USB else NONE))


@pytest.mark.parametrize("arch", MACHINES)
@pytest.mark.parametrize("name", DEVICES)
def test_libvirt_puts_a_device_where_it_was_foreseen(oracle: Oracle, name: str, arch: str) -> None:
    xml = with_device(name, arch)

    assert foreseen(xml) == found(oracle.define(for_libvirt(xml)))


# Conclusions.


def port(key: int, address: GuestAddress | None = None) -> Endpoint:
    return Endpoint(connection=Connection.PORT, address=address, key=key)


def slot(key: int, address: GuestAddress | None = None) -> Endpoint:
    return Endpoint(connection=Connection.CONVENTIONAL, address=address, key=key)


BRIDGE = Controller(index=3, model=Model.PCI_BRIDGE)


@pytest.mark.parametrize(
    ("controllers", "endpoints", "moved", "expected"),
    [
        pytest.param([], [], [], Forecast(ports=0, bridge_index=None), id="nothing"),
        pytest.param([], [port(0), port(1)], [1], Forecast(ports=1, bridge_index=None), id="what moves needs no port"),
        pytest.param(
            [],
            [port(0, GuestAddress(0, 3)), port(1, GuestAddress(5, 0))],
            [],
            Forecast(ports=1, bridge_index=None),
            id="on pcie.0",
        ),
        pytest.param(
            [], [port(0), slot(1), port(2)], [], Forecast(ports=3, bridge_index=3), id="a bridge after one port"
        ),
        pytest.param([], [slot(0), slot(1)], [], Forecast(ports=1, bridge_index=2), id="one bridge for two devices"),
        pytest.param(
            [], [port(0), slot(1)], [0], Forecast(ports=1, bridge_index=3), id="the bridge as if nothing moved"
        ),
        pytest.param(
            [], [slot(0, GuestAddress(2, 1))], [], Forecast(ports=0, bridge_index=None), id="it has its place"
        ),
        pytest.param(
            [BRIDGE], [port(0), slot(1)], [], Forecast(ports=2, bridge_index=None), id="a bridge that is there"
        ),
        pytest.param(
            [Controller(index=7, model=Model.ROOT_PORT)],
            [port(0), slot(1)],
            [],
            Forecast(ports=2, bridge_index=9),
            id="behind the highest port",
        ),
        pytest.param(
            [
                Controller(index=1, model=Model.ROOT_PORT, address=GuestAddress(0, 2)),
                Controller(index=2, model=Model.UPSTREAM_PORT, address=GuestAddress(1, 0)),
                Controller(index=3, model=Model.DOWNSTREAM_PORT, address=GuestAddress(2, 0)),
                Controller(index=5, model=Model.ROOT_PORT, address=GuestAddress(0, 3)),
            ],
            [port(0, GuestAddress(5, 0)), port(1), port(2), port(3), slot(4)],
            [],
            Forecast(ports=5, bridge_index=8),
            id="of five indexes the third has a free port and the fourth becomes one; the third device gets a new one",
        ),
        pytest.param(
            [Controller(index=1, model=Model.ROOT_PORT)],
            [port(0), port(1), slot(2)],
            [],
            Forecast(ports=3, bridge_index=4),
            id="the first port is free",
        ),
        pytest.param(
            [Controller(index=40, model=Model.ROOT_PORT, alias="ua-pcie-numa-port-40")],
            [port(0), slot(1)],
            [],
            Forecast(ports=2, bridge_index=3),
            id="the hook's own ports do not count",
        ),
    ],
)
def test_the_forecast(
    controllers: list[Controller], endpoints: list[Endpoint], moved: list[int], expected: Forecast
) -> None:
    assert expected == forecast(controllers, endpoints, moved)


@pytest.mark.parametrize(
    ("seen", "foreign", "expected"),
    [
        pytest.param(Forecast(ports=0, bridge_index=None), [], 17, id="above KubeVirt's 16 ports"),
        pytest.param(Forecast(ports=10, bridge_index=None), [], 17, id="6 free ports fit below"),
        pytest.param(Forecast(ports=11, bridge_index=None), [], 18, id="6 free ports do not"),
        pytest.param(Forecast(ports=3, bridge_index=20), [], 21, id="above the bridge"),
        pytest.param(Forecast(ports=3, bridge_index=None), [2, 30], 31, id="above what others have"),
    ],
)
def test_the_first_index(seen: Forecast, foreign: list[int], expected: int) -> None:
    assert expected == first_index(seen, foreign)
