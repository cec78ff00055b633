"""Each manifest has one oddity and is named after it; what check prints is compared as a whole."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hook.check import RULES
from hook.cli import main
from hook.errors import Severity
from tests.golden import check, check_names
from tests.scenario import HOSTS

ROOT = Path(__file__).parent.parent
FOLDER = Path("tests") / "manifests"
MANIFESTS = sorted(path.name for path in (ROOT / FOLDER).iterdir())
# Manifests that are named after something else than a rule.
OTHERS = (
    "everything-in-one-file",
    "every-kind",
    "instancetype-alone",
    "mode-off",
    "open-parameters",
    "plain-vm",
    "tabs",
    "vcpus-elsewhere",
)


@pytest.fixture(autouse=True)
def at_the_top(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths in what is printed are those of the repository."""
    monkeypatch.chdir(ROOT)


def run(*arguments: str, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(main, ["check", *arguments], input=stdin, prog_name="pcie-numa-hook")


def host(name: str) -> list[str]:
    """The recording that the manifest names in its second line."""
    match = re.search(r"\n# sysfs: (\S+)", (FOLDER / name).read_text())
    return ["--sysfs", str(HOSTS / f"{match[1]}.sysfs")] if match else []


@pytest.mark.parametrize("name", MANIFESTS)
def test_what_check_says(name: str) -> None:
    result = run(str(FOLDER / name), *host(name))

    assert result.stderr == ""
    check(f"check/{Path(name).stem}.txt", f"{result.stdout}exit status {result.exit_code}\n")


def test_no_golden_outlives_its_manifest() -> None:
    check_names("check", [*(f"{Path(name).stem}.txt" for name in MANIFESTS), "as-json.json"])


def test_every_rule_has_a_manifest_that_breaks_it() -> None:
    assert sorted([*RULES, *OTHERS]) == sorted(Path(name).stem for name in MANIFESTS)
    for code, rule in RULES.items():
        text = run(str(FOLDER / f"{code}.yaml"), *host(f"{code}.yaml")).stdout

        assert f": {rule.severity} [{code}] " in text


@pytest.mark.parametrize("code", [code for code, rule in RULES.items() if rule.stops])
def test_a_rule_that_stops_the_hook_is_in_the_verdict(code: str) -> None:
    report = json.loads(run(str(FOLDER / f"{code}.yaml"), *host(f"{code}.yaml"), "--format", "json").stdout)

    assert any(found["acts"] is False and code in found["summary"] for found in report["objects"])


def test_notes_do_not_change_the_exit_status() -> None:
    for code, rule in RULES.items():
        path = FOLDER / f"{code}.yaml"
        report = json.loads(run(str(path), *host(path.name), "--format", "json").stdout)
        is_noted = all(finding["severity"] == Severity.INFO for finding in report["findings"])

        assert (rule.severity is Severity.INFO) <= is_noted
        assert report["fine"] is is_noted


def test_the_report_as_json() -> None:
    result = run(str(FOLDER / "bad-sidecars.yaml"), "--format", "json")

    assert (result.exit_code, result.stderr) == (1, "")
    check("check/as-json.json", result.stdout)


def test_files_are_checked_together_and_once() -> None:
    together = [str(FOLDER / name) for name in ("not-given.yaml", "annotation-conflict.yaml", "not-given.yaml")]
    lines = run(*together).stdout.splitlines()

    assert [line for line in lines if "not-given.yaml" in line] == [
        "tests/manifests/not-given.yaml:2: VirtualMachine vm: nothing to do: it has no passed-through device"
    ]


def test_a_manifest_can_come_from_standard_input() -> None:
    content = (FOLDER / "no-hugepages.yaml").read_bytes()
    from_file = run(str(FOLDER / "no-hugepages.yaml")).stdout

    assert run("-", stdin=content).stdout == from_file.replace("tests/manifests/no-hugepages.yaml", "standard input")


def test_the_hook_may_have_another_name() -> None:
    named = run(str(FOLDER / "no-sidecar.yaml"), "--image", "r.test/smbios:2")

    assert (named.exit_code, named.stdout.splitlines()[0]) == (
        0,
        "tests/manifests/no-sidecar.yaml:2: VirtualMachine vm: the hook will place gpu0; layout switch, "
        "policy best-effort",
    )


# Exit status.


def test_no_manifest_is_wrong_usage() -> None:
    assert run().exit_code == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff", "cannot read {}: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
        (b"a: [1\nb: 2}", "cannot read {}: line 2, column 2: while parsing a flow sequence"),
        (
            b"a: !secret x\n",
            "cannot read {}: line 1, column 4: could not determine a constructor for the tag '!secret'",
        ),
        (b"a: *b\n", "cannot read {}: line 1, column 4: found undefined alias 'b'"),
        (b"a: &a\n  b: *a\n", "cannot read {}: line 1, column 4: found unconstructable recursive node"),
        (b"? {}\n: 1\n", "cannot read {}: line 1, column 3: found a key that is no text"),
        (b"[" * 5000, "cannot read {}: it is nested too deeply"),
    ],
    ids=["no text", "broken", "a tag", "no anchor", "a circle", "a key", "too deep"],
)
def test_an_unreadable_manifest_is_3_and_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "vm.yaml"
    path.write_bytes(content)
    result = run(str(path))

    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr.startswith("pcie-numa-hook: " + message.format(path))
    assert result.stderr.count("\n") == 1


def test_a_missing_file_or_host_is_3(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    for arguments in ([missing], [str(FOLDER / "plain-vm.yaml"), "--sysfs", missing]):
        result = run(*arguments)

        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (3, "", 1)


@pytest.mark.parametrize(
    "content",
    [b"", b"---\n---\n", b"- 1\n", b"kind: 1\n", b"kind: List\n", b"apiVersion: {}\nkind: List\nitems: [1]\n"],
)
def test_what_is_no_vm_is_fine(content: bytes) -> None:
    result = run("-", stdin=content)

    assert (result.exit_code, result.stdout) == (0, "nothing here becomes a VM\n")


def test_fields_of_any_type_do_not_break_it() -> None:
    """KubeVirt will refuse them; the message about it is KubeVirt's."""
    values = ["1", "[1]", "{a: 1}", "text", "null", "true"]
    keys = ("domain", "cpu", "numa", "memory", "devices", "gpus", "machine", "annotations", "instancetype", "template")
    text = (FOLDER / "annotation-conflict.yaml").read_text()
    for key in keys:
        for value in values:
            content = re.sub(rf"(?m)^(\s*){key}:.*$(?:\n\1\s+.*$)*", rf"\1{key}: {value}", text)

            assert run("-", stdin=content.encode()).exit_code in (0, 1), (key, value)
