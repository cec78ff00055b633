"""Run a hook's answer under libvirt itself, so that devices can be plugged in; must not judge.

There are no devices of the host to pass through: each hostdev becomes a virtio-scsi controller at the very address,
which libvirt then knows to be taken. What lies outside the guest goes: networks, images, sockets, the TPM.
"""

import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lxml import etree

from hook.define import Outcome
from tests.boot.boot import BootError, StandIn, architecture, probe, small, tail
from tests.system.kubevirt import for_libvirt
from tests.system.oracle import Oracle, RunningGuest

_DOUBLE = StandIn(
    driver="virtio-scsi-pci",
    vendor=0x1AF4,
    device=0x1048,
    bars=(1, 4),
    memory_bars_bytes=(4 << 10, 16 << 10),
    options={},
)
_FIRST_SCSI_INDEX = 50  # above those of the domain
_OUTSIDE = ("channel", "graphics", "tpm", "serial", "console", "audio")
_POLL_SECONDS = 0.1
MORE_IMAGE = "more.img"  # for a disk to be plugged in


@dataclass(frozen=True, kw_only=True)
class Running:
    """A guest that libvirt runs, with the folder that it shares with this process."""

    guest: RunningGuest
    folder: Path
    inside: Path  # the same folder, as libvirt and QEMU see it

    def console(self, reports: int, seconds: float) -> str:
        """What the guest has said when it has reported so often.

        Raises:
            BootError: it did not within these seconds.
        """
        started = time.monotonic()
        while time.monotonic() - started < seconds:
            text = (self.folder / "console.log").read_bytes()
            if text.count(b"@end") >= reports:
                return text.decode(errors="replace").replace("\r", "")
            time.sleep(_POLL_SECONDS)
        raise BootError(f"no report {reports} within {seconds:.0f} s:\n{tail(self.folder / 'console.log')}")


def doubles(outcome: Outcome) -> Mapping[str, StandIn]:
    """What stands in for each passed-through device, by what libvirt calls its source."""
    return {str(device.hostdev.source): _DOUBLE for device in outcome.plan.devices}


@contextmanager
def running(oracle: Oracle, xml: bytes, *, more: int) -> Iterator[Running]:
    """Start this XML; the guest reports, waits for that many more PCI functions, and reports again."""
    folder, inside = (path / "guest" for path in oracle.shared)
    folder.mkdir()
    try:
        started = probe(architecture(xml))
        os.link(started.kernel, folder / "vmlinuz")
        os.link(started.initrd, folder / "initrd")
        (folder / "console.log").touch()
        startable = _startable(small(for_libvirt(xml), "seabios"), inside, f"{started.command} pnh.hotplug={more}")
        for disk in startable.iterfind("devices/disk/source"):
            _image(folder / Path(disk.get("file", "")).name)
        _image(folder / MORE_IMAGE)
        with oracle.running(etree.tostring(startable)) as guest:
            yield Running(guest=guest, folder=folder, inside=inside)
    finally:
        shutil.rmtree(folder)


def _image(file: Path) -> None:
    file.write_bytes(bytes(1 << 20))


def _startable(xml: bytes, inside: Path, command: str) -> etree._Element:
    domain = etree.fromstring(xml)
    devices, system = domain.find("devices"), domain.find("os")
    assert devices is not None
    assert system is not None
    for tag, text in (
        ("kernel", f"{inside}/vmlinuz"),
        ("initrd", f"{inside}/initrd"),
        ("cmdline", command),
    ):
        etree.SubElement(system, tag).text = text
    etree.SubElement(etree.SubElement(devices, "serial", type="file"), "source", path=f"{inside}/console.log")
    for number, element in enumerate(list(devices)):
        if element.tag in _OUTSIDE and element.get("type") != "file":
            devices.remove(element)
        elif element.tag == "disk":
            _without(element, "source", "driver", "backingStore")
            element.set("type", "file")
            etree.SubElement(element, "source", file=f"{inside}/{number}.img")
            etree.SubElement(element, "driver", name="qemu", type="raw")
        elif element.tag == "hostdev" or (element.tag == "interface" and element.get("type") == "hostdev"):
            devices.replace(element, _double(element, _FIRST_SCSI_INDEX + number))
        elif element.tag == "interface":
            _without(element, "source", "target", "mtu", "backend")
            element.set("type", "user")
    return domain


def _double(hostdev: etree._Element, index: int) -> etree._Element:
    controller = etree.Element("controller", type="scsi", index=str(index), model="virtio-non-transitional")
    address = hostdev.find("address")
    if address is not None:
        controller.append(address)
    return controller


def _without(element: etree._Element, *tags: str) -> None:
    for tag in tags:
        for found in element.findall(tag):
            element.remove(found)
