"""Groups GPUs whose traffic can stay below one host switch, for NVIDIA's driver; must not place anything.

The driver in a guest lets GPUs talk over PCIe only where it knows the switch or chipset, or where the hypervisor
says so: QEMU's `x-nv-gpudirect-clique` on vfio-pci. GPUs of one clique are told to be peers.
Sources: QEMU hw/vfio/pci-quirks.c (vfio_add_nv_gpudirect_cap), docs/nccl.md for the risks.
"""

from collections.abc import Sequence
from dataclasses import replace

from hook.address import PciAddress
from hook.config import Config, Extra, Mode
from hook.errors import Finding, Severity
from hook.guest import GuestDomain, Kind
from hook.host import HostTopology, PciFunction
from hook.locality import top_switch
from hook.plan import Action, DevicePlan, Plan

PROPERTY = "x-nv-gpudirect-clique"
MAX_CLIQUES = 16  # four bits of the capability

_NVIDIA = 0x10DE
_DISPLAY_CLASS = 0x03  # QEMU refuses every other base class, and then the VM does not start

_Member = tuple[DevicePlan, PciFunction]


def with_cliques(plan: Plan, guest: GuestDomain, host: HostTopology, config: Config) -> Plan:
    """The plan with a clique for each host switch that has several of the VM's GPUs below it."""
    if config.p2p_clique is Extra.OFF or config.mode is Mode.OFF:
        return plan
    groups = _groups(plan, host)
    findings: list[Finding] = []
    cliques: dict[str, int] = {}
    for number, (switch, members) in enumerate(groups):
        names = ", ".join(device.hostdev.name for device, _ in members)
        if number >= MAX_CLIQUES:
            why = f"there are {len(groups)} groups, and only {MAX_CLIQUES} cliques"
            findings.append(Finding(Severity.WARNING, "no-clique", names, why))
            continue
        for device, _ in members:
            if device.hostdev.alias is None:
                why = "it has no alias by which QEMU's properties can be set"
                findings.append(Finding(Severity.WARNING, "no-clique", device.hostdev.name, why))
            else:
                cliques[device.hostdev.alias] = number
        message = f"these GPUs share the host's switch {switch}: {names}"
        findings.append(Finding(Severity.INFO, "p2p-clique", f"clique {number}", message))
        if len({function.iommu_group for _, function in members} - {None}) > 1:
            findings.append(Finding(Severity.INFO, "acs-redirect", f"clique {number}", _ACS))
    if guest.has_raw_cliques or any(str(cliques.get(alias)) != value for alias, value in guest.cliques.items()):
        why = "the domain sets cliques of its own, and they are left as they are"
        return replace(plan, findings=(*plan.findings, Finding(Severity.INFO, "foreign-clique", "", why)))
    plan = replace(plan, findings=(*plan.findings, *findings), cliques=cliques)
    return replace(plan, is_changed=True) if cliques else plan


_ACS = (
    "these GPUs are in different IOMMU groups, so the host's ports send peer-to-peer traffic up to the root complex;"
    " it is slower than within the switch, and not every root complex sends it back"
)


def _groups(plan: Plan, host: HostTopology) -> Sequence[tuple[PciAddress, Sequence[_Member]]]:
    """The GPUs below each host switch that has several, by the switch's address."""
    below: dict[PciAddress, list[_Member]] = {}
    for device in plan.devices:
        function = device.function(host)
        if device.action is Action.EXCLUDED or function is None or not _is_candidate(device, function):
            continue
        switch = top_switch(function)
        if switch is not None:
            below.setdefault(switch, []).append((device, function))
    return [(switch, members) for switch, members in sorted(below.items()) if len(members) > 1]


def _is_candidate(device: DevicePlan, function: PciFunction) -> bool:
    return (
        device.hostdev.kind is Kind.PCI
        and function.vendor == _NVIDIA
        and function.base_class == _DISPLAY_CLASS
        and not function.is_virtual_function
    )
