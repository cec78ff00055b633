"""Hostile bytes at every edge: the documented errors and nothing else, within 64 MB and 5 s, and no file outside."""

import copy
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lxml import etree

from hook.config import ANNOTATION_PREFIX, OPTIONS, Config, from_flags, with_annotations
from hook.define import Outcome, define_domain
from hook.domain import parse
from hook.errors import ConfigError, Finding, HookError, SysfsError
from hook.recording import open_sysfs, parse_recording
from hook.sysfs import MemoryTree, SysfsTree
from tests import hostile
from tests.build import unpack
from tests.scenario import Scenario
from tests.strategies import FUZZ, Situation, examples, situations
from tests.test_cases import CASES, TWO, A

ROOT = Path(__file__).parent.parent
DOCUMENTS = [case.xml for case in CASES.values() if len(case.xml) < 8_000] + [Scenario("full-featured").xml()]
ODD = (
    *("", " ", "-1", "1e9", "0x1FFFFF", "0x", "0", "00000000001", "1_000", "+1", "٣", "0b1", "4294967296", "9" * 30),
    *(
        "../../etc/passwd",
        "\u202e",
        "\ufffe",
        "a" * 5000,
        "0-8191",
        "8191-0",
        "^0",
        "NaN",
        "on",
        "pcie-expander-bus",
        "pci",
    ),
)


def check_text(error: HookError, start: str = "") -> None:
    """What users get is one line."""
    assert str(error).startswith(start or "cannot ")
    assert len(str(error).splitlines()) == 1


def answered(
    xml: bytes, vmi: bytes = b"{}", tree: SysfsTree | None = None, config: Config | None = None
) -> Outcome | None:
    """The outcome without a fault of the hook, or None for one of the documented errors with one line."""
    try:
        outcome = define_domain(xml, vmi, lambda: tree or parse_recording(TWO), config or Config())
    except HookError as error:
        check_text(error)
        return None
    assert outcome.error is None, outcome.error
    assert not {"internal-error"} & {finding.code for finding in outcome.plan.findings}
    if outcome.xml != xml:
        parse(outcome.xml)
    return outcome


@st.composite
def damaged(draw: st.DrawFn, whole: st.SearchStrategy[bytes]) -> bytes:
    """Bytes with a few places cut out, doubled or overwritten."""
    content = draw(whole)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(content)))
        end = min(len(content), start + draw(st.integers(0, 60)))
        piece = draw(st.one_of(st.just(b""), st.binary(max_size=8), st.just(content[start:end] * 2)))
        content = content[:start] + piece + content[end:]
    return content


@examples(200)
@given(damaged(st.sampled_from(DOCUMENTS)))
def test_damaged_domain_xml_is_answered_or_refused(xml: bytes) -> None:
    answered(xml)


@examples(200)
@given(
    st.binary(max_size=200)
    | st.text(max_size=100).map(lambda text: f"<domain>{text}</domain>".encode("utf-8", "replace"))
)
def test_bytes_that_are_no_domain_are_refused(xml: bytes) -> None:
    answered(xml)


@st.composite
def distorted(draw: st.DrawFn) -> bytes:
    """A well-formed domain with odd values, and elements doubled, moved, dropped or nested."""
    root = etree.fromstring(draw(st.sampled_from(DOCUMENTS)))
    for _ in range(draw(st.integers(1, 6))):
        elements = [element for element in root.iter(etree.Element) if element is not root]
        element = elements[draw(st.integers(0, len(elements) - 1))]
        parent = element.getparent()
        assert parent is not None
        match draw(st.sampled_from(("value", "value", "value", "text", "double", "drop", "move", "nest", "rename"))):
            case "value" if element.attrib:
                name = draw(st.sampled_from(sorted(element.attrib)))
                element.set(name, draw(st.sampled_from(ODD).filter(lambda text: text != "\ufffe")))
            case "text":
                element.text = draw(st.sampled_from(ODD).filter(lambda text: text != "\ufffe"))
            case "double":
                parent.insert(draw(st.integers(0, len(parent))), copy.deepcopy(element))
            case "drop":
                parent.remove(element)
            case "move":
                elements[draw(st.integers(0, len(elements) - 1))].append(copy.deepcopy(element))
            case "nest":
                for _ in range(draw(st.sampled_from((1, 20, 240)))):
                    inner = etree.Element(element.tag, dict(element.attrib))
                    inner.append(element)
                    element = inner
                parent.append(element)
            case "rename":
                element.tag = draw(
                    st.sampled_from(("devices", "hostdev", "controller", "address", "source", "alias", "cell"))
                )
    return etree.tostring(root)


@examples(250)
@given(distorted(), st.sampled_from(("node", "host-bridge", "switch")))
def test_well_formed_nonsense_is_answered_or_refused_and_a_second_pass_agrees(xml: bytes, layout: str) -> None:
    config = from_flags({"layout": layout, "distances": "auto", "maxphysaddr": "auto"})
    outcome = answered(xml, config=config)
    if outcome is not None:
        again = answered(outcome.xml, config=config)
        assert again is not None
        assert again.xml == outcome.xml


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(ODD),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ("metadata", "annotations", "spec", "domain", "devices", "interfaces", "name", "pciAddress")
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@examples(250)
@given(json_values)
def test_any_json_as_vmi_is_answered_or_refused(document: object) -> None:
    answered(CASES["user-pci-address"].xml, json.dumps(document).encode())


@examples(200)
@given(st.binary(max_size=100) | damaged(st.just(Scenario("full-featured").vmi)))
def test_damaged_vmi_json_is_answered_or_refused(vmi: bytes) -> None:
    answered(CASES["user-pci-address"].xml, vmi)


texts = st.text(max_size=30) | st.sampled_from(ODD)
keys = st.sampled_from([*(option.name for option in OPTIONS), "numa-node.a", "numa-node.", "layout.x", ""]) | texts


@examples(250)
@given(st.dictionaries(keys.map(lambda key: ANNOTATION_PREFIX + key), texts, max_size=5))
def test_any_annotation_is_obeyed_or_a_finding(annotations: Mapping[str, str]) -> None:
    config, findings = with_annotations(Config(), annotations)

    assert all(isinstance(finding, Finding) and finding.subject in annotations for finding in findings)
    if not findings and not annotations:
        assert config == Config()
    answered(CASES["distances"].xml, json.dumps({"metadata": {"annotations": annotations}}).encode())


@examples(200)
@given(st.sampled_from([option.name for option in OPTIONS]), texts)
def test_any_flag_is_obeyed_or_refused(name: str, text: str) -> None:
    try:
        from_flags({name: text})
    except ConfigError as error:
        check_text(error, f"cannot use --{name}: ")


contents = st.binary(max_size=80) | st.sampled_from(ODD).map(str.encode)


@examples(150)
@given(situations(), st.lists(st.tuples(st.integers(0, 10_000), contents), min_size=1, max_size=6))
def test_any_content_of_sysfs_is_a_finding_at_worst(it: Situation, spoiled: list[tuple[int, bytes]]) -> None:
    files, links = parse_recording(it.case.host).items()
    paths = sorted(files)
    changed = dict(files)
    for number, content in spoiled:
        changed[paths[number % len(paths)]] = content

    assert answered(it.case.xml, tree=MemoryTree(changed, links)) is not None


@examples(100)
@given(
    situations(),
    st.lists(
        st.tuples(
            st.integers(0, 10_000), st.sampled_from(("", ".", "..", "/", "/etc", "../" * 40 + "etc", "a//b", *ODD[:6]))
        )
    ),
)
def test_any_link_of_sysfs_is_followed_inside_or_not_at_all(it: Situation, spoiled: list[tuple[int, str]]) -> None:
    files, links = parse_recording(it.case.host).items()
    paths = sorted(links)
    changed = dict(links)
    for number, target in spoiled:
        if paths:
            changed[paths[number % len(paths)]] = target

    assert answered(it.case.xml, tree=MemoryTree(files, changed)) is not None


def opened(content: bytes) -> SysfsTree | None:
    """A recording with this content, or None where it is refused."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        try:
            return open_sysfs(file.name)
        except SysfsError as error:
            check_text(error)
            return None


@examples(200)
@given(damaged(st.just(TWO.encode())) | st.binary(max_size=200))
def test_any_bytes_as_recording_are_read_or_refused(content: bytes) -> None:
    tree = opened(content)
    if tree is not None:
        assert answered(CASES["distances"].xml, tree=tree) is not None


KINDS = (
    tarfile.REGTYPE,
    tarfile.SYMTYPE,
    tarfile.LNKTYPE,
    tarfile.DIRTYPE,
    tarfile.FIFOTYPE,
    tarfile.CHRTYPE,
    tarfile.BLKTYPE,
)
NAMES = (
    *(
        "bus/pci/devices/" + A,
        "devices/system/node/node0/cpulist",
        "sys/bus/pci/devices/x",
        "../../etc/passwd",
        "/etc/passwd",
    ),
    *(".", "", "a/../../b", "devices/system/node/node1/../../../../../../etc", "bus/pci/devices/" + "a/" * 3000),
)


@st.composite
def archives(draw: st.DrawFn) -> bytes:
    """Archives with members of every kind, names that lead outside, links to anywhere, and pax headers."""
    buffer = io.BytesIO()
    with tarfile.open(
        fileobj=buffer, mode="w", format=draw(st.sampled_from((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)))
    ) as archive:
        for _ in range(draw(st.integers(1, 6))):
            info = tarfile.TarInfo(draw(st.sampled_from(NAMES)))
            info.type = draw(st.sampled_from(KINDS))
            info.linkname = draw(st.sampled_from(NAMES))
            content = draw(contents) if info.type == tarfile.REGTYPE else b""
            info.size = len(content)
            info.pax_headers = draw(
                st.sampled_from(({}, {"size": "-1"}, {"path": "../x"}, {"GNU.sparse.map": "0,99999999999"}))
            )
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


@examples(250)
@given(archives() | damaged(archives()))
def test_any_archive_is_read_or_refused(content: bytes) -> None:
    tree = opened(content)
    if tree is not None:
        assert answered(CASES["distances"].xml, tree=tree) is not None


# What 1 MiB can cost, in a process of its own.

LIMIT_BYTES = 64_000_000  # of the container
LIMIT_SECONDS = 5.0  # of CPU


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Mapping[str, Any]]:
    """Each hostile input answered by the warmed-up server's code on a tree with links that lead out of it."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "inputs").mkdir()
    (folder / "sys").mkdir()
    hostile.write_all(folder / "inputs")
    tree = unpack(parse_recording(hostile.HOST), folder / "sys")
    device = tree / "devices" / hostile.PATH
    (folder / "outside").write_text("0\n")
    leads_out = {
        "vendor": "/etc/hostname",
        "class": "../" * 40 + "etc/hostname",
        "local_cpulist": str(folder / "outside"),
    }
    for name, target in leads_out.items():
        (device / name).unlink(missing_ok=True)
        (device / name).symlink_to(target)
    (device / "resource").symlink_to("resource")  # a circle
    os.mkfifo(device / "subsystem_vendor")
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile", folder / "inputs", tree],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["name"]: {**line, "folder": str(folder)} for line in lines}


INPUTS = (
    *hostile.domains(),
    *(f"VMI with {name}" for name in hostile.vmis()),
    *(f"host with {name}" for name in hostile.hosts()),
)


@pytest.mark.xdist_group("hostile")
@pytest.mark.parametrize("name", INPUTS)
def test_a_mebibyte_costs_no_more_than_64_mb_and_5_s_and_opens_nothing_outside(
    costs: Mapping[str, Mapping[str, Any]], name: str
) -> None:
    cost = costs[name]

    assert not cost["result"].startswith("fault"), cost["result"]
    assert cost["anonymous_bytes"] < LIMIT_BYTES
    assert cost["seconds"] < LIMIT_SECONDS
    inside = (f"{cost['folder']}/sys/", f"{cost['folder']}/inputs/")
    assert [path for path in cost["opened"] if not f"{path}/".startswith(inside)] == []


@pytest.mark.xdist_group("hostile")
def test_the_guard_sees_what_is_opened(costs: Mapping[str, Mapping[str, Any]]) -> None:
    cost = costs["empty elements"]

    assert f"{cost['folder']}/sys/devices/{hostile.PATH}/numa_node" in cost["opened"]
    assert max(len(xml) for xml in hostile.domains().values()) > 1_000_000


def test_the_same_bytes_are_tried_each_time_unless_fuzz_is_set() -> None:
    assert examples(10).max_examples == 10 * max(1, FUZZ)
