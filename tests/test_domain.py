"""The XML: what is read from it, what is refused, and that nothing but the hook's own things changes."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from lxml import etree

from hook import domain
from hook.address import PciAddress
from hook.config import Config, Extra
from hook.define import define_domain
from hook.domain import MAX_DOMAIN_XML_BYTES
from hook.errors import DomainXmlError, DomainXmlTooLarge
from hook.guest import (
    MARKER,
    AddressSpace,
    Cell,
    Connection,
    Controller,
    Endpoint,
    GuestAddress,
    GuestDomain,
    Hostdev,
    Kind,
)
from hook.recording import parse_recording
from tests.build import controller, host, hostdev, mdev, nic, vm

A = "0000:41:00.0"
HOST = host({f"pci0000:40/0000:40:01.0/{A}": 0}, distances={0: "10 21", 1: "21 10"})
UUID = "4b20d080-1b54-4048-85b3-a6a62d165c01"
PLACED = '<address type="pci" domain="0x0000" bus="0x12" slot="0x00" function="0x0"/>'


def answer(xml: bytes, config: Config | None = None) -> bytes:
    outcome = define_domain(xml, None, lambda: parse_recording(HOST), config or Config())
    assert outcome.error is None

    return outcome.xml


# Reading.


def test_everything_that_a_plan_depends_on_is_read() -> None:
    xml = vm(
        [
            hostdev(A, "gpu0", address="12:00.0").replace(
                'function="0x0"/></host', 'function="0" multifunction="on"/></host'
            ),
            mdev(UUID.upper(), "vgpu0"),
            '<interface type="hostdev"><source><address type="pci" domain="0" bus="0x51" slot="0x02" function="3"/>'
            '</source><alias name="ua-net1"/></interface>',
            hostdev("0000:51:02.4", "net2", prefix="ua-sriov-"),
            hostdev("10000:01:00.0"),
            controller(17, "pcie-expander-bus", "00:1e.0", bus_nr=254, node=1, alias=f"{MARKER}expander-17"),
            '<controller type="pci" index="18" model="pcie-root-port"><target chassis="18" port="0x0" hotplug="off"/></controller>',
            nic(),
            '<memballoon model="none"/>',
        ],
        memnodes={0: "0", 1: "2-3"},
        cells={0: "0-1", 1: "2"},
        pins={0: "4", 1: "5-6", 2: "7,^7"},
    )

    assert domain.parse(xml).name == "default_vm"
    assert domain.parse(xml).guest == GuestDomain(
        arch="x86_64",
        machine="q35",
        cells=(Cell(id=0, vcpus=frozenset({0, 1})), Cell(id=1, vcpus=frozenset({2}))),
        memnodes={0: frozenset({0}), 1: frozenset({2, 3})},
        pins={0: frozenset({4}), 1: frozenset({5, 6}), 2: frozenset()},
        controllers=(
            Controller(
                index=17,
                model="pcie-expander-bus",
                alias=f"{MARKER}expander-17",
                address=GuestAddress(0, 0x1E),
                bus_nr=254,
                cell=1,
            ),
            Controller(index=18, model="pcie-root-port", is_hotplug_off=True),
        ),
        hostdevs=(
            Hostdev(
                key=1,
                kind=Kind.PCI,
                name="gpu0",
                alias="ua-gpu-gpu0",
                source=PciAddress.parse(A),
                address=GuestAddress(0x12, 0),
                is_multifunction=True,
            ),
            Hostdev(key=2, kind=Kind.MDEV, name="vgpu0", alias="ua-gpu-vgpu0", source=UUID),
            Hostdev(
                key=3,
                kind=Kind.PCI,
                name="0000:51:02.3",
                alias="ua-net1",
                source=PciAddress(0, 0x51, 2, 3),
                is_virtual_function=True,
            ),
            Hostdev(
                key=4,
                kind=Kind.PCI,
                name="net2",
                alias="ua-sriov-net2",
                source=PciAddress(0, 0x51, 2, 4),
                is_virtual_function=True,
            ),
            Hostdev(key=5, kind=Kind.PCI, name="10000:01:00.0", alias=None, source=PciAddress(0x10000, 1, 0, 0)),
        ),
        endpoints=(
            Endpoint(connection=Connection.PORT, address=None, key=8),
            Endpoint(connection=Connection.PORT, address=GuestAddress(0x12, 0), key=1),
            Endpoint(connection=Connection.PORT, address=None, key=2),
            Endpoint(connection=Connection.PORT, address=None, key=3),
            Endpoint(connection=Connection.PORT, address=None, key=4),
            Endpoint(connection=Connection.PORT, address=None, key=5),
        ),
        aliases=frozenset({"ua-gpu-gpu0", "ua-gpu-vgpu0", "ua-net1", "ua-sriov-net2"}),
        address_space=AddressSpace(
            memory_bytes=16 << 30, is_efi=False, cpu_mode="host-passthrough", has_maxphysaddr=False, emulated_bits=None
        ),
        is_grace=False,
    )


def test_an_almost_empty_domain_is_a_domain() -> None:
    guest = domain.parse(b"<domain/>").guest

    assert (guest.arch, guest.machine, guest.cells, guest.hostdevs, guest.controllers) == ("", "", (), (), ())


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        pytest.param(
            'type="pci" domain="0x0000" bus="0x0a" slot="0x1f" function="0x7"', GuestAddress(10, 31, 7), id="hex"
        ),
        pytest.param('type="pci" domain="0" bus="10" slot="31" function="7"', GuestAddress(10, 31, 7), id="decimal"),
        pytest.param('bus="0XA" slot="0"', GuestAddress(10, 0, 0), id="no type, hex in upper case"),
        pytest.param('type="" domain="" bus="5" slot="" function=""', GuestAddress(5, 0, 0), id="empty attributes"),
        pytest.param('type="pci" slot="0x10"', GuestAddress(0, 16, 0), id="a slot of pcie.0 without its bus"),
        pytest.param('type="pci" bus="0x05"', GuestAddress(5, 0, 0), id="a bus without its slot"),
        pytest.param('type="pci"', None, id="nothing: libvirt chooses"),
        pytest.param(
            'type="pci" domain="0x0000" bus="0x00" slot="0x00" function="0x0"', None, id="zero: libvirt chooses"
        ),
        pytest.param('type="" domain="" bus="" slot="" function=""', None, id="all empty"),
        pytest.param('type="drive" controller="0" bus="1" unit="2"', None, id="another type"),
        pytest.param('type="pci" bus="256" slot="0"', None, id="a bus above 255"),
        pytest.param('type="pci" bus="1" slot="0x20"', None, id="a slot above 31"),
        pytest.param('type="pci" bus="1" slot="0" function="8"', None, id="a function above 7"),
        pytest.param('type="pci" bus="one" slot="0"', None, id="a word"),
        pytest.param('type="pci" bus="-1" slot="0"', None, id="a negative number"),
        pytest.param('type="pci" bus="1_0" slot="0"', None, id="an underscore"),
        pytest.param('type="pci" bus="0x" slot="0"', None, id="hex without digits"),
        pytest.param('type="pci" bus="\u0661" slot="0"', None, id="a digit of another script"),
        pytest.param(f'type="pci" bus="{"1" * 5000}" slot="0"', None, id="5000 digits"),
    ],
)
def test_guest_addresses(attributes: str, expected: GuestAddress | None) -> None:
    xml = vm([hostdev(A, "gpu0", extra=f"<address {attributes}/>")])

    assert domain.parse(xml).guest.hostdevs[0].address == expected


@pytest.mark.parametrize(
    "device",
    [
        pytest.param('<hostdev type="usb"><source><address bus="1" device="2"/></source></hostdev>', id="USB"),
        pytest.param('<hostdev type="pci"><source/></hostdev>', id="no source address"),
        pytest.param('<hostdev type="pci"/>', id="no source"),
        pytest.param('<hostdev type="pci"><source><address bus="0x41"/></source></hostdev>', id="no slot"),
        pytest.param('<hostdev><source><address bus="0x41" slot="0"/></source></hostdev>', id="no type"),
        pytest.param(
            f'<hostdev type="mdev" model="vfio-ap"><source><address uuid="{UUID}"/></source></hostdev>',
            id="a crypto mdev",
        ),
        pytest.param(
            '<hostdev type="mdev" model="vfio-pci"><source><address uuid="../x"/></source></hostdev>', id="no UUID"
        ),
        pytest.param('<interface type="ethernet"><source><address bus="1" slot="0"/></source></interface>', id="a tap"),
        pytest.param('<disk type="nvme"><source><address bus="1" slot="0"/></source></disk>', id="an NVMe disk"),
        pytest.param('<!-- <hostdev type="pci"/> -->', id="a comment"),
        pytest.param("<?hostdev type?>", id="a processing instruction"),
        pytest.param(
            '<x:hostdev xmlns:x="urn:x" type="pci"><source><address bus="1" slot="0"/></source></x:hostdev>',
            id="a namespace",
        ),
    ],
)
def test_what_is_no_passed_through_pci_device(device: str) -> None:
    assert domain.parse(vm([device])).guest.hostdevs == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('<memory unit="b">17179869184</memory>', 16 << 30),
        ("<memory>4</memory>", 4096),
        ('<memory unit="">4</memory>', 4096),
        ('<memory unit="GiB">2</memory>', 2 << 30),
        ('<memory unit="gb">2</memory>', 2_000_000_000),
        ('<memory unit="byte">7</memory>', 7),
        ('<memory unit="m">3</memory>', 3 << 20),
        ('<memory unit="PiB">1</memory>', 1 << 50),
        (f'<memory unit="b">{"9" * 18}</memory>', 10**18 - 1),
        (f'<memory unit="b">{"9" * 19}</memory>', 0),
        ('<memory unit="parsec">2</memory>', 2048),
        ("<memory>much</memory>", 0),
        ("", 0),
    ],
)
def test_memory(text: str, expected: int) -> None:
    assert domain.parse(f"<domain>{text}</domain>".encode()).guest.address_space.memory_bytes == expected


@pytest.mark.parametrize(
    ("cpu", "expected"),
    [
        ("", (None, False, None)),
        ('<cpu mode="host-model"/>', ("host-model", False, None)),
        ('<cpu mode="custom"><maxphysaddr mode="emulate" bits="46"/></cpu>', ("custom", True, 46)),
        ('<cpu><maxphysaddr mode="emulate" bits="65"/></cpu>', (None, True, None)),
        ('<cpu><maxphysaddr mode="emulate"/></cpu>', (None, True, None)),
        ('<cpu><maxphysaddr mode="passthrough" limit="46"/></cpu>', (None, True, None)),
        ('<cpu><maxphysaddr mode="passthrough" bits="46"/></cpu>', (None, True, None)),
    ],
)
def test_address_bits(cpu: str, expected: tuple[str | None, bool, int | None]) -> None:
    space = domain.parse(f"<domain>{cpu}</domain>".encode()).guest.address_space

    assert (space.cpu_mode, space.has_maxphysaddr, space.emulated_bits) == expected


@pytest.mark.parametrize(
    ("system", "is_efi"),
    [
        ("<os/>", False),
        ('<os firmware="efi"/>', True),
        ('<os firmware="bios"/>', False),
        ('<os><loader type="pflash">/x.fd</loader></os>', True),
        ('<os><loader type="rom">/x.fd</loader></os>', False),
    ],
)
def test_firmware(system: str, is_efi: bool) -> None:
    assert domain.parse(f"<domain>{system}</domain>".encode()).guest.address_space.is_efi is is_efi


# What decides where libvirt looks for a place, in all the ways to write it.
PORT, SLOT = Connection.PORT, Connection.CONVENTIONAL
LOOKS_FOR = {
    "a model as an attribute": ('<sound model="ich6"/>', SLOT),
    "a model as an attribute, of a chip that q35 has": ('<sound model="ich9"/>', None),
    "a model as the type of a child": ('<interface type="ethernet"><model type="e1000e"/></interface>', PORT),
    "another model as the type of a child": ('<interface type="ethernet"><model type="rtl8139"/></interface>', SLOT),
    "a model as the name of a child": (
        '<serial type="pty"><target type="pci-serial"><model name="pci-serial"/></target></serial>',
        SLOT,
    ),
    "a model as the name of a child of its own": ('<shmem name="a"><model name="virtio"/></shmem>', PORT),
    "the type of a target": ('<serial type="pty"><target type="pci-serial"/></serial>', SLOT),
    "another type of a target": ('<serial type="pty"><target type="isa-serial"/></serial>', None),
    "the bus of a target": ('<disk type="file"><target dev="vda" bus="virtio"/></disk>', PORT),
    "another bus of a target": ('<disk type="file"><target dev="sda" bus="scsi"/></disk>', None),
    "a bus as an attribute": ('<input type="tablet" bus="virtio"/>', PORT),
    "another bus as an attribute": ('<input type="tablet" bus="usb"/>', None),
    "the first controller of a kind": ('<controller type="usb" index="0" model="ich9-ehci1"/>', None),
    "a first controller without an index": ('<controller type="usb" model="ich9-ehci1"/>', None),
    "the second controller of a kind": ('<controller type="usb" index="1" model="ich9-ehci1"/>', SLOT),
    "an address that is no PCI address": ('<rng model="virtio"><address type="virtio-mmio"/></rng>', None),
    "an address of type PCI without a place": ('<rng model="virtio"><address type="pci"/></rng>', PORT),
    "an address without a type": ('<rng model="virtio"><address/></rng>', PORT),
}


@pytest.mark.parametrize("what", LOOKS_FOR)
def test_what_libvirt_will_look_for(what: str) -> None:
    device, connection = LOOKS_FOR[what]
    xml = vm(['<memballoon model="none"/>', device])

    assert domain.parse(xml).guest.endpoints == (
        () if connection is None else (Endpoint(connection=connection, address=None, key=2),)
    )


@pytest.mark.parametrize(
    ("attributes", "source"),
    [
        pytest.param('bus="255" slot="31" function="7"', PciAddress(0, 255, 31, 7), id="the highest numbers"),
        pytest.param('domain="0xffffffff" bus="1" slot="0"', PciAddress(0xFFFF_FFFF, 1, 0, 0), id="the highest domain"),
        pytest.param('bus="256" slot="0"', None, id="a bus above 255"),
        pytest.param('bus="1" slot="32"', None, id="a slot above 31"),
        pytest.param('bus="1" slot="0" function="8"', None, id="a function above 7"),
        pytest.param('domain="0x100000000" bus="1" slot="0"', None, id="a domain above 32 bits"),
        pytest.param('domain="x" bus="1" slot="0"', None, id="a domain that is a word"),
    ],
)
def test_host_addresses(attributes: str, source: PciAddress | None) -> None:
    xml = vm([f'<hostdev type="pci"><source><address {attributes}/></source></hostdev>'])

    assert [hostdev.source for hostdev in domain.parse(xml).guest.hostdevs] == ([] if source is None else [source])


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("ua-gpu-a", "a"),
        ("ua-hostdevice-a", "a"),
        ("ua-dra-hostdevice-a", "a"),
        ("ua-gpu-ua-sriov-a", "ua-sriov-a"),
        ("ua-gpu-", A),
        ("ua-other-a", A),
        ("x-ua-gpu-a", A),
    ],
)
def test_the_name_of_a_device_is_behind_kubevirts_first_prefix(alias: str, name: str) -> None:
    xml = vm([hostdev(A, alias, prefix="")])

    assert [(device.name, device.alias) for device in domain.parse(xml).guest.hostdevs] == [(name, alias)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param('<controller type="pci" index="255"/>', Controller(index=255, model=""), id="an index alone"),
        pytest.param(
            '<controller type="pci" index="1" model="pcie-root-port"><target busNr="256" hotplug="on"><node>x</node>'
            '</target><address type="pci" bus="0" slot="2" multifunction="on"/></controller>',
            Controller(index=1, model="pcie-root-port", address=GuestAddress(0, 2), is_multifunction=True),
            id="multifunction, and a bus and a node that make no sense",
        ),
        pytest.param(
            '<controller type="pci" index="1" model="pcie-expander-bus"><target busNr="255"><node> 3 </node></target>'
            '<address type="pci" bus="0" slot="32" multifunction="on"/></controller>',
            Controller(index=1, model="pcie-expander-bus", bus_nr=255, cell=3),
            id="a slot that makes no sense",
        ),
    ],
)
def test_controllers(text: str, expected: Controller) -> None:
    assert domain.parse(vm([text])).guest.controllers == (expected,)


@pytest.mark.parametrize(
    "xml",
    [
        pytest.param('<cpu><numa><cell id="x" cpus="0"/></numa></cpu>', id="a cell whose id is a word"),
        pytest.param('<numatune><memnode cellid="-1" nodeset="0"/></numatune>', id="a memnode of cell -1"),
        pytest.param('<numatune><memnode nodeset="0"/></numatune>', id="a memnode of no cell"),
        pytest.param('<cputune><vcpupin vcpu="" cpuset="0"/></cputune>', id="a pin of no vCPU"),
        pytest.param(
            '<devices><controller type="pci" model="pcie-root"/></devices>', id="a controller without an index"
        ),
        pytest.param('<devices><controller type="pci" index="256"/></devices>', id="a controller with a high index"),
        pytest.param('<devices><controller type="usb" index="1"/></devices>', id="a controller of another type"),
    ],
)
def test_what_makes_no_sense_is_not_there(xml: str) -> None:
    guest = domain.parse(f"<domain>{xml}</domain>".encode()).guest

    assert (guest.cells, guest.memnodes, guest.pins, guest.controllers) == ((), {}, {}, ())


def test_lists_that_make_no_sense_are_empty() -> None:
    xml = '<cpu><numa><cell id="0" cpus="y"/></numa></cpu><numatune><memnode cellid="0" nodeset="x"/></numatune>'
    xml += '<cputune><vcpupin vcpu="0" cpuset="0-"/></cputune>'
    guest = domain.parse(f"<domain>{xml}</domain>".encode()).guest

    assert (guest.cells, guest.memnodes, guest.pins) == (
        (Cell(id=0, vcpus=frozenset()),),
        {0: frozenset()},
        {0: frozenset()},
    )


# What is refused.

LAUGHS = "".join(f'<!ENTITY l{n + 1} "{f"&l{n};" * 10}">' for n in range(9))


@pytest.mark.parametrize(
    ("xml", "message"),
    [
        pytest.param(b"", "cannot parse the domain XML: Document is empty", id="nothing"),
        pytest.param(b"   \n", "cannot parse the domain XML: Start tag expected, '<' not found", id="white space"),
        pytest.param(b"garbage", "cannot parse the domain XML: Start tag expected, '<' not found", id="garbage"),
        pytest.param(b"\x1f\x8b\x08\xff\xfe", "cannot parse the domain XML: ", id="bytes"),
        pytest.param(b"<domain>", "cannot parse the domain XML: ", id="half a document"),
        pytest.param(
            b"<domain/><domain/>", "cannot parse the domain XML: Extra content at the end", id="two documents"
        ),
        pytest.param(
            b"<domain a='1' a='2'/>", "cannot parse the domain XML: Attribute a redefined", id="an attribute twice"
        ),
        pytest.param(
            b"<x:domain/>", "cannot parse the domain XML: Namespace prefix x on domain is not defined", id="a prefix"
        ),
        pytest.param(b"<domain>\xff</domain>", "cannot parse the domain XML: ", id="no UTF-8"),
        pytest.param(b"<domainsnapshot/>", "its root is <domainsnapshot>, expected <domain>", id="another document"),
        pytest.param(b"<domain xmlns='urn:x'/>", "its root is <{urn:x}domain>, expected <domain>", id="a namespace"),
        pytest.param(b"<!DOCTYPE domain><domain/>", "it has a DOCTYPE, expected none", id="a DOCTYPE"),
        pytest.param(
            b'<!DOCTYPE domain [<!ENTITY a "b">]><domain>&a;</domain>',
            "it has a DOCTYPE, expected none",
            id="an entity",
        ),
        pytest.param(
            b'<!DOCTYPE domain [<!ENTITY a SYSTEM "file:///etc/passwd">]><domain>&a;</domain>',
            "it has a DOCTYPE, expected none",
            id="an external entity",
        ),
        pytest.param(
            b'<!DOCTYPE domain SYSTEM "http://127.0.0.1:1/x.dtd"><domain/>',
            "it has a DOCTYPE, expected none",
            id="an external DTD",
        ),
        pytest.param(
            f'<!DOCTYPE domain [<!ENTITY l0 "ha">{LAUGHS}]><domain>&l9;</domain>'.encode(),
            "cannot ",
            id="a billion laughs",
        ),
        pytest.param(
            f'<!DOCTYPE domain [<!ENTITY l0 "ha">{LAUGHS}]><domain a="&l9;"/>'.encode(),
            "cannot ",
            id="a billion laughs in an attribute",
        ),
        pytest.param(
            b"<domain>&nbsp;</domain>", "cannot parse the domain XML: Entity 'nbsp' not defined", id="an unknown entity"
        ),
        pytest.param(
            b"<domain>" + b"<a>" * 100_000 + b"</a>" * 100_000 + b"</domain>",
            "cannot parse the domain XML: Excessive depth in document: 256",
            id="100,000 elements in each other",
        ),
        pytest.param("<domain/>".encode("utf-16"), "it has NUL bytes, expected UTF-8", id="UTF-16"),
        pytest.param(
            '<?xml version="1.0" encoding="utf-16"?><domain/>'.encode("utf-16"),
            "it has NUL bytes, expected UTF-8",
            id="UTF-16 that says so",
        ),
        pytest.param("<domain/>".encode("utf-32"), "it has NUL bytes, expected UTF-8", id="UTF-32"),
        pytest.param(
            b'<?xml version="1.0" encoding="ISO-8859-1"?><domain>\xe4</domain>',
            "its encoding is ISO-8859-1, expected UTF-8",
            id="Latin-1",
        ),
        pytest.param(b"<domain>\0</domain>", "it has NUL bytes, expected UTF-8", id="a NUL byte"),
    ],
)
def test_what_is_no_domain_is_refused(xml: bytes, message: str) -> None:
    with pytest.raises(DomainXmlError) as refusal:
        domain.parse(xml)

    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 200


def test_an_external_entity_is_not_read(tmp_path: Path) -> None:
    """A pipe without a writer would hang whoever opens it."""
    os.mkfifo(tmp_path / "pipe")
    xml = f'<!DOCTYPE domain [<!ENTITY a SYSTEM "file://{tmp_path}/pipe">]><domain>&a;</domain>'.encode()

    with pytest.raises(DomainXmlError, match="DOCTYPE"):
        domain.parse(xml)


def test_a_document_of_the_largest_size_is_read_and_one_byte_more_is_refused() -> None:
    text = "<domain><name>x</name><!--{}--></domain>"
    largest = text.format("x" * (MAX_DOMAIN_XML_BYTES - len(text) + 2)).encode()

    assert len(largest) == MAX_DOMAIN_XML_BYTES
    assert domain.parse(largest).name == "x"
    with pytest.raises(DomainXmlTooLarge) as refusal:
        domain.parse(largest + b"\n")
    assert str(refusal.value) == "cannot read the domain XML: it has 1048577 bytes, at most 1048576 are accepted"


def test_a_byte_order_mark_and_a_declaration_are_no_obstacle() -> None:
    assert (
        domain.parse(b'\xef\xbb\xbf<?xml version="1.0" encoding="utf-8"?><domain><name>\xc3\xa4</name></domain>').name
        == "ä"
    )


# Writing.

RICH = """\
<?xml version="1.0" encoding="UTF-8"?>
<!-- in front of the domain -->
<?one before?>
<domain type="kvm" xmlns:qemu="http://libvirt.org/schemas/domain/qemu/1.0">
  <name>a &amp; b</name>
  <os><type arch="x86_64" machine="q35">hvm</type></os>
  <title><![CDATA[<not> & parsed]]></title>
  <description>two
lines, 'quoted' &quot;twice&quot; ä 語 &#x1F600;</description>
  <devices>
    <!-- a comment -->
    <unknown xmlns="urn:unknown" attribute='single'>text<child/>tail</unknown>
    <?two between?>
    <hostdev managed="no" type="pci">
      <source><address function="0x0" slot="0x00" bus="0x41" domain="0x0000"/></source>
      <rom bar="off"/> <!-- behind -->
    </hostdev>
    <x:hostdev xmlns:x="urn:x"/>
  </devices>
  <cpu><numa><cell id="0" cpus="0" memory="1" unit="GiB"/><cell id="1" cpus="1" memory="1" unit="GiB"/></numa></cpu>
  <numatune><memnode cellid="0" nodeset="0"/><memnode cellid="1" nodeset="1"/></numatune>
  <metadata><kubevirt xmlns="http://kubevirt.io"><uid></uid></kubevirt></metadata>
  <qemu:commandline>
    <qemu:arg value="-set"/>
    <qemu:env name="A" value="b"/>
  </qemu:commandline>
</domain>
<!-- behind the domain -->
"""
TAB = "\t"
RICH_ANSWER = f"""\
<?xml version='1.0' encoding='UTF-8'?>
<!-- in front of the domain --><?one before?><domain xmlns:qemu="http://libvirt.org/schemas/domain/qemu/1.0" type="kvm">
  <name>a &amp; b</name>
  <os><type arch="x86_64" machine="q35">hvm</type></os>
  <title><![CDATA[<not> & parsed]]></title>
  <description>two
lines, 'quoted' "twice" ä 語 😀</description>
  <devices>
    <!-- a comment -->
    <unknown xmlns="urn:unknown" attribute="single">text<child/>tail</unknown>
    <?two between?>
    <hostdev managed="no" type="pci">
      <source><address function="0x0" slot="0x00" bus="0x41" domain="0x0000"/></source>
      <rom bar="off"/> <!-- behind -->
      {PLACED}
    </hostdev>
    <x:hostdev xmlns:x="urn:x"/>
    <controller type="pci" index="17" model="pcie-expander-bus">
    {TAB}<target busNr="254">
    {TAB}{TAB}<node>0</node>
    {TAB}</target>
    {TAB}<alias name="ua-pcie-numa-expander-17"/>
    {TAB}<address type="pci" domain="0x0000" bus="0x00" slot="0x1e" function="0x0"/>
    </controller>
    <controller type="pci" index="18" model="pcie-root-port">
    {TAB}<target hotplug="off"/>
    {TAB}<alias name="ua-pcie-numa-port-18"/>
    {TAB}<address type="pci" domain="0x0000" bus="0x11" slot="0x00" function="0x0"/>
    </controller>
  </devices>
  <cpu><numa><cell id="0" cpus="0" memory="1" unit="GiB"/><cell id="1" cpus="1" memory="1" unit="GiB"/></numa></cpu>
  <numatune><memnode cellid="0" nodeset="0"/><memnode cellid="1" nodeset="1"/></numatune>
  <metadata><kubevirt xmlns="http://kubevirt.io"><uid/></kubevirt></metadata>
  <qemu:commandline>
    <qemu:arg value="-set"/>
    <qemu:env name="A" value="b"/>
  </qemu:commandline>
</domain><!-- behind the domain -->"""


def test_everything_else_in_a_rich_document_is_kept() -> None:
    """Only line breaks outside <domain> are not, because XML knows none there."""
    assert answer(RICH.encode()).decode() == RICH_ANSWER


def bare(xml: bytes) -> str:
    """C14N without the hook's own controllers and without the address of the one hostdev."""
    root = etree.fromstring(xml, etree.XMLParser(strip_cdata=False))
    devices = root.find("devices")
    assert devices is not None
    for element in devices.findall("controller") + devices.findall("hostdev/address"):
        parent = element.getparent()
        assert parent is not None
        parent.remove(element)
    return re.sub(r"\s+<", "<", etree.canonicalize(etree.tostring(root, encoding="unicode"), with_comments=True))


def test_only_own_controllers_and_the_address_differ_in_canonical_form() -> None:
    assert bare(RICH.encode()) == bare(answer(RICH.encode()))


@pytest.mark.parametrize(
    "xml",
    [
        pytest.param(
            RICH.replace('"0x41"', '"0x99"').encode(), id="a rich document with a device that sysfs does not know"
        ),
        pytest.param(b"<domain  ><devices ></devices></domain>\n\n", id="odd white space"),
        pytest.param(b"\xef\xbb\xbf<domain/>", id="a byte order mark"),
        pytest.param(b"<domain a='1'><x>&#65;</x><!----></domain>", id="odd spelling"),
    ],
)
def test_an_unchanged_document_is_the_very_same_bytes(xml: bytes) -> None:
    assert answer(xml) is xml


def devices_of(answered: bytes) -> str:
    """The text of <devices>."""
    text = answered.decode()
    return text[text.index("<devices>") : text.index("</devices>") + len("</devices>")]


OWN = """\
		<controller type="pci" index="17" model="pcie-expander-bus">
			<target busNr="254">
				<node>0</node>
			</target>
			<alias name="ua-pcie-numa-expander-17"/>
			<address type="pci" domain="0x0000" bus="0x00" slot="0x1e" function="0x0"/>
		</controller>
		<controller type="pci" index="18" model="pcie-root-port">
			<target hotplug="off"/>
			<alias name="ua-pcie-numa-port-18"/>
			<address type="pci" domain="0x0000" bus="0x11" slot="0x00" function="0x0"/>
		</controller>
"""
GPU = '<hostdev type="pci">\n\t\t\t<source><address bus="0x41" slot="0"/></source>\n\t\t</hostdev>'
GPU_PLACED = GPU.replace("\t\t</hostdev>", f"\t\t\t{PLACED}\n\t\t</hostdev>")
Q35 = '<os><type arch="x86_64" machine="q35"/></os>'
CELLS = '<cpu mode="host-model"><numa><cell id="0" cpus="0"/><cell cpus="1"/></numa></cpu>'
CELLS += '<numatune><memnode cellid="0" nodeset="0"/><memnode cellid="1" nodeset="1"/></numatune>'
BALLOON = '<memballoon model="none"/>'
USB = '<controller type="usb" index="0" model="none"/>'


def lines(*elements: str) -> bytes:
    """A VM with each device on a line of its own."""
    devices = "".join(f"\t\t{element}\n" for element in elements)
    return f"<domain>\n\t{Q35}\n\t<devices>\n{devices}\t</devices>\n\t{CELLS}\n</domain>".encode()


@pytest.mark.parametrize(
    ("xml", "expected"),
    [
        pytest.param(
            lines(GPU, BALLOON),
            f"<devices>\n\t\t{GPU_PLACED}\n\t\t{BALLOON}\n{OWN}\t</devices>",
            id="without another controller they come last",
        ),
        pytest.param(
            lines(USB, GPU, BALLOON),
            f"<devices>\n\t\t{USB}\n{OWN}\t\t{GPU_PLACED}\n\t\t{BALLOON}\n\t</devices>",
            id="else behind the last controller",
        ),
        pytest.param(
            lines(GPU, BALLOON, USB),
            f"<devices>\n\t\t{GPU_PLACED}\n\t\t{BALLOON}\n\t\t{USB}\n{OWN}\t</devices>",
            id="a controller is the last device",
        ),
        pytest.param(
            lines(GPU, f"{USB}\n\t\t<!-- the end -->", BALLOON),
            f"<devices>\n\t\t{GPU_PLACED}\n\t\t{USB}\n{OWN}\t\t<!-- the end -->\n\t\t{BALLOON}\n\t</devices>",
            id="a comment follows",
        ),
    ],
)
def test_controllers_stand_on_lines_of_their_own(xml: bytes, expected: str) -> None:
    assert devices_of(answer(xml)) == expected


def test_an_address_is_replaced_where_it_is_and_keeps_nothing_of_the_old_one() -> None:
    old = '<address type="" domain="0" bus="3" slot="" function="" multifunction="on" uid="7"/>'
    inside = f'<hostdev type="pci">{old}<source><address bus="0x41" slot="0"/></source></hostdev>'

    assert f'<hostdev type="pci">{PLACED}<source>' in answer(lines(inside)).decode()


def test_a_document_on_one_line_stays_on_one_line() -> None:
    xml = re.sub(rb"\n\t*", b"", lines(USB, GPU, BALLOON))
    own = re.sub(r"\n\t*", "", OWN.strip())

    assert devices_of(answer(xml)) == re.sub(r"\n\t*", "", f"<devices>{USB}{own}{GPU_PLACED}{BALLOON}</devices>")


def test_spaces_are_kept_as_the_indentation_where_they_are_it() -> None:
    text = answer(lines(GPU, USB).replace(b"\t", b"  ")).decode()

    assert '\n    <controller type="pci" index="17" model="pcie-expander-bus">\n' in text
    assert "\n    </controller>\n    <controller" in text
    assert text.endswith("</controller>\n  </devices>\n" + text[text.index("</devices>\n") + len("</devices>\n") :])


@pytest.mark.parametrize("layout", ["lines", "one line"])
@pytest.mark.parametrize("order", [(USB, GPU, BALLOON), (GPU, BALLOON), (GPU, USB), (BALLOON, USB, GPU)], ids=range(4))
def test_what_was_written_goes_without_a_trace(order: tuple[str, ...], layout: str) -> None:
    before = lines(*order)
    if layout == "one line":
        before = re.sub(rb"\n\t*", b"", before)
    placed = answer(before)

    assert answer(placed, Config(exclude=frozenset({A}))) == etree.tostring(
        etree.fromstring(before), encoding="UTF-8", xml_declaration=False
    )


def test_text_around_what_is_removed_is_kept() -> None:
    own = controller(17, "pcie-expander-bus", "00:1e.0", alias=f"{MARKER}expander-17")
    xml = f"<domain>{Q35}<devices>one {own} two {own} three <!----> four {own} </devices>{CELLS}</domain>"

    assert "<devices>one  two  three <!----> four  </devices>" in answer(xml.encode()).decode()


def test_distances_are_written_into_the_cells() -> None:
    xml = f"<domain>{Q35}<devices>{GPU}</devices>{CELLS}</domain>"
    rows = [
        '<sibling id="0" value="10"/><sibling id="1" value="21"/>',
        '<sibling id="0" value="21"/><sibling id="1" value="10"/>',
    ]

    assert (
        f'<cell id="0" cpus="0"><distances>{rows[0]}</distances></cell><cell cpus="1"><distances>{rows[1]}</distances></cell>'
        in answer(xml.encode(), Config(distances=Extra.AUTO)).decode()
    )


def test_distances_are_written_by_the_ids_of_the_cells_and_not_by_their_order() -> None:
    cells = '<cpu><numa><cell id="1" cpus="1"/><cell id="0" cpus="0"/></numa></cpu>'
    nodes = '<numatune><memnode cellid="0" nodeset="0"/><memnode cellid="1" nodeset="1"/></numatune>'
    xml = f"<domain>{Q35}<devices>{GPU}</devices>{cells}{nodes}</domain>"

    assert (
        '<cell id="1" cpus="1"><distances><sibling id="0" value="21"/><sibling id="1" value="10"/></distances></cell>'
        '<cell id="0" cpus="0"><distances><sibling id="0" value="10"/><sibling id="1" value="21"/></distances></cell>'
    ) in answer(xml.encode(), Config(distances=Extra.AUTO)).decode()


def test_a_declaration_is_written_where_there_was_one() -> None:
    with_one, without = b"<?xml version='1.0' encoding='UTF-8'?>\n" + lines(GPU), lines(GPU)

    assert answer(with_one) == b"<?xml version='1.0' encoding='UTF-8'?>\n" + answer(without)
    assert answer(without).startswith(b"<domain")


def test_a_plan_without_devices_to_write_to_changes_nothing() -> None:
    parsed = domain.parse(b"<domain/>")
    outcome = define_domain(lines(GPU), None, lambda: parse_recording(HOST), Config())

    assert domain.apply(parsed, replace(outcome.plan, is_changed=True, devices=())) is parsed.source


def test_the_arch_decides_what_libvirt_adds() -> None:
    """On aarch64 a SATA disk makes libvirt add a controller that needs a conventional slot; on x86_64 there is a balloon."""
    disk = '<disk type="file"><target dev="sda" bus="sata"/></disk>'
    added = {arch: domain.parse(vm([disk], arch=arch)).guest.endpoints for arch in ("x86_64", "aarch64")}
    balloon = Endpoint(connection=Connection.PORT, address=None, key=None)

    assert added == {
        "x86_64": (balloon,),
        "aarch64": (Endpoint(connection=Connection.CONVENTIONAL, address=None, key=None),),
    }
