"""The annotation that names a VMI's sidecars: reads it, finds the hook in it, adds the hook; must not know manifests.

Source: KubeVirt pkg/hooks/hooks.go; a JSON list of objects, unknown keys ignored, keys in any case.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hook import __version__

ANNOTATION = "hooks.kubevirt.io/hookSidecars"
NAME = "pcie-numa-hook"
# The top domain `.example` belongs to nobody (RFC 2606).
PLACEHOLDER_IMAGE = f"registry.example/{NAME}:{__version__}"
_PLACEHOLDER = re.compile(r"[^/]*\.example(?::[0-9]+)?/")

_TEXTS = ("image", "imagePullPolicy")
_LISTS = ("command", "args")
_OBJECTS = {"configMap": ("name", "key", "hookPath"), "pvc": ("name", "volumePath", "sharedComputePath")}
KEYS = (*_TEXTS, *_LISTS, *_OBJECTS)


@dataclass(frozen=True, slots=True)
class Sidecar:
    """One entry of the list."""

    image: str  # empty: KubeVirt's own shim
    args: tuple[str, ...]
    unknown: tuple[str, ...]  # keys that KubeVirt ignores


def repository(image: str) -> str:
    """An image reference without tag and digest."""
    name = image.partition("@")[0]
    head, colon, tail = name.rpartition(":")
    return head if colon and "/" not in tail else name


def is_placeholder(image: str) -> bool:
    """True for an image that no registry can have."""
    return _PLACEHOLDER.match(image) is not None


def is_hook(sidecar: Sidecar, image: str | None) -> bool:
    """True for the hook's own entry: the repository is called pcie-numa-hook, or is that of `image`."""
    found = repository(sidecar.image)
    return found.rpartition("/")[2] == NAME or (image is not None and found == repository(image))


def parse(text: str) -> tuple[Sidecar, ...]:
    """Read the annotation's value.

    Raises:
        ValueError: KubeVirt could not read it; the text says what was found and expected.
    """
    return tuple(_sidecar(item, f"[{index}]") for index, item in enumerate(_list(text)))


def _list(text: str) -> list[Any]:
    try:
        items = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{text[:80]!r} ({error}), expected a JSON list such as {with_hook('', None)}") from None
    if not isinstance(items, list):
        raise ValueError(  # noqa: TRY004 (the caller asks about a text)
            f"a JSON {_kind(items)}, expected a list such as {with_hook('', None)}"
        )
    return items


def _kind(value: object) -> str:
    names = {dict: "object", list: "list", str: "text", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")


def _sidecar(item: object, place: str) -> Sidecar:
    if not isinstance(item, dict):
        raise ValueError(  # noqa: TRY004 (the caller asks about a text)
            f"a JSON {_kind(item)} at {place}, expected an object with the key image"
        )
    known = {key.lower(): key for key in KEYS}
    values = {known[key.lower()]: value for key, value in item.items() if key.lower() in known and value is not None}
    for key, value in values.items():
        is_fine = (
            isinstance(value, str)
            if key in _TEXTS
            else isinstance(value, list) and all(isinstance(one, str) for one in value)
            if key in _LISTS
            else isinstance(value, dict) and all(isinstance(one, str) for one in value.values())
        )
        if not is_fine:
            expected = "a text" if key in _TEXTS else "a list of texts" if key in _LISTS else "an object of texts"
            raise ValueError(f"{json.dumps(value)} at {place}.{key}, expected {expected}")
    return Sidecar(
        image=values.get("image", ""),
        args=tuple(values.get("args", ())),
        unknown=tuple(key for key in item if key.lower() not in known),
    )


def with_hook(text: str, image: str | None) -> str:
    """The annotation's value with the hook in it: the text of the others stays, the hook's own entry gets the image.

    text: the value so far, empty where there is none.
    image: None: the entry that is there keeps its image, and a new one gets the placeholder.

    Raises:
        ValueError: the text is not what KubeVirt expects.
    """
    if not text.strip():
        return json.dumps([{"image": image or PLACEHOLDER_IMAGE}])
    sidecars = parse(text)
    own = [index for index, sidecar in enumerate(sidecars) if is_hook(sidecar, image)]
    if not own:
        return _appended(text, {"image": image or PLACEHOLDER_IMAGE}, is_first=not sidecars)
    return text if image is None else _with_image(text, sidecars, own, image)


def _appended(text: str, entry: Mapping[str, str], *, is_first: bool) -> str:
    end = text.rindex("]")
    before = text[:end].rstrip()
    space = text[len(before) : end]
    # One entry a line where the others are.
    last_line = before[before.rfind("\n") + 1 :]
    indent = last_line[: len(last_line) - len(last_line.lstrip())]
    gap = "" if is_first else f",\n{indent}" if "\n" in space else ", "
    return f"{before}{gap}{json.dumps(entry)}{space}{text[end:]}"


def _with_image(text: str, sidecars: Sequence[Sidecar], own: Sequence[int], image: str) -> str:
    for old in {sidecars[index].image for index in own} - {image}:
        written = json.dumps(old)
        count = sum(sidecar.image == old for sidecar in sidecars)
        if text.count(written) != count:  # the same text means something else elsewhere
            items = json.loads(text)
            for index in own:
                items[index]["image"] = image
            return json.dumps(items)
        text = text.replace(written, json.dumps(image))
    return text
