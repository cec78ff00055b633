"""Cliques: which GPUs are told to be peers, what is said about it, and what stays in the domain."""

import re
from collections.abc import Mapping

import pytest
from lxml import etree

from hook.clique import MAX_CLIQUES
from hook.config import Config, Extra, Mode, Policy
from hook.define import Outcome, define_domain
from hook.errors import Finding, Severity, StrictRefusal
from hook.recording import parse_recording
from tests.build import host, hostdev, mdev, vm

AUTO = Config(p2p_clique=Extra.AUTO)
GPU = {"class": "0x030200", "vendor": "0x10de", "device": "0x2331", "numa_node": 0}
A, B, C, D = "0000:43:00.0", "0000:44:00.0", "0000:53:00.0", "0000:54:00.0"


def below(switch: int, device: str, port: int = 0) -> str:
    """Below a downstream port of the switch on that bus; the root port is on the bus before."""
    return (
        f"pci0000:{switch - 1:02x}/0000:{switch - 1:02x}:01.0/0000:{switch:02x}:00.0"
        f"/0000:{switch + 1:02x}:{port:02x}.0/{device}"
    )


# Two switches with two GPUs each.
FOUR = {below(0x41, A): GPU, below(0x41, B, 1): GPU, below(0x51, C): GPU, below(0x51, D, 1): GPU}
ALL = tuple(hostdev(source, name) for source, name in ((A, "a"), (B, "b"), (C, "c"), (D, "d")))


def run(devices: Mapping[str, object], xml: bytes, config: Config = AUTO, extra: str = "") -> Outcome:
    outcome = define_domain(xml, None, lambda: parse_recording(host(devices, extra=extra)), config)
    assert outcome.error is None

    return outcome


def said(outcome: Outcome) -> list[str]:
    return [str(f) for f in outcome.plan.findings if "clique" in f.code or f.code == "acs-redirect"]


def overrides(xml: bytes) -> dict[str | None, dict[str | None, str | None]]:
    """Properties by alias."""
    qemu = "{http://libvirt.org/schemas/domain/qemu/1.0}"
    return {
        device.get("alias"): {p.get("name"): p.get("value") for p in device.iter(f"{qemu}property")}
        for device in etree.fromstring(xml).iterfind(f"{qemu}override/{qemu}device")
    }


CLIQUE = "x-nv-gpudirect-clique"


def test_gpus_below_one_switch_are_a_clique() -> None:
    outcome = run(FOUR, vm(ALL))

    assert overrides(outcome.xml) == {
        "ua-gpu-a": {CLIQUE: "0"},
        "ua-gpu-b": {CLIQUE: "0"},
        "ua-gpu-c": {CLIQUE: "1"},
        "ua-gpu-d": {CLIQUE: "1"},
    }
    assert said(outcome) == [
        "info [p2p-clique] clique 0: these GPUs share the host's switch 0000:41:00.0: a, b",
        "info [p2p-clique] clique 1: these GPUs share the host's switch 0000:51:00.0: c, d",
    ]


def test_the_order_of_the_domain_does_not_matter() -> None:
    assert overrides(run(FOUR, vm(ALL[::-1])).xml) == overrides(run(FOUR, vm(ALL)).xml)


# GPUs that are in no clique: what is odd about the second one.
ALONE: dict[str, tuple[str, Mapping[str, object]]] = {
    "another switch": (below(0x51, C), GPU),
    "no switch": (f"pci0000:50/0000:50:01.0/{C}", GPU),
    "the root bus": (f"pci0000:40/{C}", GPU),
    "another maker": (below(0x41, C, 1), {**GPU, "vendor": "0x1002"}),
    "an audio function": (below(0x41, C, 1), {**GPU, "class": "0x040300"}),
    "an accelerator, which QEMU refuses": (below(0x41, C, 1), {**GPU, "class": "0x120000"}),
    "a VF": (below(0x41, C, 1), {**GPU, "physfn": A}),
}


@pytest.mark.parametrize("what", ALONE)
def test_a_gpu_without_a_peer_is_in_no_clique(what: str) -> None:
    path, attributes = ALONE[what]
    outcome = run({below(0x41, A): GPU, path: attributes}, vm([hostdev(A, "a"), hostdev(C, "c")]))

    assert overrides(outcome.xml) == {}
    assert b"qemu:override" not in outcome.xml
    assert said(outcome) == []


def test_a_vm_that_stays_as_it_is_without_cliques_stays_so_with_none() -> None:
    xml = vm([hostdev(A, "a")])
    outcome = run({below(0x41, A): {**GPU, "numa_node": -1}}, xml)

    assert (outcome.plan.is_changed, outcome.xml) == (False, xml)


def test_a_vgpu_is_in_no_clique() -> None:
    uuid = "c1d2e3f4-0000-4000-8000-000000000001"
    extra = f"bus/mdev/devices/{uuid} -> ../../../devices/{below(0x41, B, 1)}/{uuid}\n"
    outcome = run({below(0x41, A): GPU, below(0x41, B, 1): GPU}, vm([hostdev(A, "a"), mdev(uuid, "vgpu")]), extra=extra)

    assert overrides(outcome.xml) == {}


def test_an_excluded_gpu_is_in_no_clique() -> None:
    config = Config(p2p_clique=Extra.AUTO, exclude=frozenset({"b"}))

    assert list(overrides(run(FOUR, vm(ALL), config).xml)) == ["ua-gpu-c", "ua-gpu-d"]


def test_a_gpu_that_is_not_placed_can_be_in_a_clique() -> None:
    """Its place in the guest does not matter to the driver."""
    devices = {below(0x41, A): {**GPU, "numa_node": -1}, below(0x41, B, 1): {**GPU, "numa_node": -1}}

    assert list(overrides(run(devices, vm([hostdev(A, "a"), hostdev(B, "b")])).xml)) == ["ua-gpu-a", "ua-gpu-b"]


def test_ports_that_redirect_are_seen_by_iommu_groups() -> None:
    groups = [f"kernel/iommu_groups/{n}" for n in (7, 8)]
    paths = (below(0x41, A), below(0x41, B, 1))
    up = "../" * (paths[0].count("/") + 2)
    links = "".join(f"devices/{path}/iommu_group -> {up}{group}\n" for path, group in zip(paths, groups, strict=True))
    one = "".join(f"devices/{path}/iommu_group -> {up}{groups[0]}\n" for path in paths)
    devices = dict.fromkeys(paths, GPU)
    xml = vm([hostdev(A, "a"), hostdev(B, "b")])

    assert said(run(devices, xml, extra=links)) == [
        "info [p2p-clique] clique 0: these GPUs share the host's switch 0000:41:00.0: a, b",
        "info [acs-redirect] clique 0: these GPUs are in different IOMMU groups, so the host's ports send peer-to-peer "
        "traffic up to the root complex; it is slower than within the switch, and not every root complex sends it back",
    ]
    assert len(said(run(devices, xml, extra=one))) == 1
    assert overrides(run(devices, xml, extra=links).xml) == overrides(run(devices, xml, extra=one).xml)


def test_there_are_sixteen_cliques() -> None:
    sources = [(f"0000:{n:02x}:00.0", f"0000:{n + 1:02x}:00.0") for n in range(3, 3 + 18 * 5, 5)]
    devices = {below(int(a[5:7], 16) - 2, source, n): GPU for a, b in sources for n, source in enumerate((a, b))}
    names = [source for pair in sources for source in pair]
    xml = vm([hostdev(source, f"g{n}") for n, source in enumerate(names)])
    outcome = run(devices, xml)

    assert sorted({int(p[CLIQUE] or "") for p in overrides(outcome.xml).values()}) == list(range(MAX_CLIQUES))
    assert said(outcome)[-2:] == [
        "warning [no-clique] g32, g33: there are 18 groups, and only 16 cliques",
        "warning [no-clique] g34, g35: there are 18 groups, and only 16 cliques",
    ]
    with pytest.raises(StrictRefusal, match="there are 18 groups, and only 16 cliques"):
        run(devices, xml, Config(p2p_clique=Extra.AUTO, policy=Policy.STRICT))


def test_a_gpu_without_an_alias_cannot_be_named() -> None:
    outcome = run(FOUR, vm([hostdev(A), hostdev(B, "b")]))

    assert overrides(outcome.xml) == {"ua-gpu-b": {CLIQUE: "0"}}
    assert said(outcome) == [
        "warning [no-clique] 0000:43:00.0: it has no alias by which QEMU's properties can be set",
        "info [p2p-clique] clique 0: these GPUs share the host's switch 0000:41:00.0: 0000:43:00.0, b",
    ]


# The domain.

OTHERS = (
    '<qemu:override><qemu:device alias="ua-gpu-a"><qemu:frontend>'
    '<qemu:property name="x-req" type="bool" value="false"/></qemu:frontend></qemu:device>'
    '<qemu:device alias="ua-default"><qemu:frontend>'
    '<qemu:property name="rombar" type="unsigned" value="0"/></qemu:frontend></qemu:device></qemu:override>'
)


def test_other_overrides_stay() -> None:
    assert overrides(run(FOUR, vm(ALL[:2], rest=OTHERS)).xml) == {
        "ua-gpu-a": {"x-req": "false", CLIQUE: "0"},
        "ua-default": {"rombar": "0"},
        "ua-gpu-b": {CLIQUE: "0"},
    }


def test_the_property_is_an_unsigned_number_of_the_frontend() -> None:
    """libvirt: formatdomain, qemu:override; other types and places are refused."""
    xml = run(FOUR, vm(ALL[:2])).xml.decode()

    assert re.sub(r">\s+", ">", xml[xml.index("<qemu:override") : xml.index("</qemu:override>")]) == (
        "<qemu:override>"
        + "".join(
            f'<qemu:device alias="ua-gpu-{name}"><qemu:frontend>'
            f'<qemu:property name="{CLIQUE}" type="unsigned" value="0"/></qemu:frontend></qemu:device>'
            for name in "ab"
        )
    )


def test_the_command_line_of_others_stays() -> None:
    rest = '<qemu:commandline><qemu:arg value="-global"/><qemu:arg value="a.b=c"/></qemu:commandline>'
    outcome = run(FOUR, vm(ALL, rest=rest))

    assert rest.encode() in outcome.xml
    assert len(overrides(outcome.xml)) == 4


def test_a_namespace_that_is_not_there_is_declared() -> None:
    """KubeVirt declares it; an XML that went through its structs does not."""
    xml = vm(ALL).replace(b' xmlns:qemu="http://libvirt.org/schemas/domain/qemu/1.0"', b"")
    outcome = run(FOUR, xml)

    assert b'<qemu:override xmlns:qemu="http://libvirt.org/schemas/domain/qemu/1.0">' in outcome.xml
    assert overrides(outcome.xml) == overrides(run(FOUR, vm(ALL)).xml)


@pytest.mark.parametrize("rest", ["", OTHERS])
def test_a_second_time_changes_nothing(rest: str) -> None:
    first = run(FOUR, vm(ALL, rest=rest))
    second = run(FOUR, first.xml)

    assert second.xml == first.xml
    assert said(second) == said(first)


FOREIGN = {
    "another number": OTHERS.replace("x-req", CLIQUE).replace('"false"', '"5"').replace('"bool"', '"unsigned"'),
    "a GPU that has no peer": OTHERS.replace("rombar", CLIQUE),
    "on the command line": (
        f'<qemu:commandline><qemu:arg value="-set"/><qemu:arg value="device.ua-gpu-a.{CLIQUE}=0"/></qemu:commandline>'
    ),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_cliques_of_others_are_left(what: str) -> None:
    rest = FOREIGN[what]
    outcome = run(FOUR, vm(ALL, rest=rest))

    assert rest.encode() in outcome.xml
    assert outcome.plan.cliques == {}
    why = "the domain sets cliques of its own, and they are left as they are"
    assert outcome.plan.findings == (Finding(Severity.INFO, "foreign-clique", "", why),)


@pytest.mark.parametrize("config", [Config(), Config(p2p_clique=Extra.AUTO, mode=Mode.OFF)])
def test_it_is_off_unless_asked_for(config: Config) -> None:
    outcome = run(FOUR, vm(ALL), config)

    assert (overrides(outcome.xml), said(outcome)) == ({}, [])
