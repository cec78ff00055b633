"""Classes of pairs: against the matrices of 13 recorded machines, and what each layout promises about them."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hook.address import PciAddress
from hook.config import Layout
from hook.define import Outcome
from hook.host import HostTopology
from hook.layout import fused_bridges
from hook.locality import Distance, NcclPath, distance, distance_matrix, nccl_path
from hook.recording import parse_recording
from hook.sysfs import all_functions, read_host
from tests.build import host
from tests.machines import NAMES, Machine, machine, plan_on


@pytest.mark.parametrize("name", NAMES)
def test_distances_are_those_of_nvidia_smi(name: str) -> None:
    it = machine(name)

    assert [[distance(it.host, a, b).name for b in it.devices] for a in it.devices] == it.smi


@pytest.mark.parametrize("name", NAMES)
def test_paths_are_those_of_nccl(name: str) -> None:
    it = machine(name)

    assert [[nccl_path(it.host, a, b).name for b in it.devices] for a in it.devices] == it.nccl


def test_an_unknown_device_is_an_error_not_a_distance() -> None:
    it = machine("dgx2")
    with pytest.raises(KeyError):
        distance(it.host, PciAddress(0, 0xFF, 0, 0), next(iter(it.devices)))


def tree(recording: str, *addresses: str) -> tuple[HostTopology, list[PciAddress]]:
    """A small host, and these of its functions."""
    found = parse_recording(recording)
    return read_host(found, all_functions(found), ()), [PciAddress.parse(address) for address in addresses]


def test_two_bridges_below_the_common_one_are_several() -> None:
    switch = "pci0000:40/0000:40:01.0"
    near, far = f"{switch}/0000:41:00.0", f"{switch}/0000:41:01.0/0000:42:00.0/0000:43:00.0"
    it, (a, b) = tree(host({near: 0, far: 0}), "0000:41:00.0", "0000:43:00.0")

    assert distance(it, a, b) is Distance.PXB


@pytest.mark.parametrize(
    ("node_of_switch", "expected"),
    [(1, NcclPath.SYS), (0, NcclPath.PHB), (-1, NcclPath.SYS)],
    ids=["another node", "the same node", "unknown, which is not the other's"],
)
def test_nccl_takes_the_node_of_the_outermost_switch(node_of_switch: int, expected: NcclPath) -> None:
    """Not of the device, which says 0. Source: NCCL src/graph/xml.cc (2.30), which walks up from the device."""
    port = "pci0000:40/0000:40:01.0"
    upstream = f"{port}/0000:41:00.0"
    below = f"{upstream}/0000:42:00.0/0000:43:00.0"
    beside = "pci0000:c0/0000:c0:01.0/0000:c1:00.0"
    it, (a, b) = tree(host({upstream: node_of_switch, below: 0, beside: 0}), "0000:43:00.0", "0000:c1:00.0")

    assert nccl_path(it, a, b) is expected


def test_nccl_takes_the_devices_node_where_the_switch_is_not_known() -> None:
    below = "pci0000:40/0000:40:01.0/0000:41:00.0/0000:42:00.0/0000:43:00.0"
    it, (a, b) = tree(host({below: 0, "pci0000:c0/0000:c0:01.0/0000:c1:00.0": 0}), "0000:43:00.0", "0000:c1:00.0")

    assert nccl_path(it, a, b) is NcclPath.PHB


def test_the_matrix_has_every_pair_in_the_order_given() -> None:
    it, (a, b) = tree(
        host({"pci0000:40/0000:41:00.0": 0, "pci0000:c0/0000:c1:00.0": 1}), "0000:c1:00.0", "0000:41:00.0"
    )

    assert distance_matrix(it, (a, b, b)) == (
        (Distance.X, Distance.SYS, Distance.SYS),
        (Distance.SYS, Distance.X, Distance.X),
        (Distance.SYS, Distance.X, Distance.X),
    )


Pair = tuple[PciAddress, PciAddress, PciAddress, PciAddress]  # two on the host, the same two in the guest


def pairs(outcome: Outcome) -> Iterator[Pair]:
    placed = [(d.hostdev.source, d.place.guest_bdf) for d in outcome.plan.devices if d.place is not None]
    for (a, guest_a), (b, guest_b) in combinations(placed, 2):
        assert isinstance(a, PciAddress)
        assert isinstance(b, PciAddress)
        yield a, b, guest_a, guest_b


def as_nccl_sees_it(host: HostTopology) -> HostTopology:
    """The host with every chip that shows itself as several switches counted once."""
    functions = {
        address: replace(function, bridges=fused_bridges(host, function))
        for address, function in host.functions.items()
    }
    return replace(host, functions=functions)


def is_torn(it: Machine, a: PciAddress, b: PciAddress) -> bool:
    """Two devices below one host bridge with different nodes: the cell wins, so they are SYS in every layout."""
    return it.host.functions[a].root == it.host.functions[b].root and it.host.node_of(a) != it.host.node_of(b)


def expected(it: Machine, layout: Layout, a: PciAddress, b: PciAddress) -> Distance:
    """What a layout promises for a pair of this machine."""
    on_host = distance(as_nccl_sees_it(it.host), a, b)
    if is_torn(it, a, b):
        return Distance.SYS
    if layout is Layout.SWITCH or on_host is Distance.SYS:
        return on_host
    is_same_card = (a.domain, a.bus, a.slot) == (b.domain, b.bus, b.slot)
    if is_same_card and not it.host.functions[a].is_virtual_function:
        return Distance.PIX  # functions of one card stay together
    flat = Distance.PHB if layout is Layout.NODE else min(on_host, Distance.NODE)
    return max(flat, Distance.PHB)


def check_promise(it: Machine, layout: Layout, outcome: Outcome) -> None:
    guest = outcome.plan.guest_topology(it.host)
    found = list(pairs(outcome))

    assert {(a, b): expected(it, layout, a, b) for a, b, _, _ in found} == {
        (a, b): distance(guest, guest_a, guest_b) for a, b, guest_a, guest_b in found
    }
    if layout is Layout.SWITCH:
        lost = [
            (a, b)
            for a, b, guest_a, guest_b in found
            if nccl_path(it.host, a, b) <= NcclPath.PXB < nccl_path(guest, guest_a, guest_b) and not is_torn(it, a, b)
        ]
        assert lost == []


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("name", NAMES)
def test_a_layout_keeps_its_promise_for_every_pair_of_a_machine(name: str, layout: Layout) -> None:
    it = machine(name)
    outcome = plan_on(it, layout, it.cpu_nodes, it.devices)

    assert outcome.plan.layout is layout
    check_promise(it, layout, outcome)


# The pairs whose class nvidia-smi shows differently in layout switch, and why.
FUSED = "a Broadcom chip that shows itself as nested switches, which NCCL takes for one: PXB becomes PIX"
TORN = "one host bridge, two NUMA nodes: each device goes to its own cell"


def test_the_exceptions_of_layout_switch_are_these() -> None:
    exceptions: dict[str, dict[str, int]] = {}
    total = 0
    for name in NAMES:
        it = machine(name)
        outcome = plan_on(it, Layout.SWITCH, it.cpu_nodes, it.devices)
        guest = outcome.plan.guest_topology(it.host)
        for a, b, guest_a, guest_b in pairs(outcome):
            total += 1
            if distance(it.host, a, b) != distance(guest, guest_a, guest_b):
                reason = TORN if is_torn(it, a, b) else FUSED
                counts = exceptions.setdefault(name, {})
                counts[reason] = counts.get(reason, 0) + 1

    assert total == 1406
    assert exceptions == {
        "dgx-a100": {FUSED: 4},
        "l5640-sriov": {TORN: 1},
        "mi250-16gcd": {FUSED: 4},
        "oci-bm-h100": {FUSED: 16},
    }


@st.composite
def assignments(draw: st.DrawFn) -> tuple[Machine, Layout, list[int], list[PciAddress]]:
    """A random machine, layout, subset of the nodes in any order, and subset of the devices in any order."""
    it = machine(draw(st.sampled_from(NAMES)))
    nodes = draw(st.lists(st.sampled_from(it.cpu_nodes), min_size=1, unique=True))
    devices = draw(st.lists(st.sampled_from(list(it.devices)), min_size=1, unique=True))
    return it, draw(st.sampled_from(Layout)), nodes, devices


@settings(max_examples=300, deadline=None, derandomize=True)
@given(assignments())
def test_any_part_of_a_machine_keeps_the_promise(
    assignment: tuple[Machine, Layout, list[int], list[PciAddress]],
) -> None:
    it, layout, nodes, devices = assignment
    outcome = plan_on(it, layout, nodes, devices)
    own_node = {d.hostdev.source for d in outcome.plan.devices if d.cell is not None and nodes[d.cell] == d.host_node}
    guest = outcome.plan.guest_topology(it.host)

    for a, b, guest_a, guest_b in pairs(outcome):
        if {a, b} <= own_node:
            assert expected(it, layout, a, b) == distance(guest, guest_a, guest_b)
