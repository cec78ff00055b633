"""The shape of the guest's tree for devices that need no domain; test_locality holds whole machines to it."""

import pytest

from hook.address import PciAddress
from hook.config import Layout
from hook.host import HostTopology, PciFunction
from hook.layout import ExpanderShape, Placed, Slot, Switch, fused_bridges, shape

EMPTY = HostTopology.empty()


def function(path: str, *, chip: tuple[int, int, int, int] | None = None) -> PciFunction:
    """A function at `pci0000:40/0000:40:01.0/…`; chip: vendor, device, subsystem vendor and device."""
    root, *parts = path.split("/")
    *bridges, address = (PciAddress.parse(part) for part in parts)
    vendor, device, subsystem_vendor, subsystem_device = chip or (None, None, None, None)
    return PciFunction(
        address=address,
        root=f"devices/{root}",
        above=tuple(bridges),
        bridges=tuple(bridges),
        vendor=vendor,
        device=device,
        subsystem_vendor=subsystem_vendor,
        subsystem_device=subsystem_device,
    )


def placed(key: int, path: str, *, cell: int = 0, is_whole: bool = True) -> Placed:
    return Placed(key=key, cell=cell, function=function(path), is_whole=is_whole)


def slot(*keys: int) -> Slot:
    return Slot(devices=tuple(enumerate(keys)))


A0, A1 = "pci0000:40/0000:40:01.0/0000:41:00.0", "pci0000:40/0000:40:01.0/0000:41:00.1"
B = "pci0000:c0/0000:c0:01.0/0000:c1:00.0"
BELOW = "pci0000:40/0000:40:01.0/0000:42:00.0/0000:43:0{}.0/0000:4{}:00.0"
DEEP = "pci0000:40/0000:40:01.0/0000:42:00.0/0000:43:0{}.0/0000:5{}:00.0/0000:6{}:0{}.0/0000:{}:00.0"


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (
            Layout.NODE,
            (
                ExpanderShape(cell=0, host_bridges=("pci0000:40", "pci0000:c0"), children=(slot(1), slot(0))),
                ExpanderShape(cell=1, host_bridges=("pci0000:c0",), children=(slot(2),)),
            ),
        ),
        (
            Layout.HOST_BRIDGE,
            (
                ExpanderShape(cell=0, host_bridges=("pci0000:40",), children=(slot(1),)),
                ExpanderShape(cell=0, host_bridges=("pci0000:c0",), children=(slot(0),)),
                ExpanderShape(cell=1, host_bridges=("pci0000:c0",), children=(slot(2),)),
            ),
        ),
    ],
    ids=str,
)
def test_a_host_bridge_whose_devices_belong_to_two_cells(layout: Layout, expected: tuple[ExpanderShape, ...]) -> None:
    devices = [placed(0, B), placed(1, A0), placed(2, "pci0000:c0/0000:c0:02.0/0000:c2:00.0", cell=1)]

    assert shape(layout, EMPTY, devices) == expected
    assert shape(layout, EMPTY, reversed(devices)) == expected


def test_no_device_needs_no_expander() -> None:
    assert shape(Layout.SWITCH, EMPTY, []) == ()


def test_functions_of_one_card_share_a_slot_and_vfs_and_mdevs_do_not() -> None:
    devices = [
        placed(0, A1),
        placed(1, A0),
        placed(2, A0.replace("00.0", "00.2"), is_whole=False),
        placed(3, A0, is_whole=False),
        placed(4, A0, is_whole=False),
    ]

    assert shape(Layout.NODE, EMPTY, devices)[0].children == (slot(1, 0), slot(3), slot(4), slot(2))


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        pytest.param(
            [BELOW.format(0, 4), BELOW.format(1, 5)], (Switch(children=(slot(0), slot(1))),), id="two siblings"
        ),
        pytest.param([BELOW.format(0, 4)], (slot(0),), id="alone below a switch"),
        pytest.param(
            [BELOW.format(0, 4), "pci0000:40/0000:40:02.0/0000:4a:00.0"], (slot(0), slot(1)), id="below two root ports"
        ),
        pytest.param(
            ["pci0000:40/0000:40:01.0/0000:41:00.0", "pci0000:40/0000:40:01.0/0000:41:01.0"],
            (Switch(children=(slot(0), slot(1))),),
            id="two below one root port",
        ),
        pytest.param(["pci0000:40/0000:40:05.0"], (slot(0),), id="on the root bus itself"),
        pytest.param(
            [DEEP.format(0, 0, 0, 0, "70"), DEEP.format(1, 1, 1, 0, "71")],
            (Switch(children=(slot(0), Switch(children=(slot(1),)))),),
            id="below a switch each: the first can do without its own",
        ),
        pytest.param(
            [DEEP.format(0, 0, 0, 0, "70"), DEEP.format(0, 0, 0, 1, "71"), BELOW.format(1, 8)],
            (Switch(children=(slot(2), Switch(children=(slot(0), slot(1))))),),
            id="two below a switch of their own, and one beside it",
        ),
    ],
)
def test_switches(paths: list[str], expected: tuple[Slot | Switch, ...]) -> None:
    devices = [placed(key, path) for key, path in enumerate(paths)]

    assert shape(Layout.SWITCH, EMPTY, devices)[0].children == expected


GEN5, GEN4 = (0x1000, 0xC030, 0x1000), (0x1000, 0xC010, 0x1000)
CASCADE = "pci0000:40/0000:40:01.0/0000:41:00.0/0000:42:00.0/0000:43:00.0/0000:44:00.0/0000:45:00.0"


@pytest.mark.parametrize(
    ("chips", "fused"),
    [
        pytest.param((GEN5, 0x0000, GEN5, 0x1000), True, id="two halves of a Gen5 chip"),
        pytest.param((GEN4, 0xA000, GEN4, 0xA000), True, id="two halves of a Gen4 chip"),
        pytest.param((GEN5, 0x0000, GEN5, 0x0000), False, id="two Gen5 chips"),
        pytest.param((GEN5, 0x1000, GEN5, 0x0000), False, id="Gen5 halves the wrong way round"),
        pytest.param((GEN4, 0x0000, GEN4, 0xA000), False, id="two Gen4 chips"),
        pytest.param((GEN4, 0xA000, GEN5, 0xA000), False, id="of two generations"),
        pytest.param((GEN5, 0x0000, None, 0), False, id="one that was not read"),
        pytest.param((None, 0, GEN5, 0x1000), False, id="the other that was not read"),
    ],
)
def test_two_halves_of_one_switch_chip_count_once(
    chips: tuple[tuple[int, int, int] | None, int, tuple[int, int, int] | None, int], fused: bool
) -> None:
    parts = CASCADE.split("/")
    first, first_revision, second, second_revision = chips
    functions = [
        function("/".join(parts[: depth + 1]), chip=(*chip, revision))
        for depth, chip, revision in ((2, first, first_revision), (4, second, second_revision))
        if chip is not None
    ]
    host = HostTopology(functions={f.address: f for f in functions}, mediated_devices={}, nodes={})
    device = function(CASCADE)

    assert fused_bridges(host, device) == ((*device.bridges[:2], device.bridges[4]) if fused else device.bridges)


def test_two_pairs_of_chips_are_two() -> None:
    """Four switches in each other, the second inside the chip of the first, the fourth inside that of the third."""
    gen4 = (0x1000, 0xC010, 0x1000, 0xA000)
    bridges = [f"0000:{40 + n}:00.0" for n in range(9)]
    device = function("/".join(["pci0000:40", *bridges, "0000:50:00.0"]))
    host = HostTopology(
        functions={
            f.address: f for n in range(9) for f in [function("/".join(["pci0000:40", *bridges[: n + 1]]), chip=gen4)]
        },
        mediated_devices={},
        nodes={},
    )

    assert fused_bridges(host, device) == tuple(device.bridges[n] for n in (0, 1, 4, 5, 8))


def test_two_bridges_below_the_common_one_are_a_switch_of_their_own() -> None:
    """Else the deeper device would be PIX to its neighbours."""
    port = "pci0000:40/0000:40:01.0"
    near = [f"{port}/0000:41:0{n}.0" for n in (0, 1)]
    far = f"{port}/0000:41:02.0/0000:42:00.0/0000:43:00.0"
    devices = [placed(key, path) for key, path in enumerate([*near, far])]

    assert shape(Layout.SWITCH, EMPTY, devices)[0].children == (
        Switch(children=(slot(0), slot(1), Switch(children=(slot(2),)))),
    )


def test_the_common_bridge_is_that_of_the_shortest_way() -> None:
    """The shortest way is not the one with the lowest address."""
    port = "pci0000:40/0000:40:01.0"
    devices = [
        placed(0, f"{port}/0000:41:00.0/0000:42:00.0/0000:43:00.0"),
        placed(1, f"{port}/0000:41:00.0/0000:42:01.0/0000:44:00.0"),
        placed(2, f"{port}/0000:51:00.0"),
    ]

    assert shape(Layout.SWITCH, EMPTY, devices)[0].children == (
        Switch(children=(Switch(children=(slot(0), slot(1))), slot(2))),
    )
