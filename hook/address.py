"""Addresses and CPU sets as numbers; must not know where they were read or how a machine looks."""

import re
from dataclasses import dataclass
from typing import Self

CpuSet = frozenset[int]

MAX_SLOT = 0x1F
MAX_FUNCTION = 7
MAX_BUS = 0xFF
# VMD and other software-made domains start at 0x10000, so host domains may need 32 bits.
MAX_HOST_DOMAIN = 0xFFFF_FFFF
# The kernel's largest NR_CPUS is 8192 (arch/x86/Kconfig); a longer list is a mistake or an attack on memory.
MAX_CPU = 8191
# Room for every CPU of such a machine in eight lists; 6 MB of memory.
MAX_LISTED_CPUS = 1 << 16

_PCI_ADDRESS = re.compile(r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])")
_CPU_RANGE = re.compile(r"(\^?)(\d{1,6})(?:-(\d{1,6}))?", re.ASCII)


@dataclass(frozen=True, order=True, slots=True)
class PciAddress:
    """A PCI function of the host: domain 0..2**32-1, bus 0..255, slot 0..31, function 0..7."""

    domain: int
    bus: int
    slot: int
    function: int

    def __post_init__(self) -> None:
        for name, value, maximum in (
            ("domain", self.domain, MAX_HOST_DOMAIN),
            ("bus", self.bus, MAX_BUS),
            ("slot", self.slot, MAX_SLOT),
            ("function", self.function, MAX_FUNCTION),
        ):
            if not 0 <= value <= maximum:
                raise ValueError(f"PCI {name} {value:#x} is outside 0..{maximum:#x}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the kernel's `DDDD:BB:SS.F`.

        Raises:
            ValueError: the text is anything else.
        """
        match = _PCI_ADDRESS.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not a PCI address like 0000:3b:00.0")
        domain, bus, slot, function = (int(part, 16) for part in match.groups())
        return cls(domain, bus, slot, function)

    @property
    def card(self) -> tuple[int, int, int]:
        """Domain, bus and slot, which the functions of one card have in common."""
        return self.domain, self.bus, self.slot

    def __str__(self) -> str:
        return f"{self.domain:04x}:{self.bus:02x}:{self.slot:02x}.{self.function}"


def parse_cpu_list(text: str) -> CpuSet:
    """Parse a list such as `0-3,8,^2`, the kernel's (without `^`) and libvirt's (with it).

    An empty text is the empty set.

    Raises:
        ValueError: the text is not such a list, or names a CPU above MAX_CPU.
    """
    included: set[int] = set()
    excluded: set[int] = set()
    for part in text.split(",") if text.strip() else ():
        match = _CPU_RANGE.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{text[:80]!r} is not a CPU list like 0-3,8")
        first = int(match[2])
        last = int(match[3] or first)
        if last < first or last > MAX_CPU:
            raise ValueError(f"{text[:80]!r} is not a CPU list: bad range {part!r}")
        (excluded if match[1] else included).update(range(first, last + 1))
    return frozenset(included - excluded)


class CpuLists:
    """Parses all the lists of one document or host: equal texts share a set, and the sets together are bounded."""

    def __init__(self) -> None:
        self._sets: dict[str, CpuSet] = {}
        self._listed = 0

    def parse(self, text: str) -> CpuSet:
        """Parse one list.

        Raises:
            ValueError: as parse_cpu_list, or those before it have more than MAX_LISTED_CPUS CPUs.
        """
        if text not in self._sets:
            if self._listed > MAX_LISTED_CPUS:
                raise ValueError(f"{text[:80]!r} comes after lists of more than {MAX_LISTED_CPUS} CPUs")
            self._sets[text] = parse_cpu_list(text)
            self._listed += len(self._sets[text])
        return self._sets[text]


def format_cpu_list(cpus: CpuSet) -> str:
    """Print as the kernel does: `0-3,8`; the empty set is the empty text."""
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and ranges[-1][1] == cpu - 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in ranges)
