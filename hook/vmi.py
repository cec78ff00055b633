"""Reads the few VMI fields that the hook obeys; must not validate the rest of the VMI."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hook.errors import VmiError

# KubeVirt puts every device on pcie.0 itself (pkg/virt-launcher/virtwrap/converter, v1.0-v1.9).
ROOT_COMPLEX_ANNOTATION = "kubevirt.io/placePCIDevicesOnRootComplex"


@dataclass(frozen=True, slots=True, kw_only=True)
class VmiRequest:
    """What the user asked for in the VMI."""

    annotations: Mapping[str, str] = field(default_factory=dict)  # metadata.annotations
    pci_addressed: frozenset[str] = frozenset()  # spec.domain.devices.interfaces[].name with a pciAddress

    @property
    def is_on_root_complex(self) -> bool:
        """True when the user wants every device on pcie.0."""
        return self.annotations.get(ROOT_COMPLEX_ANNOTATION, "").lower() == "true"


def parse(vmi_json: bytes) -> VmiRequest:
    """Parse the VMI as KubeVirt sends it to hooks (JSON of kubevirt.io/v1 VirtualMachineInstance).

    Raises:
        VmiError: the bytes are not a JSON object.
    """
    try:
        document = json.loads(vmi_json)
    except (ValueError, RecursionError) as error:
        text = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise VmiError(f"cannot read the VMI: {text}, expected JSON") from None
    if not isinstance(document, dict):
        raise VmiError(f"cannot read the VMI: found a JSON {type(document).__name__}, expected an object")
    return request_of(document)


def request_of(document: Mapping[str, Any]) -> VmiRequest:
    """Take the fields from a VMI document; what has another type than KubeVirt's API says is ignored."""
    annotations = _mapping(_mapping(document.get("metadata")).get("annotations"))
    devices = _mapping(_mapping(_mapping(document.get("spec")).get("domain")).get("devices"))
    interfaces = devices.get("interfaces")
    return VmiRequest(
        annotations={str(key): value for key, value in annotations.items() if isinstance(value, str)},
        pci_addressed=frozenset(
            str(interface["name"])
            for interface in (interfaces if isinstance(interfaces, list) else ())
            if isinstance(interface, dict) and interface.get("pciAddress") and "name" in interface
        ),
    )


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
