"""The commands for people; must not hold rules of its own, `serve` never imports it."""

import difflib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.console import Console
from rich.tree import Tree

from hook import __version__, domain
from hook.annotate import annotate as annotated
from hook.check import check as checked
from hook.check import report_json, report_lines
from hook.config import OPTIONS, Config, default_text, from_flags, to_annotations
from hook.define import Outcome, define_domain
from hook.errors import ConfigError, HookError, ManifestError, StrictRefusal, VmiError
from hook.manifest import load, parse
from hook.nccl import guest_system, host_system
from hook.recording import open_sysfs
from hook.render import host_json, host_matrix, host_tree, plan_json, plan_matrices, plan_tree
from hook.sidecars import PLACEHOLDER_IMAGE
from hook.sysfs import all_functions, read_host

_SYSFS_HELP = "the host: a directory like /sys, a tar archive of one, or a recording"

_PIPE_WIDTH = 1000
EXIT_REFUSED, EXIT_USAGE, EXIT_INPUT = 1, 2, 3
EXIT_FINDINGS = 1


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="pcie-numa-hook")
def main() -> None:
    """PCIe and NUMA locality for KubeVirt virtual machines.

    `serve` is the KubeVirt hook sidecar; the other commands do the same work from the shell.
    """


@main.command()
def serve() -> None:
    """Run the hook sidecar (see serve --help)."""
    # hook.__main__ sends it to hook.server, which must not load click; this stands here for --help.
    raise click.UsageError("serve must be the first word of the command line")


def _policy(command: Callable[..., None]) -> Callable[..., None]:
    """The policy flags, from the same table as those of `serve` and the annotations."""
    for option in reversed(OPTIONS):
        default = default_text(option)
        command = click.option(
            f"--{option.name}",
            option.name.replace("-", "_"),
            type=click.Choice(option.values) if option.values else str,
            metavar=option.metavar,
            multiple=option.is_repeatable,
            help=option.help + (f"  [default: {default}]" if default else ""),
        )(command)
    return command


def _common(command: Callable[..., None]) -> Callable[..., None]:
    """The inputs and policy flags of a use-case command."""
    command = _policy(command)
    command = click.option("--debug", is_flag=True, help="show tracebacks")(command)
    command = click.option("--sysfs", default="/sys", show_default=True, metavar="PATH", help=_SYSFS_HELP)(command)
    command = click.option("--vmi", type=click.Path(), metavar="FILE", help="VMI as JSON or YAML")(command)
    return click.option(
        "--domain",
        "domain_path",
        required=True,
        type=click.Path(),
        metavar="FILE",
        help="domain XML, - for standard input",
    )(command)


@main.command()
@_common
def apply(domain_path: str, vmi: str | None, sysfs: str, debug: bool, **flags: Any) -> None:
    """Print the domain XML as the hook would return it; findings go to standard error.

    Exit status: 0 fine, 1 refused by policy strict, 2 usage, 3 bad input.
    """
    _, outcome = _run(domain_path, vmi, sysfs, flags, debug=debug)
    for finding in outcome.plan.findings:
        click.echo(str(finding), err=True)
    _write(outcome.xml)


@main.command()
@_common
@click.option(
    "--format", "form", type=click.Choice(["tree", "matrix", "json", "nccl"]), default="tree", show_default=True
)
def plan(domain_path: str, vmi: str | None, sysfs: str, debug: bool, form: str, **flags: Any) -> None:
    """Print what the hook would do and why.

    Exit status: 0 fine, 1 refused by policy strict, 2 usage, 3 bad input.
    """
    source, outcome = _run(domain_path, vmi, sysfs, flags, debug=debug)
    if form == "json":
        click.echo(json.dumps(plan_json(outcome), indent=2))
    elif form == "matrix":
        click.echo(plan_matrices(outcome), nl=False)
    elif form == "nccl":
        click.echo(guest_system(outcome.plan, domain.parse(source).guest, outcome.host).text(), nl=False)
    else:
        _print(plan_tree(outcome, domain.parse(source).guest))


@main.command()
@click.option("--sysfs", default="/sys", show_default=True, metavar="PATH", help=_SYSFS_HELP)
@click.option("--debug", is_flag=True, help="show tracebacks")
@click.option(
    "--format", "form", type=click.Choice(["tree", "matrix", "json", "nccl"]), default="tree", show_default=True
)
def host(sysfs: str, debug: bool, form: str) -> None:
    """Print a host's NUMA nodes and PCI functions.

    Exit status: 0 fine, 2 usage, 3 bad input.
    """
    try:
        tree = open_sysfs(sysfs)
    except HookError as error:
        _stop(error, EXIT_INPUT, debug=debug)
    topology = read_host(tree, all_functions(tree), ())
    if form == "json":
        click.echo(json.dumps(host_json(topology), indent=2))
    elif form == "matrix":
        click.echo(host_matrix(topology), nl=False)
    elif form == "nccl":
        click.echo(host_system(topology).text(), nl=False)
    else:
        _print(host_tree(topology, {}))


@main.command()
@click.argument("manifests", metavar="MANIFEST...", nargs=-1, required=True, type=click.Path())
@click.option("--sysfs", metavar="PATH", help=f"{_SYSFS_HELP}; says what it does not have")
@click.option("--image", metavar="REF", help="the hook's image, where its repository is not called pcie-numa-hook")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--debug", is_flag=True, help="show tracebacks")
def check(manifests: tuple[str, ...], sysfs: str | None, image: str | None, form: str, debug: bool) -> None:
    """Say of manifests whether the hook will act on each VM, and what is missing.

    Reads YAML and JSON, several documents, Lists and OpenShift Templates; - is standard input. Give the files that
    belong together at once: VMs, pools and replica sets, the instance types and preferences that they name, and, if
    at hand, the KubeVirt CR and the KubeletConfiguration. Then what these say is checked too; what no file shows is
    listed as what the cluster must have.

    \b
    pcie-numa-hook check vm.yaml
    pcie-numa-hook check vm.yaml instancetype.yaml kubevirt.yaml
    pcie-numa-hook check vm.yaml kubevirt.yaml --sysfs node.sysfs
    kubectl get vm,kubevirt -A -o yaml | pcie-numa-hook check -

    docs/manifests.md explains each [code]. Notes ("info") do not change the exit status.

    Exit status: 0 fine, 1 findings, 2 usage, 3 unreadable.
    """  # noqa: D301 (click takes the control character for "leave these lines alone")
    try:
        parsed = [parse(_file_name(path), _read(path)) for path in dict.fromkeys(manifests)]
        host_read = None
        if sysfs is not None:
            tree = open_sysfs(sysfs)
            host_read = read_host(tree, all_functions(tree), ())
    except (HookError, OSError) as error:
        _stop(error, EXIT_INPUT, debug=debug)
    report = checked(parsed, host_read, image)
    if form == "json":
        click.echo(json.dumps(report_json(report), indent=2))
    else:
        for line in report_lines(report):
            click.echo(line)
    sys.exit(0 if report.is_fine else EXIT_FINDINGS)


@main.command()
@click.argument("manifest", type=click.Path())
@click.option(
    "--image",
    metavar="REF",
    help=f"the hook's image; without it an entry keeps its own, and a new one gets {PLACEHOLDER_IMAGE}",
)
@_policy
@click.option("--diff", "is_diff", is_flag=True, help="print the difference instead of the manifest")
@click.option("--write", "is_write", is_flag=True, help="change the file; prints nothing without --diff")
@click.option("--debug", is_flag=True, help="show tracebacks")
def annotate(manifest: str, image: str | None, is_diff: bool, is_write: bool, debug: bool, **flags: Any) -> None:
    """Put the sidecar and its annotations into a manifest.

    Every VM in it gets them where its VMI finds them: spec.template.metadata.annotations of a VirtualMachine or
    replica set, metadata.annotations of a VirtualMachineInstance, the template inside a pool or Template. A file
    without VMs gets them in spec.annotations of every instance type and preference.

    Other sidecars stay listed, and every line that the annotations do not need stays as it is. Options that are not
    given are not written. Twice is the same as once.

    \b
    pcie-numa-hook annotate vm.yaml --image registry.example/hook:1 --diff
    pcie-numa-hook annotate vm.yaml --policy strict --write

    Exit status: 0 fine, 2 usage, 3 unreadable.
    """  # noqa: D301
    if is_write and manifest == "-":
        raise click.UsageError("--write needs a file, found - (standard input)")
    try:
        policy = to_annotations({name.replace("_", "-"): value for name, value in flags.items()})
    except ConfigError as error:
        _stop(error, EXIT_USAGE, debug=debug)
    try:
        before = _read(manifest)
        after = annotated(parse(_file_name(manifest), before), image, policy)
        if is_write and after != before:
            Path(manifest).write_bytes(after)
    except (HookError, OSError) as error:
        _stop(error, EXIT_INPUT, debug=debug)
    if is_diff:
        _write(_diff(_file_name(manifest), before, after))
    elif not is_write:
        _write(after)
    if PLACEHOLDER_IMAGE.encode() in after and PLACEHOLDER_IMAGE.encode() not in before:
        click.echo(f"pcie-numa-hook: the image {PLACEHOLDER_IMAGE} is a placeholder, give yours with --image", err=True)


def _diff(name: str, before: bytes, after: bytes) -> bytes:
    old, new = (content.decode().splitlines(keepends=True) for content in (before, after))
    text = ""
    for line in difflib.unified_diff(old, new, fromfile=name, tofile=name):
        text += line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
    return text.encode()


def _write(content: bytes) -> None:
    """Write bytes as they are, line ends included."""
    sys.stdout.buffer.write(content)
    sys.stdout.buffer.flush()


def _file_name(path: str) -> str:
    return "standard input" if path == "-" else path


def _print(tree: Tree) -> None:
    """Print a tree; in a pipe or a file lines are as long as they are."""
    Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH).print(tree)


def _run(domain_path: str, vmi: str | None, sysfs: str, flags: dict[str, Any], *, debug: bool) -> tuple[bytes, Outcome]:
    try:
        config: Config = from_flags({name.replace("_", "-"): value for name, value in flags.items()})
    except ConfigError as error:
        _stop(error, EXIT_USAGE, debug=debug)
    try:
        source = _read(domain_path)
        vmi_json = _vmi_json(vmi) if vmi is not None else None
        outcome = define_domain(source, vmi_json, lambda: open_sysfs(sysfs), config)
    except StrictRefusal as refusal:
        _stop(refusal, EXIT_REFUSED, debug=debug)
    except (HookError, OSError) as error:
        _stop(error, EXIT_INPUT, debug=debug)
    if outcome.error is not None and debug:
        raise outcome.error
    return source, outcome


def _stop(error: Exception, status: int, *, debug: bool) -> NoReturn:
    if debug:
        raise error
    click.echo(f"pcie-numa-hook: {error}", err=True)
    sys.exit(status)


def _read(path: str) -> bytes:
    return sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()


def _vmi_json(path: str) -> bytes:
    """The VMI as JSON; YAML is read too, because that is what `kubectl get -o yaml` and manifests are."""
    content = _read(path)
    if content.lstrip()[:1] == b"{":
        return content
    try:
        return json.dumps(load(content.decode())).encode()
    except (ManifestError, UnicodeDecodeError) as error:
        raise VmiError(f"cannot read the VMI {path}: {str(error).removeprefix('cannot read YAML: ')}") from None
