"""What annotate writes is where the VMI finds it, and every other byte stays."""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hook.annotate import annotate
from hook.cli import main
from hook.config import OPTIONS
from hook.errors import ManifestError
from hook.manifest import load, parse
from hook.sidecars import ANNOTATION, PLACEHOLDER_IMAGE
from tests.golden import check, check_names

IMAGE = "r.test/pcie-numa-hook:1"
OURS = f'[{{"image": "{IMAGE}"}}]'
MODE, LAYOUT = "pcie-numa-hook/mode", "pcie-numa-hook/layout"
POLICY = {LAYOUT: "switch", MODE: "off"}
CASES = Path(__file__).parent / "annotate"


def run(*arguments: str, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(main, ["annotate", *arguments], input=stdin, prog_name="pcie-numa-hook")


def annotated(text: str, policy: Mapping[str, str] = POLICY, image: str | None = IMAGE) -> str:
    after = annotate(parse("vm.yaml", text.encode()), image, policy).decode()
    again = annotate(parse("vm.yaml", after.encode()), image, policy).decode()

    assert again == after
    return after


def values(text: str) -> list[Any]:
    return [document.raw for document in parse("vm.yaml", text.encode()).documents]


# Each file has one oddity, and is named after it.


@pytest.mark.parametrize("path", sorted(CASES.iterdir()), ids=lambda path: path.name)
def test_what_annotate_writes(path: Path) -> None:
    result = run(str(path), "--image", IMAGE, "--layout", "switch", "--mode", "off")

    assert (result.exit_code, result.stderr) == (0, "")
    check(f"annotate/{path.name}", result.stdout_bytes.decode())
    assert annotated(path.read_bytes().decode()) == result.stdout_bytes.decode()


def test_no_golden_outlives_its_case() -> None:
    check_names("annotate", [path.name for path in CASES.iterdir()])


# Every way to write the same VM: nothing is lost, and in blocks nothing but new lines appears.

KINDS = {
    "VirtualMachine": ("kubevirt.io/v1", ("spec", "template", "metadata", "annotations")),
    "VirtualMachineInstance": ("kubevirt.io/v1", ("metadata", "annotations")),
    "VirtualMachineInstanceReplicaSet": ("kubevirt.io/v1", ("spec", "template", "metadata", "annotations")),
    "VirtualMachinePool": (
        "pool.kubevirt.io/v1beta1",
        ("spec", "virtualMachineTemplate", "spec", "template", "metadata", "annotations"),
    ),
    "VirtualMachineTemplate": (
        "template.kubevirt.io/v1beta1",
        ("spec", "virtualMachine", "spec", "template", "metadata", "annotations"),
    ),
    "VirtualMachineInstancetype": ("instancetype.kubevirt.io/v1beta1", ("spec", "annotations")),
    "VirtualMachineClusterInstancetype": ("instancetype.kubevirt.io/v1beta1", ("spec", "annotations")),
    "VirtualMachinePreference": ("instancetype.kubevirt.io/v1beta1", ("spec", "annotations")),
    "VirtualMachineClusterPreference": ("instancetype.kubevirt.io/v1beta1", ("spec", "annotations")),
}
# How much of the way to the annotations is there, and what is at its end.
ENDS = ("nothing", "null", "tilde", "braces", "another", "block text")


def written(way: tuple[str, ...], end: str, depth: int, step: int, comment: str) -> str:
    """A document by hand: `depth` keys of the way are there, then the end."""
    lines: list[str] = []
    for level, key in enumerate(way[:depth]):
        pad = " " * (level * step)
        is_last = level == depth - 1
        tail = {"null": "", "tilde": " ~", "braces": " {}"}.get(end, "") if is_last else ""
        lines += [f"{pad}# before {key}"] if comment else []
        lines.append(f"{pad}{key}:{tail}{comment}")
        below = " " * ((level + 1) * step)
        if is_last and end == "another":
            lines.append(f"{below}x-other: 'it''s'{comment}")
        elif is_last and end == "block text":
            lines += [f"{below}x-other: |", f"{below}  two", "", f"{below}  lines"]
    return "\n".join(lines)


def variants() -> list[Any]:
    found = []
    different = {way: kind for kind, (_, way) in KINDS.items()}.values()
    for kind, end, step in itertools.product(different, ENDS, (2, 4)):
        way = KINDS[kind][1]
        for depth in range(1, len(way) + 1):
            if end == "nothing" or (end in ("another", "block text") and depth < len(way) and way[depth] == "template"):
                continue
            found.append(pytest.param(kind, end, depth, step, id=f"{kind}-{end}-{depth}-{step}"))
    return found


ENDINGS = ("", "\n", "\n\n# the end\n", "\n...\n---\n# more\na: 1\n")


@pytest.mark.parametrize(("kind", "end", "depth", "step"), variants())
@pytest.mark.parametrize("newline", ["\n", "\r\n"], ids=["lf", "crlf"])
def test_nothing_else_changes(kind: str, end: str, depth: int, step: int, newline: str) -> None:
    version, way = KINDS[kind]
    for comment, last in itertools.product(("", "  # why"), ENDINGS):
        if end == "block text" and not last:
            continue  # the text would get the line break that it does not have: see the refusals below
        body = written(way, end, depth, step, comment)
        text = f"# a manifest\napiVersion: {version}\nkind: {kind}\n{body}{last}".replace("\n", newline)
        after = annotated(text)

        expected = values(text)
        place = expected[0]
        for key in way:
            if place.get(key) is None:
                place[key] = {}
            place = place[key]
        place.update({ANNOTATION: OURS, **POLICY})
        assert values(after) == expected
        assert after.count("\r\n") == (after.count("\n") if newline == "\r\n" else 0)
        kept = [line for line in after.split(newline) if line not in added(after, text, newline)]
        before = [line.replace(": ~", ":").replace(": {}", ":") for line in text.split(newline)]
        assert [line for line in kept if line] == [line for line in before if line]


def added(after: str, before: str, newline: str) -> set[str]:
    """Lines of our annotations, and of the mappings that were made for them."""
    old = {line.replace(": ~", ":").replace(": {}", ":") for line in before.split(newline)}
    return {line for line in after.split(newline) if line not in old}


def document(kind: str = "VirtualMachineInstance") -> dict[str, Any]:
    version, way = KINDS[kind]
    found: dict[str, Any] = {"apiVersion": version, "kind": kind}
    place = found
    for key in way:
        place = place.setdefault(key, {})
    place["other"] = 'a "b" \\ c'
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("indent", [None, 2, 4, "\t"], ids=["one line", "two", "four", "tabs"])
def test_json_stays_json(kind: str, indent: int | str | None) -> None:
    before = document(kind)
    after = annotated(json.dumps(before, indent=indent))
    place = before
    for key in KINDS[kind][1]:
        place = place[key]
    place.update({ANNOTATION: OURS, **POLICY})

    assert after == json.dumps(before, indent=indent)


@pytest.mark.parametrize("indent", [None, 2, "\t"], ids=["one line", "two", "tabs"])
@pytest.mark.parametrize("there", [{}, None], ids=["empty", "null"])
@pytest.mark.parametrize("kind", KINDS)
def test_json_stays_json_where_nothing_is_there(
    kind: str, there: dict[str, str] | None, indent: int | str | None
) -> None:
    way = KINDS[kind][1]
    for depth in range(1, len(way) + 1):
        found: dict[str, Any] = {"apiVersion": KINDS[kind][0], "kind": kind}
        place = found
        for key in way[: depth - 1]:
            place = place.setdefault(key, {})
        place[way[depth - 1]] = there
        text = json.dumps(found, indent=indent)
        expected = json.loads(text)
        place = expected
        for key in way:
            place[key] = place.get(key) or {}
            place = place[key]
        place.update({ANNOTATION: OURS, **POLICY})

        assert annotated(text) == json.dumps(expected, indent=indent)


HEAD = "apiVersion: kubevirt.io/v1\nkind: VirtualMachineInstance\n"
LINES = f"    {ANNOTATION}: '{OURS}'\n    {LAYOUT}: switch\n    {MODE}: \"off\"\n"
FLOW = f'"{ANNOTATION}": {json.dumps(OURS)}, "{LAYOUT}": "switch", "{MODE}": "off"'
ODDITIES = {
    "an empty null in braces": ("metadata: {annotations: }\n", f"metadata: {{annotations: {{{FLOW}}} }}\n"),
    "a last comma": ("metadata: {annotations: {a: b,}}\n", f"metadata: {{annotations: {{a: b, {FLOW},}}}}\n"),
    "a comment in braces": (
        "metadata: {  # why\n  name: a  # b\n}\n",
        f'metadata: {{  # why\n  name: a,\n  "annotations": {{\n    {FLOW.replace(", ", ",%")}\n  }}  # b\n}}\n'.replace(
            ",%", ",\n    "
        ),
    ),
    "an alias at the end": (
        "x: &x y\nmetadata:\n  annotations:\n    a: *x  # here\nspec: {}\n",
        f"x: &x y\nmetadata:\n  annotations:\n    a: *x  # here\n{LINES}spec: {{}}\n",
    ),
    "a list at the end": (
        "metadata:\n  finalizers:\n  - a\n  - - b  # c\n# d\n",
        f"metadata:\n  finalizers:\n  - a\n  - - b  # c\n  annotations:\n{LINES}# d\n",
    ),
    "an anchor at the mapping": (
        "metadata: &m\n  annotations: &a\n    b: c\n",
        f"metadata: &m\n  annotations: &a\n    b: c\n{LINES}",
    ),
    "a null where the value goes": (
        f"metadata:\n  annotations:\n    {MODE}:  # later\n",
        f"metadata:\n  annotations:\n    {MODE}: \"off\"  # later\n    {ANNOTATION}: '{OURS}'\n    {LAYOUT}: switch\n",
    ),
    "a boolean where a text goes": (
        f"metadata:\n  annotations:\n    {MODE}: off\n",
        f"metadata:\n  annotations:\n    {MODE}: \"off\"\n    {ANNOTATION}: '{OURS}'\n    {LAYOUT}: switch\n",
    ),
    "a byte order mark": ("metadata:\n  annotations:\n    a: ü\n", f"metadata:\n  annotations:\n    a: ü\n{LINES}"),
}


@pytest.mark.parametrize(("before", "after"), ODDITIES.values(), ids=ODDITIES)
def test_an_oddity(before: str, after: str) -> None:
    mark = "\ufeff" if "ü" in before else ""

    assert annotated(mark + HEAD + before) == mark + HEAD + after


# Sidecars that are there.

HOOK = '{"image": "r.test/pcie-numa-hook:0", "args": ["--mode", "observe"]}'
OTHER = '{"image":"a/b:1"}'


@pytest.mark.parametrize(
    ("before", "image", "after"),
    [
        ("", None, f'[{{"image": "{PLACEHOLDER_IMAGE}"}}]'),
        ("[]", IMAGE, OURS),
        (f"[{OTHER}]", IMAGE, f'[{OTHER}, {{"image": "{IMAGE}"}}]'),
        (f"[{HOOK}]", None, f"[{HOOK}]"),
        (f"[{OTHER},{HOOK}]", IMAGE, f"[{OTHER},{HOOK.replace('hook:0', 'hook:1')}]"),
        (f"[{HOOK}]", "m.test/x@sha256:1", f"[{HOOK.replace('r.test/pcie-numa-hook:0', 'm.test/x@sha256:1')}]"),
        ('[{"image": "m.test:5000/x:1"}]', "m.test:5000/x:2", '[{"image": "m.test:5000/x:2"}]'),
        (
            '[{"image": "m.test:5000/y"}]',
            "m.test:5000/x:2",
            '[{"image": "m.test:5000/y"}, {"image": "m.test:5000/x:2"}]',
        ),
        (
            '[{"image": "r.test/pcie-numa-hook:0", "args": ["r.test/pcie-numa-hook:0"]}]',
            IMAGE,
            f'[{{"image": "{IMAGE}", "args": ["r.test/pcie-numa-hook:0"]}}]',
        ),
    ],
    ids=[
        "none",
        "an empty list",
        "another",
        "the hook, and no image",
        "the hook's image is another",
        "the hook gets another name",
        "the hook has another name",
        "another of that registry",
        "the image twice in the text",
    ],
)
def test_other_sidecars_stay(before: str, image: str | None, after: str) -> None:
    document = {"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": {"annotations": {}}}
    if before:
        document["metadata"] = {"annotations": {ANNOTATION: before}}
    text = annotated(json.dumps(document), {}, image)

    assert load(text)["metadata"]["annotations"][ANNOTATION] == after


# What cannot be done.


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind: ConfigMap\napiVersion: v1\n", "cannot annotate vm.yaml: nothing in it becomes a VM, expected one of "),
        (
            "{head}metadata: {annotations: {hooks.kubevirt.io/hookSidecars: '{}'}}\n",
            "cannot annotate vm.yaml:3: metadata.annotations[hooks.kubevirt.io/hookSidecars] is a JSON object, "
            "expected a list such as ",
        ),
        (
            "{head}metadata: {annotations: {hooks.kubevirt.io/hookSidecars: [1]}}\n",
            "cannot annotate vm.yaml:3: metadata.annotations[hooks.kubevirt.io/hookSidecars] is no text, "
            "expected a JSON list in quotes",
        ),
        (
            "{head}metadata: {annotations: {hooks.kubevirt.io/hookSidecars: '${SIDECARS}'}}\n",
            "cannot annotate vm.yaml:3: metadata.annotations[hooks.kubevirt.io/hookSidecars] is '${SIDECARS}' ",
        ),
        (
            "{head}metadata:\n  annotations:\n    pcie-numa-hook/layout: [node]\n",
            "cannot edit vm.yaml:5: metadata.annotations[pcie-numa-hook/layout] is no text, expected one",
        ),
        ("{head}metadata: text\n", "cannot edit vm.yaml:3: metadata is no mapping, expected a mapping"),
        ("{head}metadata:\n  annotations: [a]\n", "cannot edit vm.yaml:4: metadata.annotations is no mapping"),
        (
            "{head}metadata:\n  labels: &a {x: y}\n  annotations: *a\n",
            "cannot edit vm.yaml:5: metadata.annotations is an alias, expected a mapping",
        ),
        (
            "{head}metadata:\n  annotations: &a {x: y}\n  labels: *a\n",
            "cannot edit vm.yaml: an anchor, a merge, or a text block at its end makes the change reach further than it "
            "should; write the annotations out",
        ),
        ("{head}metadata:\n  annotations:\n    a: |\n      text", "cannot edit vm.yaml: an anchor, a merge, or a text"),
    ],
    ids=[
        "no VM",
        "an object",
        "a list",
        "a parameter",
        "a list of layouts",
        "a text",
        "no mapping",
        "an alias",
        "an anchor",
        "an end",
    ],
)
def test_what_cannot_be_annotated_is_3_and_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "vm.yaml"
    path.write_text(text.replace("{head}", "apiVersion: kubevirt.io/v1\nkind: VirtualMachineInstance\n"))
    result = run(str(path), "--write", "--layout", "node")

    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr.replace(str(path), "vm.yaml").startswith(f"pcie-numa-hook: {message}")
    assert result.stderr.count("\n") == 1
    assert path.read_text() == text.replace("{head}", "apiVersion: kubevirt.io/v1\nkind: VirtualMachineInstance\n")


def test_a_merge_into_the_annotations_stays() -> None:
    head = "apiVersion: kubevirt.io/v1\nkind: VirtualMachineInstance\n"
    text = f"{head}x-common: &common {{a: b, {MODE}: apply}}\nmetadata:\n  annotations:\n    <<: *common\n"

    assert annotated(text) == f"{text}    {ANNOTATION}: '{OURS}'\n    {LAYOUT}: switch\n    {MODE}: \"off\"\n"


def test_an_instancetype_gets_nothing_where_a_vm_does() -> None:
    instancetype, machine = document("VirtualMachineInstancetype"), document("VirtualMachine")
    after = values(annotated(json.dumps(instancetype) + "\n---\n" + json.dumps(machine)))

    assert after[0] == instancetype
    assert after[1]["spec"]["template"]["metadata"]["annotations"] == {
        **machine["spec"]["template"]["metadata"]["annotations"],
        ANNOTATION: OURS,
        **POLICY,
    }


# The command.

VM = (CASES / "no-annotations.yaml").read_bytes()


def test_write_changes_the_file_and_prints_nothing(tmp_path: Path) -> None:
    path = tmp_path / "vm.yaml"
    path.write_bytes(VM)
    printed = run(str(path), "--image", IMAGE).stdout_bytes
    result = run(str(path), "--image", IMAGE, "--write")

    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")
    assert path.read_bytes() == printed != VM


def test_a_file_that_has_it_all_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "vm.yaml"
    path.write_bytes(run("-", "--image", IMAGE, stdin=VM).stdout_bytes)
    path.chmod(0o444)
    before = path.stat().st_mtime_ns
    result = run(str(path), "--image", IMAGE, "--write", "--diff")

    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")
    assert path.stat().st_mtime_ns == before


def test_the_difference(tmp_path: Path) -> None:
    path = tmp_path / "vm.yaml"
    path.write_bytes(b"apiVersion: kubevirt.io/v1\nkind: VirtualMachineInstance\nmetadata: {name: a}")
    result = run(str(path), "--image", IMAGE, "--diff")

    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.replace(str(path), "vm.yaml") == (
        "--- vm.yaml\n+++ vm.yaml\n@@ -1,3 +1,3 @@\n apiVersion: kubevirt.io/v1\n kind: VirtualMachineInstance\n"
        "-metadata: {name: a}\n\\ No newline at end of file\n"
        f'+metadata: {{name: a, "annotations": {{"{ANNOTATION}": {json.dumps(OURS)}}}}}\n'
        "\\ No newline at end of file\n"
    )


def test_a_placeholder_is_told() -> None:
    result = run("-", stdin=VM)
    text = f"pcie-numa-hook: the image {PLACEHOLDER_IMAGE} is a placeholder, give yours with --image\n"

    assert (result.exit_code, result.stderr) == (0, text)
    assert run("-", stdin=result.stdout_bytes).stderr == ""


def test_every_option_becomes_an_annotation() -> None:
    """And check, which reads them by the same table, has nothing against one."""
    given = {option.name: (option.values[-1] if option.values else "gpu0") for option in OPTIONS}
    given["numa-node"] = "gpu0=1"
    words = [word for name, value in given.items() for word in (f"--{name}", value)]
    result = run("-", "--image", IMAGE, *words, "--exclude", "gpu1", "--numa-node", "gpu1=0", stdin=VM)
    keys = [line.split(":")[0].strip() for line in result.stdout.splitlines() if "pcie-numa-hook/" in line]

    assert [key for key in keys if key.startswith("pcie-numa-hook/")] == [
        *(f"pcie-numa-hook/{name}" for name in given if name != "numa-node"),
        "pcie-numa-hook/numa-node.gpu0",
        "pcie-numa-hook/numa-node.gpu1",
    ]
    checked = CliRunner().invoke(main, ["check", "-"], input=result.stdout_bytes)
    assert [line for line in checked.stdout.splitlines() if "annotation]" in line] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-", "--write"], "Error: --write needs a file, found - (standard input)"),
        (["-", "--layout", "tree"], "Error: Invalid value for '--layout': 'tree' is not one of "),
        (["-", "--numa-node", "gpu0"], "pcie-numa-hook: cannot use --numa-node: 'gpu0' is not NAME=N"),
        (
            ["-", "--numa-node", "0000:3b:00.0=1"],
            "pcie-numa-hook: cannot use --numa-node 0000:3b:00.0=1: Kubernetes allows no '0000:3b:00.0' in the key of "
            "an annotation, expected a device's name in the VMI, or the flag in the sidecar's args",
        ),
        ([], "Error: Missing argument 'MANIFEST'."),
    ],
    ids=["nowhere to write", "a value", "no node", "a key", "no manifest"],
)
def test_wrong_usage_is_2(arguments: list[str], message: str) -> None:
    result = run(*arguments, stdin=VM)

    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1].startswith(message)


def test_a_missing_file_is_3(tmp_path: Path) -> None:
    result = run(str(tmp_path / "missing"))

    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (3, "", 1)


def test_debug_shows_the_traceback() -> None:
    assert isinstance(run("-", "--debug", stdin=b"a: 1").exception, ManifestError)
