r"""Opens and records what stands for /sys: a directory, tar archive or text recording; must not interpret attributes.

A text recording is one line per attribute or link, sorted by path, `#` starts a comment line:

    devices/system/node/node0/cpulist = 0-31
    bus/pci/devices/0000:41:00.0 -> ../../../devices/pci0000:40/0000:40:01.1/0000:41:00.0

Values have no trailing newline; inside, newline and backslash are written `\n` and `\\`.
Archives and recordings are read into memory: nothing is unpacked, and no link leads out of them.

`python3 -m hook.recording [PATH]` prints a recording where the command line is not installed, as in the image.
"""

import gzip
import io
import os
import posixpath
import re
import sys
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

from hook import __version__
from hook.address import PciAddress
from hook.errors import SysfsError
from hook.host import HostTopology
from hook.sysfs import (
    ATTRIBUTE_LIMIT_BYTES,
    NODES,
    PCI_DEVICES,
    RESOURCES,
    DirectoryTree,
    MemoryTree,
    SysfsTree,
    all_functions,
    all_mediated_devices,
    attribute_text,
    read_host,
)

# A recording of the largest known host (dual socket, 16 GPUs) is below 1 MB; a full /sys below 30 MB.
_UNPACKED_LIMIT_BYTES = 32 << 20
_PATH_LIMIT = 4096  # PATH_MAX, include/uapi/linux/limits.h
_GZIP_MAGIC = b"\x1f\x8b"
_TAR_MAGIC_OFFSET = 257
_TAR_MAGIC = b"ustar"
_LINE = re.compile(r"(\S.*?) (=|->) ?(.*)")
_ESCAPE = re.compile(r"\\(.)")
_SYS_PATH = re.compile(rf"((?:[^/]+/){{0,2}}?)(?:{PCI_DEVICES}|{NODES})/")


def open_sysfs(path: str) -> SysfsTree:
    """Open a directory, `.tar`, `.tar.gz` or text recording; the content decides, not the name.

    Raises:
        SysfsError: there is nothing at `path`, or it is none of these.
    """
    if not os.path.isfile(path):
        return DirectoryTree(path)
    try:
        with open(path, "rb") as file:
            content = file.read(_UNPACKED_LIMIT_BYTES + 1)
        if content.startswith(_GZIP_MAGIC):
            with gzip.GzipFile(fileobj=io.BytesIO(content)) as unzipped:
                content = unzipped.read(_UNPACKED_LIMIT_BYTES + 1)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise SysfsError(f"cannot read the recording {path}: {error}") from error
    if len(content) > _UNPACKED_LIMIT_BYTES:
        raise SysfsError(f"cannot read the recording {path}: it is over {_UNPACKED_LIMIT_BYTES} bytes")
    is_tar = content[_TAR_MAGIC_OFFSET : _TAR_MAGIC_OFFSET + len(_TAR_MAGIC)] == _TAR_MAGIC
    try:
        return _parse_tar(content) if is_tar else parse_recording(content.decode())
    except UnicodeDecodeError:
        raise SysfsError(f"cannot read the recording {path}: found neither a tar archive nor UTF-8 text") from None
    except SysfsError as error:
        raise SysfsError(f"cannot read the recording {path}: {error}") from error


def parse_recording(text: str) -> MemoryTree:
    """Parse a text recording.

    Raises:
        SysfsError: a line is not `path = value` or `path -> target`; its number is in the text.
    """
    files: dict[str, bytes] = {}
    links: dict[str, str] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        path = _normal(match[1]) if match else None
        if match is None or path is None:
            raise SysfsError(f"line {number} is {line[:60]!r}, expected 'path = value' or 'path -> target'")
        if match[2] == "=":
            files[path] = _ESCAPE.sub(lambda m: "\n" if m[1] == "n" else m[1], match[3]).encode()
        else:
            links[path] = match[3]
    return _tree(files, links)


def format_recording(tree: MemoryTree, comment: str = "") -> str:
    """Write a text recording; parse_recording gives the tree back, but for trailing newlines of values."""
    files, links = tree.items()
    lines = [(path, f"{path} -> {target}") for path, target in links.items()]
    for path, content in files.items():
        value = content.decode("utf-8", "replace").rstrip("\n").replace("\\", "\\\\").replace("\n", "\\n")
        lines.append((path, f"{path} = {value}"))
    header = "".join(f"# {line}".rstrip() + "\n" for line in comment.splitlines())
    return header + "".join(f"{line}\n" for _, line in sorted(lines))


class _Noting:
    """A tree that notes what is read from another; names need no note, they follow from paths."""

    def __init__(self, tree: SysfsTree) -> None:
        self._tree = tree
        self.files: dict[str, bytes] = {}
        self.links: dict[str, str] = {}

    def read(self, path: str) -> bytes | None:
        """See SysfsTree."""
        content = self._tree.read(path)
        if content is not None:
            self.files[path] = content
        return content

    def resolve(self, path: str) -> str | None:
        """See SysfsTree."""
        real = self._tree.resolve(path)
        if real is not None and real != path:
            self.links[path] = posixpath.relpath(real, posixpath.dirname(path))
        return real

    def names(self, path: str) -> tuple[str, ...]:
        """See SysfsTree."""
        return self._tree.names(path)


def record(tree: SysfsTree, sources: Iterable[PciAddress | str] | None = None) -> str:
    """Write down what the reader reads of a host, and nothing else, as a text recording.

    sources: the devices that matter, as Hostdev.source; None is all of the host's.

    Raises:
        SysfsError: the recording is not read as the tree is; its message says where they part.
    """
    devices = (*all_functions(tree), *all_mediated_devices(tree)) if sources is None else tuple(sources)
    functions = [source for source in devices if isinstance(source, PciAddress)]
    mediated_devices = [source for source in devices if isinstance(source, str)]
    noting = _Noting(tree)
    host = read_host(noting, functions, mediated_devices)
    files = {path: _needed(path, content).encode() for path, content in noting.files.items()}
    comment = f"pcie-numa-hook {__version__}, PCI functions: {len(host.functions)}, NUMA nodes: {len(host.nodes)}"
    text = format_recording(MemoryTree(files, noting.links), comment)
    try:
        again = read_host(parse_recording(text), functions, mediated_devices)
    except SysfsError as error:
        raise SysfsError(f"cannot record this tree: {error}") from error
    if again != host:
        raise SysfsError(f"cannot record this tree, its recording reads differently: {_first_difference(host, again)}")
    return text


def _needed(path: str, content: bytes) -> str:
    text = attribute_text(content)
    # Bridge windows and the ROM come after the BARs, and would be half of the recording.
    return "\n".join(text.splitlines()[:RESOURCES]) if path.endswith("/resource") else text


def _first_difference(host: HostTopology, again: HostTopology) -> str:
    pairs: tuple[tuple[str, Mapping[Any, Any], Mapping[Any, Any]], ...] = (
        ("PCI function", host.functions, again.functions),
        ("NUMA node", host.nodes, again.nodes),
        ("mediated device", host.mediated_devices, again.mediated_devices),
    )
    differing = (
        f"{kind} {key}" for kind, a, b in pairs for key in sorted({*a, *b}) if key not in a or a[key] != b.get(key)
    )
    return next(differing, "unreadable attributes")


def _parse_tar(content: bytes) -> MemoryTree:
    import tarfile  # only here: `serve` reads directories and should not pay for it

    files: dict[str, bytes] = {}
    links: dict[str, str] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
            for member in archive:
                path = _normal(member.name)
                if path is None:
                    continue
                if member.issym():
                    links[path] = member.linkname
                elif member.islnk():
                    files[path] = files.get(_normal(member.linkname) or "", b"")
                elif member.isreg():
                    data = archive.extractfile(member)
                    files[path] = data.read(ATTRIBUTE_LIMIT_BYTES) if data is not None else b""
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:
        raise SysfsError(f"it is a broken tar archive: {error}") from error
    return _tree(files, links)


def _normal(path: str) -> str | None:
    """A relative path without `.` and `..`, or None for one that is empty, too long for Linux or leads outside."""
    if len(path) > _PATH_LIMIT:
        return None
    normal = posixpath.normpath(path)
    return None if normal.startswith(("/", "..")) or normal == "." else normal


def _tree(files: Mapping[str, bytes], links: Mapping[str, str]) -> MemoryTree:
    """The tree below the folder that looks like /sys: the top, or one or two folders down."""
    prefixes = {match[1] for path in (*files, *links) if (match := _SYS_PATH.match(path))}
    if not prefixes:
        raise SysfsError(f"it holds neither {PCI_DEVICES} nor {NODES}, at the top or below one or two folders")
    prefix = min(prefixes, key=lambda p: (p.count("/"), p))
    return MemoryTree(
        {path.removeprefix(prefix): content for path, content in files.items() if path.startswith(prefix)},
        {path.removeprefix(prefix): target for path, target in links.items() if path.startswith(prefix)},
    )


if __name__ == "__main__":
    try:
        sys.stdout.write(record(open_sysfs(sys.argv[1] if len(sys.argv) > 1 else "/sys")))
    except SysfsError as error:
        sys.exit(f"python3 -m hook.recording: {error}")
