"""Times the planner alone, without gRPC: its parts, recorded machines, and its growth with the number of devices."""

from collections.abc import Callable

import pytest

from hook import domain, sysfs
from hook.address import PciAddress
from hook.config import Config, Layout
from hook.plan import Plan, make_plan
from hook.recording import parse_recording
from tests.bench.conftest import Measure
from tests.machines import domain_xml, machine
from tests.scenario import Scenario

pytestmark = pytest.mark.bench
ROUNDS = 21
NODES = 8


def grown_host(count: int) -> tuple[str, list[PciAddress]]:
    """A host of 8 nodes with `count` GPUs and NICs in turn, pairs of them below a switch each."""
    lines, devices = [], []
    for node in range(NODES):
        lines.append(f"devices/system/node/node{node}/cpulist = {node}")
        lines.append(
            f"devices/system/node/node{node}/distance = {' '.join('10' if n == node else '20' for n in range(NODES))}"
        )
    for number in range(count):
        node, pair, side = number % NODES, number // NODES // 2, number // NODES % 2
        root = node * 32
        switch = f"devices/pci0000:{root:02x}/0000:{root:02x}:{pair + 1:02x}.0/0000:{root + 1:02x}:{pair:02x}.0"
        address = PciAddress(0, root + 2 + 2 * pair + side, 0, 0)
        path = f"{switch}/0000:{root + 1:02x}:{16 + 2 * pair + side - 15:02x}.1/{address}"
        lines.append(f"{path}/numa_node = {node}")
        lines.append(f"{path}/class = {'0x030200' if side else '0x020000'}")
        lines.append(f"bus/pci/devices/{address} -> ../../../{path}")
        devices.append(address)
    return "".join(f"{line}\n" for line in lines), devices


SCENARIO = Scenario("huge-240vcpu-64dev")
GUEST = domain.parse(SCENARIO.xml()).guest
SOURCES = [h.source for h in GUEST.hostdevs if isinstance(h.source, PciAddress)]
HOST = sysfs.read_host(SCENARIO.sysfs, SOURCES, ())
PARTS: dict[str, Callable[[], object]] = {
    "parse the domain XML": lambda: domain.parse(SCENARIO.xml()),
    "read the host": lambda: sysfs.read_host(SCENARIO.sysfs, SOURCES, ()),
    "plan, layout node": lambda: make_plan(GUEST, HOST, Config(), frozenset(), is_on_root_complex=False),
}


@pytest.mark.parametrize("part", PARTS)
def test_part(measure: Measure, part: str) -> None:
    measure("64 devices, 8 cells, 240 vCPUs, 47 KB", part, PARTS[part], ROUNDS)


@pytest.mark.parametrize("name", ["dgx2", "mi250-16gcd", "oci-bm-h100"])
def test_machine(measure: Measure, name: str) -> None:
    it = machine(name)
    guest = domain.parse(domain_xml(it.cpu_nodes, it.devices)).guest
    config = Config(layout=Layout.SWITCH)
    measure(
        "plan of every device of a machine, layout switch",
        name,
        lambda: make_plan(guest, it.host, config, frozenset(), is_on_root_complex=False),
        ROUNDS,
        note=f"{len(it.devices)} devices",
    )


@pytest.mark.parametrize("count", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("layout", Layout)
def test_growth(measure: Measure, layout: Layout, count: int) -> None:
    text, devices = grown_host(count)
    guest = domain.parse(domain_xml(range(NODES), devices)).guest
    host = sysfs.read_host(parse_recording(text), devices, ())

    def work() -> Plan:
        return make_plan(guest, host, Config(layout=layout), frozenset(), is_on_root_complex=False)

    used = work().layout
    note = "" if used is layout else f"does not fit, {used} is used"
    measure(f"growth, layout {layout}", f"{count} devices", work, ROUNDS, note=note, size=count)
