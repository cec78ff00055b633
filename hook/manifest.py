"""Reads manifests, YAML or JSON, with the place of every field, and edits them in place; must not judge them.

Text is never printed anew: an edit touches the lines that it is about, so comments, order, quoting, indentation and
line ends of everything else stay as they are. Scalars mean what Kubernetes takes them for, which is neither YAML 1.1
nor 1.2: `off` and `y` are booleans, `0000:41:00.0` and `2026-11-30` are texts (sigs.k8s.io/yaml, goyaml.v2/resolve.go).
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import yaml

from hook.errors import ManifestError

_TAG = "tag:yaml.org,2002:"
_PARAMETER = re.compile(r"\$\{\{?([A-Za-z0-9_]+)\}?\}")
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")
_DEFAULT_INDENT = 2
_LITERAL, _FOLDED = "|", ">"

Path = tuple[str | int, ...]


class _Loader(yaml.SafeLoader):
    """YAML as Kubernetes reads it; also keeps where aliases are written."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (as the base class has it)

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.aliases: list[tuple[int, int]] = []  # start and end offsets

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Note an alias before its anchor's node takes its place, and what a mapping has before merges come in."""
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            self.aliases.append((event.start_mark.index, event.end_mark.index))
        node = super().compose_node(parent, index)
        if isinstance(node, yaml.MappingNode) and not hasattr(node, "written"):
            node.written = tuple(node.value)  # type: ignore[attr-defined]
        return node


def _resolve(name: str, pattern: str, first: Iterable[str]) -> None:
    _Loader.add_implicit_resolver(f"{_TAG}{name}", re.compile(f"(?:{pattern})$"), list(first))


_TRUE = ("y", "Y", "yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON")
_FALSE = ("n", "N", "no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF")
_resolve("bool", "|".join((*_TRUE, *_FALSE)), "yYnNtTfFoO")
_resolve("null", "~|null|Null|NULL|", ["~", "n", "N", ""])
_resolve("merge", "<<", "<")
_resolve("int", r"[-+]?(?:0b[01_]+|0o?[0-7_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)", "-+0123456789")
_resolve(
    "float",
    r"[-+]?(?:\.[0-9_]+|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
    "-+.0123456789",
)


def _integer(_: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = node.value.replace("_", "")
    is_octal = re.fullmatch(r"[-+]?0[0-7]+", text) is not None
    return int(text, 8 if is_octal else 0)


def _boolean(_: yaml.SafeLoader, node: yaml.ScalarNode) -> bool:
    return node.value in _TRUE


def _sequence(loader: yaml.SafeLoader, node: yaml.SequenceNode) -> list[Any]:
    return loader.construct_sequence(node, deep=True)


def _mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[str, Any]:
    """A mapping; keys become texts, as in JSON."""
    loader.flatten_mapping(node)
    return {
        _key(loader.construct_object(key, deep=True), key): loader.construct_object(value, deep=True)
        for key, value in node.value
    }


def _key(value: object, node: yaml.Node) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, (dict, list)):
        raise yaml.constructor.ConstructorError(None, None, "found a key that is no text", node.start_mark)
    return json.dumps(value)


_Loader.add_constructor(f"{_TAG}int", _integer)
_Loader.add_constructor(f"{_TAG}map", _mapping)
_Loader.add_constructor(f"{_TAG}bool", _boolean)
_Loader.add_constructor(f"{_TAG}seq", _sequence)


class Open(str):
    """A value that a template's parameter without a default decides; the text has the parameter."""

    __slots__ = ()


@dataclass(frozen=True, kw_only=True)
class Field:
    """One place in a manifest, whether something is there or not."""

    file: str
    path: Path  # from the object on; of an object in a List or Template from the document on
    line: int  # from 1, where its key is; of an absent field that of the nearest field above
    node: yaml.Node | None  # None: absent
    raw: Any  # the value as it is written; None: absent or null
    above: "Field | None" = None  # None: of a document
    parameters: Mapping[str, str | None] = field(default_factory=dict)  # of a template: defaults, None where none

    @property
    def is_absent(self) -> bool:
        """True when the manifest does not have it, or has null."""
        return self.raw is None

    @cached_property
    def value(self) -> Any:
        """The value with the defaults of parameters in place; an Open text where one has no default."""
        return self._filled(self.raw)

    def _filled(self, raw: Any) -> Any:
        if not self.parameters:
            return raw
        if isinstance(raw, dict):
            return {key: self._filled(value) for key, value in raw.items()}
        if isinstance(raw, list):
            return [self._filled(value) for value in raw]
        if not isinstance(raw, str):
            return raw
        whole = re.fullmatch(r"\$\{\{([A-Za-z0-9_]+)\}\}", raw)
        if whole is not None and self.parameters.get(whole[1]) is not None:
            return load(self.parameters[whole[1]] or "")
        text = _PARAMETER.sub(lambda match: self.parameters.get(match[1]) or match[0], raw)
        return Open(text) if _PARAMETER.search(text) else text

    def at(self, *keys: str | int) -> "Field":
        """The field below, by keys and list indexes."""
        found = self
        for key in keys:
            found = found._child(key)
        return found

    def entries(self) -> tuple[tuple[str, "Field"], ...]:
        """The entries of a mapping in order; nothing for anything else."""
        return tuple((key, self._child(key)) for key in self.raw) if isinstance(self.raw, dict) else ()

    def items(self) -> tuple["Field", ...]:
        """The items of a list; nothing for anything else."""
        return tuple(self._child(index) for index in range(len(self.raw))) if isinstance(self.raw, list) else ()

    def walk(self) -> Iterator["Field"]:
        """Every field below, each node once, so that aliases cannot blow it up."""
        seen: set[int] = set()
        todo = [self]
        while todo:
            this = todo.pop()
            if id(this.node) in seen:
                continue
            seen.add(id(this.node))
            below = [*(child for _, child in this.entries()), *this.items()]
            todo.extend(reversed(below))
            yield from below

    def duplicates(self) -> Iterator["Field"]:
        """Every key below that its mapping has already had; the last one counts."""
        for place in (self, *self.walk()):
            if isinstance(place.node, yaml.MappingNode):
                keys: set[str | None] = set()
                for key, value in _own(place.node):
                    name = _text(key)
                    if name is not None and name in keys:
                        path = (*place.path, name)
                        yield replace(place, path=path, line=_line(key, place.line), node=value, raw=name)
                    keys.add(name)

    def __str__(self) -> str:
        return path_text(self.path)

    def _child(self, key: str | int) -> "Field":
        path = (*self.path, key)
        if isinstance(key, int):
            if isinstance(self.raw, list) and isinstance(self.node, yaml.SequenceNode) and key < len(self.raw):
                node = self.node.value[key]
                return replace(self, path=path, line=_line(node, self.line), node=node, raw=self.raw[key], above=self)
        elif isinstance(self.raw, dict) and isinstance(self.node, yaml.MappingNode) and key in self.raw:
            pair = next(pair for pair in reversed(self.node.value) if _text(pair[0]) == key)
            return replace(self, path=path, line=_line(pair[0], self.line), node=pair[1], raw=self.raw[key], above=self)
        return replace(self, path=path, node=None, raw=None, above=self)


def path_text(path: Path) -> str:
    """`spec.template.metadata.annotations[kubevirt.io/x]`, `objects[0].spec`."""
    text = ""
    for key in path:
        if isinstance(key, int) or not re.fullmatch(r"[A-Za-z0-9_-]+", key):
            text += f"[{key}]"
        else:
            text += f".{key}" if text else key
    return text


def _line(node: yaml.Node, above: int) -> int:
    return node.start_mark.line + 1 if node.start_mark is not None else above


def _text(node: yaml.Node) -> str | None:
    """A key as Kubernetes reads it; None for one that is no scalar, and for a merge."""
    if not isinstance(node, yaml.ScalarNode) or node.tag == f"{_TAG}merge":
        return None
    if node.tag == f"{_TAG}str":
        return str(node.value)
    return _key(_Loader("").construct_object(node), node)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """One file."""

    file: str
    text: str
    documents: tuple[Field, ...]  # those that are not empty
    aliases: tuple[tuple[int, int], ...]  # where `*name` is written: start and end offsets

    def objects(self) -> tuple[Field, ...]:
        """Every Kubernetes object: documents, and what Lists and Templates hold."""
        return tuple(found for document in self.documents for found in _objects(document))


def _objects(place: Field) -> Iterator[Field]:
    kind = place.at("kind").raw
    if not isinstance(kind, str):
        return
    if kind == "Template" and place.at("objects").items():
        parameters = {**place.parameters, **_parameters(place.at("parameters"))}
        for item in place.at("objects").items():
            yield from _objects(replace(item, parameters=parameters))
    elif kind.endswith("List") and place.at("items").items():
        for item in place.at("items").items():
            yield from _objects(item)
    elif kind == "VirtualMachineTemplate":
        yield replace(place, parameters=_parameters(place.at("spec", "parameters")))
    else:
        yield place


def _parameters(place: Field) -> Mapping[str, str | None]:
    found: dict[str, str | None] = {}
    for item in place.items():
        name, value = item.at("name").raw, item.at("value").raw
        if isinstance(name, str):
            found[name] = value if isinstance(value, str) else None
    return found


def load(text: str) -> Any:
    """The value of the only document of a text.

    Raises:
        ManifestError: it is no YAML, or has several documents.
    """
    with _errors("cannot read YAML"):
        loader = _Loader(text)
        node = loader.get_single_node()
        return None if node is None else loader.construct_document(node)


def parse(file: str, content: bytes) -> Manifest:
    """Parse a manifest; file: its name, for messages.

    Raises:
        ManifestError: it is no UTF-8, YAML or JSON, or has something that Kubernetes could not read.
    """
    with _errors(f"cannot read {file}"):
        text = content.decode()
        # JSON may be indented by tabs, YAML may not; in JSON no text holds one. Offsets stay the same.
        loader = _Loader(text.replace("\t", " ") if text.lstrip("\ufeff \t\r\n").startswith("{") else text)
        documents = []
        while loader.check_node():
            node = loader.get_node()
            raw = loader.construct_document(node) if node is not None else None
            if node is not None and raw is not None:
                documents.append(Field(file=file, path=(), line=_line(node, 1), node=node, raw=raw))
    return Manifest(file=file, text=text, documents=tuple(documents), aliases=tuple(loader.aliases))


class _errors:  # noqa: N801 (reads as a sentence where it is used)
    """Turns what the library raises into one line."""

    def __init__(self, attempt: str) -> None:
        self._attempt = attempt

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, yaml.MarkedYAMLError):
            mark = error.problem_mark or error.context_mark
            place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
            text = " ".join(part for part in (error.context, error.problem) if part)
            raise ManifestError(f"{self._attempt}: {place}{text}, expected YAML or JSON") from None
        if isinstance(error, (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError)):
            text = "it is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
            raise ManifestError(f"{self._attempt}: {text}, expected YAML or JSON") from None


# Editing.


@dataclass(frozen=True, slots=True, order=True)
class _Edit:
    start: int
    end: int
    text: str


def with_entries(manifest: Manifest, changes: Sequence[tuple[Field, Path, Mapping[str, str]]]) -> bytes:
    """Set texts in mappings, and make the mappings where they are not there.

    changes: an object, the path of a mapping in it, and the entries that the mapping shall have.

    Raises:
        ManifestError: the place is an alias, or no mapping, or the text cannot be edited safely.
    """
    edits: set[_Edit] = set()
    for start, path, entries in changes:
        edits.update(_edits(manifest, start, path, entries))
    text = manifest.text
    for edit in sorted(edits, reverse=True):
        text = text[: edit.start] + edit.text + text[edit.end :]
    content = text.encode()
    _verify(manifest, changes, content)
    return content


def _verify(manifest: Manifest, changes: Sequence[tuple[Field, Path, Mapping[str, str]]], content: bytes) -> None:
    """See that the new text says what was wanted, and nothing else has changed."""
    wanted = [json.loads(json.dumps(document.raw)) for document in manifest.documents]
    for start, path, entries in changes:
        index = next(n for n, d in enumerate(manifest.documents) if d.node is start.node or _holds(d, start))
        place = wanted[index]
        for key in (*start.path, *path):
            if isinstance(key, int):
                place = place[key]
                continue
            if place.get(key) is None:
                place[key] = {}
            place = place[key]
        place.update(entries)
    if [document.raw for document in parse(manifest.file, content).documents] != wanted:
        raise ManifestError(
            f"cannot edit {manifest.file}: an anchor, a merge, or a text block at its end makes the change reach "
            "further than it should; write the annotations out"
        )


def _holds(document: Field, place: Field) -> bool:
    return document.at(*place.path).node is place.node


def _edits(manifest: Manifest, start: Field, path: Path, entries: Mapping[str, str]) -> Iterator[_Edit]:
    place, missing = start, list(path)
    while missing and not place.at(missing[0]).is_absent:
        place = place.at(missing.pop(0))
    mapping = place.node
    if not isinstance(mapping, yaml.MappingNode) or _is_alias(start, place):
        found = "an alias" if isinstance(mapping, yaml.MappingNode) else "no mapping"
        raise ManifestError(f"cannot edit {manifest.file}:{place.line}: {place} is {found}, expected a mapping")
    if not missing:
        own = {_text(key): value for key, value in _own(mapping)}
        for key in [key for key in entries if key in own]:
            node, entry = own[key], place.at(key)
            if not isinstance(node, yaml.ScalarNode):
                raise ManifestError(f"cannot edit {manifest.file}:{entry.line}: {entry} is no text, expected one")
            if entry.raw != entries[key]:
                yield _replaced(manifest.text, node, entries[key], is_json=bool(mapping.flow_style))
        entries = {key: value for key, value in entries.items() if key not in own}
    if entries:
        yield from _added(manifest, place, [str(key) for key in missing], entries, _step(start))


def _own(mapping: yaml.MappingNode) -> Sequence[tuple[yaml.Node, yaml.Node]]:
    """The entries that are written in the mapping, `<<` among them, and not what it merges in."""
    own: Sequence[tuple[yaml.Node, yaml.Node]] = mapping.written  # type: ignore[attr-defined]
    return own


def _is_alias(start: Field, place: Field) -> bool:
    """True when the way to the place leads through an alias, whose node is written before its key."""
    above = start
    for key in place.path[len(start.path) :]:
        if isinstance(above.node, yaml.MappingNode):
            for name, value in above.node.value:
                if _text(name) == key and value.start_mark.index < name.start_mark.index:
                    return True
        above = above.at(key)
    return False


def _replaced(text: str, node: yaml.ScalarNode, value: str, *, is_json: bool) -> _Edit:
    """Another text for a scalar, in its style where that can hold it."""
    start, end = node.start_mark.index, node.end_mark.index
    if node.style in (_LITERAL, _FOLDED):
        indent = re.search(r"\n( *)\S", text[start:end])
        newline = _newline(text)
        body = newline.join(" " * len(indent[1] if indent else "") + line for line in value.rstrip("\n").split("\n"))
        # A folded text would join the lines of the new one.
        header = text[start : text.index("\n", start)].replace(_FOLDED, _LITERAL).rstrip()
        stop = start + len(text[start:end].rstrip())
        return _Edit(start, stop, f"{header}{newline}{body}")
    if node.style == "'" and "\n" not in value:
        quoted = "'" + value.replace("'", "''") + "'"
    elif node.style == '"':
        quoted = json.dumps(value, ensure_ascii=False)
    else:
        quoted = _scalar(value, is_json=is_json)
    return _Edit(start, end, quoted if text[start - 1 : start].isspace() or is_json else f" {quoted}")


def _scalar(value: str, *, is_json: bool) -> str:
    """A text as YAML: plain where that means a text, as JSON in JSON, else quoted."""
    if is_json:
        return json.dumps(value, ensure_ascii=False)
    if _PLAIN.fullmatch(value) and isinstance(load(value), str):
        return value
    return f"'{value}'" if '"' in value and "'" not in value and "\n" not in value else json.dumps(value)


def _added(
    manifest: Manifest, place: Field, missing: list[str], entries: Mapping[str, str], step: int
) -> Iterator[_Edit]:
    mapping = place.node
    assert isinstance(mapping, yaml.MappingNode)
    text, newline = manifest.text, _newline(manifest.text)
    own = _own(mapping)
    # What is to be written below `mapping`: `missing` names the mappings that are not there or null.
    null = next((value for key, value in own if missing and _text(key) == missing[0]), None)
    above = place.above.node if place.above is not None else None
    is_in_braces = isinstance(above, yaml.CollectionNode) and bool(above.flow_style)
    if mapping.flow_style and (own or is_in_braces):
        yield _flow(text, mapping, above, _nested(missing, entries), null)
        return
    if not own:  # `{}` in a block, or the whole document
        column = _column_below(text, mapping, step)
        if column is None or not _is_alone(text, mapping):
            yield _flow(text, mapping, above, _nested(missing, entries), null)
            return
        yield from _below(text, mapping, _block(missing, entries, column, step, newline))
        return
    column = own[0][0].start_mark.column
    if null is not None:
        yield from _below(text, null, _block(missing[1:], entries, column + step, step, newline))
        return
    block = _block(missing, entries, column, step, newline)
    first = _line_start(text, own[0][0].start_mark.index)
    if missing and missing[0] == "metadata" and text[first : own[0][0].start_mark.index].isspace():
        # Where people look for it: before everything else, comments included.
        at = _first_comment(text, first)
        yield _Edit(at, at, block + newline)
        return
    at = _line_end(text, _end(manifest, mapping))
    yield _Edit(at, at, newline + block)


def _nested(missing: Sequence[str], entries: Mapping[str, str]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = entries
    for key in reversed(missing):
        found = {key: found}
    return found


def _below(text: str, node: yaml.Node, block: str) -> Iterator[_Edit]:
    """Put a block below the line of a key, in place of its `{}` or null; a comment on the line stays."""
    written = text[: node.start_mark.index].rstrip(" ")
    yield _Edit(len(written), node.end_mark.index, "")
    at = _line_end(text, node.end_mark.index)
    yield _Edit(at, at, _newline(text) + block)


def _block(missing: Sequence[str], entries: Mapping[str, str], column: int, step: int, newline: str) -> str:
    lines = []
    for key in missing:
        lines.append(" " * column + f"{_scalar(key, is_json=False)}:")
        column += step
    lines += [" " * column + f"{_scalar(k, is_json=False)}: {_scalar(v, is_json=False)}" for k, v in entries.items()]
    return newline.join(lines)


def _flow(
    text: str, mapping: yaml.MappingNode, above: yaml.Node | None, added: Mapping[str, Any], null: yaml.Node | None
) -> _Edit:
    """Add to `{…}`, or in place of a null in it, with the line breaks that entries have there or above."""
    own = _own(mapping)
    gap = _gap(text, mapping) or (_gap(text, above) if not own and isinstance(above, yaml.MappingNode) else "")
    if null is not None:
        (value,) = added.values()
        space = "" if text[null.start_mark.index - 1].isspace() else " "
        return _Edit(null.start_mark.index, null.end_mark.index, space + _json(value, gap))
    if not own:
        return _Edit(mapping.start_mark.index, mapping.end_mark.index, _json(added, gap))
    body = [f"{_scalar(key, is_json=True)}: {_json(value, gap)}" for key, value in added.items()]
    at = max(value.end_mark.index for _, value in own)
    separator = "," + (gap or " ")
    return _Edit(at, at, separator + separator.join(body))


def _gap(text: str, mapping: yaml.MappingNode) -> str:
    """The line break and indentation before the first entry of `{…}`; empty where it is on the line of the brace."""
    own = _own(mapping)
    before = text[mapping.start_mark.index : own[0][0].start_mark.index] if own and mapping.flow_style else ""
    at = before.rfind("\n")
    return "" if at < 0 else ("\r\n" if before[at - 1] == "\r" else "\n") + before[at + 1 :]


def _json(value: Any, gap: str) -> str:
    if not gap or isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    unit = "\t" if gap.endswith("\t") else " " * _DEFAULT_INDENT
    return json.dumps(value, ensure_ascii=False, indent=unit).replace("\n", gap)


def _end(manifest: Manifest, node: yaml.Node) -> int:
    """Where the last character of a node is; the library counts blank lines and comments after a block to it."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        start, stop = node.start_mark.index, node.end_mark.index
        value = node.value[-1]
        if isinstance(node, yaml.MappingNode):
            key, value = _own(node)[-1]
            start = key.end_mark.index
        if not start <= value.start_mark.index < max(stop, start + 1):
            return max(end for begin, end in manifest.aliases if start <= begin < stop)
        return _end(manifest, value)
    if isinstance(node, yaml.ScalarNode) and node.style in (_LITERAL, _FOLDED):
        written = manifest.text[node.start_mark.index : node.end_mark.index]
        is_kept = "+" in written.split("\n", 1)[0]
        return node.start_mark.index + len(written.rstrip("\r\n") if is_kept else written.rstrip())
    return int(node.end_mark.index)


def _step(document: Field) -> int:
    """How far a mapping in a mapping is indented, by the first one."""
    if isinstance(document.node, yaml.MappingNode):
        for key, value in document.node.value:
            if isinstance(value, yaml.MappingNode) and not value.flow_style and _own(value):
                return max(1, int(_own(value)[0][0].start_mark.column - key.start_mark.column))
    return _DEFAULT_INDENT


def _column_below(text: str, mapping: yaml.MappingNode, step: int) -> int | None:
    """Where the entries of `{}` go as a block; None when there is no key before it on its line."""
    line = text[_line_start(text, mapping.start_mark.index) : mapping.start_mark.index]
    match = re.fullmatch(r"((?: |- )*)[^\s#{\[,][^{\[,]*:\s*", line)
    return len(match[1]) + step if match else None


def _is_alone(text: str, mapping: yaml.MappingNode) -> bool:
    """True when nothing but a comment follows `{}` on its line."""
    rest = text[mapping.end_mark.index : _line_end(text, mapping.end_mark.index)]
    return re.fullmatch(r"\s*(?:\s#.*)?", rest) is not None


def _first_comment(text: str, start: int) -> int:
    """The start of the comment lines right above a line."""
    while start > 0:
        above = _line_start(text, start - 1)
        if not text[above : start - 1].lstrip().startswith("#"):
            break
        start = above
    return start


def _line_start(text: str, at: int) -> int:
    return text.rfind("\n", 0, at) + 1


def _line_end(text: str, at: int) -> int:
    """The end of the line, before its line break."""
    end = text.find("\n", at)
    end = len(text) if end < 0 else end
    return end - 1 if end > at and text[end - 1] == "\r" else end


def _newline(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"
