"""What holds for every VM on every host: each test's name is the property, tried on hundreds of random situations."""

import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lxml import etree

from hook import domain
from hook.config import Policy
from hook.define import Outcome
from hook.errors import Severity, StrictRefusal
from hook.guest import MARKER, Controller, GuestAddress, GuestDomain, Model
from hook.plan import Action
from hook.render import plan_json
from tests.strategies import Situation, examples, situations
from tests.system.domain_spec import Family
from tests.system.kubevirt import reprint
from tests.test_cases import CASES, Case, run
from tests.test_roundtrip import topology

ROOT = Path(__file__).parent.parent


@examples(120)
@given(situations(), st.randoms(use_true_random=False))
def test_the_answer_does_not_depend_on_the_order_in_which_the_host_lists_things(
    it: Situation, chance: random.Random
) -> None:
    lines = it.case.host.splitlines(keepends=True)
    chance.shuffle(lines)

    assert run(it.case).xml == run(replace(it.case, host="".join(lines))).xml


@examples(120)
@given(situations(), st.randoms(use_true_random=False))
def test_the_plan_does_not_depend_on_the_order_of_cells_pins_and_memnodes(it: Situation, chance: random.Random) -> None:
    root = etree.fromstring(it.case.xml)
    for parent in root.iterfind(".//numa"), root.iterfind("cputune"), root.iterfind("numatune"):
        for element in parent:
            element[:] = chance.sample(list(element), len(element))

    assert plan_json(run(it.case)) == plan_json(run(replace(it.case, xml=etree.tostring(root))))


def test_the_answer_does_not_depend_on_pythons_hash_seed() -> None:
    code = (
        "import hashlib, sys; sys.path.insert(0, '.')\n"
        "from tests.test_cases import CASES, run\n"
        "print(hashlib.sha256(b''.join(run(case).xml for case in CASES.values())).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "20")
    }

    assert len(digests) == 1


@examples(150)
@given(situations())
def test_a_second_pass_returns_the_very_bytes_of_the_first(it: Situation) -> None:
    once = run(it.case).xml

    assert run(replace(it.case, xml=once)).xml == once


@examples(150)
@given(situations(), st.sampled_from(Family))
def test_a_second_pass_repairs_what_kubevirt_lost_of_the_first(it: Situation, family: Family) -> None:
    start = replace(it.case, xml=reprint(it.case.xml, family))
    once = run(start)

    assert topology(once) == topology(run(replace(start, xml=reprint(once.xml, family))))


def without_what_may_change(xml: bytes, outcome: Outcome) -> str:
    """The canonical document without the hook's controllers, the addresses of its devices, and what options add."""
    root = etree.fromstring(xml)
    gone: list[etree._Element | None] = [element for element in root.iterfind("devices/controller") if is_own(element)]
    devices = [element for element in root.iterfind("devices/*") if not is_own(element)]  # as in the input
    gone += [devices[d.hostdev.key].find("address") for d in outcome.plan.devices if d.action is Action.PLACED]
    gone += root.iterfind("cpu/numa/cell/distances") if outcome.plan.distances else []
    gone += root.iterfind("cpu/maxphysaddr") if outcome.plan.is_maxphysaddr_added else []
    for element in gone:
        if element is not None and (parent := element.getparent()) is not None:
            parent.remove(element)
    return re.sub(r"\s+(?=<)", "", etree.canonicalize(etree.tostring(root, encoding="unicode"), with_comments=True))


def is_own(element: etree._Element) -> bool:
    alias = element.find("alias")
    return element.tag == "controller" and alias is not None and alias.get("name", "").startswith(MARKER)


@examples(150)
@given(situations())
def test_nothing_changes_but_own_controllers_and_the_addresses_of_placed_devices(it: Situation) -> None:
    outcome = run(it.case)

    assert without_what_may_change(it.case.xml, outcome) == without_what_may_change(outcome.xml, outcome)
    if not outcome.plan.is_changed:
        assert outcome.xml == it.case.xml


@examples(150)
@given(situations())
def test_every_device_is_placed_or_explained(it: Situation) -> None:
    outcome = run(it.case)
    plan = outcome.plan
    subjects = {f.subject for f in plan.findings if f.severity is Severity.WARNING}

    assert [d.hostdev for d in plan.devices] == list(domain.parse(it.case.xml).guest.hostdevs)
    for device in plan.devices:
        assert device.reason
        assert (device.place is not None) is (device.action is Action.PLACED)
        if device.action is Action.LEFT:
            assert {device.hostdev.name, ""} & subjects, device
        if device.action in (Action.PLACED, Action.KEPT):
            assert device.cell is not None or device.action is Action.KEPT


# What libvirt allows below each kind of controller: slots, functions.
_BELOW = {
    Model.EXPANDER: (range(32), range(8)),
    Model.ROOT_PORT: (range(1), range(8)),
    Model.UPSTREAM_PORT: (range(32), range(8)),
    Model.DOWNSTREAM_PORT: (range(1), range(8)),
}


def below(controllers: dict[int, Controller], index: int) -> Iterator[int]:
    """All controllers below one."""
    for other in controllers.values():
        if other.address is not None and other.address.bus == index:
            yield other.index
            yield from below(controllers, other.index)


def check_tree(before: GuestDomain, after: GuestDomain) -> None:
    """Nothing that the hook adds collides with anything, and every window is large enough."""
    indexes = [c.index for c in after.controllers]
    assert len(indexes) == len(set(indexes))
    assert max(indexes, default=0) <= 255
    own = {c.index: c for c in after.controllers if c.is_own}
    controllers = {c.index: c for c in after.controllers}
    addresses = places(after)
    assert len(addresses) - len(set(addresses)) <= len(places(before)) - len(set(places(before)))
    for address in (address for address in addresses if address.bus in own):
        slots, functions = _BELOW[Model(own[address.bus].model)]
        assert address.slot in slots
        assert address.function in functions
    windows = [
        range(c.bus_nr, c.bus_nr + 1 + sum(1 for _ in below(controllers, c.index)))
        for c in after.controllers
        if c.model == Model.EXPANDER and c.bus_nr is not None
    ]
    for number, window in enumerate(windows):
        assert all(window.stop <= other.start or other.stop <= window.start for other in windows[:number])
    for c in own.values():
        if c.model == Model.EXPANDER:
            assert c.address is not None
            assert c.address.bus == 0
            assert c.bus_nr is not None
            assert c.bus_nr + sum(1 for _ in below(controllers, c.index)) <= 255
            # pcie.0 can never reach it: each controller that is not below an expander is at most one bus.
            assert c.bus_nr > max(i for i in (*(controllers.keys() - own.keys()), 0))
            assert c.cell in {cell.id for cell in after.cells}


def places(guest: GuestDomain) -> list[GuestAddress]:
    """All addresses of a domain."""
    given = [controller.address for controller in guest.controllers] + [device.address for device in guest.endpoints]
    return [address for address in given if address is not None]


@examples(150)
@given(situations())
def test_indexes_slots_and_windows_are_valid(it: Situation) -> None:
    outcome = run(it.case)
    after = domain.parse(outcome.xml).guest

    check_tree(domain.parse(it.case.xml).guest, after)
    cells = {e.index: range(e.bus_nr, e.bus_nr + e.buses) for e in outcome.plan.expanders}
    of_cell = {e.index: e.cell for e in outcome.plan.expanders}
    for device in outcome.plan.devices:
        if device.place is not None:
            homes = [index for index, window in cells.items() if device.place.guest_bdf.bus in window]
            assert [of_cell[index] for index in homes] == [device.cell]


@examples(150)
@given(situations())
def test_strict_refuses_exactly_when_best_effort_has_a_finding_above_info(it: Situation) -> None:
    best_effort = run(it.case)
    strict = replace(it.case, flags={**it.case.flags, "policy": str(Policy.STRICT)})
    if best_effort.plan.warnings:
        with pytest.raises(StrictRefusal) as refusal:
            run(strict)
        assert refusal.value.findings == best_effort.plan.warnings
    else:
        assert run(strict).xml == best_effort.xml


@examples(150)
@given(situations())
def test_observe_makes_the_same_plan_and_changes_nothing(it: Situation) -> None:
    observed = run(replace(it.case, flags={**it.case.flags, "mode": "observe"}))

    assert observed.xml == it.case.xml
    assert observed.plan == run(it.case).plan


@examples(150)
@given(situations(), st.data())
def test_a_bigger_vm_loses_no_device_that_a_smaller_one_placed(it: Situation, data: st.DataObject) -> None:
    """Unless there is no room, and then a finding says so."""
    passed = [text for text in it.devices if "<source><address" in text]
    removed = data.draw(st.lists(st.sampled_from(passed), max_size=5, unique=True)) if passed else []
    small, large = run(it.without(removed).case), run(it.case)
    kept = {d.hostdev.source: d.cell for d in small.plan.devices if d.action is Action.PLACED}
    there = {d.hostdev.source: d.cell for d in large.plan.devices if d.action is Action.PLACED}
    if "no-room" not in {finding.code for finding in large.plan.findings}:
        assert kept.items() <= there.items()


@examples(150)
@given(situations())
def test_switched_off_the_hook_returns_the_very_bytes(it: Situation) -> None:
    assert run(replace(it.case, flags={**it.case.flags, "mode": "off"})).xml == it.case.xml


def test_a_taken_place_would_be_noticed() -> None:
    """The validator above can fail: a device on the place of another, and a window that is too small."""
    case: Case = CASES["gpu-with-audio-function"]
    answer = run(case).xml
    before = domain.parse(case.xml).guest
    for old, new in (
        (b'index="17"', b'index="18"'),
        (b'busNr="254"', b'busNr="255"'),
        (b'slot="0x1e"', b'slot="0x00"'),
    ):
        assert old in answer
        with pytest.raises(AssertionError):
            check_tree(before, domain.parse(answer.replace(old, new, 1)).guest)
    check_tree(before, domain.parse(answer).guest)
    assert GuestAddress(18, 0, 1) in {h.address for h in domain.parse(answer).guest.hostdevs}
