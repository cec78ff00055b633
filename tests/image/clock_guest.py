"""PID 1 of a guest made of the image: calls the sidecar while the clock jumps, and prints what came of it.

Runs alone, with what the image has. Nothing but a guest of its own may have its clock set.
"""

import ctypes
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc

from hook.protocol import v1alpha3_pb2, v1alpha3_pb2_grpc

SOCKETS = Path("/run/hooks")
YEARS = 10 * 365 * 86400
CALLS = 60
JUMP_SECONDS = 0.15
CALL_SECONDS = 30.0
START_SECONDS = 120.0
IDLE_SECONDS = 2.0
POWER_OFF = 0x4321FEDC  # include/uapi/linux/reboot.h

libc = ctypes.CDLL(None, use_errno=True)


def mount(kind: str, folder: str) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    libc.mount(kind.encode(), folder.encode(), kind.encode(), 0, None)


def jump(seconds: float) -> None:
    time.clock_settime(time.CLOCK_REALTIME, time.time() + seconds)


def jumping(stop: threading.Event) -> None:
    """Ten years forward, ten back, an hour back, an hour forward, and so on."""
    while True:
        for seconds in (YEARS, -YEARS, -3600.0, 3600.0):
            if stop.wait(JUMP_SECONDS):
                return
            jump(seconds)


def calls(ask: Callable[[], bytes]) -> dict[str, object]:
    answers, times = [], []
    for _ in range(CALLS):
        start = time.monotonic()
        answers.append(ask())
        times.append(time.monotonic() - start)
    return {"answers": len(set(answers)), "first": answers[0].decode(), "slowest_seconds": round(max(times), 2)}


def main() -> dict[str, object]:
    SOCKETS.mkdir(parents=True)
    SOCKETS.chmod(0o777)
    sidecar = subprocess.Popen(
        ["pcie-numa-hook", "serve", "--socket-dir", str(SOCKETS), "--sysfs", "/recording"],
        user=107, group=107, env={**os.environ, "CONTAINER_NAME": "hook-sidecar-0"},
    )  # fmt: skip
    deadline = time.monotonic() + START_SECONDS
    while not (found := list(SOCKETS.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.1)
    request = v1alpha3_pb2.OnDefineDomainParams(
        domainXML=Path("/domain.xml").read_bytes(), vmi=Path("/vmi.json").read_bytes()
    )
    with grpc.insecure_channel(f"unix:{found[0]}") as channel:
        stub = v1alpha3_pb2_grpc.CallbacksStub(channel)

        def ask() -> bytes:
            return bytes(stub.OnDefineDomain(request, timeout=CALL_SECONDS, wait_for_ready=True).domainXML)

        still = calls(ask)
        stop = threading.Event()
        jumper = threading.Thread(target=jumping, args=(stop,))
        jumper.start()
        jumped = calls(ask)
        stop.set()
        jumper.join()
        jump(-YEARS)
        time.sleep(IDLE_SECONDS)
        after = calls(ask)
    sidecar.send_signal(signal.SIGTERM)
    start = time.monotonic()
    status = sidecar.wait(CALL_SECONDS)
    return {
        "still": still,
        "jumped": jumped,
        "after": after,
        "status": status,
        "stop_seconds": round(time.monotonic() - start, 2),
        "left": [path.name for path in SOCKETS.iterdir()],
    }


if __name__ == "__main__":
    for kind, folder in (("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev"), ("tmpfs", "/run")):
        mount(kind, folder)
    console = os.open("/dev/ttyS0", os.O_RDWR)
    for descriptor in range(3):
        os.dup2(console, descriptor)
    try:
        print(f"@result {json.dumps(main())}", flush=True)
    finally:
        print("@end", flush=True)
        os.sync()
        libc.reboot(POWER_OFF)
