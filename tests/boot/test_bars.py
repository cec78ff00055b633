"""Guests show which BARs firmware gives an address, and that the findings foresaw it; figures are in docs/limits.md."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from hook.config import Config, Extra, RiskyBars
from hook.define import Outcome, define_domain
from hook.recording import parse_recording
from tests.boot.boot import BootError, Firmware, boot, stand_ins
from tests.boot.conftest import Ask
from tests.boot.report import differences, parse
from tests.build import host, hostdev, large_bar, vm
from tests.system.kubevirt import for_libvirt
from tests.system.oracle import GENERATIONS, Generation

GIB = 1 << 30
IO = "0x0000000000003000 0x000000000000307f 0x0000000000040101"
SMALL = "0x00000000f0000000 0x00000000f0ffffff 0x0000000000040200"


def devices(bars: Sequence[str]) -> tuple[list[str], str]:
    """One device for each line of `resource`, the first half on node 0: the hostdevs, and the host."""
    found = {}
    for number, bar in enumerate(bars):
        node = int(2 * number >= len(bars))
        root = (0x20, 0xA0)[node]
        path = f"pci0000:{root:02x}/0000:{root:02x}:{number % 32:02x}.{number // 32}/0000:{root + number + 1:02x}:00.0"
        found[path] = {"numa_node": node, "class": "0x120000", "resource": bar}
    return [hostdev(path.rpartition("/")[2]) for path in found], host(found)


def plan(bars: Sequence[str], firmware: Firmware, config: Config, *, bits: int | None = None) -> Outcome:
    """A VM of two cells; bits: emulated address bits, None for QEMU's default of 40."""
    hostdevs, recording = devices(bars)
    xml = vm(hostdevs, is_efi=firmware == "ovmf", cpu_mode="host-model")
    if bits is not None:
        xml = xml.replace(b"<numa>", f'<maxphysaddr mode="emulate" bits="{bits}"/><numa>'.encode(), 1)
    outcome = define_domain(xml, None, lambda: parse_recording(recording), config)
    assert outcome.error is None

    return outcome


def differences_of(
    ask: Ask, generation: Generation, firmware: Firmware, outcome: Outcome, xml: bytes = b""
) -> list[str]:
    """Boot it, or this xml in its place, with stand-ins as large as the host's devices."""
    doubles = stand_ins(outcome, is_true_size=True)
    booted = boot(ask(generation), xml or outcome.xml, doubles, firmware=firmware, seconds=300.0)
    print(f"{booted.seconds:.1f} s, {booted.peak_bytes >> 20} MiB")
    return differences(outcome, doubles, parse(booted.console))


def findings(outcome: Outcome) -> list[tuple[str, str]]:
    return [(finding.code, finding.subject) for finding in outcome.plan.findings]


WINDOW = [("mmio-window", "")]


@dataclass(frozen=True)
class Large:
    """Devices with one large BAR each."""

    firmware: Firmware
    generation: Generation
    count: int
    gib: int
    bits: int | None

    def __str__(self) -> str:
        return f"{self.firmware}-{self.generation}-{self.count}x{self.gib}GiB-{self.bits or 40}bits"


# The edges first: as many as fit, and one more.
_EDGES: tuple[tuple[Firmware, int, int, int | None], ...] = (
    ("ovmf", 7, 16, None),
    ("ovmf", 8, 16, None),
    ("ovmf", 7, 64, 42),
    ("ovmf", 8, 64, 42),
    ("seabios", 7, 64, None),
)
EDGES = [
    Large(firmware, generation, count, gib, bits) for generation in GENERATIONS for firmware, count, gib, bits in _EDGES
]
_FIRMWARES: tuple[Firmware, ...] = ("seabios", "ovmf")
LARGE = [
    Large(firmware, generation, 8, gib, bits)
    for firmware in _FIRMWARES
    for generation in GENERATIONS
    for gib in (64, 128)
    for bits in (None, 46)
]
# SeaBIOS 1.16.2 has more room than 1.16.3, which the domain cannot tell apart: the finding is one too many.
FALSE_ALARM = Large("seabios", "debian12", 8, 64, None)


@pytest.mark.boot
@pytest.mark.parametrize("case", [*EDGES, *LARGE], ids=str)
def test_the_finding_says_whether_large_bars_have_room(ask: Ask, case: Large) -> None:
    outcome = plan([large_bar(case.gib * GIB)] * case.count, case.firmware, Config(), bits=case.bits)

    wrong = differences_of(ask, case.generation, case.firmware, outcome)

    assert [line for line in wrong if " BAR" not in line] == []
    assert findings(outcome) == (WINDOW if wrong or case == FALSE_ALARM else [])


@pytest.mark.boot
@pytest.mark.parametrize("generation", GENERATIONS)
def test_maxphysaddr_auto_makes_room(ask: Ask, generation: Generation) -> None:
    outcome = plan([large_bar(64 * GIB)] * 8, "ovmf", Config(maxphysaddr=Extra.AUTO))
    assert findings(outcome) == WINDOW
    written = b'<maxphysaddr mode="passthrough"/>'
    assert outcome.xml.count(written) == 1
    assert "max,host-phys-bits=on" in ask(generation).argv(for_libvirt(outcome.xml))

    # An emulated CPU has no host whose bits it could take: it gets what a server has.
    emulated = outcome.xml.replace(written, b'<maxphysaddr mode="emulate" bits="46"/>')

    assert differences_of(ask, generation, "ovmf", outcome, emulated) == []


@pytest.mark.boot
def test_a_device_with_an_io_bar_is_left_and_all_devices_keep_their_bars(ask: Ask) -> None:
    outcome = plan([IO, *[large_bar(1 * GIB)] * 3], "ovmf", Config())
    assert findings(outcome) == [("io-bar", "0000:21:00.0")]

    assert differences_of(ask, "debian12", "ovmf", outcome) == []


@pytest.mark.boot
@pytest.mark.parametrize("generation", GENERATIONS)
def test_most_devices_with_io_bars_are_left_and_all_devices_keep_their_bars(ask: Ask, generation: Generation) -> None:
    outcome = plan([*[IO] * 12, *[large_bar(1 * GIB)] * 4], "ovmf", Config())

    assert [code for code, _ in findings(outcome)] == ["io-bar"] * 12
    assert differences_of(ask, generation, "ovmf", outcome) == []


@pytest.mark.boot
def test_a_new_ovmf_takes_nine_devices_with_io_bars_and_the_tenth_is_left(ask: Ask) -> None:
    outcome = plan([IO] * 10, "ovmf", Config(risky_bars=RiskyBars.PLACE))

    assert findings(outcome) == [("io-bar", "0000:aa:00.0")]
    assert differences_of(ask, "debian13", "ovmf", outcome) == []


@pytest.mark.boot
@pytest.mark.parametrize("generation", GENERATIONS)
def test_seabios_takes_fourteen_devices_with_io_bars(ask: Ask, generation: Generation) -> None:
    outcome = plan([IO] * 14, "seabios", Config())

    assert findings(outcome) == []
    assert differences_of(ask, generation, "seabios", outcome) == []


@pytest.mark.boot
@pytest.mark.parametrize("generation", GENERATIONS)
def test_seabios_hangs_with_one_more_as_the_finding_says(ask: Ask, generation: Generation) -> None:
    outcome = plan([IO] * 15, "seabios", Config())

    assert findings(outcome) == [("io-space", "")]
    with pytest.raises(BootError, match="QEMU was killed after 20 s"):
        boot(ask(generation), outcome.xml, stand_ins(outcome, is_true_size=True), firmware="seabios", seconds=20.0)


@pytest.mark.boot
@pytest.mark.parametrize("firmware", ["seabios", "ovmf"])
def test_32_bit_bars_of_48_devices_have_room(ask: Ask, firmware: Firmware) -> None:
    outcome = plan([SMALL] * 48, firmware, Config())

    assert findings(outcome) == []
    assert differences_of(ask, "debian12", firmware, outcome) == []


# One card: functions behind one port. An emulated device has not several BARs of such sizes, several functions have,
# and for the port's window it is the same.
CARDS = {
    "4 GiB and 1 GiB": ((4 * GIB, 1 * GIB), (0, 1)),
    "4 MiB and 3 x 64 KiB": ((4 << 20, *[64 << 10] * 3), (0,)),
}


def card(sizes: Sequence[int], risky_bars: RiskyBars) -> Outcome:
    recording = host(
        {
            f"pci0000:20/0000:20:01.0/0000:21:00.{n}": {
                "numa_node": 0,
                "class": "0x120000",
                "resource": large_bar(size),
            }
            for n, size in enumerate(sizes)
        }
    )
    xml = vm([hostdev(f"0000:21:00.{n}") for n in range(len(sizes))], arch="aarch64", machine="virt", is_efi=True)
    outcome = define_domain(xml, None, lambda: parse_recording(recording), Config(risky_bars=risky_bars))
    assert outcome.error is None
    return outcome


@pytest.mark.boot
@pytest.mark.parametrize("name", CARDS)
def test_a_card_with_bars_of_several_sizes_is_left_on_aarch64_and_keeps_them(ask: Ask, name: str) -> None:
    sizes, _ = CARDS[name]
    outcome = card(sizes, RiskyBars.LEAVE)

    assert findings(outcome) == [("tight-window", f"0000:21:00.{n}") for n in range(len(sizes))]
    assert differences_of(ask, "debian13", "ovmf", outcome) == []


@pytest.mark.boot
@pytest.mark.parametrize("name", CARDS)
def test_placed_it_loses_them_as_the_finding_says(ask: Ask, name: str) -> None:
    sizes, lost = CARDS[name]
    outcome = card(sizes, RiskyBars.PLACE)

    assert findings(outcome) == []
    wrong = differences_of(ask, "debian13", "ovmf", outcome)
    assert wrong == [f"0000:ff:00.{function} has the BARs (0,), its stand-in has (0, 2)" for function in lost]
