"""Pictures and pages: whole documents, and what must hold for the picture of every machine and VM."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lxml import etree, html

from hook import __version__, domain
from hook.config import Config, Layout, from_flags
from hook.define import Outcome, define_domain
from hook.host import HostTopology
from hook.pci_ids import PciIds, read
from hook.picture import host_html, host_svg, plan_html, plan_svg
from hook.recording import parse_recording
from tests.build import host, hostdev, mdev, vm
from tests.golden import check, check_names
from tests.machines import NAMES, domain_xml, machine, plan_on
from tests.scenario import NAMES as SCENARIOS
from tests.scenario import Scenario

ROOT = Path(__file__).parent.parent
IDS = read(str(Path(__file__).with_name("pci.ids")))
UUID = "a1b2c3d4-0000-4000-8000-000000000001"
SVG = "{http://www.w3.org/2000/svg}"

Plan = tuple[Outcome, bytes]


def of_scenario(name: str, layout: Layout) -> Plan:
    scenario = Scenario(name)
    return define_domain(scenario.xml(), scenario.vmi, lambda: scenario.sysfs, Config(layout=layout)), scenario.xml()


def of_machine(name: str, layout: Layout) -> Plan:
    it = machine(name)
    return plan_on(it, layout, it.cpu_nodes, it.devices), domain_xml(it.cpu_nodes, it.devices)


def everything() -> Plan:
    """A switch, a card of two functions, an mdev, a nearest cell, one left, one excluded, one unknown, findings."""
    switch = "pci0000:40/0000:40:01.0/0000:42:00.0/0000:43"
    devices: dict[str, object] = {
        f"{switch}:00.0/0000:44:00.0": {"numa_node": 0, "vendor": "0x10de", "device": "0x2335"},
        f"{switch}:01.0/0000:45:00.0": {"numa_node": 0, "vendor": "0x15b3", "device": "0x1013", "class": "0x020000"},
        "pci0000:c0/0000:c0:01.0/0000:c1:00.0": 1,
        "pci0000:c0/0000:c0:01.0/0000:c1:00.1": 1,
        "pci0000:c0/0000:c0:02.0/0000:c2:00.0": 1,
        "pci0000:e0/0000:e0:01.0/0000:e1:00.0": 2,
        "pci0000:e0/0000:e0:02.0/0000:e2:00.0": -1,
    }
    parent = "devices/pci0000:c0/0000:c0:02.0/0000:c2:00.0"
    tree = host(
        devices,
        nodes={0: "0-3", 1: "4-7", 2: "8-11"},
        distances={0: "10 21 31", 1: "21 10 11", 2: "31 11 10"},
        extra=f"bus/mdev/devices/{UUID} -> ../../../{parent}/{UUID}\n",
    )
    names = {"44": "gpu0", "45": "nic0", "e1": "far", "e2": "lost", "99": "ghost"}
    hostdevs = [hostdev(f"0000:{bus}:00.0", name) for bus, name in names.items()]
    hostdevs += [hostdev("0000:c1:00.0", "card"), hostdev("0000:c1:00.1", "audio"), mdev(UUID, "vgpu")]
    xml = vm(hostdevs)
    config = from_flags({"layout": "switch", "exclude": ["audio"], "unaligned": "nearest"})
    return define_domain(xml, None, lambda: parse_recording(tree), config), xml


def hostile() -> Plan:
    """Names and annotations that would be markup, scripts, or no XML at all."""
    name = "&lt;script&gt;alert(1)&lt;/script&gt;&amp;quot;"
    tree = host({"pci0000:40/0000:41:00.0": 0, "pci0000:c0/0000:c1:00.0": 7})
    xml = vm([hostdev("0000:41:00.0", name), hostdev("0000:c1:00.0", "x" * 300)])
    vmi = b'{"metadata": {"annotations": {"pcie-numa-hook/\\u0001\\ud800": "]]>", "pcie-numa-hook/layout": "<b>\\u0000"}}}'
    return define_domain(xml, vmi, lambda: parse_recording(tree), Config()), xml


PLANS: dict[str, Callable[[], Plan]] = {
    "everything": everything,
    "hostile": hostile,
    "cascades": lambda: of_machine("dgx-a100", Layout.SWITCH),
    "eight-nodes": lambda: of_scenario("eight-node-8gpu-8sriov", Layout.HOST_BRIDGE),
    "nothing": lambda: of_scenario("no-hostdev", Layout.NODE),
    "unchanged": lambda: of_scenario("shared-cpu-gpu", Layout.NODE),
}
HOSTS: dict[str, Callable[[], HostTopology]] = {
    "host-cascades": lambda: machine("dgx-a100").host,
    "host-nothing": HostTopology.empty,
}
PAGES = ("everything", "hostile", "nothing")


def svg_of(plan: Plan, ids: PciIds = IDS) -> str:
    return plan_svg(plan[0], domain.parse(plan[1]).guest, ids)


def html_of(plan: Plan) -> str:
    return plan_html(plan[0], domain.parse(plan[1]).guest, IDS)


# Whole documents.


@pytest.mark.parametrize("name", PLANS)
def test_a_picture_of_a_plan(name: str) -> None:
    check(f"pictures/{name}.svg", svg_of(PLANS[name]()))


@pytest.mark.parametrize("name", HOSTS)
def test_a_picture_of_a_host(name: str) -> None:
    check(f"pictures/{name}.svg", host_svg(HOSTS[name](), IDS))


@pytest.mark.parametrize("name", PAGES)
def test_a_page_of_a_plan(name: str) -> None:
    check(f"pictures/{name}.html", html_of(PLANS[name]()).replace(__version__, "VERSION"))


@pytest.mark.parametrize("name", HOSTS)
def test_a_page_of_a_host(name: str) -> None:
    check(f"pictures/{name}.html", host_html(HOSTS[name](), IDS).replace(__version__, "VERSION"))


def test_no_golden_outlives_its_test() -> None:
    pages = [f"{name}.html" for name in (*PAGES, *HOSTS)]
    check_names("pictures", [*(f"{name}.svg" for name in (*PLANS, *HOSTS)), *pages])


def test_without_names_there_are_ids() -> None:
    shown = texts(etree.fromstring(svg_of(everything(), PciIds())))

    assert {"[10de:2335] class 0302", "[15b3:1013] class 0200"} <= set(shown)


# What holds for all.


def texts(svg: etree._Element) -> list[str]:
    return ["".join(text.itertext()) for text in svg.iter(f"{SVG}text")]


Edges = tuple[float, float, float, float]  # left, top, right, bottom


def edges(rectangle: etree._Element) -> Edges:
    x, y, width, height = (float(rectangle.get(name, "0")) for name in ("x", "y", "width", "height"))
    return x, y, x + width, y + height


def rectangles(svg: etree._Element, kind: str) -> list[Edges]:
    return [edges(r) for r in svg.iter(f"{SVG}rect") if (r.get("class") or "").split()[0] == kind]


def holds(outer: Edges, inner: Edges) -> bool:
    return outer[0] <= inner[0] and outer[1] <= inner[1] and inner[2] <= outer[2] and inner[3] <= outer[3]


def is_apart(a: Edges, b: Edges) -> bool:
    return a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


def pictures() -> Iterator[tuple[str, Callable[[], Plan]]]:
    yield from PLANS.items()
    for layout in Layout:
        yield from ((f"{name}-{layout}", lambda n=name, k=layout: of_machine(n, k)) for name in NAMES)
        yield from ((f"{name}-{layout}", lambda n=name, k=layout: of_scenario(n, k)) for name in SCENARIOS)


@pytest.mark.parametrize("plan", [pytest.param(make, id=name) for name, make in pictures()])
def test_the_geometry_of_every_picture(plan: Callable[[], Plan]) -> None:
    outcome, xml = plan()
    svg = etree.fromstring(svg_of((outcome, xml)))
    paper = rectangles(svg, "paper")[0]
    boxes, cards = rectangles(svg, "box"), rectangles(svg, "card")
    places = [(float(t.get("x", "")), float(t.get("y", ""))) for t in svg.iter(f"{SVG}text")]

    # One row a device: a card on each side, at the same height, with a link between them.
    assert len(cards) == 2 * len(outcome.plan.devices) == 2 * sum(1 for _ in svg.iter(f"{SVG}g"))
    for left, right in zip(cards[::2], cards[1::2], strict=True):
        assert (left[1], left[3]) == (right[1], right[3])
        assert left[2] < right[0]
    # Everything is on the paper, nothing crosses anything, and every card is in a box.
    assert all(holds(paper, edge) for edge in (*boxes, *cards))
    assert all(holds(paper, (x, y, x, y)) for x, y in places)
    assert all(is_apart(a, b) for n, a in enumerate(cards) for b in cards[:n])
    assert all(is_apart(a, b) or holds(a, b) or holds(b, a) for n, a in enumerate(boxes) for b in (*boxes[:n], *cards))
    assert all(any(holds(box, card) for box in boxes) for card in cards)
    shown = {"".join(name.itertext()) for name in svg.iter(f"{SVG}tspan")}
    assert {device.hostdev.name for device in outcome.plan.devices if len(device.hostdev.name) < 50} <= shown


@pytest.mark.parametrize("name", PLANS)
def test_no_text_is_wider_than_its_box(name: str) -> None:
    """By the widest of the fonts that are asked for."""
    svg = etree.fromstring(svg_of(PLANS[name]()))
    paper = rectangles(svg, "paper")[0]
    frames = [*rectangles(svg, "box"), *rectangles(svg, "card")]
    for text in svg.iter(f"{SVG}text"):
        size = 11 if "small" in (text.get("class") or "") else 15 if "title" in (text.get("class") or "") else 12
        width = len("".join(text.itertext())) * size * 0.602
        x, y = float(text.get("x", "")), float(text.get("y", ""))
        left, right = (x - width, x) if text.get("text-anchor") == "end" else (x, x + width)
        around = [frame for frame in frames if holds(frame, (x, y, x, y))]
        inner = min(around, key=lambda frame: frame[2] - frame[0], default=paper)
        assert inner[0] <= left
        assert right <= inner[2]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_one_file_without_scripts(name: str) -> None:
    page = html_of(PLANS[name]())
    root = html.document_fromstring(page)

    assert [
        element.tag for element in root.iter() if element.tag in ("script", "link", "img", "iframe", "object")
    ] == []
    assert re.findall(r"(?:href|src|url\(|@import|\bon[a-z]+=)", page) == []
    assert len(root.findall(".//svg")) == 1


def test_colours_belong_to_nodes() -> None:
    """A device has the colour of its host node on both sides; the box of a cell that of the node it stands for."""
    svg = etree.fromstring(svg_of(everything()))
    colours = {
        "".join(text.itertext()).split(",")[0]: box.get("class")
        for box in svg.iter(f"{SVG}rect")
        if (text := box.getnext()) is not None and (box.get("class") or "").startswith("box")
    }

    assert {
        title: colours[title] for title in ("node 0", "node 2", "cell 0 for host node 0", "cell 1 for host node 1")
    } == {
        "node 0": "box n0",
        "node 2": "box n2",
        "cell 0 for host node 0": "box n0",
        "cell 1 for host node 1": "box n1",
    }
