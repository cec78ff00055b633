"""KubeVirt's whole sequence of calls, the guest that comes of it, and devices that are plugged in while it runs."""

import json

import pytest
from lxml import etree

from hook.address import PciAddress
from hook.config import Config, Layout
from hook.define import Outcome, define_domain
from tests.boot.conftest import Ask
from tests.boot.live import MORE_IMAGE, doubles, running
from tests.boot.report import differences, parse
from tests.scenario import Scenario
from tests.system.kubevirt import Family, next_call, placeholders, plan
from tests.system.oracle import Generation, Oracle

# Each once in both generations, and the one that is current with both.
STARTS: list[tuple[Family, Generation]] = [
    (Family.V1_0, "debian12"),
    (Family.V1_6, "debian13"),
    (Family.V1_8, "debian12"),
    (Family.V1_9, "debian13"),
    (Family.MAIN, "debian12"),
]
NIC = '<interface type="user"><mac address="52:54:00:00:00:77"/><model type="virtio"/></interface>'
DISK = (
    '<disk type="file" device="disk"><driver name="qemu" type="raw"/><source file="{}"/>'
    '<target dev="vdz" bus="virtio"/></disk>'
)


def last_answer(oracle: Oracle, scenario: Scenario, family: Family) -> Outcome:
    """Play all calls of a VM start."""

    def call(xml: bytes) -> Outcome:
        outcome = define_domain(xml, scenario.vmi, lambda: scenario.sysfs, Config(layout=Layout.SWITCH))
        assert outcome.error is None
        return outcome

    start = plan(scenario.xml(), json.loads(scenario.vmi), family)
    first = placeholders(scenario.xml(), start.placeholders, family)
    outcome = call(first)
    for number in range(2, start.calls + 1):
        outcome = call(next_call(first, outcome.xml, family, number, oracle, extra_ports=start.extra_ports))
    return outcome


def buses(xml: bytes) -> set[int]:
    """Indexes of the controllers above the two devices that were plugged in."""
    plugged = "devices/*[mac/@address='52:54:00:00:00:77' or target/@dev='vdz']/address/@bus"
    found = etree.fromstring(xml).xpath(plugged)
    assert isinstance(found, list)
    return {int(str(bus), 16) for bus in found}


@pytest.mark.parametrize(
    ("family", "generation"),
    [
        pytest.param(family, generation, marks=[] if family is Family.V1_8 else pytest.mark.boot)
        for family, generation in STARTS
    ],
)
def test_a_started_vm_is_as_planned_and_takes_more_devices_on_the_root_bus(
    ask: Ask, family: Family, generation: Generation
) -> None:
    oracle = ask(generation)
    outcome = last_answer(oracle, Scenario("two-node-4gpu-4sriov"), family)
    own = {controller.index for controller in outcome.plan.controllers}

    with running(oracle, outcome.xml, more=2) as it:
        before = parse(it.console(1, 120.0))
        it.guest.attach(NIC)
        it.guest.attach(DISK.format(it.inside / MORE_IMAGE))
        live = it.guest.live_xml()
        after = parse(it.console(2, 60.0), 1)

    assert differences(outcome, doubles(outcome), before) == []
    assert differences(outcome, doubles(outcome), after) == []
    assert len(buses(live)) == 2
    assert not own & buses(live)
    new: set[PciAddress] = set(after.topology.functions) - set(before.topology.functions)
    assert sorted((f.root, f.class_code) for f in map(after.topology.functions.__getitem__, new)) == [
        ("devices/pci0000:00", 0x010000),
        ("devices/pci0000:00", 0x020000),
    ]
