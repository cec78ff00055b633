"""Boot a hook's answer in a real QEMU, with stand-ins for its devices, and take down what the guest says; must not judge.

The command line is libvirt's own, made from the very XML. Changed are the size of the guest (a
cell has one vCPU and little memory), what lies outside it (disks, networks, sockets), and each
vfio-pci: an emulated device takes its id, bus and address. There is no KVM: QEMU emulates.
"""

import functools
import hashlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lxml import etree

from hook.define import Outcome
from hook.host import PciFunction
from tests.system.kubevirt import for_libvirt
from tests.system.oracle import Generation, Oracle, available, cache_folder, tree

Firmware = Literal["seabios", "ovmf"]

CELL_MIB = 256
SMALLEST_GUEST_MIB = 512
_INIT = Path(__file__).with_name("init.c")
_KERNEL = "vmlinuz"
_KERNEL_COMMAND = "quiet panic=-1 nokaslr mitigations=off no_timer_check tsc=reliable"
_END = b"@end"
_TAIL_LINES = 15
_POWER_OFF_SECONDS = 2.0

# Where the folder of the boots appears inside a tree. $0 is the tree, then come the folder and the
# command; the mounts end with the process.
_INSIDE = Path("/mnt/boot")
_ENTER = f"""
set -e
tree=$0 folder=$1
shift
mount -t proc proc "$tree/proc"
mount --rbind /dev "$tree/dev"
mkdir -p "$tree{_INSIDE}"
mount --bind "$folder" "$tree{_INSIDE}"
exec chroot "$tree" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 "$@"
"""


class BootError(Exception):
    """The guest did not say everything; the text has QEMU's and the guest's last lines."""


@dataclass(frozen=True, kw_only=True)
class StandIn:
    """An emulated device in place of a passed-through one."""

    driver: str
    vendor: int
    device: int
    bars: tuple[int, ...]  # numbers of the BARs that the device has
    memory_bars_bytes: tuple[int, ...]  # sizes of those that are not I/O
    options: Mapping[str, Any]
    memory_bytes: int | None = None  # shared memory of that size behind it, never touched


@dataclass(frozen=True, kw_only=True)
class Boot:
    """What one boot showed."""

    console: str
    seconds: float
    peak_bytes: int  # QEMU's resident memory


@dataclass(frozen=True, kw_only=True)
class Guest:
    """What is booted, by files on one file system with cache_folder()."""

    kernel: Path
    initrd: Path
    command: str  # of the kernel
    mib: int  # memory that it needs at least


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What differs between the machines that a guest can have."""

    kernel: str  # in the cache folder, install.sh fetches it
    compiler: str  # of init.c
    console: str
    firmware: Path  # folder of both files
    code: str
    variables: str
    cpu: tuple[str, ...]  # instead of libvirt's
    serial: tuple[str, ...]  # a console for a domain that has none
    debug_console: tuple[str, ...]  # where firmware says what it does; {} is the folder


X86_64 = Architecture(
    kernel="vmlinuz",
    compiler="gcc",
    console="ttyS0",
    firmware=Path("/usr/share/OVMF"),
    code="OVMF_CODE_4M.fd",
    variables="OVMF_VARS_4M.fd",
    cpu=(),
    serial=("-device", "isa-serial,chardev=charserial0"),
    # SeaBIOS says there what it does; OVMF of Debian says nothing.
    debug_console=(
        "-chardev", "file,id=firmware,path={}/firmware.log", "-device", "isa-debugcon,iobase=0x402,chardev=firmware"
    ),
)  # fmt: skip
AARCH64 = Architecture(
    kernel="vmlinuz-arm64",
    compiler="aarch64-linux-gnu-gcc",
    console="ttyAMA0",
    firmware=Path("/usr/share/AAVMF"),
    code="AAVMF_CODE.fd",
    variables="AAVMF_VARS.fd",
    cpu=("-cpu", "cortex-a57"),  # the maximum that libvirt asks for is many times slower to emulate
    serial=("-serial", "chardev:charserial0"),
    debug_console=(),
)
_ARCHITECTURES = {"x86_64": X86_64, "aarch64": AARCH64}


def architecture(xml: bytes) -> Architecture:
    """That of a domain."""
    kind = etree.fromstring(xml).find("os/type")
    assert kind is not None
    return _ARCHITECTURES[kind.get("arch", "")]


def probe(machine: Architecture) -> Guest:
    """init.c, which says what sysfs shows."""
    return Guest(
        kernel=cache_folder() / "boot" / machine.kernel,
        initrd=_initrd(machine.compiler),
        command=f"console={machine.console} {_KERNEL_COMMAND}",
        mib=SMALLEST_GUEST_MIB,
    )


# Without a ROM, firmware has no more to do than it has for a device in vfio that has none.
_NIC = StandIn(
    driver="virtio-net-pci",
    vendor=0x1AF4,
    device=0x1041,
    bars=(1, 4),
    memory_bars_bytes=(4 << 10, 16 << 10),
    options={"romfile": ""},
)
_NIC_WITH_IO = StandIn(
    driver="e1000e",
    vendor=0x8086,
    device=0x10D3,
    bars=(0, 1, 2, 3),
    memory_bars_bytes=(128 << 10, 128 << 10, 16 << 10),
    options={"romfile": ""},
)
_OTHER_WITH_IO = StandIn(
    driver="pci-testdev",
    vendor=0x1B36,
    device=0x0005,
    bars=(0, 1, 2),
    memory_bars_bytes=(4 << 10, 16 << 20),
    options={"membar": 16 << 20},
)
_OTHER_32BIT = StandIn(
    driver="bochs-display",
    vendor=0x1234,
    device=0x1111,
    bars=(0, 2),
    memory_bars_bytes=(16 << 20, 4 << 10),
    options={"romfile": ""},
)
_SMALL_BAR_BYTES = 16 << 20


def gpu(bar_bytes: int = _SMALL_BAR_BYTES) -> StandIn:
    """A device with one 64-bit prefetchable BAR of that size, which costs no memory."""
    return StandIn(
        driver="ivshmem-plain",
        vendor=0x1AF4,
        device=0x1110,
        bars=(0, 2),
        memory_bars_bytes=(256, bar_bytes),
        options={},
        memory_bytes=bar_bytes,
    )


def stand_in(function: PciFunction | None, *, is_true_size: bool = False) -> StandIn:
    """One of the same kind: network or other, with an I/O BAR or without.

    is_true_size: with a 64-bit BAR as large as the largest of the function, or a 32-bit one where it has no other.
    """
    regions = function.regions if function is not None else ()
    has_io = any(region.is_io for region in regions)
    if function is not None and function.is_network:
        return _NIC_WITH_IO if has_io else _NIC
    if has_io:
        return _OTHER_WITH_IO
    if not is_true_size:
        return gpu()
    largest = max((region.size_bytes for region in regions if region.is_64bit_prefetchable), default=None)
    return gpu(largest) if largest is not None else _OTHER_32BIT


def stand_ins(outcome: Outcome, *, is_true_size: bool = False) -> dict[str, StandIn]:
    """A stand-in for each passed-through device, by what libvirt calls its source."""
    return {
        str(d.hostdev.source): stand_in(d.function(outcome.host), is_true_size=is_true_size)
        for d in outcome.plan.devices
    }


def why_not(generation: Generation) -> str | None:
    """Why nothing can be booted here; None if it can."""
    for machine in _ARCHITECTURES.values():
        if not (cache_folder() / "boot" / machine.kernel).is_file():
            return f"no {machine.kernel} to boot; run install.sh all"
    programs = [*(machine.compiler for machine in _ARCHITECTURES.values()), "cpio"]
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        return f"no {', '.join(missing)}; run install.sh all"
    return available(generation)


@functools.cache
def _initrd(compiler: str) -> Path:
    """Build it once for each text of init.c."""
    digest = hashlib.sha256(_INIT.read_bytes()).hexdigest()[:16]
    folder = cache_folder() / "boot"
    initrd = folder / f"initrd-{compiler}-{digest}"
    if not initrd.exists():
        with tempfile.TemporaryDirectory(dir=folder) as work:
            init = Path(work, "init")
            subprocess.run(
                [compiler, "-O2", "-Wall", "-Wextra", "-Werror", "-static", "-s", "-o", str(init), str(_INIT)],
                check=True,
            )
            packed = subprocess.run(
                ["cpio", "--create", "--format=newc", "--quiet"], cwd=work, input=b"init\n", stdout=-1, check=True
            )
            Path(work, "initrd").write_bytes(packed.stdout)
            Path(work, "initrd").rename(initrd)
    return initrd


def small(xml: bytes, firmware: Firmware | None = None, mib: int = SMALLEST_GUEST_MIB) -> bytes:
    """One vCPU and little memory to a cell; nothing that has to do with PCI changes.

    firmware: None keeps the domain's own. mib: memory of the guest at least.
    """
    machine = architecture(xml)
    domain = etree.fromstring(xml)
    cells = domain.findall("cpu/numa/cell")
    for number, cell in enumerate(cells):
        cell.set("cpus", str(number))
        cell.set("memory", str(max(CELL_MIB, mib // len(cells))))
        cell.set("unit", "MiB")
    for tag in ("memory", "currentMemory", "maxMemory", "memoryBacking", "vcpu", "vcpus"):
        for element in domain.findall(tag):
            domain.remove(element)
    for topology in domain.findall("cpu/topology"):
        topology.getparent().remove(topology)  # type: ignore[union-attr]
    total = max(CELL_MIB * len(cells), mib)
    etree.SubElement(domain, "memory", unit="MiB").text = str(total)
    etree.SubElement(domain, "vcpu").text = str(len(cells) or 1)
    features = domain.find("features")
    if features is None:
        features = etree.SubElement(domain, "features")
    if features.find("acpi") is None:
        etree.SubElement(features, "acpi")
    system = domain.find("os")
    assert system is not None
    if firmware is not None:
        for tag in ("loader", "nvram"):
            for element in system.findall(tag):
                system.remove(element)
    if firmware == "ovmf":
        etree.SubElement(system, "loader", readonly="yes", type="pflash").text = str(machine.firmware / machine.code)
        etree.SubElement(system, "nvram", template=str(machine.firmware / machine.variables)).text = "/nvram.fd"
    return etree.tostring(domain)


def _options(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Options with their values, in order."""
    position = 0
    while position < len(words):
        value = words[position + 1] if position + 1 < len(words) and not words[position + 1].startswith("-") else None
        yield words[position], value
        position += 1 if value is None else 2


# What belongs to libvirt's control of QEMU or to the world outside the guest.
_DROPPED = frozenset(
    {"-S", "-no-shutdown", "-sandbox", "-mon", "-msg", "-name", "-add-fd", "-netdev", "-tpmdev", "-vnc", "-spice"}
    | {"-display", "-accel"}
)


def command_line(
    argv: Sequence[str],
    devices: Mapping[str, StandIn],
    folder: Path,
    *,
    machine: Architecture,
    guest: Guest,
    extra: Sequence[str] = (),
) -> list[str]:
    """QEMU's command line for a boot in this folder, which has the kernel, the initrd and the variable store.

    devices: stand-ins by host address, or by UUID of an mdev.
    """
    line = [argv[0]]
    has_serial = False
    for option, value in _options(argv[1:]):
        kept = value
        if option in _DROPPED or (value is not None and _is_outside(option, value)):
            continue
        if value is not None:
            match option:
                case "-chardev":
                    name = _field(value, "id")
                    has_serial |= name == "charserial0"
                    kept = _serial(folder) if name == "charserial0" else f"null,id={name}"
                case "-blockdev":
                    kept = json.dumps(_block(json.loads(value), folder, machine))
                case "-cpu" if machine.cpu:
                    continue
                case "-object" if value.startswith("{"):
                    kept = json.dumps({k: v for k, v in json.loads(value).items() if k != "prealloc"})
                case "-device" if value.startswith("{"):
                    for word in _device(json.loads(value), devices):
                        line += word
                    continue
        line += [option] if kept is None else [option, kept]
    if not has_serial:
        line += ["-chardev", _serial(folder), *machine.serial]
    return [
        *line,
        *("-display", "none", "-no-reboot"),
        # Several threads hang or abort now and then in QEMU 10 (seen with eight vCPUs on two cores).
        *("-accel", "tcg,thread=single,tb-size=128"),
        *machine.cpu,
        *(word.format(folder) for word in machine.debug_console),
        *("-kernel", str(folder / _KERNEL), "-initrd", str(folder / "initrd"), "-append", guest.command),
        *extra,
    ]


def _is_outside(option: str, value: str) -> bool:
    return (
        (option == "-object" and '"secret"' in value)
        or (option == "-chardev" and _field(value, "id") in ("charmonitor", "chrtpm"))
        or (option == "-device" and '"driver":"tpm-' in value)
        # Without SMM in the firmware nobody could write to the flash.
        or (option == "-global" and "cfi.pflash01" in value)
    )


def _field(value: str, name: str) -> str:
    return next((part.partition("=")[2] for part in value.split(",") if part.startswith(f"{name}=")), "")


def _serial(folder: Path) -> str:
    return f"file,id=charserial0,path={folder}/console.log"


def _block(block: dict[str, Any], folder: Path, machine: Architecture) -> dict[str, Any]:
    name = block["node-name"]
    if "filename" not in block:
        return block
    if name == "libvirt-pflash0-storage":
        return {**block, "filename": str(machine.firmware / machine.code)}
    if name == "libvirt-pflash1-storage":
        return {**block, "filename": str(folder / machine.variables)}
    return {"driver": "null-co", "node-name": name, "size": 1 << 20, "read-zeroes": True}


def _device(device: dict[str, Any], devices: Mapping[str, StandIn]) -> Iterator[tuple[str, str]]:
    if device["driver"].startswith("vfio-pci"):
        source = device.get("host") or Path(device["sysfsdev"]).name
        double = devices[source]
        place: dict[str, Any] = {k: device[k] for k in ("id", "bus", "addr", "multifunction") if k in device}
        device = {"driver": double.driver, **double.options, **place}
        if double.memory_bytes is not None:
            memory = {
                "qom-type": "memory-backend-ram",
                "id": f"memory-{device['id']}",
                "size": double.memory_bytes,
                "share": True,
                "reserve": False,
            }
            yield "-object", json.dumps(memory)
            device["memdev"] = memory["id"]
    device.pop("netdev", None)
    yield "-device", json.dumps(device)


@contextmanager
def _folder(generation: Generation, guest: Guest, variables: Path | None) -> Iterator[Path]:
    """A folder of this boot alone, below the one that a tree can see."""
    shared = cache_folder() / "boot"
    with tempfile.TemporaryDirectory(prefix="run-", dir=shared) as name:
        folder = Path(name)
        os.link(guest.kernel, folder / _KERNEL)
        os.link(guest.initrd, folder / "initrd")
        if variables is not None:
            root = tree(generation) or Path("/")
            shutil.copy(root / variables.relative_to("/"), folder)
        yield folder


def boot(
    oracle: Oracle,
    xml: bytes,
    devices: Mapping[str, StandIn],
    *,
    firmware: Firmware | None = None,
    seconds: float = 120.0,
    guest: Guest | None = None,
    extra: Sequence[str] = (),
) -> Boot:
    """Boot this XML until the guest has said everything.

    guest: None is the probe.

    Raises:
        BootError: it did not within these seconds. QEMU is killed then.
    """
    machine = architecture(xml)
    guest = guest or probe(machine)
    argv = oracle.argv(small(for_libvirt(xml), firmware, guest.mib))
    files = tree(oracle.generation)
    has_flash = any("pflash1" in word for word in argv)
    with _folder(oracle.generation, guest, machine.firmware / machine.variables if has_flash else None) as folder:
        inside = folder if files is None else _INSIDE / folder.name
        command = command_line(argv, devices, inside, machine=machine, guest=guest, extra=extra)
        if files is not None:
            command = [
                *("unshare", "-m", "--propagation", "private", "bash", "-c", _ENTER),
                *(str(files), str(folder.parent), *command),
            ]
        return _run(command, folder, seconds)


def _run(command: Sequence[str], folder: Path, seconds: float) -> Boot:
    started = time.monotonic()
    console = folder / "console.log"
    # Everything on the way to QEMU execs, so its pid is QEMU's, and the group is QEMU's alone.
    with (folder / "qemu.log").open("wb") as log:
        qemu = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        while (
            not (is_complete := _END in _read(console)) and qemu.poll() is None and time.monotonic() - started < seconds
        ):
            time.sleep(0.1)
        took = time.monotonic() - started
        peak_bytes = _peak_bytes(qemu.pid)
        if is_complete:
            with suppress(subprocess.TimeoutExpired):
                qemu.wait(_POWER_OFF_SECONDS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(qemu.pid, signal.SIGKILL)
        status = qemu.wait()
    text = _read(console)
    if _END not in text:
        what = f"QEMU was killed after {took:.0f} s" if took >= seconds else f"QEMU ended with {status}"
        tails = [f"{name}:\n{tail(folder / name)}" for name in ("qemu.log", "firmware.log", "console.log")]
        raise BootError("\n".join([f"the guest did not report: {what}", *tails]))
    return Boot(console=text.decode(errors="replace").replace("\r", ""), seconds=took, peak_bytes=peak_bytes)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return b""


def tail(file: Path) -> str:
    """The last lines of a log, indented."""
    lines = _read(file).decode(errors="replace").splitlines()[-_TAIL_LINES:]
    return "\n".join(f"    {line[:200]}" for line in lines)


def _peak_bytes(pid: int) -> int:
    for line in _read(Path(f"/proc/{pid}/status")).decode().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
