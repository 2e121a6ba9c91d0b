"""The comments of the contract, and the page generated from them."""

import inspect
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from cuaenv.v1 import env_pb2
from envd.base import errors
from tests.support.docs import program

ROOT = Path(__file__).resolve().parents[2]
SOURCE = (ROOT / "proto" / "cuaenv" / "v1" / "env.proto").read_text(encoding="utf-8")
SERVICE = env_pb2.DESCRIPTOR.services_by_name["CUAEnv"]


EVERY_ERROR = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.EnvdError)]


def test_the_api_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "api.md").read_text(encoding="utf-8") == program("generate_api").page(), (
        "docs/api.md is stale; run: python docs/generate_api.py"
    )


def test_the_api_page_has_every_method() -> None:
    page = program("generate_api").page()
    missing = [method.name for method in SERVICE.methods if f"\n### {method.name}\n" not in page]
    assert missing == []


@pytest.mark.parametrize("kind", EVERY_ERROR, ids=lambda kind: kind.__name__)
def test_every_reason_that_a_client_can_receive_is_documented(kind: type[errors.EnvdError]) -> None:
    # An unknown image is an error at startup; no method takes an image.
    if kind is errors.ImageNotFound:
        return
    assert f"`{kind.reason}`" in SOURCE


@pytest.mark.parametrize("method", [method.name for method in SERVICE.methods])
def test_every_method_documents_its_errors(method: str) -> None:
    comment = SOURCE.split(f"  rpc {method}(")[0].rpartition("\n\n")[2]
    assert "  // Errors:\n" in comment


@pytest.mark.parametrize(
    "method", [method.name for method in SERVICE.methods if "request_id" in method.input_type.fields_by_name]
)
def test_every_method_with_a_request_id_is_documented_as_idempotent(method: str) -> None:
    comment = SOURCE.split(f"  rpc {method}(")[0].rpartition("\n\n")[2]
    assert "Idempotent on `request_id`" in comment


def buf(*arguments: str, cwd: Path = ROOT) -> tuple[int, str]:
    program = Path(sysconfig.get_path("scripts"), "buf")
    assert program.exists(), f"{program} is missing; install the dev extra into {sys.prefix}"
    result = subprocess.run([program, *arguments], cwd=cwd, capture_output=True, text=True, check=False, timeout=240)
    return result.returncode, result.stdout


def test_the_contract_passes_its_linter() -> None:
    assert buf("lint") == (0, "")


@pytest.mark.parametrize(
    ("change", "replacement", "found"),
    [
        ("", "", ""),
        ("  string accelerator = 4;", "  bytes accelerator = 4;", 'Field "4"'),
        ("  rpc StreamFrames(", "  rpc StreamFrame(", 'Previously present RPC "StreamFrames"'),
    ],
)
def test_the_contract_only_adds_to_that_of_the_last_release(
    tmp_path: Path, change: str, replacement: str, found: str
) -> None:
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    copy = tmp_path / "proto" / "cuaenv" / "v1" / "env.proto"
    copy.parent.mkdir(parents=True)
    assert change in SOURCE
    copy.write_text(SOURCE.replace(change, replacement), encoding="utf-8")
    status, output = buf("breaking", "--against", str(ROOT / "proto" / "released.binpb"), cwd=tmp_path)
    assert (status == 0) is not bool(found)
    assert found in output
