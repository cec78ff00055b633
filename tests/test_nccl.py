"""The topology file: NCCL can read it, and with it rates every pair of a guest as on the host."""

import base64
import re
from collections.abc import Mapping, Sequence

import pytest
from click.testing import CliRunner

from hook import domain
from hook.address import PciAddress
from hook.cli import main
from hook.config import Config, Layout, Mode, Policy, TopologyFile
from hook.define import Outcome, define_domain
from hook.errors import Finding, Severity, StrictRefusal
from hook.guest import FwCfgLine
from hook.nccl import (
    CREDENTIAL,
    PATH,
    RAW_ENTRY,
    CpuNode,
    Link,
    NcclSystem,
    PciNode,
    fw_cfg_lines,
    guest_system,
    host_system,
    obstacle,
)
from hook.plan import Action
from hook.recording import parse_recording
from hook.render import plan_matrices
from hook.sysfs import all_functions, read_host
from tests import nccl_table
from tests.build import controller, host, hostdev, mdev, vm
from tests.golden import check, check_names
from tests.machines import FOLDER, NAMES, machine
from tests.nccl import MAX_NODES, Element, Refused, ratings, read
from tests.nccl_table import compared, cpu_vendor, vm_on
from tests.scenario import FOLDER as DOMAINS
from tests.scenario import Scenario

NCCL = Config(topology_file=TopologyFile.NCCL)
LIBRARY = {1: "NCCL", 2: "RCCL"}


# The recorded machines.


def guest_of(name: str, layout: Layout) -> NcclSystem:
    xml, outcome = vm_on(machine(name), layout)
    return guest_system(outcome.plan, domain.parse(xml).guest, outcome.host)


@pytest.mark.parametrize("name", NAMES)
def test_the_file_of_a_machine(name: str) -> None:
    check(f"nccl/{name}.xml", guest_of(name, Layout.NODE).text())


def test_there_are_no_other_goldens() -> None:
    check_names("nccl", [*(f"{name}.xml" for name in NAMES), "host-oci-bm-h100.xml"])


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("name", NAMES)
def test_nccl_can_read_the_file_of_a_guest(name: str, layout: Layout) -> None:
    system = guest_of(name, layout)

    assert sum(1 for _ in read(system.text(), LIBRARY[system.version]).walk()) == system.node_count


@pytest.mark.parametrize("name", NAMES)
def test_nccl_can_read_the_file_of_a_host(name: str) -> None:
    system = host_system(machine(name).host)

    read(system.text(), LIBRARY[system.version])


def test_the_file_of_a_host_is_its_tree() -> None:
    check("nccl/host-oci-bm-h100.xml", host_system(machine("oci-bm-h100").host).text())


@pytest.mark.parametrize("name", NAMES)
def test_the_model_of_nccl_finds_the_recorded_classes(name: str) -> None:
    """The judge is judged: by matrices that the same code did not make."""
    it = machine(name)
    rated = ratings(None, it.host, list(it.devices), cpu_vendor(name))

    assert {pair: level for pair, (level, _) in rated.items()} == {(a, b): it.nccl[a][b] for a, b in rated}


@pytest.mark.parametrize("name", NAMES)
def test_the_file_of_a_host_changes_nothing_on_that_host(name: str) -> None:
    it = machine(name)
    devices, vendor, system = list(it.devices), cpu_vendor(name), host_system(it.host)
    library = LIBRARY[system.version]

    with_file = ratings(system.text(), it.host, devices, vendor, library)
    assert with_file == ratings(None, it.host, devices, vendor, library)


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("name", NAMES)
def test_with_the_file_every_pair_is_rated_as_on_the_host(name: str, layout: Layout) -> None:
    rated = compared(name, layout)

    assert rated.with_file == rated.host


def test_the_figures_are_those_of_the_documents() -> None:
    shown = nccl_table.table()
    print(shown)

    assert shown in (FOLDER.parent.parent / "docs" / "nccl.md").read_text()


# Machines whose NCCL file somebody published.

PUBLISHED = tuple(sorted(path.stem for path in FOLDER.glob("*.published")))
Published = Mapping[PciAddress, tuple[str, Sequence[tuple[str, str, str]]]]


def published(name: str) -> Published:
    """NUMA id and the chain of busid, speed, width down to each device."""
    found = {}
    for line in (FOLDER / f"{name}.published").read_text().splitlines():
        if not line.startswith("#"):
            numa_id, *words = line.split()
            chain = [(busid, *link.split("x")) for busid, link in (word.split("=") for word in words)]
            found[PciAddress.parse(chain[-1][0])] = numa_id, chain
    return found  # type: ignore[return-value]


def chains(system: Element) -> dict[str, tuple[str, list[tuple[str, str, str]]]]:
    """The same of a file, for its leaves, by busid."""
    found: dict[str, tuple[str, list[tuple[str, str, str]]]] = {}

    def down(element: Element, numa_id: str, above: list[tuple[str, str, str]]) -> None:
        a = element.attributes
        chain = [*above, (a["busid"], a["link_speed"].removesuffix(" GT/s PCIe"), a["link_width"])]
        for child in element.children:
            down(child, numa_id, chain)
        if not element.children:
            found[a["busid"]] = numa_id, chain

    for cpu in system.children:
        for child in cpu.children:
            down(child, cpu.attributes["numaid"], [])
    return found


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_hosts_file_says_what_was_published(name: str) -> None:
    system = host_system(machine(name).host)
    ours = chains(read(system.text(), LIBRARY[system.version]))

    assert ours == {str(device): facts for device, facts in published(name).items()}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_guest_with_the_file_is_rated_as_the_published_one(name: str) -> None:
    it = machine(name)
    lines = ['<system version="1">']
    facts = published(name)
    for numa_id in sorted({numa_id for numa_id, _ in facts.values()}):
        lines.append(f'<cpu numaid="{numa_id}">')
        lines += tree([chain for numa, chain in facts.values() if numa == numa_id])
        lines.append("</cpu>")
    file = "\n".join([*lines, "</system>"])
    rated = compared(name, Layout.SWITCH)

    on_host = ratings(file, it.host, list(it.devices), cpu_vendor(name))
    assert {pair: rating for pair, rating in on_host.items() if rating[0] != "LOC"} == rated.with_file


def tree(members: Sequence[Sequence[tuple[str, str, str]]]) -> list[str]:
    """Elements of a file for these chains."""
    lines = []
    for top in dict.fromkeys(chain[0] for chain in members):
        busid, speed, width = top
        below = [chain[1:] for chain in members if chain[0] == top and len(chain) > 1]
        lines.append(
            f'<pci busid="{busid}" class="0x060400" link_speed="{speed} GT/s PCIe" link_width="{width}">'
        )  # NCCL reads the class from sysfs
        lines += [*tree(below), "</pci>"]
    return lines


# What the reader refuses.

GOOD = guest_of("dgx1v", Layout.NODE).text()
BROKEN: dict[str, tuple[tuple[str, str], str]] = {
    "no version": ((' version="1"', ""), "<system> has no version"),
    "version of RCCL": (('version="1"', 'version="2"'), "version 2, 1 needed"),
    "no numaid": (('numaid="0" ', ""), "<cpu> has no numaid"),
    "no class": ((' class="0x030200"', ""), "<pci> has no class"),
    "no speed": ((' link_speed="8.0 GT/s PCIe"', ""), "<pci> has no link_speed"),
    "speed in words": (("8.0 GT/s PCIe", "fast"), "link_speed='fast'"),
    "five digits of a domain": (("ffff:ff:00.0", "10000:ff:00.0"), "busid='10000:ff:00.0'"),
    "upper case": (("ffff:ff:00.0", "FFFF:ff:00.0"), "busid='FFFF:ff:00.0'"),
    "a busid twice": (("ffff:ff:01.0", "ffff:ff:00.0"), "ffff:ff:00.0 is there twice"),
    "a cpu twice": (('numaid="1"', 'numaid="0"'), "cpu0 is there twice"),
    "an element of its own": (("</cpu>", "<numa/></cpu>"), "<numa> would be dropped below <cpu>"),
    "pci below system": (("</system>", '<pci busid="0000:00:00.0"/></system>'), "<pci> would be dropped below"),
    "wrong end": (("</cpu>", "</pci>"), "</pci> does not close <cpu>"),
    "no end": (("</system>", ""), "<system> is not closed"),
    "text": (("<cpu", "words <cpu"), "expected '<', got 'w'"),
    "no quotes": (('numaid="0"', "numaid=0"), "expected a quote"),
    "long value": (('affinity="', 'affinity="' + "00000000," * 30), "is longer than 254"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_checker_refuses_what_nccl_refuses(name: str) -> None:
    (right, wrong), error = BROKEN[name]
    assert right in GOOD
    read(GOOD)

    with pytest.raises(Refused, match=error.replace("(", r"\(").replace("?", r"\?")):
        read(GOOD.replace(right, wrong, 1))


def test_the_checker_refuses_more_nodes_than_nccl_holds() -> None:
    pci = '<pci busid="0000:{0:02x}:{1:02x}.0" class="0x030200" link_speed="" link_width="0"/>'
    many = "".join(pci.format(n // 32, n % 32) for n in range(MAX_NODES - 1))

    with pytest.raises(Refused, match="too many nodes"):
        read(f'<system version="1"><cpu numaid="0">{many}</cpu></system>')


# One oddity each.

GPU = {"class": "0x030200", "vendor": "0x10de", "numa_node": 0}
NIC = {"class": "0x020000", "vendor": "0x15b3", "numa_node": 0}
FAST = {"max_link_speed": "32.0 GT/s PCIe", "max_link_width": "16"}
A, B, N = "0000:43:00.0", "0000:44:00.0", "0000:45:00.0"
PORT = "pci0000:40/0000:40:01.0"
SWITCH = f"{PORT}/0000:41:00.0"


def below(device: str, port: int) -> str:
    """The path of a device below a downstream port of the switch."""
    return f"{SWITCH}/0000:42:{port:02x}.0/{device}"


def bridges(attributes: Mapping[str, object] = FAST) -> dict[str, object]:
    """A root port, a switch and its two downstream ports."""
    paths = (PORT, SWITCH, f"{SWITCH}/0000:42:00.0", f"{SWITCH}/0000:42:01.0")
    return {path: {"class": "0x060400", "numa_node": 0, **attributes} for path in paths}


def run(devices: Mapping[str, object], xml: bytes, config: Config = NCCL, extra: str = "") -> Outcome:
    outcome = define_domain(xml, None, lambda: parse_recording(host(devices, extra=extra)), config)
    assert outcome.error is None

    return outcome


def file_of(outcome: Outcome) -> str:
    """What the guest will find, by both ways."""
    lines = {line.entry: line for line in outcome.plan.fw_cfg}
    raw = base64.b64decode(lines[RAW_ENTRY].text, validate=True).decode()
    words = lines[CREDENTIAL].text.split(" ")
    assert words[:6] == ["f~", PATH, "0644", "root", "root", "-"]
    assert base64.b64decode(words[6], validate=True).decode() == raw
    assert len(words) == 7
    return raw


def codes(outcome: Outcome) -> list[str]:
    return [str(f) for f in outcome.plan.findings if "topology-file" in f.code or f.code == "link-speed-unknown"]


def test_a_guest_gets_the_hosts_switch_and_links() -> None:
    devices = {**bridges(), below(A, 0): {**GPU, **FAST}, below(B, 1): {**NIC, **FAST}}
    outcome = run(devices, vm([hostdev(A, "gpu"), hostdev(B, "nic", prefix="ua-hostdevice-")]))

    assert file_of(outcome) == (
        '<system version="1">\n'
        '  <cpu numaid="0" affinity="00000001">\n'
        '    <pci busid="ffff:ff:00.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16">\n'
        '      <pci busid="0000:fe:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16"/>\n'
        '      <pci busid="0000:ff:00.0" class="0x020000" link_speed="32.0 GT/s PCIe" link_width="16"/>\n'
        "    </pci>\n"
        "  </cpu>\n"
        "</system>\n"
    )
    assert codes(outcome) == []


def test_rdma_is_not_lost_when_nccl_has_the_file() -> None:
    devices = {**bridges(), below(A, 0): {**GPU, **FAST}, below(B, 1): {**NIC, **FAST}}
    xml = vm([hostdev(A, "gpu"), hostdev(B, "nic", prefix="ua-hostdevice-")])
    without, with_file = run(devices, xml, Config()), run(devices, xml)

    assert [f.code for f in without.plan.findings] == ["gpudirect-lost"]
    assert [f.code for f in with_file.plan.findings] == []
    assert with_file.summary() == f"{without.summary()}; topology file"
    assert "NCCL reads the topology file instead" not in plan_matrices(without)
    assert "NCCL reads the topology file instead" in plan_matrices(with_file)


def links(outcome: Outcome) -> dict[str, tuple[str, str]]:
    """Speed and width by busid."""
    return {
        e.attributes["busid"]: (e.attributes["link_speed"], e.attributes["link_width"])
        for e in read(file_of(outcome)).walk()
        if e.name == "pci"
    }


def test_a_link_is_as_fast_as_its_slower_end() -> None:
    slow = {**FAST, "max_link_speed": "2.5 GT/s", "max_link_width": "4"}
    devices = {**bridges(slow), below(A, 0): {**GPU, **FAST}}

    assert links(run(devices, vm([hostdev(A, "gpu")])))["0000:ff:00.0"] == ("2.5 GT/s PCIe", "4")


@pytest.mark.parametrize("speed", ["2.5", "5.0", "8.0", "16.0", "32.0", "64.0"])
def test_a_speed_is_written_as_the_kernel_shows_it(speed: str) -> None:
    link = {"max_link_speed": f"{speed} GT/s PCIe", "max_link_width": "16"}
    outcome = run({PORT: {"class": "0x060400", **link}, f"{PORT}/{A}": {**GPU, **link}}, vm([hostdev(A, "gpu")]))

    assert links(outcome) == {"0000:ff:00.0": (f"{speed} GT/s PCIe", "16")}


@pytest.mark.parametrize("speed", ["Unknown", "Unknown speed"])
def test_an_end_that_says_unknown_does_not_count(speed: str) -> None:
    devices = {
        **bridges({"max_link_speed": speed, "max_link_width": "0"}),
        below(A, 0): {**GPU, "max_link_speed": "16.0 GT/s PCIe", "max_link_width": "8"},
    }
    outcome = run(devices, vm([hostdev(A, "gpu")]))

    assert links(outcome) == {"ffff:ff:00.0": ("", "0"), "0000:ff:00.0": ("16.0 GT/s PCIe", "8")}
    assert codes(outcome) == [
        "info [link-speed-unknown] the host does not say the link speed of 0000:41:00.0; "
        "NCCL takes 8 GT/s for it, as on the host"
    ]


@pytest.mark.parametrize(("count", "more"), [(8, ""), (10, " and 2 more")])
def test_a_host_without_link_speeds_is_rated_as_nccl_rates_it_there(count: int, more: str) -> None:
    paths = {f"pci0000:40/0000:40:{n:02x}.0/0000:{0x41 + n:02x}:00.0": GPU for n in range(count)}
    names = [path.rpartition("/")[2] for path in paths]
    outcome = run(paths, vm([hostdev(name, f"g{n}") for n, name in enumerate(names)]))

    assert set(links(outcome).values()) == {("", "0")}
    message = (
        f"the host does not say the link speed of {', '.join(names[:8])}{more}; "
        "NCCL takes 8 GT/s for it, as on the host"
    )
    assert outcome.plan.findings == (Finding(Severity.INFO, "link-speed-unknown", "", message),)


def test_a_vf_has_the_link_of_its_physical_function() -> None:
    pf, vf = f"{PORT}/0000:41:00.0", f"{PORT}/0000:41:00.2"
    devices = {
        PORT: {"class": "0x060400", **FAST},
        pf: {**NIC, "max_link_speed": "16.0 GT/s PCIe", "max_link_width": "8"},
        vf: {**NIC, "max_link_speed": "Unknown", "max_link_width": "0", "physfn": "0000:41:00.0"},
        f"pci0000:50/{A}": {**GPU, **FAST},
    }
    xml = vm([hostdev("0000:41:00.2", "net", prefix="ua-sriov-"), hostdev(A, "gpu")])

    assert links(run(devices, xml)) == {
        "0000:fe:00.0": ("16.0 GT/s PCIe", "8"),
        "0000:ff:00.0": ("32.0 GT/s PCIe", "16"),
    }


def test_ports_of_one_card_are_one_node() -> None:
    devices = {
        PORT: {"class": "0x060400", **FAST},
        f"{PORT}/0000:41:00.0": {**NIC, **FAST},
        f"{PORT}/0000:41:00.1": {**NIC, **FAST},
        f"pci0000:50/{A}": {**GPU, **FAST},
    }
    names = ("0000:41:00.0", "0000:41:00.1", A)
    outcome = run(devices, vm([hostdev(name, f"d{n}") for n, name in enumerate(names)]))
    places = sorted(str(d.place.guest_bdf) for d in outcome.plan.devices if d.place is not None)

    assert places == ["0000:fe:00.0", "0000:fe:00.1", "0000:ff:00.0"]
    assert list(links(outcome)) == ["0000:fe:00.0", "0000:ff:00.0"]


def test_a_vgpu_has_its_parents_place() -> None:
    uuid = "c1d2e3f4-0000-4000-8000-000000000001"
    extra = f"bus/mdev/devices/{uuid} -> ../../../devices/{below(A, 0)}/{uuid}\ndevices/{below(A, 0)}/{uuid}/remove =\n"
    outcome = run({**bridges(), below(A, 0): {**GPU, **FAST}}, vm([mdev(uuid, "vgpu")]), extra=extra)

    assert list(links(outcome)) == ["ffff:ff:00.0", "0000:ff:00.0"]


def test_two_vgpus_of_one_gpu_are_two_nodes() -> None:
    uuids = [f"c1d2e3f4-0000-4000-8000-00000000000{n}" for n in (1, 2)]
    parent = below(A, 0)
    extra = "".join(f"bus/mdev/devices/{uuid} -> ../../../devices/{parent}/{uuid}\n" for uuid in uuids)
    outcome = run({**bridges(), parent: {**GPU, **FAST}}, vm([mdev(uuid) for uuid in uuids]), extra=extra)

    assert list(links(outcome)) == ["ffff:ff:00.0", "0000:fe:00.0", "0000:ff:00.0"]


def test_a_slot_of_the_made_up_bus_has_one_switch() -> None:
    """A bus has 32 slots; the 33rd switch is on the bus below."""
    devices = {}
    for n in range(33):
        switch = f"pci0000:40/0000:40:{n % 32:02x}.{n // 32}/0000:{0x41 + n:02x}:00.0"
        devices[f"{switch}/0000:{0x70 + n:02x}:00.0/0000:{0xA0 + n:02x}:00.0"] = {**GPU, **FAST}
    outcome = run(devices, vm([hostdev(path.rpartition("/")[2]) for path in devices]))

    assert [busid for busid in links(outcome) if busid.startswith("ffff:")] == [
        *(f"ffff:ff:{slot:02x}.0" for slot in range(32)),
        "ffff:fe:00.0",
    ]


def test_a_guest_whose_cell_has_no_vcpus_has_an_empty_mask() -> None:
    outcome = run({f"{PORT}/{A}": {**GPU, **FAST}}, vm([hostdev(A, "a")], memnodes={0: "0"}, cells={0: ""}))

    assert read(file_of(outcome)).children[0].attributes == {"numaid": "0", "affinity": "00000000"}


def test_one_switch_whose_devices_go_to_two_cells_is_there_twice() -> None:
    devices = {**bridges(), below(A, 0): {**GPU, **FAST}, below(B, 1): {**GPU, **FAST, "numa_node": 1}}
    outcome = run(devices, vm([hostdev(A, "a"), hostdev(B, "b")]))

    assert [
        (cpu.attributes["numaid"], [e.attributes["busid"] for e in cpu.walk() if e.name == "pci"])
        for cpu in read(file_of(outcome)).children
    ] == [("0", ["ffff:ff:00.0", "0000:fd:00.0"]), ("1", ["ffff:ff:01.0", "0000:ff:00.0"])]


def test_a_switch_that_sysfs_does_not_list_has_no_link() -> None:
    """Only its place in the path of the device is known."""
    outcome = run({below(A, 0): {**GPU, **FAST}}, vm([hostdev(A, "a")]))

    assert links(outcome) == {"ffff:ff:00.0": ("", "0"), "0000:ff:00.0": ("32.0 GT/s PCIe", "16")}
    assert [f.message[:52] for f in outcome.plan.findings if f.code == "link-speed-unknown"] == [
        "the host does not say the link speed of 0000:41:00.0"
    ]


def test_other_devices_are_not_in_the_file() -> None:
    devices = {f"{PORT}/{A}": {**GPU, **FAST}, f"pci0000:50/{B}": {"class": "0x010802", "numa_node": 0, **FAST}}

    assert list(links(run(devices, vm([hostdev(A, "a"), hostdev(B, "nvme")])))) == ["0000:fe:00.0"]


def test_gpus_and_nics_that_are_not_placed_are_named() -> None:
    devices = {
        f"{PORT}/{A}": {**GPU, **FAST},
        f"pci0000:50/{B}": {**GPU, "numa_node": -1},
        f"pci0000:60/{N}": {**NIC, "numa_node": -1},
        "pci0000:70/0000:71:00.0": {"class": "0x010802", "numa_node": -1},
    }
    names = (A, B, N, "0000:71:00.0")
    xml = vm([hostdev(name, f"d{n}") for n, name in enumerate(names)])

    assert [
        finding.subject
        for finding in run(
            devices, xml, Config(topology_file=TopologyFile.NCCL, exclude=frozenset({"d2"}))
        ).plan.findings
        if finding.code == "not-in-topology-file"
    ] == ["d1"]


def test_what_others_placed_and_what_sysfs_does_not_know_is_not_in_the_file() -> None:
    """Nor does it matter that nobody knows how fast their links are."""
    theirs = [
        controller(1, "pcie-expander-bus", "00:05.0", bus_nr=100, node=0),
        controller(2, "pcie-root-port", "01:00.0"),
        hostdev(B, "b", address="02:00.0"),
        hostdev("0000:99:00.0", "ghost"),
    ]
    devices = {PORT: {"class": "0x060400", **FAST}, f"{PORT}/{A}": {**GPU, **FAST}, f"pci0000:50/{B}": GPU}
    outcome = run(devices, vm([*theirs, hostdev(A, "a")]))

    assert [(device.hostdev.name, device.action) for device in outcome.plan.devices] == [
        ("b", Action.KEPT),
        ("ghost", Action.LEFT),
        ("a", Action.PLACED),
    ]
    assert list(links(outcome)) == ["0000:ff:00.0"]
    why = "the hook does not place it, so its guest address is unknown; NCCL takes it as the guest's sysfs shows it"
    assert outcome.plan.findings == (
        Finding(Severity.WARNING, "unknown-device", "ghost", "sysfs does not know 0000:99:00.0"),
        Finding(Severity.INFO, "not-in-topology-file", "b", why),
        Finding(Severity.INFO, "not-in-topology-file", "ghost", why),
    )


def test_a_vm_with_amd_gpus_gets_the_version_that_rccl_reads() -> None:
    devices = {f"{PORT}/{A}": {**GPU, **FAST, "class": "0x120000", "vendor": "0x1002"}}

    read(file_of(run(devices, vm([hostdev(A, "a")]))), "RCCL")


def test_a_vm_with_gpus_of_both_makers_gets_none() -> None:
    devices = {f"{PORT}/{A}": {**GPU, "vendor": "0x1002"}, f"pci0000:50/{B}": GPU}
    outcome = run(devices, vm([hostdev(A, "a"), hostdev(B, "b")]))

    why = "NCCL and RCCL look in the same place and refuse each other's files; the VM has GPUs of both"
    assert outcome.plan.fw_cfg == ()
    assert outcome.plan.findings == (
        Finding(Severity.WARNING, "topology-file-dropped", "", f"the NCCL topology file is left out: {why}"),
    )


def test_a_vm_without_gpus_gets_none() -> None:
    outcome = run({f"{PORT}/{A}": NIC}, vm([hostdev(A, "a")]))

    assert outcome.plan.fw_cfg == ()
    assert outcome.plan.findings == (
        Finding(Severity.INFO, "topology-file-without-gpu", "", "no GPU is placed, so there is none"),
    )


def crowd() -> tuple[dict[str, object], bytes]:
    """40 cards with eight functions each: more nodes than NCCL has room for."""
    paths = {
        f"pci0000:40/0000:40:{n % 32:02x}.{n // 32}/0000:{n + 0x50:02x}:00.{f}": GPU
        for n in range(40)
        for f in range(8)
    }
    names = [path.rpartition("/")[2] for path in paths]
    return dict(paths), vm([hostdev(name, f"g{n}") for n, name in enumerate(names)])


def test_more_than_nccl_can_read_is_left_out() -> None:
    devices, xml = crowd()
    outcome = run(devices, xml)

    assert sum(d.place is not None for d in outcome.plan.devices) == 320
    assert outcome.plan.fw_cfg == ()
    assert codes(outcome) == [
        "warning [topology-file-dropped] the NCCL topology file is left out: it has 322 nodes, and NCCL reads at most 256"
    ]
    assert b"fwcfg" not in outcome.xml


def test_as_much_as_nccl_can_read_is_given() -> None:
    gpu = PciNode(address=PciAddress(0, 1, 0, 0), class_code=0x030200, link=Link(speed_mts=None, width=None))
    lines = [FwCfgLine(entry="opt/x", start="", text="")]
    fits, too_many = (
        NcclSystem(version=1, cpus=(CpuNode(numa_id=0, affinity=None, children=(gpu,) * n),)) for n in (254, 255)
    )

    assert obstacle(fits, lines) is None
    assert obstacle(too_many, lines) == "it has 257 nodes, and NCCL reads at most 256"


def test_strict_refuses_a_vm_whose_file_is_left_out() -> None:
    devices, xml = crowd()

    with pytest.raises(StrictRefusal, match="322 nodes, and NCCL reads at most 256"):
        run(devices, xml, Config(topology_file=TopologyFile.NCCL, policy=Policy.STRICT))


def test_a_word_of_a_command_line_has_an_end() -> None:
    system = guest_of("dgx1v", Layout.NODE)
    fits, too_long = (FwCfgLine(entry="opt/x", start="", text="x" * n) for n in (131071 - 18, 131072 - 18))

    assert obstacle(system, fw_cfg_lines(system.text())) is None
    assert obstacle(system, [fits]) is None
    assert obstacle(system, [too_long]) == "QEMU's argument for it has 131072 bytes, and Linux takes at most 131071"


def test_a_mask_that_nccl_cannot_hold_is_left_to_the_guest() -> None:
    devices = {f"{PORT}/{A}": {**GPU, **FAST}}
    masks = []
    for last in (895, 896):
        outcome = run(devices, vm([hostdev(A, "a")], cells={0: f"0-{last}"}, memnodes={0: "0"}))
        masks.append(read(file_of(outcome)).children[0].attributes.get("affinity"))

    assert masks == [",".join(["ffffffff"] * 28), None]


def test_host_domains_of_five_digits_are_left_out_of_a_hosts_file() -> None:
    it = machine("domain32")

    assert {address.domain for address in it.host.functions} == {0, 0x10000}
    assert ":10000:" not in host_system(it.host).text()
    assert "10000:" not in host_system(it.host).text()


def test_a_switch_that_sysfs_does_not_list_has_its_address_alone_in_a_hosts_file() -> None:
    tree = parse_recording(host({below(A, 0): {**GPU, **FAST}}))
    text = host_system(read_host(tree, all_functions(tree), ())).text()

    assert re.findall(r'busid="([^"]*)" class="([^"]*)"(?: vendor="([^"]*)")?', text) == [
        ("0000:41:00.0", "0x060400", ""),
        ("0000:43:00.0", "0x030200", ""),
    ]


def test_the_node_of_a_hosts_device_is_that_of_its_outermost_switch() -> None:
    """Here the GPU itself says -1, the NIC has no switch, and the only node has no CPUs."""
    devices = {
        SWITCH: {"class": "0x060400", "numa_node": 1},
        f"{SWITCH}/0000:42:00.0": {"class": "0x060400", "numa_node": -1},
        below(A, 0): {**GPU, "numa_node": -1},
        "pciffff:00/ffff:00:01.0": {**NIC, "numa_node": -1},
    }
    tree = parse_recording(host(devices, nodes={1: ""}))

    assert host_system(read_host(tree, all_functions(tree), ())).text() == (
        '<system version="1">\n'
        '  <cpu numaid="-1">\n'
        '    <pci busid="ffff:00:01.0" class="0x020000" link_speed="" link_width="0"/>\n'
        "  </cpu>\n"
        '  <cpu numaid="1" affinity="00000000">\n'
        '    <pci busid="0000:41:00.0" class="0x060400" link_speed="" link_width="0">\n'
        '      <pci busid="0000:43:00.0" class="0x030200" link_speed="" link_width="0"/>\n'
        "    </pci>\n"
        "  </cpu>\n"
        "</system>\n"
    )


# The option.


@pytest.mark.parametrize("config", [Config(), Config(topology_file=TopologyFile.NCCL, mode=Mode.OFF)])
def test_it_is_off_unless_asked_for(config: Config) -> None:
    outcome = run({f"{PORT}/{A}": GPU}, vm([hostdev(A, "a")]), config)

    assert outcome.plan.fw_cfg == ()
    assert codes(outcome) == []
    assert b"fwcfg" not in outcome.xml


def test_observe_writes_nothing() -> None:
    xml = vm([hostdev(A, "a")])
    outcome = run({f"{PORT}/{A}": GPU}, xml, Config(topology_file=TopologyFile.NCCL, mode=Mode.OBSERVE))

    assert (outcome.xml, len(outcome.plan.fw_cfg)) == (xml, 2)


def test_a_vm_without_devices_hears_nothing_of_it() -> None:
    outcome = run({}, vm([]))

    assert [f.code for f in outcome.plan.findings] == ["no-devices"]


@pytest.mark.parametrize("option", [[], ["--topology-file", "nccl"]])
def test_plan_prints_the_file(option: list[str]) -> None:
    scenario = Scenario("two-node-4gpu-4sriov")
    files = ["--domain", str(DOMAINS / f"{scenario.name}.xml"), "--sysfs", str(scenario.sysfs_path)]
    result = CliRunner().invoke(main, ["plan", "--format", "nccl", *files, *option])
    outcome = define_domain(scenario.xml(), scenario.vmi, lambda: scenario.sysfs, NCCL)

    assert (result.exit_code, result.stderr, result.stdout) == (0, "", file_of(outcome))


def test_host_prints_its_own() -> None:
    result = CliRunner().invoke(main, ["host", "--format", "nccl", "--sysfs", str(FOLDER / "dgx2.sysfs")])

    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == host_system(machine("dgx2").host).text()


# In the domain.

SMBIOS = '<sysinfo type="smbios"><system><entry name="serial">1</entry></system></sysinfo>'
OURS = '<entry name="opt/io.systemd.credentials/tmpfiles.extra">f~ /run/nvidia-topologyd/virtualTopology.xml 0644 '


def test_it_comes_before_the_sysinfo_of_kubevirt_which_stays() -> None:
    """KubeVirt reads every `<sysinfo>` into one; the last type wins."""
    outcome = run({f"{PORT}/{A}": GPU}, vm([hostdev(A, "a")], rest=SMBIOS))
    text = outcome.xml.decode()

    assert SMBIOS in text
    assert text.index('<sysinfo type="fwcfg">') < text.index(SMBIOS)
    assert text.count("<sysinfo") == 2
    assert text.count(OURS) == 1


def test_a_second_time_changes_nothing() -> None:
    devices = {f"{PORT}/{A}": {**GPU, **FAST}}
    first = run(devices, vm([hostdev(A, "a")], rest=SMBIOS))

    assert run(devices, first.xml).xml == first.xml


def test_a_file_of_an_earlier_call_is_replaced() -> None:
    first = run({f"{PORT}/{A}": GPU}, vm([hostdev(A, "a")], rest=SMBIOS))
    second = run({f"{PORT}/{A}": {**GPU, **FAST}}, first.xml)

    assert second.xml.decode().count(OURS) == 1
    assert file_of(second) != file_of(first)
    for line in second.plan.fw_cfg:
        assert line.text.encode() in second.xml


def test_entries_and_lines_of_others_stay() -> None:
    foreign = (
        '<sysinfo type="fwcfg"><entry name="opt/com.example/a">b</entry>'
        '<entry name="opt/io.systemd.credentials/tmpfiles.extra">d /run/theirs</entry></sysinfo>'
    )
    outcome = run({f"{PORT}/{A}": GPU}, vm([hostdev(A, "a")], rest=foreign))
    again = run({f"{PORT}/{A}": GPU}, outcome.xml)

    assert again.xml == outcome.xml
    assert b'<entry name="opt/com.example/a">b</entry>' in outcome.xml
    assert b'tmpfiles.extra">d /run/theirs\nf~ /run/nvidia-topologyd/virtualTopology.xml 0644' in outcome.xml
    assert outcome.xml.count(b"<sysinfo") == 1
