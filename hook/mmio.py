"""Compares the room that large BARs need with the room that guest firmware makes; must not change anything."""

from collections.abc import Iterable

from hook.guest import AddressSpace
from hook.host import PciFunction

# QEMU's default for CPU models without host-phys-bits (target/i386/cpu.h, TCG_PHYS_ADDR_BITS).
DEFAULT_BITS = 40
# OVMF 2025.02: the top eighth of the address space from 42 bits on, 256 GiB below that (measured at 40).
_OVMF_SHIFT = 3
_OVMF_SMALL_BITS = 42
_OVMF_SMALL_BYTES = 256 << 30


def needed_bytes(functions: Iterable[PciFunction]) -> int:
    """Room for the 64-bit prefetchable BARs: those of one function are packed, largest first, and aligned to it.

    Each function sits behind a port of its own, whose window starts at a multiple of its largest BAR.
    """
    total = 0
    for function in functions:
        sizes = [region.size_bytes for region in function.regions if region.is_64bit_prefetchable]
        if sizes:
            largest = 1 << (max(sizes) - 1).bit_length()
            total += -(-sum(sizes) // largest) * largest
    return total


def window_bytes(arch: str, space: AddressSpace) -> int | None:
    """Room that firmware has above 4 GiB, or None where it cannot be known.

    It cannot for other architectures and for a CPU with the host's address bits, which sysfs does not show.
    """
    if arch != "x86_64" or (space.has_maxphysaddr and space.emulated_bits is None):
        return None
    bits = space.emulated_bits or DEFAULT_BITS
    if not space.is_efi:  # SeaBIOS: everything that is not memory
        return max(0, (1 << bits) - space.memory_bytes)
    return _OVMF_SMALL_BYTES if bits < _OVMF_SMALL_BITS else 1 << (bits - _OVMF_SHIFT)
