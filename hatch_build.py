"""Generates hook/protocol from protos/ at build time; must not run when the package is used."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ProtocolBuildHook(BuildHookInterface[Any]):
    """Runs protoc for wheels and editable installs; the generated code is never committed."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write hook/protocol/*_pb2.py, *_pb2_grpc.py and their stubs."""
        from grpc_tools import protoc  # a build requirement only

        root = Path(self.root)
        target = root / "hook" / "protocol"
        target.mkdir(exist_ok=True)
        init = target / "__init__.py"
        init.write_text('"""Generated from protos/ by hatch_build.py; must not be edited."""\n')
        protos = sorted(path.name for path in (root / "protos").glob("*.proto"))
        # The mapping -Ihook/protocol=protos makes protoc write imports that are right in the package.
        arguments = ["protoc", f"-Ihook/protocol={root / 'protos'}"]
        arguments += [f"--{kind}={root}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
        status = protoc.main([*arguments, *(f"hook/protocol/{name}" for name in protos)])
        if status != 0:
            raise RuntimeError(f"protoc ended with {status} for {', '.join(protos)}")
        build_data["artifacts"].append("hook/protocol/*")
