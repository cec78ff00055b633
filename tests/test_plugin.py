"""KubeVirt's structured plugin API, and clients that send an odd :authority."""

import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import grpc
import h2.config
import h2.connection
import h2.events
import pytest

from hook.protocol import info_pb2, plugin_pb2, plugin_pb2_grpc
from tests.scenario import Scenario
from tests.sidecar import Sidecar
from tests.test_faults import answer
from tests.virt_launcher import dial

SCENARIO = Scenario("two-node-2gpu")


@pytest.fixture
def plugin(hooks: Path) -> Iterator[Sidecar]:
    with Sidecar(hooks, "--sysfs", str(SCENARIO.sysfs_path), "--plugin", "locality") as it:
        yield it


def mutate(plugin: Sidecar, domain_type: str, context: str) -> bytes:
    request = plugin_pb2.MutateDomainRequest(
        domain_type=domain_type,
        domain=SCENARIO.xml(),
        vmi=SCENARIO.vmi,
        sidecar_context=plugin_pb2.SidecarContext(invocation_context=context),
    )
    with dial(plugin.sockets()[0]) as channel:
        return bytes(plugin_pb2_grpc.DomainHookServiceStub(channel).MutateDomain(request, timeout=30).domain)


def test_a_plugin_gives_the_answer_of_the_use_case(plugin: Sidecar) -> None:
    assert [path.name for path in plugin.sockets()] == ["pcie-numa-hook.sock"]
    assert mutate(plugin, "libvirt", "Boot") == answer(SCENARIO)


def test_a_migration_target_gets_its_domain_back(plugin: Sidecar) -> None:
    assert mutate(plugin, "libvirt", "MigrationTarget") == SCENARIO.xml()


def test_another_type_of_domain_is_refused(plugin: Sidecar) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        mutate(plugin, "cloud-hypervisor", "Boot")

    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert raised.value.details() == "cannot use a domain of type 'cloud-hypervisor', expected 'libvirt'"


def test_a_plugin_has_the_name_of_an_object(hooks: Path) -> None:
    with Sidecar(hooks, "--plugin", "../../etc", wait=False) as sidecar:
        assert sidecar.wait() == 2


def info_by_hand(path: Path, authority: str | None) -> info_pb2.InfoResult:
    """Call Info as a plain HTTP/2 client, which may leave :authority out as grpc-go does for KubeVirt v1.0."""
    headers = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/kubevirt.hooks.info.Info/Info"),
        *([(":authority", authority)] if authority is not None else []),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ]
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(5)
        connection.connect(str(path))
        # The library checks what it sends; here it must not.
        client = h2.connection.H2Connection(
            h2.config.H2Configuration(validate_outbound_headers=False, normalize_outbound_headers=False)
        )
        client.initiate_connection()
        client.send_headers(1, headers)
        client.send_data(1, struct.pack(">BI", 0, 0), end_stream=True)
        connection.sendall(client.data_to_send())
        body, trailers = b"", dict[str, str]()
        while "grpc-status" not in trailers:
            for event in client.receive_data(connection.recv(65536)):
                if isinstance(event, h2.events.DataReceived):
                    body += event.data
                elif isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
                    trailers |= {_text(key): _text(value) for key, value in event.headers or ()}
                if isinstance(event, h2.events.StreamReset | h2.events.ConnectionTerminated):
                    raise ConnectionResetError(str(event))
            connection.sendall(client.data_to_send())
    assert trailers["grpc-status"] == "0"
    return info_pb2.InfoResult.FromString(body[5:])


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


# KubeVirt v1.0 sends the path of the socket, since v1.1 "localhost".
@pytest.mark.parametrize("authority", ["localhost", "/var/run/kubevirt-hooks/hook.sock", "%2Fvar%2Frun", "a b"])
def test_any_authority_will_do(hooks: Path, authority: str) -> None:
    with Sidecar(hooks) as sidecar:
        info = info_by_hand(sidecar.sockets()[0], authority)

    assert [*info.versions] == ["v1alpha1", "v1alpha2", "v1alpha3"]


def test_a_request_without_authority_is_reset_by_grpc_and_the_server_goes_on(hooks: Path) -> None:
    with Sidecar(hooks) as sidecar:
        with pytest.raises(ConnectionResetError):
            info_by_hand(sidecar.sockets()[0], None)
        info = info_by_hand(sidecar.sockets()[0], "localhost")

    assert [*info.versions] == ["v1alpha1", "v1alpha2", "v1alpha3"]
