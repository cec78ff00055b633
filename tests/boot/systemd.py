"""A stock Debian 12 with systemd as a guest, which tells what it finds of the topology file; must not judge.

install.sh builds it. Only units are added here: one that tells, and the one of examples/ for older guests.
"""

import gzip
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from hook.nccl import PATH
from tests.boot.boot import X86_64, Guest, probe
from tests.system.oracle import STAMP, cache_folder

FOLDER = cache_folder() / "boot" / "systemd"
OLD_GUESTS_UNIT = Path(__file__).parents[2] / "examples" / "nccl-topology.service"

_MIB = 1024
_COMMAND = "rdinit=/sbin/init systemd.show_status=false"
_REPORT = f"""\
exec >/dev/ttyS0 2>&1
echo @begin
systemctl --version | head -n 1
stat -c '%n %a %U %G' {PATH}
base64 -w 0 {PATH}
echo
systemctl show -p ConditionResult {OLD_GUESTS_UNIT.name}
echo @end
systemctl poweroff -ff
"""
_REPORT_UNIT = f"""\
[Unit]
After=systemd-tmpfiles-setup.service {OLD_GUESTS_UNIT.name}

[Service]
Type=oneshot
ExecStart=/bin/sh /report.sh
"""


def why_not() -> str | None:
    """Why there is no such guest here; None if there is."""
    return None if (FOLDER / STAMP).is_file() else "no Debian guest with systemd; run install.sh systemd"


def _overlay(folder: Path) -> bytes:
    """What is unpacked over the guest: the kernel takes several archives, one after the other."""
    units = folder / "etc" / "systemd" / "system"
    wants = units / "multi-user.target.wants"
    wants.mkdir(parents=True)
    (folder / "report.sh").write_text(_REPORT)
    (units / "report.service").write_text(_REPORT_UNIT)
    (units / OLD_GUESTS_UNIT.name).write_bytes(OLD_GUESTS_UNIT.read_bytes())
    for unit in ("report.service", OLD_GUESTS_UNIT.name):
        (wants / unit).symlink_to(f"/etc/systemd/system/{unit}")
    (units / "serial-getty@ttyS0.service").symlink_to("/dev/null")
    names = "".join(f"{path.relative_to(folder)}\n" for path in sorted(folder.rglob("*")))
    packed = subprocess.run(
        ["cpio", "--create", "--format=newc", "--quiet"], cwd=folder, input=names.encode(), stdout=-1, check=True
    )
    return gzip.compress(packed.stdout)


@contextmanager
def guest() -> Iterator[Guest]:
    """The guest, with the units."""
    with tempfile.TemporaryDirectory(prefix="systemd-", dir=FOLDER.parent) as name:
        work = Path(name)
        os.mkdir(work / "overlay")
        initrd = work / "initrd"
        initrd.write_bytes((FOLDER / "initrd").read_bytes() + _overlay(work / "overlay"))
        base = probe(X86_64)
        yield replace(base, kernel=FOLDER / "vmlinuz", initrd=initrd, command=f"{base.command} {_COMMAND}", mib=_MIB)
