"""What the documents say is what the program does."""

import json
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from hook.config import OPTIONS, Config, default_text, with_annotations
from hook.define import define_domain
from hook.render import plan_json
from hook.server import socket_path
from tests.scenario import Scenario

ROOT = Path(__file__).parent.parent
MARKDOWN = sorted(path for path in ROOT.rglob("*.md") if ".venv" not in path.parts)
PLUGIN = ROOT / "examples" / "plugin" / "plugin.yaml"
EXAMPLES = sorted(path for path in (ROOT / "examples").rglob("*.yaml") if path != PLUGIN)
SIDECARS = "hooks.kubevirt.io/hookSidecars"


def test_the_table_of_options_is_the_table_of_the_program() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \| ([^|]*?) ?\| ([^|]*?) ?\|", (ROOT / "README.md").read_text(), re.MULTILINE)
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
    sections = re.findall(r"^### ([a-z0-9-]+)$", (ROOT / "docs" / "findings.md").read_text(), re.MULTILINE)

    assert set(called) == set(sections)
    assert len(sections) == len(set(sections))


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
    return re.findall(r"^(\.venv/bin/pcie-numa-hook .*)$", (ROOT / "README.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("command", commands())
def test_the_readmes_commands_run(command: str) -> None:
    done = subprocess.run(shlex.split(command), cwd=ROOT, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")


def annotations(document: Any) -> Iterator[Mapping[str, str]]:
    """Every mapping of annotations that is put on a VMI."""
    template = document["spec"].get("template", {}).get("metadata", document["spec"])
    yield template["annotations"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_examples_have_annotations_that_work(path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        for given in annotations(document):
            sidecars = json.loads(given[SIDECARS])
            config, findings = with_annotations(Config(), given)

            assert [set(sidecar) for sidecar in sidecars] == [{"image"}]
            assert findings == ()
            assert (config == Config()) is (set(given) == {SIDECARS})


def test_the_plugin_is_where_the_sidecar_listens() -> None:
    plugin, policy, binding = yaml.safe_load_all(PLUGIN.read_text())
    path = plugin["spec"]["domainHooks"][0]["sidecar"]["socketPath"]
    patch = policy["spec"]["mutations"][0]["jsonPatch"]["expression"]

    assert path == socket_path(None, plugin["metadata"]["name"])
    assert 'args: ["--plugin", "pcie-numa-hook"]' in patch
    assert f'mountPath: "{path.rpartition("/")[0]}/"' in patch
    assert binding["spec"]["policyName"] == policy["metadata"]["name"]


def test_vms_of_examples_have_what_the_hook_needs() -> None:
    for path in EXAMPLES:
        spec = yaml.safe_load(path.read_text())["spec"]
        if "template" in spec:
            domain = spec["template"]["spec"]["domain"]
            assert domain["cpu"]["dedicatedCpuPlacement"] is True
            assert domain["cpu"]["numa"] == {"guestMappingPassthrough": {}}
            assert "hugepages" in domain["memory"]


def test_every_promise_has_a_test_that_exists() -> None:
    text = (ROOT / "docs" / "guarantees.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith(("| promise", "| ---"))]
    named = [re.findall(r"`(test_\w+\.py)::(test_\w+)`", row.rpartition(" | ")[2]) for row in rows]

    assert [row for row, tests in zip(rows, named, strict=True) if not tests] == []
    sources = {path.name: path.read_text() for path in (ROOT / "tests").glob("test_*.py")}
    assert [
        (file, test) for tests in named for file, test in tests if f"\ndef {test}(" not in sources.get(file, "")
    ] == []
