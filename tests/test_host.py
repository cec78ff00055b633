"""The host node of a device, rule by rule, and the nearest node."""

import pytest

from hook.address import PciAddress, parse_cpu_list
from hook.host import HostTopology, NodeSource, NumaNode, PciFunction

DEVICE = PciAddress.parse("0000:41:00.2")
PHYSICAL = PciAddress.parse("0000:41:00.0")
PORT = PciAddress.parse("0000:40:01.1")
SWITCH = PciAddress.parse("0000:45:00.0")


def function(
    address: PciAddress,
    *,
    node: int | None = None,
    above: tuple[PciAddress, ...] = (),
    cpus: str | None = None,
    physical: PciAddress | None = None,
) -> PciFunction:
    return PciFunction(
        address=address,
        root="devices/pci0000:40",
        above=above,
        bridges=above,
        numa_node=node,
        local_cpus=None if cpus is None else parse_cpu_list(cpus),
        physical_function=physical,
    )


def host(
    *functions: PciFunction, nodes: dict[int, str], distances: dict[int, dict[int, int]] | None = None
) -> HostTopology:
    return HostTopology(
        functions={f.address: f for f in functions},
        mediated_devices={},
        nodes={
            id_: NumaNode(id=id_, cpus=parse_cpu_list(cpus), distances=(distances or {}).get(id_, {}))
            for id_, cpus in nodes.items()
        },
    )


ALL = function(DEVICE, node=3, above=(PORT,), cpus="4-7", physical=PHYSICAL)
TWO = {0: "0-3", 1: "4-7"}


@pytest.mark.parametrize(
    ("functions", "nodes", "expected"),
    [
        pytest.param([ALL, function(PHYSICAL, node=0)], TWO, (3, NodeSource.NUMA_NODE), id="its own word comes first"),
        pytest.param(
            [
                function(DEVICE, above=(PORT,), physical=PHYSICAL),
                function(PHYSICAL, node=0),
                function(PORT, node=1),
            ],
            TWO,
            (0, NodeSource.PHYSICAL_FUNCTION),
            id="the physical function comes before the bridge",
        ),
        pytest.param(
            [function(DEVICE, above=(PORT,), physical=PHYSICAL), function(PHYSICAL), function(PORT, node=1)],
            TWO,
            (1, NodeSource.BRIDGE),
            id="a physical function that does not know is passed over",
        ),
        pytest.param(
            [function(DEVICE, physical=PHYSICAL, cpus="0-1")],
            TWO,
            (0, NodeSource.LOCAL_CPULIST),
            id="a physical function that is not there is passed over",
        ),
        pytest.param(
            [function(DEVICE, above=(PORT, SWITCH)), function(PORT, node=0), function(SWITCH, node=1)],
            TWO,
            (1, NodeSource.BRIDGE),
            id="the nearest bridge speaks",
        ),
        pytest.param(
            [function(DEVICE, above=(PORT, SWITCH), cpus="0-3"), function(PORT, node=1)],
            TWO,
            (1, NodeSource.BRIDGE),
            id="a bridge that was not read is passed over, and the bridge comes before the CPUs",
        ),
        pytest.param(
            [function(DEVICE, cpus="0-7")], {2: "0-7"}, (2, NodeSource.SINGLE_NODE), id="a host with one node"
        ),
        pytest.param([function(DEVICE, cpus="5-6")], TWO, (1, NodeSource.LOCAL_CPULIST), id="CPUs of one node"),
        pytest.param([function(DEVICE, cpus="0-7")], TWO, None, id="CPUs of all nodes say nothing"),
        pytest.param([function(DEVICE, cpus="")], TWO, None, id="no CPUs are in no node"),
        pytest.param([function(DEVICE)], TWO, None, id="nobody knows"),
        pytest.param([], TWO, None, id="the device was not read"),
    ],
)
def test_node_of(functions: list[PciFunction], nodes: dict[int, str], expected: tuple[int, NodeSource] | None) -> None:
    assert expected == host(*functions, nodes=nodes).node_of(DEVICE)


@pytest.mark.parametrize(
    ("cpus", "nodes", "expected"),
    [
        pytest.param("0", TWO, 0, id="inside one node"),
        pytest.param("0,4", TWO, None, id="over two nodes"),
        pytest.param("8", TWO, None, id="in no node"),
        pytest.param("", TWO, None, id="no CPU at all"),
        pytest.param("0", {0: "0-3", 1: "0-3"}, None, id="two nodes that claim the same CPUs"),
        pytest.param("0", {0: "0-3", 1: ""}, 0, id="beside a node of memory only"),
    ],
)
def test_node_within(cpus: str, nodes: dict[int, str], expected: int | None) -> None:
    assert expected == host(nodes=nodes).node_within(parse_cpu_list(cpus))


DISTANCES = {0: {0: 10, 1: 12, 2: 20, 3: 20}}


@pytest.mark.parametrize(
    ("origin", "candidates", "expected"),
    [
        pytest.param(0, {1, 2}, 1, id="one is nearer"),
        pytest.param(0, {2, 3}, None, id="a tie"),
        pytest.param(0, {3}, 3, id="the only one"),
        pytest.param(0, set(), None, id="no candidate"),
        pytest.param(0, {1, 4}, None, id="the distance to one of them is not known"),
        pytest.param(1, {0}, None, id="a node without distances"),
        pytest.param(7, {0}, None, id="a node that the host does not have"),
    ],
)
def test_nearest(origin: int, candidates: set[int], expected: int | None) -> None:
    nodes = {0: "0", 1: "1", 2: "2", 3: "3"}

    assert expected == host(nodes=nodes, distances=DISTANCES).nearest(origin, frozenset(candidates))


def test_the_empty_host_knows_nothing() -> None:
    assert HostTopology.empty() == HostTopology(functions={}, mediated_devices={}, nodes={})
    assert HostTopology.empty().node_of(DEVICE) is None


def test_a_function_with_a_physical_function_is_virtual() -> None:
    assert ALL.is_virtual_function
    assert not function(PHYSICAL).is_virtual_function
