"""The use case: who wins, what is read, and that a fault of the hook costs no VM."""

from collections.abc import Callable

import pytest

from hook.config import Config, Layout, Mode, Policy
from hook.define import define_domain
from hook.errors import DomainXmlError, Finding, Severity, StrictRefusal, SysfsError, VmiError
from hook.host import HostTopology
from hook.plan import Action
from hook.recording import parse_recording
from hook.sysfs import MemoryTree, SysfsTree
from tests.build import host, hostdev, mdev, vm

A, B = "0000:41:00.0", "0000:c1:00.0"
HOST = host({f"pci0000:40/0000:40:01.0/{A}": 0, f"pci0000:c0/0000:c0:01.0/{B}": 1})
TWO_GPUS = vm([hostdev(A, "a"), hostdev(B, "b")])
STRICT = Config(policy=Policy.STRICT)


class Opener:
    """Opens a tree and counts how often."""

    def __init__(self, tree: SysfsTree | None = None) -> None:
        self.count = 0
        self.tree = tree or parse_recording(HOST)

    def __call__(self) -> SysfsTree:
        self.count += 1
        return self.tree


class BrokenTree(MemoryTree):
    """A tree with a fault that nobody expects."""

    def read(self, path: str) -> bytes | None:
        raise RuntimeError(f"no {path}")


def broken() -> SysfsTree:
    return BrokenTree(*parse_recording(HOST).items())


def missing() -> SysfsTree:
    raise SysfsError("cannot read sysfs at /sys: there is no such directory")


# What is read.


@pytest.mark.parametrize(
    ("xml", "flags", "opened"),
    [
        pytest.param(TWO_GPUS, Config(), 1, id="two devices"),
        pytest.param(vm([mdev("4b20d080-1b54-4048-85b3-a6a62d165c01", "v")]), Config(), 1, id="a mediated device"),
        pytest.param(TWO_GPUS, Config(mode=Mode.OBSERVE), 1, id="observe"),
        pytest.param(vm([]), Config(), 0, id="no device"),
        pytest.param(TWO_GPUS, Config(mode=Mode.OFF), 0, id="off"),
        pytest.param(b"<domain/>", Config(), 0, id="an empty domain"),
    ],
)
def test_sysfs_is_opened_once_and_only_for_devices(xml: bytes, flags: Config, opened: int) -> None:
    opener = Opener()
    define_domain(xml, b"{}", opener, flags)

    assert opener.count == opened


BAD_INPUT: dict[str, tuple[bytes, bytes, Callable[[], SysfsTree], type[Exception], str]] = {
    "no XML": (b"", b"{}", Opener(), DomainXmlError, "cannot parse the domain XML: Document is empty"),
    "no VMI": (TWO_GPUS, b"", Opener(), VmiError, "cannot read the VMI: Expecting value"),
    "no sysfs": (TWO_GPUS, b"{}", missing, SysfsError, "cannot read sysfs at /sys"),
}


@pytest.mark.parametrize("flags", [Config(), STRICT, Config(mode=Mode.OBSERVE)], ids=["apply", "strict", "observe"])
@pytest.mark.parametrize("what", BAD_INPUT)
def test_input_that_cannot_be_used_is_an_error_in_every_mode(what: str, flags: Config) -> None:
    xml, vmi, open_sysfs, error, message = BAD_INPUT[what]

    with pytest.raises(error, match=message):
        define_domain(xml, vmi, open_sysfs, flags)


def test_without_a_vmi_the_flags_count() -> None:
    flags = Config(layout=Layout.HOST_BRIDGE)

    assert define_domain(TWO_GPUS, None, Opener(), flags).config == flags


# Policy.


def test_the_findings_of_annotations_come_first() -> None:
    vmi = b'{"metadata": {"annotations": {"pcie-numa-hook/layout": "tree"}}}'
    outcome = define_domain(vm([hostdev("0000:99:00.0", "ghost")]), vmi, Opener(), Config())

    assert [finding.code for finding in outcome.plan.findings] == ["bad-annotation", "unknown-device"]


def test_strict_refuses_with_every_warning_and_no_remark() -> None:
    xml = vm([hostdev("0000:99:00.0", "ghost"), hostdev("0000:98:00.0", "spirit"), hostdev(A, "a")])

    with pytest.raises(StrictRefusal) as refusal:
        define_domain(xml, b"{}", Opener(), Config(policy=Policy.STRICT, exclude=frozenset({"nobody"})))

    assert str(refusal.value) == (
        "policy strict refuses this VM: ghost: sysfs does not know 0000:99:00.0 [unknown-device]; "
        "spirit: sysfs does not know 0000:98:00.0 [unknown-device]"
    )


@pytest.mark.parametrize("mode", [Mode.OBSERVE, Mode.OFF])
def test_strict_refuses_nothing_that_it_does_not_change(mode: Mode) -> None:
    xml = vm([hostdev("0000:99:00.0", "ghost"), hostdev(A, "a")])

    assert define_domain(xml, b"{}", Opener(), Config(policy=Policy.STRICT, mode=mode)).xml is xml


def test_an_annotation_makes_it_strict() -> None:
    vmi = b'{"metadata": {"annotations": {"pcie-numa-hook/policy": "strict"}}}'

    with pytest.raises(StrictRefusal):
        define_domain(vm([hostdev("0000:99:00.0", "ghost")]), vmi, Opener(), Config())


# Faults of the hook.


@pytest.mark.parametrize(
    "flags",
    [Config(), Config(mode=Mode.OBSERVE), Config(mode=Mode.OBSERVE, policy=Policy.STRICT)],
    ids=["best-effort", "observe", "strict but observe"],
)
def test_an_unexpected_error_leaves_the_domain_alone_and_is_told(flags: Config) -> None:
    outcome = define_domain(TWO_GPUS, b"{}", broken, flags)
    text = f"RuntimeError: no devices/pci0000:40/0000:40:01.0/{A}/numa_node"

    assert outcome.xml is TWO_GPUS
    assert isinstance(outcome.error, RuntimeError)
    assert outcome.plan.findings == (Finding(Severity.WARNING, "internal-error", "", text),)
    assert [(device.action, device.reason) for device in outcome.plan.devices] == [(Action.LEFT, text)] * 2
    assert (outcome.plan.is_changed, outcome.host, outcome.domain_name) == (False, HostTopology.empty(), "default_vm")
    assert outcome.config == flags
    assert outcome.summary() == "unexpected RuntimeError: the domain is unchanged"


def test_an_unexpected_error_refuses_the_vm_in_strict_and_keeps_its_cause() -> None:
    with pytest.raises(
        StrictRefusal, match=r"VM: RuntimeError: no devices/pci0000:40/.* \[internal-error\]$"
    ) as refusal:
        define_domain(TWO_GPUS, b"{}", broken, STRICT)

    assert isinstance(refusal.value.__cause__, RuntimeError)


def test_strict_by_annotation_holds_for_unexpected_errors_too() -> None:
    vmi = b'{"metadata": {"annotations": {"pcie-numa-hook/policy": "strict"}}}'

    with pytest.raises(StrictRefusal, match="internal-error"):
        define_domain(TWO_GPUS, vmi, broken, Config())


# What is logged.


@pytest.mark.parametrize(
    ("xml", "flags", "expected"),
    [
        pytest.param(
            TWO_GPUS,
            Config(),
            "domain changed, layout node: 2 placed; cell 0: busNr 252..253; cell 1: busNr 254..255",
            id="two placed",
        ),
        pytest.param(
            vm([hostdev(A, "a"), hostdev(B, "b"), hostdev("0000:99:00.0", "c")]),
            Config(exclude=frozenset({"b"})),
            "domain changed, layout node: 1 placed, 1 left, 1 excluded; cell 0: busNr 254..255",
            id="one of each",
        ),
        pytest.param(
            TWO_GPUS,
            Config(mode=Mode.OBSERVE, exclude=frozenset({"b"})),
            "domain would be changed (observe), layout node: 1 placed, 1 excluded; cell 0: busNr 254..255",
            id="observe",
        ),
        pytest.param(
            vm([]), Config(mode=Mode.OBSERVE), "domain unchanged (observe), layout node: no devices", id="nothing"
        ),
        pytest.param(vm([]), Config(), "domain unchanged, layout node: no devices", id="nothing to observe"),
    ],
)
def test_the_summary_is_one_line(xml: bytes, flags: Config, expected: str) -> None:
    assert define_domain(xml, b"{}", Opener(), flags).summary() == expected


def test_each_device_has_a_line_with_the_reason() -> None:
    outcome = define_domain(vm([hostdev(A, "a"), hostdev("0000:99:00.0")]), b"{}", Opener(), Config())

    assert outcome.device_lines() == (
        "a (0000:41:00.0) placed at guest 0000:ff:00.0, cell 0: host node 0 (numa_node) is cell 0",
        "0000:99:00.0 (0000:99:00.0) left: sysfs does not know 0000:99:00.0",
    )
