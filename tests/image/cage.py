"""Runs the image as KubeVirt runs a hook sidecar: its user, its limits, nothing writable; must not look inside it."""

import json
import os
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

IMAGE = "localhost/pcie-numa-hook:dev"
MINIMAL = "localhost/pcie-numa-hook:minimal"
# 64 MB and 200 millicores, uid 107 without capabilities (KubeVirt pkg/virt-controller/services/renderresources.go).
LIMITS = (
    "--memory=64000000",
    "--memory-swap=64000000",
    "--cpus=0.2",
    "--user=107:107",
    "--cap-drop=all",
    "--network=none",
    "--security-opt=no-new-privileges",
    "--read-only",
    "--read-only-tmpfs=false",
)
# What podman would raise beyond what this machine allows.
_ULIMITS = ("--ulimit=nofile=20000:20000", "--ulimit=nproc=1000:1000")
_PODMAN = ("podman", "--cgroup-manager=cgroupfs", "--runtime=runc")
_ENVIRONMENT = {**os.environ, "STORAGE_DRIVER": os.environ.get("STORAGE_DRIVER", "vfs")}


def podman(*arguments: str) -> str:
    """Run podman and give its output."""
    done = subprocess.run([*_PODMAN, *arguments], env=_ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"podman {' '.join(arguments)}: {done.stderr}"
    return done.stdout


class Cage:
    """One container with a socket folder and a recording of a host."""

    def __init__(self, sockets: Path, recording: Path, arguments: Sequence[str] = (), image: str = IMAGE) -> None:
        """Start it."""
        sockets.chmod(0o777)
        self.sockets = sockets
        self.id = podman(
            "run", "--detach", *LIMITS, *_ULIMITS, "--env=CONTAINER_NAME=hook-sidecar-0",
            f"--volume={sockets}:/var/run/kubevirt-hooks", f"--volume={recording}:/recording:ro",
            image, "--sysfs=/recording", *arguments,
        ).strip()  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        podman("rm", "--force", "--time=0", self.id)

    def state(self) -> dict[str, Any]:
        """What podman knows of it."""
        return dict(json.loads(podman("inspect", self.id))[0]["State"])

    def started(self) -> float:
        """When its process was started, seconds since the epoch."""
        text = self.state()["StartedAt"]
        return datetime.fromisoformat(text[:26].rstrip("Z")).replace(tzinfo=UTC).timestamp()

    def log(self) -> list[dict[str, Any]]:
        """Its log lines."""
        done = subprocess.run([*_PODMAN, "logs", self.id], env=_ENVIRONMENT, capture_output=True, text=True, check=True)
        return [json.loads(line) for line in (done.stdout + done.stderr).splitlines()]

    def unreclaimable_bytes(self) -> int:
        """Anonymous and kernel memory of its cgroup that the kernel cannot take back: what the limit counts against."""
        lines = Path(f"/proc/{self.state()['Pid']}/cgroup").read_text().splitlines()
        groups = {line.split(":")[1]: line.split(":", 2)[2] for line in lines}
        if "memory" in groups:  # cgroup v1
            folder = Path("/sys/fs/cgroup/memory") / groups["memory"].lstrip("/")
            _reclaim(folder / "memory.force_empty", "0")
            kernel = int((folder / "memory.kmem.usage_in_bytes").read_text())
            return _stat(folder)["rss"] + kernel
        folder = Path("/sys/fs/cgroup") / groups[""].lstrip("/")
        _reclaim(folder / "memory.reclaim", "64000000")
        stat = _stat(folder)
        return stat["anon"] + stat["kernel"]

    def stop(self) -> tuple[int, float]:
        """Exit status and seconds after SIGTERM."""
        start = time.monotonic()
        podman("stop", "--time=10", self.id)
        return int(self.state()["ExitCode"]), time.monotonic() - start


def _reclaim(file: Path, text: str) -> None:
    """Ask for all that can be had; less than that is an error for the kernel, and none here."""
    with suppress(OSError):
        file.write_text(text)


def _stat(folder: Path) -> dict[str, int]:
    return {key: int(value) for key, value in map(str.split, (folder / "memory.stat").read_text().splitlines())}


def forget_files() -> None:
    """Drop the page cache, so that the next start reads everything from disk."""
    subprocess.run(["sync"], check=True)
    Path("/proc/sys/vm/drop_caches").write_text("3\n")
