"""One oddity a case: the whole plan and the whole answer of each, with a line that says what is odd."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from hook.config import from_flags
from hook.define import Outcome, define_domain
from hook.errors import StrictRefusal
from hook.plan import Action
from hook.recording import parse_recording
from hook.render import plan_json
from tests.build import controller, disk, host, hostdev, large_bar, mdev, nic, vm
from tests.golden import check

A, B = "0000:41:00.0", "0000:c1:00.0"  # below root ports of node 0 and node 1
A_PATH, B_PATH = f"pci0000:40/0000:40:01.0/{A}", f"pci0000:c0/0000:c0:01.0/{B}"
TWO = host({A_PATH: 0, B_PATH: 1})
UUID = "4b20d080-1b54-4048-85b3-a6a62d165c0"
FOUR_NODES = {0: "0-3", 1: "4-7", 2: "8-11", 3: "12-15"}


@dataclass(frozen=True)
class Case:
    """What is odd, and the input."""

    odd: str
    xml: bytes
    host: str = TWO
    flags: Mapping[str, str | list[str]] = field(default_factory=dict)
    vmi: Mapping[str, object] = field(default_factory=dict)


def annotated(**annotations: str) -> dict[str, object]:
    """A VMI with pcie-numa-hook/ annotations; `_` stands for `-`."""
    return {"metadata": {"annotations": {f"pcie-numa-hook/{k.replace('_', '-')}": v for k, v in annotations.items()}}}


def expanders(right: int, left: int) -> list[str]:
    """Expanders of somebody else with one port each, for the given cells."""
    return [
        controller(1, "pcie-expander-bus", "00:05.0", bus_nr=100, node=right),
        controller(2, "pcie-root-port", "01:00.0"),
        controller(3, "pcie-expander-bus", "00:06.0", bus_nr=120, node=left),
        controller(4, "pcie-root-port", "03:00.0"),
    ]


GPU_A, GPU_B = hostdev(A, "a"), hostdev(B, "b")
LARGE_BARS = host(
    {
        path: {"numa_node": n, "resource": "0x0000008000000000 0x000000ffffffffff 0x000000000014220c"}
        for n, path in enumerate((A_PATH, B_PATH))
    }
)
SEATED = [controller(2, "pcie-root-port", "00:02.0"), controller(3, "pcie-root-port", "00:02.1")]
IO_BAR = "0x0000000000003000 0x000000000000307f 0x0000000000040101"
FIFTEEN = [f"pci0000:40/0000:40:{n:02x}.0/0000:{n + 0x41:02x}:00.0" for n in range(15)]
WITH_IO = FIFTEEN[:10]
AARCH64: dict[str, Any] = {"arch": "aarch64", "machine": "virt", "is_efi": True}
_NO_BAR = f"{0:#018x} {0:#018x} {0:#018x}"
_SMALL_BAR = "0x0000000010000000 0x0000000010ffffff 0x0000000000040200"
_ROM = "0x0000000020000000 0x000000002007ffff 0x0000000000046200"


def _with_bars(node: int, *lines: str) -> dict[str, object]:
    return {"numa_node": node, "resource": "\\n".join(lines)}


TIGHT = host(
    {
        A_PATH: _with_bars(0, large_bar(1 << 24), large_bar(1 << 36), _NO_BAR, large_bar(1 << 25)),
        B_PATH: _with_bars(1, _SMALL_BAR, *[_NO_BAR] * 5, _ROM),
        "pci0000:40/0000:40:02.0/0000:42:00.0": _with_bars(0, large_bar(1 << 25), *[_NO_BAR] * 5, _ROM),
        "pci0000:40/0000:40:03.0/0000:43:00.0": _with_bars(0, large_bar(1 << 25)),
        "pci0000:40/0000:40:03.0/0000:43:00.1": _with_bars(0, large_bar(1 << 20)),
    }
)
MANY = {f"pci0000:40/0000:40:{n // 8:02x}.{n % 8}/0000:{n + 0x41:02x}:00.0": 0 for n in range(33)}


def _below_switch(switch: int, side: int) -> str:
    """One of two devices below one of 40 switches."""
    slot = f"{switch // 8:02x}.{switch % 8}"
    return f"pci0000:40/0000:40:{slot}/0000:41:{slot}/0000:e{side}:{slot}/0000:{2 * switch + side + 0x42:02x}:00.0"


CASES: dict[str, Case] = {
    "memnode-before-pins": Case(
        "memory of cell 0 is on node 1, its vCPU on node 0: the memory decides, and a finding says so",
        vm([GPU_A, GPU_B], memnodes={0: "1", 1: "0"}, pins={0: "0", 1: "4"}),
    ),
    "pins-only": Case(
        "no memnode at all: the pinned vCPUs say which node a cell stands for",
        vm([GPU_A, GPU_B], memnodes={}, cells={0: "0-1", 1: "2"}, pins={0: "4", 1: "5-6", 2: "1"}),
    ),
    "one-vcpu-not-pinned": Case(
        "a cell with one vCPU that is not pinned stands for no node",
        vm([GPU_A, GPU_B], memnodes={}, cells={0: "0-1", 1: "2"}, pins={0: "0", 2: "4"}),
    ),
    "nodes-1-and-3-are-cells-0-and-1": Case(
        "host node ids and cell ids differ: never identity",
        vm([GPU_A, GPU_B], memnodes={0: "1", 1: "3"}),
        host({A_PATH: 1, B_PATH: 3}, nodes=FOUR_NODES),
    ),
    "reversed-cells": Case("cell 0 is node 1 and cell 1 is node 0", vm([GPU_A, GPU_B], memnodes={0: "1", 1: "0"})),
    "cell-spans-nodes": Case(
        "the memory of cell 1 is on two nodes, its vCPUs too: no device belongs to it",
        vm([GPU_A, GPU_B], memnodes={0: "0", 1: "0-1"}, pins={0: "0", 1: "0,4"}),
    ),
    "two-cells-one-node": Case(
        "cells 0 and 1 are both on node 1: devices go to the lower id",
        vm([GPU_A, GPU_B], memnodes={0: "1", 1: "1", 2: "0"}),
    ),
    "vf-through-its-pf": Case(
        "the VF says -1, its physical function knows",
        vm([hostdev("0000:41:10.2", "vf", prefix="ua-sriov-")]),
        host({A_PATH: 1, f"{A_PATH[:-12]}0000:41:10.2": {"numa_node": -1, "physfn": A}}),
    ),
    "mdev-through-its-parent": Case(
        "an mdev has no numa_node, the GPU that it is made of has",
        vm([mdev(f"{UUID}1", "vgpu")]),
        host({A_PATH: 1}, extra=f"bus/mdev/devices/{UUID}1 -> ../../../devices/{A_PATH}/{UUID}1\n"),
    ),
    "two-mdevs-of-one-parent": Case(
        "both have the place of the parent in the tree, and a port each",
        vm([mdev(f"{UUID}1", "vgpu1"), mdev(f"{UUID}2", "vgpu2")]),
        host(
            {A_PATH: 1},
            extra="".join(f"bus/mdev/devices/{UUID}{n} -> ../../../devices/{A_PATH}/{UUID}{n}\n" for n in (1, 2)),
        ),
    ),
    "bridge-knows-the-node": Case(
        "the device says -1, the root port above it knows", vm([GPU_A]), host({A_PATH: -1, A_PATH[:-13]: 1})
    ),
    "single-node-host": Case(
        "everything says -1, but there is only one node",
        vm([GPU_A], memnodes={0: "0"}),
        host({A_PATH: -1}, nodes={0: "0-7"}),
    ),
    "local-cpulist-in-one-node": Case(
        "numa_node is -1, local_cpulist is inside node 1",
        vm([GPU_A]),
        host({A_PATH: {"numa_node": -1, "local_cpulist": "5-6"}}),
    ),
    "local-cpulist-of-all-cpus": Case(
        "numa_node is -1 and local_cpulist names every CPU: that says nothing",
        vm([GPU_A]),
        host({A_PATH: {"numa_node": -1, "local_cpulist": "0-7"}}),
    ),
    "nearest-cell": Case(
        "node 2 has no cell; node 3 is nearer than node 0",
        vm([GPU_A], memnodes={0: "0", 1: "3"}),
        host({A_PATH: 2}, nodes=FOUR_NODES, distances=dict.fromkeys(range(4), "30 20 10 15")),
    ),
    "nearest-is-a-tie": Case(
        "node 2 is as far from both cells: the device is left",
        vm([GPU_A], memnodes={0: "0", 1: "3"}),
        host({A_PATH: 2}, nodes=FOUR_NODES, distances=dict.fromkeys(range(4), "20 20 10 20")),
    ),
    "unaligned-leave": Case(
        "node 2 has no cell, and unaligned is leave",
        vm([GPU_A], memnodes={0: "0", 1: "3"}),
        host({A_PATH: 2}, nodes=FOUR_NODES, distances=dict.fromkeys(range(4), "30 20 10 15")),
        {"unaligned": "leave"},
    ),
    "gpu-with-audio-function": Case(
        "two functions of one card share a slot, with multifunction",
        vm([hostdev("0000:41:00.1", "audio"), GPU_A]),
        host({A_PATH: 0, A_PATH[:-1] + "1": {"numa_node": 0, "class": "0x040300"}}),
    ),
    "one-device-twice": Case(
        "the domain has the same device twice, which libvirt refuses: no two of them get one place",
        vm([GPU_A, hostdev(A, "again"), hostdev(A, "and-again"), hostdev("0000:41:00.1", "audio")]),
        host({A_PATH: 0, A_PATH[:-1] + "1": {"numa_node": 0, "class": "0x040300"}}),
    ),
    "only-function-1": Case(
        "function 1 alone becomes function 0, because something must",
        vm([hostdev("0000:41:00.1", "audio")]),
        host({A_PATH: 0, A_PATH[:-1] + "1": {"numa_node": 0, "class": "0x040300"}}),
    ),
    "vfs-of-one-card": Case(
        "VFs share a host slot and still get a port each: NCCL wants every VF at slot 0 of its own bus",
        vm([hostdev("0000:41:10.2", "vf0", prefix="ua-sriov-"), hostdev("0000:41:10.3", "vf1", prefix="ua-sriov-")]),
        host({A_PATH: 0, **{f"{A_PATH[:-12]}0000:41:10.{n}": {"numa_node": 0, "physfn": A} for n in (2, 3)}}),
    ),
    "interface-hostdev": Case(
        "a passed-through NIC as <interface type='hostdev'>",
        vm(
            [
                '<interface type="hostdev" managed="no"><source>\
<address type="pci" domain="0" bus="193" slot="0" function="0"/></source></interface>'
            ]
        ),
    ),
    "dra-aliases": Case(
        "devices given by dynamic resource allocation have other aliases",
        vm([hostdev(A, "a", prefix="ua-dra-gpu-"), hostdev(B, "b", prefix="ua-dra-hostdevice-")]),
        flags={"exclude": "b"},
    ),
    "five-digit-domain": Case(
        "a VMD child domain: the host domain does not fit in 16 bits",
        vm([hostdev("10000:e1:00.0", "nvme", prefix="ua-hostdevice-")]),
        host(
            {"pci0000:c0/0000:c0:05.5/pci10000:e0/10000:e0:06.0/10000:e1:00.0": {"numa_node": 1, "class": "0x010802"}}
        ),
    ),
    "user-pci-address": Case(
        "the user chose the guest address of the NIC in the VMI",
        vm([hostdev(A, "net1", prefix="ua-sriov-", address="07:00.0"), GPU_B]),
        vmi={"spec": {"domain": {"devices": {"interfaces": [{"name": "net1", "pciAddress": "0000:07:00.0"}]}}}},
    ),
    "root-complex-annotation": Case(
        "the user wants every device on pcie.0",
        vm([hostdev(A, "a", address="00:04.0"), GPU_B]),
        vmi={"metadata": {"annotations": {"kubevirt.io/placePCIDevicesOnRootComplex": "true"}}},
    ),
    "address-of-an-earlier-call": Case(
        "libvirt gave the address on an earlier call: it is ours to move",
        vm(
            [controller(0, "pcie-root"), controller(1, "pcie-root-port", "00:02.0"), hostdev(A, "a", address="01:00.0")]
        ),
    ),
    "address-on-a-foreign-switch": Case(
        "somebody put the device below a switch: it is left",
        vm(
            [
                controller(1, "pcie-root-port", "00:02.0"),
                controller(2, "pcie-switch-upstream-port", "01:00.0"),
                controller(3, "pcie-switch-downstream-port", "02:00.0"),
                hostdev(A, "a", address="03:00.0"),
            ]
        ),
    ),
    "foreign-expander": Case(
        "both devices are behind expanders of somebody else, with the right nodes",
        vm([*expanders(0, 1), hostdev(A, "a", address="02:00.0"), hostdev(B, "b", address="04:00.0")]),
    ),
    "foreign-expander-with-wrong-node": Case(
        "the expanders of somebody else have their nodes exchanged",
        vm([*expanders(1, 0), hostdev(A, "a", address="02:00.0"), hostdev(B, "b", address="04:00.0")]),
    ),
    "foreign-expander-without-node": Case(
        "the expander of somebody else has lost its node",
        vm(
            [
                controller(1, "pcie-expander-bus", "00:05.0", bus_nr=100),
                controller(2, "pcie-root-port", "01:00.0"),
                hostdev(A, "a", address="02:00.0"),
            ]
        ),
    ),
    "foreign-expander-for-an-unknown-node": Case(
        "a device of a node without a cell is behind an expander of somebody else",
        vm([*expanders(0, 1), hostdev(A, "a", address="02:00.0")], memnodes={1: "1"}, cells={0: "0", 1: "1"}),
    ),
    "foreign-windows-in-the-middle": Case(
        "expanders of somebody else at 100 and 254, and a device of ours: windows must not overlap",
        vm(
            [
                controller(1, "pcie-expander-bus", "00:05.0", bus_nr=100, node=0),
                controller(2, "pcie-root-port", "01:00.0"),
                controller(3, "pcie-expander-bus", "00:1e.0", bus_nr=254, node=1),
                controller(4, "pcie-root-port", "03:00.0"),
                hostdev(A, "a", address="02:00.0"),
                GPU_B,
            ]
        ),
    ),
    "foreign-window-with-ports": Case(
        "an expander of somebody else at 250 has two ports, so 253 is the first free bus above it: four are not enough",
        vm(
            [
                controller(1, "pcie-expander-bus", "00:05.0", bus_nr=250, node=1),
                controller(2, "pcie-root-port", "01:00.0"),
                controller(3, "pcie-root-port", "01:01.0"),
                *(hostdev(path.rpartition("/")[2]) for path in FIFTEEN[:3]),
            ]
        ),
        host(dict.fromkeys(FIFTEEN[:3], 0)),
    ),
    "foreign-expander-without-bus-number": Case(
        "libvirt gives it a bus number below ours",
        vm(
            [
                controller(1, "pcie-expander-bus", "00:05.0", node=0),
                controller(2, "pcie-root-port", "01:00.0"),
                hostdev(A, "a", address="02:00.0"),
                GPU_B,
            ]
        ),
    ),
    "devices-gpu": Case(
        "only GPUs and accelerators are wanted; the NIC is left alone",
        vm([GPU_A, hostdev(B, "nic", prefix="ua-hostdevice-")]),
        host({A_PATH: {"numa_node": 0, "class": "0x120000"}, B_PATH: {"numa_node": 1, "class": "0x020000"}}),
        {"devices": "gpu"},
    ),
    "exclude": Case(
        "one device is excluded by its NAME, one by its host address, and one NAME is nobody's",
        vm([GPU_A, GPU_B]),
        flags={"exclude": ["a,nobody", B]},
    ),
    "override-by-annotation": Case(
        "flag and annotation name another node, and the annotation wins",
        vm([GPU_A, GPU_B]),
        flags={"numa-node": ["a=0", f"{B}=0"]},
        vmi={"metadata": {"annotations": {"pcie-numa-hook/numa-node.a": "1"}}},
    ),
    "bad-annotations": Case(
        "a value that cannot be, a key that does not exist, and a key without its NAME",
        vm([GPU_A]),
        vmi=annotated(layout="tree", speed="fast", numa_node="1"),
    ),
    "annotation-over-flag": Case(
        "the VM switches the hook off, though the operator's flag says strict",
        vm([GPU_A]),
        host({}),
        {"policy": "strict"},
        annotated(mode="off"),
    ),
    "observe": Case("the plan is made and not used", vm([GPU_A]), flags={"mode": "observe", "policy": "strict"}),
    "migration-target": Case("no hostdev at all, as on a migration target", vm([nic()])),
    "i440fx": Case("a machine without PCI Express", vm([GPU_A], machine="pc")),
    "s390x": Case("no PCI Express at all", vm([GPU_A], arch="s390x", machine="s390-ccw-virtio")),
    "versioned-machine": Case("a versioned machine type", vm([GPU_A], machine="pc-q35-rhel9.6.0")),
    "no-cells": Case("no guest NUMA at all", vm([GPU_A], memnodes={})),
    "grace-smmuv3": Case(
        "KubeVirt places the devices of a Grace VM itself",
        vm([GPU_A, '<iommu model="smmuv3"/>'], arch="aarch64", machine="virt"),
    ),
    "grace-acpi-nodeset": Case(
        "a hostdev with memory nodes of its own is a Grace GPU",
        vm([hostdev(A, "a", extra='<acpi nodeset="2-9"/>')], arch="aarch64", machine="virt"),
    ),
    "device-unknown-to-sysfs": Case("sysfs does not know the device", vm([hostdev("0000:99:00.0", "ghost"), GPU_A])),
    "hostile-addresses": Case(
        "sources that are no addresses never reach the file system and are none of our devices",
        vm(
            [
                '<hostdev type="pci"><source><address domain="0" bus="../../etc" slot="0" function="0"/></source></hostdev>',
                '<hostdev type="pci"><source><address domain="0" bus="0x1FFFFF" slot="0" function="0"/></source></hostdev>',
                '<hostdev type="pci"><source><address domain="0" bus="-1" slot="0" function="1e9"/></source></hostdev>',
                mdev("../../../etc/passwd", "vgpu"),
                '<hostdev type="pci"><source/></hostdev>',
                GPU_A,
            ]
        ),
    ),
    "odd-numbers": Case(
        "decimal, hex and empty attributes, as KubeVirt prints them before v1.8",
        vm(
            [
                '<hostdev type="pci" mode="subsystem"><source><address type="" domain="0x0000" bus="65" slot="0x00" '
                'function="0"/></source><address type="pci" domain="" bus="1" slot="0x0" function=""/></hostdev>'
            ]
        ),
    ),
    "alias-taken-by-a-disk": Case(
        "a volume has the very alias that our expander would get",
        vm(
            [
                GPU_A,
                '<disk type="file"><source file="/disk.img"/><target dev="vda" bus="virtio"/><alias name="ua-pcie-numa-expander-17"/></disk>',
            ]
        ),
    ),
    "someone-on-our-index": Case(
        "a disk sits on the index of a port that was ours: our block moves",
        vm(
            [
                controller(17, "pcie-expander-bus", "00:1e.0", bus_nr=254, node=0, alias="ua-pcie-numa-expander-17"),
                controller(18, "pcie-root-port", "11:00.0", alias="ua-pcie-numa-port-18"),
                '<disk type="file"><source file="/disk.img"/><target dev="vda" bus="virtio"/>'
                '<address type="pci" domain="0" bus="0x12" slot="0" function="0"/></disk>',
                GPU_A,
            ]
        ),
    ),
    "own-port-without-its-expander": Case(
        "our expander has lost its alias: it is somebody else's, and the device behind our port is placed anew",
        vm(
            [
                controller(17, "pcie-expander-bus", "00:1e.0", bus_nr=254, node=0),
                controller(18, "pcie-root-port", "11:00.0", alias="ua-pcie-numa-port-18"),
                hostdev(A, "a", address="12:00.0"),
            ]
        ),
    ),
    "own-controllers-without-devices": Case(
        "the hook's controllers are there, but no device",
        vm(
            [
                controller(17, "pcie-expander-bus", "00:1e.0", bus_nr=254, node=0, alias="ua-pcie-numa-expander-17"),
                controller(18, "pcie-root-port", "11:00.0", alias="ua-pcie-numa-port-18"),
            ]
        ),
    ),
    "placed-before-excluded-now": Case(
        "a device on our port is excluded: its address goes with the port",
        vm(
            [
                controller(17, "pcie-expander-bus", "00:1e.0", bus_nr=254, node=0, alias="ua-pcie-numa-expander-17"),
                controller(18, "pcie-root-port", "11:00.0", alias="ua-pcie-numa-port-18"),
                hostdev(A, "a", address="12:00.0"),
            ]
        ),
        flags={"exclude": "a"},
    ),
    "thirty-three-devices-in-one-cell": Case(
        "more devices than an expander has slots: eight ports to a slot",
        vm([hostdev(path.rpartition("/")[2]) for path in MANY]),
        host(MANY),
    ),
    "too-many-devices": Case(
        "250 VFs: no room for their buses, so nothing is changed",
        vm(
            [
                hostdev(f"0000:{0x41 + n // 250:02x}:{n // 8 % 32:02x}.{n % 8}", f"vf{n}", prefix="ua-sriov-")
                for n in range(250)
            ]
        ),
        host({f"pci0000:40/0000:40:01.0/0000:41:{n // 8 % 32:02x}.{n % 8}": 0 for n in range(250)}),
    ),
    "no-room-for-a-device-with-an-address": Case(
        "there is no room, and the address that libvirt gave on an earlier call stays",
        vm([*(controller(index, "pcie-root-port") for index in range(1, 231)), hostdev(A, "a", address="01:00.0")]),
    ),
    "switch-falls-back": Case(
        "80 cards below 40 switches need 161 buses, 81 without the switches: too much beside 100 NICs",
        vm(
            [
                *(nic(dev=f"tap{n}") for n in range(100)),
                *(hostdev(f"0000:{2 * n + s + 0x42:02x}:00.0", f"d{n}-{s}") for n in range(40) for s in (0, 1)),
            ]
        ),
        host({_below_switch(n, s): 0 for n in range(40) for s in (0, 1)}),
        {"layout": "switch"},
    ),
    "no-slot-left-for-expanders": Case(
        "204 ports without an address fill pcie.0: an expander would get the last of them, and lack a bus",
        vm([*(controller(index, "pcie-root-port") for index in range(1, 205)), GPU_A, GPU_B]),
    ),
    "seated-ports-have-room-for-more": Case(
        "two ports share a slot of pcie.0 and 198 have no address: six find place beside the two, one slot is left",
        vm([*SEATED, controller(200, "pcie-root-port"), GPU_A]),
    ),
    "seated-ports-have-room-for-six": Case(
        "the same with 199 ports without an address, and no slot is left",
        vm([*SEATED, controller(201, "pcie-root-port"), GPU_A]),
    ),
    "conventional-nic": Case(
        "an e1000 NIC needs a pcie-to-pci-bridge, which keeps the index that libvirt would give it",
        vm([nic("e1000"), nic(dev="tap1"), GPU_A]),
    ),
    "virtio-transitional": Case(
        "transitional virtio devices are conventional, others between them are not",
        vm(
            [
                nic(),
                nic("virtio-transitional", "tap1"),
                '<disk type="file" model="virtio-transitional"><source file="/disk.img"/><target dev="vda" bus="virtio"/></disk>',
                '<disk type="file"><source file="/disk2.img"/><target dev="vdb" bus="virtio"/></disk>',
                GPU_A,
            ]
        ),
    ),
    "arm-watchdog-without-balloon": Case(
        "on aarch64 libvirt adds no balloon, so the watchdog's bridge comes one index earlier",
        vm([GPU_A, '<watchdog model="i6300esb" action="reset"/>'], arch="aarch64", machine="virt"),
    ),
    "conventional-behind-used-ports": Case(
        "the port that is there is used, so libvirt adds two, and the bridge comes behind all three",
        vm(
            [
                controller(1, "pcie-root-port", "00:02.0"),
                controller(2, "pcie-switch-upstream-port", "01:00.0"),
                nic(),
                GPU_A,
                '<watchdog model="i6300esb" action="reset"/>',
            ]
        ),
    ),
    "conventional-nic-beside-a-disk-on-bus-5": Case(
        "the user gave a disk an address on bus 5, so libvirt adds ports 1 to 5 before the bridge of the e1000 NIC",
        vm([nic("e1000"), disk("05:00.0"), GPU_A]),
    ),
    "conventional-nic-beside-a-disk-on-bus-1": Case(
        "the bridge of the e1000 NIC has index 3, because libvirt adds ports 1 and 2 for the disk and the bridge",
        vm([nic("e1000"), disk("01:00.0"), GPU_A]),
    ),
    "conventional-nic-beside-someone-on-our-index": Case(
        "a disk sits on the index of a port that was ours, and an e1000 NIC has come, whose bridge has the index 21",
        vm(
            [
                controller(17, "pcie-expander-bus", "00:1e.0", bus_nr=254, node=0, alias="ua-pcie-numa-expander-17"),
                controller(18, "pcie-root-port", "11:00.0", alias="ua-pcie-numa-port-18"),
                nic("e1000"),
                disk("13:00.0"),
                GPU_A,
                GPU_B,
            ]
        ),
    ),
    "conventional-nic-on-a-later-call": Case(
        "libvirt gave an address to the bridge and the port that the hook made for an e1000 NIC: they stay",
        vm(
            [
                controller(1, "pcie-root-port", "00:02.0", alias="ua-pcie-numa-port-1"),
                controller(2, "pcie-to-pci-bridge", "01:00.0", alias="ua-pcie-numa-bridge-2"),
                controller(17, "pcie-expander-bus", "00:1e.0", bus_nr=254, node=0, alias="ua-pcie-numa-expander-17"),
                controller(18, "pcie-root-port", "11:00.0", alias="ua-pcie-numa-port-18").replace(
                    "<alias", '<target hotplug="off"/><alias'
                ),
                nic("e1000"),
                hostdev(A, "a", address="12:00.0"),
            ]
        ),
    ),
    "conventional-nic-later-above-our-block": Case(
        "an e1000 NIC comes to a VM with a block of ours and a disk on bus 25: the bridge comes behind the block",
        vm(
            [
                controller(17, "pcie-expander-bus", "00:1e.0", bus_nr=254, node=0, alias="ua-pcie-numa-expander-17"),
                controller(18, "pcie-root-port", "11:00.0", alias="ua-pcie-numa-port-18"),
                nic("e1000"),
                disk("19:00.0"),
                GPU_A,
            ]
        ),
    ),
    "i6300esb-watchdog": Case(
        "the watchdog is conventional and comes after the hostdevs in libvirt's order",
        vm([nic(), GPU_A, GPU_B, '<watchdog model="i6300esb" action="reset"/>']),
    ),
    "distances": Case(
        "the host's distances are written where the domain has none",
        vm([GPU_A]),
        host({A_PATH: 0}, distances={0: "10 32", 1: "32 10"}),
        {"distances": "auto"},
    ),
    "distances-of-two-cells-on-one-node": Case(
        "libvirt keeps 10 for a cell's distance to itself, and these cells are on one node",
        vm([GPU_A], memnodes={0: "0", 1: "0"}),
        host({A_PATH: 0}, distances={0: "10 32", 1: "32 10"}),
        {"distances": "auto"},
    ),
    "large-bars": Case(
        "two BARs of 512 GiB do not fit below 40 bits: the host's address bits are added",
        vm([GPU_A, GPU_B], cpu_mode="host-model"),
        LARGE_BARS,
        {"maxphysaddr": "auto"},
    ),
    "large-bars-just-fit": Case(
        "BARs of 64, 32, 16 and 8 GiB: OVMF has 128 GiB, less 8 for 16 hot-pluggable ports",
        vm([hostdev(path.rpartition("/")[2]) for path in FIFTEEN[:4]], cpu_mode="host-model", is_efi=True),
        host({path: _with_bars(0, large_bar(8 << (30 + n))) for n, path in enumerate(FIFTEEN[:4])}),
        {"maxphysaddr": "auto"},
    ),
    "large-bars-of-a-vf": Case(
        "the BAR of 512 GiB is a virtual function's, and the guest sees it all the same",
        vm([hostdev(A, "vf", prefix="ua-sriov-")], cpu_mode="custom"),
        LARGE_BARS,
        {"maxphysaddr": "auto"},
    ),
    "large-bars-host-passthrough": Case(
        "such a CPU has the host's address bits already, and nobody knows how many",
        vm([GPU_A, GPU_B]),
        LARGE_BARS,
        {"maxphysaddr": "auto"},
    ),
    "io-bar-efi": Case(
        "one of two GPUs has an I/O BAR, and OVMF of 2022 would take the BARs of both behind expanders",
        vm([GPU_A, GPU_B], is_efi=True),
        host({A_PATH: {"numa_node": 0, "resource": IO_BAR}, B_PATH: 1}),
    ),
    "io-bar-seabios": Case(
        "a GPU has an I/O BAR, and SeaBIOS has room for it behind an expander",
        vm([GPU_A, GPU_B]),
        host({A_PATH: {"numa_node": 0, "resource": IO_BAR}, B_PATH: 1}),
    ),
    "io-bar-place": Case(
        "ten devices have I/O BARs and the user knows that OVMF is new: there is room for nine",
        vm([hostdev(path.rpartition("/")[2]) for path in WITH_IO], is_efi=True),
        host({path: {"numa_node": 0, "resource": IO_BAR} for path in WITH_IO}),
        vmi=annotated(risky_bars="place"),
    ),
    "io-space-just-fits": Case(
        "fourteen devices have I/O BARs, as many as SeaBIOS can bear",
        vm([hostdev(path.rpartition("/")[2]) for path in FIFTEEN[:14]]),
        host({path: {"numa_node": 0, "resource": IO_BAR} for path in FIFTEEN[:14]}),
    ),
    "io-space": Case(
        "fifteen devices have I/O BARs, one more than SeaBIOS can bear; the last is excluded and counts all the same",
        vm([hostdev(path.rpartition("/")[2]) for path in FIFTEEN]),
        host({path: {"numa_node": 0, "resource": IO_BAR} for path in FIFTEEN}),
        {"exclude": FIFTEEN[-1].rpartition("/")[2]},
    ),
    "mmio32-window": Case(
        "two devices have a 32-bit BAR of 512 MiB each: below 4 GiB is no room for both",
        vm([GPU_A, GPU_B]),
        host(
            {
                path: {"numa_node": n, "resource": "0x00000000c0000000 0x00000000dfffffff 0x0000000000040200"}
                for n, path in enumerate((A_PATH, B_PATH))
            }
        ),
    ),
    "mmio32-window-just-fits": Case(
        "32-bit BARs of 512 and 256 MiB: 768 MiB are all that there is below 4 GiB",
        vm([GPU_A, GPU_B]),
        host(
            {
                A_PATH: {"numa_node": 0, "resource": "0x00000000c0000000 0x00000000dfffffff 0x0000000000040200"},
                B_PATH: {"numa_node": 1, "resource": "0x00000000c0000000 0x00000000cfffffff 0x0000000000040200"},
            }
        ),
    ),
    "tight-window-aarch64": Case(
        "a GPU with BARs of several sizes, one with a ROM beside its BAR, a NIC with one BAR, a card whose two "
        "functions differ: Linux on aarch64 has room for the NIC alone",
        vm([GPU_A, GPU_B, *(hostdev(a) for a in ("0000:42:00.0", "0000:43:00.0", "0000:43:00.1"))], **AARCH64),
        TIGHT,
    ),
    "tight-window-of-a-pf-with-vfs": Case(
        "a PF, a VF that sysfs knows and one that the XML knows have numbers of one slot, and a port each in the guest",
        vm(
            [
                hostdev("0000:43:00.0"),
                hostdev("0000:43:00.1"),
                hostdev("0000:43:00.2", "vf", prefix="ua-sriov-"),
            ],
            **AARCH64,
        ),
        host(
            {
                "pci0000:40/0000:40:03.0/0000:43:00.0": _with_bars(0, large_bar(1 << 25)),
                "pci0000:40/0000:40:03.0/0000:43:00.1": {**_with_bars(0, large_bar(1 << 20)), "physfn": "0000:43:00.0"},
                "pci0000:40/0000:40:03.0/0000:43:00.2": _with_bars(0, large_bar(1 << 20)),
            }
        ),
    ),
    "tight-window-place": Case(
        "the same devices, and the user knows that the guest's kernel keeps the firmware's layout",
        vm([GPU_A, GPU_B, *(hostdev(a) for a in ("0000:42:00.0", "0000:43:00.0", "0000:43:00.1"))], **AARCH64),
        TIGHT,
        {"risky-bars": "place"},
    ),
    "switch-aarch64": Case(
        "two NICs share a switch, behind which Linux on aarch64 may find too little room",
        vm([hostdev("0000:43:00.0"), hostdev("0000:44:00.0")], **AARCH64),
        host(
            {
                f"pci0000:40/0000:40:01.0/0000:41:00.0/0000:42:0{n}.0/0000:4{3 + n}:00.0": {
                    "numa_node": 0,
                    "class": "0x020000",
                }
                for n in (0, 1)
            }
        ),
        {"layout": "switch"},
    ),
    "gpudirect-lost": Case(
        "a GPU and a NIC share a host switch; layout node makes them PHB, and says so",
        vm([hostdev("0000:43:00.0", "gpu"), hostdev("0000:44:00.0", "nic", prefix="ua-hostdevice-")]),
        host(
            {
                f"pci0000:40/0000:40:01.0/0000:41:00.0/0000:42:00.0/{'0000:43:00.0'}": 0,
                "pci0000:40/0000:40:01.0/0000:41:00.0/0000:42:01.0/0000:44:00.0": {"numa_node": 0, "class": "0x020000"},
            }
        ),
    ),
    "garbage-in-sysfs": Case(
        "attributes that make no sense are findings, not errors",
        vm([GPU_A]),
        host(
            {A_PATH: {"numa_node": 0, "vendor": "nvidia", "local_cpulist": "1-", "resource": "x"}},
            distances={0: "10", 1: "a b"},
        ),
    ),
}


# One switch with everything that can be passed through: a GPU with audio, a card with two ports, an NVSwitch, VFs of
# two physical functions, two mdevs of one GPU, an NVMe disk, accelerators of two classes; and one NIC next to it.
_SWITCH = "pci0000:40/0000:40:01.0/0000:41:00.0"
_KINDS = {
    f"{_SWITCH}/0000:42:00.0/0000:43:00.0": "0x030200",
    f"{_SWITCH}/0000:42:00.0/0000:43:00.1": "0x040300",
    f"{_SWITCH}/0000:42:01.0/0000:44:00.0": "0x020000",
    f"{_SWITCH}/0000:42:01.0/0000:44:00.1": "0x020000",
    f"{_SWITCH}/0000:42:02.0/0000:45:00.0": "0x068000",
    f"{_SWITCH}/0000:42:03.0/0000:46:00.0": "0x030200",
    f"{_SWITCH}/0000:42:04.0/0000:47:00.0": "0x010802",
    f"{_SWITCH}/0000:42:05.0/0000:48:00.0": "0x120000",
    f"{_SWITCH}/0000:42:06.0/0000:49:00.0": "0x0b4000",
    "pci0000:50/0000:50:01.0/0000:51:00.0": "0x020700",
}
_VFS = {f"{_SWITCH}/0000:42:01.0/0000:44:{10 + port}.{n}": f"0000:44:00.{port}" for port in (0, 1) for n in (2, 3)}
ALL_KINDS = host(
    {
        **{path: {"numa_node": 0, "class": class_code} for path, class_code in _KINDS.items()},
        **{path: {"numa_node": 0, "class": "0x020000", "physfn": pf} for path, pf in _VFS.items()},
    },
    extra="".join(
        f"bus/mdev/devices/{UUID}{n} -> ../../../devices/{_SWITCH}/0000:42:03.0/0000:46:00.0/{UUID}{n}\n"
        for n in (1, 2)
    ),
)
ALL_DEVICES = [
    *(hostdev(path.rpartition("/")[2]) for path in _KINDS if not path.endswith("46:00.0")),
    *(hostdev(path.rpartition("/")[2], f"vf{n}", prefix="ua-sriov-") for n, path in enumerate(_VFS)),
    mdev(f"{UUID}1", "vgpu1"),
    mdev(f"{UUID}2", "vgpu2"),
]
for _layout in ("node", "host-bridge", "switch"):
    CASES[f"all-kinds-{_layout}"] = Case(
        f"every kind of device below one switch, and one NIC beside it, in layout {_layout}",
        vm(ALL_DEVICES),
        ALL_KINDS,
        {"layout": _layout},
    )


# --- what public reports are about, see docs/guarantees.md


def _live_port(index: int, bus: int, slot: int, function: int = 0) -> str:
    """A root port as libvirt prints it."""
    multifunction = ' multifunction="on"' if function == 0 else ""
    return (
        f'<controller type="pci" index="{index}" model="pcie-root-port"><model name="pcie-root-port"/>'
        f'<target chassis="{index}" port="{slot * 8 + function:#x}"/><address type="pci" domain="0x0000" bus="{bus:#04x}" '
        f'slot="{slot:#04x}" function="{function:#x}"{multifunction}/></controller>'
    )


def _ats(text: str) -> str:
    """A controller that somebody tuned by hand."""
    return text.replace("<address", '<driver ats="on"/><address', 1)


# Two cells of a tuned VM: VFs and GPU of node 0; VFs, GPU and, below a switch in a switch, NVSwitches of node 1.
_TUNED = {
    0: {"0000:21:00.2": "0x020000", "0000:22:00.0": "0x030200"},
    1: {"0000:a1:00.2": "0x020000", "0000:a2:00.0": "0x030200", **{f"0000:b{n}:00.0": "0x068000" for n in range(1, 4)}},
}
_TUNED_HOST = host(
    {
        f"pci0000:{20 + 80 * node}/0000:{20 + 80 * node}:{place:02x}.0/{address}": {"numa_node": node, "class": kind}
        for node, devices in _TUNED.items()
        for place, (address, kind) in enumerate(devices.items())
    }
)
_TUNED_TREE = [
    '<controller type="pci" index="0" model="pcie-root"><driver ats="on"/></controller>',
    *map(
        _ats,
        [
            controller(1, "pcie-expander-bus", "00:03.0", bus_nr=210, node=0),
            controller(2, "pcie-root-port", "01:00.0"),
            controller(3, "pcie-root-port", "01:01.0"),
            controller(4, "pcie-expander-bus", "00:04.0", bus_nr=130, node=1),
            controller(5, "pcie-root-port", "04:00.0"),
            controller(6, "pcie-switch-upstream-port", "05:00.0"),
            controller(7, "pcie-switch-downstream-port", "06:00.0"),
            controller(8, "pcie-switch-downstream-port", "06:01.0"),
            controller(9, "pcie-switch-downstream-port", "06:02.0"),
            controller(10, "pcie-switch-upstream-port", "09:00.0"),
            *(controller(11 + n, "pcie-switch-downstream-port", f"0a:{n:02x}.0") for n in range(3)),
        ],
    ),
]
_PAIRS = {
    f"pci0000:{root:02x}/0000:{root:02x}:01.0/0000:{root + 1:02x}:00.0/0000:{root + 2:02x}:0{side}.0/"
    f"0000:{root + 3 + side:02x}:00.0": {"numa_node": node, "class": kind}
    for node, root in ((0, 0x20), (0, 0x30), (1, 0xA0), (1, 0xB0))
    for side, kind in enumerate(("0x030200", "0x020700"))
}
_SNC = {  # bridge and device by node, in the order of the buses
    f"pci0000:{root:02x}/0000:{root:02x}:01.0/0000:{root + 3:02x}:00.0": node
    for root, node in ((0x11, 0), (0x32, 1), (0x44, 1), (0x55, 0), (0x91, 2), (0xB1, 3), (0xC1, 3), (0xD1, 2))
}
_DISPLAYED = (
    '<hostdev mode="subsystem" type="mdev" managed="no" model="vfio-pci" display="on" ramfb="on"><source>'
    f'<address uuid="{UUID}1"/></source><alias name="ua-gpu-vgpu"/>'
    '<address type="pci" domain="0x0000" bus="0x02" slot="0x00" function="0x0"/></hostdev>'
)
CASES |= {
    "already-placed-tree": Case(
        "somebody built the whole tree by hand, with a switch in a switch and ats on all controllers: it stays",
        vm(
            [
                *_TUNED_TREE,
                hostdev("0000:21:00.2", "vf0", prefix="ua-sriov-", address="02:00.0"),
                hostdev("0000:22:00.0", "gpu0", address="03:00.0"),
                hostdev("0000:a1:00.2", "vf1", prefix="ua-sriov-", address="07:00.0"),
                hostdev("0000:a2:00.0", "gpu1", address="08:00.0"),
                *(hostdev(f"0000:b{n}:00.0", f"nvs{n}", address=f"{0x0A + n:02x}:00.0") for n in range(1, 4)),
            ]
        ),
        _TUNED_HOST,
    ),
    "flat-tree-beside-fixed-slots": Case(
        "the same VM before somebody built the tree: other devices sit on slots of pcie.0, which are not reused",
        vm(
            [
                _TUNED_TREE[0],
                '<disk type="file"><source file="/disk.img"/><target dev="vda" bus="virtio"/>'
                '<address type="pci" domain="0x0000" bus="0x00" slot="0x1e" function="0x0"/></disk>',
                nic().replace(
                    "</interface>",
                    '<address type="pci" domain="0x0000" bus="0x00" slot="0x19" function="0x0"/></interface>',
                ),
                *(hostdev(address) for devices in _TUNED.values() for address in devices),
            ],
            rest='<qemu:commandline><qemu:arg value="-no-hpet"/></qemu:commandline>',
        ),
        _TUNED_HOST,
    ),
    "live-dump-without-devices": Case(
        "a dump of a running VM without a passed-through device, with free ports and KubeVirt's metadata: it stays",
        vm(
            [
                controller(0, "pcie-root"),
                *(_live_port(index, 0, 2, index - 1) for index in range(1, 6)),
                nic().replace(
                    "</interface>",
                    '<address type="pci" domain="0x0000" bus="0x01" slot="0x00" function="0x0"/></interface>',
                ),
            ],
            memnodes={},
            rest='<metadata><kubevirt xmlns="http://kubevirt.io"><uid/></kubevirt></metadata>',
        ),
    ),
    "kubevirts-own-expander": Case(
        "KubeVirt's own feature placed a GPU and a NIC, and libvirt printed it: it stays",
        vm(
            [
                controller(0, "pcie-root"),
                controller(1, "pcie-expander-bus", "00:02.0", bus_nr=253, node=0),
                _live_port(2, 1, 0),
                _live_port(3, 1, 1),
                hostdev(A, "my-gpu", prefix="ua-dra-gpu-", address="02:00.0"),
                hostdev("0000:41:00.1", "my-nic", prefix="ua-sriov-", address="03:00.0"),
            ]
        ),
        host({A_PATH: 0, A_PATH[:-1] + "1": 0}),
    ),
    "snc-nodes-out-of-bus-order": Case(
        "sub-NUMA clustering: the nodes do not rise with the buses, and the VM has cells of nodes 0 and 2 only",
        vm([hostdev(path.rpartition("/")[2]) for path in _SNC], memnodes={0: "0", 1: "2"}),
        host(
            _SNC, nodes=FOUR_NODES, distances={0: "10 12 21 21", 1: "12 10 21 21", 2: "21 21 10 12", 3: "21 21 12 10"}
        ),
    ),
    "nodes-of-eight-with-devices-on-odd-ones": Case(
        "NPS4: devices on nodes 1, 3, 5 and 7 only; the VM has cells of 1 and 3, and node 7 is as far from both",
        vm([hostdev(f"0000:{n}1:00.0", f"gpu{n}") for n in (1, 3, 7)], memnodes={0: "1", 1: "3"}),
        host(
            {f"pci0000:{n}0/0000:{n}0:01.0/0000:{n}1:00.0": n for n in (1, 3, 5, 7)},
            nodes={n: f"{16 * n}-{16 * n + 15},{128 + 16 * n}-{143 + 16 * n}" for n in range(8)},
            distances={
                a: " ".join("10" if a == b else "12" if a // 4 == b // 4 else "32" for b in range(8)) for a in range(8)
            },
        ),
    ),
    "odd-and-even-cpus": Case(
        "even CPUs are node 0 and odd ones node 1, and the cells have vCPUs that may be plugged in later, without a pin",
        vm(
            [GPU_A, GPU_B],
            cells={0: "0-1,4-7", 1: "2-3"},
            pins={0: "0", 1: "2", 2: "1", 3: "3"},
            memnodes={0: "0"},
        ),
        host({A_PATH: 0, B_PATH: 1}, nodes={0: "0,2,4,6", 1: "1,3,5,7"}),
    ),
    "libvirt-normalised-dump": Case(
        "libvirt gave every device an address on an earlier call without the hook: those of hostdevs are ours to move",
        vm(
            [
                controller(0, "pcie-root"),
                *(_live_port(index, 0, 2, index - 1) for index in range(1, 5)),
                nic().replace(
                    "</interface>",
                    '<address type="pci" domain="0x0000" bus="0x01" slot="0x00" function="0x0"/></interface>',
                ),
                hostdev(A, "a", address="02:00.0"),
                hostdev(B, "b", address="03:00.0"),
                '<memballoon model="none"/>',
            ]
        ),
    ),
    "gpu-nic-pairs-in-layout-node": Case(
        "four pairs of GPU and NIC, each below a switch of its own: in layout node all are PHB, and that is said",
        vm([hostdev(path.rpartition("/")[2]) for path in _PAIRS]),
        host(_PAIRS),
    ),
    "gpu-nic-pairs-in-layout-switch": Case(
        "the same pairs in layout switch: each stays together",
        vm([hostdev(path.rpartition("/")[2]) for path in _PAIRS]),
        host(_PAIRS),
        {"layout": "switch"},
    ),
    "audio-as-a-second-gpu-after-another-hook": Case(
        "the audio function is a second GPU of the VMI, and another hook has written <memtune>: one slot, and it stays",
        vm(
            [hostdev(A, "gpu1"), hostdev("0000:41:00.1", "gpu1sk")],
            rest='<memtune><hard_limit unit="KiB">36700160</hard_limit></memtune>',
        ),
        host({A_PATH: 0, A_PATH[:-1] + "1": {"numa_node": 0, "class": "0x040300"}}),
    ),
    "minus-one-but-for-one-device": Case(
        "all but one device and all bridges say -1, and every local_cpulist has all CPUs: one is placed, none guessed",
        vm([GPU_A, GPU_B], memnodes={0: "0", 1: "2"}),
        host(
            {
                A_PATH[:-13]: {"numa_node": -1, "local_cpulist": "0-15"},
                A_PATH: {"numa_node": 2, "local_cpulist": "0-15"},
                B_PATH[:-13]: {"numa_node": -1, "local_cpulist": "0-15"},
                B_PATH: {"numa_node": -1, "local_cpulist": "0-15"},
            },
            nodes=FOUR_NODES,
        ),
    ),
    "mdev-with-a-display": Case(
        "a vGPU with a display and an address that libvirt gave: its parent's node counts, its attributes stay",
        vm([_live_port(1, 0, 2), _live_port(2, 0, 2, 1), _DISPLAYED, '<graphics type="vnc"/>']),
        host({A_PATH: 1}, extra=f"bus/mdev/devices/{UUID}1 -> ../../../devices/{A_PATH}/{UUID}1\n"),
    ),
    "mdev-unknown-to-sysfs": Case(
        "a vGPU that sysfs does not show stays where it is",
        vm([_live_port(1, 0, 2), _live_port(2, 0, 2, 1), _DISPLAYED, '<graphics type="vnc"/>']),
    ),
}
PLACED_BY_OTHERS = ("already-placed-tree", "foreign-expander", "kubevirts-own-expander")


def run(case: Case) -> Outcome:
    outcome = define_domain(
        case.xml, json.dumps(case.vmi).encode(), lambda: parse_recording(case.host), from_flags(case.flags)
    )
    if outcome.error is not None:
        raise outcome.error
    return outcome


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    outcome = run(CASES[name])

    plan = {"odd": CASES[name].odd, **plan_json(outcome)}
    check(f"cases/{name}.plan.json", json.dumps(plan, indent=2, ensure_ascii=False) + "\n")
    check(f"cases/{name}.xml", outcome.xml.decode())
    assert (outcome.xml == CASES[name].xml) is (not outcome.plan.is_changed or str(outcome.config.mode) != "apply")


@pytest.mark.parametrize("name", PLACED_BY_OTHERS)
def test_what_somebody_placed_stays_byte_for_byte(name: str) -> None:
    outcome = run(CASES[name])

    assert outcome.xml == CASES[name].xml
    assert {device.action for device in outcome.plan.devices} == {Action.KEPT}
    assert outcome.plan.findings == ()


@pytest.mark.parametrize("name", CASES)
def test_a_second_pass_changes_nothing(name: str) -> None:
    case = CASES[name]
    once = run(case)
    twice = run(Case(case.odd, once.xml, case.host, case.flags, case.vmi))

    assert once.xml == twice.xml


@pytest.mark.parametrize("name", CASES)
def test_strict_refuses_exactly_what_best_effort_warns_about(name: str) -> None:
    case = CASES[name]
    flags = {**case.flags, "policy": "strict"}
    warnings = run(case).plan.warnings
    if str(run(case).config.mode) != "apply":
        assert run(Case(case.odd, case.xml, case.host, flags, case.vmi)).xml == case.xml
    elif warnings:
        with pytest.raises(StrictRefusal) as raised:
            run(Case(case.odd, case.xml, case.host, flags, case.vmi))
        assert warnings == raised.value.findings
    else:
        assert run(Case(case.odd, case.xml, case.host, flags, case.vmi)).xml == run(case).xml


def test_every_golden_belongs_to_a_case() -> None:
    from tests.golden import GOLDENS

    names = {path.name.removesuffix(".plan.json").removesuffix(".xml") for path in (GOLDENS / "cases").iterdir()}
    assert names == set(CASES)
