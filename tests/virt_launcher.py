"""A stand-in for virt-launcher: finds sidecars and calls them as KubeVirt's hook manager does; must not know our hook.

Sources: KubeVirt pkg/hooks/manager.go and pkg/util/net/grpc/grpc.go, v1.0-v1.9.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc

from hook.protocol import (
    info_pb2,
    info_pb2_grpc,
    v1alpha1_pb2,
    v1alpha1_pb2_grpc,
    v1alpha2_pb2,
    v1alpha2_pb2_grpc,
    v1alpha3_pb2,
    v1alpha3_pb2_grpc,
)

SCAN_SECONDS = 0.3
DIAL_SECONDS = 2
INFO_SECONDS = 1
CALL_SECONDS = 60

_VERSIONS: dict[str, tuple[ModuleType, ModuleType]] = {
    "v1alpha3": (v1alpha3_pb2, v1alpha3_pb2_grpc),
    "v1alpha2": (v1alpha2_pb2, v1alpha2_pb2_grpc),
    "v1alpha1": (v1alpha1_pb2, v1alpha1_pb2_grpc),
}


class LauncherPanicked(Exception):
    """What ends the virt-launcher pod."""


@dataclass(frozen=True)
class Sidecar:
    """A collected sidecar."""

    path: Path
    version: str
    hook_points: frozenset[str]


@contextmanager
def dial(path: Path) -> Iterator[grpc.Channel]:
    """A blocking dial; raises grpc.FutureTimeoutError when nobody serves the socket."""
    with grpc.insecure_channel(f"unix:{path}", options=[("grpc.default_authority", "localhost")]) as channel:
        grpc.channel_ready_future(channel).result(timeout=DIAL_SECONDS)
        yield channel


@dataclass
class Launcher:
    """One VM start."""

    directory: Path
    newest: str = "v1alpha3"  # v1alpha2 for KubeVirt before 1.2
    sidecars: list[Sidecar] = field(default_factory=list)

    def collect(self, count: int, timeout_seconds: float = 10) -> list[Sidecar]:
        """Find and greet `count` sidecars; any failed greeting ends the pod."""
        deadline = time.monotonic() + timeout_seconds
        seen: set[str] = set()  # by file name, across folders
        while len(seen) < count:
            if time.monotonic() > deadline:
                raise LauncherPanicked(f"found {len(seen)} of {count} sidecars in {timeout_seconds} s")
            for path in self._sockets():
                if path.name in seen:
                    continue
                try:
                    with dial(path) as channel:
                        self.sidecars.append(self._greet(path, channel))
                except grpc.FutureTimeoutError:
                    continue  # not ready
                seen.add(path.name)
            if len(seen) < count:
                time.sleep(SCAN_SECONDS)
        return self.sidecars

    def _sockets(self) -> list[Path]:
        """Files of the folder itself (before v1.6) and of its sub-folders (since)."""
        entries = sorted(self.directory.iterdir())
        inner = [path for entry in entries if entry.is_dir() for path in sorted(entry.iterdir())]
        return [path for path in (*entries, *inner) if not path.is_dir()]

    def _greet(self, path: Path, channel: grpc.Channel) -> Sidecar:
        try:
            answer = info_pb2_grpc.InfoStub(channel).Info(info_pb2.InfoParams(), timeout=INFO_SECONDS)
        except grpc.RpcError as error:
            raise LauncherPanicked(f"Info failed: {error}") from error
        known = list(_VERSIONS)[list(_VERSIONS).index(self.newest) :]
        version = next((v for v in known if v in answer.versions), None)
        if version is None:
            raise LauncherPanicked(f"no common version in {list(answer.versions)}")
        return Sidecar(path, version, frozenset(point.name for point in answer.hookPoints))

    def on_define_domain(self, xml: bytes, vmi: bytes) -> bytes:
        """Call every sidecar in turn with what the one before it answered."""
        for sidecar in self.sidecars:
            if "OnDefineDomain" in sidecar.hook_points:
                messages, _ = _VERSIONS[sidecar.version]
                request = messages.OnDefineDomainParams(domainXML=xml, vmi=vmi)
                xml = self._call(sidecar, "OnDefineDomain", request).domainXML
        return xml

    def shutdown(self) -> None:
        """Tell the sidecars that QEMU has ended; only v1alpha3 knows the call."""
        for sidecar in self.sidecars:
            if sidecar.version == "v1alpha3" and "Shutdown" in sidecar.hook_points:
                self._call(sidecar, "Shutdown", v1alpha3_pb2.ShutdownParams())

    def _call(self, sidecar: Sidecar, method: str, request: Any) -> Any:
        _, services = _VERSIONS[sidecar.version]
        with dial(sidecar.path) as channel:
            return getattr(services.CallbacksStub(channel), method)(request, timeout=CALL_SECONDS)
