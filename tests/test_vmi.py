"""What the hook takes from a VMI, and that all else in it has no effect."""

import json

import pytest

from hook.errors import VmiError
from hook.vmi import VmiRequest, parse


def test_annotations_and_addressed_interfaces_are_taken() -> None:
    document = {
        "kind": "VirtualMachineInstance",
        "metadata": {"name": "vm", "annotations": {"pcie-numa-hook/layout": "switch", "other": "x"}},
        "spec": {
            "domain": {
                "devices": {
                    "interfaces": [
                        {"name": "default", "masquerade": {}},
                        {"name": "net1", "sriov": {}, "pciAddress": "0000:00:10.0"},
                        {"name": "net2", "sriov": {}, "pciAddress": ""},
                    ]
                }
            }
        },
        "status": {"phase": "Scheduled"},
    }

    assert parse(json.dumps(document).encode()) == VmiRequest(
        annotations={"pcie-numa-hook/layout": "switch", "other": "x"}, pci_addressed=frozenset({"net1"})
    )


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("{}", id="nothing at all"),
        pytest.param('{"metadata": null, "spec": null}', id="null where an object belongs"),
        pytest.param('{"metadata": {"annotations": ["a"]}, "spec": {"domain": 1}}', id="other types"),
        pytest.param('{"metadata": {"annotations": {"a": 1, "b": null, "c": {}}}}', id="values that are no texts"),
        pytest.param('{"spec": {"domain": {"devices": {"interfaces": {"name": "a"}}}}}', id="no list of interfaces"),
        pytest.param(
            '{"spec": {"domain": {"devices": {"interfaces": [1, null, {"pciAddress": "0000:00:10.0"}]}}}}',
            id="interfaces that are none",
        ),
        pytest.param('{"metadata": {"x": NaN}}', id="a number that JSON does not have"),
    ],
)
def test_what_has_another_type_is_ignored(text: str) -> None:
    assert VmiRequest() == parse(text.encode())


@pytest.mark.parametrize(
    ("value", "expected"),
    [("true", True), ("True", True), ("false", False), ("", False), ("yes", False)],
)
def test_the_root_complex_annotation_is_true_only_for_true(value: str, expected: bool) -> None:
    document = {"metadata": {"annotations": {"kubevirt.io/placePCIDevicesOnRootComplex": value}}}

    assert parse(json.dumps(document).encode()).is_on_root_complex is expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"", r"cannot read the VMI: Expecting value: .*, expected JSON", id="nothing"),
        pytest.param(b"{", r"cannot read the VMI: Expecting property name .*, expected JSON", id="half an object"),
        pytest.param(b"kind: VMI", r"cannot read the VMI: Expecting value: .*, expected JSON", id="YAML"),
        pytest.param(b"\xff\xfe\xfd", r"cannot read the VMI: .* codec can't decode .*, expected JSON", id="no text"),
        pytest.param(b"[]", r"cannot read the VMI: found a JSON list, expected an object", id="a list"),
        pytest.param(b'"vm"', r"cannot read the VMI: found a JSON str, expected an object", id="a text"),
        pytest.param(b"null", r"cannot read the VMI: found a JSON NoneType, expected an object", id="null"),
        pytest.param(
            b"[" * 200_000,
            r"cannot read the VMI: it is nested too deeply, expected JSON",
            id="200,000 lists in each other",
        ),
        pytest.param(
            b'{"x": ' + b"9" * 5000 + b"}",
            r"cannot read the VMI: Exceeds the limit .*, expected JSON",
            id="a huge number",
        ),
    ],
)
def test_what_is_no_json_object_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(VmiError, match=message) as refusal:
        parse(content)

    assert "\n" not in str(refusal.value)
