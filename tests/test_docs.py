"""What the documents say is what the program does."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hook.check import RULES
from hook.config import OPTIONS, Config, default_text
from hook.define import define_domain
from hook.recording import open_sysfs, record
from hook.render import plan_json
from hook.sysfs import MemoryTree
from tests.build import unpack
from tests.scenario import Scenario

ROOT = Path(__file__).parent.parent
MARKDOWN = sorted(path for path in ROOT.rglob("*.md") if ".venv" not in path.parts)


def test_the_table_of_options_is_the_table_of_the_program() -> None:
    rows = re.findall(
        r"^\| `([a-z0-9-]+)` \| ([^|]*?) ?\| ([^|]*?) ?\|", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    free = {"exclude": "NAME,…", "numa-node": "NAME=N"}

    assert rows == [
        (
            option.name,
            ", ".join(f"`{value}`" for value in option.values) or free[option.name],
            f"`{default_text(option)}`" if default_text(option) else "",
        )
        for option in OPTIONS
    ]


def test_every_finding_has_a_section() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "hook").glob("*.py"))
    called = re.findall(
        r"""(?:Severity\.\w+,|_not\(\s*guest,|_left\(\s*device,|_bad\(key,)\s*"([a-z0-9-]+)\"""", sources
    )
    called += re.findall(r'"([a-z0-9-]+)"  # finding', sources)
    sections = re.findall(r"^### ([a-z0-9-]+)$", (ROOT / "docs" / "findings.md").read_text(), re.MULTILINE)

    assert set(called) == set(sections)
    assert len(sections) == len(set(sections))


def test_every_rule_of_check_has_a_section() -> None:
    text = (ROOT / "docs" / "manifests.md").read_text().partition("## Codes")[2]
    sections = re.findall(r"^### ([a-z-]+)\n(info|warning)(;?)", text, re.MULTILINE)
    # `misplaced-annotation` stops the hook only when it is the list of sidecars.
    rules = [
        (rule.code, str(rule.severity), rule.stops or rule.code == "misplaced-annotation") for rule in RULES.values()
    ]

    assert [(code, severity, bool(stops)) for code, severity, stops in sections] == rules


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text())

    assert [link for link in links if not (path.parent / link).exists()] == []


def anchors(path: Path) -> set[str]:
    """What GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_anchors_lead_to_headings(path: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", path.read_text())

    assert [link for link in links if link[1] not in anchors(path.parent / link[0] if link[0] else path)] == []


def test_every_field_of_the_plan_is_explained() -> None:
    scenario = Scenario("two-node-2gpu")
    plan = plan_json(define_domain(scenario.xml(), scenario.vmi, lambda: scenario.sysfs, Config()))
    table = (ROOT / "docs" / "plan-json.md").read_text().partition("##")[0]
    explained = set(re.findall(r"`(?:[a-z]+\[\])?\.?([a-z_]+)`", table))
    fields = {field for value in plan.values() if isinstance(value, list) for row in value for field in row}

    assert {*plan, *fields} - {"expanders", "controllers", "devices", "findings"} <= explained


def test_the_example_of_the_plan_is_one() -> None:
    example = json.loads(re.findall(r"```json\n(.*?)```", (ROOT / "docs" / "plan-json.md").read_text(), re.DOTALL)[0])
    scenario = Scenario("two-node-2gpu")
    plan = plan_json(define_domain(scenario.xml(), scenario.vmi, lambda: scenario.sysfs, Config()))

    for key, value in example.items():
        assert value == (plan[key][: len(value)] if isinstance(value, list) else plan[key])


OURS = re.compile(r"^((?:\.venv/bin/)?pcie-numa-hook|python3 verify\.py) .*$", re.MULTILINE)


def commands() -> Iterator[tuple[Path, str]]:
    """Every line of a code block that starts one of our programs; kubectl and others are not here to be run."""
    for path in MARKDOWN:
        for block in re.findall(r"^```\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL):
            yield from ((path, match[0]) for match in OURS.finditer(block))


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """A folder with the files that the documents speak of."""
    scenario = Scenario("two-node-2gpu")
    outcome = define_domain(scenario.xml(), scenario.vmi, lambda: scenario.sysfs, Config())
    (tmp_path / "vm.xml").write_bytes(scenario.xml())
    (tmp_path / "vmi.yaml").write_bytes(scenario.vmi)
    (tmp_path / "plan.json").write_text(json.dumps(plan_json(outcome)))
    (tmp_path / "host.sysfs").write_text(record(scenario.sysfs))
    (tmp_path / "verify.py").write_text((ROOT / "hook/verify.py").read_text())
    assert isinstance(scenario.sysfs, MemoryTree)
    folder = unpack(scenario.sysfs, tmp_path / "sys")
    subprocess.run(["tar", "-C", str(folder), "-czf", str(tmp_path / "host.tar.gz"), "."], check=True)
    return tmp_path


@pytest.mark.parametrize(
    ("path", "command"), [pytest.param(*it, id=f"{it[0].relative_to(ROOT)}: {it[1][:60]}") for it in commands()]
)
def test_the_commands_of_the_documents_run(desk: Path, path: Path, command: str) -> None:
    del path
    folder = ROOT if command.startswith(".venv") else desk
    search = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        command, cwd=folder, shell=True, capture_output=True, text=True, check=False, env={**os.environ, "PATH": search}
    )

    # This machine is not the guest that the plan is for.
    assert (done.returncode, done.stderr) == (1 if "verify.py" in command else 0, "")


def test_the_picture_is_what_the_program_draws() -> None:
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    command, target = re.findall(r"^\t\$\(BIN\)/pcie-numa-hook (.*--format svg.*) > (.*)$", makefile, re.MULTILINE)[0]
    done = subprocess.run(
        [sys.executable, "-m", "hook", *shlex.split(command)], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert done.stdout == (ROOT / target).read_text()


def test_the_archive_that_the_docs_make_is_read_as_the_host(tmp_path: Path) -> None:
    command = re.findall(
        r"^kubectl exec POD -- sh -c '(cd /sys .*)' >", (ROOT / "docs/recordings.md").read_text(), re.MULTILINE
    )
    machine = open_sysfs(str(ROOT / "tests/hosts/l5640-sriov.sysfs"))
    assert isinstance(machine, MemoryTree)
    folder = unpack(machine, tmp_path / "sys")
    (folder / "bus/mdev/devices").mkdir(parents=True)
    done = subprocess.run(["sh", "-c", command[0].replace("cd /sys", f"cd {folder}")], capture_output=True, check=False)
    (tmp_path / "host.tar.gz").write_bytes(done.stdout)

    assert (done.returncode, done.stderr) == (0, b"")
    assert record(open_sysfs(str(tmp_path / "host.tar.gz"))) == record(machine)


def test_every_promise_has_a_test_that_exists() -> None:
    text = (ROOT / "docs" / "guarantees.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith(("| promise", "| ---"))]
    named = [re.findall(r"`(test_\w+\.py)::(test_\w+)`", row.rpartition(" | ")[2]) for row in rows]

    assert [row for row, tests in zip(rows, named, strict=True) if not tests] == []
    sources = {path.name: path.read_text() for path in (ROOT / "tests").glob("test_*.py")}
    assert [
        (file, test) for tests in named for file, test in tests if f"\ndef {test}(" not in sources.get(file, "")
    ] == []
