"""Hostile inputs of 1 MiB, and a process that answers them under watch; must not judge what it measures.

    python -m tests.hostile INPUTS HOST

INPUTS is a folder with one `NAME.xml` for each domain, and `NAME.vmi.json` and `NAME.sysfs` where they are not the
usual ones; HOST stands for /sys. Prints a line of JSON for each: what it cost, what came of it, and every path that was
opened on the way.
"""

import json
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hook import server
from hook.config import Config, Layout
from hook.define import define_domain
from hook.errors import HookError
from hook.recording import open_sysfs
from tests.build import controller, host, hostdev, vm

MIB = 1 << 20
GPU = hostdev("0000:41:00.0", "a")
PATH = "pci0000:40/0000:40:01.0/0000:41:00.0"
HOST = host({PATH: 0}, distances={0: "10 21", 1: "21 10"})


def filled(before: str, part: Callable[[int], str], after: str, size: int = MIB) -> bytes:
    """As many parts as fit into a document of this size."""
    parts, used = [], len(before.encode()) + len(after.encode())
    number = 0
    while used + len(text := part(number)) <= size:
        parts.append(text)
        used += len(text.encode())
        number += 1
    return (before + "".join(parts) + after).encode()


def grown(part: Callable[[int], str], at: str = "</devices>") -> bytes:
    """A VM with one GPU, and parts before `at` until it has 1 MiB."""
    before, mark, after = vm([GPU]).decode().partition(at)
    return filled(before, part, mark + after)


def _expanders_and_hostdevs(number: int) -> str:
    pair = controller(1 + number % 250, "pcie-expander-bus", bus_nr=number % 256, node=0)
    return pair + hostdev(f"0000:41:{number % 32:02x}.{number % 8}", address=f"{number % 250 + 1:02x}:00.0")


def _laughs(place: str) -> bytes:
    entities = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' for n in range(1, 10))
    return (f'<!DOCTYPE domain [<!ENTITY l0 "ha">{entities}]>' + place).encode()


def domains() -> Mapping[str, bytes]:
    """Documents of up to 1 MiB."""
    return {
        "hostdevs": grown(lambda n: hostdev(f"0000:{n % 256:02x}:{n // 256 % 32:02x}.{n // 8192 % 8}")),
        "hostdevs of one device": grown(lambda _: GPU),
        "smallest hostdevs": grown(
            lambda _: "<hostdev type='pci'><source><address bus='65' slot='0'/></source></hostdev>"
        ),
        "controllers": grown(lambda n: f"<controller type='pci' index='{n % 256}' model='pcie-root-port'/>"),
        "controllers in a chain": grown(lambda n: controller(n % 254 + 1, "pcie-root-port", f"{n % 254:02x}:01.0")),
        "controllers in a circle": grown(
            lambda n: controller(n % 254 + 1, "pcie-root-port", f"{(n + 2) % 254 + 1:02x}:01.0")
        ),
        "expanders and hostdevs": grown(_expanders_and_hostdevs),
        "own controllers": grown(lambda n: controller(n % 256, "pcie-root-port", alias=f"ua-pcie-numa-port-{n}")),
        "taken aliases": grown(lambda n: f"<a><alias name='ua-pcie-numa-expander-17{'-' * (n % 900)}'/></a>"),
        "nics": grown(lambda n: f"<interface type='ethernet'><target dev='t{n}'/><model type='virtio'/></interface>"),
        "cells": grown(lambda n: f"<cell id='{n}' cpus='{n % 8192}'/>", "</numa>"),
        "cells of all vcpus": grown(lambda n: f"<cell id='{n}' cpus='{n % 100}-8191'/>", "</numa>"),
        "pins to all cpus": grown(lambda n: f"<vcpupin vcpu='{n}' cpuset='0-8191'/>", "</cputune>"),
        "pins to many cpus": grown(lambda n: f"<vcpupin vcpu='{n}' cpuset='{n % 4000}-8191'/>", "</cputune>"),
        "memnodes of all nodes": grown(lambda n: f"<memnode cellid='{n}' nodeset='{n % 4000}-8191'/>", "</numatune>"),
        "a long cpu list": vm([GPU], cells={0: ",".join(["0"] * 500_000)}),
        "deep nesting": (b"<domain>" + b"<a>" * 149_000 + b"</a>" * 149_000 + b"</domain>")[:MIB],
        "250 levels": b"<domain>" + b"<a>" * 250 + b"</a>" * 250 + b"</domain>",
        "a huge attribute": b"<domain a='" + b"x" * (MIB - 40) + b"'/>",
        "a huge text": b"<domain><name>" + b"x" * (MIB - 40) + b"</name></domain>",
        "attributes": filled("<domain", lambda n: f" a{n}='1'", "/>"),
        "one attribute again and again": filled("<domain", lambda _: " a='1'", "/>"),
        "empty elements": grown(lambda _: "<a/>"),
        "comments": grown(lambda _: "<!---->"),
        "processing instructions": grown(lambda _: "<?a?>"),
        "namespaces": filled("<domain", lambda n: f" xmlns:a{n}='b{n}'", "/>"),
        "a billion laughs": _laughs("<domain>&l9;</domain>"),
        "a billion laughs in an attribute": _laughs("<domain a='&l9;'/>"),
        "character references": filled("<domain><name>", lambda _: "&#65;", "</name></domain>"),
        "an external entity": b'<!DOCTYPE domain [<!ENTITY a SYSTEM "file:///etc/passwd">]><domain>&a;</domain>',
        "an external DTD": b'<!DOCTYPE domain SYSTEM "file:///etc/passwd"><domain/>',
        "an inclusion": b'<domain xmlns:i="http://www.w3.org/2001/XInclude"><i:include href="/etc/passwd" parse="text"/></domain>',
        "NUL bytes": b"<domain>" + bytes(MIB - 20) + b"</domain>",
        "UTF-16": "<domain><name>vm</name></domain>".encode("utf-16"),
        "UTF-32": "<domain><name>vm</name></domain>".encode("utf-32"),
        "no XML": b"x" * MIB,
        "spaces": b" " * MIB,
    }


def vmis() -> Mapping[str, bytes]:
    """VMIs of up to 1 MiB, for a VM with one GPU."""
    return {
        "deep lists": b"[" * MIB,
        "deep objects": b'{"a":' * (MIB // 5),
        "a long number": b'{"a": ' + b"9" * (MIB - 8) + b"}",
        "numbers": filled('{"a": [0', lambda n: f",{n}e1", "]}"),
        "empty objects": filled('{"a": [0', lambda _: ",{}", "]}"),
        "annotations": filled('{"metadata": {"annotations": {"a": ""', lambda n: f',"pcie-numa-hook/{n}": "x"', "}}}"),
        "overrides": filled(
            '{"metadata": {"annotations": {"a": ""', lambda n: f',"pcie-numa-hook/numa-node.{n}": "0"', "}}}"
        ),
        "excluded names": filled(
            '{"metadata": {"annotations": {"pcie-numa-hook/exclude": "', lambda n: f"{n},", '"}}}'
        ),
        "one long name": b'{"metadata": {"annotations": {"pcie-numa-hook/exclude": "' + b"x" * (MIB - 80) + b'"}}}',
        "addressed interfaces": filled(
            '{"spec": {"domain": {"devices": {"interfaces": [0',
            lambda n: f',{{"name":"{n}","pciAddress":"1"}}',
            "]}}}}",
        ),
    }


def hosts() -> Mapping[str, bytes]:
    """Recordings of up to 1 MiB, for a VM with one GPU."""
    device = f"devices/{PATH}"
    return {
        "nodes": filled(HOST, lambda n: f"devices/system/node/node{n}/cpulist = 0-8191\n", ""),
        "nodes with other lists": filled(HOST, lambda n: f"devices/system/node/node{n}/cpulist = {n}-8191\n", ""),
        "a long distance": filled(f"{HOST}devices/system/node/node2/distance =", lambda _: " 10", "\n"),
        "a long list": filled(f"{HOST}{device}/local_cpulist = 0", lambda _: ",0", "\n"),
        "a long resource": filled(f"{HOST}{device}/resource = ", lambda _: "0x0 0x0 0x0\\n", "\n"),
        "links in a row": filled(HOST, lambda n: f"bus/pci/devices/{n} -> {n + 1}\n", ""),
        "a link to itself": f"{HOST}bus/pci/devices/0000:41:00.1 -> 0000:41:00.1\n".encode(),
        "a deep path": filled(f"{HOST}devices", lambda _: "/a", "/numa_node = 0\n"),
        "bridges": filled(
            "devices/system/node/node0/cpulist = 0\nbus/pci/devices/0000:41:00.0 -> ../../../devices/pci0000:40",
            lambda n: f"/0000:{n % 256:02x}:{n // 256 % 32:02x}.0",
            "/0000:41:00.0\n",
            60_000,
        ),
        "no line end": b"a = " + b"x" * (MIB - 4),
        "huge numbers": f"{HOST}{device}/vendor = {'f' * 60_000}\n{device}/numa_node = {'9' * 4_000}\n".encode(),
    }


def write_all(folder: Path) -> None:
    """Every input as files."""
    for name, xml in domains().items():
        (folder / f"{name}.xml").write_bytes(xml)
    for name, vmi in vmis().items():
        (folder / f"VMI with {name}.xml").write_bytes(vm([GPU]))
        (folder / f"VMI with {name}.vmi.json").write_bytes(vmi)
    for name, recording in hosts().items():
        (folder / f"host with {name}.xml").write_bytes(vm([GPU]))
        (folder / f"host with {name}.sysfs").write_bytes(recording)


def _memory() -> Mapping[str, int]:
    status = Path("/proc/self/status").read_text()
    return {key: int(value) << 10 for key, value in re.findall(r"^(\w+):\s+(\d+) kB$", status, re.MULTILINE)}


def _answer(path: Path, usual_host: str) -> Mapping[str, object]:
    """Answer one input and tell what it cost; what was opened is in `opened`."""
    xml = path.read_bytes()
    vmi, sysfs = path.with_suffix(".vmi.json"), path.with_suffix(".sysfs")
    vmi_json = vmi.read_bytes() if vmi.exists() else b"{}"
    at = str(sysfs) if sysfs.exists() else usual_host
    opened: set[str] = set()

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.listdir", "os.scandir") and isinstance(arguments[0], str | bytes):
            opened.add(str(arguments[0]))

    sys.addaudithook(watch)
    start = time.process_time()
    try:
        outcome = define_domain(xml, vmi_json, lambda: open_sysfs(at), Config(layout=Layout.SWITCH))
        result = f"fault: {outcome.error!r}" if outcome.error is not None else outcome.summary()
    except HookError as error:
        result = f"{type(error).__name__}: {error}"
    seconds = time.process_time() - start
    seen = sorted(opened)
    status = Path("/proc/self/status").read_text()
    memory = {key: int(kib) << 10 for key, kib in re.findall(r"^(\w+):\s+(\d+) kB$", status, re.MULTILINE)}
    # What no file backs: the limit of the container counts it, and the kernel cannot take it back.
    anonymous_bytes = memory["VmHWM"] - memory["RssFile"]
    return {
        "name": path.stem,
        "seconds": round(seconds, 2),
        "anonymous_bytes": anonymous_bytes,
        "result": result[:200],
        "opened": seen,
    }


def main() -> None:
    folder, usual_host = Path(sys.argv[1]), sys.argv[2]
    server.warm_up()
    for path in sorted(folder.glob("*.xml")):
        # A process each: what one leaves behind is not the next one's.
        child = os.fork()
        if not child:
            resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
            print(json.dumps(_answer(path, usual_host)), flush=True)
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
