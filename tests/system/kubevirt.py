"""What KubeVirt does to a domain XML around its hook calls; must not know what a hook changes.

A VM start calls OnDefineDomain one to three times, each time with what became of the last answer:

    call = placeholders(xml, count)               # call 1; count from plan()
    call = next_call(first, answer, family, 2, oracle)
    call = next_call(first, answer, family, 3, oracle)

Sources: KubeVirt's virt-launcher, SetDomainSpecStrWithHooks, WithNetworkIfacesResources,
allocateHotplugPorts and CountPCIDevices.  domain_spec says what is lost on the way.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from lxml import etree

from tests.system.domain_spec import (
    Family,
    parse,
    reprint,
    reprint_element,
    to_bytes,
)

__all__ = ["Family", "Plan", "after_libvirt", "for_libvirt", "next_call", "placeholders", "plan", "reprint"]

# What libvirt fills in on KubeVirt's own image, where this machine has another QEMU.
EMULATOR = "/usr/libexec/qemu-kvm"

_GIB = 1 << 30
_PLACEHOLDER = re.compile(r"placeholder-\d+")
# allocateHotplugPorts adds no port above this index (a slot of pcie.0 each, it says).
_LAST_PORT_INDEX = 31


class Definer(Protocol):
    def define(self, xml: bytes) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """How often one VM start calls the hook."""

    calls: int
    # Interfaces that are in call 1 only, to make libvirt add ports for them.
    placeholders: int
    # Root ports without an address that KubeVirt adds before the last call.
    extra_ports: int


def plan(xml: bytes, vmi: Mapping[str, Any], family: Family, *, early: bool = False) -> Plan:
    """The calls of a VM start whose converter output is xml.

    early: v1.6.0-v1.6.3 and v1.7.0-v1.7.1, which made all hotplug ports by placeholders.
    """
    annotations: Mapping[str, str] = vmi["metadata"].get("annotations", {})
    on_root_complex = annotations.get("kubevirt.io/placePCIDevicesOnRootComplex") == "true"
    interfaces = len(vmi["spec"]["domain"]["devices"].get("interfaces", []))
    domain = parse(xml)

    if family.since(Family.V1_9) and not _has_pcie(domain):
        return Plan(calls=1, placeholders=0, extra_ports=0)
    if early:
        if family is not Family.V1_6:
            raise ValueError(f"{family.value} has no such versions")
        count = 0 if on_root_complex else _free_ports(domain)
        return Plan(calls=1 + (count > 0), placeholders=count, extra_ports=0)

    count = 0 if on_root_complex or not interfaces else max(0, 4 - interfaces)
    if not family.since(Family.V1_6):
        return Plan(calls=1 + (count > 0), placeholders=count, extra_ports=0)
    slots = annotations.get("kubevirt.io/pci-interface-slot-count")
    if slots is not None:
        count = max(0, int(slots) - interfaces)
    extra = 0 if on_root_complex else max(0, _free_ports(domain) - count)
    last = family is Family.MAIN or extra > 0
    return Plan(calls=1 + (count > 0) + last, placeholders=count, extra_ports=extra)


def placeholders(xml: bytes, count: int, family: Family = Family.V1_9) -> bytes:
    """Call 1: the converter's output with that many placeholder interfaces."""
    if not count:
        return xml
    domain = parse(xml)
    devices = _devices(domain)
    interfaces = devices.findall("interface")
    if interfaces:
        position = devices.index(interfaces[-1]) + 1
    else:
        position = 1 if devices.find("emulator") is not None else 0
    # The converter gives all virtio devices of a VM the same flavour.
    models = [each.get("type", "") for each in devices.findall("interface/model")]
    models += [each.get("model", "") for each in devices]
    virtio = [model for model in models if model.startswith("virtio")]
    model = virtio[0] if virtio else "virtio-non-transitional"
    for number in range(count):
        interface = etree.Element("interface", type="ethernet")
        etree.SubElement(interface, "source")
        etree.SubElement(interface, "target", dev=f"placeholder-{number}", managed="no")
        etree.SubElement(interface, "model", type=model)
        if family.since(Family.V1_8):
            etree.SubElement(interface, "alias", name=f"placeholder-{number}")
        devices.insert(position + number, interface)
    return to_bytes(domain)


def next_call(
    first_call: bytes,
    answer: bytes,
    family: Family,
    call: int,
    oracle: Definer,
    *,
    extra_ports: int | None = None,
) -> bytes:
    """The input of that call (2 or 3), when the hook gave answer to the call before it.

    first_call: the input of call 1; it tells what is restored, and how many ports are added.
    extra_ports: as in Plan, where first_call alone does not tell (annotations of the VMI).

    Raises OracleRefused if libvirt does not define the answer, NotParsed if KubeVirt's struct
    cannot hold it: both fail the start of the VM.
    """
    original = parse(first_call)
    had_placeholders = _remove_placeholders(original)
    last = 3 if had_placeholders else 2
    if not 2 <= call <= last:
        raise ValueError(f"no call {call} after {had_placeholders} placeholders")

    if call < last:
        spec = parse(after_libvirt(to_bytes(original), answer, family, oracle))
        _replace_interfaces(_devices(spec), _devices(parse(first_call)))
        return to_bytes(spec)

    if not family.since(Family.V1_6):
        raise ValueError(f"{family.value} makes no call {call}")
    if extra_ports is None:
        extra_ports = max(0, _free_ports(original) - had_placeholders)
    if not extra_ports and family is not Family.MAIN:
        raise ValueError(f"{family.value} makes no call {call} without extra ports")
    # The struct still holds what was parsed from the last answer.
    spec = parse(reprint(answer, family))
    if family is Family.MAIN and not had_placeholders:
        _replace_devices(spec, _read_back(answer, family, oracle))
    _add_ports(_devices(spec), extra_ports)
    return to_bytes(spec)


def after_libvirt(xml: bytes, answer: bytes, family: Family, oracle: Definer) -> bytes:
    """The domain xml with the devices that libvirt made of the answer, as KubeVirt's struct holds them."""
    spec = parse(xml)
    _replace_devices(spec, _read_back(answer, family, oracle))
    return to_bytes(spec)


def for_libvirt(xml: bytes) -> bytes:
    """Make it definable, and convertible to a command line, by a libvirt on any machine.

    Changes nothing that has to do with PCI: controllers, addresses, guest cells, devices.
    """
    domain = parse(xml)
    # No KVM; the machine types of KubeVirt's QEMU; its path.
    domain.set("type", "qemu")
    os_type = domain.find("os/type")
    if os_type is not None:
        machine = re.sub(r"^(pc-q35|virt)-rhel.*", r"\1", os_type.get("machine", ""))
        os_type.set("machine", {"pc-q35": "q35"}.get(machine, machine))
    _remove(domain, "devices/emulator")
    # The host's CPU model and KVM's features: emulation has neither.
    cpu = domain.find("cpu")
    if cpu is not None:
        cpu.attrib.clear()
        cpu.set("mode", "maximum")
        for child in cpu:
            if child.tag not in ("topology", "numa", "maxphysaddr"):
                cpu.remove(child)
    _remove(domain, "features/kvm", "features/pvspinlock")
    # The nodes, CPUs and pages of a host that is not this one: conversion looks for them here.
    _remove(domain, "numatune", "cputune", "memoryBacking/hugepages")
    # libvirt 9 wants slots with it, and guest cells; KubeVirt gives slots="0" and may have no cell.
    _remove(domain, "maxMemory[@slots='0']")
    # Newer than both libvirts, which would drop it silently.
    _remove(domain, "iommufd")
    return to_bytes(domain)


def _read_back(answer: bytes, family: Family, oracle: Definer) -> etree._Element:
    """The <devices> of libvirt's inactive XML, after KubeVirt's struct."""
    inactive = parse(oracle.define(for_libvirt(answer)))
    devices = reprint_element(_devices(inactive), "Devices", family)
    emulator = devices.find("emulator")
    if emulator is not None:
        emulator.text = EMULATOR
    return devices


def _replace_devices(domain: etree._Element, devices: etree._Element) -> None:
    domain.replace(_devices(domain), devices)


def _replace_interfaces(devices: etree._Element, original: etree._Element) -> None:
    _remove(devices, "interface")
    position = 1 if devices.find("emulator") is not None else 0
    restored = [each for each in original.findall("interface") if not _is_placeholder(each)]
    devices[position:position] = restored


def _remove_placeholders(domain: etree._Element) -> int:
    found = [each for each in _devices(domain).findall("interface") if _is_placeholder(each)]
    for interface in found:
        _devices(domain).remove(interface)
    return len(found)


def _is_placeholder(interface: etree._Element) -> bool:
    target = interface.find("target")
    return target is not None and bool(_PLACEHOLDER.fullmatch(target.get("dev", "")))


def _add_ports(devices: etree._Element, count: int) -> None:
    controllers = devices.findall("controller")
    indexes = [int(each.get("index", "0")) for each in controllers if each.get("type") == "pci"]
    first = max(indexes, default=0) + 1
    position = devices.index(controllers[-1]) + 1 if controllers else len(devices)
    for index in range(first, min(first + count, _LAST_PORT_INDEX + 1)):
        port = etree.Element("controller", type="pci", index=str(index), model="pcie-root-port")
        devices.insert(position, port)
        position += 1


def _has_pcie(domain: etree._Element) -> bool:
    os_type = domain.find("os/type")
    machine = "" if os_type is None else os_type.get("machine", "")
    return machine.startswith(("q35", "pc-q35", "virt"))


def _free_ports(domain: etree._Element) -> int:
    """How many free ports KubeVirt wants, from v1.6 on."""
    memory = domain.findtext("memory") or "0"
    # Whatever its unit is; KubeVirt's converter always writes bytes.
    total, free = (16, 6) if int(memory) > 2 * _GIB else (8, 3)
    return max(total - sum(1 for _ in _pci_devices(_devices(domain))), free)


def _pci_devices(devices: etree._Element) -> Iterator[etree._Element]:
    """What KubeVirt counts as a PCI device."""
    roots = ("pci-root", "pcie-root", "pcie-expander-bus")
    for device in devices:
        target = device.find("target")
        match device.tag:
            case "interface" | "watchdog" | "rng" | "memballoon":
                counts = True
            case "hostdev":
                counts = device.get("type") == "pci"
            case "controller":
                counts = device.get("model") not in roots
            case "disk":
                counts = target is not None and target.get("bus") == "virtio"
            case "input":
                counts = device.get("bus") == "virtio"
            case _:
                counts = False
        address = device.find("address")
        if counts and (address is None or address.get("type", "") in ("", "pci")):
            yield device


def _devices(domain: etree._Element) -> etree._Element:
    devices = domain.find("devices")
    assert devices is not None
    return devices


def _remove(element: etree._Element, *paths: str) -> None:
    for path in paths:
        for found in element.findall(path):
            parent = found.getparent()
            assert parent is not None
            parent.remove(found)
