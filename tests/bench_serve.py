"""Times the real sidecar: start, and OnDefineDomain over gRPC against an echo server and a one-shot script.

Run by `make bench`, all in one run: compare ratios, not milliseconds.
"""

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from hook.protocol import v1alpha3_pb2, v1alpha3_pb2_grpc
from tests.scenario import Scenario
from tests.sidecar import Sidecar

STARTS, CALLS, SCRIPTS = 7, 100, 11

# What a user's script under KubeVirt's sidecar-shim does at least: start Python, parse, add, print.
SCRIPT = """
import sys, xml.etree.ElementTree as ET
root = ET.fromstring(sys.stdin.buffer.read())
devices = root.find("devices")
for number, hostdev in enumerate(devices.findall("hostdev")):
    ET.SubElement(devices, "controller", type="pci", index=str(17 + number), model="pcie-root-port")
    ET.SubElement(hostdev, "address", type="pci", domain="0", bus=str(17 + number), slot="0", function="0")
sys.stdout.buffer.write(ET.tostring(root))
"""


class _Echo(v1alpha3_pb2_grpc.CallbacksServicer):
    def OnDefineDomain(  # noqa: N802
        self, request: v1alpha3_pb2.OnDefineDomainParams, context: grpc.ServicerContext
    ) -> v1alpha3_pb2.OnDefineDomainResult:
        del context
        return v1alpha3_pb2.OnDefineDomainResult(domainXML=request.domainXML)


def times_ms(work: Callable[[], object], repeats: int) -> list[float]:
    """Sorted wall times."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append((time.perf_counter() - start) * 1000)
    return sorted(times)


def calls_ms(socket: str, scenario: Scenario) -> list[float]:
    """Sorted times of OnDefineDomain on an open channel."""
    request = v1alpha3_pb2.OnDefineDomainParams(domainXML=scenario.xml(), vmi=scenario.vmi)
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        stub = v1alpha3_pb2_grpc.CallbacksStub(channel)
        for _ in range(10):
            stub.OnDefineDomain(request, timeout=10, wait_for_ready=True)
        return times_ms(lambda: stub.OnDefineDomain(request, timeout=10), CALLS)


def echo_ms(scenario: Scenario) -> list[float]:
    """The floor: the same stack, the same bytes, no work."""
    with tempfile.TemporaryDirectory(prefix="echo-") as folder:
        server = grpc.server(ThreadPoolExecutor(max_workers=2))
        v1alpha3_pb2_grpc.add_CallbacksServicer_to_server(_Echo(), server)
        server.add_insecure_port(f"unix:{folder}/echo.sock")
        server.start()
        times = calls_ms(f"{folder}/echo.sock", scenario)
        server.stop(0).wait()
    return times


def start() -> tuple[float, float]:
    """CPU seconds of one life without calls, and wall seconds from exec to the socket."""
    with tempfile.TemporaryDirectory(prefix="start-") as folder:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        begin = time.perf_counter()
        with Sidecar(Path(folder)) as sidecar:
            wall = time.perf_counter() - begin
            sidecar.end()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def main() -> None:
    """Print the figures."""
    lives = [start() for _ in range(STARTS)]
    cpu, wall = (statistics.median(values) for values in zip(*lives, strict=True))
    print(f"exec to socket, median of {STARTS}: {wall:.2f} s wall, {cpu:.2f} s CPU (target 0.35 s CPU)")
    for name in ("two-node-2gpu", "huge-240vcpu-64dev"):
        scenario = Scenario(name)
        xml = scenario.xml()
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            with Sidecar(Path(folder), "--sysfs", str(scenario.sysfs_path)) as sidecar:
                hook = calls_ms(str(sidecar.sockets()[0]), scenario)
        echo = echo_ms(scenario)
        script = times_ms(
            lambda: subprocess.run([sys.executable, "-c", SCRIPT], input=xml, capture_output=True, check=True),  # noqa: B023
            SCRIPTS,
        )
        p50, floor, shim = (statistics.median(values) for values in (hook, echo, script))
        print(f"OnDefineDomain, {name}, {len(xml) // 1000} KB")
        print(f"  hook            p50 {p50:7.2f} ms  p99 {hook[int(CALLS * 0.99) - 1]:7.2f} ms")
        print(f"  echo server     p50 {floor:7.2f} ms  hook / echo {p50 / floor:5.1f} (target 4 for 9 KB)")
        print(f"  one-shot script p50 {shim:7.2f} ms  script / hook {shim / p50:5.1f} (target 8 for 9 KB)")


if __name__ == "__main__":
    main()
