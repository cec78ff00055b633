r"""Opens what stands for /sys: a directory, a tar archive, or a text recording; must not interpret attributes.

A text recording is one line per attribute or link, sorted by path, `#` starts a comment line:

    devices/system/node/node0/cpulist = 0-31
    bus/pci/devices/0000:41:00.0 -> ../../../devices/pci0000:40/0000:40:01.1/0000:41:00.0

Values have no trailing newline; inside, newline and backslash are written `\n` and `\\`.
Archives and recordings are read into memory: nothing is unpacked, and no link leads out of them.
"""

import gzip
import io
import os
import posixpath
import re
import zlib
from collections.abc import Mapping

from hook.errors import SysfsError
from hook.sysfs import ATTRIBUTE_LIMIT_BYTES, NODES, PCI_DEVICES, DirectoryTree, MemoryTree, SysfsTree

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
