"""guestd as a process without an X server: commands, files, and the requests that it rejects."""

import base64
import hashlib
import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from envd.guests.guestd import VERSION
from envd.guests.guestd.processes import MAX_OUTPUT_BYTES
from envd.guests.guestd.server import MAX_BODY_BYTES
from tests.support.local_guestd import serve_guestd


class Answer(NamedTuple):
    status: int
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Service(NamedTuple):
    """A running guestd."""

    url: str
    port: int
    home: Path

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """Send one request; a body that is not bytes is sent as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, data, named)
            response = connection.getresponse()
            return Answer(response.status, response.read())
        finally:
            connection.close()

    def post(self, path: str, body: Any = None, **headers: str) -> Answer:
        """POST one request."""
        return self.send("POST", path, {} if body is None else body, **headers)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    absent = tmp_path_factory.mktemp("absent")
    (absent / "gi.py").write_text("raise ImportError('no gi here')\n")
    with ExitStack() as stack:
        guestd = serve_guestd(stack, tmp_path_factory.mktemp("home"), env={"PYTHONPATH": str(absent)})
        yield Service(guestd.url, guestd.port, guestd.home)
        guestd.process.terminate()
        assert guestd.process.wait(10) == 0


def is_alive(pid: int) -> bool:
    """Return whether a process is running; a zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


# Commands


def test_a_command_is_split_without_a_shell_and_returns_its_output_and_status(service: Service) -> None:
    answer = service.post("/execute", {"command": "echo out; echo err >&2; exit 3", "shell": True})
    assert answer.status == 200
    assert answer.json() == {"status": "success", "output": "out\n", "error": "err\n", "returncode": 3}
    answer = service.post("/setup/execute", {"command": "printf '%s|%s' 'a b' ~/x"})
    assert answer.json()["output"] == f"a b|{service.home}/x"
    answer = service.post("/execute", {"command": ["no-such-program"]})
    assert answer.status == 500
    assert answer.json()["status"] == "error"
    assert "no-such-program" in answer.json()["message"]


@pytest.mark.parametrize("body", [{}, {"command": []}, {"command": [1]}, {"command": "'open"}, {"command": ""}])
def test_a_request_without_a_valid_command_is_rejected(service: Service, body: dict[str, object]) -> None:
    assert service.post("/execute", body).status == 400


def test_a_command_past_its_deadline_dies_with_its_process_group(service: Service, tmp_path: Path) -> None:
    script = f"sleep 60 & echo $! > {tmp_path}/pid; wait"
    answer = service.post("/execute", {"command": script, "shell": True, "timeout": 0.3})
    assert answer.status == 500
    assert answer.json()["timed_out"] is True
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not is_alive(pid))


def test_a_background_process_does_not_delay_the_response(service: Service) -> None:
    answer = service.post("/execute", {"command": "sleep 600 & echo $!", "shell": True})
    pid = int(answer.json()["output"])
    assert is_alive(pid)
    os.kill(pid, 9)


def test_large_output_is_truncated_and_marked(service: Service) -> None:
    answer = service.post("/execute", {"command": ["head", "-c", str(40 << 20), "/dev/zero"]})
    assert answer.json()["truncated"] is True
    assert len(answer.json()["output"]) == MAX_OUTPUT_BYTES


def test_stdin_environment_directory_and_binary_output_pass_unchanged(service: Service) -> None:
    data = bytes(range(256))
    body = {
        "command": "cat; printf %s $GREETING; pwd >&2",
        "shell": True,
        "stdin_base64": base64.b64encode(data).decode(),
        "env": {"GREETING": "hé"},
        "cwd": "/usr",
        "encoding": "base64",
    }
    result = service.post("/execute", body).json()
    assert base64.b64decode(result["output"]) == data + "hé".encode()
    assert base64.b64decode(result["error"]) == b"/usr\n"


def test_verification_waits_for_a_command_and_a_failed_one_names_its_condition(
    service: Service, tmp_path: Path
) -> None:
    later = tmp_path / "later"
    body = {
        "command": f"(sleep 0.2; touch {later}) >/dev/null 2>&1 &",
        "shell": True,
        "verification": {"command_success": f"test -e {later}"},
        "max_wait_time": 10,
        "check_interval": 0.05,
    }
    result = service.post("/setup/execute_with_verification", body).json()
    assert (result["verification"], result["returncode"]) == ("passed", 0)
    assert result["wait_time"] > 0
    body = {"command": ["true"], "verification": {"command_success": "false"}, "max_wait_time": 0.1}
    answer = service.post("/execute_with_verification", body)
    assert answer.status == 500
    assert answer.json()["verification"] == "failed"
    assert "command_success" in answer.json()["message"]


def test_python_code_runs_and_its_exit_status_is_returned(service: Service) -> None:
    result = service.post("/run_python", {"code": "import sys; print('é'); sys.exit('bad')"}).json()
    assert (result["status"], result["return_code"], result["output"], result["error"]) == ("error", 1, "é\n", "bad\n")
    assert service.post("/run_python", {"code": "import time; time.sleep(60)", "timeout": 0.3}).status == 500
    assert service.post("/run_python").status == 400


def test_a_bash_script_runs_once_in_its_directory(service: Service, tmp_path: Path) -> None:
    body = {"script": "echo $BASH; pwd; echo x >> ran; echo e >&2; exit 4", "working_dir": str(tmp_path)}
    result = service.post("/run_bash_script", body).json()
    assert result == {"status": "error", "output": f"/bin/bash\n{tmp_path}\ne\n", "error": "", "returncode": 4}
    assert (tmp_path / "ran").read_text() == "x\n"
    assert service.post("/run_bash_script", {"script": "x", "working_dir": "/no/such"}).status == 400


def test_a_launched_program_keeps_running_and_is_reaped(service: Service, tmp_path: Path) -> None:
    answer = service.post("/setup/launch", {"command": f"echo $$ > {tmp_path}/pid; exec sleep 0.2", "shell": True})
    assert answer.status == 200
    assert answer.body.endswith(b"launched successfully")
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip())
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not Path(f"/proc/{pid}").exists())
    assert service.post("/setup/launch", {"command": ["no-such-program"]}).status == 500


def test_commands_run_concurrently(service: Service, tmp_path: Path) -> None:
    # No command ends before all have started.
    script = f"mktemp -p {tmp_path} >&2; until [ $(ls {tmp_path} | wc -l) = 8 ]; do sleep 0.02; done; echo met"
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: service.post("/execute", {"command": script, "shell": True}), range(8)))
    assert [answer.json()["output"] for answer in answers] == ["met\n"] * 8


# Deduplication


def test_a_repeated_request_id_has_its_effect_once(service: Service, tmp_path: Path) -> None:
    body = {"command": f"sleep 0.1; echo x >> {tmp_path}/log; wc -l < {tmp_path}/log", "shell": True}
    with ThreadPoolExecutor(5) as threads:
        answers = list(threads.map(lambda _: service.post("/execute", body, X_Request_Id="once"), range(5)))
    answers.append(service.post("/execute", body, X_Request_Id="once"))
    assert len({answer.body for answer in answers}) == 1
    assert (tmp_path / "log").read_text() == "x\n"
    other = service.post("/execute", {"command": ["true"]}, X_Request_Id="once")
    assert other.status == 409


# Files


def upload(service: Service, path: Path, data: bytes) -> Answer:
    lines = [
        b"--edge",
        b'Content-Disposition: form-data; name="file_path"',
        b"",
        str(path).encode(),
        b"--edge",
        b'Content-Disposition: form-data; name="file_data"; filename="\xc3\xa9.bin"',
        b"Content-Type: application/octet-stream",
        b"",
        data,
        b"--edge--",
        b"",
    ]
    return service.post("/setup/upload", b"\r\n".join(lines), Content_Type="multipart/form-data; boundary=edge")


@pytest.mark.parametrize("size", [0, 1, 70_000, 6 << 20])
def test_files_are_transferred_byte_for_byte(service: Service, tmp_path: Path, size: int) -> None:
    data = (b"\r\n--edg\r\n\0\xff\xfe\r" * (size // 12 + 1))[:size]
    path = tmp_path / "new" / "dir" / "ü.bin"
    assert upload(service, path, data) == Answer(200, b"File Uploaded")
    assert path.read_bytes() == data
    answer = service.post("/file", f"file_path={path}".encode(), Content_Type="application/x-www-form-urlencoded")
    assert (answer.status, hashlib.sha256(answer.body).digest()) == (200, hashlib.sha256(data).digest())


def test_a_replaced_file_keeps_its_mode_and_leaves_no_temporary_file(service: Service, tmp_path: Path) -> None:
    path, link = tmp_path / "script", tmp_path / "link"
    path.write_text("old")
    path.chmod(0o755)
    link.symlink_to(path)
    assert upload(service, link, b"new").status == 200
    assert (path.read_text(), path.stat().st_mode & 0o777, link.is_symlink()) == ("new", 0o755, True)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["link", "script"]


def test_invalid_file_requests_return_the_reason(service: Service, tmp_path: Path) -> None:
    form = "application/x-www-form-urlencoded"
    assert service.post("/file", b"", Content_Type=form).status == 400
    assert service.post("/file", b"file_path=/no/such", Content_Type=form).json() == {"error": "File not found"}
    assert service.post("/file", f"file_path={tmp_path}".encode(), Content_Type=form).status == 400
    assert service.post("/setup/upload", b"x", Content_Type="text/plain").status == 400
    assert upload(service, Path("/proc/no/such"), b"x").status == 500


def test_a_directory_is_listed_as_a_tree_without_following_links(service: Service, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path)
    result = service.post("/list_directory", {"path": str(tmp_path)}).json()["directory_tree"]
    assert result == {
        "type": "directory",
        "name": tmp_path.name,
        "children": [
            {"type": "directory", "name": "loop", "children": []},
            {"type": "directory", "name": "sub", "children": [{"type": "file", "name": "file"}]},
        ],
    }
    assert service.post("/list_directory", {"path": "/no/such"}).status == 400
    assert service.post("/list_directory").status == 400


def test_a_url_is_downloaded_into_a_file_and_a_missing_one_is_an_error(service: Service, tmp_path: Path) -> None:
    # guestd itself is the web server: GET /platform returns a text.
    path = tmp_path / "a" / "fetched"
    assert service.post("/setup/download_file", {"url": f"{service.url}/platform", "path": str(path)}).status == 200
    assert path.read_text() == "Linux"
    missing = service.post("/setup/download_file", {"url": f"{service.url}/no", "path": str(tmp_path / "b")})
    assert missing.status == 500
    assert b"404" in missing.body
    assert not (tmp_path / "b").exists()
    assert service.post("/setup/download_file", {"url": "file:///etc/passwd", "path": str(path)}).status == 400


def test_the_desktop_folder_is_returned_once_it_exists(service: Service) -> None:
    assert service.post("/desktop_path").status == 404
    (service.home / "Desktop").mkdir()
    assert service.post("/desktop_path").json() == {"desktop_path": str(service.home / "Desktop")}


# Without X


def test_without_x_the_platform_is_known_and_the_session_is_not_ready(service: Service) -> None:
    assert service.send("GET", "/platform") == Answer(200, b"Linux")
    result = service.send("GET", "/envd/session").json()
    assert (result["ready"], result["window_manager"], result["version"]) == (False, None, VERSION)
    assert "DISPLAY" in result["problem"]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/screenshot", None),
        ("GET", "/cursor_position", None),
        ("POST", "/screen_size", {}),
        ("GET", "/envd/pointer", None),
        ("POST", "/envd/type_text", {"text": "a"}),
        ("POST", "/setup/activate_window", {"window_name": "x"}),
    ],
)
def test_without_x_routes_that_need_it_return_the_reason(service: Service, method: str, path: str, body: Any) -> None:
    answer = service.send(method, path, body)
    assert answer.status == 500
    assert answer.json()["status"] == "error"
    assert "DISPLAY is not set" in answer.json()["message"]


@pytest.mark.parametrize("path", ["/accessibility", "/terminal"])
def test_without_at_spi_the_error_names_the_packages_to_install(service: Service, path: str) -> None:
    answer = service.send("GET", path)
    assert answer.status == 500
    assert "install python3-gi" in answer.json()["message"]


# The protocol


def test_unknown_routes_and_methods_and_requests_of_web_pages_are_rejected(service: Service) -> None:
    assert service.send("GET", "/nothing").status == 404
    assert service.send("GET", "/execute").status == 405
    answer = service.post("/execute", {"command": ["true"]}, Origin="http://example.org")
    assert answer.status == 403


def test_a_body_that_is_too_large_or_of_unknown_length_is_rejected_unread(service: Service) -> None:
    assert service.send("POST", "/setup/upload", b"", Content_Length=str(MAX_BODY_BYTES + 1)).status == 413
    assert service.send("POST", "/execute", b"0\r\n\r\n", Transfer_Encoding="chunked").status == 411


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff"])
def test_a_body_that_is_not_a_json_object_is_rejected(service: Service, body: bytes) -> None:
    assert service.post("/execute", body).status == 400


def test_one_connection_serves_many_requests(service: Service) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=120)
    for _ in range(3):
        connection.request("GET", "/platform")
        assert connection.getresponse().read() == b"Linux"
    connection.close()


def test_a_unix_socket_is_served_and_replaces_one_that_an_earlier_service_left(tmp_path: Path) -> None:
    path = tmp_path / "guestd.sock"
    path.touch()
    command = [sys.executable, "-m", "envd.guests.guestd", "--socket", str(path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as guestd:
        try:
            assert guestd.stderr is not None
            assert f"listening on {path}" in guestd.stderr.readline()
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))
                client.sendall(b"GET /platform HTTP/1.1\r\nHost: guest\r\nConnection: close\r\n\r\n")
                response = client.makefile("rb").read()
            assert response.startswith(b"HTTP/1.1 200")
        finally:
            guestd.terminate()
