"""Puts the hook's annotations into manifests, where VMIs get them from; must not judge the rest."""

from collections.abc import Mapping

from hook.errors import ManifestError
from hook.manifest import Field, Manifest, Path, with_entries
from hook.sidecars import ANNOTATION, with_hook
from hook.templates import KIND_NAMES, Role, Template, templates


def annotate(manifest: Manifest, image: str | None, policy: Mapping[str, str]) -> bytes:
    """The manifest with the sidecar and the annotations of a policy; the very bytes where they are there already.

    Every VM gets them; where a file has none, every instance type and preference, for the VMs that will name them.
    Sidecars that are listed already stay, in their words.
    image: None: an entry of the hook keeps its image, and a new one gets a placeholder.
    policy: annotations, such as hook.config.to_annotations gives.

    Raises:
        ManifestError: nothing in it becomes a VM, or a place cannot be edited.
    """
    found = templates(manifest)
    vms = [template for template in found if template.role is Role.VM]
    if not found:
        raise ManifestError(
            f"cannot annotate {manifest.file}: nothing in it becomes a VM, expected one of {', '.join(KIND_NAMES)}"
        )
    changes: list[tuple[Field, Path, Mapping[str, str]]] = []
    for template in vms or found:
        entries = {ANNOTATION: _sidecars(template, image), **policy}
        changes.append((template.object, template.annotations_path, entries))
    return with_entries(manifest, changes)


def _sidecars(template: Template, image: str | None) -> str:
    place = template.annotations.at(ANNOTATION)
    if not place.is_absent and not isinstance(place.raw, str):
        raise ManifestError(
            f"cannot annotate {place.file}:{place.line}: {place} is no text, expected a JSON list in quotes"
        )
    try:
        return with_hook(place.raw or "", image)
    except ValueError as error:
        raise ManifestError(f"cannot annotate {place.file}:{place.line}: {place} is {error}") from None
