"""Knows which Kubernetes objects become VMs, and where each keeps what the hook needs; must not judge it.

Sources: the KubeVirt API (kubevirt.io/v1, instancetype.kubevirt.io/v1beta1, pool.kubevirt.io, template.kubevirt.io)
and pkg/instancetype/apply of KubeVirt v1.9.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from hook.manifest import Field, Manifest, Path


class Role(StrEnum):
    """What an object gives to a VM."""

    VM = "vm"  # a whole VMI, or the template of one
    INSTANCETYPE = "instancetype"
    PREFERENCE = "preference"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    role: Role
    annotations: Path  # those that the VMI gets
    spec: Path  # of the VMI; or of the instance type or preference
    references: Path | None = None  # where `instancetype` and `preference` are named


def _vm(*way: str) -> _Kind:
    """A VM whose VMI template is below `way`."""
    template = (*way, "template")
    return _Kind(role=Role.VM, annotations=(*template, "metadata", "annotations"), spec=(*template, "spec"))


def _named_vm(*way: str) -> _Kind:
    found = _vm(*way)
    return _Kind(role=found.role, annotations=found.annotations, spec=found.spec, references=way)


_INSTANCETYPE = _Kind(role=Role.INSTANCETYPE, annotations=("spec", "annotations"), spec=("spec",))
_PREFERENCE = _Kind(role=Role.PREFERENCE, annotations=("spec", "annotations"), spec=("spec",))
_KINDS = {
    ("kubevirt.io", "VirtualMachine"): _named_vm("spec"),
    ("kubevirt.io", "VirtualMachineInstance"): _Kind(
        role=Role.VM, annotations=("metadata", "annotations"), spec=("spec",)
    ),
    ("kubevirt.io", "VirtualMachineInstanceReplicaSet"): _vm("spec"),
    ("pool.kubevirt.io", "VirtualMachinePool"): _named_vm("spec", "virtualMachineTemplate", "spec"),
    ("template.kubevirt.io", "VirtualMachineTemplate"): _named_vm("spec", "virtualMachine", "spec"),
    ("instancetype.kubevirt.io", "VirtualMachineInstancetype"): _INSTANCETYPE,
    ("instancetype.kubevirt.io", "VirtualMachineClusterInstancetype"): _INSTANCETYPE,
    ("instancetype.kubevirt.io", "VirtualMachinePreference"): _PREFERENCE,
    ("instancetype.kubevirt.io", "VirtualMachineClusterPreference"): _PREFERENCE,
}
KIND_NAMES = tuple(kind for _, kind in _KINDS)

# Fields of a VMI's spec that an instance type decides too, and where it has them.
DEDICATED_CPUS = ("domain", "cpu", "dedicatedCpuPlacement")
NUMA = ("domain", "cpu", "numa")
GUEST_MAPPING = (*NUMA, "guestMappingPassthrough")
HUGEPAGES = ("domain", "memory", "hugepages")
GPUS = ("domain", "devices", "gpus")
HOST_DEVICES = ("domain", "devices", "hostDevices")
IN_INSTANCETYPE: dict[Path, Path] = {
    DEDICATED_CPUS: ("cpu", "dedicatedCPUPlacement"),
    NUMA: ("cpu", "numa"),
    GUEST_MAPPING: ("cpu", "numa", "guestMappingPassthrough"),
    HUGEPAGES: ("memory", "hugepages"),
    GPUS: ("gpus",),
    HOST_DEVICES: ("hostDevices",),
}
# Every instance type decides these, so a VM that names one must not have them.
ALWAYS_INSTANCETYPES: tuple[Path, ...] = (
    ("domain", "cpu", "sockets"),
    ("domain", "cpu", "cores"),
    ("domain", "cpu", "threads"),
    ("domain", "memory", "guest"),
    ("domain", "resources", "requests", "cpu"),
    ("domain", "resources", "requests", "memory"),
    ("domain", "resources", "limits", "cpu"),
    ("domain", "resources", "limits", "memory"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """One object that is, or contributes to, a VM."""

    object: Field
    kind: str
    name: str
    role: Role
    annotations_path: Path  # from the object on
    spec: Field
    references: Field | None

    @property
    def annotations(self) -> Field:
        """The annotations that the VMI gets from it."""
        return self.object.at(*self.annotations_path)

    @property
    def namespace(self) -> str | None:
        """None: not said, or cluster-wide."""
        found = self.object.at("metadata", "namespace").value
        return found if isinstance(found, str) else None

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


def group_of(place: Field) -> str:
    """The API group of an object; empty for the core group, and where there is none."""
    version = place.at("apiVersion").raw
    return version.rpartition("/")[0] if isinstance(version, str) else ""


def templates(manifest: Manifest) -> tuple[Template, ...]:
    """The objects of a manifest that are, or contribute to, VMs; in their order."""
    found = []
    for place in manifest.objects():
        kind = place.at("kind").raw
        known = _KINDS.get((group_of(place), kind))
        if known is None:
            continue
        metadata = place.at("metadata")
        name = metadata.at("name").value or metadata.at("generateName").value
        found.append(
            Template(
                object=place,
                kind=kind,
                name=name if isinstance(name, str) else "without a name",
                role=known.role,
                annotations_path=known.annotations,
                spec=place.at(*known.spec),
                references=None if known.references is None else place.at(*known.references),
            )
        )
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """How a VM names an instance type or a preference."""

    place: Field
    kind: str
    name: str
    template: Template | None  # None: it is not among the manifests

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Vm:
    """A VM with what its instance type and preference give it."""

    template: Template
    instancetype: Reference | None
    preference: Reference | None

    @property
    def sources(self) -> tuple[Template, ...]:
        """Whose annotations the VMI gets; the first that has a key wins."""
        named = (self.instancetype, self.preference)
        return (self.template, *(one.template for one in named if one is not None and one.template is not None))

    @property
    def missing(self) -> tuple[Reference, ...]:
        """What it names and is not among the manifests."""
        named = (self.instancetype, self.preference)
        return tuple(one for one in named if one is not None and one.template is None)

    @property
    def has_unknown_instancetype(self) -> bool:
        """True when fields that the VM does not have may still be set."""
        return self.instancetype is not None and self.instancetype.template is None

    def annotation(self, key: str) -> Field:
        """The annotation as the VMI gets it."""
        for source in self.sources:
            found = source.annotations.at(key)
            if not found.is_absent:
                return found
        return self.template.annotations.at(key)

    def annotation_keys(self) -> tuple[str, ...]:
        """Every key that the VMI gets."""
        return tuple(dict.fromkeys(key for source in self.sources for key, _ in source.annotations.entries()))

    def field(self, path: Path) -> Field:
        """A field of the VMI's spec; where only the instance type has it, or could have it, that place."""
        own = self.template.spec.at(*path)
        if self.instancetype is None or self.instancetype.template is None or path not in IN_INSTANCETYPE:
            return own
        given = self.instancetype.template.spec.at(*IN_INSTANCETYPE[path])
        return own if given.is_absent and not own.is_absent else given

    def machine_type(self) -> Field:
        """The machine type; that of the preference where the VM has none."""
        own = self.template.spec.at("domain", "machine", "type")
        if own.is_absent and self.preference is not None and self.preference.template is not None:
            given = self.preference.template.spec.at("machine", "preferredMachineType")
            return own if given.is_absent else given
        return own


def vms(found: Sequence[Template]) -> tuple[Vm, ...]:
    """The VMs among templates, with the instance types and preferences that are among them too."""
    return tuple(
        Vm(
            template=template,
            instancetype=_reference(template, "instancetype", "VirtualMachineClusterInstancetype", found),
            preference=_reference(template, "preference", "VirtualMachineClusterPreference", found),
        )
        for template in found
        if template.role is Role.VM
    )


def _reference(template: Template, key: str, default_kind: str, found: Iterable[Template]) -> Reference | None:
    if template.references is None:
        return None
    place = template.references.at(key)
    if place.is_absent:
        return None
    kind, name = place.at("kind").value or default_kind, place.at("name").value
    # KubeVirt accepts the kind in any case and in the plural.
    known = {text.lower(): text for text in KIND_NAMES} | {f"{text.lower()}s": text for text in KIND_NAMES}
    kind = known.get(str(kind).lower(), str(kind))
    match = next(
        (
            one
            for one in found
            if (one.kind, one.name) == (kind, name)
            and (one.namespace is None or template.namespace in (None, one.namespace))
        ),
        None,
    )
    # Without a name KubeVirt asks the volume that inferFromVolume names.
    return Reference(place=place, kind=kind, name=str(name or "of its volume"), template=match)
