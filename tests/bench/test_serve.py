"""Times the real sidecar: start, and OnDefineDomain over gRPC against an echo server and a one-shot script."""

import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest

from hook.protocol import v1alpha3_pb2, v1alpha3_pb2_grpc
from tests.bench.conftest import Measure
from tests.scenario import Scenario
from tests.sidecar import Sidecar

pytestmark = pytest.mark.bench
STARTS, CALLS, SCRIPTS = 7, 100, 11
SCENARIOS = ("two-node-2gpu", "huge-240vcpu-64dev")

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


@contextmanager
def call(socket: str, scenario: Scenario) -> Iterator[Callable[[], object]]:
    """OnDefineDomain on an open channel."""
    request = v1alpha3_pb2.OnDefineDomainParams(domainXML=scenario.xml(), vmi=scenario.vmi)
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        stub = v1alpha3_pb2_grpc.CallbacksStub(channel)
        yield lambda: stub.OnDefineDomain(request, timeout=10, wait_for_ready=True)


def group(scenario: Scenario) -> str:
    return f"OnDefineDomain, {scenario.name}, {len(scenario.xml()) // 1000} KB"


def test_start(measure: Measure) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    stack = ExitStack()

    def start() -> None:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="start-"))
        stack.enter_context(Sidecar(Path(folder)))

    def cpu() -> str:
        stack.close()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return f"{used / STARTS:.2f} s CPU in its whole life (target 0.35)"

    measure("from exec to the socket", "pcie-numa-hook serve", start, STARTS, note=cpu, warmups=0)


@pytest.mark.parametrize("name", SCENARIOS)
def test_echo_server(measure: Measure, name: str) -> None:
    """The floor: the same stack, the same bytes, no work."""
    scenario = Scenario(name)
    with tempfile.TemporaryDirectory(prefix="echo-") as folder:
        server = grpc.server(ThreadPoolExecutor(max_workers=2))
        v1alpha3_pb2_grpc.add_CallbacksServicer_to_server(_Echo(), server)
        server.add_insecure_port(f"unix:{folder}/echo.sock")
        server.start()
        with call(f"{folder}/echo.sock", scenario) as work:
            measure(group(scenario), "echo server", work, CALLS)
        server.stop(0).wait()


@pytest.mark.parametrize("name", SCENARIOS)
def test_hook(measure: Measure, name: str) -> None:
    scenario = Scenario(name)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        with Sidecar(Path(folder), "--sysfs", str(scenario.sysfs_path)) as sidecar:
            with call(str(sidecar.sockets()[0]), scenario) as work:
                measure(group(scenario), "hook", work, CALLS, note="(target 4 for 9 KB)")


@pytest.mark.parametrize("name", SCENARIOS)
def test_one_shot_script(measure: Measure, name: str) -> None:
    scenario = Scenario(name)
    xml = scenario.xml()

    def work() -> object:
        return subprocess.run([sys.executable, "-c", SCRIPT], input=xml, capture_output=True, check=True)

    measure(group(scenario), "one-shot script", work, SCRIPTS, note="(target 8 times the hook for 9 KB)", warmups=1)
