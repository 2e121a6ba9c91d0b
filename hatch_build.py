"""Make the Python bindings of proto/ when the package is built, beside their sources.

They are never checked in. Bindings newer than the runtime refuse to load, and an isolated build takes the newest
grpcio-tools that it may, so pyproject.toml pins it to the oldest runtime in use.
"""

import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ProtoBuildHook(BuildHookInterface[Any]):
    """Runs protoc over every .proto file, for wheels and editable installs alike."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 -- hatchling's signature
        """Write the bindings and have the build pick them up, though git ignores them.

        Raises:
            RuntimeError: A stub generator is missing, or protoc refused a file; its reasons are on stderr.
        """
        # A build requirement, so absent where hatchling only reads metadata.
        from grpc_tools import protoc  # noqa: PLC0415

        root = Path(self.root, "proto")
        sources = sorted(str(path.relative_to(root)) for path in root.rglob("*.proto"))
        # protoc.main, unlike `python -m grpc_tools.protoc`, does not add the well-known types by itself.
        well_known = files("grpc_tools") / "_proto"
        outputs = [f"--{kind}_out={root}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
        # Named by path: protoc itself would take whatever plugin comes first on PATH, and says little when none does.
        plugins = [f"--plugin=protoc-gen-{name}={_plugin(name)}" for name in ("mypy", "mypy_grpc")]
        status = protoc.main(["protoc", f"-I{root}", f"-I{well_known}", *plugins, *outputs, *sources])
        if status:
            raise RuntimeError(f"protoc exited with status {status} on {', '.join(sources)}")
        build_data["artifacts"] += ["*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi"]


def _plugin(name: str) -> str:
    path = shutil.which(f"protoc-gen-{name}")
    if path is None:
        raise RuntimeError(f"protoc-gen-{name} is not on PATH; the build requires mypy-protobuf, see pyproject.toml")
    return path
