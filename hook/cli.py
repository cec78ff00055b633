"""The commands for people, all but serve; must not hold rules of its own, and `serve` never imports it."""

import difflib
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.console import Console

from hook import __version__, domain, pci_ids
from hook.annotate import annotate as annotated
from hook.check import check as checked
from hook.check import report_json, report_lines
from hook.config import OPTIONS, Config, default_text, from_flags, to_annotations
from hook.define import Outcome, define_domain
from hook.errors import ConfigError, HookError, ManifestError, StrictRefusal, VmiError
from hook.manifest import load, parse
from hook.nccl import guest_system, host_system
from hook.picture import host_html, host_svg, plan_html, plan_svg
from hook.recording import open_sysfs, record
from hook.render import (
    diff_text,
    host_json,
    host_matrix,
    host_tree,
    plan_json,
    plan_matrices,
    plan_tree,
    xml_diff,
)
from hook.sidecars import PLACEHOLDER_IMAGE
from hook.sysfs import all_functions, read_host
from hook.verify import InputError, verify

_SYSFS_HELP = "the host: a directory like /sys, a tar archive of one, or a recording"

_PIPE_WIDTH = 1000
EXIT_REFUSED, EXIT_DIFFERENT, EXIT_FINDINGS, EXIT_USAGE, EXIT_INPUT = 1, 1, 1, 2, 3


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="pcie-numa-hook")
def main() -> None:
    """PCIe and NUMA locality for KubeVirt virtual machines.

    `serve` is the KubeVirt hook sidecar; the other commands do the same work from the shell.
    """
    # A terminal that has no arrows gets question marks, not a traceback.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


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


def _shown(*formats: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The options of a command that shows something."""

    def add(command: Callable[..., None]) -> Callable[..., None]:
        command = click.option(
            "--pci-ids",
            "ids_path",
            type=click.Path(),
            metavar="FILE",
            help="names of vendors, devices and classes  [default: the machine's pci.ids, if it has one]",
        )(command)
        return click.option("--format", "form", type=click.Choice(formats), default="tree", show_default=True)(command)

    return add


@main.command()
@_common
@_shown("tree", "matrix", "diff", "json", "nccl", "svg", "html")
def plan(
    *, domain_path: str, vmi: str | None, sysfs: str, debug: bool, form: str, ids_path: str | None, **flags: Any
) -> None:
    """Print what the hook would do and why.

    \b
    tree    cells, expanders, ports and devices, with one reason each
    matrix  the class of each pair of devices, on the host and in the guest
    diff    what changes in the domain XML
    json    everything, in a stable schema; `verify` takes it
    nccl    the topology file that NCCL in the guest would read
    svg     a picture of host and guest side by side
    html    a page with the picture, the reasons and the matrices

    \b
      pcie-numa-hook plan --domain vm.xml --vmi vmi.yaml --sysfs host.sysfs
      pcie-numa-hook plan --format svg --domain vm.xml --sysfs host.sysfs > vm.svg

    Exit status: 0 fine, 1 refused by policy strict, 2 usage, 3 bad input.
    """
    source, outcome = _run(domain_path, vmi, sysfs, flags, debug=debug)
    ids = _pci_ids(ids_path, debug=debug)
    guest = domain.parse(source).guest
    match form:
        case "json":
            click.echo(json.dumps(plan_json(outcome), indent=2))
        case "matrix":
            click.echo(plan_matrices(outcome), nl=False)
        case "diff":
            diff = xml_diff(source, outcome.xml)
            if sys.stdout.isatty():
                _console().print(diff_text(diff), end="", soft_wrap=True)
            else:
                click.echo(diff, nl=False)
        case "nccl":
            click.echo(guest_system(outcome.plan, guest, outcome.host).text(), nl=False)
        case "svg":
            click.echo(plan_svg(outcome, guest, ids), nl=False)
        case "html":
            click.echo(plan_html(outcome, guest, ids), nl=False)
        case _:
            _console().print(plan_tree(outcome, guest, ids))


@main.command()
@click.option("--sysfs", default="/sys", show_default=True, metavar="PATH", help=_SYSFS_HELP)
@click.option("--debug", is_flag=True, help="show tracebacks")
@_shown("tree", "matrix", "json", "nccl", "svg", "html")
def host(sysfs: str, debug: bool, form: str, ids_path: str | None) -> None:
    """Print a host's NUMA nodes and PCI functions.

    \b
    tree    nodes, host bridges, bridges and devices: every PCI function
    matrix  the class of each pair of GPUs, accelerators and network cards
    json    everything that the hook reads
    nccl    the host as NCCL's topology file, to compare with the guest's
    svg     a picture of GPUs, accelerators and network cards
    html    a page with the picture and the matrix

    \b
      pcie-numa-hook host
      pcie-numa-hook host --format matrix --sysfs host.sysfs

    Exit status: 0 fine, 2 usage, 3 bad input.
    """
    try:
        tree = open_sysfs(sysfs)
    except HookError as error:
        _stop(error, EXIT_INPUT, debug=debug)
    ids = _pci_ids(ids_path, debug=debug)
    topology = read_host(tree, all_functions(tree), ())
    match form:
        case "json":
            click.echo(json.dumps(host_json(topology), indent=2))
        case "matrix":
            click.echo(host_matrix(topology), nl=False)
        case "nccl":
            click.echo(host_system(topology).text(), nl=False)
        case "svg":
            click.echo(host_svg(topology, ids), nl=False)
        case "html":
            click.echo(host_html(topology, ids), nl=False)
        case _:
            _console().print(host_tree(topology, {}, ids))


@main.command("record")
@click.option("--sysfs", default="/sys", show_default=True, metavar="PATH", help=_SYSFS_HELP)
@click.option(
    "--domain",
    "domain_path",
    type=click.Path(),
    metavar="FILE",
    help="domain XML, - for standard input: record only what the hook reads for this VM",
)
@click.option("-o", "--output", type=click.Path(), default="-", metavar="FILE", help="instead of standard output")
@click.option("--debug", is_flag=True, help="show tracebacks")
def record_(sysfs: str, domain_path: str | None, output: str, debug: bool) -> None:
    """Write down a host's PCI and NUMA sysfs as one text file, for a bug report or a test.

    It has exactly the attributes that the hook reads: ids, classes, NUMA nodes, CPU lists, BARs and
    the tree. Serial numbers, MACs and host names are not among them. Every --sysfs takes the file,
    gzipped too. Before it is written it is read back and compared with the host.

    \b
      pcie-numa-hook record -o host.sysfs
      pcie-numa-hook record --sysfs host.tar.gz --domain vm.xml -o host.sysfs

    Exit status: 0 fine, 2 usage, 3 bad input.
    """
    try:
        tree = open_sysfs(sysfs)
        sources = None
        if domain_path is not None:
            sources = [hostdev.source for hostdev in domain.parse(_read(domain_path)).guest.hostdevs]
        text = record(tree, sources)
        if output == "-":
            click.echo(text, nl=False)
        else:
            Path(output).write_text(text, encoding="utf-8")
    except (HookError, OSError) as error:
        _stop(error, EXIT_INPUT, debug=debug)


@main.command("verify")
@click.option("--plan", "plan_path", required=True, type=click.Path(), metavar="FILE", help="JSON plan, - for stdin")
@click.option("--sysfs", default="/sys", show_default=True, metavar="PATH", help=_SYSFS_HELP.replace("host", "guest"))
@click.option("--debug", is_flag=True, help="show tracebacks")
def verify_(plan_path: str, sysfs: str, debug: bool) -> None:
    """Compare a guest's sysfs with the plan, in the guest or from its recording.

    It compares address, NUMA node, bridges above and BARs of each placed device, and the class of
    each pair, and tells a wrong NUMA node from a device or BAR that found no room. The file
    hook/verify.py does the same alone, with Python 3.6 and nothing else.

    \b
      pcie-numa-hook plan --format json --domain vm.xml --sysfs host.sysfs > plan.json
      pcie-numa-hook verify --plan plan.json

    Exit status: 0 as planned, 1 a difference, 2 usage, 3 bad input.
    """
    try:
        text, is_as_planned = verify(_read(plan_path).decode("utf-8", "replace"), open_sysfs(sysfs))
    except (HookError, InputError, OSError) as error:
        _stop(error, EXIT_INPUT, debug=debug)
    click.echo(text, nl=False)
    if not is_as_planned:
        sys.exit(EXIT_DIFFERENT)


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
    """
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
    """
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


def _console() -> Console:
    """Standard output, in colour on a terminal; in a pipe or a file lines are as long as they are."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)


def _pci_ids(path: str | None, *, debug: bool) -> pci_ids.PciIds:
    try:
        return pci_ids.read(path)
    except OSError as error:
        _stop(error, EXIT_INPUT, debug=debug)


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
