"""The examples are what KubeVirt accepts and what the hook needs."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from cel_expr_python import cel
from cel_expr_python.ext import ext_strings
from click.testing import CliRunner, Result
from jsonschema import Draft7Validator

from hook.cli import main
from hook.manifest import load, parse
from hook.server import socket_path
from hook.sidecars import ANNOTATION
from tests.golden import check, check_names
from tests.kubevirt_schema import ROOT, SCHEMA, definition_of, extract, objects, whole

FOLDERS = sorted(path.name for path in (ROOT / "examples").iterdir() if path.is_dir())
VMS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "examples").glob("*/vm.yaml"))
OBJECTS = [pytest.param(document, id=str(path.relative_to(ROOT))) for path, document in objects()]
OURS = '{"image": "registry.example/pcie-numa-hook:0.1.0"}'


@pytest.fixture(autouse=True)
def at_the_top(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths in what is printed are those of the repository."""
    monkeypatch.chdir(ROOT)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), prog_name="pcie-numa-hook")


def files(folder: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "examples" / folder).glob("*.yaml"))


def documents(folder: str, name: str) -> list[Any]:
    path = ROOT / "examples" / folder / name
    return [document.raw for document in parse(name, path.read_bytes()).documents]


# What KubeVirt says.


def errors(schema: Mapping[str, Any], document: Any) -> list[str]:
    top = {"$ref": f"#/definitions/{definition_of(document)}", **schema}
    return [f"{error.json_path}: {error.message}" for error in Draft7Validator(top).iter_errors(document)]


def schemas() -> dict[str, Any]:
    """The extract, and with KUBEVIRT_SWAGGER=…/swagger.json all of KubeVirt's file, and what is an extract of it now."""
    found = {"the extract": json.loads(SCHEMA.read_text())}
    if "KUBEVIRT_SWAGGER" in os.environ:
        swagger = json.loads(Path(os.environ["KUBEVIRT_SWAGGER"]).read_text())
        found |= {"KubeVirt's file": whole(swagger), "a new extract": extract(swagger)}
    return found


@pytest.mark.parametrize("document", OBJECTS)
@pytest.mark.parametrize("schema", schemas().values(), ids=schemas())
def test_kubevirts_schema_accepts_it(schema: Mapping[str, Any], document: Any) -> None:
    assert errors(schema, document) == []


def test_kubevirts_schema_refuses_what_kubevirt_does_not_have() -> None:
    (document,) = documents("single-gpu", "vm.yaml")
    domain = document["spec"]["template"]["spec"]["domain"]
    domain["cpu"]["dedicatedCPUPlacement"] = domain["cpu"].pop("dedicatedCpuPlacement")
    domain["devices"]["gpus"] = [{"deviceName": "nvidia.com/H100"}]
    domain["cpu"]["cores"] = "16"

    assert sorted(errors(json.loads(SCHEMA.read_text()), document)) == [
        "$.spec.template.spec.domain.cpu.cores: '16' is not of type 'integer'",
        "$.spec.template.spec.domain.cpu: Additional properties are not allowed "
        "('dedicatedCPUPlacement' was unexpected)",
        "$.spec.template.spec.domain.devices.gpus[0]: 'name' is a required property",
    ]


# What the hook says.


@pytest.mark.parametrize("folder", FOLDERS)
def test_check_has_nothing_against_it(folder: str) -> None:
    result = run("check", *files(folder))

    assert (result.exit_code, result.stderr) == (0, "")
    check(f"examples/{folder}.txt", result.stdout)


def test_check_finds_all_of_them_on_the_cluster_of_the_example() -> None:
    result = run("check", *VMS, *files("instancetype-and-preference"), *files("cluster"))

    assert (result.exit_code, result.stderr) == (0, "")
    check("examples/on-the-cluster.txt", result.stdout)


def test_no_golden_outlives_its_example() -> None:
    check_names("examples", [f"{name}.txt" for name in (*FOLDERS, "on-the-cluster")])


@pytest.mark.parametrize("path", [*VMS, "examples/pool/pool.yaml"])
def test_annotate_has_nothing_to_add(path: str) -> None:
    if path.startswith("examples/instancetype-and-preference/"):
        path = path.replace("vm.yaml", "preference.yaml")
    result = run("annotate", path)

    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout_bytes == (ROOT / path).read_bytes()


# What people read.


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_readme_has_five_lines(folder: str) -> None:
    lines = (ROOT / "examples" / folder / "README.md").read_text().splitlines()

    assert (len(lines), lines[0][:2], lines[1]) == (5, "# ", "")


def test_the_table_has_every_folder() -> None:
    table = (ROOT / "examples" / "README.md").read_text()

    assert sorted(re.findall(r"^\| \[([a-z-]+)\]\(\1/README\.md\)", table, re.MULTILINE)) == FOLDERS


# The cluster.


def test_the_kubelets_reservation_adds_up() -> None:
    """The memory manager refuses to start otherwise."""
    (config,) = documents("cluster", "kubelet.yaml")
    parts = (config["kubeReserved"]["memory"], config["systemReserved"]["memory"])
    reserved = [*parts, config["evictionHard"]["memory.available"]]
    on_nodes = [node["limits"]["memory"] for node in config["reservedMemory"]]

    assert sum(mebibytes(text) for text in reserved) == sum(mebibytes(text) for text in on_nodes)


def mebibytes(text: str) -> int:
    match = re.fullmatch(r"([0-9]+)Mi", text)
    assert match is not None

    return int(match[1])


# The admission policy, by a real evaluator of CEL.


def vmi(annotations: Mapping[str, str] | None = None, *, gpus: int = 1, is_mapped: bool = True) -> dict[str, Any]:
    return {
        "metadata": {"name": "a"} if annotations is None else {"name": "a", "annotations": dict(annotations)},
        "spec": {
            "domain": {
                "cpu": {"numa": {"guestMappingPassthrough": {}}} if is_mapped else {"cores": 2},
                "devices": {"gpus": [{"name": f"gpu{n}"} for n in range(gpus)]} if gpus else {},
            }
        },
    }


def evaluate(expression: str, values: Mapping[str, Any]) -> Any:
    escape = cel.FunctionDecl(
        "jsonpatch.escapeKey",
        [
            cel.Overload(
                "escape",
                return_type=cel.Type.STRING,
                parameters=[cel.Type.STRING],
                impl=lambda key: key.replace("~", "~0").replace("/", "~1"),
            )
        ],
    )
    variables = dict.fromkeys(values, cel.Type.DYN)
    environment = cel.NewEnv(variables=variables, extensions=[ext_strings.ExtStrings()], functions=[escape])
    # JSONPatch is a type that only the API server has.
    text = re.sub(r"JSONPatch\{op: (.*?), path: ", r'{"op": \1, "path": ', expression)
    text = re.sub(r"(?<=,)(\s+)value: ", r'\1"value": ', text)
    return environment.compile(text).eval(data=dict(values)).plain_value()


def admitted(document: dict[str, Any]) -> dict[str, Any]:
    """What the policy makes of a VMI."""
    spec = documents("admission-policy", "policy.yaml")[0]["spec"]
    if not all(evaluate(condition["expression"], {"object": document}) for condition in spec["matchConditions"]):
        return document
    values: dict[str, Any] = {}
    for variable in spec["variables"]:
        values[variable["name"]] = evaluate(variable["expression"], {"object": document, "variables": values})
    patches = evaluate(spec["mutations"][0]["jsonPatch"]["expression"], {"object": document, "variables": values})
    (patch,) = patches
    target, _, key = patch["path"].rpartition("/")
    place = document
    for part in target.split("/")[1:]:
        place = place[part]
    place[key.replace("~1", "/").replace("~0", "~")] = patch["value"]
    return document


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, {ANNOTATION: f"[{OURS}]"}),
        ({}, {ANNOTATION: f"[{OURS}]"}),
        ({"other": "x"}, {"other": "x", ANNOTATION: f"[{OURS}]"}),
        ({ANNOTATION: "[]"}, {ANNOTATION: f"[{OURS}]"}),
        ({ANNOTATION: ' [ {"image": "a/b"} ]\n'}, {ANNOTATION: f'[{{"image": "a/b"}}, {OURS}]'}),
        ({ANNOTATION: f"[{OURS}]"}, {ANNOTATION: f"[{OURS}]"}),
    ],
    ids=["no annotations", "empty ones", "another", "an empty list", "another sidecar", "the hook"],
)
def test_the_policy_adds_the_sidecar(before: Mapping[str, str] | None, after: Mapping[str, str]) -> None:
    assert admitted(vmi(before)) == vmi(after)


@pytest.mark.parametrize("document", [vmi(gpus=0), vmi(is_mapped=False)], ids=["no GPU", "no guest mapping"])
def test_the_policy_leaves_what_the_hook_could_not_place(document: dict[str, Any]) -> None:
    before = json.loads(json.dumps(document))

    assert admitted(document) == before


def test_the_binding_names_the_policy() -> None:
    policy, binding = documents("admission-policy", "policy.yaml")

    assert binding["spec"]["policyName"] == policy["metadata"]["name"]


# The plugin.


def test_the_plugin_is_where_the_sidecar_listens() -> None:
    plugin, policy, binding = documents("plugin", "plugin.yaml")
    path = plugin["spec"]["domainHooks"][0]["sidecar"]["socketPath"]
    patch = policy["spec"]["mutations"][0]["jsonPatch"]["expression"]

    assert path == socket_path(None, plugin["metadata"]["name"])
    assert 'args: ["--plugin", "pcie-numa-hook"]' in patch
    assert f'mountPath: "{path.rpartition("/")[0]}/"' in patch
    assert binding["spec"]["policyName"] == policy["metadata"]["name"]


def test_the_image_is_that_of_this_version() -> None:
    images = {
        image
        for path in (ROOT / "examples").rglob("*.yaml")
        for image in re.findall(r"registry\.example/pcie-numa-hook:[^\"\s]+", path.read_text())
    }

    assert images == {load(OURS)["image"]}
