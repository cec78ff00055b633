"""How NCCL rates the pairs of each recorded machine in a guest, without the topology file and with it.

    .venv/bin/python -m tests.nccl_table

A pair is two devices of different cards; functions of one card are one node for NCCL. Equal means equal to NCCL
on the host. It must not decide what is right: tests/test_nccl.py does.
"""

import functools
import re
from dataclasses import dataclass

from hook import domain
from hook.config import Config, Layout, TopologyFile
from hook.define import Outcome, define_domain
from hook.nccl import guest_system
from tests.machines import FOLDER, NAMES, Machine, domain_xml, machine
from tests.nccl import Rating, guest_sysfs, ratings

Ratings = dict[tuple[int, int], Rating]


@dataclass(frozen=True)
class Compared:
    """The ratings of the pairs of a machine's placed devices."""

    host: Ratings
    without: Ratings
    with_file: Ratings

    def equal_classes(self, guest: Ratings) -> int:
        return sum(self.host[pair][0] == guest[pair][0] for pair in self.host)

    def equal(self, guest: Ratings) -> int:
        """Class and bandwidth."""
        return sum(self.host[pair] == guest[pair] for pair in self.host)


def cpu_vendor(name: str) -> str:
    """What the recording says of its machine's CPU."""
    found = re.search(r"^# cpu: (\w+)", (FOLDER / f"{name}.sysfs").read_text(), re.MULTILINE)
    return found[1] if found is not None else "intel"


def vm_on(it: Machine, layout: Layout) -> tuple[bytes, Outcome]:
    """A VM with a cell for each node of the machine, and all its devices."""
    xml = domain_xml(it.cpu_nodes, it.devices)
    outcome = define_domain(xml, None, lambda: it.tree, Config(layout=layout, topology_file=TopologyFile.NCCL))
    assert outcome.error is None

    return xml, outcome


@functools.cache
def compared(name: str, layout: Layout) -> Compared:
    """Rate all pairs three times."""
    it = machine(name)
    xml, outcome = vm_on(it, layout)
    places = {d.hostdev.source: d.place.guest_bdf for d in outcome.plan.devices if d.place is not None}
    devices = [device for device in it.devices if device in places]
    in_guest = [places[device] for device in devices]
    sysfs, vendor = guest_sysfs(outcome.plan, it.host), cpu_vendor(name)
    system = guest_system(outcome.plan, domain.parse(xml).guest, it.host)
    library = "RCCL" if system.version != 1 else "NCCL"

    on_host = ratings(None, it.host, devices, vendor, library)
    pairs = [pair for pair, (level, _) in on_host.items() if level != "LOC"]
    without = ratings(None, sysfs, in_guest, vendor, library)
    with_file = ratings(system.text(), sysfs, in_guest, vendor, library)
    return Compared(*({pair: rated[pair] for pair in pairs} for rated in (on_host, without, with_file)))


def table() -> str:
    """In Markdown, as in docs/nccl.md."""
    lines = [
        "| machine | pairs | `node`, class | `node`, class and GB/s | `switch`, class | `switch`, class and GB/s "
        "| with the file |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    totals = [0] * 6
    for name in NAMES:
        flat, switched = compared(name, Layout.NODE), compared(name, Layout.SWITCH)
        if not flat.host:
            continue
        with_file = min(c.equal(c.with_file) for c in (flat, switched))
        figures = [len(flat.host), *(f(c.without) for c in (flat, switched) for f in (c.equal_classes, c.equal))]
        figures.append(with_file)
        totals = [total + figure for total, figure in zip(totals, figures, strict=True)]
        lines.append(f"| `{name}` | " + " | ".join(map(str, figures)) + " |")
    return "\n".join([*lines, "| all | " + " | ".join(map(str, totals)) + " |", ""])


if __name__ == "__main__":
    print(table(), end="")
