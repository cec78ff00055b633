"""The use case: domain XML, VMI and host in, answer out, one place for the failure policy; it opens no files itself."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from hook import domain as domain_xml_format
from hook import sysfs, vmi
from hook.address import PciAddress
from hook.clique import with_cliques
from hook.config import Config, Mode, Policy, with_annotations
from hook.domain import MAX_DOMAIN_XML_BYTES, ParsedDomain
from hook.errors import Finding, HookError, Severity, StrictRefusal
from hook.host import HostTopology
from hook.nccl import with_topology_file
from hook.plan import Action, DevicePlan, Plan, make_plan, unchanged
from hook.sysfs import SysfsTree

__all__ = ["MAX_DOMAIN_XML_BYTES", "Outcome", "define_domain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The answer to one call, and what led to it."""

    xml: bytes  # the answer
    plan: Plan
    config: Config  # flags with annotations on top
    host: HostTopology
    domain_name: str  # of KubeVirt: NAMESPACE_NAME
    error: Exception | None = None  # an unexpected error inside the hook; xml is then the input

    def summary(self) -> str:
        """One line for the log."""
        if self.error is not None:
            return f"unexpected {type(self.error).__name__}: the domain is unchanged"
        counts = ", ".join(
            f"{count} {action}" for action in Action if (count := sum(d.action is action for d in self.plan.devices))
        )
        if self.config.mode is Mode.OBSERVE:
            verb = "would be changed (observe)" if self.plan.is_changed else "unchanged (observe)"
        else:
            verb = "changed" if self.plan.is_changed else "unchanged"
        buses = "".join(f"; cell {e.cell}: busNr {e.bus_nr}..{e.bus_nr + e.buses - 1}" for e in self.plan.expanders)
        file = "; topology file" if self.plan.fw_cfg else ""
        return f"domain {verb}, layout {self.plan.layout}: {counts or 'no devices'}{buses}{file}"

    def device_lines(self) -> tuple[str, ...]:
        """One line for each device, with the reason."""
        return tuple(_device_line(device) for device in self.plan.devices)


def _device_line(device: DevicePlan) -> str:
    where = f" at guest {device.place.guest_bdf}, cell {device.cell}" if device.place is not None else ""
    return f"{device.hostdev.name} ({device.hostdev.source}) {device.action}{where}: {device.reason}"


def define_domain(
    domain_xml: bytes, vmi_json: bytes | None, open_sysfs: Callable[[], SysfsTree], flags: Config
) -> Outcome:
    """Answer one OnDefineDomain call.

    vmi_json: None where there is no VMI (command line only).
    open_sysfs: called once, and only for a VM that has devices to place.

    Raises:
        HookError: the input cannot be used, or policy strict refuses the VM. Under best-effort
            nothing else fails: an unexpected error is in the outcome, beside the unchanged domain.
    """
    parsed: ParsedDomain | None = None
    config = flags
    try:
        parsed = domain_xml_format.parse(domain_xml)
        request = vmi.parse(vmi_json) if vmi_json is not None else vmi.VmiRequest()
        config, findings = with_annotations(flags, request.annotations)
        plan, host = _plan(parsed, request, config, findings, open_sysfs)
        xml = domain_xml if config.mode is not Mode.APPLY else domain_xml_format.apply(parsed, plan)
    except HookError:
        raise
    except Exception as error:  # the one broad except: a fault of the hook must not cost a VM
        fault = Finding(Severity.WARNING, "internal-error", "", f"{type(error).__name__}: {error}")
        if config.policy is Policy.STRICT and config.mode is Mode.APPLY:
            raise StrictRefusal([fault]) from error
        parsed = parsed or ParsedDomain.nothing(domain_xml)
        return Outcome(
            xml=domain_xml,
            plan=unchanged(parsed.guest, config, fault),
            config=config,
            host=HostTopology.empty(),
            domain_name=parsed.name,
            error=error,
        )
    if config.policy is Policy.STRICT and config.mode is Mode.APPLY and plan.warnings:
        raise StrictRefusal(plan.warnings)
    return Outcome(xml=xml, plan=plan, config=config, host=host, domain_name=parsed.name)


def _plan(
    parsed: ParsedDomain,
    request: vmi.VmiRequest,
    config: Config,
    findings: tuple[Finding, ...],
    open_sysfs: Callable[[], SysfsTree],
) -> tuple[Plan, HostTopology]:
    sources = [hostdev.source for hostdev in parsed.guest.hostdevs]
    host = HostTopology.empty()
    if sources and config.mode is not Mode.OFF:
        host = sysfs.read_host(
            open_sysfs(),
            [source for source in sources if isinstance(source, PciAddress)],
            [source for source in sources if isinstance(source, str)],
        )
    plan = make_plan(
        parsed.guest,
        host,
        config,
        pci_addressed=request.pci_addressed,
        is_on_root_complex=request.is_on_root_complex,
    )
    plan = with_topology_file(plan, parsed.guest, host, config)
    plan = with_cliques(plan, parsed.guest, host, config)
    return replace(plan, findings=(*findings, *plan.findings)), host
