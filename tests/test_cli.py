"""The commands as a user runs them: what goes to which stream, the exit status, the texts."""

import json
import os
import pty
import re
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from hook import __version__
from hook.cli import main
from hook.config import OPTIONS, Config
from hook.define import define_domain
from hook.domain import parse
from hook.errors import DomainXmlError
from hook.pci_ids import read
from hook.picture import host_html, host_svg, plan_html, plan_svg
from hook.recording import open_sysfs
from hook.sysfs import all_functions, read_host
from tests.build import host, hostdev, vm
from tests.golden import check, check_names
from tests.scenario import HOSTS, Scenario

A, B = "0000:41:00.0", "0000:c1:00.0"
SCENARIO = Scenario("two-node-4gpu-4sriov")
IDS = str(Path(__file__).with_name("pci.ids"))
NO_IDS = "/dev/null"
GOLDENS = (
    *("host-matrix.txt", "host-tree-without-names.txt", "host-tree.txt", "plan-diff.txt", "plan-matrix.txt"),
    *("plan-tree-40-columns.txt", "plan-tree-of-everything.txt", "plan-tree.txt"),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A VM with two GPUs, its host, and a VMI."""
    (tmp_path / "vm.xml").write_bytes(vm([hostdev(A, "a"), hostdev(B, "b")]))
    (tmp_path / "host.sysfs").write_text(host({f"pci0000:40/0000:40:01.0/{A}": 0, f"pci0000:c0/0000:c0:01.0/{B}": 1}))
    (tmp_path / "vmi.json").write_text("{}")
    return tmp_path


def run(folder: Path, *arguments: str, stdin: bytes | None = None) -> Result:
    """Run a command; `@name` stands for a file in the folder."""
    return CliRunner().invoke(
        main,
        [str(folder / a[1:]) if a.startswith("@") else a for a in arguments],
        input=stdin,
        prog_name="pcie-numa-hook",
    )


def apply(folder: Path, *arguments: str, stdin: bytes | None = None) -> Result:
    return run(folder, "apply", "--domain", "@vm.xml", "--sysfs", "@host.sysfs", *arguments, stdin=stdin)


def plan(folder: Path, *arguments: str) -> Any:
    result = run(folder, "plan", "--domain", "@vm.xml", "--sysfs", "@host.sysfs", "--format", "json", *arguments)
    assert (result.exit_code, result.stderr) == (0, "")

    return json.loads(result.stdout)


# apply.


def test_the_answer_goes_to_standard_output_and_findings_to_standard_error(folder: Path) -> None:
    result = apply(folder, "--vmi", "@vmi.json", "--numa-node", "a=7", "--exclude", "nobody")

    assert result.exit_code == 0
    assert result.stdout.startswith("<domain")
    assert '<alias name="ua-pcie-numa-expander-17"/>' in result.stdout
    assert result.stderr == (
        "warning [no-cell] a: no guest cell stands for host node 7, and no cell is strictly nearest\n"
        "info [unknown-name] nobody: the policy names a device that the VM does not have\n"
    )


def test_an_unchanged_domain_is_printed_byte_for_byte(folder: Path) -> None:
    result = apply(folder, "--mode", "off")

    assert result.stdout_bytes == (folder / "vm.xml").read_bytes()
    assert result.stderr == "info [mode-off] the hook is switched off for this VM\n"


def test_the_domain_can_come_from_standard_input(folder: Path) -> None:
    content = (folder / "vm.xml").read_bytes()
    from_file = apply(folder)
    from_input = run(folder, "apply", "--domain", "-", "--sysfs", "@host.sysfs", stdin=content)

    assert (from_input.exit_code, from_input.stdout_bytes) == (0, from_file.stdout_bytes)


@pytest.mark.parametrize("name", ["vmi.json", "vmi.yaml", "vmi-flow.yaml"])
def test_a_vmi_may_be_json_or_yaml(folder: Path, name: str) -> None:
    document = {
        "metadata": {"annotations": {"pcie-numa-hook/exclude": "a"}, "creationTimestamp": "2026-11-30T05:00:00Z"},
        "spec": {"domain": {}},
    }
    text = (
        json.dumps(document, indent=1)
        if name.endswith("json")
        else yaml.dump(document, default_flow_style="flow" in name)
    )
    (folder / name).write_text(
        ("# from a cluster\n" if "yaml" in name else "\n ")
        + text.replace("'2026-11-30T05:00:00Z'", "2026-11-30T05:00:00Z")
    )

    assert [device["action"] for device in plan(folder, "--vmi", f"@{name}")["devices"]] == ["excluded", "placed"]


def test_a_vmi_in_yaml_says_what_it_says_to_kubernetes(folder: Path) -> None:
    """An address without quotes is a text there, not a number in base 60; `off` is no text."""
    (folder / "vmi.yaml").write_text(
        f"metadata:\n  annotations:\n    pcie-numa-hook/exclude: {A}\n    pcie-numa-hook/mode: off\n"
    )

    assert [device["action"] for device in plan(folder, "--vmi", "@vmi.yaml")["devices"]] == ["excluded", "placed"]


# Exit status.


def test_a_refusal_by_strict_is_1(folder: Path) -> None:
    result = apply(folder, "--policy", "strict", "--numa-node", "a=7")

    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        "pcie-numa-hook: policy strict refuses this VM: "
        "a: no guest cell stands for host node 7, and no cell is strictly nearest [no-cell]\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--layout", "tree"],
            "Error: Invalid value for '--layout': 'tree' is not one of 'node', 'host-bridge', 'switch'.",
        ),
        (["--numa-node", "a"], "pcie-numa-hook: cannot use --numa-node: 'a' is not NAME=N"),
        (["--numa-node", "a=one"], "pcie-numa-hook: cannot use --numa-node: 'one' is not a host NUMA node 0..1023"),
        (["--nonsense"], "Error: No such option"),
        (["more"], "Error: Got unexpected extra argument (more)"),
    ],
    ids=["a word", "no node", "a node that is no number", "an option", "an argument"],
)
def test_wrong_usage_is_2(folder: Path, arguments: list[str], message: str) -> None:
    result = apply(folder, *arguments)

    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1].startswith(message)


def test_a_domain_is_required(folder: Path) -> None:
    assert run(folder, "apply").exit_code == 2


BAD = {
    "empty": b"",
    "garbage": b"\xff\x00",
    "other.xml": b"<network/>",
    "large.xml": b"<domain>" + b" " * (1 << 20) + b"</domain>",
    "list.json": b"[]",
    "half.json": b'{"metadata": ',
    "bad.yaml": b"a: [1, 2\nb: }",
    "list.yaml": b"- 1\n- 2\n",
    "key.yaml": b"? [a]\n: 1\n",
    "circle.yaml": b"a: &x\n  - *x\n",
    "text.sysfs": b"this is no recording\n",
    "other.tar.gz": b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff" + b"\xff" * 50,
}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--domain", "@missing"], "[Errno 2] No such file or directory: '{}/missing'"),
        (["--domain", "@."], "[Errno 21] Is a directory: '{}'"),
        (["--domain", "@empty"], "cannot parse the domain XML: Document is empty, line 1, column 1"),
        (["--domain", "@garbage"], "cannot parse the domain XML: it has NUL bytes, expected UTF-8"),
        (["--domain", "@other.xml"], "cannot use the domain XML: its root is <network>, expected <domain>"),
        (["--domain", "@large.xml"], "cannot read the domain XML: it has 1048593 bytes, at most 1048576 are accepted"),
        (["--vmi", "@missing"], "[Errno 2] No such file or directory: '{}/missing'"),
        (["--vmi", "@empty"], "cannot read the VMI: found a JSON NoneType, expected an object"),
        (["--vmi", "@garbage"], "cannot read the VMI {}/garbage: "),
        (["--vmi", "@list.json"], "cannot read the VMI: found a JSON list, expected an object"),
        (["--vmi", "@half.json"], "cannot read the VMI: Expecting value: line 1 column 14 (char 13), expected JSON"),
        (["--vmi", "@bad.yaml"], "cannot read the VMI {}/bad.yaml: line 2, column 2: while parsing a flow sequence"),
        (["--vmi", "@list.yaml"], "cannot read the VMI: found a JSON list, expected an object"),
        (["--vmi", "@key.yaml"], "cannot read the VMI {}/key.yaml: line 1, column 3: found a key that is no text"),
        (
            ["--vmi", "@circle.yaml"],
            "cannot read the VMI {}/circle.yaml: line 1, column 4: found unconstructable recursive node",
        ),
        (["--sysfs", "@missing"], "cannot read sysfs at {}/missing: there is no such directory"),
        (["--sysfs", "@."], "cannot read sysfs at {}: it holds neither bus/pci/devices nor devices/system/node"),
        (["--sysfs", "@text.sysfs"], "cannot read the recording {}/text.sysfs: line 1 is 'this is no recording'"),
        (["--sysfs", "@other.tar.gz"], "cannot read the recording {}/other.tar.gz: Error -3 while decompressing"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("command", ["apply", "plan"])
def test_bad_input_is_3_and_one_line(folder: Path, command: str, arguments: list[str], message: str) -> None:
    for name, content in BAD.items():
        (folder / name).write_bytes(content)
    given = {"--domain": "@vm.xml", "--vmi": "@vmi.json", "--sysfs": "@host.sysfs"} | {arguments[0]: arguments[1]}
    result = run(folder, command, *(word for pair in given.items() for word in pair))

    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr.startswith("pcie-numa-hook: " + message.format(folder))
    assert result.stderr.count("\n") == 1


def test_the_host_command_refuses_alike(folder: Path) -> None:
    result = run(folder, "host", "--sysfs", "@missing")

    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr == f"pcie-numa-hook: cannot read sysfs at {folder}/missing: there is no such directory\n"


def test_debug_shows_the_traceback(folder: Path) -> None:
    (folder / "empty").touch()

    assert isinstance(run(folder, "apply", "--domain", "@empty", "--debug").exception, DomainXmlError)


# plan.


def test_the_json_has_the_documented_schema(folder: Path) -> None:
    (folder / "vm.xml").write_bytes(vm([hostdev(A, "a"), hostdev("0000:99:00.0")]))

    assert plan(folder) == {
        "changed": True,
        "layout": "node",
        "expanders": [{"index": 17, "cell": 0, "bus_nr": 254, "buses": 2, "host_bridges": ["pci0000:40"]}],
        "controllers": [
            {"index": 17, "model": "pcie-expander-bus", "parent": 0, "slot": 30, "function": 0},
            {"index": 18, "model": "pcie-root-port", "parent": 17, "slot": 0, "function": 0},
        ],
        "devices": [
            {
                "name": "a",
                "alias": "ua-gpu-a",
                "kind": "pci",
                "source": A,
                "host_node": 0,
                "host_node_from": "numa_node",
                "cell": 0,
                "action": "placed",
                "guest_address": {"bus": 18, "slot": 0, "function": 0},
                "guest_bdf": "0000:ff:00.0",
                "guest_bridges": ["0000:fe:00.0"],
                "vendor": None,
                "device": None,
                "class": 0x030200,
                "bars": [],
                "reason": "host node 0 (numa_node) is cell 0",
            },
            {
                "name": "0000:99:00.0",
                "alias": None,
                "kind": "pci",
                "source": "0000:99:00.0",
                "host_node": None,
                "host_node_from": None,
                "cell": None,
                "action": "left",
                "guest_address": None,
                "guest_bdf": None,
                "guest_bridges": None,
                "vendor": None,
                "device": None,
                "class": None,
                "bars": None,
                "reason": "sysfs does not know 0000:99:00.0",
            },
        ],
        "findings": [
            {
                "severity": "warning",
                "code": "unknown-device",
                "subject": "0000:99:00.0",
                "message": "sysfs does not know 0000:99:00.0",
            }
        ],
    }


def test_the_keys_come_in_the_documented_order(folder: Path) -> None:
    assert list(plan(folder)) == ["changed", "layout", "expanders", "controllers", "devices", "findings"]


def scenario(tmp_path: Path, *arguments: str) -> str:
    """What `plan` prints for a scenario of KubeVirt."""
    (tmp_path / "vm.xml").write_bytes(SCENARIO.xml())
    (tmp_path / "vmi.json").write_bytes(SCENARIO.vmi)
    options = ["--domain", "@vm.xml", "--vmi", "@vmi.json", "--sysfs", str(SCENARIO.sysfs_path)]
    result = run(tmp_path, "plan", *options, "--pci-ids", IDS, *arguments)
    assert (result.exit_code, result.stderr) == (0, "")

    return result.stdout


def test_the_plan_as_a_tree(tmp_path: Path) -> None:
    check("cli/plan-tree.txt", scenario(tmp_path))


def test_the_plan_as_matrices(tmp_path: Path) -> None:
    check("cli/plan-matrix.txt", scenario(tmp_path, "--format", "matrix"))


def test_the_plan_as_a_diff(tmp_path: Path) -> None:
    check("cli/plan-diff.txt", scenario(tmp_path, "--format", "diff"))
    assert scenario(tmp_path, "--format", "diff", "--mode", "off") == ""


def test_the_plan_as_a_picture_and_as_a_page(tmp_path: Path) -> None:
    outcome = define_domain(SCENARIO.xml(), SCENARIO.vmi, lambda: SCENARIO.sysfs, Config())
    given = outcome, parse(SCENARIO.xml()).guest, read(IDS)

    assert scenario(tmp_path, "--format", "svg") == plan_svg(*given)
    assert scenario(tmp_path, "--format", "html") == plan_html(*given)


def test_a_tree_with_everything_that_a_tree_can_show(folder: Path) -> None:
    """A switch, a device that is left, one that is excluded, a card of two functions, a spanning cell, findings."""
    switch = "pci0000:40/0000:40:01.0/0000:42:00.0/0000:43"
    devices = {f"{switch}:0{n}.0/0000:4{4 + n}:00.0": 0 for n in (0, 1)}
    devices |= {f"pci0000:c0/0000:c0:01.0/0000:c1:00.{n}": 1 for n in (0, 1)}
    (folder / "host.sysfs").write_text(host({**devices, "pci0000:c0/0000:c0:02.0/0000:c2:00.0": 1}))
    names = {"0000:44:00.0": "a", "0000:45:00.0": "b", "0000:c1:00.0": "c", "0000:c1:00.1": "d", "0000:c2:00.0": "e"}
    xml = vm(
        [*(hostdev(source, name) for source, name in names.items()), hostdev("0000:99:00.0", "ghost")],
        memnodes={0: "0", 1: "1", 2: "0-1"},
        cells={0: "0", 1: "1", 2: ""},
    )
    (folder / "vm.xml").write_bytes(xml)
    options = ["--layout", "switch", "--exclude", "e", "--pci-ids", NO_IDS]
    result = run(folder, "plan", "--domain", "@vm.xml", "--sysfs", "@host.sysfs", *options)

    assert result.exit_code == 0
    check("cli/plan-tree-of-everything.txt", result.stdout)


# host.


@pytest.mark.parametrize("form", ["tree", "matrix"])
def test_the_host_as_a_text(tmp_path: Path, form: str) -> None:
    result = run(tmp_path, "host", "--sysfs", str(HOSTS / "dgx1v.sysfs"), "--format", form, "--pci-ids", IDS)

    assert (result.exit_code, result.stderr) == (0, "")
    check(f"cli/host-{form}.txt", result.stdout)


def test_a_host_without_names(tmp_path: Path) -> None:
    result = run(tmp_path, "host", "--sysfs", str(HOSTS / "dgx1v.sysfs"), "--pci-ids", NO_IDS)

    check("cli/host-tree-without-names.txt", result.stdout)


def test_the_host_as_a_picture_and_as_a_page(tmp_path: Path) -> None:
    given = ["--sysfs", str(HOSTS / "dgx1v.sysfs"), "--pci-ids", IDS, "--format"]
    machine = open_sysfs(str(HOSTS / "dgx1v.sysfs"))
    topology = read_host(machine, all_functions(machine), ())

    assert run(tmp_path, "host", *given, "svg").stdout == host_svg(topology, read(IDS))
    assert run(tmp_path, "host", *given, "html").stdout == host_html(topology, read(IDS))


@pytest.mark.parametrize("command", [["host"], ["plan", "--domain", "@vm.xml"]])
def test_names_that_cannot_be_read(folder: Path, command: list[str]) -> None:
    result = run(folder, *command, "--sysfs", "@host.sysfs", "--pci-ids", "@missing")
    text = f"pcie-numa-hook: [Errno 2] No such file or directory: '{folder}/missing'\n"

    assert (result.exit_code, result.stdout, result.stderr) == (3, "", text)


def test_the_host_as_json(folder: Path) -> None:
    devices = {
        "pci0000:40/0000:40:01.0": {"class": "0x060400"},
        f"pci0000:40/0000:40:01.0/{A}": {"physfn": "0000:40:01.0"},
    }
    (folder / "host.sysfs").write_text(host(devices, nodes={0: "0-3"}, distances={0: "10"}))
    unknown = {"vendor": None, "device": None, "numa_node": None, "host_node": 0, "host_node_from": "single-node"}

    assert json.loads(run(folder, "host", "--sysfs", "@host.sysfs", "--format", "json").stdout) == {
        "nodes": [{"id": 0, "cpus": "0-3", "distances": {"0": 10}}],
        "functions": [
            {
                "address": "0000:40:01.0",
                "host_bridge": "pci0000:40",
                "bridges": [],
                "class": 0x060400,
                "physical_function": None,
                **unknown,
            },
            {
                "address": A,
                "host_bridge": "pci0000:40",
                "bridges": ["0000:40:01.0"],
                "class": 0x030200,
                "physical_function": "0000:40:01.0",
                **unknown,
            },
        ],
    }


def test_a_host_without_cards_has_no_matrix(folder: Path) -> None:
    (folder / "host.sysfs").write_text(host({}))
    result = run(folder, "host", "--sysfs", "@host.sysfs", "--format", "matrix")

    assert result.stdout == "the host has no GPU, accelerator or network card\n"


# record.


def test_a_host_is_recorded_to_a_file_or_to_standard_output(folder: Path) -> None:
    printed = run(folder, "record", "--sysfs", "@host.sysfs")
    written = run(folder, "record", "--sysfs", "@host.sysfs", "-o", "@again.sysfs")

    assert (printed.exit_code, printed.stderr, written.exit_code, written.output) == (0, "", 0, "")
    assert (folder / "again.sysfs").read_text() == printed.stdout
    assert plan(folder) == plan(folder, "--sysfs", "@again.sysfs")


def test_a_recording_for_a_vm_has_its_devices_alone(folder: Path) -> None:
    (folder / "vm.xml").write_bytes(vm([hostdev(B, "b")]))
    result = run(folder, "record", "--sysfs", "@host.sysfs", "--domain", "@vm.xml")

    assert result.exit_code == 0
    assert (A in result.stdout, B in result.stdout) == (False, True)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--sysfs", "@missing"], 3, "pcie-numa-hook: cannot read sysfs at {}/missing: there is no such directory"),
        (["-o", "@none/host.sysfs"], 3, "pcie-numa-hook: [Errno 2] No such file or directory: '{}/none/host.sysfs'"),
        (["--domain", "@vmi.json"], 3, "pcie-numa-hook: cannot parse the domain XML: "),
        (["here"], 2, "Error: Got unexpected extra argument (here)"),
    ],
    ids=["no host", "no folder", "no domain", "an argument"],
)
def test_what_cannot_be_recorded(folder: Path, arguments: list[str], status: int, message: str) -> None:
    result = run(folder, "record", "--sysfs", "@host.sysfs", *arguments)

    assert (result.exit_code, result.stdout) == (status, "")
    assert result.stderr.splitlines()[-1].startswith(message.format(folder))


# Help, and the real process.


@pytest.mark.parametrize("command", ["apply", "plan"])
def test_help_names_every_option_of_the_policy(tmp_path: Path, command: str) -> None:
    result = run(tmp_path, command, "-h")

    assert result.exit_code == 0
    assert [option.name for option in OPTIONS if f"--{option.name}" not in result.stdout] == []


def test_serve_must_come_first(tmp_path: Path) -> None:
    result = run(tmp_path, "serve")

    assert (result.exit_code, result.stderr.splitlines()[-1]) == (
        2,
        "Error: serve must be the first word of the command line",
    )


def test_no_golden_outlives_its_test() -> None:
    check_names("cli", GOLDENS)


def process(*arguments: str, stdin: bytes = b"", **more: Any) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "hook", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, check=False, **more)


def test_the_real_process_writes_the_same_bytes(folder: Path) -> None:
    content = (folder / "vm.xml").read_bytes()
    done = process("apply", "--domain", "-", "--sysfs", str(folder / "host.sysfs"), stdin=content)

    assert (done.returncode, done.stdout, done.stderr) == (0, apply(folder).stdout_bytes, b"")


def test_the_real_process_ends_with_the_status_and_one_line(folder: Path) -> None:
    done = process("apply", "--domain", str(folder / "missing"))
    text = f"pcie-numa-hook: [Errno 2] No such file or directory: '{folder}/missing'\n"

    assert (done.returncode, done.stdout, done.stderr.decode()) == (3, b"", text)


# Terminals.

PLAN = ("plan", "--domain", "tests/scenarios/two-node-4gpu-4sriov.xml", "--pci-ids", "tests/pci.ids", "--sysfs")
SHOWN = (*PLAN, "tests/scenarios/two-node-4gpu-4sriov.sysfs")
ESCAPE = re.compile(r"\x1b\[([\d;]*)m")
COLOURS = {str(code) for code in (*range(30, 38), *range(90, 98))}


def on_terminal(*arguments: str, columns: int = 120, **environment: str) -> str:
    """What the real process writes on a terminal."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "FORCE_COLOR")}
    with subprocess.Popen(
        [sys.executable, "-m", "hook", *arguments],
        cwd=Path(__file__).parent.parent,
        env={**kept, "TERM": "xterm-256color", **environment},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        written = b""
        # Linux ends a terminal that nobody holds open any more with EIO.
        with suppress(OSError):
            while part := os.read(ours, 65536):
                written += part
        os.close(ours)
    assert process.returncode == 0

    return written.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("form", ["tree", "diff"])
def test_a_terminal_has_colours(form: str) -> None:
    text = on_terminal(*SHOWN, "--format", form)

    assert COLOURS & set(ESCAPE.findall(text))


@pytest.mark.parametrize("form", ["tree", "diff"])
def test_no_color_is_obeyed(form: str) -> None:
    text = on_terminal(*SHOWN, "--format", form, NO_COLOR="1")
    codes = {code for group in ESCAPE.findall(text) for code in group.split(";")}

    assert COLOURS & codes == set()


@pytest.mark.parametrize("form", ["tree", "diff", "matrix", "json", "svg", "html"])
def test_a_pipe_gets_the_text_of_a_wide_terminal_without_escapes(form: str) -> None:
    arguments = (*SHOWN, "--format", form)
    piped = process(*arguments, cwd=Path(__file__).parent.parent)

    assert (piped.returncode, piped.stderr) == (0, b"")
    assert b"\x1b" not in piped.stdout
    assert ESCAPE.sub("", on_terminal(*arguments, columns=1000)) == piped.stdout.decode()


def test_a_terminal_that_knows_no_escapes_gets_none() -> None:
    assert "\x1b" not in on_terminal(*SHOWN, TERM="dumb")


def test_a_narrow_terminal_keeps_the_shape_of_a_tree() -> None:
    text = ESCAPE.sub("", on_terminal(*SHOWN, columns=40))

    assert max(map(len, text.splitlines())) <= 40
    check("cli/plan-tree-40-columns.txt", text)


def test_an_encoding_without_arrows_is_no_error(folder: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    arguments = ("plan", "--domain", str(folder / "vm.xml"), "--sysfs", str(folder / "host.sysfs"))
    done = process(*arguments, env=environment)

    assert (done.returncode, done.stderr) == (0, b"")
    assert b"a 0000:41:00.0 ? 0000:fd:00.0  placed: " in done.stdout


def test_the_real_process_tells_its_version() -> None:
    assert process("--version").stdout == f"pcie-numa-hook, version {__version__}\n".encode()
