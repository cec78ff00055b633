"""One VM start as KubeVirt plays it: call, read back through libvirt, lose what its structs lose, call again."""

import json
from typing import Any

import pytest

from hook import domain
from hook.config import Config, Layout
from hook.define import Outcome, define_domain
from hook.render import plan_json
from tests.scenario import NAMES, Scenario
from tests.system.kubevirt import Family, for_libvirt, next_call, placeholders, plan, reprint
from tests.system.oracle import Oracle


def run(scenario: Scenario, xml: bytes, layout: Layout) -> Outcome:
    outcome = define_domain(xml, scenario.vmi, lambda: scenario.sysfs, Config(layout=layout))
    assert outcome.error is None

    return outcome


def topology(outcome: Outcome) -> dict[str, Any]:
    """All that must be equal on every call: controllers with targets, places, predicted addresses."""
    shown = plan_json(outcome) | {"changed": None}
    for device in shown["devices"]:
        if device["action"] == "left":  # libvirt gives it an address between the calls
            device["guest_address"] = None
    own = [c for c in domain.parse(outcome.xml).guest.controllers if c.is_own]
    bridge = max((c.index for c in own if c.model == "pcie-to-pci-bridge"), default=0)
    shown["controllers"] = sorted(
        (
            # libvirt chooses the addresses of the PCI bridge and its port on the first call.
            {"index": c.index, "model": c.model} if c.index <= bridge else
            {"index": c.index, "model": c.model, "at": str(c.address), "bus_nr": c.bus_nr, "cell": c.cell,
             "off": c.is_hotplug_off}
            for c in own
        ),
        key=lambda c: c["index"],
    )  # fmt: skip
    return shown


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("name", NAMES)
def test_every_call_of_a_vm_start_gives_the_same_topology(
    oracle: Oracle, name: str, family: Family, layout: Layout
) -> None:
    scenario = Scenario(name)
    start = plan(scenario.xml(), json.loads(scenario.vmi), family)
    first = placeholders(scenario.xml(), start.placeholders, family)
    outcome = run(scenario, first, layout)
    wanted = topology(outcome)

    for call in range(2, start.calls + 1):
        given = next_call(first, outcome.xml, family, call, oracle, extra_ports=start.extra_ports)
        outcome = run(scenario, given, layout)
        assert wanted == topology(outcome), f"call {call}"

    oracle.define(for_libvirt(outcome.xml))


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("name", NAMES)
def test_an_answer_that_lost_what_kubevirt_loses_is_repaired(name: str, family: Family) -> None:
    scenario = Scenario(name)
    answer = run(scenario, scenario.xml(), Layout.NODE)
    repaired = run(scenario, reprint(answer.xml, family), Layout.NODE)

    assert topology(answer) == topology(repaired)
