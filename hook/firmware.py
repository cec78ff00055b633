"""Compares the room that BARs need with the room that guest firmware makes, as measured; must not decide anything."""

from collections.abc import Iterable, Sequence

from hook.guest import AddressSpace
from hook.host import PciFunction

# QEMU's default for CPU models without host-phys-bits (target/i386/cpu.h, TCG_PHYS_ADDR_BITS).
DEFAULT_BITS = 40
# Both OVMF 2022.11 and 2025.02 put 64-bit BARs into the top eighth of the address space, SeaBIOS 1.16.3 into the
# upper half (1.16.2: anywhere above memory). A hot-pluggable port takes 1/256 of OVMF's room, empty or not.
_OVMF_SHIFT = 3
_SEABIOS_SHIFT = 1
_PORT_SHIFT = 11

# A bridge with an I/O BAR below takes 4 KiB of the 64 KiB of a PC. SeaBIOS 1.16 hangs with one device more than
# that; OVMF 2025.02 gives the next device no BAR at all, and OVMF 2022.11 gives none to any device behind an
# expander as soon as one has an I/O BAR and pcie.0 has more than ten hot-pluggable ports (docs/limits.md).
SEABIOS_IO_DEVICES = 14
OVMF_IO_DEVICES = 9
# Room below 4 GiB: 48 devices with 16 MiB each have all their BARs everywhere, with 64 SeaBIOS hangs and OVMF 2022.11
# loses some.
WINDOW_32BIT_BYTES = 768 << 20
_BRIDGE_WINDOW_BYTES = 1 << 20  # PCI-to-PCI Bridge Architecture 1.2, 3.2.5.8: granularity of a memory window


def needed_bytes(functions: Iterable[PciFunction]) -> int:
    """Room for the 64-bit prefetchable BARs: those of one function are packed, largest first, and aligned to it.

    Each function sits behind a port of its own, whose window starts at a multiple of its largest BAR.
    """
    return sum(_window(_large_bytes(function)) for function in functions)


def needed_32bit_bytes(functions: Iterable[PciFunction]) -> int:
    """Room for all other memory BARs, which must be below 4 GiB behind a bridge; packed in the same way."""
    return sum(_window(_small_bytes(function)) for function in functions)


def is_tight(functions: Sequence[PciFunction]) -> bool:
    """True when the windows that firmware makes for the functions of one slot are too small for Linux on aarch64.

    There Linux lays out PCI anew, inside what firmware gave each expander, and rounds a window with BARs of several
    sizes up to half the largest. Into the window below 4 GiB it also puts the ROMs, for which firmware keeps no room.
    Source: Linux drivers/pci/setup-bus.c (pbus_size_mem, calculate_mem_align); seen with AAVMF 2025.02, Linux 6.1.
    """
    large = [size for function in functions for size in _large_bytes(function)]
    small = [size for function in functions for size in _small_bytes(function)]
    roms = [function.rom_bytes for function in functions if function.rom_bytes]
    # A slot without BARs below 4 GiB has nothing to lose there but its ROM.
    return any(
        _linux_window(bars + more) > _rounded(sum(bars), _BRIDGE_WINDOW_BYTES)
        for bars, more in ((large, []), (small, roms))
        if bars
    )


def _large_bytes(function: PciFunction) -> list[int]:
    """Sizes of the BARs that may be above 4 GiB behind a bridge."""
    return [region.size_bytes for region in function.regions if region.is_64bit_prefetchable]


def _small_bytes(function: PciFunction) -> list[int]:
    """Sizes of the other memory BARs."""
    return [region.size_bytes for region in function.regions if not region.is_64bit_prefetchable and not region.is_io]


def _window(sizes_bytes: Sequence[int]) -> int:
    """The window that firmware aligns to its largest BAR."""
    return _rounded(sum(sizes_bytes), max(map(_alignment, sizes_bytes), default=_BRIDGE_WINDOW_BYTES))


def _linux_window(sizes_bytes: Sequence[int]) -> int:
    """The window that Linux makes for these BARs; at least one."""
    aligned: dict[int, int] = {}
    for size_bytes in sizes_bytes:
        alignment = _alignment(size_bytes)
        aligned[alignment] = aligned.get(alignment, 0) + size_bytes
    step, before, granularity = _BRIDGE_WINDOW_BYTES, 0, _BRIDGE_WINDOW_BYTES
    while step <= max(aligned):
        if not before:
            granularity = step
        elif _rounded(before + granularity, granularity) < step:
            granularity = step >> 1
        before += aligned.get(step, 0)
        step <<= 1
    return _rounded(_rounded(sum(sizes_bytes), _BRIDGE_WINDOW_BYTES), granularity)


def _alignment(size_bytes: int) -> int:
    """Where a BAR may start: a multiple of its size, and no finer than a bridge can tell."""
    return max(_BRIDGE_WINDOW_BYTES, 1 << (size_bytes - 1).bit_length())


def _rounded(size_bytes: int, granularity: int) -> int:
    return -(-size_bytes // granularity) * granularity


def window_bytes(arch: str, space: AddressSpace, ports: int) -> int | None:
    """Room that firmware has for 64-bit BARs, or None where it cannot be known.

    It cannot for other architectures and for a CPU with the host's address bits, which sysfs does not show: one with
    maxphysaddr passthrough, and host-passthrough, whose bits are the host's (QEMU >= 6.0, host_cpu_max_instance_init).
    ports: hot-pluggable ports.
    """
    is_hosts = space.cpu_mode == "host-passthrough" or space.has_maxphysaddr
    if arch != "x86_64" or (is_hosts and space.emulated_bits is None):
        return None
    bits = space.emulated_bits or DEFAULT_BITS
    room_bytes = 1 << max(0, bits - (_OVMF_SHIFT if space.is_efi else _SEABIOS_SHIFT))
    room_bytes = min(room_bytes, (1 << bits) - space.memory_bytes)
    return max(0, room_bytes - (ports << max(0, bits - _PORT_SHIFT)))
