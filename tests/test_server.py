"""The real sidecar process on a real socket, called as virt-launcher calls it."""

import io
import json
import logging
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import grpc
import pytest

from hook import log, server
from hook.config import Config
from hook.define import define_domain
from hook.protocol import info_pb2, info_pb2_grpc, v1alpha2_pb2, v1alpha2_pb2_grpc
from tests.scenario import Scenario
from tests.sidecar import Sidecar
from tests.virt_launcher import Launcher, dial

SCENARIO = Scenario("two-node-2gpu")
ROOT = Path(__file__).parent.parent


def answer(scenario: Scenario, xml: bytes, config: Config | None = None) -> bytes:
    return define_domain(xml, scenario.vmi, lambda: scenario.sysfs, config or Config()).xml


@pytest.fixture
def sidecar(hooks: Path) -> Iterator[Sidecar]:
    with Sidecar(hooks, "--sysfs", str(SCENARIO.sysfs_path), environment={"CONTAINER_NAME": "hook-sidecar-0"}) as it:
        yield it


def launcher(sidecar: Sidecar, newest: str = "v1alpha3") -> Launcher:
    collected = Launcher(sidecar.directory, newest)
    collected.collect(1)
    return collected


def test_info_lists_hook_points_and_versions(sidecar: Sidecar) -> None:
    with dial(sidecar.sockets()[0]) as channel:
        info = info_pb2_grpc.InfoStub(channel).Info(info_pb2.InfoParams(), timeout=1)

    assert info == info_pb2.InfoResult(
        name="pcie-numa-hook",
        hookPoints=[info_pb2.HookPoint(name="OnDefineDomain"), info_pb2.HookPoint(name="Shutdown")],
        versions=["v1alpha1", "v1alpha2", "v1alpha3"],
    )


@pytest.mark.parametrize("newest", ["v1alpha1", "v1alpha2", "v1alpha3"])
def test_every_version_gives_the_answer_of_the_use_case(sidecar: Sidecar, newest: str) -> None:
    vm = launcher(sidecar, newest)

    assert newest == vm.sidecars[0].version
    assert answer(SCENARIO, SCENARIO.xml()) == vm.on_define_domain(SCENARIO.xml(), SCENARIO.vmi)


def test_pre_cloud_init_iso_is_given_back(sidecar: Sidecar) -> None:
    request = v1alpha2_pb2.PreCloudInitIsoParams(cloudInitData=b"data", cloudInitNoCloudSource=b"source", vmi=b"{}")
    with dial(sidecar.sockets()[0]) as channel:
        result = v1alpha2_pb2_grpc.CallbacksStub(channel).PreCloudInitIso(request, timeout=5)

    assert result == v1alpha2_pb2.PreCloudInitIsoResult(cloudInitData=b"data", cloudInitNoCloudSource=b"source")


@pytest.mark.parametrize(
    ("offered", "points"),
    [("v1alpha1", {"OnDefineDomain"}), ("v1alpha2", {"OnDefineDomain"}), ("v1alpha3", {"OnDefineDomain", "Shutdown"})],
)
def test_only_the_versions_asked_for_are_offered(hooks: Path, offered: str, points: set[str]) -> None:
    with Sidecar(hooks, "--version", offered, "--sysfs", str(SCENARIO.sysfs_path)) as sidecar:
        vm = launcher(sidecar)

        assert (offered, points) == (vm.sidecars[0].version, set(vm.sidecars[0].hook_points))
        assert answer(SCENARIO, SCENARIO.xml()) == vm.on_define_domain(SCENARIO.xml(), SCENARIO.vmi)


BAD_INPUT = {
    "empty": (b"", b"{}", "INVALID_ARGUMENT", "cannot parse the domain XML: Document is empty, line 1, column 1"),
    "garbage": (b"<domain", b"{}", "INVALID_ARGUMENT", "cannot parse the domain XML: .+"),
    "no domain": (b"<a/>", b"{}", "INVALID_ARGUMENT", "cannot use the domain XML: its root is <a>, expected <domain>"),
    "too large": (
        b" " * (1 << 20) + b"<domain/>",
        b"{}",
        "RESOURCE_EXHAUSTED",
        "cannot read the domain XML: it has 1048585 bytes, at most 1048576 are accepted",
    ),
    "no VMI": (SCENARIO.xml(), b"", "INVALID_ARGUMENT", "cannot read the VMI: .+, expected JSON"),
    "VMI is a list": (
        SCENARIO.xml(),
        b"[]",
        "INVALID_ARGUMENT",
        "cannot read the VMI: found a JSON list, expected an object",
    ),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_gets_a_status_and_the_server_goes_on(sidecar: Sidecar, case: str) -> None:
    xml, vmi, status, text = BAD_INPUT[case]
    vm = launcher(sidecar)
    with pytest.raises(grpc.RpcError) as raised:
        vm.on_define_domain(xml, vmi)

    assert status == raised.value.code().name
    assert re.fullmatch(text, raised.value.details() or "")
    assert answer(SCENARIO, SCENARIO.xml()) == vm.on_define_domain(SCENARIO.xml(), SCENARIO.vmi)


def test_a_missing_sysfs_is_said(hooks: Path) -> None:
    with Sidecar(hooks, "--sysfs", "/no/such/sys") as sidecar:
        with pytest.raises(grpc.RpcError) as raised:
            launcher(sidecar).on_define_domain(SCENARIO.xml(), SCENARIO.vmi)

        assert raised.value.code().name == "INVALID_ARGUMENT"
        assert raised.value.details() == "cannot read sysfs at /no/such/sys: there is no such directory"


def test_strict_refuses_with_every_reason(hooks: Path) -> None:
    stray = Scenario("cpuless-node-device")
    with Sidecar(hooks, "--sysfs", str(stray.sysfs_path), "--policy", "strict") as sidecar:
        with pytest.raises(grpc.RpcError) as raised:
            launcher(sidecar).on_define_domain(stray.xml(), stray.vmi)

        assert raised.value.code().name == "FAILED_PRECONDITION"
        assert raised.value.details() == (
            "policy strict refuses this VM: "
            "gpu1: no guest cell stands for host node 2, and no cell is strictly nearest [no-cell]"
        )


def test_the_log_has_kubevirts_keys_a_line_for_each_device_and_a_summary(sidecar: Sidecar) -> None:
    launcher(sidecar).on_define_domain(SCENARIO.xml(), SCENARIO.vmi)
    sidecar.end()
    log = sidecar.log()
    summary = "domain changed, layout node: 2 placed; cell 0: busNr 252..253; cell 1: busNr 254..255"

    assert all({"component", "level", "msg", "pos", "timestamp"} <= line.keys() for line in log)
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", line["timestamp"]) for line in log)
    assert [line["msg"] for line in log] == [
        f"listening on {sidecar.directory}/pcie-numa-hook-hook-sidecar-0.sock, versions v1alpha1, v1alpha2, v1alpha3",
        "gpu0 (0000:41:00.0) placed at guest 0000:fd:00.0, cell 0: host node 0 (numa_node) is cell 0",
        "gpu1 (0000:c1:00.0) placed at guest 0000:ff:00.0, cell 1: host node 1 (numa_node) is cell 1",
        f"{summary}; unexpected errors so far: 0",
        "stopping: SIGTERM",
    ]


def test_an_unexpected_error_gives_the_input_back_and_is_counted_and_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: str) -> NoReturn:
        raise RuntimeError(f"a bug at {path}")

    monkeypatch.setattr(server, "open_sysfs", broken)
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    handler.setFormatter(log.JsonFormatter())
    logger = logging.Logger("test")  # noqa: LOG001  # of its own: nothing outside this test changes
    logger.addHandler(handler)
    callbacks = server.Sidecar("/sys", Config(), logger, stop=lambda: None)
    unused: Any = None  # the transport is needed only to refuse a call
    for _ in range(2):
        assert SCENARIO.xml() == callbacks.define_domain(SCENARIO.xml(), SCENARIO.vmi, unused)

    entries = [json.loads(line) for line in lines.getvalue().splitlines()]
    errors = [entry for entry in entries if entry["level"] == "error"]
    assert [(entry["msg"], entry["vm"]) for entry in errors] == [
        ("unexpected error: a bug at /sys", "default_two-node-2gpu"),
    ] * 2
    assert "in broken" in errors[0]["trace"]
    assert entries[-1]["msg"] == "unexpected RuntimeError: the domain is unchanged; unexpected errors so far: 2"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_and_leaves_no_socket(sidecar: Sidecar, number: signal.Signals) -> None:
    assert sidecar.end(number) == 0
    assert sidecar.sockets() == []


def test_shutdown_ends_it_and_leaves_no_socket(sidecar: Sidecar) -> None:
    launcher(sidecar).shutdown()

    assert sidecar.wait() == 0
    assert sidecar.sockets() == []


def test_the_socket_has_the_containers_name(sidecar: Sidecar) -> None:
    assert [path.name for path in sidecar.sockets()] == ["pcie-numa-hook-hook-sidecar-0.sock"]


def test_two_sidecars_without_a_name_live_in_one_folder(hooks: Path) -> None:
    sysfs = ("--sysfs", str(SCENARIO.sysfs_path))
    with Sidecar(hooks, *sysfs) as first, Sidecar(hooks, *sysfs):
        vm = Launcher(first.directory)
        vm.collect(2)

        assert answer(SCENARIO, SCENARIO.xml()) == vm.on_define_domain(SCENARIO.xml(), SCENARIO.vmi)


def test_a_living_socket_is_never_taken(sidecar: Sidecar) -> None:
    command = [sys.executable, "-m", "hook", "serve", "--socket-dir", str(sidecar.directory)]
    second = subprocess.run(
        command, env={"CONTAINER_NAME": "hook-sidecar-0"}, capture_output=True, text=True, check=False
    )
    path = sidecar.sockets()[0]

    assert second.returncode == 1
    assert f"cannot listen on {path}: another process serves this socket" in second.stderr
    assert answer(SCENARIO, SCENARIO.xml()) == launcher(sidecar).on_define_domain(SCENARIO.xml(), SCENARIO.vmi)


def test_a_living_socket_that_does_not_answer_is_never_taken(hooks: Path) -> None:
    path = hooks / "pcie-numa-hook-a.sock"
    command = [sys.executable, "-m", "hook", "serve", "--socket-dir", str(hooks)]
    with socket.socket(socket.AF_UNIX) as hung, socket.socket(socket.AF_UNIX) as waiting:
        hung.bind(str(path))
        hung.listen(0)
        waiting.connect(str(path))  # fills the queue
        second = subprocess.run(
            command, env={"CONTAINER_NAME": "a"}, cwd=ROOT, capture_output=True, text=True, timeout=20, check=False
        )

    assert second.returncode == 1
    assert f"cannot listen on {path}: another process serves this socket" in second.stderr


def test_a_dead_socket_is_replaced(hooks: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(hooks / "pcie-numa-hook-a.sock"))
    with Sidecar(
        hooks, "--sysfs", str(SCENARIO.sysfs_path), environment={"CONTAINER_NAME": "a"}, wait=False
    ) as sidecar:
        assert answer(SCENARIO, SCENARIO.xml()) == launcher(sidecar).on_define_domain(SCENARIO.xml(), SCENARIO.vmi)


@pytest.mark.parametrize(
    ("folder", "text"),
    [
        ("missing", "cannot listen on .*: there is no directory .*"),
        ("x" * 90, "cannot listen on .*: the path is longer than 107 bytes for virt-launcher"),
    ],
)
def test_a_bad_folder_is_one_clear_line(hooks: Path, folder: str, text: str) -> None:
    directory = hooks / folder
    if folder != "missing":
        directory.mkdir()
    with Sidecar(directory, wait=False) as sidecar:
        assert sidecar.wait() == 1
        assert [line["level"] for line in sidecar.log()] == ["error"]
        assert re.fullmatch(text, sidecar.log()[0]["msg"])


def test_a_bad_flag_is_a_usage_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hook", "serve", "--socket-dir", str(tmp_path), "--numa-node", "gpu0=x"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "pcie-numa-hook serve: error: cannot use --numa-node: 'x' is not a host NUMA node 0..1023"
    )
