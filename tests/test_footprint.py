"""What the sidecar loads and how much memory it takes; the limit of its container is 64,000,000 bytes."""

import subprocess
import sys
from pathlib import Path

from tests.scenario import Scenario
from tests.sidecar import Sidecar
from tests.virt_launcher import Launcher

RSS_LIMIT_MIB = 52
ANONYMOUS_LIMIT_MIB = 24
CALLS = 100


# All that is not the standard library, and what of the standard library would be a mistake.
LOADED = {"cython_runtime", "google", "grpc", "hook", "lxml", "typing_extensions"}
FORBIDDEN = {
    "hook.cli",
    "hook.pci_ids",
    "hook.picture",
    "hook.render",
    "hook.verify",
    "hashlib",
    "importlib.metadata",
    "pathlib",
    "secrets",
    "tarfile",
    "urllib",
}


def test_the_server_loads_only_what_it_uses() -> None:
    code = "import sys; before = set(sys.modules); import hook.server; print(*(set(sys.modules) - before))"
    shown = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = set(shown.split())
    packages = {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names

    assert {name for name in packages if not name.startswith("_cython")} == LOADED
    assert loaded & FORBIDDEN == set()


def test_memory_after_100_calls_of_the_largest_scenario(hooks: Path) -> None:
    scenario = Scenario("huge-240vcpu-64dev")
    with Sidecar(hooks, "--sysfs", str(scenario.sysfs_path), is_weighed=True) as sidecar:
        vm = Launcher(sidecar.directory)
        vm.collect(1)
        idle = sidecar.memory_mib()
        peak = idle
        for _ in range(CALLS):
            vm.on_define_domain(scenario.xml(), scenario.vmi)
            peak = tuple(map(max, zip(peak, sidecar.memory_mib(), strict=True)))  # type: ignore[assignment]

    print(f"\nidle: {idle[0]:.1f} MiB RSS, {idle[1]:.1f} MiB anonymous")
    print(f"peak of {CALLS} calls: {peak[0]:.1f} MiB RSS, {peak[1]:.1f} MiB anonymous")
    assert peak[0] < RSS_LIMIT_MIB
    assert peak[1] < ANONYMOUS_LIMIT_MIB
