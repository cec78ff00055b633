"""A clock that jumps under the sidecar: the image as a guest of its own, whose clock may be set."""

import json
import os
import shutil
import signal
import subprocess
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from hook.config import Config
from hook.define import define_domain
from tests.image.cage import IMAGE, podman
from tests.scenario import Scenario
from tests.system.oracle import cache_folder

pytestmark = pytest.mark.image
SCENARIO = Scenario("two-node-2gpu")
SECONDS = 400.0
MEMORY_MIB = 1536
# Emulated, and beside other tests; the deadline of a call is 30 s.
SLOW_SECONDS = 15.0
_INIT = """#!/bin/sh
export PATH=/opt/hook/bin:/usr/local/bin:/usr/bin:/bin PYTHONPATH=/opt/hook MALLOC_ARENA_MAX=1
exec python3 /clock_guest.py
"""


def initrd(folder: Path) -> Path:
    """The file system of the image, with what the guest runs."""
    root = folder / "root"
    container = podman("create", "--network=none", IMAGE).strip()
    try:
        podman("export", "--output", str(folder / "image.tar"), container)
    finally:
        podman("rm", container)
    with tarfile.open(folder / "image.tar") as archive:
        archive.extractall(root, filter="fully_trusted")
    (root / "init").write_text(_INIT)
    (root / "init").chmod(0o755)
    (root / "domain.xml").write_bytes(SCENARIO.xml())
    (root / "vmi.json").write_bytes(SCENARIO.vmi)
    shutil.copy(SCENARIO.sysfs_path, root / "recording")
    shutil.copy(Path(__file__).with_name("clock_guest.py"), root)
    packed = folder / "initrd"
    pack = f"cd {root} && find . -xdev | cpio --create --format=newc --quiet > {packed}"
    subprocess.run(["sh", "-c", pack], check=True)
    return packed


def run(folder: Path) -> dict[str, Any]:
    """Boot it and give its result; QEMU is killed when it says nothing."""
    console = folder / "console.log"
    command = [
        *("qemu-system-x86_64", "-M", "q35", "-cpu", "max", "-accel", "tcg,thread=single", "-m", f"{MEMORY_MIB}"),
        *("-nodefaults", "-no-reboot", "-display", "none", "-serial", f"file:{console}"),
        *("-kernel", str(cache_folder() / "boot" / "vmlinuz"), "-initrd", str(initrd(folder))),
        *("-append", "console=ttyS0 quiet panic=-1 mitigations=off no_timer_check tsc=reliable"),
    ]
    console.touch()
    started = time.monotonic()
    qemu = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        while "@end" not in console.read_text(errors="replace") and qemu.poll() is None:
            assert time.monotonic() - started < SECONDS, console.read_text(errors="replace")[-3000:]
            time.sleep(0.2)
    finally:
        if qemu.poll() is None:
            os.killpg(qemu.pid, signal.SIGKILL)
        qemu.wait()
    text = console.read_text(errors="replace").replace("\r", "")
    lines = [line for line in text.splitlines() if line.startswith("@result ")]
    assert lines, text[-3000:]
    return dict(json.loads(lines[0].removeprefix("@result ")))


def test_calls_do_not_care_for_a_clock_that_jumps(tmp_path: Path) -> None:
    result = run(tmp_path)

    slowest = {phase: result[phase].pop("slowest_seconds") for phase in ("still", "jumped", "after")}
    stop_seconds = result.pop("stop_seconds")
    print(f"\nslowest call {slowest}, stop {stop_seconds} s")
    answer = define_domain(SCENARIO.xml(), SCENARIO.vmi, lambda: SCENARIO.sysfs, Config()).xml.decode()
    same = {"answers": 1, "first": answer}
    assert result == {"still": same, "jumped": same, "after": same, "status": 0, "left": []}
    assert max(slowest.values()) < SLOW_SECONDS
    assert stop_seconds < SLOW_SECONDS
