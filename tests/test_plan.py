"""Decisions that no case shows: which cell stands for which node, whose an address is, what fits the machine."""

from collections.abc import Mapping

import pytest
from lxml import etree

from hook import domain
from hook.address import PciAddress, parse_cpu_list
from hook.config import Config, Devices, Extra, Layout, Mode, from_flags
from hook.define import Outcome, define_domain
from hook.errors import Finding, Severity
from hook.guest import GuestAddress
from hook.host import HostTopology, NumaNode, PciFunction
from hook.plan import Action, DevicePlan, Plan, map_cells
from hook.recording import parse_recording
from tests.build import controller, host, hostdev, large_bar, nic, vm

A, B = "0000:41:00.0", "0000:c1:00.0"
A_PATH, B_PATH = f"pci0000:40/0000:40:01.0/{A}", f"pci0000:c0/0000:c0:01.0/{B}"
HOST = host({A_PATH: 0, B_PATH: 1}, distances={0: "10 21", 1: "21 10"})


def run(xml: bytes, config: Config | None = None, recording: str = HOST, vmi: bytes | None = None) -> Outcome:
    outcome = define_domain(xml, vmi, lambda: parse_recording(recording), config or Config())
    assert outcome.error is None

    return outcome


def codes(outcome: Outcome) -> list[str]:
    return [finding.code for finding in outcome.plan.findings]


# Cells.

NODES = HostTopology(
    functions={},
    mediated_devices={},
    nodes={n: NumaNode(id=n, cpus=parse_cpu_list(cpus), distances={}) for n, cpus in {0: "0-3", 1: "4-7"}.items()},
)


@pytest.mark.parametrize(
    ("memnodes", "pins", "expected", "found"),
    [
        pytest.param({0: "0", 1: "1"}, {}, {0: 0, 1: 1}, [], id="memory"),
        pytest.param({0: "1", 1: "0"}, {}, {0: 1, 1: 0}, [], id="memory crosswise"),
        pytest.param({}, {0: "4", 1: "0-3"}, {0: 1, 1: 0}, [], id="pins"),
        pytest.param({0: "0", 1: "1"}, {0: "0-7", 1: "0-7"}, {0: 0, 1: 1}, [], id="memory, though pins say nothing"),
        pytest.param({0: "0-1", 1: "1"}, {0: "1", 1: "5"}, {0: 0, 1: 1}, [], id="pins, where memory spans nodes"),
        pytest.param(
            {0: "0", 1: "1"}, {0: "5", 1: "6"}, {0: 0, 1: 1}, ["memory-not-with-cpus"], id="memory against pins"
        ),
        pytest.param({0: "0-1"}, {0: "0-7", 1: "4"}, {1: 1}, ["spanning-cell"], id="a cell that spans nodes"),
        pytest.param({0: "0"}, {}, {0: 0}, ["spanning-cell"], id="a cell that nothing is said of"),
        pytest.param({0: "1", 1: "1"}, {}, {0: 1, 1: 1}, ["two-cells-one-node"], id="two cells for one node"),
        pytest.param({0: "7", 1: "1"}, {}, {0: 7, 1: 1}, [], id="a node that sysfs does not show"),
        pytest.param({0: "", 1: "1"}, {}, {1: 1}, ["spanning-cell"], id="a memnode without a node"),
        pytest.param({0: "0", 1: "1", 9: "1"}, {}, {0: 0, 1: 1}, [], id="a memnode of a cell that is not there"),
        pytest.param({0: "0"}, {0: "0", 1: ""}, {0: 0}, ["spanning-cell"], id="a pin to no CPU"),
    ],
)
def test_which_cell_stands_for_which_node(
    memnodes: Mapping[int, str], pins: Mapping[int, str], expected: Mapping[int, int], found: list[str]
) -> None:
    cells = map_cells(domain.parse(vm([], memnodes=memnodes, cells={0: "0", 1: "1"}, pins=pins)).guest, NODES)

    assert cells.node_of_cell == expected
    assert cells.cell_of_node == {node: min(c for c in expected if expected[c] == node) for node in expected.values()}
    assert [finding.code for finding in cells.findings] == found


def test_the_order_of_the_cells_has_no_effect() -> None:
    xml = vm([], memnodes={0: "1", 1: "1"})
    turned = xml.replace(b'id="0"', b'id="x"').replace(b'id="1"', b'id="0"').replace(b'id="x"', b'id="1"')

    assert map_cells(domain.parse(xml).guest, NODES) == map_cells(domain.parse(turned).guest, NODES)


# Whose an address is.


@pytest.mark.parametrize(
    ("devices", "address", "action"),
    [
        pytest.param([], "01:00.0", Action.PLACED, id="on a port that libvirt would add"),
        pytest.param([controller(1, "pcie-root-port")], "01:00.0", Action.PLACED, id="on a port without an address"),
        pytest.param([controller(1, "pcie-root-port", "00:02.0")], "01:00.0", Action.PLACED, id="on a port of pcie.0"),
        pytest.param([], "00:05.0", Action.LEFT, id="on pcie.0"),
        pytest.param([controller(0, "pcie-root")], "00:05.0", Action.LEFT, id="on a pcie.0 that is written down"),
        pytest.param(
            [controller(1, "pcie-root-port"), controller(2, "pcie-to-pci-bridge", "01:00.0")],
            "02:01.0",
            Action.LEFT,
            id="on a PCI bridge",
        ),
        pytest.param([controller(1, "pcie-to-pci-bridge")], "01:01.0", Action.LEFT, id="on a PCI bridge of pcie.0"),
        pytest.param(
            [controller(1, "pcie-root-port", "02:00.0"), controller(2, "pcie-root-port", "01:00.0")],
            "01:00.0",
            Action.LEFT,
            id="behind controllers in a circle",
        ),
        pytest.param(
            [controller(17, "pcie-root-port", "00:02.0", alias="ua-pcie-numa-port-17")],
            "11:00.0",
            Action.PLACED,
            id="on a port of the hook",
        ),
        pytest.param(
            [
                controller(1, "pcie-expander-bus", "00:05.0", bus_nr=100, node=0),
                controller(2, "pcie-root-port", "01:00.0"),
            ],
            "02:00.0",
            Action.KEPT,
            id="behind an expander of somebody else",
        ),
    ],
)
def test_whose_an_address_is(devices: list[str], address: str, action: Action) -> None:
    plan = run(vm([*devices, hostdev(A, "a", address=address)])).plan

    assert [device.action for device in plan.devices] == [action]


def test_the_address_of_an_interface_is_the_users_and_that_of_a_gpu_of_the_same_name_is_not() -> None:
    vmi = b'{"spec": {"domain": {"devices": {"interfaces": [{"name": "x", "pciAddress": "0000:05:00.0"}]}}}}'
    xml = vm([hostdev(A, "x", prefix="ua-sriov-", address="05:00.0"), hostdev(B, "x", address="06:00.0")])

    assert [device.action for device in run(xml, vmi=vmi).plan.devices] == [Action.LEFT, Action.PLACED]


# What the policy leaves out.


def test_whether_an_unknown_device_is_a_gpu_is_not_guessed() -> None:
    outcome = run(vm([hostdev("0000:99:00.0", "ghost")]), Config(devices=Devices.GPU))

    assert ([device.action for device in outcome.plan.devices], codes(outcome)) == ([Action.LEFT], ["unknown-device"])


@pytest.mark.parametrize(
    ("class_code", "action"),
    [
        ("0x030000", Action.PLACED),
        ("0x030200", Action.PLACED),
        ("0x038000", Action.PLACED),
        ("0x120000", Action.PLACED),
        ("0x020000", Action.EXCLUDED),
        ("0x040300", Action.EXCLUDED),
        ("0x068000", Action.EXCLUDED),
    ],
)
def test_what_counts_as_a_gpu(class_code: str, action: Action) -> None:
    recording = host({A_PATH: {"numa_node": 0, "class": class_code}})
    plan = run(vm([hostdev(A, "a")]), Config(devices=Devices.GPU), recording).plan

    assert [device.action for device in plan.devices] == [action]


def test_a_device_behind_a_foreign_expander_of_which_nothing_is_known() -> None:
    devices = [
        controller(1, "pcie-expander-bus", "00:05.0", bus_nr=100, node=0),
        controller(2, "pcie-root-port", "01:00.0"),
    ]
    outcome = run(vm([*devices, hostdev("0000:99:00.0", "ghost", address="02:00.0")]))

    assert [str(finding) for finding in outcome.plan.findings] == [
        "warning [unverified-node] ghost: behind expander 1 of somebody else, and its host node is unknown"
    ]


# Extras.


@pytest.mark.parametrize(
    ("distances", "memnodes", "expected"),
    [
        pytest.param(
            {0: "10 21", 1: "31 10"}, {0: "0", 1: "1"}, {0: {0: 10, 1: 21}, 1: {0: 31, 1: 10}}, id="as on the host"
        ),
        pytest.param(
            {0: "10 21", 1: "31 10"}, {0: "1", 1: "0"}, {0: {0: 10, 1: 31}, 1: {0: 21, 1: 10}}, id="crosswise"
        ),
        pytest.param(None, {0: "0", 1: "1"}, {}, id="the host has no table"),
        pytest.param({0: "10 21", 1: "31 10"}, {0: "0", 1: "0-1"}, {}, id="a cell spans nodes"),
        pytest.param({0: "10 21", 1: "31 10"}, {0: "0", 1: "0"}, {}, id="two cells on one node"),
        pytest.param({0: "10 10", 1: "10 10"}, {0: "0", 1: "1"}, {}, id="a table that calls all nodes one"),
        pytest.param({0: "11 21", 1: "21 11"}, {0: "0", 1: "1"}, {}, id="a table that calls no node itself"),
    ],
)
def test_distances(
    distances: Mapping[int, str] | None, memnodes: Mapping[int, str], expected: Mapping[int, object]
) -> None:
    recording = host({A_PATH: 0}, distances=distances)
    outcome = run(vm([hostdev(A, "a")], memnodes=memnodes), Config(distances=Extra.AUTO), recording)

    assert outcome.plan.distances == expected
    assert ("no-distances" in codes(outcome)) is (expected == {})


# The guest that is foreseen.


@pytest.mark.parametrize("layout", Layout)
def test_the_foreseen_guest_has_every_placed_device_in_its_cell(layout: Layout) -> None:
    outcome = run(vm([hostdev(A, "a"), hostdev(B, "b"), hostdev("0000:99:00.0", "ghost")]), Config(layout=layout))
    guest = outcome.plan.guest_topology(outcome.host)
    placed = {d.hostdev.name: d.place.guest_bdf for d in outcome.plan.devices if d.place is not None}

    assert placed == {"a": PciAddress.parse("0000:fd:00.0"), "b": PciAddress.parse("0000:ff:00.0")}
    assert {str(address): (f.root, f.bridges, f.numa_node) for address, f in guest.functions.items()} == {
        "0000:fc:00.0": ("devices/pci0000:fc", (), 0),
        "0000:fd:00.0": ("devices/pci0000:fc", (PciAddress.parse("0000:fc:00.0"),), 0),
        "0000:fe:00.0": ("devices/pci0000:fe", (), 1),
        "0000:ff:00.0": ("devices/pci0000:fe", (PciAddress.parse("0000:fe:00.0"),), 1),
    }


def test_a_device_that_is_not_placed_keeps_what_it_has() -> None:
    plan = run(vm([hostdev(A, "a", address="00:05.0")])).plan

    assert [(d.action, d.place, d.hostdev.address) for d in plan.devices] == [(Action.LEFT, None, GuestAddress(0, 5))]


def test_a_plan_that_places_nothing() -> None:
    xml = vm([hostdev("0000:99:00.0", "ghost")])
    why = "sysfs does not know 0000:99:00.0"

    assert run(xml).plan == Plan(
        layout=Layout.NODE,
        is_changed=False,
        controllers=(),
        expanders=(),
        devices=(DevicePlan(hostdev=domain.parse(xml).guest.hostdevs[0], action=Action.LEFT, reason=why),),
        findings=(Finding(Severity.WARNING, "unknown-device", "ghost", why),),
    )


def test_distances_alone_are_a_change() -> None:
    outcome = run(vm([hostdev("0000:99:00.0", "ghost")]), Config(distances=Extra.AUTO))

    assert outcome.plan.is_changed
    assert outcome.xml.count(b'<sibling id="1" value="21"/>') == 1


@pytest.mark.parametrize("lost", ["address", "multifunction"])
def test_what_is_lost_of_a_devices_place_is_a_change_though_its_port_is_there(lost: str) -> None:
    card = host({A_PATH: 0, f"{A_PATH[:-1]}1": 0})
    first = run(vm([hostdev(A, "a"), hostdev(f"{A[:-1]}1", "b")]), recording=card)
    root = etree.fromstring(first.xml)
    device = root.find("devices/hostdev")
    assert device is not None
    address = device.find("address")
    assert address is not None
    if lost == "address":
        device.remove(address)
    else:
        del address.attrib[lost]
    second = run(etree.tostring(root), recording=card)

    assert second.plan.is_changed
    assert domain.parse(second.xml).guest.hostdevs == domain.parse(first.xml).guest.hostdevs


@pytest.mark.parametrize("config", [Config(mode=Mode.OFF), Config()], ids=["switched off", "no cell for a node"])
def test_an_unchanged_plan_has_the_addresses_that_are_there(config: Config) -> None:
    plan = run(vm([hostdev(A, "a", address="01:00.0")], memnodes={}), config).plan

    assert [device.address for device in plan.devices] == [GuestAddress(1, 0)]


def test_a_reason_to_do_nothing_is_a_remark_for_a_vm_without_devices() -> None:
    own = controller(18, "pcie-root-port", alias="ua-pcie-numa-port-18")

    assert [str(f) for f in run(vm([own], machine="pc")).plan.findings] == [
        "info [unsupported-machine] machine 'pc' on x86_64 cannot hold PCIe expander buses"
    ]


def test_an_excluded_device_is_excluded_where_there_is_no_room_too() -> None:
    ports = [controller(index, "pcie-root-port") for index in range(1, 241)]
    own = controller(250, "pcie-root-port", "00:1e.0", alias="ua-pcie-numa-port-250")
    devices = [hostdev(A, "a"), hostdev(B, "b", address="fa:00.0")]
    config = from_flags({"exclude": "a"})
    plan = run(vm([*ports, own, *devices]), config).plan

    assert [(d.action, d.address) for d in plan.devices] == [(Action.EXCLUDED, None), (Action.LEFT, None)]
    assert plan.is_changed
    assert not run(vm([*ports, *devices[:1], hostdev(B, "b")]), config).plan.is_changed


def test_the_foreseen_guest_is_the_hosts_devices_in_the_guests_tree() -> None:
    """Class and identity are the device's own; node, place and neighbours are the guest's."""
    given = {"numa_node": 0, "vendor": "0x15b3", "device": "0x101e", "local_cpulist": "0-3", "class": "0x020000"}
    recording = host({A_PATH: 0, f"{A_PATH[:-12]}0000:41:00.1": {**given, "physfn": A}})
    outcome = run(vm([hostdev("0000:41:00.1", "vf", prefix="ua-sriov-")]), recording=recording)
    port, vf = PciAddress.parse("0000:fe:00.0"), PciAddress.parse("0000:ff:00.0")
    root = "devices/pci0000:fe"

    assert outcome.plan.guest_topology(outcome.host) == HostTopology(
        functions={
            port: PciFunction(address=port, root=root, above=(), bridges=(), class_code=0x060400, numa_node=0),
            vf: PciFunction(
                address=vf,
                root=root,
                above=(port,),
                bridges=(port,),
                vendor=0x15B3,
                device=0x101E,
                class_code=0x020000,
                numa_node=0,
            ),
        },
        mediated_devices={},
        nodes={},
    )


# Room.


def own_indexes(outcome: Outcome) -> list[int]:
    return [own.index for own in outcome.plan.controllers]


def test_the_hooks_block_is_behind_a_foreign_port_where_a_bridge_is_kept_too() -> None:
    outcome = run(vm([controller(30, "pcie-root-port"), nic("e1000"), hostdev(A, "a")]))

    assert own_indexes(outcome) == [1, 32, 33, 34]


def test_a_bridge_that_comes_later_has_the_index_that_it_would_have_had_at_once() -> None:
    """The GPU's place behind the hook's port says nothing of what libvirt would do without the hook."""
    first = run(vm([hostdev(A, "a")]))
    later = run(first.xml.replace(b"<hostdev", f"{nic('e1000')}<hostdev".encode(), 1))

    assert own_indexes(first) == [17, 18]
    assert own_indexes(later) == own_indexes(run(vm([nic("e1000"), hostdev(A, "a")]))) == [1, 2, 17, 18]


def test_a_port_whose_bridge_is_gone_is_made_anew_with_it() -> None:
    devices = [nic("e1000"), hostdev(A, "a")]
    port = controller(3, "pcie-root-port", "00:02.0", alias="ua-pcie-numa-port-3")

    assert run(vm([port, *devices])).plan.controllers == run(vm(devices)).plan.controllers


@pytest.mark.parametrize(
    ("others", "count", "available"),
    [
        # 100 NICs and the balloon have ports, and a bridge of one of them could have a bus: 103 is the first free one.
        pytest.param([nic(dev=f"tap{n}") for n in range(100)], 152, 153, id="as many as there are ports of others"),
        pytest.param([controller(150, "pcie-root-port")], 104, 105, id="a port of others with a high index"),
    ],
)
def test_buses_that_pcie_0_can_reach_are_not_used_though_the_hooks_block_is_lower(
    others: list[str], count: int, available: int
) -> None:
    own = controller(17, "pcie-expander-bus", "00:1e.0", bus_nr=254, node=0, alias="ua-pcie-numa-expander-17")
    paths = [f"pci0000:40/0000:40:{n // 8:02x}.{n % 8}/0000:{n + 0x41:02x}:00.0" for n in range(count + 1)]
    devices = [hostdev(path.rpartition("/")[2]) for path in paths]
    recording = host(dict.fromkeys(paths, 0))
    fits, too_many = (run(vm([own, *others, *some]), recording=recording) for some in (devices[:-1], devices))

    assert own_indexes(fits) == list(range(17, 17 + count + 1))
    assert fits.plan.expanders[0].bus_nr == 256 - available
    assert [f.message for f in too_many.plan.findings if f.code == "no-room"] == [
        f"layout node does not fit: it needs {count + 2} guest bus numbers in a row, {available} are free"
    ]


def bar(size_bytes: int) -> dict[str, object]:
    """A device of no known node with one 64-bit prefetchable BAR."""
    return {"numa_node": -1, "resource": large_bar(size_bytes)}


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        pytest.param([64 << 30, 32 << 30, 16 << 30, 8 << 30], [], id="120 GiB"),
        pytest.param([64 << 30, 32 << 30, 16 << 30, 8 << 30, 256 << 20], ["mmio-window"], id="a little more"),
    ],
)
def test_a_vm_of_which_nothing_is_placed_has_sixteen_ports(sizes: list[int], found: list[str]) -> None:
    """As KubeVirt makes them; each takes half a GiB of OVMF's 128."""
    devices = {f"pci0000:40/0000:40:{n:02x}.0/0000:{n + 0x41:02x}:00.0": bar(size) for n, size in enumerate(sizes)}
    xml = vm([hostdev(path.rpartition("/")[2]) for path in devices], is_efi=True, cpu_mode="host-model")
    outcome = run(xml, recording=host(devices))

    assert codes(outcome) == ["unknown-node"] * len(sizes) + found


# One BAR of 256 GiB, which fits below 40 bits, and one of 512 GiB, which does not.
FITS = "0x0000008000000000 0x000000bfffffffff 0x000000000014220c"
LARGE = "0x0000008000000000 0x000000ffffffffff 0x000000000014220c"
NO_ADDRESS = "some or all of them will have no address; "


@pytest.mark.parametrize(
    ("cpu", "resource", "config", "said"),
    [
        pytest.param('mode="host-passthrough"', LARGE, Config(), None, id="nobody knows the host's bits"),
        pytest.param('mode="host-model"', LARGE, Config(), f"{NO_ADDRESS}set maxphysaddr to auto", id="the user may"),
        pytest.param(
            'mode="host-model"', LARGE, Config(maxphysaddr=Extra.AUTO), "maxphysaddr is added", id="the hook adds it"
        ),
        pytest.param(
            'mode="custom"',
            LARGE,
            Config(maxphysaddr=Extra.AUTO),
            f"{NO_ADDRESS}give the guest more physical address bits",
            id="such a CPU has not the host's",
        ),
        pytest.param('mode="host-model"', FITS, Config(maxphysaddr=Extra.AUTO), None, id="it fits"),
    ],
)
def test_what_is_said_of_large_bars(cpu: str, resource: str, config: Config, said: str | None) -> None:
    recording = host({A_PATH: {"numa_node": 0, "resource": resource}})
    outcome = run(vm([hostdev(A, "a")]).replace(b'mode="host-passthrough"', cpu.encode()), config, recording)
    found = [f.message.rpartition("not NUMA: ")[2] for f in outcome.plan.findings if f.code == "mmio-window"]

    assert found == ([said] if said else [])
    assert outcome.plan.is_maxphysaddr_added is (said == "maxphysaddr is added")
