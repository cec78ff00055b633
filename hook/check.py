"""Says of manifests whether the hook will do anything for each VM, and what is missing; must not read files.

What KubeVirt does with a field is its own code's word (v1.0 to v1.9); what the hook does with an annotation is that of
hook.config, and with `args` that of hook.arguments.
"""

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from hook.address import PciAddress
from hook.arguments import add_arguments, policy_flags
from hook.config import ANNOTATION_PREFIX, Config, Devices, Mode, from_flags, with_annotations
from hook.errors import ConfigError, Severity
from hook.host import HostTopology, PciFunction
from hook.manifest import Field, Manifest, Open, Path, path_text
from hook.plan import can_hold_expanders
from hook.sidecars import ANNOTATION, Sidecar, is_hook, is_placeholder, parse
from hook.templates import (
    ALWAYS_INSTANCETYPES,
    DEDICATED_CPUS,
    GPUS,
    GUEST_MAPPING,
    HOST_DEVICES,
    HUGEPAGES,
    IN_INSTANCETYPE,
    NUMA,
    Role,
    Template,
    Vm,
    group_of,
    templates,
    vms,
)
from hook.vmi import ROOT_COMPLEX_ANNOTATION

_ARCHITECTURES = {"amd64": "x86_64", "arm64": "aarch64", "s390x": "s390x"}
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_GATES = ("spec", "configuration", "developerConfiguration", "featureGates")
_PERMITTED = ("spec", "configuration", "permittedHostDevices")
_ALWAYS_NEEDED = ("Sidecar", "CPUManager")
_OLD_GATES = ("GPU", "NUMA")  # always on since v1.4
_TEXT_LIMIT = 80


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that can be wrong; docs/manifests.md has a section for each code."""

    code: str
    severity: Severity
    stops: bool  # True: the hook does nothing then, or the VM does not start


RULES = {
    rule.code: rule
    for rule in (
        # the sidecar
        Rule("no-sidecar", Severity.WARNING, stops=True),
        Rule("misplaced-annotation", Severity.WARNING, stops=False),
        Rule("annotation-type", Severity.WARNING, stops=True),
        Rule("bad-sidecars", Severity.WARNING, stops=True),
        Rule("unknown-sidecar-key", Severity.WARNING, stops=False),
        Rule("sidecar-twice", Severity.WARNING, stops=False),
        Rule("bad-flag", Severity.WARNING, stops=True),
        Rule("placeholder-image", Severity.INFO, stops=False),
        # the policy
        Rule("unknown-annotation", Severity.WARNING, stops=False),
        Rule("bad-annotation", Severity.WARNING, stops=False),
        Rule("unknown-name", Severity.WARNING, stops=False),
        # the VM
        Rule("no-devices", Severity.WARNING, stops=True),
        Rule("no-dedicated-cpus", Severity.WARNING, stops=True),
        Rule("no-guest-mapping", Severity.WARNING, stops=True),
        Rule("no-hugepages", Severity.WARNING, stops=True),
        Rule("unsupported-machine", Severity.WARNING, stops=True),
        Rule("root-complex", Severity.WARNING, stops=True),
        Rule("user-address", Severity.WARNING, stops=False),
        Rule("duplicate-key", Severity.WARNING, stops=False),
        # instance types and preferences
        Rule("not-given", Severity.INFO, stops=False),
        Rule("instancetype-conflict", Severity.WARNING, stops=True),
        Rule("annotation-conflict", Severity.WARNING, stops=True),
        # the cluster
        Rule("missing-gate", Severity.WARNING, stops=True),
        Rule("not-permitted", Severity.WARNING, stops=True),
        Rule("cpu-manager", Severity.WARNING, stops=True),
        Rule("memory-manager", Severity.WARNING, stops=False),
        Rule("topology-manager", Severity.WARNING, stops=False),
        # the host
        Rule("no-such-node", Severity.WARNING, stops=False),
        Rule("no-such-device", Severity.WARNING, stops=False),
        Rule("too-few-cpus", Severity.WARNING, stops=True),
        Rule("too-few-devices", Severity.WARNING, stops=True),
        Rule("unknown-node", Severity.WARNING, stops=False),
        Rule("one-node-host", Severity.INFO, stops=False),
        Rule("cpus-fit-one-node", Severity.INFO, stops=False),
    )
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One rule that a manifest breaks."""

    rule: Rule
    subject: str  # `VirtualMachine two-gpus`
    file: str
    line: int
    field: str  # path of the field from the document on
    found: str
    expected: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the hook will do for one object."""

    subject: str
    file: str
    line: int
    acts: bool | None  # None: the manifests do not say
    text: str
    devices: tuple[str, ...]  # NAMEs of what is passed through


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was found, in the order of files and lines."""

    verdicts: tuple[Verdict, ...]
    problems: tuple[Problem, ...]
    needs: tuple[tuple[str, str], ...]  # where, what: the cluster's side that no manifest of these shows

    @property
    def is_fine(self) -> bool:
        """True when there is nothing to put right; notes do not count."""
        return all(problem.rule.severity is Severity.INFO for problem in self.problems)


@dataclass(frozen=True, slots=True)
class _Device:
    """One device that a VM asks for."""

    name: str
    place: Field
    resource: str | None  # the name that a device plugin offers; None for SR-IOV networks and DRA
    gate: str | None  # the feature gate that it needs
    is_maybe_gpu: bool = True


def check(manifests: Sequence[Manifest], host: HostTopology | None = None, image: str | None = None) -> Report:
    """Check manifests that belong together: VMs, their instance types and preferences, the cluster's configuration.

    host: what the VMs will run on, if known.
    image: the hook's image, when its repository is not called pcie-numa-hook.
    """
    found = [template for manifest in manifests for template in templates(manifest)]
    run = _Run(templates=found, vms=vms(found), host=host, image=image)
    run.cluster([place for manifest in manifests for place in manifest.objects()])
    for template in found:
        run.duplicates(template)
        run.annotations(template)
    for vm in run.vms:
        run.vm(vm)
    for template in found:
        if template.role is not Role.VM:
            run.contribution(template)
    files = {manifest.file: index for index, manifest in enumerate(manifests)}
    return Report(
        verdicts=tuple(sorted(run.verdicts, key=lambda verdict: (files[verdict.file], verdict.line))),
        problems=tuple(
            sorted(
                dict.fromkeys(run.problems),
                key=lambda problem: (files[problem.file], problem.line, problem.rule.code, problem.field),
            )
        ),
        needs=tuple(run.needs),
    )


def _shown(place: Field) -> str:
    """A value in a message."""
    value = place.value
    if value is None:
        return "nothing"
    text = f"{value!r}" if isinstance(value, str) else _json(value)
    return text if len(text) <= _TEXT_LIMIT else f"{text[:_TEXT_LIMIT]}…"


def _json(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_json(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_json(one) for one in value) + "]"
    return str(value)


class _Refusing(argparse.ArgumentParser):
    """A parser that raises instead of ending the program."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _flags(args: Sequence[str]) -> Config:
    """The policy of a sidecar's `args`.

    Raises:
        ConfigError: serve would end with status 2.
    """
    parser = _Refusing(add_help=False)
    add_arguments(parser)
    return from_flags(policy_flags(parser.parse_args(args)))


@dataclass(slots=True)
class _Run:
    templates: Sequence[Template]
    vms: Sequence[Vm]
    host: HostTopology | None
    image: str | None
    problems: list[Problem] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    needs: list[tuple[str, str]] = field(default_factory=list)
    stops: list[tuple[object, str]] = field(default_factory=list)  # what it is about, code
    missing: set[str] = field(default_factory=set)  # gates and resources that the cluster does not have
    resources: Mapping[str, tuple[str, ...]] | None = None  # vendor:device of permitted PCI devices; None: not given

    def _report(self, code: str, subject: object, place: Field, expected: str, found: str | None = None) -> None:
        if RULES[code].stops:
            self.stops.append((subject, code))
        self.problems.append(
            Problem(
                rule=RULES[code],
                subject=str(subject),
                file=place.file,
                line=place.line,
                field=str(place),
                found=_shown(place) if found is None else found,
                expected=expected,
            )
        )

    # Every object.

    def duplicates(self, template: Template) -> None:
        """Keys that are there twice."""
        for place in template.object.duplicates():
            self._report("duplicate-key", template, place, "each key once; the last one counts", "the key again")

    def annotations(self, template: Template) -> None:
        """What an object's own annotations say, whether it becomes a VM by itself or not."""
        right = (*template.object.path, *template.annotations_path)
        for place in template.object.walk():
            key = place.path[-1]
            if _is_hooks(key) and place.path[:-1] != right:
                self._report(
                    "misplaced-annotation",
                    template,
                    place,
                    f"it in {path_text(right)}",
                    f"it in {path_text(place.path[:-1])}, where no VMI gets it",
                )
        if not template.annotations.is_absent and not isinstance(template.annotations.raw, dict):
            self._report("annotation-type", template, template.annotations, "a mapping of texts")
        for _, place in template.annotations.entries():
            if not isinstance(place.raw, str):
                self._report("annotation-type", template, place, "a text: put it in quotes", _typed(place))
        self._policy(template)
        self._sidecars(template)

    def _policy(self, template: Template) -> None:
        given = {key: str(place.value) for key, place in template.annotations.entries() if _is_known(place)}
        for finding in with_annotations(Config(), given)[1]:
            place = template.annotations.at(finding.subject)
            # `… expected one of …` of an unknown key, `'x' is not one of …` of a bad value.
            self._report(finding.code, template, place, re.split("expected | is not ", finding.message)[-1])

    def _sidecars(self, template: Template) -> None:
        place = template.annotations.at(ANNOTATION)
        try:
            sidecars = _entries(place)
        except ValueError as error:
            found, _, expected = str(error).rpartition(", expected ")
            self._report("bad-sidecars", template, place, expected, found)
            return
        for sidecar in sidecars:
            for key in sidecar.unknown:
                known = "one of image, imagePullPolicy, command, args, configMap, pvc; KubeVirt ignores others"
                self._report("unknown-sidecar-key", template, place, known, f"the key {key!r}")
        own = [sidecar for sidecar in sidecars if is_hook(sidecar, self.image)]
        if len(own) > 1:
            self._report("sidecar-twice", template, place, "the hook once", f"the hook {len(own)} times")
        for sidecar in own:
            if is_placeholder(sidecar.image):
                self._report(
                    "placeholder-image", template, place, "an image of a registry that you use", repr(sidecar.image)
                )
            try:
                _flags(sidecar.args)
            except ConfigError as error:
                self._report("bad-flag", template, place, "flags of serve; it ends with status 2", str(error))

    # VMs.

    def vm(self, vm: Vm) -> None:
        """One VM, with what its instance type and preference give it."""
        devices = self._devices(vm)
        own = self._own_sidecar(vm)
        is_sidecar_open = isinstance(vm.annotation(ANNOTATION).value, Open)
        if own is None and not devices and not vm.has_unknown_instancetype and not is_sidecar_open:
            self._conclude(vm, acts=False, text="nothing to do: it has no passed-through device", devices=devices)
            return
        for reference in vm.missing:
            what = "devices, CPUs and annotations" if reference is vm.instancetype else "annotations"
            self._report(
                "not-given", vm.template, reference.place, f"its manifest among the files: it may decide {what}"
            )
        if own is None and not vm.missing and not is_sidecar_open:
            self._no_sidecar(vm)
        config, _ = self._config(vm, own)
        self._conflicts(vm)
        if not devices and not vm.has_unknown_instancetype:
            self._report(
                "no-devices",
                vm.template,
                vm.field(GPUS),
                "gpus, hostDevices, or an interface with sriov: without one the sidecar has nothing to do",
            )
        else:
            self._domain(vm, config, devices)
            self._host(vm, config, devices)
        self._judge(vm, config, devices, is_unknown=bool(vm.missing) or is_sidecar_open, has_sidecar=own is not None)

    def _own_sidecar(self, vm: Vm) -> Sidecar | None:
        try:
            sidecars = _entries(vm.annotation(ANNOTATION))
        except ValueError:
            return None  # reported for the object that has it
        return next((sidecar for sidecar in sidecars if is_hook(sidecar, self.image)), None)

    def _no_sidecar(self, vm: Vm) -> None:
        place = vm.annotation(ANNOTATION)
        try:
            images = [sidecar.image for sidecar in _entries(place)]
        except ValueError:
            return
        is_misplaced = any(
            problem.rule.code == "misplaced-annotation"
            and problem.subject == str(vm.template)
            and problem.field.endswith(f"[{ANNOTATION}]")
            for problem in self.problems
        )
        if is_misplaced:
            self.stops.append((vm.template, "misplaced-annotation"))
            return
        found = f"only the images {', '.join(map(repr, images))}" if images else "nothing"
        self._report("no-sidecar", vm.template, place, "an entry whose image is called pcie-numa-hook", found)

    def _config(self, vm: Vm, own: Sidecar | None) -> tuple[Config, bool]:
        try:
            config = _flags(own.args if own is not None else ())
        except ConfigError:
            config = Config()
        given = {key: vm.annotation(key) for key in vm.annotation_keys()}
        texts = {key: str(place.value) for key, place in given.items() if _is_known(place)}
        return with_annotations(config, texts)[0], len(texts) == len(given)

    def _conflicts(self, vm: Vm) -> None:
        """What KubeVirt refuses because the VM and its instance type both decide it."""
        if vm.instancetype is None:
            return
        for path in ALWAYS_INSTANCETYPES:
            place = vm.template.spec.at(*path)
            if not place.is_absent and place.value != 0:
                expected = f"nothing: {vm.instancetype} decides it, and KubeVirt refuses both"
                self._report("instancetype-conflict", vm.template, place, expected)
        template = vm.instancetype.template
        if template is None:
            return
        for path in (DEDICATED_CPUS, NUMA, HUGEPAGES, GPUS, HOST_DEVICES):
            own, given = vm.template.spec.at(*path), template.spec.at(*IN_INSTANCETYPE[path])
            if own.value and not given.is_absent:
                expected = f"it in one place: {template} has it in {given.file}:{given.line}, and KubeVirt refuses both"
                self._report("instancetype-conflict", vm.template, own, expected)
        for key, given in template.annotations.entries():
            own = vm.template.annotations.at(key)
            if not own.is_absent and own.value != given.value:
                expected = f"{_shown(given)} as in {template} ({given.file}:{given.line}), or the key in one place"
                self._report("annotation-conflict", vm.template, own, expected)

    def _domain(self, vm: Vm, config: Config, devices: Sequence[_Device]) -> None:
        self._numa(vm.template, {path: vm.field(path) for path in (DEDICATED_CPUS, GUEST_MAPPING, HUGEPAGES)}, vm)
        machine, architecture = vm.machine_type(), vm.template.spec.at("architecture")
        arch = _ARCHITECTURES.get(str(architecture.value or ""), architecture.value)
        place = architecture if machine.is_absent else machine
        types = [str(machine.value or {"x86_64": "q35", "aarch64": "virt"}.get(str(arch), "q35"))]
        if not isinstance(place.value, Open) and not any(
            can_hold_expanders(one, types[0]) for one in ([str(arch)] if arch else ["x86_64", "aarch64"])
        ):
            self._report("unsupported-machine", vm.template, place, "q35 on amd64 or virt on arm64")
        root_complex = vm.annotation(ROOT_COMPLEX_ANNOTATION)
        if str(root_complex.value).lower() == "true":
            self._report("root-complex", vm.template, root_complex, "nothing: with it KubeVirt puts all on pcie.0")
        for interface in vm.template.spec.at("domain", "devices", "interfaces").items():
            address = interface.at("pciAddress")
            if not interface.at("sriov").is_absent and address.value:
                self._report("user-address", vm.template, address, "nothing: the hook leaves what the user placed")
        self._names(vm, config, devices)

    def _numa(self, subject: object, places: Mapping[Path, Field], vm: Vm | None) -> None:
        """What makes guest cells that stand for host nodes."""
        expected: dict[Path, tuple[str, str]] = {
            DEDICATED_CPUS: ("no-dedicated-cpus", "true"),
            GUEST_MAPPING: ("no-guest-mapping", "{}: it makes guest cells that stand for host nodes"),
            HUGEPAGES: ("no-hugepages", "a pageSize: KubeVirt refuses guestMappingPassthrough without huge pages"),
        }
        for path, place in places.items():
            # A VM's own false or null does not count where an instance type that is not here may say more.
            is_there = place.value is True if path == DEDICATED_CPUS else isinstance(place.value, dict)
            if is_there or isinstance(place.value, Open) or (vm is not None and vm.has_unknown_instancetype):
                continue
            code, wanted = expected[path]
            self._report(code, subject, place, wanted)

    def _names(self, vm: Vm, config: Config, devices: Sequence[_Device]) -> None:
        """NAMEs in the policy that mean nothing."""
        names = {device.name for device in devices}
        for name in sorted({*config.exclude, *config.numa_nodes} - names):
            place = self._place_of(vm, name)
            try:
                address = PciAddress.parse(name)
            except ValueError:
                is_known = vm.has_unknown_instancetype or _UUID.fullmatch(name) is not None
                if not is_known:
                    wanted = f"one of {', '.join(sorted(names))}, or a host address such as 0000:3b:00.0"
                    self._report("unknown-name", vm.template, place, wanted, repr(name))
                continue
            if self.host is not None and address not in self.host.functions:
                self._report("no-such-device", vm.template, place, "an address of the host at --sysfs", repr(name))
        for name, node in sorted(config.numa_nodes.items()):
            if self.host is not None and node not in self.host.nodes:
                known = ", ".join(map(str, sorted(self.host.nodes))) or "none"
                self._report(
                    "no-such-node", vm.template, self._place_of(vm, name), f"a node of the host at --sysfs: {known}"
                )

    def _place_of(self, vm: Vm, name: str) -> Field:
        """The annotation that names a device; the sidecar's where a flag does."""
        own, exclude = (vm.annotation(ANNOTATION_PREFIX + key) for key in (f"numa-node.{name}", "exclude"))
        if not own.is_absent:
            return own
        is_excluded = isinstance(exclude.value, str) and name in (part.strip() for part in exclude.value.split(","))
        return exclude if is_excluded else vm.annotation(ANNOTATION)

    def _devices(self, vm: Vm) -> tuple[_Device, ...]:
        found = []
        for path, gate in ((GPUS, "GPU"), (HOST_DEVICES, "HostDevices")):
            for place in vm.field(path).items():
                resource = place.at("deviceName").value
                is_dra = not place.at("claimName").is_absent
                found.append(
                    _Device(
                        name=str(place.at("name").value or place),
                        place=place,
                        resource=resource if isinstance(resource, str) else None,
                        gate=(f"{gate}sWithDRA" if gate == "GPU" else f"{gate}WithDRA") if is_dra else gate,
                    )
                )
        found += [
            _Device(
                name=str(place.at("name").value or place), place=place, resource=None, gate=None, is_maybe_gpu=False
            )
            for place in vm.template.spec.at("domain", "devices", "interfaces").items()
            if not place.at("sriov").is_absent
        ]
        return tuple(found)

    def _judge(
        self, vm: Vm, config: Config, devices: Sequence[_Device], *, is_unknown: bool, has_sidecar: bool
    ) -> None:
        stops = {code for subject, code in self.stops if subject is vm.template or self._reaches(code, subject, vm)}
        wanted = {*_ALWAYS_NEEDED, *(d.gate for d in devices), *(d.resource for d in devices)}
        if wanted & self.missing:
            stops |= {"missing-gate" if gate in _gates(devices) else "not-permitted" for gate in wanted & self.missing}
        meant = [
            device.name
            for device in devices
            if device.name not in config.exclude
            and (device.is_maybe_gpu or config.devices is not Devices.GPU)
            and not device.place.at("pciAddress").value
        ]
        names = ", ".join(meant) or ("nothing" if devices else "what its instance type passes through")
        policy = f"layout {config.layout}, policy {config.policy}"
        if stops:
            self._conclude(vm, acts=False, text=f"nothing will be placed: {', '.join(sorted(stops))}", devices=devices)
        elif config.mode is Mode.OFF:
            self._conclude(vm, acts=False, text="the hook is switched off by mode", devices=devices)
        elif is_unknown:
            what = " and ".join(map(str, vm.missing)) or "a parameter"
            decide = "decide" if len(vm.missing) > 1 else "decides"
            verb = "will place" if has_sidecar and not vm.has_unknown_instancetype else "may place"
            self._conclude(vm, acts=None, text=f"the hook {verb} {names}; {what} {decide} more", devices=devices)
        elif config.mode is Mode.OBSERVE:
            text = f"the hook will look at {names} and change nothing; {policy}"
            self._conclude(vm, acts=False, text=text, devices=devices)
        else:
            self._conclude(vm, acts=True, text=f"the hook will place {names}; {policy}", devices=devices)

    @staticmethod
    def _reaches(code: str, subject: object, vm: Vm) -> bool:
        """True when a problem of the cluster, or of an annotation that the VM gets from elsewhere, matters to it."""
        if isinstance(subject, Template):
            return subject in vm.sources and code in ("bad-sidecars", "bad-flag", "annotation-type")
        return code == "cpu-manager"

    def _conclude(self, vm: Vm, *, acts: bool | None, text: str, devices: Sequence[_Device]) -> None:
        place = vm.template.object
        names = tuple(device.name for device in devices)
        self.verdicts.append(Verdict(str(vm.template), place.file, place.line, acts, text, names))

    # Instance types and preferences.

    def contribution(self, template: Template) -> None:
        """An instance type or a preference by itself."""
        place = template.annotations.at(ANNOTATION)
        try:
            has_sidecar = any(is_hook(sidecar, self.image) for sidecar in _entries(place))
        except ValueError:
            has_sidecar = False
        users = [vm for vm in self.vms if template in vm.sources]
        gives = template.spec
        if template.role is Role.INSTANCETYPE and not users and has_sidecar:
            paths = (DEDICATED_CPUS, GUEST_MAPPING, HUGEPAGES)
            self._numa(template, {path: gives.at(*IN_INSTANCETYPE[path]) for path in paths}, None)
        text = (
            "VMs that name it get the sidecar" if has_sidecar else "VMs that name it get no sidecar of the hook from it"
        )
        self.verdicts.append(Verdict(str(template), template.object.file, template.object.line, None, text, ()))

    # The cluster.

    def cluster(self, objects: Sequence[Field]) -> None:
        """Hold the KubeVirt CR and kubelet configurations to what the VMs need; what is not here becomes a need."""
        devices = [device for vm in self.vms for device in self._devices(vm)]
        gates = sorted(_gates(devices))
        resources = sorted({device.resource for device in devices if device.resource is not None})
        kubevirts = [
            place for place in objects if (group_of(place), place.at("kind").raw) == ("kubevirt.io", "KubeVirt")
        ]
        for place in kubevirts:
            self._kubevirt(place, gates, resources)
        kubelets = [found for place in objects if (found := _kubelet(place)) is not None]
        for place in kubelets:
            self._kubelet(place)
        if not devices:
            return
        if not kubevirts:
            where = "KubeVirt CR"
            self.needs.append(
                (
                    f"{where}, {path_text(_GATES)}",
                    f"{', '.join(gates)}; before v1.4 also {', '.join(_OLD_GATES)}",
                )
            )
            if resources:
                self.needs.append((f"{where}, {path_text(_PERMITTED)}", ", ".join(resources)))
        if not kubelets:
            self.needs.append(("kubelet, cpuManagerPolicy", "static"))
            self.needs.append(("kubelet, memoryManagerPolicy", "Static"))
            self.needs.append(("kubelet, topologyManagerPolicy", "restricted or single-numa-node"))

    def _kubevirt(self, place: Field, gates: Sequence[str], resources: Sequence[str]) -> None:
        subject = f"KubeVirt {place.at('metadata', 'name').value or 'without a name'}"
        before = len(self.problems)
        given = [item.value for item in place.at(*_GATES).items()]
        for gate in gates:
            if gate not in given:
                self.missing.add(gate)
                self._report("missing-gate", subject, place.at(*_GATES), gate)
        permitted = place.at(*_PERMITTED)
        self.resources = {}
        for key in ("pciHostDevices", "mediatedDevices", "usb"):
            for item in permitted.at(key).items():
                name, selector = item.at("resourceName").value, item.at("pciVendorSelector").value
                selectors = (selector.lower(),) if isinstance(selector, str) else ()
                self.resources[str(name)] = (*self.resources.get(str(name), ()), *selectors)
        for resource in resources:
            if resource not in self.resources:
                self.missing.add(resource)
                self._report("not-permitted", subject, permitted, f"an entry whose resourceName is {resource}", "none")
        self._conclude_cluster(place, subject, is_fine=len(self.problems) == before)

    def _kubelet(self, place: Field) -> None:
        subject = "kubelet configuration"
        before = len(self.problems)
        for key, code, allowed in (
            ("cpuManagerPolicy", "cpu-manager", ("static",)),
            ("memoryManagerPolicy", "memory-manager", ("Static",)),
            ("topologyManagerPolicy", "topology-manager", ("restricted", "single-numa-node")),
        ):
            if place.at(key).value not in allowed:
                self._report(code, subject, place.at(key), " or ".join(allowed))
        self._conclude_cluster(place, subject, is_fine=len(self.problems) == before)

    def _conclude_cluster(self, place: Field, subject: str, *, is_fine: bool) -> None:
        text = "it has what the hook needs" if is_fine else "it does not have all that the hook needs"
        self.verdicts.append(Verdict(subject, place.file, place.line, None, text, ()))

    # The host.

    def _host(self, vm: Vm, config: Config, devices: Sequence[_Device]) -> None:
        if self.host is None:
            return
        counts = {node.id: len(node.cpus) for node in self.host.nodes.values() if node.cpus}
        place, vcpus = _vcpus(vm)
        cpus = place.at()
        if vcpus is not None and counts and vcpus > sum(counts.values()):
            expected = f"at most {sum(counts.values())}, the CPUs of the host at --sysfs"
            self._report("too-few-cpus", vm.template, cpus, expected, f"{vcpus} vCPUs")
        if len(counts) == 1:
            self._report(
                "one-node-host",
                vm.template,
                vm.template.spec,
                "two NUMA nodes with CPUs, or a layout that keeps bridges apart, for a difference that a guest can see",
                "one node with CPUs at --sysfs",
            )
        for resource in sorted({device.resource for device in devices if device.resource is not None}):
            wanted = [device for device in devices if device.resource == resource]
            functions = self._functions(resource)
            if not functions:
                if functions is not None:
                    self._few(vm, wanted, resource, 0)
                continue
            nodes = [found[0] for function in functions if (found := self.host.node_of(function.address)) is not None]
            overridden = {device.name for device in wanted} <= set(config.numa_nodes)
            if len(nodes) < len(functions) and not overridden:
                self._report(
                    "unknown-node",
                    vm.template,
                    wanted[0].place,
                    "a numa_node for each at --sysfs, or an annotation numa-node",
                    f"{len(functions) - len(nodes)} of {len(functions)} {resource} without a NUMA node",
                )
            if len(wanted) > len(functions):
                self._few(vm, wanted, resource, len(functions))
            elif (
                nodes
                and len(wanted) > max(map(nodes.count, nodes))
                and vcpus is not None
                and vcpus <= max(counts.values(), default=0)
            ):
                self._report(
                    "cpus-fit-one-node",
                    vm.template,
                    cpus,
                    f"more than {max(counts.values())} CPUs, so that every node gives some: "
                    f"{len(wanted)} {resource} are on several nodes, and a device of a node without a vCPU has no cell",
                    f"{vcpus} vCPUs",
                )

    def _few(self, vm: Vm, wanted: Sequence[_Device], resource: str, count: int) -> None:
        expected = f"at most {count}, which the host at --sysfs has"
        self._report("too-few-devices", vm.template, wanted[0].place, expected, f"{len(wanted)} {resource}")

    def _functions(self, resource: str) -> list[PciFunction] | None:
        """The host's functions that stand for a resource; None where the manifests do not say."""
        selectors = (self.resources or {}).get(resource, ())
        if not selectors or self.host is None:
            return None
        return [
            function
            for function in self.host.functions.values()
            if function.vendor is not None
            and function.device is not None
            and f"{function.vendor:04x}:{function.device:04x}" in selectors
        ]


def _is_hooks(key: object) -> bool:
    return isinstance(key, str) and (key == ANNOTATION or key.startswith(ANNOTATION_PREFIX))


def _is_known(place: Field) -> bool:
    """True for a text that no parameter decides."""
    return isinstance(place.value, str) and not isinstance(place.value, Open)


def _typed(place: Field) -> str:
    names = {bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "a mapping"}
    return f"{_shown(place)}, {names.get(type(place.raw), 'null')}"


def _entries(place: Field) -> tuple[Sidecar, ...]:
    """The sidecars of an annotation; nothing where it is absent or a parameter decides it."""
    return parse(place.value) if _is_known(place) else ()


def _gates(devices: Iterable[_Device]) -> set[str]:
    """The feature gates that VMs with these devices need, KubeVirt v1.4 and later."""
    return {*_ALWAYS_NEEDED, *(device.gate for device in devices if device.gate is not None)} - {*_OLD_GATES}


def _kubelet(place: Field) -> Field | None:
    """The kubelet's configuration in an object, OpenShift's included."""
    kind = (group_of(place), place.at("kind").raw)
    if kind == ("kubelet.config.k8s.io", "KubeletConfiguration"):
        return place
    if kind == ("machineconfiguration.openshift.io", "KubeletConfig"):
        return place.at("spec", "kubeletConfig")
    return None


def _vcpus(vm: Vm) -> tuple[Field, int | None]:
    """How many vCPUs a VM has, and where that is said; None when it is not said, or decided elsewhere."""
    if vm.instancetype is not None:
        if vm.instancetype.template is None:
            return vm.template.spec, None
        place = vm.instancetype.template.spec.at("cpu", "guest")
        return place, place.value if isinstance(place.value, int) else None
    cpu = vm.template.spec.at("domain", "cpu")
    given = [cpu.at(key).value for key in ("sockets", "cores", "threads")]
    if any(isinstance(value, int) for value in given):
        count = 1
        for value in given:
            count *= value if isinstance(value, int) and value > 0 else 1
        return cpu, count
    for kind in ("requests", "limits"):
        place = vm.template.spec.at("domain", "resources", kind, "cpu")
        if re.fullmatch(r"[0-9]+", str(place.value)):
            return place, int(place.value)
    return cpu, None


# What people and programs read.


def report_lines(report: Report) -> Iterable[str]:
    """A line for each problem as compilers write them, one for each VM, and what the cluster must have."""
    for problem in report.problems:
        where = f"{problem.file}:{problem.line}"
        what = f"{problem.field}: " if problem.field else ""
        yield (
            f"{where}: {problem.rule.severity} [{problem.rule.code}] {problem.subject}: {what}"
            f"found {problem.found}, expected {problem.expected}"
        )
    for verdict in report.verdicts:
        yield f"{verdict.file}:{verdict.line}: {verdict.subject}: {verdict.text}"
    if not report.verdicts and not report.problems:
        yield "nothing here becomes a VM"
    if report.needs:
        yield "The cluster must have, and these manifests do not show:"
        yield from (f"  {where}: {what}" for where, what in report.needs)


def report_json(report: Report) -> dict[str, Any]:
    """The report for programs."""
    return {
        "fine": report.is_fine,
        "objects": [
            {
                "file": verdict.file,
                "line": verdict.line,
                "object": verdict.subject,
                "acts": verdict.acts,
                "devices": list(verdict.devices),
                "summary": verdict.text,
            }
            for verdict in report.verdicts
        ],
        "findings": [
            {
                "severity": str(problem.rule.severity),
                "code": problem.rule.code,
                "object": problem.subject,
                "file": problem.file,
                "line": problem.line,
                "field": problem.field,
                "found": problem.found,
                "expected": problem.expected,
            }
            for problem in report.problems
        ],
        "cluster": [{"where": where, "expected": what} for where, what in report.needs],
    }
