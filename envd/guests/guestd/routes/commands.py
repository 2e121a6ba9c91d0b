"""Routes that run commands, scripts and programs."""

import base64
import binascii
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from ..guest import Guest
from ..messages import (
    HttpError,
    Request,
    Response,
    expand_path,
    json_response,
    read_command,
    read_seconds,
    text_response,
)
from ..processes import launch, run_command

COMMAND_TIMEOUT_S = 120.0
PYTHON_TIMEOUT_S = 30.0
SCRIPT_TIMEOUT_S = 100.0


def execute(_guest: Guest, request: Request) -> Response:
    """Run a command. Fields beyond OSWorld's: timeout, stdin_base64, env, cwd, encoding="base64"."""
    return json_response(_execute(request.json()))


def execute_with_verification(guest: Guest, request: Request) -> Response:
    """Run a command, then wait until a window exists or another command succeeds."""
    data = request.json()
    conditions = data.get("verification") or {}
    if not isinstance(conditions, dict):
        raise HttpError(400, "verification: an object is required")
    max_wait_s = read_seconds(data, "max_wait_time", 10.0)
    interval_s = max(0.05, read_seconds(data, "check_interval", 1.0))
    result = _execute(data)
    started_s = time.monotonic()
    while not _is_verified(guest, conditions):
        if time.monotonic() - started_s + interval_s > max_wait_s:
            failed = {**result, "status": "verification_failed", "verification": "failed", "wait_time": max_wait_s}
            failed["message"] = f"the command ran, but {conditions} did not hold within {max_wait_s:g} s"
            return json_response(failed, 500)
        time.sleep(interval_s)
    return json_response({**result, "verification": "passed", "wait_time": time.monotonic() - started_s})


def run_python(_guest: Guest, request: Request) -> Response:
    """Run Python source in the guest's interpreter."""
    data = request.json()
    code = data.get("code")
    if not isinstance(code, str) or not code:
        raise HttpError(400, "Code not supplied!")
    timeout_s = read_seconds(data, "timeout", PYTHON_TIMEOUT_S)
    python = shutil.which("python3") or sys.executable
    with tempfile.NamedTemporaryFile("w", prefix="guestd-", suffix=".py", encoding="utf-8") as script:
        script.write(code)
        script.flush()
        result = run_command([python, script.name], timeout_s=timeout_s)
    output, error = result.stdout.decode("utf-8", "replace"), result.stderr.decode("utf-8", "replace")
    return json_response(
        {
            "status": "error" if result.returncode else "success",
            "message": "\n".join(text for text in (output, error) if text),
            "need_more": False,
            "output": output,
            "error": error,
            "return_code": result.returncode,
        }
    )


def run_bash_script(_guest: Guest, request: Request) -> Response:
    """Run a bash script with stderr redirected to stdout."""
    data = request.json()
    script = data.get("script")
    if not isinstance(script, str) or not script:
        raise HttpError(400, "Script not supplied!")
    working_dir = expand_path(data["working_dir"]) if data.get("working_dir") else None
    if working_dir and not working_dir.is_dir():
        raise HttpError(400, f"Working directory does not exist: {working_dir}")
    timeout_s = read_seconds(data, "timeout", SCRIPT_TIMEOUT_S)
    with tempfile.NamedTemporaryFile("w", prefix="guestd-", suffix=".sh", encoding="utf-8") as file:
        file.write(script)
        file.flush()
        cwd = str(working_dir) if working_dir else None
        result = run_command(["/bin/bash", file.name], timeout_s=timeout_s, cwd=cwd, merge=True)
    status = "error" if result.returncode else "success"
    output = result.stdout.decode("utf-8", "replace")
    return json_response({"status": status, "output": output, "error": "", "returncode": result.returncode})


def launch_program(_guest: Guest, request: Request) -> Response:
    """Start a program and leave it running."""
    command, shell = read_command(request.json())
    launch(command, shell=shell)
    return text_response(f"{command if isinstance(command, str) else ' '.join(command)} launched successfully")


def _execute(data: Mapping[str, Any]) -> dict[str, object]:
    command, shell = read_command(data)
    env = data.get("env") or {}
    if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
        raise HttpError(400, "env: an object of strings is required")
    try:
        stdin = base64.b64decode(data.get("stdin_base64") or "", validate=True)
    except (TypeError, binascii.Error) as error:
        raise HttpError(400, f"stdin_base64: {error}") from error
    cwd = data.get("cwd")
    result = run_command(
        command,
        shell=shell,
        timeout_s=read_seconds(data, "timeout", COMMAND_TIMEOUT_S),
        stdin=stdin,
        env=env,
        cwd=str(expand_path(cwd)) if cwd else None,
    )
    answer: dict[str, object] = {
        "status": "success",
        "output": result.stdout.decode("utf-8", "replace"),
        "error": result.stderr.decode("utf-8", "replace"),
        "returncode": result.returncode,
    }
    if result.truncated:
        answer["truncated"] = True
    if data.get("encoding") == "base64":
        output, error_output = (base64.b64encode(stream).decode() for stream in (result.stdout, result.stderr))
        answer |= {"encoding": "base64", "output": output, "error": error_output}
    return answer


def _is_verified(guest: Guest, conditions: Mapping[str, Any]) -> bool:
    title = conditions.get("window_exists")
    if title:
        windows = guest.windows_or_none() or []
        if not any(window.matches(str(title), strict=False, by_class=False) for window in windows):
            return False
    command = conditions.get("command_success")
    return not command or run_command(str(command), shell=True, timeout_s=5.0).returncode == 0  # noqa: S604
