"""The part of KubeVirt's API that the examples use, as a JSON schema; must not be written by hand.

    python -m tests.kubevirt_schema SWAGGER

SWAGGER is `api/openapi-spec/swagger.json` of a KubeVirt release. It writes tests/kubevirt-schema.json: names, types and
required fields of the definitions that an example leads to, nothing else of it. Fields that KubeVirt does not have are
refused; so are those of definitions that no example has led to yet, until it is run again.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hook.manifest import parse

ROOT = Path(__file__).parent.parent
SCHEMA = Path(__file__).parent / "kubevirt-schema.json"
GROUPS = ("kubevirt.io", "instancetype.kubevirt.io", "pool.kubevirt.io")
_KEPT = ("type", "required", "properties", "items", "additionalProperties", "enum", "$ref")
_REF = "#/definitions/"


def objects() -> Iterator[tuple[Path, Any]]:
    """Every object of KubeVirt's API in the examples, with the file that it is in."""
    for path in sorted((ROOT / "examples").rglob("*.yaml")):
        for place in parse(str(path.relative_to(ROOT)), path.read_bytes()).objects():
            if place.at("apiVersion").raw.rpartition("/")[0] in GROUPS:
                yield path, place.value


def definition_of(document: Mapping[str, Any]) -> str:
    """The name that the API's schema has for an object."""
    return f"{document['apiVersion'].rpartition('/')[2]}.{document['kind']}"


def _visited(value: Any, schema: Mapping[str, Any], definitions: Mapping[str, Any], found: set[str]) -> None:
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(_REF)
        found.add(name)
        _visited(value, definitions[name], definitions, found)
    elif isinstance(value, dict):
        for key, below in value.items():
            known = schema.get("properties", {}).get(key) or schema.get("additionalProperties") or {}
            _visited(below, known, definitions, found)
    elif isinstance(value, list):
        for below in value:
            _visited(below, schema.get("items", {}), definitions, found)


def _stripped(schema: Mapping[str, Any], names: set[str]) -> Any:
    if "$ref" in schema:
        return {"$ref": schema["$ref"]} if schema["$ref"].removeprefix(_REF) in names else False
    kept = {key: schema[key] for key in _KEPT if key in schema}
    if "properties" in kept:
        kept["properties"] = {key: _stripped(below, names) for key, below in sorted(kept["properties"].items())}
        kept["additionalProperties"] = False
    elif "additionalProperties" in kept:
        kept["additionalProperties"] = _stripped(kept["additionalProperties"], names)
    if "items" in kept:
        kept["items"] = _stripped(kept["items"], names)
    return kept


def extract(swagger: Mapping[str, Any]) -> dict[str, Any]:
    """The schema, of the definitions that an example leads to."""
    definitions = swagger["definitions"]
    names: set[str] = set()
    for _, document in objects():
        name = definition_of(document)
        names.add(name)
        _visited(document, definitions[name], definitions, names)
    return _schema(definitions, names)


def whole(swagger: Mapping[str, Any]) -> dict[str, Any]:
    """The schema, of all definitions."""
    return _schema(swagger["definitions"], set(swagger["definitions"]))


def _schema(definitions: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {"definitions": {name: _stripped(definitions[name], names) for name in sorted(names)}}


if __name__ == "__main__":
    SCHEMA.write_text(json.dumps(extract(json.loads(Path(sys.argv[1]).read_text())), indent=1) + "\n")
