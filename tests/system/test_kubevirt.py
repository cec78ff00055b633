"""Judge kubevirt.py by XML that KubeVirt itself made; must not test the hook."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lxml import etree

from tests.system.domain_spec import NotParsed, parse, to_bytes
from tests.system.kubevirt import (
    EMULATOR,
    Family,
    Plan,
    for_libvirt,
    next_call,
    placeholders,
    plan,
    reprint,
)
from tests.system.oracle import Oracle, OracleRefused, asking

SCENARIOS = Path(__file__).parent.parent / "scenarios"
SAMPLES = SCENARIOS / "samples"
NAMES = sorted(file.name.removesuffix(".vmi.json") for file in SCENARIOS.glob("*.vmi.json"))
# Both the converter's output and, where KubeVirt's own placement accepts the VM, that one's.
CONVERTED = sorted(
    file.stem
    for name in NAMES
    for file in (SCENARIOS / f"{name}.xml", SCENARIOS / f"{name}.gate-on.xml")
    if file.exists()
)


def read(name: str) -> bytes:
    return (SCENARIOS / name).read_bytes()


def sample(number: str) -> bytes:
    (file,) = SAMPLES.glob(f"{number}*.xml")
    return file.read_bytes()


def vmi_of(converted: str) -> dict[str, Any]:
    vmi: dict[str, Any] = json.loads(read(f"{converted.removesuffix('.gate-on')}.vmi.json"))
    return vmi


def lines(xml: bytes) -> list[str]:
    """As Go prints it: whatever the prefixes, quotes and white space of the sample are."""
    return to_bytes(parse(xml)).decode().splitlines()


def without_tpm(xml: bytes) -> bytes:
    """The libvirt that made the samples had no swtpm, and lost the TPM of full-featured."""
    domain = parse(xml)
    for tpm in domain.findall("devices/tpm"):
        drop(tpm)
    return to_bytes(domain)


def drop(element: etree._Element) -> None:
    parent = element.getparent()
    assert parent is not None
    parent.remove(element)


def by_index(xml: bytes) -> bytes:
    """Hide what newer libvirts do otherwise than 9.0, which made the samples.

    The order of the controllers is another one, and a q35 machine shows its built-in watchdog.
    """
    domain = parse(xml)
    for watchdog in domain.findall("devices/watchdog[@model='itco']"):
        drop(watchdog)
    devices = domain.find("devices")
    assert devices is not None
    controllers = devices.findall("controller")
    position = devices.index(controllers[0])
    devices[position : position + len(controllers)] = sorted(
        controllers, key=lambda each: (each.get("type", ""), int(each.get("index", "")))
    )
    return to_bytes(domain)


@pytest.fixture(scope="module")
def libvirt9() -> Iterator[Oracle]:
    with asking("debian12") as it:
        yield it


# --- the struct


@pytest.mark.parametrize(
    ("version", "family"),
    [
        ("v1.5", Family.V1_0),
        ("v1.7", Family.V1_6),
        ("v1.8", Family.V1_8),
        ("v1.9", Family.V1_9),
    ],
)
def test_a_probe_loses_what_it_lost_in_that_version(version: str, family: Family) -> None:
    expected = sample(f"21-roundtrip-probe-output-{version}")

    assert reprint(sample("20"), family) == expected.strip()


def test_the_first_version_loses_memory_devices_too() -> None:
    """v1.0 alone: its family keeps the last one, as v1.1 to v1.5 do."""
    printed = parse(reprint(sample("20"), Family.V1_0))
    for memory in printed.findall("devices/memory"):
        drop(memory)

    assert to_bytes(printed) == sample("21-roundtrip-probe-output-v1.0").strip()


@pytest.mark.parametrize("file", sorted(file.name for file in SCENARIOS.glob("*.xml")))
def test_the_newest_struct_keeps_all_that_kubevirt_wrote(file: str) -> None:
    """These were printed from it, so nothing may be lost but the declared namespace."""
    xml = read(file)

    assert reprint(xml, Family.MAIN) == xml.replace(b' xmlns:qemu="http://libvirt.org/schemas/domain/qemu/1.0"', b"")


def test_only_the_development_branch_keeps_a_command_line() -> None:
    kept = [family for family in Family if b"qemu:commandline" in reprint(sample("20"), family)]

    assert kept == [Family.MAIN]


def test_a_number_that_go_cannot_parse_fails_the_start() -> None:
    xml = sample("20").replace(b"busNr='253'", b"busNr='0xfd'")

    with pytest.raises(NotParsed, match="busNr: '0xfd'"):
        reprint(xml, Family.V1_8)
    assert b"0xfd" not in reprint(xml, Family.V1_6)


# --- which calls there are


def test_the_first_call_has_kubevirts_placeholders() -> None:
    names = [name for name in NAMES if (SCENARIOS / f"{name}.call1.xml").exists()]
    for name in names:
        xml = read(f"{name}.xml")
        count = plan(xml, vmi_of(name), Family.V1_9).placeholders

        assert placeholders(xml, count) == read(f"{name}.call1.xml"), name
    assert names


@pytest.mark.parametrize(
    ("name", "family", "early", "expected"),
    [
        ("two-node-2gpu", Family.V1_0, False, Plan(2, 2, 0)),
        ("two-node-2gpu", Family.V1_6, True, Plan(2, 6, 0)),
        ("two-node-2gpu", Family.V1_6, False, Plan(3, 2, 4)),
        ("two-node-2gpu", Family.V1_8, False, Plan(3, 2, 4)),
        ("two-node-2gpu", Family.V1_9, False, Plan(3, 2, 4)),
        ("two-node-2gpu", Family.MAIN, False, Plan(3, 2, 4)),
        # No interface is missing to four.
        ("two-node-4gpu-4sriov", Family.V1_0, False, Plan(1, 0, 0)),
        ("two-node-4gpu-4sriov", Family.V1_9, False, Plan(2, 0, 6)),
        # Annotations: all on the root complex; a frozen count of interface slots.
        ("root-complex-annotation", Family.V1_0, False, Plan(1, 0, 0)),
        ("root-complex-annotation", Family.V1_6, True, Plan(1, 0, 0)),
        ("root-complex-annotation", Family.V1_9, False, Plan(1, 0, 0)),
        ("root-complex-annotation", Family.MAIN, False, Plan(2, 0, 0)),
        ("full-featured", Family.V1_0, False, Plan(2, 1, 0)),
        ("full-featured", Family.V1_9, False, Plan(2, 0, 6)),
    ],
)
def test_the_calls_of_a_start(name: str, family: Family, early: bool, expected: Plan) -> None:
    assert plan(read(f"{name}.xml"), vmi_of(name), family, early=early) == expected


def test_calls_that_a_version_does_not_make_are_refused() -> None:
    class Unasked:
        def define(self, xml: bytes) -> bytes:
            raise AssertionError(xml)

    xml = read("two-node-4gpu-4sriov.xml")
    with pytest.raises(ValueError, match="makes no call 2"):
        next_call(xml, xml, Family.V1_0, 2, Unasked())
    with pytest.raises(ValueError, match="no call 3 after 0 placeholders"):
        next_call(xml, xml, Family.V1_9, 3, Unasked())


# --- the inputs of the next calls


def sampled() -> Iterator[tuple[str, Family]]:
    """Starts whose next call there is a sample of, and the families that make that call so."""
    for name in CONVERTED:
        if (SCENARIOS / f"{name}.call2.xml").exists():
            yield name, Family.MAIN
            # Without placeholders, only the development branch reads back what libvirt made.
            if (SCENARIOS / f"{name}.call3.xml").exists():
                yield name, Family.V1_8
                yield name, Family.V1_9


@pytest.mark.parametrize(("name", "family"), [*sampled()])
def test_the_next_calls_are_kubevirts_own(name: str, family: Family, oracle: Oracle) -> None:
    """The hook changes nothing.  Compared line by line with what KubeVirt and libvirt 9.0 made."""
    calls = plan(read(f"{name}.xml"), vmi_of(name), family)
    first = placeholders(read(f"{name}.xml"), calls.placeholders)
    normal = by_index if oracle.generation != "debian12" else bytes

    second = next_call(first, first, family, 2, oracle, extra_ports=calls.extra_ports)
    assert lines(normal(without_tpm(second))) == lines(normal(read(f"{name}.call2.xml")))

    if calls.placeholders:
        third = next_call(first, second, family, 3, oracle, extra_ports=calls.extra_ports)
        expected = read(f"{name}.call3.xml")
        if family is Family.V1_8:
            # The sample is newer: v1.8 has no field for them.
            domain = parse(expected)
            for distances in domain.findall("cpu/numa/cell/distances"):
                drop(distances)
            expected = to_bytes(domain)
        assert lines(normal(without_tpm(third))) == lines(normal(expected))


@pytest.mark.parametrize("family", Family, ids=lambda it: it.value)
def test_a_hooks_answer_comes_back(family: Family, libvirt9: Oracle) -> None:
    """Expander buses lose their target up to v1.7; from v1.8 on it is theirs that is kept."""
    expected = parse(sample("13" if family.since(Family.V1_8) else "12"))
    emulator = expected.find("devices/emulator")
    assert emulator is not None
    emulator.text = EMULATOR

    call = next_call(sample("10"), sample("10"), family, 2, libvirt9)

    assert lines(call) == to_bytes(expected).decode().splitlines()


def test_libvirt_gives_back_the_sample(libvirt9: Oracle) -> None:
    def without_random_macs(xml: bytes) -> list[str]:
        domain = parse(xml)
        for mac in domain.findall("devices/interface/mac"):
            if mac.get("address", "").startswith("52:54:00:"):
                drop(mac)
        return lines(to_bytes(domain))

    inactive = libvirt9.define(sample("10"))

    assert without_random_macs(inactive) == without_random_macs(sample("11"))


def test_a_hook_that_ignores_the_second_call_loses_the_nodes(libvirt9: Oracle) -> None:
    assert lines(libvirt9.define(sample("12"))) == lines(sample("14"))


@pytest.mark.parametrize("family", [Family.V1_6, Family.V1_8, Family.V1_9], ids=lambda it: it.value)
def test_without_placeholders_the_second_call_has_no_addresses(family: Family, libvirt9: Oracle) -> None:
    """Nothing is read back, so the extra ports take the lowest indexes, and the devices them."""
    xml = read("two-node-4gpu-4sriov.xml")

    call = parse(next_call(xml, xml, family, 2, libvirt9))

    ports = call.findall("devices/controller[@type='pci']")
    assert [port.get("index") for port in ports] == ["1", "2", "3", "4", "5", "6"]
    assert not call.findall("devices/hostdev/address")
    assert not call.findall("devices/controller/address")


def test_extra_ports_stop_at_index_31(libvirt9: Oracle) -> None:
    xml = read("two-node-4gpu-4sriov.xml").replace(
        b'<controller type="usb"',
        b'<controller type="pci" index="29" model="pcie-root-port"></controller>\n\t\t<controller type="usb"',
    )

    call = parse(next_call(xml, xml, Family.V1_9, 2, libvirt9))

    ports = call.findall("devices/controller[@type='pci']")
    assert [port.get("index") for port in ports] == ["29", "30", "31"]


@pytest.mark.parametrize("name", CONVERTED)
def test_every_scenario_has_a_command_line(name: str, oracle: Oracle) -> None:
    argv = oracle.argv(for_libvirt(read(f"{name}.xml")))

    hostdevs = parse(read(f"{name}.xml")).findall("devices/hostdev")
    assert sum("vfio-pci" in word for word in argv) == len(hostdevs)


def test_what_libvirt_refuses_is_said_in_its_words(oracle: Oracle) -> None:
    xml = for_libvirt(read("two-node-2gpu.gate-on.xml").replace(b'busNr="', b'busNr="9'))

    with pytest.raises(OracleRefused, match=r"PCI controller busNr '.*' out of range"):
        oracle.define(xml)
