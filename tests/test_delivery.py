"""The topology file and the cliques on their way: through libvirt to QEMU's command line, and through KubeVirt's calls."""

import base64
import json
from collections.abc import Mapping

import pytest
from lxml import etree

from hook.config import Config, Extra, Layout, TopologyFile
from hook.define import Outcome, define_domain
from hook.nccl import CREDENTIAL, RAW_ENTRY
from hook.recording import parse_recording
from tests.build import host, hostdev, vm
from tests.scenario import NAMES, Scenario
from tests.system.kubevirt import Family, for_libvirt, next_call, placeholders, plan, reprint
from tests.system.oracle import Oracle
from tests.test_clique import ALL, FOUR, OTHERS, overrides
from tests.test_nccl import SMBIOS

BOTH = Config(topology_file=TopologyFile.NCCL, p2p_clique=Extra.AUTO)


def entries(xml: bytes) -> dict[str | None, str | None]:
    """The hook's entries by name."""
    found = etree.fromstring(xml).iterfind("sysinfo[@type='fwcfg']/entry")
    return {entry.get("name"): entry.text for entry in found}


def smbios(xml: bytes) -> list[tuple[str | None, str | None]]:
    """What KubeVirt says of the system, which must stay."""
    return [(e.get("name"), e.text) for e in etree.fromstring(xml).iterfind("sysinfo[@type='smbios']/*/entry")]


def answer(xml: bytes, config: Config = BOTH) -> Outcome:
    outcome = define_domain(xml, None, lambda: parse_recording(host(FOUR)), config)
    assert outcome.error is None

    return outcome


def fw_cfg(argv: list[str]) -> dict[str, str]:
    """QEMU's entries; QEMU takes two commas for one."""
    words = [argv[n + 1] for n, word in enumerate(argv) if word == "-fw_cfg"]
    found = (word.removeprefix("name=").partition(",string=") for word in words)
    return {name: text.replace(",,", ",") for name, _, text in found}


def cliques(argv: list[str]) -> Mapping[str, int | None]:
    """Of each vfio-pci device, by id."""
    devices = [json.loads(word) for word in argv if word.startswith('{"driver":"vfio-pci"')]
    return {device["id"]: device.get("x-nv-gpudirect-clique") for device in devices}


@pytest.mark.parametrize("layout", Layout)
def test_both_reach_qemus_command_line(oracle: Oracle, layout: Layout) -> None:
    # KubeVirt asks for it whenever it writes a <sysinfo>.
    xml = vm(ALL, rest=SMBIOS + OTHERS).replace(b"</type>", b'</type><smbios mode="sysinfo"/>')
    outcome = answer(xml, Config(layout=layout, topology_file=TopologyFile.NCCL, p2p_clique=Extra.AUTO))
    argv = oracle.argv(for_libvirt(outcome.xml.replace(b"ua-default", b"ua-gpu-b")))

    lines = {line.entry: line.text for line in outcome.plan.fw_cfg}
    assert fw_cfg(argv) == lines
    assert list(lines) == [CREDENTIAL, RAW_ENTRY]
    assert base64.b64decode(lines[RAW_ENTRY]).startswith(b'<system version="1">')
    assert cliques(argv) == {"ua-gpu-a": 0, "ua-gpu-b": 0, "ua-gpu-c": 1, "ua-gpu-d": 1}
    assert "type=1,serial=1" in argv


def test_libvirt_keeps_both_and_what_was_there(oracle: Oracle) -> None:
    outcome = answer(vm(ALL, rest=SMBIOS + OTHERS.replace("ua-default", "ua-gpu-c")))
    inactive = oracle.define(for_libvirt(outcome.xml))

    assert entries(inactive) == entries(outcome.xml)
    assert overrides(inactive) == overrides(outcome.xml)
    assert smbios(inactive) == smbios(outcome.xml) != []


def test_a_vm_that_asks_for_neither_has_neither(oracle: Oracle) -> None:
    argv = oracle.argv(for_libvirt(answer(vm(ALL), Config()).xml))

    assert fw_cfg(argv) == {}
    assert set(cliques(argv).values()) == {None}


# KubeVirt's calls: its structs lose both, and the hook writes them again.


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("name", NAMES)
def test_every_call_of_a_vm_start_delivers_the_same(oracle: Oracle, name: str, family: Family) -> None:
    scenario = Scenario(name)
    start = plan(scenario.xml(), json.loads(scenario.vmi), family)
    first = placeholders(scenario.xml(), start.placeholders, family)

    def call(xml: bytes) -> Outcome:
        outcome = define_domain(xml, scenario.vmi, lambda: scenario.sysfs, BOTH)
        assert outcome.error is None
        assert smbios(outcome.xml) == smbios(xml)
        return outcome

    outcome = call(first)
    wanted = entries(outcome.xml)
    system = smbios(outcome.xml)
    for number in range(2, start.calls + 1):
        given = next_call(first, outcome.xml, family, number, oracle, extra_ports=start.extra_ports)
        outcome = call(given)
        assert (entries(outcome.xml), smbios(outcome.xml)) == (wanted, system), f"call {number}"

    assert entries(oracle.define(for_libvirt(outcome.xml))) == wanted


@pytest.mark.parametrize("family", Family)
def test_what_kubevirt_loses_is_written_again(family: Family) -> None:
    first = answer(vm(ALL, rest=SMBIOS))
    lost = reprint(first.xml, family)
    second = answer(lost)

    assert (entries(lost), overrides(lost)) == ({}, {})
    assert entries(second.xml) == entries(first.xml) != {}
    assert overrides(second.xml) == overrides(first.xml) != {}
    assert smbios(second.xml) == smbios(lost) == smbios(first.xml) != []


@pytest.mark.parametrize("family", Family)
def test_behind_kubevirts_sysinfo_it_would_take_its_type(family: Family) -> None:
    """Why it is written in front: the fault that this order avoids is real."""
    xml = vm(
        [hostdev("0000:43:00.0", "a")], rest=SMBIOS + '<sysinfo type="fwcfg"><entry name="opt/a/b">c</entry></sysinfo>'
    )

    assert smbios(reprint(xml, family)) == []


def test_some_scenario_has_a_file() -> None:
    """So that the comparison above compares something."""
    files = {}
    for name in NAMES:
        scenario = Scenario(name)
        outcome = define_domain(scenario.xml(), scenario.vmi, lambda scenario=scenario: scenario.sysfs, BOTH)  # type: ignore[misc]
        files[name] = len(outcome.plan.fw_cfg)

    assert sum(count == 2 for count in files.values()) > len(files) / 2
