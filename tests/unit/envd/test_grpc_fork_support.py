"""grpc's fork handlers are off before grpc is imported, whichever part of envd imports it first."""

import os
import subprocess
import sys

import pytest

_PROGRAM = """
import importlib, os, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "grpc":
            print("grpc", os.environ.get("GRPC_ENABLE_FORK_SUPPORT"), flush=True)
            os._exit(0)  # the rest of the imports takes seconds

sys.meta_path.insert(0, Finder())
importlib.import_module(sys.argv[1])
"""


@pytest.mark.parametrize(
    "module",
    [
        "envd.daemon.composition",
        "envd.bench.session",
        "envd.authoring.demo.group",
        "tests.soak.run",
        "envd.authoring.verification",
    ],
)
def test_fork_support_is_off_when_grpc_is_imported(module: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    command = [sys.executable, "-c", _PROGRAM, module]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert printed.split("\n")[0] == "grpc 0"
