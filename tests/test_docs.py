"""What the documents say is what the program does."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from hook.check import RULES
from hook.config import OPTIONS, Config, default_text
from hook.define import define_domain
from hook.render import plan_json
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


def commands() -> list[str]:
    texts = (path.read_text() for path in (ROOT / "README.md", ROOT / "docs" / "manifests.md"))
    return [line for text in texts for line in re.findall(r"^(\.venv/bin/pcie-numa-hook .*)$", text, re.MULTILINE)]


@pytest.mark.parametrize("command", commands())
def test_the_commands_of_the_documents_run(command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, shell=True, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")
