"""Room that BARs need against room that firmware makes, by the rules that hook/firmware.py states."""

from dataclasses import replace

import pytest

from hook import firmware
from hook.address import PciAddress
from hook.guest import AddressSpace
from hook.host import PciFunction, PciRegion

GIB = 1 << 30
MIB = 1 << 20


def function(*sizes: int) -> PciFunction:
    regions = tuple(PciRegion(size_bytes=size, is_io=False, is_64bit_prefetchable=True) for size in sizes)
    return PciFunction(address=PciAddress(0, 1, 0, 0), root="", above=(), bridges=(), regions=regions)


def space(
    *,
    is_efi: bool,
    emulated_bits: int | None = None,
    has_maxphysaddr: bool = False,
    memory: int = 16 * GIB,
    cpu_mode: str = "host-model",
) -> AddressSpace:
    return AddressSpace(
        memory_bytes=memory,
        is_efi=is_efi,
        cpu_mode=cpu_mode,
        has_maxphysaddr=has_maxphysaddr or emulated_bits is not None,
        emulated_bits=emulated_bits,
    )


@pytest.mark.parametrize(
    ("functions", "needed"),
    [
        pytest.param([], 0, id="nothing"),
        pytest.param([function()], 0, id="a device without such a BAR"),
        pytest.param([function(64 * GIB)], 64 * GIB, id="one BAR"),
        pytest.param([function(48 * GIB)], 64 * GIB, id="a size that is no power of two is rounded up"),
        pytest.param([function(2 * MIB + 1, 2 * MIB + 1)], 8 * MIB, id="even by one byte"),
        pytest.param([function(128 * GIB, 32 << 20)], 256 * GIB, id="a small one beside it costs an alignment"),
        pytest.param([function(64 * GIB)] * 8, 512 * GIB, id="eight devices"),
    ],
)
def test_the_room_that_is_needed(functions: list[PciFunction], needed: int) -> None:
    assert firmware.needed_bytes(functions) == needed


def test_only_64_bit_prefetchable_bars_count() -> None:
    other = PciRegion(size_bytes=64 * GIB, is_io=False, is_64bit_prefetchable=False)
    device = PciFunction(address=PciAddress(0, 1, 0, 0), root="", above=(), bridges=(), regions=(other,))

    assert firmware.needed_bytes([device]) == 0


def region(size: int, *, is_io: bool = False) -> PciRegion:
    return PciRegion(size_bytes=size, is_io=is_io, is_64bit_prefetchable=False)


@pytest.mark.parametrize(
    ("regions", "needed"),
    [
        pytest.param((), 0, id="nothing"),
        pytest.param((region(16 * MIB),), 16 * MIB, id="one BAR"),
        pytest.param((region(16 << 10),), MIB, id="a window has at least 1 MiB"),
        pytest.param((region(16 * MIB), region(16 << 10)), 32 * MIB, id="a small one beside it costs an alignment"),
        pytest.param((region(128, is_io=True),), 0, id="I/O is elsewhere"),
        pytest.param((PciRegion(64 * GIB, False, True),), 0, id="so are 64-bit BARs"),
    ],
)
def test_the_room_that_is_needed_below_4_gib(regions: tuple[PciRegion, ...], needed: int) -> None:
    device = PciFunction(address=PciAddress(0, 1, 0, 0), root="", above=(), bridges=(), regions=regions)

    assert firmware.needed_32bit_bytes([device]) == needed


@pytest.mark.parametrize(
    ("arch", "given", "window"),
    [
        pytest.param("x86_64", space(is_efi=True), 120 * GIB, id="OVMF, default 40 bits"),
        pytest.param("x86_64", space(is_efi=True, emulated_bits=42), 480 * GIB, id="OVMF, 42 bits"),
        pytest.param("x86_64", space(is_efi=True, emulated_bits=46), 7680 * GIB, id="OVMF, 46 bits"),
        pytest.param("x86_64", space(is_efi=False), 504 * GIB, id="SeaBIOS, default 40 bits"),
        pytest.param("x86_64", space(is_efi=False, memory=800 * GIB), 216 * GIB, id="SeaBIOS: memory takes much"),
        pytest.param("x86_64", space(is_efi=False, emulated_bits=32), 0, id="memory takes all"),
        pytest.param("x86_64", space(is_efi=True, emulated_bits=1), 0, id="bits that no CPU has"),
        pytest.param("x86_64", space(is_efi=True, has_maxphysaddr=True), None, id="the host's bits are not known"),
        pytest.param("x86_64", space(is_efi=True, cpu_mode="host-passthrough"), None, id="QEMU takes the host's bits"),
        pytest.param("aarch64", space(is_efi=True), None, id="another architecture"),
    ],
)
def test_the_room_that_firmware_makes(arch: str, given: AddressSpace, window: int | None) -> None:
    assert firmware.window_bytes(arch, given, 16) == window


@pytest.mark.parametrize(
    ("functions", "tight"),
    [
        pytest.param([()], False, id="no BAR"),
        pytest.param([(32 * MIB,)], False, id="one BAR"),
        pytest.param([(32 * MIB, 32 * MIB)], False, id="equal BARs"),
        pytest.param([(32 * MIB, 16 * MIB)], False, id="half as large: half of the largest fits"),
        pytest.param([(32 * MIB, 1 * MIB)], True, id="much smaller: rounded to half of the largest"),
        pytest.param([(64 * GIB, 32 * MIB, 16 * MIB)], True, id="A100"),
        pytest.param([(16 << 10, 4 << 10)], False, id="all below 1 MiB"),
        pytest.param([(32 * MIB,), (1 * MIB,)], True, id="functions of one card"),
        pytest.param([(4 * MIB, *[64 << 10] * 3)], True, id="three much smaller than 1 MiB"),
    ],
)
def test_windows_that_linux_on_aarch64_makes_larger(functions: list[tuple[int, ...]], tight: bool) -> None:
    assert firmware.is_tight([function(*sizes) for sizes in functions]) is tight


@pytest.mark.parametrize(
    ("sizes", "rom", "tight"),
    [
        pytest.param((16 * MIB,), 0, False, id="one BAR"),
        pytest.param((16 * MIB,), 512 << 10, True, id="a ROM beside it"),
        pytest.param((16 << 10,), 512 << 10, False, id="both in one MiB"),
        pytest.param((), 1 * MIB, False, id="a ROM alone, for which nobody waits"),
    ],
)
def test_roms_take_room_below_4_gib(sizes: tuple[int, ...], rom: int, tight: bool) -> None:
    device = replace(function(), regions=tuple(region(size) for size in sizes), rom_bytes=rom)

    assert firmware.is_tight([device]) is tight


@pytest.mark.parametrize(
    ("sizes", "window"),
    [
        # As Linux 6.1 said in booted guests (docs/limits.md).
        pytest.param((16 * MIB, 1 * MIB), 24 * MIB, id="0x01800000"),
        pytest.param((64 * MIB, 1 * MIB), 96 * MIB, id="0x06000000"),
        pytest.param((1 * MIB, 256 << 10), 2 * MIB, id="0x00200000"),
        pytest.param((16 * MIB,), 16 * MIB, id="0x01000000, one BAR"),
        pytest.param((4 * MIB, *[64 << 10] * 3), 6 * MIB, id="0x00600000"),
        pytest.param((8 * MIB, 2 * MIB, 2 * MIB, 1 * MIB, 1 * MIB), 16 * MIB, id="0x01000000"),
        # By calculate_mem_align.
        pytest.param((16 << 10,), MIB, id="less than a bridge can have"),
        pytest.param((32 * MIB, 32 * MIB), 64 * MIB, id="equal"),
        pytest.param((32 * MIB, 16 * MIB), 48 * MIB, id="half as large"),
        pytest.param((64 * GIB, 32 * MIB, 16 * MIB), 96 * GIB, id="A100"),
        pytest.param((8 * MIB, 4 * MIB, 2 * MIB, 1 * MIB), 15 * MIB, id="a staircase"),
        pytest.param((4 * MIB, *[1 * MIB] * 6), 10 * MIB, id="many small ones before a large one"),
        pytest.param((4 * MIB, 1 * MIB, 1 * MIB, 4 << 10), 7 * MIB, id="what is smaller than 1 MiB counts as it is"),
    ],
)
def test_windows_that_linux_makes(sizes: tuple[int, ...], window: int) -> None:
    assert firmware._linux_window(sizes) == window
