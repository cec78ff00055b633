"""The 20 VMs that KubeVirt's own code generated, with VMI and host; must not know what the hook answers."""

from dataclasses import dataclass
from pathlib import Path

from hook.recording import open_sysfs
from hook.sysfs import SysfsTree

FOLDER = Path(__file__).parent / "scenarios"
HOSTS = Path(__file__).parent / "hosts"
NAMES = tuple(sorted(path.name.removesuffix(".vmi.json") for path in FOLDER.glob("*.vmi.json")))
HOST_NAMES = tuple(sorted(path.stem for path in HOSTS.glob("*.sysfs")))

# Scenarios in which the hook changes nothing.
UNCHANGED = ("dedicated-no-passthrough", "no-hostdev", "root-complex-annotation", "shared-cpu-gpu")


@dataclass(frozen=True)
class Scenario:
    """One VM."""

    name: str

    @property
    def vmi(self) -> bytes:
        """The VMI as KubeVirt sends it."""
        return (FOLDER / f"{self.name}.vmi.json").read_bytes()

    @property
    def sysfs(self) -> SysfsTree:
        """The host that the VM runs on."""
        return open_sysfs(str(self.sysfs_path))

    @property
    def sysfs_path(self) -> Path:
        """The recording of the host."""
        return FOLDER / f"{self.name}.sysfs"

    def has(self, call: str) -> bool:
        """True when this document was generated."""
        return self._path(call).exists()

    def xml(self, call: str = "") -> bytes:
        """A domain XML: "" is the converter's output, else call1, call2, call3, gate-on."""
        return self._path(call).read_bytes()

    def _path(self, call: str) -> Path:
        return FOLDER / (f"{self.name}.{call}.xml" if call else f"{self.name}.xml")
