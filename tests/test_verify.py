"""What verify says of guests that are as planned and of guests that are not, in every way that it tells apart."""

import ast
import json
import re
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from click.testing import CliRunner

from hook import verify as module
from hook.cli import main
from hook.config import Config, Layout
from hook.define import Outcome, define_domain
from hook.locality import distance, nccl_path
from hook.recording import open_sysfs, parse_recording
from hook.render import plan_json
from hook.sysfs import MemoryTree
from hook.verify import InputError, read_guest, read_plan, verify
from tests.build import host, hostdev, unpack, vm
from tests.golden import check, check_names
from tests.guests import FOLDER, GUESTS, changed, plan_of_stand_ins, recording, tree_of
from tests.machines import NAMES, machine, plan_on
from tests.scenario import NAMES as SCENARIOS
from tests.scenario import Scenario

FILE = Path(module.__file__)
A, B = "0000:41:00.0", "0000:c1:00.0"
GPU = {"class": "0x030200", "vendor": "0x10de", "device": "0x2330"}
BARS = "0x100000000 0x100ffffff 0x14220c\\n0x0 0x0 0x0\\n0x2000000000 0x3fffffffff 0x14220c\\n0x1000 0x107f 0x40101"


def on_machine(name: str, layout: Layout) -> Outcome:
    it = machine(name)
    return plan_on(it, layout, it.cpu_nodes, it.devices)


def text_of(outcome: Outcome) -> str:
    return json.dumps(plan_json(outcome))


def two_gpus(*more: str) -> Outcome:
    """A GPU with BARs of 16 MiB and 128 GiB on each of two nodes."""
    devices = {
        f"pci0000:40/0000:40:01.0/{A}": {**GPU, "numa_node": 0, "resource": BARS},
        f"pci0000:c0/0000:c0:01.0/{B}": {**GPU, "numa_node": 1, "resource": BARS},
        "pci0000:c0/0000:c0:02.0/0000:c2:00.0": {**GPU, "numa_node": -1},
    }
    tree = host(devices)
    xml = vm([hostdev(A, "a"), hostdev(B, "b"), *more])
    return define_domain(xml, None, lambda: parse_recording(tree), Config())


# Guests that were booted.


@pytest.mark.parametrize("name", GUESTS)
def test_a_guest_that_was_booted(name: str) -> None:
    guest = GUESTS[name]
    text, is_as_planned = verify(plan_of_stand_ins(guest.outcome), open_sysfs(str(recording(name))))

    check(f"verify/{name}.txt", text)
    assert is_as_planned is (name == "as-planned")


# Guests made from plans.


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("name", NAMES)
def test_a_guest_that_is_what_was_planned(name: str, layout: Layout) -> None:
    outcome = on_machine(name, layout)
    text, is_as_planned = verify(text_of(outcome), tree_of(outcome))
    count = sum(device.place is not None for device in outcome.plan.devices)

    assert is_as_planned
    assert text.count("  as planned\n") == count
    pairs = count * (count - 1) // 2
    assert (f"\n{pairs} of {pairs} pairs as planned (" if pairs else "\nNo pair of devices to compare.\n") in text


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_vm_of_kubevirt_that_is_what_was_planned(name: str) -> None:
    scenario = Scenario(name)
    outcome = define_domain(scenario.xml(), scenario.vmi, lambda: scenario.sysfs, Config())

    if any(device.place is not None for device in outcome.plan.devices):
        assert verify(text_of(outcome), tree_of(outcome))[1]
    else:
        tree = open_sysfs(str(recording("as-planned")))
        assert verify(text_of(outcome), tree) == ("The plan places no device, so there is nothing to compare.\n", True)


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("name", NAMES)
def test_classes_are_those_of_the_planner(name: str, layout: Layout) -> None:
    outcome = on_machine(name, layout)
    planned = outcome.plan.guest_topology(outcome.host)
    functions = read_guest(tree_of(outcome)).functions
    places = [device.place.guest_bdf for device in outcome.plan.devices if device.place is not None]

    for a, b in product(places, repeat=2):
        assert module.distance(functions[str(a)], functions[str(b)]) == distance(planned, a, b).name
        assert module.nccl_path(functions[str(a)], functions[str(b)]) == nccl_path(planned, a, b).name


def test_the_plan_is_read_as_the_guest_shows_it() -> None:
    outcome = on_machine("dgx1v", Layout.SWITCH)
    functions = read_guest(tree_of(outcome)).functions

    for planned in read_plan(text_of(outcome)).placed:
        assert planned.function == functions[planned.function.address]


# One fault at a time.

NODE_OFF = "NUMA placement wrong\n  a: on no node, planned is node 0\n  b: on no node, planned is node 1\n"


def differing(tree: MemoryTree, outcome: Outcome | None = None) -> str:
    """What verify says below the table and the pairs."""
    text, is_as_planned = verify(text_of(outcome or two_gpus()), tree)
    assert not is_as_planned

    return text.split("\n\n", 1)[1]


def test_numa_is_off_in_the_guest() -> None:
    def change(path: str, old: bytes) -> bytes | None:
        if path.startswith("devices/system/node/node1"):
            return None
        return b"-1\n" if path.endswith("/numa_node") else old

    text = differing(changed(tree_of(two_gpus()), change))

    assert text.startswith(
        "0 of 1 pairs as planned (NODE 1)\n  a - b: NODE (NCCL PHB), planned SYS (NCCL SYS)\n\n"
        + NODE_OFF
        + "  guest: it has no NUMA node 1, but the plan has a cell 1\n  -> "
    )


def test_a_device_is_missing_behind_its_port() -> None:
    tree = changed(tree_of(two_gpus()), lambda path, old: None if path.endswith("ff:00.0/class") else old)

    assert differing(tree).startswith(
        "No pair of devices to compare.\n\ndevice missing (bus or MMIO window)\n"
        "  b: nothing is at 0000:ff:00.0, though the port 0000:fe:00.0 above it is there\n"
        "  -> this is not about NUMA."
    )
    assert differing(tree).endswith("\nNUMA placement is right for every device that is there.\n")


def test_a_device_is_missing_with_its_expander() -> None:
    tree = changed(
        tree_of(two_gpus()), lambda path, old: None if "pci0000:fe" in path and path.endswith("/class") else old
    )

    assert "  b: the guest has no root bus pci0000:fe, so the expander is not there\n" in differing(tree)


def test_a_device_is_missing_with_its_port() -> None:
    outcome = on_machine("dgx1v", Layout.SWITCH)
    tree = changed(
        tree_of(outcome),
        lambda path, old: None if "/0000:fc:02.0/" in path and path.endswith("/class") else old,
    )

    assert "  0000:8b:00.0: nothing is at 0000:ff:00.0, nor is there the port 0000:fc:02.0 above it\n" in differing(
        tree, outcome
    )


def test_another_device_is_at_the_address() -> None:
    tree = changed(tree_of(two_gpus()), lambda path, old: b"0x1234" if path.endswith("ff:00.0/device") else old)

    assert "  b: another device is at 0000:ff:00.0: 10de:1234\n" in differing(tree)


def test_a_device_elsewhere_is_found_by_its_ids_unless_an_unplaced_one_may_be_it() -> None:
    """The guest has one more GPU, on pcie.0, and lacks one behind an expander."""
    more = {"pci0000:00/0000:00:05.0": {**GPU, "numa_node": -1}}
    files, links = tree_of(two_gpus()).items()
    extra_files, extra_links = parse_recording(host(more)).items()
    tree = changed(
        MemoryTree({**files, **extra_files}, {**links, **extra_links}),
        lambda path, old: None if path.endswith("ff:00.0/class") else old,
    )

    assert "  b: a device like it is at pci0000:00 > 0000:00:05.0, planned is pci0000:fe > " in differing(tree)
    unplaced = two_gpus(hostdev("0000:c2:00.0", "c"))
    assert "  b: nothing is at 0000:ff:00.0, though" in differing(tree, unplaced)


@pytest.mark.parametrize(
    "line",
    [b"0x0 0x0 0x0", b"0x0 0x1fffffffff 0x2014220c", b"0x0 0x1fffffffff 0x14220c"],
    ids=["zeros", "marked as unset", "at address 0"],
)
def test_a_bar_has_no_address(line: bytes) -> None:
    def change(path: str, old: bytes) -> bytes:
        return old.replace(old.split(b"\n")[1], line) if path.endswith("ff:00.0/resource") else old

    tree = changed(tree_of(two_gpus()), change)

    assert differing(tree).startswith(
        "1 of 1 pairs as planned (SYS 1)\n\n"
        "BAR without an address (MMIO window)\n  b: no address for 128 GiB\n  -> this is not about NUMA"
    )


def test_attributes_that_make_no_sense_are_not_compared() -> None:
    def change(path: str, old: bytes) -> bytes:
        return b"garbage" if path.rpartition("/")[2] in ("vendor", "device", "class", "resource") else old

    assert verify(text_of(two_gpus()), changed(tree_of(two_gpus()), change))[1]


def test_what_is_not_known_is_not_compared() -> None:
    """No ids, class and BARs: a mediated device, or a host that did not show them."""
    plan = plan_json(two_gpus())
    for device in plan["devices"]:
        device |= {"vendor": None, "device": None, "class": None, "bars": None}
    text, is_as_planned = verify(json.dumps(plan), tree_of(two_gpus()))

    assert is_as_planned
    assert text.endswith("\n\nAs planned.\n")


def test_gpus_that_are_as_planned_have_the_word_about_the_fabric() -> None:
    assert (
        "\n\nAs planned.\n\nNUMA and PCIe are placed right. If GPUs still"
        in verify(text_of(two_gpus()), tree_of(two_gpus()))[0]
    )


# Bad input.


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            "",
            "cannot read the plan: Expecting value: line 1 column 1 (char 0), expected the JSON of plan --format json",
        ),
        ("[" * 100_000, "cannot read the plan: "),
        ("[]", "cannot use the plan: found no list indices must be"),
        ("{}", "cannot use the plan: found no 'devices', expected the JSON of plan --format json of this version"),
        ('{"devices": [{"guest_bdf": "0000:ff:00.0"}]}', "cannot use the plan: found no 'guest_bridges', expected"),
    ],
    ids=["empty", "deep", "a list", "another object", "an older plan"],
)
def test_a_plan_that_is_none(plan: str, message: str) -> None:
    with pytest.raises(InputError) as refusal:
        verify(plan, tree_of(two_gpus()))

    assert str(refusal.value).startswith(message)


# The file alone, and the command.


def pythons() -> list[str]:
    """Every Python that is here, oldest first; guests have old ones."""
    found = [shutil.which(f"python3.{minor}") for minor in range(6, 15)]
    pyenv = Path.home() / ".pyenv" / "versions"
    found += [str(path) for path in sorted(pyenv.glob("3.*/bin/python3"))]
    return [sys.executable, *(path for path in found if path is not None and "shims" not in path)]


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The file and a plan alone in a folder, and two guests."""
    shutil.copy(FILE, tmp_path / "verify.py")
    guest = tree_of(two_gpus())
    (tmp_path / "plan.json").write_text(text_of(two_gpus()))
    unpack(guest, tmp_path / "right")
    unpack(changed(guest, lambda path, old: b"0\n" if path.endswith("/numa_node") else old), tmp_path / "wrong")
    (tmp_path / "nothing").mkdir()
    return tmp_path


@pytest.mark.parametrize("python", pythons())
def test_the_file_runs_alone_on_every_python(copied: Path, python: str) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [python, "-I", "-S", "-B", "verify.py", *arguments]
        return subprocess.run(command, cwd=copied, stdout=-1, stderr=-1, text=True, check=False)

    for name, status in (("right", 0), ("wrong", 1)):
        done = run("--plan", "plan.json", "--sysfs", name)
        text = verify(text_of(two_gpus()), open_sysfs(str(copied / name)))[0]
        assert (done.returncode, done.stdout, done.stderr) == (status, text, "")
    for arguments, status, message in (
        (("--plan", "plan.json", "--sysfs", "nothing"), 3, "verify.py: cannot read the guest's sysfs: it has no PCI"),
        (("--plan", "missing"), 3, "verify.py: [Errno 2] No such file or directory: 'missing'"),
        (("--plan", "verify.py"), 3, "verify.py: cannot read the plan: "),
        ((), 2, "verify.py: error: the following arguments are required: --plan"),
    ):
        done = run(*arguments)
        assert (done.returncode, done.stdout) == (status, "")
        assert done.stderr.splitlines()[-1].startswith(message)


def test_the_file_has_the_syntax_and_imports_of_python_3_6() -> None:
    source = FILE.read_text()
    ast.parse(source, feature_version=(3, 6))

    assert re.findall(r"^(?:from|import) (\w+)", source, re.MULTILINE) == [
        *("argparse", "collections", "itertools", "json", "os", "re", "sys", "textwrap", "typing"),
    ]


def test_the_command_says_the_same(copied: Path) -> None:
    arguments = ["verify", "--plan", str(copied / "plan.json"), "--sysfs"]
    right, wrong, nothing = (
        CliRunner().invoke(main, [*arguments, str(copied / name)]) for name in ("right", "wrong", "nothing")
    )

    assert (right.exit_code, right.output) == (0, verify(text_of(two_gpus()), tree_of(two_gpus()))[0])
    assert wrong.exit_code == 1
    assert "\n  b: on node 0, planned is node 1\n" in wrong.output
    assert (nothing.exit_code, nothing.stdout) == (3, "")
    assert nothing.stderr.startswith("pcie-numa-hook: cannot read sysfs at ")


def test_a_plan_may_come_from_standard_input(copied: Path) -> None:
    given = ["verify", "--plan", "-", "--sysfs", str(copied / "right")]
    result = CliRunner().invoke(main, given, input=text_of(two_gpus()))

    assert (result.exit_code, result.output) == (0, verify(text_of(two_gpus()), tree_of(two_gpus()))[0])


def test_no_golden_and_no_recording_outlives_its_guest() -> None:
    check_names("verify", [f"{name}.txt" for name in GUESTS])
    assert sorted(path.stem for path in FOLDER.iterdir()) == sorted(GUESTS)
