"""The command `pcie-numa-hook`: sends `serve` to the sidecar and all else to the command line; must do nothing else."""

import signal
import sys


def main() -> None:
    """Run the command in sys.argv."""
    if sys.argv[1:2] == ["serve"]:
        # Before the imports, which take a second under the sidecar's limits: the kernel drops a SIGTERM that
        # process 1 of a container neither handles nor blocks. serve waits for the blocked ones.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        from hook.server import serve

        sys.exit(serve(sys.argv[2:]))
    try:
        from hook.cli import main as commands
    except ModuleNotFoundError as error:
        sys.exit(
            f"pcie-numa-hook: {error.name} is missing; every command but serve needs: pip install 'pcie-numa-hook[cli]'"
        )
    commands(prog_name="pcie-numa-hook")


if __name__ == "__main__":
    main()
