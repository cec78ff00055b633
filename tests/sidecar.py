"""Runs the real sidecar as a process; must not look inside it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import coverage

SOCKET_SECONDS = 20
STOP_SECONDS = 3


class Sidecar:
    """`pcie-numa-hook serve` on a socket in a folder of its own."""

    def __init__(
        self,
        directory: Path,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        wait: bool = True,
        before: Sequence[str] = (),
        program: Sequence[str] = ("-m", "hook", "serve"),
        is_weighed: bool = False,
    ) -> None:
        """Start it and `wait` for the socket.

        before: words in front of the command. program: what the interpreter runs. is_weighed: its memory
            counts, so its coverage is not measured.
        """
        self.directory = directory
        self._log = Path(f"{directory}.log")  # beside the folder: virt-launcher takes every file in it for a socket
        variables = {key: value for key, value in os.environ.items() if key not in ("CONTAINER_NAME", "PYTHONPATH")}
        is_measured = coverage.Coverage.current() is not None and program[0] == "-m" and not is_weighed
        measure = ("-m", "coverage", "run", "--parallel-mode") if is_measured else ()
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*before, sys.executable, *measure, *program, "--socket-dir", str(directory), *arguments],
                cwd=Path(__file__).parent.parent,
                env={**variables, **(environment or {})},
                stderr=log,
            )
        deadline = time.monotonic() + SOCKET_SECONDS
        while wait and not self.sockets():
            assert self.process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, f"no socket in {SOCKET_SECONDS} s: {self._log.read_text()}"
            time.sleep(0.02)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.terminate()  # it writes down what was covered
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.unlink(missing_ok=True)

    def sockets(self) -> Sequence[Path]:
        """Sockets in the folder."""
        return sorted(self.directory.glob("*.sock"))

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and give the exit status."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """The exit status."""
        return self.process.wait(timeout=10)

    def log(self) -> list[dict[str, Any]]:
        """The log lines so far."""
        return [json.loads(line) for line in self._log.read_text().splitlines()]

    def memory_mib(self) -> tuple[float, float]:
        """Resident and anonymous memory now."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        values = dict(line.split(":", 1) for line in status.splitlines())
        return tuple(int(values[key].split()[0]) / 1024 for key in ("VmRSS", "RssAnon"))  # type: ignore[return-value]
