"""Reads a sysfs tree into a HostTopology; the only reader of sysfs, and it must not decide anything.

A tree is a directory (the live /sys, or one that looks like it) or a recording in memory; the
reading code is the same for both. Paths are relative to the sysfs mount point and use `/`.
"""

import os
import re
import stat
from collections.abc import Iterable, Mapping
from typing import Protocol

from hook.address import CpuLists, CpuSet, PciAddress
from hook.errors import SysfsError
from hook.host import HostTopology, NumaNode, PciFunction, PciRegion

# sysfs attributes are at most one page; nothing longer is read (Documentation/filesystems/sysfs.rst).
ATTRIBUTE_LIMIT_BYTES = 65536
_LINK_LIMIT = 40  # as many symbolic links as Linux follows in one path (MAXSYMLINKS)

RESOURCES = 7  # lines of `resource` that are read: six BARs and the ROM; bridge windows come after them
_ROM = 6
_IORESOURCE_IO = 0x100  # include/linux/ioport.h
_IORESOURCE_MEM = 0x200
_IORESOURCE_PREFETCH = 0x2000
_IORESOURCE_MEM_64 = 0x100000

PCI_DEVICES = "bus/pci/devices"
MDEV_DEVICES = "bus/mdev/devices"
NODES = "devices/system/node"

_GROUP = re.compile(r"\d{1,9}", re.ASCII)
_NODE = re.compile(r"node(\d{1,6})", re.ASCII)
_DISTANCE = re.compile(r"\d{1,9}", re.ASCII)
# "Unknown" and, before Linux 5.7, "Unknown speed" stand for none (drivers/pci/probe.c, pci_speed_string).
_SPEED = re.compile(r"(\d{1,4}(?:\.\d{1,3})?) GT/s(?: PCIe)?|(Unknown(?: speed)?)", re.ASCII)
_WIDTHS = range(1, 33)  # 0 and 255 stand for none
_RESOURCE = re.compile(r"0x([0-9a-f]{1,16}) 0x([0-9a-f]{1,16}) 0x([0-9a-f]{1,16})")


class SysfsTree(Protocol):
    """What the reader asks of a tree. Absent, unreadable and outside the tree are all None."""

    def read(self, path: str) -> bytes | None:
        """The bytes of an attribute, at most ATTRIBUTE_LIMIT_BYTES."""

    def resolve(self, path: str) -> str | None:
        """The path with all symbolic links followed."""

    def names(self, path: str) -> tuple[str, ...]:
        """Names in a directory, sorted; empty when there is no such directory."""


class DirectoryTree:
    """A sysfs tree in a directory; nothing outside the directory is ever opened."""

    def __init__(self, root: str) -> None:
        """Open `root`.

        Raises:
            SysfsError: `root` is no directory, or holds neither a PCI bus nor NUMA nodes.
        """
        self._root = os.path.realpath(root)
        self._folders: dict[str, str] = {}  # resolved once; a tree lives for one call
        if not os.path.isdir(self._root):
            raise SysfsError(f"cannot read sysfs at {root}: there is no such directory")
        if not os.access(self._root, os.R_OK | os.X_OK):
            raise SysfsError(f"cannot read sysfs at {root}: the directory is not readable")
        if not any(os.path.isdir(os.path.join(self._root, part)) for part in (PCI_DEVICES, NODES)):
            raise SysfsError(
                f"cannot read sysfs at {root}: it holds neither {PCI_DEVICES} nor {NODES}, expected a tree like /sys"
            )

    def _inside(self, path: str) -> str | None:
        folder, _, name = path.rpartition("/")
        if folder not in self._folders:  # a dozen attributes are read in each
            self._folders[folder] = os.path.realpath(os.path.join(self._root, folder))
        real = os.path.join(self._folders[folder], name)
        if name in ("", ".", "..") or os.path.islink(real):
            real = os.path.realpath(real)
        return real if real.startswith(self._root.rstrip("/") + "/") else None

    def read(self, path: str) -> bytes | None:
        """See SysfsTree."""
        real = self._inside(path)
        if real is None:
            return None
        try:
            # O_NONBLOCK: a named pipe in a directory that only looks like sysfs must not hang us.
            descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return None
            return os.read(descriptor, ATTRIBUTE_LIMIT_BYTES)
        except OSError:
            return None
        finally:
            os.close(descriptor)

    def resolve(self, path: str) -> str | None:
        """See SysfsTree."""
        real = self._inside(path)
        return os.path.relpath(real, self._root) if real is not None and os.path.exists(real) else None

    def names(self, path: str) -> tuple[str, ...]:
        """See SysfsTree."""
        real = self._inside(path)
        try:
            return tuple(sorted(os.listdir(real))) if real is not None else ()
        except OSError:
            return ()


class MemoryTree:
    """A sysfs tree in memory: attributes as bytes, links as their targets."""

    def __init__(self, files: Mapping[str, bytes], links: Mapping[str, str]) -> None:
        """Paths are relative and normal (no `.`, `..` or `//`); link targets are as in the file system."""
        self._files = dict(files)
        self._links = dict(links)
        children: dict[str, set[str]] = {}
        for entry in (*self._files, *self._links):
            path = entry
            while path:
                path, _, name = path.rpartition("/")
                if name in children.setdefault(path, set()):
                    break
                children[path].add(name)
        self._children = {path: tuple(sorted(names)) for path, names in children.items()}

    def resolve(self, path: str) -> str | None:
        """See SysfsTree."""
        done: list[str] = []
        todo = list(reversed(path.split("/")))
        followed = 0
        while todo:
            part = todo.pop()
            if part in ("", "."):
                continue
            if part == "..":
                if not done:
                    return None
                done.pop()
                continue
            done.append(part)
            target = self._links.get("/".join(done))
            if target is not None:
                followed += 1
                if followed > _LINK_LIMIT or target.startswith("/"):
                    return None
                done.pop()
                todo.extend(reversed(target.split("/")))
        real = "/".join(done)
        # A link is taken at its word: recordings do not hold empty directories, such as an mdev's.
        return real if followed or real in self._files or real in self._children else None

    def read(self, path: str) -> bytes | None:
        """See SysfsTree."""
        real = self.resolve(path)
        content = self._files.get(real) if real is not None else None
        return None if content is None else content[:ATTRIBUTE_LIMIT_BYTES]

    def names(self, path: str) -> tuple[str, ...]:
        """See SysfsTree."""
        real = self.resolve(path) if path else ""
        return self._children.get(real, ()) if real is not None else ()

    def items(self) -> tuple[Mapping[str, bytes], Mapping[str, str]]:
        """All attributes and all links."""
        return self._files, self._links


class _Reader:
    """Reads one tree once and collects what could not be understood."""

    def __init__(self, tree: SysfsTree) -> None:
        self.tree = tree
        self.problems: list[str] = []
        self.functions: dict[PciAddress, PciFunction] = {}
        self.lists = CpuLists()

    def text(self, path: str) -> str | None:
        content = self.tree.read(path)
        if content is None:
            return None
        return attribute_text(content)

    def number(self, path: str, base: int) -> int | None:
        text = self.text(path)
        if text is None:
            return None
        try:
            return int(text, base)
        except ValueError:
            self.problems.append(f"cannot read {path}: {text[:40]!r} is not a number")
            return None

    def cpus(self, path: str) -> CpuSet | None:
        text = self.text(path)
        if text is None:
            return None
        try:
            return self.lists.parse(text)
        except ValueError as error:
            self.problems.append(f"cannot read {path}: {error}")
            return None

    def regions(self, path: str) -> tuple[tuple[PciRegion, ...], int]:
        """The BARs and the size of the ROM: a line `start end flags` each; bridge windows come after them."""
        regions = []
        rom_bytes = 0
        for number, line in enumerate((self.text(path) or "").splitlines()[:RESOURCES]):
            match = _RESOURCE.fullmatch(line)
            if match is None:
                self.problems.append(f"cannot read {path}: {line[:60]!r} is not 'start end flags'")
                return (), 0
            start, end, flags = (int(word, 16) for word in match.groups())
            if not flags & (_IORESOURCE_IO | _IORESOURCE_MEM) or end <= start:
                continue
            if number == _ROM:
                rom_bytes = end - start + 1
            else:
                wanted = _IORESOURCE_MEM | _IORESOURCE_PREFETCH | _IORESOURCE_MEM_64
                regions.append(PciRegion(end - start + 1, bool(flags & _IORESOURCE_IO), flags & wanted == wanted))
        return tuple(regions), rom_bytes

    def speed_mts(self, path: str) -> int | None:
        text = self.text(path)
        match = _SPEED.fullmatch(text or "Unknown")
        if match is None:
            self.problems.append(f"cannot read {path}: {(text or '')[:40]!r} is not a speed like '8.0 GT/s PCIe'")
            return None
        return round(float(match[1]) * 1000) or None if match[1] is not None else None

    def function(self, address: PciAddress) -> None:
        """Read a function and everything above it, each once; an unknown address is left out."""
        if address in self.functions:
            return
        path = self.tree.resolve(f"{PCI_DEVICES}/{address}")
        if path is None:
            return
        parts = path.split("/")
        root_depth = max((i for i, part in enumerate(parts) if part.startswith("pci")), default=-1)
        above = _addresses(parts[:-1])
        below_root = _addresses(parts[root_depth + 1 : -1])
        node = self.number(f"{path}/numa_node", 10)
        physfn = self.tree.resolve(f"{path}/physfn")
        physical = _addresses(physfn.split("/")[-1:]) if physfn else ()
        regions, rom_bytes = self.regions(f"{path}/resource")
        width = self.number(f"{path}/max_link_width", 10)
        group = (self.tree.resolve(f"{path}/iommu_group") or "").rpartition("/")[2]
        self.functions[address] = PciFunction(
            address=address,
            root="/".join(parts[: root_depth + 1]),
            above=above,
            bridges=below_root,
            vendor=self.number(f"{path}/vendor", 16),
            device=self.number(f"{path}/device", 16),
            subsystem_vendor=self.number(f"{path}/subsystem_vendor", 16),
            subsystem_device=self.number(f"{path}/subsystem_device", 16),
            class_code=self.number(f"{path}/class", 16),
            numa_node=node if node is not None and node >= 0 else None,
            local_cpus=self.cpus(f"{path}/local_cpulist"),
            physical_function=physical[0] if physical else None,
            regions=regions,
            rom_bytes=rom_bytes,
            max_speed_mts=self.speed_mts(f"{path}/max_link_speed"),
            max_width=width if width in _WIDTHS else None,
            iommu_group=int(group) if _GROUP.fullmatch(group) else None,
        )
        for other in (*above, *physical):
            self.function(other)

    def nodes(self) -> dict[int, NumaNode]:
        ids = sorted(int(match[1]) for name in self.tree.names(NODES) if (match := _NODE.fullmatch(name)))
        found: dict[int, NumaNode] = {}
        for node in ids:
            cpus = self.cpus(f"{NODES}/node{node}/cpulist")
            distance = (self.text(f"{NODES}/node{node}/distance") or "").split()
            distances: dict[int, int] = {}
            # One number for each online node in ascending order (drivers/base/node.c, node_read_distance).
            if len(distance) == len(ids) and all(_DISTANCE.fullmatch(value) for value in distance):
                distances = {other: int(value) for other, value in zip(ids, distance, strict=True)}
            elif distance:
                self.problems.append(
                    f"cannot read {NODES}/node{node}/distance: {' '.join(distance)[:80]!r}, expected {len(ids)} numbers"
                )
            found[node] = NumaNode(id=node, cpus=cpus or frozenset(), distances=distances)
        return found


def attribute_text(content: bytes) -> str:
    """The text of an attribute, without the newline at its end."""
    # tar pads an attribute with zeros to the page that sysfs claims it has.
    return content.decode("utf-8", "replace").strip("\0 \t\r\n")


def _addresses(parts: Iterable[str]) -> tuple[PciAddress, ...]:
    """The path components that are PCI functions, in order."""
    addresses = []
    for part in parts:
        try:
            addresses.append(PciAddress.parse(part))
        except ValueError:
            continue
    return tuple(addresses)


def read_host(tree: SysfsTree, functions: Iterable[PciAddress], mediated_devices: Iterable[str]) -> HostTopology:
    """Read the wanted functions, the parents of the wanted mdevs (UUIDs), everything above, and all nodes.

    Nothing else is read, so the cost does not grow with the host. Devices that sysfs does not
    know are left out.
    """
    reader = _Reader(tree)
    for address in sorted(set(functions)):
        reader.function(address)
    parents: dict[str, PciAddress] = {}
    for uuid in sorted(set(mediated_devices)):
        path = tree.resolve(f"{MDEV_DEVICES}/{uuid}")
        parent = _addresses(path.split("/")[:-1])[-1:] if path else ()
        if parent:
            parents[uuid] = parent[0]
            reader.function(parent[0])
    return HostTopology(
        functions=reader.functions, mediated_devices=parents, nodes=reader.nodes(), problems=tuple(reader.problems)
    )


def all_functions(tree: SysfsTree) -> tuple[PciAddress, ...]:
    """Every PCI function of the tree, by address."""
    return tuple(sorted(_addresses(tree.names(PCI_DEVICES))))


def all_mediated_devices(tree: SysfsTree) -> tuple[str, ...]:
    """The UUID of every mediated device of the tree, sorted."""
    return tree.names(MDEV_DEVICES)
