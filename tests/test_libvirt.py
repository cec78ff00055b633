"""Two generations of a real libvirt define every answer and read it back as planned."""

from dataclasses import replace

import pytest
from lxml import etree

from hook import domain
from hook.config import Config, Layout
from hook.define import define_domain
from hook.guest import Controller, GuestAddress, GuestDomain, Model
from tests.scenario import NAMES, Scenario
from tests.system.kubevirt import for_libvirt
from tests.system.oracle import Oracle, OracleRefused
from tests.test_cases import CASES, run


def read_back(oracle: Oracle, xml: bytes) -> GuestDomain:
    return domain.parse(oracle.define(for_libvirt(xml))).guest


def others(xml: bytes) -> dict[str, GuestAddress]:
    """Where everything is that the hook does not move: all devices but PCI controllers and hostdevs."""
    found: dict[str, GuestAddress] = {}
    for element in etree.fromstring(xml).iterfind("devices/*"):
        address = domain._guest_address(element)[0]
        kind, alias, target = element.get("type"), element.find("alias"), element.find("target")
        if address is None or "hostdev" in (element.tag, kind) or (element.tag, kind) == ("controller", "pci"):
            continue
        name = alias.get("name") if alias is not None else target.get("dev") if target is not None else None
        found["/".join(word for word in (str(element.tag), kind, element.get("index"), name) if word)] = address
    return found


def free_ports(guest: GuestDomain) -> int:
    """Root ports of pcie.0 without anything behind them."""
    used = {e.address.bus for e in guest.endpoints if e.address} | {
        c.address.bus for c in guest.controllers if c.address
    }
    ports = [c for c in guest.controllers if c.model == Model.ROOT_PORT and c.address and c.address.bus == 0]
    return sum(port.index not in used for port in ports)


# libvirt refuses these inputs before the hook has touched them: more devices than there are ports, no such
# emulator here, one device twice, attributes that are no numbers.
REFUSED_BEFORE = ("too-many-devices", "one-device-twice", "s390x", "odd-numbers", "hostile-addresses")


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("name", NAMES)
def test_libvirt_reads_back_what_was_planned(oracle: Oracle, name: str, layout: Layout) -> None:
    scenario = Scenario(name)
    outcome = define_domain(scenario.xml(), scenario.vmi, lambda: scenario.sysfs, Config(layout=layout))
    guest = read_back(oracle, outcome.xml)

    planned = {d.hostdev.alias: (d.place.address, d.place.is_multifunction) for d in outcome.plan.devices if d.place}
    actual = {h.alias: (h.address, h.is_multifunction) for h in guest.hostdevs if h.alias in planned}
    assert planned == actual

    own = {c.index: c for c in guest.controllers if c.is_own}
    assert {c.index: with_address(c, own[c.index]) for c in outcome.plan.controllers} == own


def with_address(planned: Controller, actual: Controller) -> Controller:
    """The planned controller; the PCI bridge and its port have no address, libvirt chooses them."""
    if planned.address is not None:
        return planned
    return replace(planned, address=actual.address, is_multifunction=actual.is_multifunction)


# In libvirt's order these come after the hostdevs, and move into the ports that the hostdevs leave:
# see hook/slots.py, first_index.
BEHIND_HOSTDEVS = ("memballoon", "rng", "input/tablet", "video")


@pytest.mark.parametrize("call", ["", "call1"])
@pytest.mark.parametrize("name", NAMES)
def test_every_other_device_stays_where_it_is_without_the_hook(oracle: Oracle, name: str, call: str) -> None:
    scenario = Scenario(name)
    if not scenario.has(call):
        return  # this VM has four NICs: KubeVirt adds no placeholders
    outcome = define_domain(scenario.xml(call), scenario.vmi, lambda: scenario.sysfs, Config())
    without, with_hook = (oracle.define(for_libvirt(xml)) for xml in (scenario.xml(call), outcome.xml))

    moved = {key for key, address in others(without).items() if others(with_hook)[key] != address}
    assert {key for key in moved if not key.startswith(BEHIND_HOSTDEVS)} == set()
    assert free_ports(domain.parse(with_hook).guest) >= free_ports(domain.parse(without).guest)


@pytest.mark.parametrize("name", CASES)
def test_a_case_that_libvirt_defines_stays_one_and_its_devices_stay(oracle: Oracle, name: str) -> None:
    case = CASES[name]
    try:
        without = oracle.define(for_libvirt(case.xml))
    except OracleRefused:
        assert name in REFUSED_BEFORE
        return
    assert name not in REFUSED_BEFORE
    outcome = run(case)
    with_hook = oracle.define(for_libvirt(outcome.xml))

    guest = domain.parse(with_hook).guest
    placed = {d.hostdev.key: d.place.address for d in outcome.plan.devices if d.place and outcome.xml != case.xml}
    by_source = {h.source: h.address for h in guest.hostdevs}
    assert placed == {
        d.hostdev.key: by_source[d.hostdev.source] for d in outcome.plan.devices if d.hostdev.key in placed
    }
    moved = {key for key, address in others(without).items() if others(with_hook)[key] != address}
    assert {key for key in moved if not key.startswith(BEHIND_HOSTDEVS)} == set()


def test_the_oracle_can_refuse(oracle: Oracle) -> None:
    scenario = Scenario("two-node-2gpu")
    outcome = define_domain(scenario.xml(), scenario.vmi, lambda: scenario.sysfs, Config())

    with pytest.raises(OracleRefused, match="not present in the domain's <cpu><numa> array"):
        oracle.define(for_libvirt(outcome.xml.replace(b"<node>1</node>", b"<node>7</node>")))
