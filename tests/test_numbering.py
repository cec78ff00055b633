"""Indexes, windows and slots for a given shape and room, where domains of the cases do not reach."""

import pytest

from hook.address import PciAddress
from hook.guest import Controller, GuestAddress, Model
from hook.layout import ExpanderShape, Slot, Switch
from hook.numbering import Expander, Numbered, Place, Room, Shortage, bridge_count, number, own_alias


def slot(*keys: int) -> Slot:
    return Slot(devices=tuple(enumerate(keys)))


def shape(*children: Slot | Switch, cell: int = 0) -> ExpanderShape:
    return ExpanderShape(cell=cell, host_bridges=("pci0000:40",), children=children)


def room(
    *,
    first_index: int = 17,
    taken_indexes: frozenset[int] = frozenset(),
    taken_root_slots: frozenset[int] = frozenset(),
    seated_ports: tuple[GuestAddress, ...] = (),
    waiting_ports: int = 0,
    first_bus: int = 32,
    windows: tuple[tuple[int, int], ...] = (),
) -> Room:
    return Room(
        first_index=first_index,
        taken_indexes=taken_indexes,
        taken_root_slots=taken_root_slots,
        seated_ports=seated_ports,
        waiting_ports=waiting_ports,
        first_bus=first_bus,
        windows=windows,
        aliases=frozenset(),
    )


def numbered(shapes: list[ExpanderShape], given: Room) -> Numbered:
    found = number(shapes, given)
    assert isinstance(found, Numbered)

    return found


def test_a_tree_with_a_switch_in_a_switch_is_numbered_depth_first() -> None:
    """As firmware does: expander 246, port 247, switch 248, its ports 249 and 250, switch 251, its ports 252 and 253."""
    tree = shape(Switch(children=(slot(1), Switch(children=(slot(2), slot(3))))), slot(4))

    assert bridge_count(tree.children) == 8
    assert numbered([tree], room()) == Numbered(
        controllers=(
            Controller(
                index=17,
                model=Model.EXPANDER,
                alias="ua-pcie-numa-expander-17",
                address=GuestAddress(0, 0x1E),
                bus_nr=247,
                cell=0,
            ),
            Controller(
                index=18,
                model=Model.ROOT_PORT,
                alias="ua-pcie-numa-port-18",
                address=GuestAddress(17, 0),
                is_hotplug_off=True,
            ),
            Controller(
                index=19, model=Model.UPSTREAM_PORT, alias="ua-pcie-numa-upstream-19", address=GuestAddress(18, 0)
            ),
            Controller(
                index=20,
                model=Model.DOWNSTREAM_PORT,
                alias="ua-pcie-numa-downstream-20",
                address=GuestAddress(19, 0),
                is_hotplug_off=True,
            ),
            Controller(
                index=21,
                model=Model.DOWNSTREAM_PORT,
                alias="ua-pcie-numa-downstream-21",
                address=GuestAddress(19, 1),
                is_hotplug_off=True,
            ),
            Controller(
                index=22, model=Model.UPSTREAM_PORT, alias="ua-pcie-numa-upstream-22", address=GuestAddress(21, 0)
            ),
            Controller(
                index=23,
                model=Model.DOWNSTREAM_PORT,
                alias="ua-pcie-numa-downstream-23",
                address=GuestAddress(22, 0),
                is_hotplug_off=True,
            ),
            Controller(
                index=24,
                model=Model.DOWNSTREAM_PORT,
                alias="ua-pcie-numa-downstream-24",
                address=GuestAddress(22, 1),
                is_hotplug_off=True,
            ),
            Controller(
                index=25,
                model=Model.ROOT_PORT,
                alias="ua-pcie-numa-port-25",
                address=GuestAddress(17, 1),
                is_hotplug_off=True,
            ),
        ),
        expanders=(Expander(index=17, cell=0, bus_nr=247, buses=9, host_bridges=("pci0000:40",)),),
        places={
            1: Place(address=GuestAddress(20, 0), is_multifunction=False, guest_bdf=PciAddress(0, 250, 0, 0)),
            2: Place(address=GuestAddress(23, 0), is_multifunction=False, guest_bdf=PciAddress(0, 253, 0, 0)),
            3: Place(address=GuestAddress(24, 0), is_multifunction=False, guest_bdf=PciAddress(0, 254, 0, 0)),
            4: Place(address=GuestAddress(25, 0), is_multifunction=False, guest_bdf=PciAddress(0, 255, 0, 0)),
        },
        bridge_bdfs={
            18: PciAddress(0, 247, 0, 0),
            19: PciAddress(0, 248, 0, 0),
            20: PciAddress(0, 249, 0, 0),
            21: PciAddress(0, 249, 1, 0),
            22: PciAddress(0, 251, 0, 0),
            23: PciAddress(0, 252, 0, 0),
            24: PciAddress(0, 252, 1, 0),
            25: PciAddress(0, 247, 1, 0),
        },
    )


def test_functions_of_a_card_share_a_slot() -> None:
    assert numbered([shape(Slot(devices=((0, 5), (3, 4))))], room()).places == {
        5: Place(address=GuestAddress(18, 0, 0), is_multifunction=True, guest_bdf=PciAddress(0, 255, 0, 0)),
        4: Place(address=GuestAddress(18, 0, 3), is_multifunction=False, guest_bdf=PciAddress(0, 255, 0, 3)),
    }


@pytest.mark.parametrize(
    ("count", "addresses"),
    [
        pytest.param(32, {0: (0, 0, False), 1: (1, 0, False), 31: (31, 0, False)}, id="32 ports: one to a slot"),
        pytest.param(
            33, {0: (0, 0, True), 1: (0, 1, False), 8: (1, 0, True), 32: (4, 0, True)}, id="33 ports: eight to a slot"
        ),
        pytest.param(223, {222: (27, 6, False)}, id="223 ports: all buses"),
    ],
)
def test_ports_of_one_expander(count: int, addresses: dict[int, tuple[int, int, bool]]) -> None:
    _, *ports = numbered([shape(*(slot(key) for key in range(count)))], room()).controllers

    assert {
        n: (address.slot, address.function, ports[n].is_multifunction)
        for n in addresses
        if (address := ports[n].address) is not None
    } == addresses
    assert len({port.address for port in ports}) == count


TWO = [shape(slot(0), slot(1)), shape(slot(2), cell=1)]  # 3 and 2 buses


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        pytest.param((), [251, 254], id="at the very end"),
        pytest.param(((250, 252),), [245, 248], id="three free buses above the other's are too few"),
        pytest.param(((249, 250),), [251, 254], id="five free buses above the other's are enough"),
        pytest.param(((240, 241), (250, 255)), [245, 248], id="between two others"),
        pytest.param(((240, 245), (244, 255)), [235, 238], id="below two that overlap"),
        pytest.param(((255, 255),), [250, 253], id="below one of one bus"),
    ],
)
def test_windows_are_in_a_row_as_high_as_they_fit(windows: tuple[tuple[int, int], ...], expected: list[int]) -> None:
    assert [expander.bus_nr for expander in numbered(TWO, room(windows=windows)).expanders] == expected


@pytest.mark.parametrize(
    ("taken", "first_index", "expected"),
    [
        pytest.param([], 17, 17, id="nothing is taken"),
        pytest.param([1, 2, 16], 17, 17, id="what is taken is below"),
        pytest.param([17], 17, 18, id="the first one is taken"),
        pytest.param([19, 22], 17, 23, id="the gaps are too small"),
        pytest.param([22], 17, 17, id="the gap is large enough"),
        pytest.param([1, 18], 17, 19, id="one is below and one in the way"),
        pytest.param([], 251, 251, id="up to the last index"),
    ],
)
def test_indexes_are_a_block_at_the_first_place_that_is_large_enough(
    taken: list[int], first_index: int, expected: int
) -> None:
    given = room(taken_indexes=frozenset(taken), first_index=first_index, first_bus=251)

    assert [controller.index for controller in numbered(TWO, given).controllers] == list(range(expected, expected + 5))


def test_expanders_take_the_highest_free_slots_of_pcie_0() -> None:
    shapes = [shape(slot(n), cell=n) for n in range(5)]
    given = room(taken_root_slots=frozenset({0x1C, 0x02}))
    controllers = numbered(shapes, given).controllers

    assert [c.address for c in controllers if c.model is Model.EXPANDER] == [
        GuestAddress(0, number) for number in (0x1E, 0x19, 0x18, 0x17, 0x16)
    ]


@pytest.mark.parametrize(
    ("shapes", "given", "expected"),
    [
        pytest.param(
            TWO,
            room(first_bus=240, windows=((244, 251),)),
            "it needs 5 guest bus numbers in a row, 8 are free",
            id="buses in pieces",
        ),
        pytest.param(TWO, room(first_bus=252), "it needs 5 guest bus numbers in a row, 4 are free", id="too few buses"),
        pytest.param(
            TWO,
            room(taken_root_slots=frozenset(range(0x1E))),
            "it needs 2 slots of pcie.0 for expanders, 1 are free",
            id="too few slots",
        ),
        pytest.param(
            TWO,
            room(waiting_ports=193),
            "it needs 2 slots of pcie.0 for expanders, 1 are free",
            id="ports without an address take the slots",
        ),
        pytest.param(
            TWO,
            room(
                taken_root_slots=frozenset(range(2, 27)),
                seated_ports=tuple(GuestAddress(0, n // 8, n % 8) for n in range(16, 26 * 8 + 3)),
                waiting_ports=6,
            ),
            "it needs 2 slots of pcie.0 for expanders, 0 are free",
            id="ports in a slot that the hook never takes, and six more, of which five find place in it",
        ),
    ],
)
def test_what_does_not_fit_says_what_is_missing(shapes: list[ExpanderShape], given: Room, expected: str) -> None:
    found = number(shapes, given)

    assert isinstance(found, Shortage)
    assert str(found) == expected


def test_the_last_slots_of_pcie_0_are_for_expanders() -> None:
    for given in (
        room(waiting_ports=192),
        room(
            taken_root_slots=frozenset(range(2, 26)),
            seated_ports=tuple(GuestAddress(0, n // 8, n % 8) for n in range(16, 26 * 8 - 3)),
            waiting_ports=3,
        ),
    ):
        assert [c.address for c in numbered(TWO, given).controllers if c.model is Model.EXPANDER] == [
            GuestAddress(0, 0x1E),
            GuestAddress(0, 0x1C),
        ]


def test_an_alias_that_is_taken_is_avoided() -> None:
    taken = {"ua-pcie-numa-port-18", "ua-pcie-numa-port-18-"}

    assert own_alias(Model.ROOT_PORT, 18, taken) == "ua-pcie-numa-port-18--"
    assert own_alias(Model.PCI_BRIDGE, 3, taken) == "ua-pcie-numa-bridge-3"
