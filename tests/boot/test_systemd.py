"""A stock systemd guest that boots the hook's answer has the topology file, without anybody having touched its image."""

import base64
import re
from collections.abc import Iterator

import pytest

from hook import domain
from hook.config import Config, Extra, Layout, TopologyFile
from hook.define import Outcome, define_domain
from hook.nccl import CREDENTIAL, PATH, guest_system
from tests.boot import systemd
from tests.boot.boot import boot, stand_ins, why_not
from tests.machines import domain_xml, machine
from tests.nccl import read
from tests.system.kubevirt import for_libvirt
from tests.system.oracle import GENERATIONS, Oracle
from tests.test_delivery import cliques, fw_cfg

pytestmark = pytest.mark.boot

SECONDS = 240.0


@pytest.fixture(scope="module", params=GENERATIONS)
def oracle(request: pytest.FixtureRequest) -> Iterator[Oracle]:
    reason = why_not(request.param) or systemd.why_not()
    if reason is not None:
        pytest.skip(reason)
    with Oracle(request.param) as it:
        yield it


def answer() -> tuple[Outcome, str]:
    """A DGX-1 as a VM, with everything on; and the file that it should find."""
    it = machine("dgx1v")
    xml = domain_xml(it.cpu_nodes, it.devices).decode()
    names = iter(it.devices.values())
    xml = re.sub("</source></hostdev>", lambda _: f"</source><alias name='ua-gpu-{next(names)}'/></hostdev>", xml)
    config = Config(layout=Layout.SWITCH, topology_file=TopologyFile.NCCL, p2p_clique=Extra.AUTO)
    outcome = define_domain(xml.encode(), None, lambda: it.tree, config)
    assert outcome.error is None

    return outcome, guest_system(outcome.plan, domain.parse(xml.encode()).guest, outcome.host).text()


def told(console: str) -> list[str]:
    return console.partition("@begin\n")[2].partition("@end")[0].splitlines()


def test_the_file_is_there_and_the_cliques_are_on_the_command_line(oracle: Oracle) -> None:
    outcome, file = answer()
    argv = oracle.argv(for_libvirt(outcome.xml))
    assert {name: clique for name, clique in cliques(argv).items() if clique is not None} == outcome.plan.cliques
    assert len(outcome.plan.cliques) == 8
    assert fw_cfg(argv) == {line.entry: line.text for line in outcome.plan.fw_cfg}

    with systemd.guest() as guest:
        booted = boot(oracle, outcome.xml, stand_ins(outcome), firmware="seabios", guest=guest, seconds=SECONDS)
    version, status, content, condition = told(booted.console)
    print(f"{version}: {booted.seconds:.1f} s, {booted.peak_bytes >> 20} MiB")

    assert version.startswith("systemd 252")
    assert status == f"{PATH} 644 root root"
    assert base64.b64decode(content).decode() == file
    assert condition == "ConditionResult=no"  # the unit for older guests had nothing to do
    read(file)


def test_an_older_guest_has_it_by_the_unit_of_the_examples(oracle: Oracle) -> None:
    """A systemd that knows no credentials is played by taking the credential away."""
    outcome, file = answer()
    xml = re.sub(rb'<entry name="%s">[^<]*</entry>\s*' % CREDENTIAL.encode(), b"", outcome.xml)
    assert xml.count(b"<entry ") == outcome.xml.count(b"<entry ") - 1

    with systemd.guest() as guest:
        booted = boot(oracle, xml, stand_ins(outcome), firmware="seabios", guest=guest, seconds=SECONDS)
    _, status, content, condition = told(booted.console)

    assert status == f"{PATH} 644 root root"
    assert base64.b64decode(content).decode() == file
    assert condition == "ConditionResult=yes"
