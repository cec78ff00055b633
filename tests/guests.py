"""Guests that were booted and recorded, right ones and wrong ones; must not boot or judge any."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hook.config import Layout
from hook.define import Outcome
from hook.render import plan_json
from hook.sysfs import MemoryTree
from tests.boot.boot import Firmware, StandIn, stand_ins
from tests.machines import domain_xml, machine, plan_on
from tests.system.oracle import Generation

FOLDER = Path(__file__).parent / "guests"


@dataclass(frozen=True, kw_only=True)
class Guest:
    """A VM with a cell for each node of a machine and all its devices, and how it was booted."""

    machine: str
    layout: Layout
    firmware: Firmware = "seabios"
    generation: Generation = "debian12"
    is_hook_left_out: bool = False
    fault: tuple[bytes, bytes] | None = None  # what stands in the answer, and what was booted instead

    @property
    def outcome(self) -> Outcome:
        """The hook's answer."""
        it = machine(self.machine)
        return plan_on(it, self.layout, it.cpu_nodes, it.devices)

    @property
    def xml(self) -> bytes:
        """What was booted."""
        it = machine(self.machine)
        if self.is_hook_left_out:
            return domain_xml(it.cpu_nodes, it.devices)
        xml = self.outcome.xml
        if self.fault is None:
            return xml
        assert xml.count(self.fault[0]) == 1
        return xml.replace(*self.fault)


GUESTS: Mapping[str, Guest] = {
    "as-planned": Guest(machine="dgx1v", layout=Layout.SWITCH),
    "without-the-hook": Guest(machine="l5640-sriov", layout=Layout.NODE, is_hook_left_out=True),
    "wrong-cell": Guest(machine="l5640-sriov", layout=Layout.NODE, fault=(b"<node>1</node>", b"<node>0</node>")),
    "window-too-small": Guest(machine="l5640-sriov", layout=Layout.NODE, fault=(b'busNr="252"', b'busNr="253"')),
    "port-elsewhere": Guest(
        machine="l5640-sriov",
        layout=Layout.NODE,
        fault=(b'bus="0x11" slot="0x00"', b'bus="0x11" slot="0x03"'),
    ),
    # OVMF 2022.11 gives no BARs behind expanders when a device there has an I/O BAR, see docs/limits.md.
    "no-bars": Guest(machine="snb-mic-nvme", layout=Layout.SWITCH, firmware="ovmf"),
}


def recording(name: str) -> Path:
    """The guest's sysfs, as it was when the guest was booted."""
    return FOLDER / f"{name}.sysfs"


def plan_of_stand_ins(outcome: Outcome, devices: Mapping[str, StandIn] | None = None) -> str:
    """The JSON of the plan, with the ids and BARs of the devices that stand in for the host's."""
    devices = stand_ins(outcome) if devices is None else devices
    plan = plan_json(outcome)
    for device in plan["devices"]:
        double = devices[device["source"]]
        bars = [{"size_bytes": size, "is_io": False} for size in double.memory_bars_bytes]
        device.update(vendor=double.vendor, device=double.device, bars=bars)
    return json.dumps(plan)


def tree_of(outcome: Outcome) -> MemoryTree:
    """The sysfs of a guest that is what was planned, with the host's ids and BARs."""
    files = {f"devices/system/node/node{cell}/cpulist": b"0" for cell in {d.cell for d in outcome.plan.devices}}
    links = {}
    for address, function in outcome.plan.guest_topology(outcome.host).functions.items():
        path = "/".join([function.root, *map(str, function.bridges), str(address)])
        links[f"bus/pci/devices/{address}"] = f"../../../{path}"
        flags = [0x101 if region.is_io else 0x200 for region in function.regions]
        bars = [(1 << 40, (1 << 40) + region.size_bytes - 1) for region in function.regions]
        resource = [f"0x{a:016x} 0x{b:016x} 0x{flag:016x}" for (a, b), flag in zip(bars, flags, strict=True)]
        attributes = {
            "numa_node": function.numa_node,
            "vendor": function.vendor and hex(function.vendor),
            "device": function.device and hex(function.device),
            "class": function.class_code and hex(function.class_code),
            "resource": "\n".join(resource),
        }
        files |= {f"{path}/{name}": str(value).encode() for name, value in attributes.items() if value is not None}
    return MemoryTree(files, links)


def changed(tree: MemoryTree, change: Callable[[str, bytes], bytes | None]) -> MemoryTree:
    """A copy with other attributes; None takes one away, and a function whose class is gone is gone."""
    files, links = tree.items()
    kept = {path: content for path, old in files.items() if (content := change(path, old)) is not None}
    gone = {path.rpartition("/")[0] for path in files if path.endswith("/class") and path not in kept}
    return MemoryTree(
        {path: content for path, content in kept.items() if path.rpartition("/")[0] not in gone},
        {path: target for path, target in links.items() if target.removeprefix("../../../") not in gone},
    )
