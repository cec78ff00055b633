"""The arguments of `serve`, which whoever writes a sidecar's `args` uses too; must not load what serves."""

import argparse
import re
from collections.abc import Mapping, Sequence

from hook.config import OPTIONS, default_text

SOCKET_DIR = "/var/run/kubevirt-hooks"
PLUGIN_DIR = "/var/run/kubevirt-plugin"  # /NAME, with the plugin's name
VERSIONS = ("v1alpha1", "v1alpha2", "v1alpha3")
_PLUGIN_NAME = re.compile(r"[a-z0-9]([-.a-z0-9]{0,61}[a-z0-9])?")


def _plugin_name(text: str) -> str:
    """The name of a Plugin object, which becomes a folder."""
    if not _PLUGIN_NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no name of a Kubernetes object")
    return text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser every argument of `serve`."""
    parser.add_argument(
        "--socket-dir", metavar="DIR", help=f"[default: {SOCKET_DIR}, or {PLUGIN_DIR}/NAME for a plugin]"
    )
    parser.add_argument(
        "--plugin",
        type=_plugin_name,
        metavar="NAME",
        help="serve KubeVirt's structured plugin API (v1.9, alpha) as this plugin, instead of the hook API",
    )
    parser.add_argument("--sysfs", default="/sys", metavar="PATH", help="the host [default: /sys]")
    parser.add_argument(
        "--version", action="append", choices=VERSIONS, help="hook version to offer, repeatable [default: all]"
    )
    for option in OPTIONS:
        default = default_text(option)
        parser.add_argument(
            f"--{option.name}",
            dest=option.field,
            action="append" if option.is_repeatable else "store",
            choices=option.values or None,
            metavar=option.metavar,
            help=option.help + (f" [default: {default}]" if default else ""),
        )


def policy_flags(options: argparse.Namespace) -> Mapping[str, str | Sequence[str] | None]:
    """The flags of the policy, for config.from_flags."""
    return {option.name: getattr(options, option.field) for option in OPTIONS}
