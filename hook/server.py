"""The sidecar: KubeVirt's Info and Callbacks services on a unix socket; must hold no rule of placement.

Everything is loaded and has run once before the socket exists, because virt-launcher gives `Info`
one second on a fifth of a CPU, and a late answer costs the VM (KubeVirt pkg/hooks/manager.go).
"""

import argparse
import os
import signal
import socket
import stat
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from logging import Logger
from typing import Any

import grpc

from hook import log
from hook.arguments import PLUGIN_DIR, SOCKET_DIR, VERSIONS, add_arguments, policy_flags
from hook.config import Config, from_flags
from hook.define import Outcome, define_domain
from hook.errors import (
    ConfigError,
    DomainXmlTooLarge,
    HookError,
    Severity,
    StrictRefusal,
)
from hook.protocol import (
    info_pb2,
    info_pb2_grpc,
    plugin_pb2,
    plugin_pb2_grpc,
    v1alpha1_pb2,
    v1alpha1_pb2_grpc,
    v1alpha2_pb2,
    v1alpha2_pb2_grpc,
    v1alpha3_pb2,
    v1alpha3_pb2_grpc,
)
from hook.recording import open_sysfs
from hook.sysfs import MemoryTree

EXIT_FAILED = 1
# sun_path holds 108 bytes with the final NUL (unix(7)). virt-launcher sees the socket one folder deeper.
_PATH_LIMIT_BYTES = 107
_LAUNCHER_FOLDER_BYTES = len(f"{SOCKET_DIR}/hook-sidecar-000/")
_GRACE_SECONDS = 1.0
_WORKERS = 2

_STATUS = {
    DomainXmlTooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,
    StrictRefusal: grpc.StatusCode.FAILED_PRECONDITION,
}

# A domain with one device, for the warm-up.
_WARM_XML = b"""<domain type='kvm'><name>warm-up</name><os><type arch='x86_64' machine='q35'>hvm</type></os>
<cpu><numa><cell id='0' cpus='0' memory='1' unit='GiB'/></numa></cpu>
<numatune><memnode cellid='0' mode='strict' nodeset='0'/></numatune><devices><hostdev type='pci'><source>
<address domain='0x0000' bus='0x01' slot='0x00' function='0x0'/></source></hostdev></devices></domain>"""
_WARM_DEVICE = "devices/pci0000:00/0000:00:01.0/0000:01:00.0"
_WARM_FILES = {f"{_WARM_DEVICE}/numa_node": b"0\n", "devices/system/node/node0/cpulist": b"0\n"}
_WARM_LINKS = {"bus/pci/devices/0000:01:00.0": f"../../../{_WARM_DEVICE}"}


class Sidecar:
    """The callbacks, without the transport."""

    def __init__(self, sysfs: str, config: Config, logger: Logger, stop: Callable[[], None]) -> None:
        """Answer with the policy of `config` for the host at `sysfs`; `stop` is called by Shutdown."""
        self._sysfs = sysfs
        self._config = config
        self._logger = logger
        self._stop = stop
        self._faults = 0  # unexpected errors since the start

    def define_domain(self, domain_xml: bytes, vmi: bytes, context: grpc.ServicerContext) -> bytes:
        """OnDefineDomain in every version."""
        try:
            outcome = define_domain(domain_xml, vmi, lambda: open_sysfs(self._sysfs), self._config)
        except HookError as error:
            self._logger.error("OnDefineDomain failed: %s", error)
            status = _STATUS.get(type(error), grpc.StatusCode.INVALID_ARGUMENT)
            context.abort(status, str(error))
        self._report(outcome)
        return outcome.xml

    def shutdown(self) -> None:
        """Shutdown, v1alpha3 only."""
        self._logger.info("Shutdown")
        self._stop()

    def _report(self, outcome: Outcome) -> None:
        extra = {"vm": outcome.domain_name}
        if outcome.error is not None:
            self._faults += 1
            self._logger.error("unexpected error: %s", outcome.error, exc_info=outcome.error, extra=extra)
        for line in outcome.device_lines():
            self._logger.info("%s", line, extra=extra)
        for finding in outcome.plan.findings:
            level = "info" if finding.severity is Severity.INFO else "warning"
            getattr(self._logger, level)("%s", finding, extra=extra)
        self._logger.info("%s; unexpected errors so far: %d", outcome.summary(), self._faults, extra=extra)


class _DomainHook(plugin_pb2_grpc.DomainHookServiceServicer):
    """The same use case for KubeVirt's structured plugins."""

    def __init__(self, sidecar: Sidecar) -> None:
        self._sidecar = sidecar

    def MutateDomain(  # noqa: N802
        self, request: plugin_pb2.MutateDomainRequest, context: grpc.ServicerContext
    ) -> plugin_pb2.MutateDomainResponse:
        if request.domain_type != "libvirt":
            context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"cannot use a domain of type {request.domain_type!r}, expected 'libvirt'",
            )
        if request.sidecar_context.invocation_context == "MigrationTarget":
            # KubeVirt throws the answer away, and an error would fail the migration.
            return plugin_pb2.MutateDomainResponse(domain=request.domain)
        xml = self._sidecar.define_domain(request.domain, request.vmi, context)
        return plugin_pb2.MutateDomainResponse(domain=xml)


class _Info(info_pb2_grpc.InfoServicer):
    def __init__(self, versions: Sequence[str]) -> None:
        points = [info_pb2.HookPoint(name="OnDefineDomain", priority=0)]
        if VERSIONS[2] in versions:
            points.append(info_pb2.HookPoint(name="Shutdown", priority=0))
        self._result = info_pb2.InfoResult(name=log.COMPONENT, hookPoints=points, versions=versions)

    def Info(self, request: info_pb2.InfoParams, context: grpc.ServicerContext) -> info_pb2.InfoResult:  # noqa: N802
        del request, context
        return self._result


def _callbacks(servicer: type, messages: Any, sidecar: Sidecar) -> Any:
    """The Callbacks service of one version; the versions differ only in their message types."""

    class Callbacks(servicer):  # type: ignore[misc]  # the base is a parameter
        def OnDefineDomain(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
            xml = sidecar.define_domain(request.domainXML, request.vmi, context)
            return messages.OnDefineDomainResult(domainXML=xml)

        def PreCloudInitIso(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
            del context  # not subscribed; whoever calls it gets its input back
            return messages.PreCloudInitIsoResult(
                cloudInitNoCloudSource=request.cloudInitNoCloudSource, cloudInitData=request.cloudInitData
            )

        def Shutdown(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
            del request
            # The answer goes out first: virt-launcher takes a broken call for a failed shutdown.
            if not context.add_callback(sidecar.shutdown):
                sidecar.shutdown()  # the caller has gone already
            return messages.ShutdownResult()

    return Callbacks()


def _grpc_server(sidecar: Sidecar, versions: Sequence[str], *, is_plugin: bool) -> grpc.Server:
    server = grpc.server(
        ThreadPoolExecutor(max_workers=_WORKERS),
        options=[("grpc.so_reuseport", 0)],
    )
    if is_plugin:
        plugin_pb2_grpc.add_DomainHookServiceServicer_to_server(_DomainHook(sidecar), server)  # type: ignore[no-untyped-call]
        return server
    info_pb2_grpc.add_InfoServicer_to_server(_Info(versions), server)  # type: ignore[no-untyped-call]
    services = {
        "v1alpha1": (v1alpha1_pb2_grpc, v1alpha1_pb2),
        "v1alpha2": (v1alpha2_pb2_grpc, v1alpha2_pb2),
        "v1alpha3": (v1alpha3_pb2_grpc, v1alpha3_pb2),
    }
    for version in versions:
        service, messages = services[version]
        service.add_CallbacksServicer_to_server(_callbacks(service.CallbacksServicer, messages, sidecar), server)
    return server


def warm_up() -> None:
    """Run the whole way once: XML, VMI, planner, protobuf; whatever is slow the first time happens here."""
    outcome = define_domain(_WARM_XML, b"{}", lambda: MemoryTree(_WARM_FILES, _WARM_LINKS), Config())
    if outcome.error is not None:
        raise outcome.error
    request = v1alpha3_pb2.OnDefineDomainParams(domainXML=outcome.xml, vmi=b"{}")
    v1alpha3_pb2.OnDefineDomainParams.FromString(request.SerializeToString())


def socket_path(directory: str | None, plugin: str | None) -> str:
    """The path of the socket.

    A hook's name is unique in the pod, because KubeVirt remembers sockets by name alone; a plugin's
    is fixed, because the Plugin object has its path.
    """
    if plugin is not None:
        return os.path.join(directory or os.path.join(PLUGIN_DIR, plugin), f"{log.COMPONENT}.sock")
    directory = directory or SOCKET_DIR
    name = os.environ.get("CONTAINER_NAME") or os.urandom(4).hex()
    return os.path.join(directory, f"{log.COMPONENT}-{name}.sock")


def claim(path: str) -> None:
    """Make sure that the socket can be bound: remove a dead one, never take a living one.

    Raises:
        OSError: the path is too long, or taken by a living server or by something that is no socket;
            the folder is missing or cannot be written.
    """
    directory, name = os.path.split(path)
    if (
        len(os.fsencode(path)) > _PATH_LIMIT_BYTES
        or len(os.fsencode(name)) + _LAUNCHER_FOLDER_BYTES > _PATH_LIMIT_BYTES
    ):
        raise OSError(f"cannot listen on {path}: the path is longer than {_PATH_LIMIT_BYTES} bytes for virt-launcher")
    if not os.path.isdir(directory):
        raise OSError(f"cannot listen on {path}: there is no directory {directory}")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise OSError(f"cannot listen on {path}: the directory {directory} cannot be written")
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(f"cannot listen on {path}: something is there that is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except BlockingIOError:
            pass  # its queue is full: somebody holds it, and may never answer
    raise OSError(f"cannot listen on {path}: another process serves this socket")


def serve(arguments: Sequence[str]) -> int:
    """Run until SIGTERM, SIGINT or Shutdown; the exit status: 0 ended as asked, 1 failed, 2 usage."""
    # Before any thread exists, so that all inherit it: the signals wait for sigwait below. A handler
    # that sets an Event can lose the wake-up on a throttled CPU.
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    parser = argparse.ArgumentParser(
        prog="pcie-numa-hook serve",
        description="Run the KubeVirt hook sidecar. Each policy flag is also a VMI annotation pcie-numa-hook/FLAG, "
        "and the annotation wins.",
    )
    add_arguments(parser)
    options = parser.parse_args(arguments)
    versions = [version for version in VERSIONS if version in (options.version or VERSIONS)]
    logger = log.start()
    try:
        config = from_flags(policy_flags(options))
    except ConfigError as error:
        parser.error(str(error))
    path = socket_path(options.socket_dir, options.plugin)
    sidecar = Sidecar(options.sysfs, config, logger, stop=lambda: os.kill(os.getpid(), signal.SIGTERM))
    server = _grpc_server(sidecar, versions, is_plugin=options.plugin is not None)
    warm_up()
    try:
        claim(path)
        server.add_insecure_port(f"unix:{path}")
    except (OSError, RuntimeError) as error:
        logger.error("%s", error)
        return EXIT_FAILED
    server.start()
    offered = "as a plugin" if options.plugin is not None else f"versions {', '.join(versions)}"
    logger.info("listening on %s, %s", path, offered)
    received = signal.sigwait(signals)
    logger.info("stopping: %s", signal.Signals(received).name)
    server.stop(_GRACE_SECONDS).wait()
    return 0
