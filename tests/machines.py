"""The 13 recorded machines, with their devices and the matrices that their sources give; must not compute any."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hook.address import PciAddress
from hook.config import Config, Layout
from hook.define import Outcome, define_domain
from hook.host import HostTopology
from hook.recording import open_sysfs
from hook.sysfs import SysfsTree, all_functions, read_host

FOLDER = Path(__file__).parent / "hosts"
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.sysfs")))


@dataclass(frozen=True)
class Machine:
    """One machine: accelerators and NICs by address, in the order of their matrix."""

    name: str
    tree: SysfsTree
    host: HostTopology
    devices: Mapping[PciAddress, str]
    smi: Sequence[Sequence[str]]
    nccl: Sequence[Sequence[str]]

    @property
    def cpu_nodes(self) -> list[int]:
        """Nodes that a VM can have a cell of."""
        return [node.id for node in self.host.nodes.values() if node.cpus]


@functools.cache
def machine(name: str) -> Machine:
    """Read one machine."""
    tree = open_sysfs(str(FOLDER / f"{name}.sysfs"))
    lines = [line.split() for line in (FOLDER / f"{name}.matrix").read_text().splitlines() if not line.startswith("#")]
    return Machine(
        name=name,
        tree=tree,
        host=read_host(tree, all_functions(tree), ()),
        devices={PciAddress.parse(line[2]): line[1] for line in lines if line[0] == "nvidia-smi"},
        smi=[line[3:] for line in lines if line[0] == "nvidia-smi"],
        nccl=[line[3:] for line in lines if line[0] == "nccl"],
    )


def domain_xml(nodes: Sequence[int], devices: Iterable[PciAddress], *, is_efi: bool = False) -> bytes:
    """A VM with one cell for each host node, in this order, and these devices."""
    cells = "".join(f"<cell id='{i}' cpus='{i}' memory='1' unit='GiB'/>" for i in range(len(nodes)))
    memnodes = "".join(f"<memnode cellid='{i}' mode='strict' nodeset='{node}'/>" for i, node in enumerate(nodes))
    hostdevs = "".join(
        f"<hostdev type='pci' managed='no'><source><address domain='{a.domain:#06x}' bus='{a.bus:#04x}'"
        f" slot='{a.slot:#04x}' function='{a.function:#x}'/></source></hostdev>"
        for a in devices
    )
    loader = "<loader readonly='yes' type='pflash'>/usr/share/OVMF/OVMF_CODE.fd</loader>" if is_efi else ""
    return (
        f"<domain type='kvm'><name>vm</name><memory unit='GiB'>{len(nodes)}</memory><vcpu>{len(nodes)}</vcpu>"
        f"<os><type arch='x86_64' machine='q35'>hvm</type>{loader}</os><cpu mode='host-passthrough'><numa>{cells}</numa></cpu>"
        f"<numatune>{memnodes}</numatune><devices>{hostdevs}</devices></domain>"
    ).encode()


def plan_on(
    machine: Machine, layout: Layout, nodes: Sequence[int], devices: Iterable[PciAddress], *, is_efi: bool = False
) -> Outcome:
    """Plan such a VM on this machine."""
    xml = domain_xml(nodes, devices, is_efi=is_efi)
    outcome = define_domain(xml, None, lambda: machine.tree, Config(layout=layout))
    assert outcome.error is None

    return outcome
