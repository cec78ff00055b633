"""Flags and annotations become one policy: which wins, which adds, and what a bad one does."""

from collections.abc import Mapping, Sequence
from dataclasses import fields

import pytest

from hook.config import (
    OPTIONS,
    Config,
    Devices,
    Extra,
    Layout,
    Mode,
    Policy,
    RiskyBars,
    TopologyFile,
    Unaligned,
    default_text,
    from_flags,
    to_annotations,
    with_annotations,
)
from hook.errors import ConfigError, Finding, Severity

KNOWN = "devices, exclude, layout, unaligned, risky-bars, policy, mode, distances, maxphysaddr, topology-file, p2p-clique, numa-node.NAME"


def test_no_flags_are_the_defaults() -> None:
    assert Config() == from_flags({}) == from_flags(dict.fromkeys((option.name for option in OPTIONS), None))


def test_every_field_has_one_option() -> None:
    assert sorted(field.name for field in fields(Config)) == sorted(option.field for option in OPTIONS)


def test_the_defaults_are_shown_as_a_user_would_write_them() -> None:
    assert {option.name: default_text(option) for option in OPTIONS} == {
        "devices": "all",
        "exclude": "",
        "layout": "node",
        "unaligned": "nearest",
        "risky-bars": "leave",
        "policy": "best-effort",
        "mode": "apply",
        "distances": "off",
        "maxphysaddr": "off",
        "topology-file": "off",
        "p2p-clique": "off",
        "numa-node": "",
    }


def test_every_flag_is_read() -> None:
    flags: Mapping[str, str | Sequence[str]] = {
        "devices": "gpu",
        "exclude": ["a,b", " c , ,0000:3b:00.0"],
        "layout": "switch",
        "unaligned": "leave",
        "risky-bars": "place",
        "policy": "strict",
        "mode": "observe",
        "distances": "auto",
        "maxphysaddr": "auto",
        "topology-file": "nccl",
        "p2p-clique": "auto",
        "numa-node": ["gpu0=1", "0000:3b:00.0=0", "gpu0=2"],
    }

    assert from_flags(flags) == Config(
        devices=Devices.GPU,
        exclude=frozenset({"a", "b", "c", "0000:3b:00.0"}),
        layout=Layout.SWITCH,
        unaligned=Unaligned.LEAVE,
        risky_bars=RiskyBars.PLACE,
        policy=Policy.STRICT,
        mode=Mode.OBSERVE,
        distances=Extra.AUTO,
        maxphysaddr=Extra.AUTO,
        topology_file=TopologyFile.NCCL,
        p2p_clique=Extra.AUTO,
        numa_nodes={"gpu0": 2, "0000:3b:00.0": 0},
    )


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("policy", "lenient", "cannot use --policy: 'lenient' is not one of best-effort, strict"),
        ("layout", "", "cannot use --layout: '' is not one of node, host-bridge, switch"),
        ("mode", "OFF", "cannot use --mode: 'OFF' is not one of apply, observe, off"),
        ("numa-node", "gpu0", "cannot use --numa-node: 'gpu0' is not NAME=N"),
        ("numa-node", "=1", "cannot use --numa-node: '=1' is not NAME=N"),
        ("numa-node", "gpu0=", "cannot use --numa-node: '' is not a host NUMA node 0..1023"),
        ("numa-node", "gpu0=-1", "cannot use --numa-node: '-1' is not a host NUMA node 0..1023"),
        ("numa-node", "gpu0=1024", "cannot use --numa-node: '1024' is not a host NUMA node 0..1023"),
        ("numa-node", "gpu0=0x1", "cannot use --numa-node: '0x1' is not a host NUMA node 0..1023"),
        ("numa-node", "gpu0=\u0661", "cannot use --numa-node: '\u0661' is not a host NUMA node 0..1023"),
    ],
)
def test_a_bad_flag_is_an_error_that_names_it(name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        from_flags({name: text})

    assert message == str(refusal.value)


def test_flags_are_written_as_annotations_that_mean_the_same() -> None:
    flags: Mapping[str, str | Sequence[str] | None] = {
        "numa-node": ["gpu-1=1", "nic=0"],
        "exclude": ["a,b", " c"],
        "layout": " switch ",
        "mode": None,
        "policy": ["strict"],
    }
    annotations = to_annotations(flags)

    assert list(annotations.items()) == [
        ("pcie-numa-hook/exclude", "a,b,c"),
        ("pcie-numa-hook/layout", "switch"),
        ("pcie-numa-hook/policy", "strict"),
        ("pcie-numa-hook/numa-node.gpu-1", "1"),
        ("pcie-numa-hook/numa-node.nic", "0"),
    ]
    assert with_annotations(Config(), annotations) == (from_flags(flags), ())
    assert to_annotations({}) == {}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"layout": "flat"}, "cannot use --layout: 'flat' is not one of node, host-bridge, switch"),
        (
            {"numa-node": "0000:3b:00.0=1"},
            "cannot use --numa-node 0000:3b:00.0=1: Kubernetes allows no '0000:3b:00.0' in the key of an annotation, "
            "expected a device's name in the VMI, or the flag in the sidecar's args",
        ),
    ],
)
def test_flags_that_can_be_no_annotations_are_refused(flags: Mapping[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        to_annotations(flags)

    assert str(refusal.value) == message


def test_annotations_replace_flags_and_add_to_lists() -> None:
    flags = Config(
        layout=Layout.SWITCH,
        policy=Policy.STRICT,
        exclude=frozenset({"a"}),
        numa_nodes={"gpu0": 0, "gpu1": 0},
    )
    annotations = {
        "pcie-numa-hook/layout": "node",
        "pcie-numa-hook/exclude": "b, c",
        "pcie-numa-hook/numa-node.gpu0": " 1 ",
        "pcie-numa-hook/numa-node.nic.2": "3",
        "example.com/pcie-numa-hook/layout": "no",
        "kubevirt.io/placePCIDevicesOnRootComplex": "true",
    }

    assert with_annotations(flags, annotations) == (
        Config(
            layout=Layout.NODE,
            policy=Policy.STRICT,
            exclude=frozenset({"a", "b", "c"}),
            numa_nodes={"gpu0": 1, "gpu1": 0, "nic.2": 3},
        ),
        (),
    )


@pytest.mark.parametrize(
    ("key", "value", "code", "message"),
    [
        pytest.param(
            "policy",
            "hard",
            "bad-annotation",
            "the value is ignored: 'hard' is not one of best-effort, strict",
            id="a word that is not allowed",
        ),
        pytest.param(
            "numa-node.gpu0",
            "one",
            "bad-annotation",
            "the value is ignored: 'one' is not a host NUMA node 0..1023",
            id="a node that is no number",
        ),
        pytest.param(
            "numa-node.gpu0",
            "gpu1=1",
            "bad-annotation",
            "the value is ignored: 'gpu1=1' is not a host NUMA node 0..1023",
            id="the form of the flag as the value",
        ),
        pytest.param(
            "exclude",
            ",".join(f"gpu{n}" for n in range(1025)),
            "bad-annotation",
            "the value is ignored: 'gpu0,gpu1,gpu2,gpu3,gpu4,gpu5,gpu6,gpu7,gpu8,gpu9,gpu10,gpu11,gpu12,gpu13,gpu14,' "
            "has 1025 names, expected 1024 at most",
            id="more names than a VM can have devices",
        ),
        pytest.param(
            "layuot",
            "node",
            "unknown-annotation",
            f"there is no such annotation, expected one of {KNOWN}",
            id="a key that does not exist",
        ),
        pytest.param(
            "numa-node",
            "gpu0=1",
            "unknown-annotation",
            f"there is no such annotation, expected one of {KNOWN}",
            id="an override without a NAME",
        ),
        pytest.param(
            "numa-node.",
            "1",
            "unknown-annotation",
            f"there is no such annotation, expected one of {KNOWN}",
            id="an override with an empty NAME",
        ),
        pytest.param(
            "layout.gpu0",
            "node",
            "unknown-annotation",
            f"there is no such annotation, expected one of {KNOWN}",
            id="a NAME where none belongs",
        ),
        pytest.param(
            "layout.",
            "node",
            "unknown-annotation",
            f"there is no such annotation, expected one of {KNOWN}",
            id="a dot where none belongs",
        ),
    ],
)
def test_a_bad_annotation_has_no_effect_and_is_a_finding(key: str, value: str, code: str, message: str) -> None:
    flags = Config(policy=Policy.STRICT, numa_nodes={"gpu0": 0})

    assert with_annotations(flags, {f"pcie-numa-hook/{key}": value}) == (
        flags,
        (Finding(Severity.WARNING, code, f"pcie-numa-hook/{key}", message),),
    )


def test_findings_come_in_the_order_of_their_keys() -> None:
    annotations = {f"pcie-numa-hook/{key}": "?" for key in ("mode", "devices", "layout")}

    assert [finding.subject for finding in with_annotations(Config(), annotations)[1]] == sorted(annotations)


def test_as_many_names_as_are_allowed() -> None:
    names = [f"gpu{n}" for n in range(1024)]

    assert from_flags({"exclude": ",".join(names)}).exclude == frozenset(names)


def test_the_highest_node_and_a_name_with_an_equals_sign() -> None:
    assert from_flags({"numa-node": ["a=b=1023"]}).numa_nodes == {"a=b": 1023}
