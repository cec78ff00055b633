"""Times the planner alone, without XML and sysfs; figures are medians, and ratios within one run.

Run by `make bench`. Machines are noisy: compare ratios, not milliseconds.
"""

import statistics
import time
from collections.abc import Callable
from math import log2

from hook import domain, sysfs
from hook.address import PciAddress
from hook.config import Config, Layout
from hook.plan import make_plan
from hook.recording import parse_recording
from tests.machines import domain_xml, machine
from tests.scenario import Scenario

REPEATS = 21
NODES = 8
COUNTS = (8, 16, 32, 64, 128)


def median_ms(work: Callable[[], object]) -> float:
    """Median of REPEATS runs."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append((time.perf_counter() - start) * 1000)
    return statistics.median(times)


def grown_host(count: int) -> tuple[str, list[PciAddress]]:
    """A host of 8 nodes with `count` GPUs and NICs in turn, pairs of them below a switch each."""
    lines, devices = [], []
    for node in range(NODES):
        lines.append(f"devices/system/node/node{node}/cpulist = {node}")
        lines.append(
            f"devices/system/node/node{node}/distance = {' '.join('10' if n == node else '20' for n in range(NODES))}"
        )
    for number in range(count):
        node, pair, side = number % NODES, number // NODES // 2, number // NODES % 2
        root = node * 32
        switch = f"devices/pci0000:{root:02x}/0000:{root:02x}:{pair + 1:02x}.0/0000:{root + 1:02x}:{pair:02x}.0"
        address = PciAddress(0, root + 2 + 2 * pair + side, 0, 0)
        path = f"{switch}/0000:{root + 1:02x}:{16 + 2 * pair + side - 15:02x}.1/{address}"
        lines.append(f"{path}/numa_node = {node}")
        lines.append(f"{path}/class = {'0x030200' if side else '0x020000'}")
        lines.append(f"bus/pci/devices/{address} -> ../../../{path}")
        devices.append(address)
    return "".join(f"{line}\n" for line in lines), devices


def main() -> None:
    """Print the figures."""
    scenario = Scenario("huge-240vcpu-64dev")
    guest = domain.parse(scenario.xml()).guest
    sources = [h.source for h in guest.hostdevs if isinstance(h.source, PciAddress)]
    host = sysfs.read_host(scenario.sysfs, sources, ())
    whole = {
        "parse the domain XML (47 KB)": lambda: domain.parse(scenario.xml()),
        "read the host, 64 devices": lambda: sysfs.read_host(scenario.sysfs, sources, ()),
        "plan, layout node": lambda: make_plan(guest, host, Config(), frozenset(), is_on_root_complex=False),
    }
    print(f"64 devices, 8 cells, 240 vCPUs; median of {REPEATS}")
    for what, work in whole.items():
        print(f"  {what:32} {median_ms(work):7.2f} ms")

    print("plan of every device of a recorded machine, layout switch")
    for name in ("dgx2", "mi250-16gcd", "oci-bm-h100"):
        it = machine(name)
        guest = domain.parse(domain_xml(it.cpu_nodes, it.devices)).guest
        config = Config(layout=Layout.SWITCH)
        ms = median_ms(lambda: make_plan(guest, it.host, config, frozenset(), is_on_root_complex=False))  # noqa: B023
        print(f"  {name:32} {ms:7.2f} ms for {len(it.devices)} devices")

    for layout in Layout:
        print(f"growth, layout {layout}: time / (n log n), relative to {COUNTS[0]} devices")
        base = None
        for count in COUNTS:
            text, devices = grown_host(count)
            tree = parse_recording(text)
            guest = domain.parse(domain_xml(range(NODES), devices)).guest
            host = sysfs.read_host(tree, devices, ())
            config = Config(layout=layout)
            plan = make_plan(guest, host, config, frozenset(), is_on_root_complex=False)
            ms = median_ms(lambda: make_plan(guest, host, config, frozenset(), is_on_root_complex=False))  # noqa: B023
            share = ms / (count * log2(count))
            base = base or share
            fallback = "" if plan.layout is layout else f"   (does not fit, {plan.layout} is used)"
            print(f"  {count:4} devices {ms:7.2f} ms   ratio {share / base:5.2f}{fallback}")


if __name__ == "__main__":
    main()
