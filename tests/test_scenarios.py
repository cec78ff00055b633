"""The main job on all 20 scenarios: whole answers, whole plans, nothing else touched, KubeVirt's own answer."""

import json

import pytest
from lxml import etree

from hook import domain
from hook.config import Config
from hook.define import Outcome, define_domain
from hook.guest import MARKER, GuestDomain, Model
from hook.plan import Action
from hook.render import plan_json
from tests.golden import check
from tests.scenario import NAMES, UNCHANGED, Scenario


def run(scenario: Scenario, xml: bytes) -> Outcome:
    outcome = define_domain(xml, scenario.vmi, lambda: scenario.sysfs, Config())
    assert outcome.error is None

    return outcome


@pytest.fixture(params=NAMES)
def scenario(request: pytest.FixtureRequest) -> Scenario:
    return Scenario(request.param)


def test_answer_and_plan_are_as_recorded(scenario: Scenario) -> None:
    outcome = run(scenario, scenario.xml())

    check(f"scenarios/{scenario.name}.xml", outcome.xml.decode())
    check(f"scenarios/{scenario.name}.plan.json", json.dumps(plan_json(outcome), indent=2) + "\n")


def test_every_placed_device_has_a_reason_and_a_predicted_address(scenario: Scenario) -> None:
    devices = run(scenario, scenario.xml()).plan.devices
    bdfs = [device.place.guest_bdf for device in devices if device.place is not None]

    assert all(device.reason for device in devices)
    assert len(bdfs) == len(set(bdfs))
    assert [device.place is not None for device in devices] == [d.action is Action.PLACED for d in devices]


def test_scenarios_without_work_get_their_bytes_back() -> None:
    same = [name for name in NAMES if run(Scenario(name), Scenario(name).xml()).xml == Scenario(name).xml()]

    assert same == list(UNCHANGED)


def bare(xml: bytes) -> str:
    """The document in C14N without what the hook may touch: its own controllers, the addresses of hostdevs."""
    root = etree.fromstring(xml, etree.XMLParser(remove_blank_text=True))
    for devices in root.findall("devices"):
        for controller in devices.findall("controller[@type='pci']"):
            if any(alias.get("name", "").startswith(MARKER) for alias in controller.findall("alias")):
                devices.remove(controller)
    for hostdev in (*root.findall("devices/hostdev"), *root.findall("devices/interface[@type='hostdev']")):
        for address in hostdev.findall("address"):
            hostdev.remove(address)
    return etree.canonicalize(etree.tostring(root, encoding="unicode"))


def test_nothing_but_own_controllers_and_hostdev_addresses_differs(scenario: Scenario) -> None:
    assert bare(scenario.xml()) == bare(run(scenario, scenario.xml()).xml)


@pytest.mark.parametrize("call", ["", "call1", "call2", "call3"])
def test_a_second_pass_changes_nothing(scenario: Scenario, call: str) -> None:
    if not scenario.has(call):
        return  # this scenario has fewer calls: KubeVirt's own rule, see scenarios/README.md
    once = run(scenario, scenario.xml(call))
    twice = run(scenario, once.xml)

    assert once.xml == twice.xml
    assert plan_json(once) | {"changed": False} == plan_json(twice)


def cells_of(guest: GuestDomain) -> dict[str, int | None]:
    """The NUMA cell of every device that is behind an expander, by alias."""
    by_index = {controller.index: controller for controller in guest.controllers}
    cells: dict[str, int | None] = {}
    for hostdev in guest.hostdevs:
        address = hostdev.address
        while address is not None and (controller := by_index.get(address.bus)) is not None:
            if controller.model == Model.EXPANDER:
                cells[hostdev.alias or ""] = controller.cell
            address = controller.address
    return cells


# KubeVirt refuses these VMs; the hook starts them with a finding, which is what best-effort means.
REFUSED_BY_KUBEVIRT = ("cpuless-node-device", "nodes-1-3-of-4-stray", "numa-node-minus-1", "sriov-guest-address")
# KubeVirt places more: both GPUs behind cell 0, though the only cell is made of CPUs of both host
# nodes. The hook says that no cell stands for one node, and leaves the VM as it is.
SPANNING_CELL = "dedicated-no-passthrough"
# KubeVirt's gate overrides the user's wish to have everything on pcie.0; the hook obeys it.
ROOT_COMPLEX = "root-complex-annotation"


def test_kubevirt_agrees_on_the_cell_of_every_device() -> None:
    differing = {}
    missing = []
    for name in NAMES:
        scenario = Scenario(name)
        if not scenario.has("gate-on"):
            missing.append(name)
            continue
        theirs = cells_of(domain.parse(scenario.xml("gate-on")).guest)
        ours = cells_of(domain.parse(run(scenario, scenario.xml()).xml).guest)
        if ours != theirs:
            differing[name] = (ours, theirs)

    assert tuple(missing) == REFUSED_BY_KUBEVIRT
    assert differing == {
        SPANNING_CELL: ({}, {"ua-gpu-gpu0": 0, "ua-gpu-gpu1": 0}),
        ROOT_COMPLEX: ({}, {"ua-gpu-gpu0": 0, "ua-gpu-gpu1": 1}),
        # KubeVirt places no mdevs.
        "two-node-mdev-vgpu": (
            {"ua-hostdevice-nvme0": 1, "ua-gpu-vgpu0": 0, "ua-gpu-vgpu1": 1},
            {"ua-hostdevice-nvme0": 1},
        ),
    }


@pytest.mark.parametrize("name", NAMES)
def test_kubevirts_own_placement_is_kept(name: str) -> None:
    scenario = Scenario(name)
    if not scenario.has("gate-on"):
        return  # KubeVirt refuses this VM, see REFUSED_BY_KUBEVIRT
    outcome = run(scenario, scenario.xml("gate-on"))
    before = cells_of(domain.parse(scenario.xml("gate-on")).guest)
    after = cells_of(domain.parse(outcome.xml).guest)

    assert before.items() <= after.items() or name == ROOT_COMPLEX
    assert [f for f in outcome.plan.findings if f.code in ("wrong-node", "expander-without-node")] == []


def test_both_layers_agree_on_call_2_of_kubevirts_own_answer() -> None:
    scenario = Scenario("two-node-4gpu-4sriov")
    outcome = run(scenario, scenario.xml("gate-on.call2"))

    assert outcome.xml == scenario.xml("gate-on.call2")
