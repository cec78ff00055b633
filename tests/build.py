"""Small domains and hosts for one oddity at a time; must not know what the hook makes of them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from hook.address import PciAddress, parse_cpu_list
from hook.sysfs import MemoryTree


def hostdev(
    source: str, name: str | None = None, *, prefix: str = "ua-gpu-", address: str = "", extra: str = ""
) -> str:
    """A PCI hostdev; address: `BB:SS.F` in hex."""
    host = PciAddress.parse(source)
    return (
        '<hostdev type="pci" managed="no"><source>'
        f'<address type="pci" domain="{host.domain:#06x}" bus="{host.bus:#04x}" slot="{host.slot:#04x}"'
        f' function="{host.function:#x}"/></source>{_alias(prefix, name)}{_address(address)}{extra}</hostdev>'
    )


def mdev(uuid: str, name: str | None = None) -> str:
    """A mediated device."""
    return (
        f'<hostdev type="mdev" mode="subsystem" model="vfio-pci"><source><address uuid="{uuid}"/></source>'
        f"{_alias('ua-gpu-', name)}</hostdev>"
    )


def controller(
    index: int, model: str, address: str = "", *, bus_nr: int | None = None, node: int | None = None, alias: str = ""
) -> str:
    """A PCI controller."""
    target = f' busNr="{bus_nr}"' if bus_nr is not None else ""
    inner = f"<node>{node}</node>" if node is not None else ""
    return (
        f'<controller type="pci" index="{index}" model="{model}">'
        f"{f'<target{target}>{inner}</target>' if target or inner else ''}"
        f"{f'<alias name={chr(34)}{alias}{chr(34)}/>' if alias else ''}{_address(address)}</controller>"
    )


def nic(model: str = "virtio-non-transitional", dev: str = "tap0") -> str:
    """A NIC that is not passed through."""
    return f'<interface type="ethernet"><target dev="{dev}" managed="no"/><model type="{model}"/></interface>'


def disk(address: str) -> str:
    """A disk to which the user gave an address; address: as for a hostdev."""
    return (
        '<disk type="file" device="disk"><source file="/disk.img"/><target dev="vda" bus="virtio"/>'
        f"{_address(address)}</disk>"
    )


def large_bar(size_bytes: int) -> str:
    """The line in `resource` of a 64-bit prefetchable BAR of that size."""
    return f"{size_bytes:#018x} {2 * size_bytes - 1:#018x} 0x000000000014220c"


def _alias(prefix: str, name: str | None) -> str:
    return f'<alias name="{prefix}{name}"/>' if name else ""


def _address(text: str) -> str:
    if not text:
        return ""
    bus, rest = text.split(":")
    slot, function = rest.split(".")
    return f'<address type="pci" domain="0x0000" bus="0x{bus}" slot="0x{slot}" function="0x{function}"/>'


def vm(
    devices: Sequence[str],
    *,
    memnodes: Mapping[int, str] | None = None,
    cells: Mapping[int, str] | None = None,
    pins: Mapping[int, str] | None = None,
    arch: str = "x86_64",
    machine: str = "q35",
    is_efi: bool = False,
    cpu_mode: str = "host-passthrough",
    rest: str = "",
) -> bytes:
    """A domain, indented as KubeVirt does.

    memnodes: host nodes by cell; the default is cell 0 on node 0 and cell 1 on node 1.
    cells: vCPUs by cell; the default is one vCPU for each cell of memnodes.
    """
    memnodes = {0: "0", 1: "1"} if memnodes is None else memnodes
    cells = {cell: str(cell) for cell in memnodes} if cells is None else cells
    lines = ['<domain type="kvm" xmlns:qemu="http://libvirt.org/schemas/domain/qemu/1.0">', "\t<name>default_vm</name>"]
    lines += ['\t<memory unit="b">17179869184</memory>', "\t<os>"]
    lines += [f'\t\t<type arch="{arch}" machine="{machine}">hvm</type>']
    if is_efi:
        lines += ['\t\t<loader readonly="yes" secure="no" type="pflash">/usr/share/OVMF/OVMF_CODE_4M.fd</loader>']
        lines += ['\t\t<nvram template="/usr/share/OVMF/OVMF_VARS_4M.fd">/tmp/default_vm</nvram>']
    lines += ["\t</os>", *(["\t<features><acpi/></features>"] if is_efi else []), "\t<devices>"]
    lines += ["\t\t" + '<controller type="usb" index="0" model="none"/>']  # KubeVirt always writes one
    lines += [f"\t\t{device}" for device in devices]
    lines += ["\t</devices>", f"\t<vcpu>{sum(len(parse_cpu_list(cpus)) for cpus in cells.values()) or 1}</vcpu>"]
    lines += [f'\t<cpu mode="{cpu_mode}">', "\t\t<numa>"]
    lines += [f'\t\t\t<cell id="{cell}" cpus="{cpus}" memory="8388608" unit="KiB"/>' for cell, cpus in cells.items()]
    lines += ["\t\t</numa>", "\t</cpu>", "\t<cputune>"]
    lines += [f'\t\t<vcpupin vcpu="{vcpu}" cpuset="{cpus}"/>' for vcpu, cpus in (pins or {}).items()]
    lines += ["\t</cputune>", "\t<numatune>"]
    lines += [f'\t\t<memnode cellid="{c}" mode="strict" nodeset="{n}"/>' for c, n in memnodes.items()]
    lines += ["\t</numatune>", *([f"\t{rest}"] if rest else []), "</domain>"]
    text = "\n".join(lines)
    return (text if cells else text.replace("\n\t\t<numa>\n\t\t</numa>", "")).encode()


def host(
    devices: Mapping[str, object],
    *,
    nodes: Mapping[int, str] | None = None,
    distances: Mapping[int, str] | None = None,
    extra: str = "",
) -> str:
    """A recording.

    devices: numa_node by path below /sys/devices (its last part is the device), or a mapping of
        attributes; `physfn` is the name of another device.
    nodes: CPU lists; the default is two nodes of four CPUs.
    """
    lines = []
    paths = {path.rpartition("/")[2]: path for path in devices}
    for path, given in devices.items():
        name = path.rpartition("/")[2]
        attributes = given if isinstance(given, Mapping) else {"numa_node": given}
        lines.append(f"bus/pci/devices/{name} -> ../../../devices/{path}")
        for key, value in {"class": "0x030200", **attributes}.items():
            if key == "physfn":
                up = "../" * (path.count("/") + 1)
                lines.append(f"devices/{path}/physfn -> {up}{paths[str(value)]}")
            else:
                lines.append(f"devices/{path}/{key} = {value}")
    for node, cpus in (nodes or {0: "0-3", 1: "4-7"}).items():
        lines.append(f"devices/system/node/node{node}/cpulist = {cpus}")
        if distances is not None:
            lines.append(f"devices/system/node/node{node}/distance = {distances[node]}")
    return "".join(f"{line}\n" for line in lines) + extra


def unpack(tree: MemoryTree, folder: Path) -> Path:
    """Write a recording as the directory that it was made from."""
    files, links = tree.items()
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content + b"\n")
    for path, target in links.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).symlink_to(target)
    for path, target in links.items():  # recordings do not hold empty directories, such as those of mdevs
        if not (folder / path).exists():
            (folder / path).parent.joinpath(target).resolve().mkdir(parents=True)
    return folder
