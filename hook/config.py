"""Policy as one frozen value, made of flags and VMI annotations by one table; must not know XML, hosts or gRPC."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from hook.errors import ConfigError, Finding, Severity

ANNOTATION_PREFIX = "pcie-numa-hook/"
OVERRIDE = "numa-node"
# The part after the slash of a key (apimachinery, IsQualifiedName).
_KEY_NAME = re.compile(r"(?=.{1,63}$)[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?")
MAX_NAMES = 1024  # in one list; a guest has 255 PCI buses
MAX_NODE = 1023  # the kernel's largest MAX_NUMNODES (CONFIG_NODES_SHIFT=10)


class Devices(StrEnum):
    """Which passed-through devices the hook cares for."""

    ALL = "all"
    GPU = "gpu"


class Layout(StrEnum):
    """How much of the host's PCIe tree the guest gets, simplest first."""

    NODE = "node"
    HOST_BRIDGE = "host-bridge"
    SWITCH = "switch"


class Unaligned(StrEnum):
    """What happens to a device whose host node has no guest cell."""

    NEAREST = "nearest"
    LEAVE = "leave"


class RiskyBars(StrEnum):
    """What happens to a device whose BARs firmware or guest kernel may lose behind an expander."""

    LEAVE = "leave"
    PLACE = "place"


class Policy(StrEnum):
    """What happens when a device cannot be placed with its own host node."""

    BEST_EFFORT = "best-effort"
    STRICT = "strict"


class Extra(StrEnum):
    """Whether something is added that the devices do not need to be placed."""

    OFF = "off"
    AUTO = "auto"


class TopologyFile(StrEnum):
    """What a library in the guest is told that PCI cannot say."""

    OFF = "off"
    NCCL = "nccl"


class Mode(StrEnum):
    """Whether the answer is used."""

    APPLY = "apply"
    OBSERVE = "observe"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The policy of one VM."""

    devices: Devices = Devices.ALL
    exclude: frozenset[str] = frozenset()  # device NAMEs or host addresses
    layout: Layout = Layout.NODE
    unaligned: Unaligned = Unaligned.NEAREST
    risky_bars: RiskyBars = RiskyBars.LEAVE
    policy: Policy = Policy.BEST_EFFORT
    mode: Mode = Mode.APPLY
    distances: Extra = Extra.OFF
    maxphysaddr: Extra = Extra.OFF
    topology_file: TopologyFile = TopologyFile.OFF
    p2p_clique: Extra = Extra.OFF
    numa_nodes: Mapping[str, int] = field(default_factory=dict)  # device NAME or host address -> host node


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One row of the table: a flag `--NAME` and an annotation `pcie-numa-hook/NAME`."""

    name: str
    field: str  # of Config
    parse: Callable[[str], Any]  # raises ValueError that says what was expected
    values: tuple[str, ...]  # the allowed words; empty for free text
    metavar: str | None  # how help writes free text
    help: str
    is_repeatable: bool = False


def _word(kind: type[StrEnum]) -> Callable[[str], StrEnum]:
    def parse(text: str) -> StrEnum:
        try:
            return kind(text.strip())
        except ValueError:
            raise ValueError(f"{text!r} is not one of {', '.join(kind)}") from None

    return parse


def _names(text: str) -> frozenset[str]:
    names = frozenset(name for part in text.split(",") if (name := part.strip()))
    if len(names) > MAX_NAMES:
        raise ValueError(f"{text[:80]!r} has {len(names)} names, expected {MAX_NAMES} at most")
    return names


def _node(text: str) -> int:
    if not text.strip().isdecimal() or not text.isascii() or int(text) > MAX_NODE:
        raise ValueError(f"{text!r} is not a host NUMA node 0..{MAX_NODE}")
    return int(text)


def _override(text: str) -> Mapping[str, int]:
    name, separator, node = text.rpartition("=")
    if not separator or not name:
        raise ValueError(f"{text!r} is not NAME=N")
    return {name: _node(node)}


def _option(kind: type[StrEnum], name: str, help_text: str) -> Option:
    return Option(
        name=name,
        field=name.replace("-", "_"),
        parse=_word(kind),
        values=tuple(str(word) for word in kind),
        metavar=None,
        help=help_text,
    )


OPTIONS: tuple[Option, ...] = (
    _option(Devices, "devices", "which passed-through devices are placed: all, or GPUs and accelerators only"),
    Option(
        name="exclude",
        field="exclude",
        parse=_names,
        values=(),
        metavar="NAME[,NAME…]",
        help="leave these devices alone; a NAME as in the VMI, or a host address",
        is_repeatable=True,
    ),
    _option(Layout, "layout", "how much of the host's PCIe tree the guest gets"),
    _option(Unaligned, "unaligned", "a device whose host node has no guest cell goes to the nearest cell, or is left"),
    _option(RiskyBars, "risky-bars", "a device whose BARs may get lost behind an expander is left, or placed anyway"),
    _option(Policy, "policy", "best-effort starts the VM with findings, strict refuses it"),
    _option(Mode, "mode", "observe computes and logs but returns the input, off does nothing"),
    _option(Extra, "distances", "auto writes the host's NUMA distances between cells where the domain has none"),
    _option(Extra, "maxphysaddr", "auto gives the guest the host's physical address bits when large BARs need them"),
    _option(
        TopologyFile, "topology-file", "nccl gives the guest the host's link speeds and switches as NCCL reads them"
    ),
    _option(Extra, "p2p-clique", "auto tells NVIDIA's driver which GPUs share a switch of the host"),
    Option(
        name=OVERRIDE,
        field="numa_nodes",
        parse=_override,
        values=(),
        metavar="NAME=N",
        help="host NUMA node of a device, instead of what sysfs says",
        is_repeatable=True,
    ),
)
_BY_NAME = {option.name: option for option in OPTIONS}


def default_text(option: Option) -> str:
    """The default of an option as a user would write it; empty where the default is nothing."""
    value = getattr(Config(), option.field)
    return str(value) if isinstance(value, StrEnum) else ""


def from_flags(flags: Mapping[str, str | Sequence[str] | None]) -> Config:
    """Build the policy from command-line flags, by option name; None or absent is the default.

    Raises:
        ConfigError: a value is not allowed; the text names the flag.
    """
    config = Config()
    for name, given in flags.items():
        option = _BY_NAME[name]
        for text in (given,) if isinstance(given, str) else given or ():
            try:
                config = _with(config, option, option.parse(text))
            except ValueError as error:
                raise ConfigError(f"cannot use --{name}: {error}") from None
    return config


def with_annotations(config: Config, annotations: Mapping[str, str]) -> tuple[Config, tuple[Finding, ...]]:
    """Put VMI annotations over the flags; a bad key or value is a finding and has no effect.

    annotations: all annotations of the VMI; those without the prefix are ignored.
    `exclude` and `numa-node.NAME` add to what the flags say, everything else replaces it.
    """
    findings = []
    overrides: dict[str, int] = {}
    for key in sorted(annotations):
        if not key.startswith(ANNOTATION_PREFIX):
            continue
        name, dot, device = key.removeprefix(ANNOTATION_PREFIX).partition(".")
        option = _BY_NAME.get(name)
        if option is None or not (device if name == OVERRIDE else not dot):
            known = ", ".join(o.name if o.name != OVERRIDE else f"{OVERRIDE}.NAME" for o in OPTIONS)
            findings.append(_bad(key, "unknown-annotation", f"there is no such annotation, expected one of {known}"))
            continue
        try:
            if device:
                overrides[device] = _node(annotations[key])
            else:
                config = _with(config, option, option.parse(annotations[key]))
        except ValueError as error:
            findings.append(_bad(key, "bad-annotation", f"the value is ignored: {error}"))
    return _with(config, _BY_NAME[OVERRIDE], overrides), tuple(findings)


def to_annotations(flags: Mapping[str, str | Sequence[str] | None]) -> Mapping[str, str]:
    """Write flags as the annotations that mean the same, in the order of the table.

    Raises:
        ConfigError: a value is not allowed, or cannot be an annotation; the text names the flag.
    """
    from_flags(flags)
    found: dict[str, str] = {}
    for option in OPTIONS:
        given = flags.get(option.name)
        texts = (given,) if isinstance(given, str) else tuple(given or ())
        if option.name == OVERRIDE:
            for text in texts:
                ((device, node),) = _override(text).items()
                if not _KEY_NAME.fullmatch(f"{OVERRIDE}.{device}"):
                    raise ConfigError(
                        f"cannot use --{OVERRIDE} {text}: Kubernetes allows no {device!r} in the key of an annotation, "
                        f"expected a device's name in the VMI, or the flag in the sidecar's args"
                    )
                found[f"{ANNOTATION_PREFIX}{OVERRIDE}.{device}"] = str(node)
        elif texts:
            found[ANNOTATION_PREFIX + option.name] = ",".join(text.strip() for text in texts)
    return found


def _bad(key: str, code: str, message: str) -> Finding:
    return Finding(Severity.WARNING, code, key, message)


def _with(config: Config, option: Option, value: Any) -> Config:
    if option.field == "exclude":
        value = config.exclude | value
    elif option.field == "numa_nodes":
        value = {**config.numa_nodes, **value}
    return replace(config, **{option.field: value})
