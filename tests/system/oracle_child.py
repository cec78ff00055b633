"""Answer questions about domain XML with a real libvirt, a JSON line each; must not start a guest but on request.

Run by the system's own Python (3.11 or newer), because python3-libvirt exists for that one only:

    oracle_child.py ROOT

libvirt's QEMU driver is loaded into this process (qemu:///embed), so there is no daemon, and
everything that it writes stays below ROOT.  One process per ROOT: libvirt itself refuses a second.

A request is {"op": "version"}, {"op": "define", "xml": …, "validate": bool} or {"op": "argv", "xml": …};
for the one guest that may run, {"op": "start", "xml": …} (out: QEMU's pid), {"op": "attach", "xml": a device}, {"op": "live"} and
{"op": "stop"}. A reply is {"ok": true, "out": …} or {"ok": false, "error": libvirt's text}.
"""

import json
import sys
import threading
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import libvirt  # type: ignore[import-not-found,import-untyped,unused-ignore]

# Without user and group, every look at QEMU's capabilities finds a /dev/kvm that the default user
# may not open, and QEMU is probed again (seconds for each define, and sometimes a hang).  The rest
# keeps libvirt away from the host: no cgroups, namespaces, labels or log daemon are wanted here.
QEMU_CONF = """\
user = "root"
group = "root"
dynamic_ownership = 0
remember_owner = 0
security_driver = "none"
namespaces = []
cgroup_controllers = []
stdio_handler = "file"
seccomp_sandbox = 0
"""


def with_vfio(xml: str) -> str:
    """Name the driver of PCI hostdevs: the default one is refused where the host has no IOMMU."""
    domain = ET.fromstring(xml)
    for hostdev in domain.iterfind("devices/hostdev[@type='pci']"):
        driver = hostdev.find("driver")
        if driver is None:
            driver = ET.SubElement(hostdev, "driver")
        driver.attrib.setdefault("name", "vfio")
    return ET.tostring(domain, encoding="unicode")


class Libvirt:
    def __init__(self, root: Path) -> None:
        (root / "etc").mkdir(parents=True, exist_ok=True)
        (root / "etc" / "qemu.conf").write_text(QEMU_CONF)
        # Errors are returned to the caller; libvirt's own copy of them on stderr says no more.
        libvirt.registerErrorHandler(lambda _context, _error: None, None)
        # The QEMU driver needs an event loop even if no domain is ever started.
        libvirt.virEventRegisterDefaultImpl()
        threading.Thread(target=self._loop, daemon=True).start()
        self.root = root
        self.guest: Any = None
        self.connection = libvirt.open(f"qemu:///embed?root={root}")

    @staticmethod
    def _loop() -> None:
        while True:
            libvirt.virEventRunDefaultImpl()

    def version(self, _request: dict[str, Any]) -> str:
        def dotted(number: int) -> str:
            return f"{number // 1_000_000}.{number // 1000 % 1000}.{number % 1000}"

        return f"libvirt {dotted(self.connection.getLibVersion())}, QEMU {dotted(self.connection.getVersion())}"

    def define(self, request: dict[str, Any]) -> str:
        flags = libvirt.VIR_DOMAIN_DEFINE_VALIDATE if request.get("validate") else 0
        domain = self.connection.defineXMLFlags(request["xml"], flags)
        try:
            return str(domain.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE))
        finally:
            # A domain that stays would meet the next one of the same name and another UUID.
            domain.undefineFlags(libvirt.VIR_DOMAIN_UNDEFINE_NVRAM)

    def argv(self, request: dict[str, Any]) -> str:
        return str(self.connection.domainXMLToNative("qemu-argv", with_vfio(request["xml"]), 0))

    def start(self, request: dict[str, Any]) -> str:
        self.guest = self.connection.createXML(request["xml"])
        return Path(self.root, "run", "qemu", f"{self.guest.name()}.pid").read_text().strip()

    def attach(self, request: dict[str, Any]) -> str:
        self.guest.attachDeviceFlags(request["xml"], libvirt.VIR_DOMAIN_AFFECT_LIVE)
        return ""

    def live(self, _request: dict[str, Any]) -> str:
        return str(self.guest.XMLDesc())

    def stop(self, _request: dict[str, Any]) -> str:
        if self.guest is not None and self.guest.isActive():
            self.guest.destroy()
        self.guest = None
        return ""


def main() -> None:
    oracle = Libvirt(Path(sys.argv[1]))
    operations = {
        operation.__name__: operation
        for operation in (
            oracle.version, oracle.define, oracle.argv, oracle.start, oracle.attach, oracle.live, oracle.stop
        )
    }  # fmt: skip
    try:
        for line in sys.stdin:
            request: dict[str, Any] = json.loads(line)
            try:
                reply = {"ok": True, "out": operations[request["op"]](request)}
            except libvirt.libvirtError as error:
                reply = {"ok": False, "error": str(error)}
            except ET.ParseError as error:
                reply = {"ok": False, "error": f"not well-formed: {error}"}
            print(json.dumps(reply), flush=True)
    finally:
        # An embedded driver cannot end a guest by itself (VIR_DOMAIN_START_AUTODESTROY is refused).
        oracle.stop({})


if __name__ == "__main__":
    main()
