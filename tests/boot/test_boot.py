"""Guests that boot a hook's answer show what was planned: addresses, parents, nodes, BARs, distances, matrices."""

import pytest

from hook.config import Config, Extra, Layout
from hook.define import Outcome, define_domain
from hook.recording import parse_recording, record
from hook.verify import verify
from tests.boot.boot import BootError, Firmware, boot, stand_ins
from tests.boot.conftest import Ask
from tests.boot.report import differences, parse, sysfs
from tests.build import host, hostdev, vm
from tests.golden import check as check_golden
from tests.golden import is_regenerating
from tests.guests import GUESTS, plan_of_stand_ins, recording
from tests.machines import NAMES, machine, plan_on
from tests.scenario import NAMES as SCENARIOS
from tests.scenario import Scenario
from tests.system.oracle import GENERATIONS, Generation, Oracle


def on_machine(name: str, layout: Layout, firmware: Firmware) -> Outcome:
    """A VM with a cell for each node of the machine, and all its devices."""
    it = machine(name)
    return plan_on(it, layout, it.cpu_nodes, it.devices, is_efi=firmware == "ovmf")


def of_scenario(name: str, layout: Layout, call: str = "") -> Outcome:
    """A VM that KubeVirt's own code generated."""
    scenario = Scenario(name)
    outcome = define_domain(
        scenario.xml(call), scenario.vmi, lambda: scenario.sysfs, Config(layout=layout, distances=Extra.AUTO)
    )
    assert outcome.error is None

    return outcome


def check(oracle: Oracle, outcome: Outcome, firmware: Firmware | None, seconds: float = 180.0) -> None:
    devices = stand_ins(outcome)
    booted = boot(oracle, outcome.xml, devices, firmware=firmware, seconds=seconds)
    report = parse(booted.console)
    print(f"{booted.seconds:.1f} s, {booted.peak_bytes >> 20} MiB", *report.troubles, sep="\n")

    assert differences(outcome, devices, report) == []
    text, is_as_planned = verify(plan_of_stand_ins(outcome, devices), sysfs(booted.console))
    print(text)
    assert is_as_planned


# Each once: a firmware and a generation; switches, functions of one card, eight cells, I/O BARs.
HANDFUL: tuple[tuple[str, Layout, Firmware, Generation], ...] = (
    ("dgx1v", Layout.SWITCH, "seabios", "debian12"),
    ("oci-bm-h100", Layout.SWITCH, "seabios", "debian13"),
    ("dgx1v", Layout.HOST_BRIDGE, "ovmf", "debian12"),
    ("snb-mic-nvme", Layout.HOST_BRIDGE, "ovmf", "debian13"),
    ("dgx-a100", Layout.NODE, "ovmf", "debian13"),
)


@pytest.mark.parametrize(("name", "layout", "firmware", "generation"), HANDFUL)
def test_a_guest_is_what_was_planned(
    ask: Ask, name: str, layout: Layout, firmware: Firmware, generation: Generation
) -> None:
    check(ask(generation), on_machine(name, layout, firmware), firmware)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_vm_of_kubevirt_is_what_was_planned(ask: Ask, generation: Generation) -> None:
    check(ask(generation), of_scenario("full-featured", Layout.SWITCH), None)


@pytest.mark.boot
@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("name", NAMES)
def test_every_machine_in_every_layout(ask: Ask, name: str, layout: Layout) -> None:
    check(ask("debian12"), on_machine(name, layout, "seabios"), "seabios")


# The largest, the deepest, many cells, several functions of a card, I/O BARs.
OVMF = ("dgx-a100", "dgx2", "mi250-16gcd", "mi300x-spr", "oci-bm-h100", "snb-mic-nvme", "tioga-mi250x")


@pytest.mark.boot
@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("name", OVMF)
def test_machines_with_ovmf(ask: Ask, name: str, generation: Generation) -> None:
    check(ask(generation), on_machine(name, Layout.SWITCH, "ovmf"), "ovmf", 300.0)


@pytest.mark.boot
@pytest.mark.parametrize("name", [name for name in SCENARIOS if name != "arm64-two-node"])  # is booted above
def test_every_vm_of_kubevirt(ask: Ask, name: str) -> None:
    check(ask("debian13"), of_scenario(name, Layout.NODE), None, 300.0)


def eight_and_eight() -> tuple[list[str], str]:
    """Eight GPUs and eight NICs, a pair below each switch, four switches to a node: the hostdevs, and the host."""
    found = {}
    for switch in range(8):
        node, root, bus = switch // 4, (0x20, 0xA0)[switch // 4], (0x21, 0xA1)[switch // 4] + 4 * (switch % 4)
        above = f"pci0000:{root:02x}/0000:{root:02x}:{switch % 4 + 1:02x}.0/0000:{bus:02x}:00.0"
        for side, kind in enumerate(("0x030200", "0x020000")):
            path = f"{above}/0000:{bus + 1:02x}:{side:02x}.0/0000:{bus + 2 + side:02x}:00.0"
            found[path] = {"numa_node": node, "class": kind}
    return [hostdev(path.rpartition("/")[2]) for path in found], host(found)


# With the older AAVMF Linux finds flash where it expects memory, and then no NUMA at all, hook or not (docs/limits.md).
ARM64_GENERATION: Generation = "debian13"


@pytest.mark.boot
@pytest.mark.parametrize("layout", Layout)
def test_an_aarch64_vm_with_eight_pairs(ask: Ask, layout: Layout) -> None:
    hostdevs, recording = eight_and_eight()
    xml = vm(hostdevs, arch="aarch64", machine="virt", is_efi=True)
    outcome = define_domain(xml, None, lambda: parse_recording(recording), Config(layout=layout))
    assert outcome.error is None

    check(ask(ARM64_GENERATION), outcome, "ovmf", 300.0)


def test_an_aarch64_vm_of_kubevirt(ask: Ask) -> None:
    check(ask(ARM64_GENERATION), of_scenario("arm64-two-node", Layout.SWITCH), None, 300.0)


def test_a_guest_that_says_nothing_is_killed_and_its_last_lines_are_told(ask: Ask) -> None:
    outcome = on_machine("domain32", Layout.NODE, "seabios")

    with pytest.raises(BootError, match=r"QEMU was killed after 1 s\n(?s:.*)firmware\.log:\n.*\S"):
        boot(ask("debian12"), outcome.xml, stand_ins(outcome), firmware="seabios", seconds=1.0)


# What the guest shows when something is wrong in the answer.
FAULTS = {
    "wrong-cell": "0000:fe:00.0 numa_node: 0, planned 1",
    "window-too-small": "0000:fd:00.0 root: devices/pci0000:fd, planned devices/pci0000:fc",
    "port-elsewhere": "0000:fc:00.0 is not there",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_answer_is_seen(ask: Ask, fault: str) -> None:
    guest = GUESTS[fault]
    devices = stand_ins(guest.outcome)

    booted = boot(ask(guest.generation), guest.xml, devices, firmware=guest.firmware)

    assert FAULTS[fault] in differences(guest.outcome, devices, parse(booted.console))


@pytest.mark.parametrize("name", GUESTS)
def test_verify_says_of_a_booted_guest_what_it_says_of_its_recording(ask: Ask, name: str) -> None:
    """With REGENERATE=1 it records the guests again; tests/test_verify.py reads them."""
    guest = GUESTS[name]
    booted = boot(ask(guest.generation), guest.xml, stand_ins(guest.outcome), firmware=guest.firmware, seconds=300.0)
    tree = sysfs(booted.console)
    if is_regenerating() or not recording(name).exists():
        recording(name).parent.mkdir(exist_ok=True)
        recording(name).write_text(record(tree))

    check_golden(f"verify/{name}.txt", verify(plan_of_stand_ins(guest.outcome), tree)[0])
