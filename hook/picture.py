"""Draws host and guest side by side as SVG, and a page with it as HTML; must not decide anything.

    host                                        guest
    ┌ node 0 ─────────────────────┐             ┌ cell 0 ──────────────────────┐
    │ ┌ host bridge pci0000:40 ─┐ │             │ ┌ expander 17, busNr 252 ──┐ │
    │ │ gpu0 0000:41:00.0       │ │ ──────────▶ │ │ gpu0 0000:fd:00.0        │ │
    │ └─────────────────────────┘ │             │ └──────────────────────────┘ │
    └─────────────────────────────┘             └──────────────────────────────┘

One row is one device. A bridge that several rows share is a box around them; one that leads to a
single device is named in its row.
"""

import textwrap
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile

from lxml import etree
from lxml.builder import E, ElementMaker

from hook import __version__
from hook.address import PciAddress, format_cpu_list
from hook.define import Outcome
from hook.guest import GuestDomain
from hook.host import HostTopology, PciFunction
from hook.locality import Distance, distance_matrix
from hook.pci_ids import PciIds
from hook.plan import DevicePlan, map_cells
from hook.render import (
    LEGEND,
    NO_CARDS,
    controller_name,
    host_names,
    kind_of,
    matrices,
)

_SVG = "http://www.w3.org/2000/svg"
_S = ElementMaker(namespace=_SVG, nsmap={None: _SVG})

# Pixels. Text is monospaced, so its width is known without a font: 0.602 em in DejaVu Sans Mono, less elsewhere.
_FONT, _SMALL_FONT, _TITLE_FONT = 12, 11, 15
_ADVANCE = 0.61
_MARGIN, _GAP_OF_PANELS, _CARD_WIDTH, _CARD_HEIGHT = 16, 72, 372, 38
_INDENT, _RIGHT_PAD, _HEADER, _BOTTOM_PAD, _SPACE, _TEXT_PAD, _LINE = 12, 6, 20, 7, 6, 8, 16

# Okabe and Ito's palette, which colour-blind people can tell apart, by node number; each box names its node too.
_LIGHT = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8a7f00", "#7a5195")
_DARK = ("#5db7ee", "#ff9057", "#3fcf9f", "#eaa5cb", "#9cd6f7", "#f4bf4f", "#e8dc4a", "#c3a1dd")
_SEPARATOR = " > "
_PAPER, _INK, _FAINT = ("#ffffff", "#1f2328", "#6a737d"), ("#0d1117", "#e6edf3", "#9198a1"), 0.13


def _theme(nodes: Sequence[str], paper: str, ink: str, grey: str) -> str:
    rules = [
        f".paper{{fill:{paper}}}",
        f".ink{{fill:{ink}}}",
        f".grey{{fill:{grey}}}",
        f".box{{fill:none;stroke:{grey}}}",
        f".card{{fill:{paper};stroke:{grey}}}",
        f".link{{fill:none;stroke:{grey}}}",
        f".tip{{fill:{grey}}}",
    ]
    for number, colour in enumerate(nodes):
        rules.append(f".box.n{number}{{fill:{colour};fill-opacity:{_FAINT};stroke:{colour}}}")
        rules.append(f".card.n{number},.link.n{number}{{stroke:{colour}}}.tip.n{number}{{fill:{colour}}}")
    return "".join(rules)


_STYLE = (
    f"text{{font:{_FONT}px ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace}}"
    f"text.small{{font-size:{_SMALL_FONT}px}}text.title{{font-size:{_TITLE_FONT}px}}"
    ".title,.name{font-weight:bold}.box{stroke-width:1}.card,.link{stroke-width:1.6}"
    ".unplaced{stroke-dasharray:4 3}"
    + _theme(_LIGHT, *_PAPER)
    + "@media (prefers-color-scheme:dark){"
    + _theme(_DARK, *_INK)
    + "}"
)


@dataclass(frozen=True, slots=True)
class _Box:
    """A box around rows: what makes it the same one in the next row, its title, its node (None: no colour)."""

    key: Hashable
    title: str
    node: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Card:
    """A device on one side: boxes around it, outermost first, and two lines."""

    boxes: tuple[_Box, ...]
    address: str
    via: str = ""  # bridges that lead to this device alone
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One device: its node colours it on both sides."""

    name: str
    node: int | None
    host: _Card
    guest: _Card | None = None
    is_placed: bool = True
    hint: str = ""  # shown when the pointer rests on it


@dataclass(slots=True)
class _Panel:
    """One side of the picture while it is drawn."""

    title: str
    x: int
    cards: Sequence[_Card]
    width: int = field(init=False)
    opened: list[tuple[_Box, int]] = field(default_factory=list)  # with the y of its upper edge

    def __post_init__(self) -> None:
        depth = max((len(card.boxes) for card in self.cards), default=0)
        self.width = _CARD_WIDTH + depth * (_INDENT + _RIGHT_PAD)

    def span(self, depth: int) -> tuple[int, int]:
        """Left edge and width of what lies in that many boxes."""
        return self.x + depth * _INDENT, self.width - depth * (_INDENT + _RIGHT_PAD)


def plan_svg(outcome: Outcome, guest: GuestDomain, ids: PciIds) -> str:
    """The plan as a picture; guest: the domain that it was made for."""
    return _document(_plan_picture(outcome, guest, ids))


def host_svg(host: HostTopology, ids: PciIds) -> str:
    """A host's GPUs, accelerators and network cards as a picture."""
    return _document(_host_picture(host, ids))


def plan_html(outcome: Outcome, guest: GuestDomain, ids: PciIds) -> str:
    """The plan as a page of its own: picture, devices with reasons, findings, matrices."""
    plan, shown = outcome.plan, matrices(outcome)
    devices = [
        (
            device.hostdev.name,
            str(device.hostdev.source),
            "unknown" if device.host_node is None else f"{device.host_node} ({device.host_node_from})",
            str(device.place.guest_bdf) if device.place is not None else "",
            "" if device.cell is None else str(device.cell),
            str(device.action),
            device.reason,
        )
        for device in sorted(plan.devices, key=lambda device: _order(device, outcome.host))
    ]
    findings = [(str(f.severity), f.code, f.subject, f.message) for f in plan.findings]
    differing = (
        E.ul(*(E.li(_printable(line)) for line in shown.differing)) if shown.differing else E.p("No pair differs.")
    )
    absent = f"Not in the matrices, because the hook does not place them: {', '.join(shown.absent)}."
    return _page(
        outcome.domain_name or "domain",
        _plan_picture(outcome, guest, ids),
        E.h2("Devices"),
        _table(("device", "host", "node", "guest", "cell", "", "reason"), devices),
        *((E.h2("Findings"), _table(("", "code", "about", "message"), findings)) if findings else ()),
        E.h2("Distances on the host"),
        _matrix(shown.names, shown.on_host),
        E.h2(f"Distances in the guest, layout {plan.layout}"),
        _matrix(shown.names, shown.in_guest, shown.on_host),
        E.h2("Pairs that differ, as nvidia-smi and NCCL see them"),
        differing,
        *((E.p(_printable(absent)),) if shown.absent else ()),
        E.pre(LEGEND),
    )


def host_html(host: HostTopology, ids: PciIds) -> str:
    """A host's GPUs, accelerators and network cards as a page of its own: picture, list, matrix."""
    names = host_names(host)
    rows = [(name, str(address), kind_of(host.functions[address], ids)) for name, address in names]
    return _page(
        "host",
        _host_picture(host, ids),
        E.h2("Devices"),
        _table(("name", "address", ""), rows),
        E.h2("Distances"),
        _matrix([name for name, _ in names], distance_matrix(host, [address for _, address in names])),
        E.pre(LEGEND),
    )


_PAGE_STYLE = (
    "body{font:14px system-ui,sans-serif;margin:16px;background:#fff;color:#1f2328}svg{max-width:100%;height:auto}"
    "h2{font-size:16px;margin:24px 0 8px}table{border-collapse:collapse}"
    "th,td{border:1px solid #8b949e;padding:2px 8px;text-align:left;font-weight:normal;vertical-align:top}"
    "th,.matrix td,pre{font:12px ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace}"
    "th{background:rgba(128,128,128,.15)}td.differs{background:rgba(213,94,0,.22);font-weight:bold}"
    ".scroll{overflow-x:auto}@media (prefers-color-scheme:dark){body{background:#0d1117;color:#e6edf3}}"
)


def _page(title: str, picture: etree._Element, *content: etree._Element) -> str:
    page = E.html(
        E.head(
            E.meta(charset="utf-8"),
            E.meta(name="viewport", content="width=device-width"),
            E.title(f"{_printable(title)}: PCIe and NUMA locality"),
            E.style(_PAGE_STYLE),
        ),
        E.body(picture, *content, E.p(f"pcie-numa-hook {__version__}")),
        lang="en",
    )
    return "<!DOCTYPE html>\n" + etree.tostring(page, encoding="us-ascii", method="html", pretty_print=True).decode()


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> etree._Element:
    lines = [E.tr(*(E.td(_printable(cell)) for cell in row)) for row in rows]
    return E.div({"class": "scroll"}, E.table(E.tr(*(E.th(_printable(name)) for name in head)), *lines))


def _matrix(
    names: Sequence[str], matrix: Sequence[Sequence[Distance]], other: Sequence[Sequence[Distance]] | None = None
) -> etree._Element:
    """other: the matrix to compare with; what differs is marked."""
    lines = [E.tr(E.th(), *(E.th(_printable(name)) for name in names))]
    for name, row, compared in zip(names, matrix, other or matrix, strict=True):
        cells = [
            E.td(cell.name)
            if cell == before
            else E.td({"class": "differs", "title": f"{before.name} on the host"}, cell.name)
            for cell, before in zip(row, compared, strict=True)
        ]
        lines.append(E.tr(E.th(_printable(name)), *cells))
    return E.div({"class": "scroll matrix"}, E.table(*lines))


def _document(svg: etree._Element) -> str:
    return etree.tostring(svg, encoding="us-ascii", pretty_print=True).decode()


def _plan_picture(outcome: Outcome, guest: GuestDomain, ids: PciIds) -> etree._Element:
    host, plan = outcome.host, outcome.plan
    devices = sorted(plan.devices, key=lambda device: _order(device, host))
    on_host = _host_cards([_host_part(device, host, ids) for device in devices], host)
    in_guest = _guest_cards(devices, outcome, guest)
    rows = [
        _Row(
            name=device.hostdev.name,
            node=device.host_node if device.host_node is not None else _node(device.function(host), host),
            host=host_card,
            guest=guest_card,
            is_placed=device.place is not None,
            hint=f"{device.hostdev.name} {device.action}: {device.reason}",
        )
        for device, host_card, guest_card in zip(devices, on_host, in_guest, strict=True)
    ]
    return _picture(outcome.domain_name or "domain", outcome.summary(), rows, [str(f) for f in plan.findings])


def _host_picture(host: HostTopology, ids: PciIds) -> etree._Element:
    names = {address: name for name, address in host_names(host)}
    functions = sorted((host.functions[address] for address in names), key=lambda f: _host_order(f, host))
    parts = [(function, str(function.address), _detail(function, ids)) for function in functions]
    rows = [
        _Row(name=names[function.address], node=_node(function, host), host=card)
        for function, card in zip(functions, _host_cards(parts, host), strict=True)
    ]
    return _picture("host", "" if rows else NO_CARDS.strip(), rows, host.problems)


def _node(function: PciFunction | None, host: HostTopology) -> int | None:
    found = host.node_of(function.address) if function is not None else None
    return found[0] if found is not None else None


def _host_order(function: PciFunction | None, host: HostTopology) -> tuple[object, ...]:
    node = _node(function, host)
    return (
        (node is None, node or 0, True)
        if function is None
        else (node is None, node or 0, False, function.root, function.bridges, function.address)
    )


def _order(device: DevicePlan, host: HostTopology) -> tuple[object, ...]:
    """By cell, then as on the host, so that boxes hold together on both sides; what is not placed comes last."""
    return device.place is None, device.cell or 0, _host_order(device.function(host), host), device.hostdev.key


def _host_part(device: DevicePlan, host: HostTopology, ids: PciIds) -> tuple[PciFunction | None, str, str]:
    function, source = device.function(host), device.hostdev.source
    if isinstance(source, PciAddress):
        return function, str(source), _detail(function, ids)
    return function, str(function.address) if function is not None else "", f"mdev {source}"


def _detail(function: PciFunction | None, ids: PciIds) -> str:
    if function is None:
        return "unknown to sysfs"
    return ids.device(function.vendor, function.device) or kind_of(function, ids)


def _host_cards(parts: Sequence[tuple[PciFunction | None, str, str]], host: HostTopology) -> list[_Card]:
    """Cards in the order of the parts: host function, address, second line."""
    outer: list[tuple[_Box, ...]] = []
    chains: list[tuple[str, ...]] = []
    for function, _, _ in parts:
        node = _node(function, host)
        known = host.nodes.get(node) if node is not None else None
        cpus = f", CPUs {format_cpu_list(known.cpus) or 'none'}" if known is not None else ""
        boxes = [_Box(node, "no known node" if node is None else f"node {node}{cpus}", node)]
        if function is not None:
            root = function.root.rpartition("/")[2]
            boxes.append(_Box((node, root), f"host bridge {root}"))
        outer.append(tuple(boxes))
        chains.append(tuple(map(str, function.bridges)) if function is not None else ())
    return [
        _Card(boxes=(*boxes, *shared), address=address, via=_via(own), detail=detail)
        for boxes, (shared, own), (_, address, detail) in zip(
            outer, _shared(outer, chains, _bridges), parts, strict=True
        )
    ]


def _bridges(chain: Sequence[str]) -> str:
    return f"bridge{'s' if len(chain) > 1 else ''} {_SEPARATOR.join(chain)}"


def _via(chain: Sequence[str]) -> str:
    return f"{len(chain)} bridges" if len(chain) > 1 else "".join(chain)


def _guest_cards(devices: Sequence[DevicePlan], outcome: Outcome, guest: GuestDomain) -> list[_Card]:
    plan = outcome.plan
    nodes = map_cells(guest, outcome.host).node_of_cell
    vcpus = {cell.id: format_cpu_list(cell.vcpus) or "none" for cell in guest.cells}
    by_index = {controller.index: controller for controller in plan.controllers}
    expanders = {expander.index: expander for expander in plan.expanders}
    outer: list[tuple[_Box, ...]] = []
    chains: list[tuple[str, ...]] = []
    for device in devices:
        chain: list[str] = []
        boxes: tuple[_Box, ...] = (_Box("unplaced", "not behind an expander of the hook"),)
        if device.place is not None and device.cell is not None:
            index = device.place.address.bus
            while index not in expanders and (address := by_index[index].address) is not None:
                chain.insert(0, controller_name(by_index[index]))
                index = address.bus
            expander, node = expanders[index], nodes.get(device.cell)
            last = expander.bus_nr + expander.buses - 1
            boxes = (
                _Box(device.cell, f"cell {device.cell} for host node {node}, vCPUs {vcpus[device.cell]}", node),
                _Box(
                    (device.cell, index),
                    f"expander {index}, NUMA node {expander.cell}, busNr {expander.bus_nr}..{last}",
                ),
            )
        outer.append(boxes)
        chains.append(tuple(chain))
    return [
        _Card(
            boxes=(*boxes, *shared),
            address=str(device.place.guest_bdf) if device.place is not None else str(device.address or ""),
            via=_SEPARATOR.join(own),
            detail=f"{device.action}: {device.reason}",
        )
        for device, boxes, (shared, own) in zip(devices, outer, _shared(outer, chains, _SEPARATOR.join), strict=True)
    ]


def _shared(
    outer: Sequence[tuple[_Box, ...]], chains: Sequence[tuple[str, ...]], title: Callable[[Sequence[str]], str]
) -> list[tuple[tuple[_Box, ...], tuple[str, ...]]]:
    """Split the bridges above each row into boxes that several rows share, and those that are its own.

    Bridges around the very same rows, such as a port and the switch below it, are one box.
    """
    paths = [(*(box.key for box in boxes), *chain) for boxes, chain in zip(outer, chains, strict=True)]
    counts = Counter(path[: n + 1] for path in paths for n in range(len(path)))
    found = []
    for path, boxes, chain in zip(paths, outer, chains, strict=True):
        sizes = [counts[path[: len(boxes) + n + 1]] for n in range(len(chain))]
        shared: list[_Box] = []
        start = 0
        for n, size in enumerate(sizes):
            if size > 1 and (n + 1 == len(sizes) or sizes[n + 1] != size):
                shared.append(_Box(path[: len(boxes) + n + 1], title(chain[start : n + 1])))
                start = n + 1
        found.append((tuple(shared), chain[start:]))
    return found


def _picture(title: str, subtitle: str, rows: Sequence[_Row], notes: Iterable[str]) -> etree._Element:
    panels = [_Panel("host", _MARGIN, [row.host for row in rows])]
    guests = [row.guest for row in rows if row.guest is not None]
    if guests:
        panels.append(_Panel("guest", _MARGIN + panels[0].width + _GAP_OF_PANELS, guests))
    width = panels[-1].x + panels[-1].width + _MARGIN
    y = _MARGIN + _TITLE_FONT
    body = [_text(_MARGIN, y, title, width - 2 * _MARGIN, "title ink")]
    for line in _wrapped(subtitle, width):
        y += _LINE
        body.append(_text(_MARGIN, y, line, width, "small grey"))
    y += _LINE + _SPACE
    if guests:
        body += [_text(panel.x, y, panel.title, panel.width, "name ink") for panel in panels]
    boxes, cards, y = _drawn(rows, panels, y)
    for depth in sorted(boxes):  # outer boxes first, so that they lie below
        body += boxes[depth]
    body += cards
    y += _SPACE
    for line in (line for note in notes for line in _wrapped(note, width)):
        y += _LINE
        body.append(_text(_MARGIN, y, line, width, "small ink"))
    height = y + _MARGIN
    return _S.svg(
        _S.title(_printable(title)),
        _S.style(_STYLE),
        _S.rect({"class": "paper"}, width=str(width), height=str(height)),
        *body,
        role="img",
        width=str(width),
        height=str(height),
        viewBox=f"0 0 {width} {height}",
    )


def _drawn(
    rows: Sequence[_Row], panels: Sequence[_Panel], y: int
) -> tuple[dict[int, list[etree._Element]], list[etree._Element], int]:
    """Boxes by depth, cards with their links, and the y below them; both sides advance together."""
    boxes: dict[int, list[etree._Element]] = {}
    cards: list[etree._Element] = []
    for number, row in enumerate(rows):
        opened = [panel.cards[number].boxes[len(panel.opened) :] for panel in panels]
        y += _SPACE
        for panel, new in zip(panels, opened, strict=True):
            panel.opened += [(box, y + n * _HEADER) for n, box in enumerate(new)]
        y += _HEADER * max(map(len, opened))
        cards += _cards(row, panels, y)
        y += _CARD_HEIGHT
        kept = [_common(panel.cards, number) for panel in panels]
        closed = [len(panel.opened) - count for panel, count in zip(panels, kept, strict=True)]
        for panel, count in zip(panels, closed, strict=True):
            for n in range(count):
                box, top = panel.opened.pop()
                depth = len(panel.opened)
                # The outermost box of a side ends where that of the other side ends.
                bottom = y + _BOTTOM_PAD * (n + 1 if depth else max(closed))
                boxes.setdefault(depth, []).extend(_box(box, *panel.span(depth), top, bottom))
        y += _BOTTOM_PAD * max(closed)
    return boxes, cards, y


def _common(cards: Sequence[_Card], number: int) -> int:
    """How many boxes a row shares with the next one."""
    if number + 1 == len(cards):
        return 0
    pairs = zip(cards[number].boxes, cards[number + 1].boxes, strict=False)
    return len(list(takewhile(lambda pair: pair[0].key == pair[1].key, pairs)))


def _box(box: _Box, x: int, width: int, top: int, bottom: int) -> list[etree._Element]:
    return [
        _S.rect(
            {"class": f"box{_colour(box.node)}"},
            x=str(x),
            y=str(top),
            width=str(width),
            height=str(bottom - top),
            rx="4",
        ),
        _text(x + _TEXT_PAD, top + _HEADER - 6, box.title, width - 2 * _TEXT_PAD, "small ink"),
    ]


def _cards(row: _Row, panels: Sequence[_Panel], y: int) -> list[etree._Element]:
    colour = _colour(row.node)
    dashed = "" if row.is_placed else " unplaced"
    drawn: list[etree._Element] = []
    edges = []
    sides = [card for card in (row.host, row.guest) if card is not None]
    for panel, card in zip(panels, sides, strict=True):
        x, width = panel.span(len(card.boxes))
        edges.append((x, x + width))
        drawn.append(
            _S.rect(
                {"class": f"card{colour}{dashed}"},
                x=str(x),
                y=str(y),
                width=str(width),
                height=str(_CARD_HEIGHT),
                rx="4",
            )
        )
        inner, left = width - 2 * _TEXT_PAD, x + _TEXT_PAD
        address = f" {card.address}" if card.address != row.name else ""
        name = _cut(row.name, inner - _length(address, _FONT), _FONT)
        drawn.append(_S.text({"class": "ink"}, _S.tspan({"class": "name"}, name), address, x=str(left), y=str(y + 15)))
        if _length(f"{name}{address} ", _FONT) + _length(card.via, _SMALL_FONT) <= inner:
            place = {"x": str(left + inner), "y": str(y + 15)}
            drawn.append(_S.text({"class": "small grey", "text-anchor": "end"}, card.via, **place))
        drawn.append(_text(left, y + 30, card.detail, inner, "small grey"))
    for (_, start), (end, _) in pairwise(edges):
        middle = y + _CARD_HEIGHT // 2
        drawn.append(_S.path({"class": f"link{colour}{dashed}"}, d=f"M{start} {middle}H{end - 7}"))
        drawn.append(_S.path({"class": f"tip{colour}"}, d=f"M{end - 8} {middle - 4}l8 4l-8 4z"))
    hint = [_S.title(_printable(row.hint))] if row.hint else []
    return [_S.g(*hint, *drawn)]


def _colour(node: int | None) -> str:
    return "" if node is None else f" n{node % len(_LIGHT)}"


def _text(x: int, y: int, content: str, width: float, style: str) -> etree._Element:
    size = _SMALL_FONT if "small" in style else _TITLE_FONT if "title" in style else _FONT
    return _S.text({"class": style}, _cut(content, width, size), x=str(x), y=str(y))


def _printable(content: str) -> str:
    """What XML can hold; annotations may have anything in them."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in content)


def _length(content: str, size: int) -> float:
    return len(content) * size * _ADVANCE


def _cut(content: str, width: float, size: int) -> str:
    content = _printable(content)
    fitting = int(width / (size * _ADVANCE))
    return content if len(content) <= fitting else content[: max(fitting - 1, 0)] + "…"


def _wrapped(content: str, width: int) -> list[str]:
    return textwrap.wrap(content, int((width - 2 * _MARGIN) / (_SMALL_FONT * _ADVANCE)), break_on_hyphens=False)
