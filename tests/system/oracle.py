"""Ask a real libvirt of Debian 12 or 13 about domain XML, and have it run a guest; must not outlive it.

    with Oracle("debian13") as oracle:
        inactive = oracle.define(for_libvirt(xml))

A generation is a pair of libvirt and QEMU: "debian12" is what is installed here, "debian13" a tree
that install.sh built, entered with chroot.  available() says why one cannot be asked; a test skips
with that reason.  What both have written, above all their knowledge of QEMU's capabilities, which
takes seconds to gather, is kept below cache_folder().
"""

import fcntl
import functools
import json
import os
import selectors
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, Self, get_args

import pytest

Generation = Literal["debian12", "debian13"]
GENERATIONS: tuple[Generation, ...] = get_args(Generation)

SYSTEM_PYTHON = Path("/usr/bin/python3")
CHILD = Path(__file__).with_name("oracle_child.py")
# Written by install.sh as its last act, so that half a tree is never taken for a whole one.
STAMP = ".pcie-numa-hook-recipe"

# The first start of all probes every QEMU emulator that is installed: 12 s measured on an idle
# machine of two cores, a minute on a busy one.  An answer takes 5-100 ms.
START_SECONDS = 180.0
ANSWER_SECONDS = 60.0

# To make a command line, libvirt makes a tap device, and two at a time would choose the same name: each has a
# network of its own.
_ALONE = ("unshare", "-n")

# Where the child's script and folder appear inside the tree.
_INSIDE_SCRIPT = Path("/mnt/oracle_child.py")
_INSIDE_ROOT = Path("/mnt/oracle-root")
# $0 is the tree, then come the script and the folder.  The mounts belong to the mount namespace of
# this process alone and end with it.
_ENTER = f"""
set -e
mount -t proc proc "$0/proc"
mount --rbind /dev "$0/dev"
mount --rbind /sys "$0/sys"
mkdir -p "$0{_INSIDE_ROOT}"
touch "$0{_INSIDE_SCRIPT}"
mount --bind "$1" "$0{_INSIDE_SCRIPT}"
mount --bind "$2" "$0{_INSIDE_ROOT}"
exec chroot "$0" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 \\
    {SYSTEM_PYTHON} {_INSIDE_SCRIPT} {_INSIDE_ROOT}
"""


class OracleError(Exception):
    """The oracle itself failed: it says nothing about the XML."""


class OracleRefused(Exception):
    """libvirt refused the XML; the message is libvirt's own text."""


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "pcie-numa-hook"


def tree(generation: Generation) -> Path | None:
    """The root folder of that generation's files; None where it is this machine's own."""
    return None if generation == "debian12" else cache_folder() / generation


@functools.cache
def available(generation: Generation) -> str | None:
    """Why this generation cannot be asked here; None if it can."""
    if os.geteuid() != 0:
        return f"{generation}: needs root"
    files = tree(generation)
    if files is None:
        return _debian12_missing()
    if not (files / STAMP).is_file():
        return f"{generation}: no tree in {files}; run install.sh {generation}"
    unshare = subprocess.run(
        [*_ALONE, "-m", "--propagation", "private", "true"],
        capture_output=True,
        check=False,
        text=True,
    )
    if unshare.returncode != 0:
        return f"{generation}: no private mounts here: {unshare.stderr.strip()}"
    return None


def _debian12_missing() -> str | None:
    with suppress(OSError):
        if 'VERSION_ID="12"' not in Path("/etc/os-release").read_text():
            return "debian12: this machine is not Debian 12"
    missing = [
        what
        for what, command in {
            "python3-libvirt": [str(SYSTEM_PYTHON), "-c", "import libvirt"],
            "qemu-system-x86": ["test", "-x", "/usr/bin/qemu-system-x86_64"],
            "the user libvirt-qemu": ["getent", "passwd", "libvirt-qemu"],
        }.items()
        if subprocess.run(command, capture_output=True, check=False).returncode != 0
    ]
    if missing:
        return f"debian12: no {', '.join(missing)}; run install.sh debian12"
    return None


class RunningGuest:
    """A running guest."""

    def __init__(self, ask: Callable[[dict[str, Any]], str]) -> None:
        self._ask = ask

    def attach(self, device: str) -> None:
        """Hot-plug a device, and nowhere but in this guest."""
        self._ask({"op": "attach", "xml": device})

    def live_xml(self) -> bytes:
        return self._ask({"op": "live"}).encode()


class Oracle:
    """One libvirt process; not for several threads at a time."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self._child: subprocess.Popen[bytes] | None = None
        self._lock: IO[bytes] | None = None
        self._root = Path()

    def __enter__(self) -> Self:
        reason = available(self.generation)
        if reason is not None:
            raise OracleError(reason)
        self._lock, self._root = _claim_root(self.generation)
        try:
            self._start()
            self._ask({"op": "version"}, START_SECONDS)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._stop()

    def version(self) -> str:
        return self._ask({"op": "version"})

    def define(self, xml: bytes, *, validate: bool = False) -> bytes:
        """Define, read back the inactive XML, undefine.

        validate: check against libvirt's schema too.  KubeVirt does not, and no whole KubeVirt XML
            passes it (an empty <bios> in <sysinfo>).
        """
        return self._ask({"op": "define", "xml": xml.decode(), "validate": validate}).encode()

    def argv(self, xml: bytes) -> list[str]:
        """QEMU's command line, without its environment."""
        words = shlex.split(self._ask({"op": "argv", "xml": xml.decode()}))
        program = next(i for i, word in enumerate(words) if "=" not in word)
        return words[program:]

    @contextmanager
    def running(self, xml: bytes) -> Iterator["RunningGuest"]:
        """A guest that libvirt started, until the end of the block."""
        pid = int(self._ask({"op": "start", "xml": xml.decode()}))
        try:
            yield RunningGuest(self._ask)
        finally:
            if self._child is not None:
                self._ask({"op": "stop"})
            else:  # killed, because it did not answer
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    @property
    def shared(self) -> tuple[Path, Path]:
        """A folder that libvirt and its guest see too: its name here, and theirs."""
        return self._root, self._root if tree(self.generation) is None else _INSIDE_ROOT

    def _start(self) -> None:
        files = tree(self.generation)
        if files is None:
            command = [*_ALONE, str(SYSTEM_PYTHON), str(CHILD), str(self._root)]
        else:
            command = [
                *(*_ALONE, "-m", "--propagation", "private", "bash", "-c", _ENTER),
                *(str(files), str(CHILD), str(self._root)),
            ]
        assert self._lock is not None
        with self._stderr.open("wb") as stderr:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                # Should this process be killed, its child lives until it sees the end of its input:
                # the root must stay claimed for as long.
                pass_fds=[self._lock.fileno()],
                # Ctrl-C is for this process, which then ends the child.
                start_new_session=True,
            )

    @property
    def _stderr(self) -> Path:
        return self._root / "stderr.log"

    def _ask(self, request: dict[str, Any], seconds: float = ANSWER_SECONDS) -> str:
        if self._child is None:
            raise OracleError(f"{self.generation}: not running: use it as a context manager")
        assert self._child.stdin is not None
        with suppress(BrokenPipeError):
            self._child.stdin.write(json.dumps(request).encode() + b"\n")
            self._child.stdin.flush()
        line = self._read_line(request, seconds)
        reply: dict[str, Any] = json.loads(line)
        if not reply["ok"]:
            raise OracleRefused(reply["error"])
        return str(reply["out"])

    def _read_line(self, request: dict[str, Any], seconds: float) -> bytes:
        assert self._child is not None
        assert self._child.stdout is not None
        descriptor = self._child.stdout.fileno()
        deadline = time.monotonic() + seconds
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self._stop(patience=0)
                    raise OracleError(f"{self._asked(request)}: no answer in {seconds:g} s")
                piece = os.read(descriptor, 1 << 16)
                if not piece:
                    self._stop()
                    tail = self._stderr.read_text(errors="replace")[-2000:]
                    raise OracleError(f"{self._asked(request)}: the oracle ended:\n{tail}")
                line += piece
        return line

    def _asked(self, request: dict[str, Any]) -> str:
        xml = request.get("xml", "")
        return f"{self.generation}: {request['op']}{': ' + xml[:300] + ' …' if xml else ''}"

    def _stop(self, patience: float = 3.0) -> None:
        if self._child is not None:
            child, self._child = self._child, None
            assert child.stdin is not None
            assert child.stdout is not None
            # It ends at the end of its input, unless it hangs in libvirt.
            with suppress(BrokenPipeError):
                child.stdin.close()
            try:
                child.wait(patience)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            child.stdout.close()
            self._end_probes()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _end_probes(self) -> None:
        """End a QEMU that libvirt had just started to learn its capabilities, when it was killed.

        They are daemons and nobody's children.  libvirt made a folder of a random name for each,
        which is on its command line.
        """
        for _attempt in range(3):
            folders = list(self._root.glob("lib/qemu/qmp-*"))
            if not folders:
                return
            marks = [f"/{folder.name}/qmp.pid".encode() for folder in folders]
            for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
                with suppress(OSError):
                    words = cmdline.read_bytes()
                    if any(mark in words for mark in marks):
                        os.kill(int(cmdline.parent.name), signal.SIGKILL)
            # Perhaps one was not QEMU yet, but libvirt's fork that was about to become it.
            time.sleep(0.1)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def _claim_root(generation: Generation) -> tuple[IO[bytes], Path]:
    """A folder for one libvirt, with the lock that keeps others out of it.

    libvirt takes one process per folder.  Several test runs, or several workers of one, each take
    the first folder that is free, so that there are never more than were needed at once and each
    keeps what it learned.
    """
    roots = cache_folder() / "libvirt" / generation
    roots.mkdir(parents=True, exist_ok=True)
    number = 0
    while True:
        lock = (roots / f"{number}.lock").open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            lock.close()
            number += 1
    root = roots / str(number)
    root.mkdir(exist_ok=True)
    if number > 0:
        _copy_capabilities(roots / "0", root)
    return lock, root


def _copy_capabilities(learned: Path, root: Path) -> None:
    """Spare the folder the probing that another one saw; libvirt checks its worth."""
    inside = Path("cache", "qemu", "capabilities")
    (root / inside).mkdir(parents=True, exist_ok=True)
    for file in (learned / inside).glob("*.xml"):
        copy = root / inside / file.name
        # The owner of the other folder may be replacing the very file.
        with suppress(FileNotFoundError):
            if not copy.exists() or copy.stat().st_mtime < file.stat().st_mtime:
                shutil.copy2(file, copy)


@contextmanager
def asking(generation: Generation) -> Iterator[Oracle]:
    """For a pytest fixture: skips the test where this generation cannot be asked."""
    reason = available(generation)
    if reason is not None:
        pytest.skip(reason)
    with Oracle(generation) as oracle:
        yield oracle
