"""What goes wrong around a sidecar in real life; the sidecar is a real process, the faults are real too."""

import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from hook.config import Config
from hook.define import define_domain
from hook.protocol import v1alpha3_pb2, v1alpha3_pb2_grpc
from hook.recording import parse_recording
from tests.build import unpack
from tests.scenario import Scenario
from tests.sidecar import Sidecar
from tests.virt_launcher import Launcher, dial

SCENARIO = Scenario("two-node-2gpu")
LARGEST = Scenario("huge-240vcpu-64dev")
ROOT = Path(__file__).parent.parent
# root without the right to ignore permissions: what uid 107 is, with this interpreter readable all the same
ORDINARY = ("setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-dac_override,-dac_read_search")


def answer(scenario: Scenario) -> bytes:
    return define_domain(scenario.xml(), scenario.vmi, lambda: scenario.sysfs, Config()).xml


@pytest.fixture
def sidecar(hooks: Path) -> Iterator[Sidecar]:
    with Sidecar(hooks, "--sysfs", str(LARGEST.sysfs_path)) as it:
        yield it


def launcher(sidecar: Sidecar) -> Launcher:
    collected = Launcher(sidecar.directory)
    collected.collect(1)
    return collected


def large() -> bytes:
    """A document that takes a while: 1 MB of elements."""
    filler = b'<disk type="file"><source file="/a"/></disk>' * 22_000
    return LARGEST.xml().replace(b"</devices>", b"</devices><metadata>" + filler + b"</metadata>")


def in_call(vm: Launcher) -> threading.Thread:
    """A call that is under way."""
    thread = threading.Thread(target=lambda: vm.on_define_domain(large(), LARGEST.vmi), daemon=True)
    thread.start()
    time.sleep(0.1)
    return thread


def test_sigterm_during_a_call_lets_it_finish(sidecar: Sidecar) -> None:
    vm = launcher(sidecar)
    answers: list[bytes] = []
    thread = threading.Thread(target=lambda: answers.append(vm.on_define_domain(large(), LARGEST.vmi)))
    thread.start()
    time.sleep(0.05)
    status = sidecar.end()
    thread.join()

    assert [len(answer) > 1_000_000 for answer in answers] == [True]
    assert (status, sidecar.sockets()) == (0, [])


def test_sigterm_twice_is_one(sidecar: Sidecar) -> None:
    vm = launcher(sidecar)
    in_call(vm)
    sidecar.process.send_signal(signal.SIGTERM)

    assert sidecar.end() == 0
    assert sidecar.sockets() == []


def test_a_client_that_dies_in_mid_call_hurts_nobody(sidecar: Sidecar) -> None:
    code = (
        "import sys, threading, os, time\n"
        "from pathlib import Path\n"
        "from tests.test_faults import Launcher, in_call\n"
        "vm = Launcher(Path(sys.argv[1])); vm.collect(1); in_call(vm); os._exit(9)"
    )
    died = subprocess.run([sys.executable, "-c", code, str(sidecar.directory)], cwd=ROOT, check=False)

    assert died.returncode == 9
    assert launcher(sidecar).on_define_domain(LARGEST.xml(), LARGEST.vmi) == answer(LARGEST)
    assert sidecar.end() == 0


def test_memory_is_flat_over_a_thousand_calls_and_eight_at_once(hooks: Path) -> None:
    with Sidecar(hooks, "--sysfs", str(SCENARIO.sysfs_path)) as sidecar:
        vm = launcher(sidecar)
        request = v1alpha3_pb2.OnDefineDomainParams(domainXML=SCENARIO.xml(), vmi=SCENARIO.vmi)
        with dial(sidecar.sockets()[0]) as channel:  # once: a dial takes a tenth of a second in Python
            stub = v1alpha3_pb2_grpc.CallbacksStub(channel)
            for _ in range(200):
                stub.OnDefineDomain(request, timeout=5)
            early = sidecar.memory_mib()[1]
            for _ in range(800):
                stub.OnDefineDomain(request, timeout=5)
        late = sidecar.memory_mib()[1]
        with ThreadPoolExecutor(8) as pool:
            answers = set(pool.map(lambda _: vm.on_define_domain(SCENARIO.xml(), SCENARIO.vmi), range(64)))
        crowded = sidecar.memory_mib()[1]

    print(
        f"\nanonymous MiB after 200 calls {early:.1f}, after 1000 {late:.1f}, after 64 by eight at once {crowded:.1f}"
    )
    assert answers == {answer(SCENARIO)}
    assert late < early + 1
    assert crowded < early + 3


def test_sysfs_is_read_at_every_call_and_may_fail_in_between(hooks: Path, tmp_path: Path) -> None:
    sys_folder = tmp_path / "sys"
    tree = parse_recording(SCENARIO.sysfs_path.read_text())
    unpack(tree, sys_folder)
    device = sys_folder / "devices/pci0000:40/0000:40:01.1/0000:41:00.0"
    with Sidecar(hooks, "--sysfs", str(sys_folder)) as sidecar:
        vm = launcher(sidecar)
        first = vm.on_define_domain(SCENARIO.xml(), SCENARIO.vmi)
        (device / "numa_node").write_text("1\n")
        moved = vm.on_define_domain(SCENARIO.xml(), SCENARIO.vmi)
        shutil.rmtree(sys_folder)
        with pytest.raises(grpc.RpcError) as raised:
            vm.on_define_domain(SCENARIO.xml(), SCENARIO.vmi)
        unpack(tree, sys_folder)
        again = vm.on_define_domain(SCENARIO.xml(), SCENARIO.vmi)

    assert first == answer(SCENARIO) == again
    assert moved.count(b"pcie-expander-bus") == 1
    assert raised.value.details() == f"cannot read sysfs at {sys_folder}: there is no such directory"


def test_an_unreadable_sysfs_is_said(hooks: Path, tmp_path: Path) -> None:
    unreadable = tmp_path / "sys"
    unreadable.mkdir(mode=0)
    with Sidecar(hooks, "--sysfs", str(unreadable), before=ORDINARY) as sidecar:
        with pytest.raises(grpc.RpcError) as raised:
            launcher(sidecar).on_define_domain(SCENARIO.xml(), SCENARIO.vmi)

        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert raised.value.details() == f"cannot read sysfs at {unreadable}: the directory is not readable"


def test_a_folder_that_cannot_be_written_is_one_clear_line(hooks: Path) -> None:
    hooks.chmod(0o555)
    with Sidecar(hooks, wait=False, before=ORDINARY) as sidecar:
        assert sidecar.wait() == 1
        assert [line["msg"].partition(": ")[2] for line in sidecar.log()] == [
            f"the directory {hooks} cannot be written"
        ]


def test_no_home_and_no_path_are_needed(hooks: Path) -> None:
    command = ["env", "-i", sys.executable, "-m", "hook", "serve", "--socket-dir", str(hooks)]
    process = subprocess.Popen([*command, "--sysfs", str(SCENARIO.sysfs_path)], cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        vm = Launcher(hooks)
        vm.collect(1)
        assert vm.on_define_domain(SCENARIO.xml(), SCENARIO.vmi) == answer(SCENARIO)
        vm.shutdown()
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()


def test_a_fault_in_the_planner_costs_no_vm(hooks: Path) -> None:
    # Our own planner, broken after the warm-up.
    code = (
        "import sys, hook.define, hook.server\n"
        "real = hook.define.make_plan\n"
        "def make_plan(guest, *rest, **named):\n"
        "    if len(guest.hostdevs) > 1: raise ZeroDivisionError('broken planner')\n"
        "    return real(guest, *rest, **named)\n"
        "hook.define.make_plan = make_plan\n"
        "sys.exit(hook.server.serve(sys.argv[1:]))"
    )
    with Sidecar(hooks, "--sysfs", str(SCENARIO.sysfs_path), program=("-c", code)) as sidecar:
        vm = launcher(sidecar)
        answers = [vm.on_define_domain(SCENARIO.xml(), SCENARIO.vmi) for _ in range(2)]
        sidecar.end()
        log = sidecar.log()

    assert answers == [SCENARIO.xml()] * 2
    assert [line["msg"] for line in log if "so far" in line["msg"]] == [
        f"unexpected ZeroDivisionError: the domain is unchanged; unexpected errors so far: {count}" for count in (1, 2)
    ]
    assert all("in make_plan" in line["trace"] for line in log if line["level"] == "error")


def test_a_fault_in_the_planner_fails_a_strict_vm(hooks: Path) -> None:
    code = (
        "import sys, hook.define, hook.server\n"
        "real = hook.define.make_plan\n"
        "hook.define.make_plan = lambda guest, *a, **k: real(guest, *a, **k) if len(guest.hostdevs) == 1 else 1 / 0\n"
        "sys.exit(hook.server.serve(sys.argv[1:]))"
    )
    arguments = ("--sysfs", str(SCENARIO.sysfs_path), "--policy", "strict")
    with Sidecar(hooks, *arguments, program=("-c", code)) as sidecar:
        with pytest.raises(grpc.RpcError) as raised:
            launcher(sidecar).on_define_domain(SCENARIO.xml(), SCENARIO.vmi)

    assert raised.value.details() == (
        "policy strict refuses this VM: VM: ZeroDivisionError: division by zero [internal-error]"
    )
