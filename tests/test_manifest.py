"""YAML means what it means to Kubernetes, and every field knows its place."""

from pathlib import Path

import pytest

from hook.errors import ManifestError
from hook.manifest import Open, load, parse
from hook.templates import KIND_NAMES, templates, vms

# As `kubectl annotate --local -o json` of v1.32 prints them.
SCALARS = {
    "off": False,
    "y": True,
    "N": False,
    "yes": True,
    "True": True,
    "0000:41:00.0": "0000:41:00.0",
    "12:34:56": "12:34:56",
    "1:30": "1:30",
    "2026-11-30": "2026-11-30",
    "=": "=",
    "0755": 493,
    "0o17": 15,
    "0x1F": 31,
    "0b11": 3,
    "1_000": 1000,
    "+12": 12,
    "08": 8,
    "1e3": 1000,
    ".5": 0.5,
    "1.": 1,
    "~": None,
    "": None,
    "'off'": "off",
    "!!str 12": "12",
    "oN": "oN",
    "1.2.3": "1.2.3",
    "64Gi": "64Gi",
}


@pytest.mark.parametrize(("written", "value"), SCALARS.items())
def test_a_scalar_means_what_it_means_to_kubernetes(written: str, value: object) -> None:
    found = load(f"a: {written}\n")["a"]

    assert found == value
    assert isinstance(found, bool) is isinstance(value, bool)


def test_keys_are_texts_as_in_json() -> None:
    assert load("n: 1\n2: 3\n~: x\ny: 0\n") == {"false": 1, "2": 3, "null": "x", "true": 0}


def test_merges_and_anchors_are_followed() -> None:
    assert load("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: *a\n") == {
        "a": {"x": 1, "true": 2},
        "b": {"x": 1, "true": 3},
        "c": {"x": 1, "true": 2},
    }


def test_aliases_of_aliases_do_not_blow_up() -> None:
    lines = ["a0: &a0 [x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30))]
    (document,) = parse("bomb.yaml", "\n".join(lines).encode()).documents

    assert sum(1 for _ in document.walk()) < 1000


def test_several_documents_are_one_too_many_for_a_value() -> None:
    with pytest.raises(ManifestError, match="line 2, column 1: expected a single document in the stream but found"):
        load("a: 1\n---\nb: 2\n")


TEXT = """\
# first
a:
  b: 1   # here

  "c/d": [x,
          {e: 2}]
"""


@pytest.mark.parametrize(
    ("keys", "line", "path", "value"),
    [
        ((), 2, "", {"a": {"b": 1, "c/d": ["x", {"e": 2}]}}),
        (("a",), 2, "a", {"b": 1, "c/d": ["x", {"e": 2}]}),
        (("a", "b"), 3, "a.b", 1),
        (("a", "c/d"), 5, "a[c/d]", ["x", {"e": 2}]),
        (("a", "c/d", 1), 6, "a[c/d][1]", {"e": 2}),
        (("a", "c/d", 1, "e"), 6, "a[c/d][1].e", 2),
        (("a", "c/d", 2), 5, "a[c/d][2]", None),
        (("a", "b", "x", 0), 3, "a.b.x[0]", None),
        (("x", "y"), 2, "x.y", None),
    ],
)
def test_a_field_knows_its_place(keys: tuple[str | int, ...], line: int, path: str, value: object) -> None:
    (document,) = parse("a.yaml", TEXT.encode()).documents
    field = document.at(*keys)

    assert (field.line, str(field), field.value, field.is_absent) == (line, path, value, value is None)


def test_parameters_have_their_defaults() -> None:
    text = b"""\
kind: Template
parameters: [{name: A, value: x}, {name: NUMBER, value: "3"}, {name: OPEN}]
objects:
- {kind: K, a: "${A}-${A}", count: "${{NUMBER}}", t: "${NUMBER}", o: ["<${OPEN}>"], unknown: "${B}"}
"""
    (found,) = parse("t.yaml", text).objects()

    assert found.value == {"kind": "K", "a": "x-x", "count": 3, "t": "3", "o": ["<${OPEN}>"], "unknown": "${B}"}
    assert [isinstance(found.at(key).value, Open) for key in ("a", "unknown")] == [False, True]
    assert isinstance(found.at("o", 0).value, Open)


def test_a_reference_is_found_as_kubevirt_finds_it() -> None:
    """The kind in any case and in the plural, a namespace that is not another."""
    head = "apiVersion: instancetype.kubevirt.io/v1beta1\n"
    texts = [
        f"{head}kind: VirtualMachineInstancetype\nmetadata: {{name: a, namespace: one}}\n",
        f"{head}kind: VirtualMachineClusterInstancetype\nmetadata: {{name: a}}\n",
        *(
            "apiVersion: kubevirt.io/v1\nkind: VirtualMachine\n"
            f"metadata: {{name: {kind or 'none'}-{namespace or 'none'}{f', namespace: {namespace}' if namespace else ''}}}\n"
            f"spec: {{instancetype: {{name: a{f', kind: {kind}' if kind else ''}}}}}\n"
            for kind in ("", "virtualmachineinstancetypes", "VirtualMachineInstancetype")
            for namespace in ("", "one", "two")
        ),
    ]
    found = templates(parse("all.yaml", "---\n".join(texts).encode()))
    named = {vm.template.name: vm.instancetype and vm.instancetype.template for vm in vms(found)}

    assert {name: template and template.kind for name, template in named.items()} == {
        "none-none": "VirtualMachineClusterInstancetype",
        "none-one": "VirtualMachineClusterInstancetype",
        "none-two": "VirtualMachineClusterInstancetype",
        "virtualmachineinstancetypes-none": "VirtualMachineInstancetype",
        "virtualmachineinstancetypes-one": "VirtualMachineInstancetype",
        "virtualmachineinstancetypes-two": None,
        "VirtualMachineInstancetype-none": "VirtualMachineInstancetype",
        "VirtualMachineInstancetype-one": "VirtualMachineInstancetype",
        "VirtualMachineInstancetype-two": None,
    }


def test_the_document_has_every_kind() -> None:
    text = (Path(__file__).parent.parent / "docs" / "manifests.md").read_text()
    kinds = text.replace("VirtualMachine(Cluster)", "VirtualMachineCluster") + text.replace("(Cluster)", "")

    assert [kind for kind in KIND_NAMES if kind not in kinds] == []
