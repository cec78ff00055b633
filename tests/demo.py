"""The main job, shown: the real sidecar, virt-launcher's part played, host and guest trees, reasons, the XML diff.

Run by `make demo`. It must not need more than the recordings in tests/.
"""

import json
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from hook import domain
from hook.config import Config, Layout
from hook.define import define_domain
from hook.render import device_names, diff_text, guest_tree, host_tree, plan_matrices, plan_tree, xml_diff
from hook.sysfs import all_functions, read_host
from tests.scenario import Scenario
from tests.sidecar import Sidecar
from tests.system.kubevirt import Family, next_call, placeholders, plan, reprint
from tests.system.oracle import Oracle, available
from tests.virt_launcher import Launcher

SCENARIO = Scenario("two-node-4gpu-4sriov")
FAMILY = Family.V1_6  # loses most between its calls


def main() -> None:
    """Show it."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    xml, vmi = SCENARIO.xml(), SCENARIO.vmi
    start = plan(xml, json.loads(vmi), FAMILY)
    first = placeholders(xml, start.placeholders, FAMILY)
    guest = domain.parse(first).guest
    host = read_host(SCENARIO.sysfs, all_functions(SCENARIO.sysfs), ())

    console.rule("the host, and the devices that the VM gets")
    console.print(host_tree(host, device_names(guest.hostdevs, host)))
    console.rule("the guest as KubeVirt defines it")
    console.print(guest_tree(guest, "guest without the hook"))

    with tempfile.TemporaryDirectory(prefix="hooks-") as folder:
        with Sidecar(Path(folder), "--sysfs", str(SCENARIO.sysfs_path)) as sidecar:
            launcher = Launcher(Path(folder))
            found = launcher.collect(1)[0]
            console.rule("virt-launcher calls the sidecar")
            console.print(f"Info: {', '.join(sorted(found.hook_points))} by {found.version} on {found.path.name}")
            answer = launcher.on_define_domain(first, vmi)
            console.print(f"OnDefineDomain, call 1: {len(first)} bytes in, {len(answer)} bytes out")
            second, how = _second_call(first, answer, start.extra_ports)
            again = launcher.on_define_domain(second, vmi)
            console.print(f"OnDefineDomain, call 2, {how}: {len(second)} bytes in, {len(again)} bytes out")
            launcher.shutdown()
            console.print(f"Shutdown: exit status {sidecar.wait()}")
            console.rule("the sidecar's log")
            for line in sidecar.log():
                console.print(f"{line['level']:7} {line['msg']}")

    outcome = define_domain(first, vmi, lambda: SCENARIO.sysfs, Config())
    console.rule("the guest with the hook")
    console.print(guest_tree(domain.parse(answer).guest, "guest with the hook"))
    console.rule("each device, with the reason")
    console.print(plan_tree(outcome, guest))
    console.rule("what changed in the XML of call 1")
    console.print(diff_text(xml_diff(first, answer)))
    same = "the same topology" if _topology(answer) == _topology(again) else "ANOTHER topology"
    console.rule("calls 1 and 2")
    console.print(f"{same}, though KubeVirt {FAMILY.value} lost every <target> in between")
    if _topology(answer) != _topology(again):
        sys.exit(1)
    console.rule("locality: layout switch would keep more")
    switched = define_domain(first, vmi, lambda: SCENARIO.sysfs, Config(layout=Layout.SWITCH))
    console.print(plan_matrices(switched), markup=False)


def _second_call(first: bytes, answer: bytes, extra_ports: int) -> tuple[bytes, str]:
    """What KubeVirt hands back: through a real libvirt where there is one, else only through KubeVirt's structs."""
    reason = available("debian12")
    if reason is None:
        with Oracle("debian12") as oracle:
            return next_call(first, answer, FAMILY, 2, oracle, extra_ports=extra_ports), "read back from libvirt"
    return reprint(answer, FAMILY), f"KubeVirt's losses only ({reason})"


def _topology(xml: bytes) -> object:
    guest = domain.parse(xml).guest
    own = sorted(
        (c.index, c.model, c.address, c.bus_nr, c.cell, c.is_hotplug_off) for c in guest.controllers if c.is_own
    )
    return own, [(h.name, h.address) for h in guest.hostdevs]


if __name__ == "__main__":
    main()
