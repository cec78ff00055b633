"""Names of PCI vendors, devices and classes from a pci.ids file; must not be needed, numbers do without it.

The file is pciutils' and hwdata's (https://pci-ids.ucw.cz). Its readers on PyPI are not kept, or GPL.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

# Where distributions put it: hwdata (Fedora, Debian 13), pciutils (Debian, SUSE, Arch, Alpine).
PATHS = ("/usr/share/hwdata/pci.ids", "/usr/share/misc/pci.ids", "/usr/share/pci.ids")

_LINE = re.compile(r"(C |\t?)([0-9a-fA-F]{2}|[0-9a-fA-F]{4})  (.*\S)")


@dataclass(frozen=True, slots=True, kw_only=True)
class PciIds:
    """What is known by name; the empty one knows nothing."""

    vendors: Mapping[int, str] = field(default_factory=dict)
    devices: Mapping[tuple[int, int], str] = field(default_factory=dict)  # by vendor and device
    classes: Mapping[int, str] = field(default_factory=dict)  # by base class << 8 | subclass

    def device(self, vendor: int | None, device: int | None) -> str | None:
        """Vendor and device as lspci prints them; None when the vendor has no name."""
        if vendor is None or device is None or vendor not in self.vendors:
            return None
        return f"{self.vendors[vendor]} {self.devices.get((vendor, device), f'Device {device:04x}')}"

    def class_name(self, class_code: int | None) -> str | None:
        """The name of a 24-bit class by its upper two bytes, else None."""
        return None if class_code is None else self.classes.get(class_code >> 8)


def parse(text: str) -> PciIds:
    """Parse the text of a pci.ids file; lines of other kinds are passed over."""
    vendors: dict[int, str] = {}
    devices: dict[tuple[int, int], str] = {}
    classes: dict[int, str] = {}
    above = 0
    is_class = False
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if match is None or not line.strip().isprintable():
            continue
        mark, number, name = match[1], int(match[2], 16), match[3]
        if mark != "\t":
            above, is_class = number, mark == "C "
            if not is_class:
                vendors[number] = name
        elif is_class:
            classes[above << 8 | number] = name
        else:
            devices[above, number] = name
    return PciIds(vendors=vendors, devices=devices, classes=classes)


def read(path: str | None) -> PciIds:
    """Read a file; None is the machine's own, and where there is none nothing has a name.

    Raises:
        OSError: the file that was asked for cannot be read.
    """
    for candidate in PATHS if path is None else (path,):
        try:
            with open(candidate, encoding="utf-8", errors="replace") as file:
                return parse(file.read())
        except OSError:
            if path is not None:
                raise
    return PciIds()
