"""Programs of a fake guest."""

import pytest

from envd.drawn.files import DrawnFiles
from envd.drawn.parts import ProgramResult
from envd.drawn.programs import GuestClock, Programs


@pytest.fixture
def files() -> DrawnFiles:
    files = DrawnFiles()
    files["/home/user/a.txt"] = b"alpha\n"
    files["/home/user/docs/b.txt"] = b"beta"
    return files


@pytest.fixture
def clock() -> GuestClock:
    return GuestClock()


@pytest.fixture
def programs(files: DrawnFiles, clock: GuestClock) -> Programs:
    return Programs(files, windows=lambda: None, clock=clock)


def sh(programs: Programs, script: str, *parameters: str) -> ProgramResult:
    return programs.run(["sh", "-c", script, *parameters])


def test_programs_behave_like_the_real_ones(programs: Programs, files: DrawnFiles) -> None:
    assert programs.run(["cat", "~/a.txt", "docs/b.txt"]).stdout == b"alpha\nbeta"
    assert programs.run(["/usr/bin/echo", "a", "b"]).stdout == b"a b\n"
    assert programs.run(["false"]).exit_code == 1
    assert programs.run(["sleep", "1.5"]).duration_s == 1.5
    assert programs.run(["test", "-f", "~/a.txt"]).exit_code == 0
    assert programs.run(["test", "-d", "~/a.txt"]).exit_code == 1
    assert programs.run(["rm", "-rf", "--", "/home/user/docs"]).exit_code == 0
    assert sorted(files) == ["/home/user/a.txt"]


def test_files_are_missing_created_and_removed_as_by_real_programs(programs: Programs, files: DrawnFiles) -> None:
    outcome = programs.run(["cat", "/nowhere"])
    assert outcome.exit_code == 1
    assert outcome.stderr == b"cat: /nowhere: No such file or directory\n"
    with pytest.raises(FileNotFoundError):
        programs.run(["firefox"])
    programs.run(["mkdir", "-p", "--", "/home/user/new/deep"])
    assert files.is_directory("/home/user/new")
    assert files.list_directory("/home/user") == ["a.txt", "docs", "new"]
    programs.run(["rm", "-r", "/home/user/new"])
    assert not files.is_directory("/home/user/new/deep")


@pytest.mark.parametrize(
    ("path", "output"), [("/home/user/a.txt", b"6\n"), ("/home/user/docs", b"other\n"), ("/nowhere", b"absent\n")]
)
def test_the_hosts_file_probe_returns_size_other_or_absent(programs: Programs, path: str, output: bytes) -> None:
    assert sh(programs, "# the host's script", "probe-file", path) == ProgramResult(stdout=output)


def test_the_hosts_directory_listing_returns_entries_or_exit_code_66(programs: Programs) -> None:
    assert sh(programs, "# the host's script", "list-directory", "/home/user").stdout == b"fa.txt\0ddocs\0"
    assert sh(programs, "# the host's script", "list-directory", "/nowhere").exit_code == 66


def test_the_shell_runs_a_single_command(programs: Programs, files: DrawnFiles) -> None:
    assert sh(programs, "cat '/home/user/a.txt'") == ProgramResult(stdout=b"alpha\n")
    assert sh(programs, "exec cat a.txt >/dev/null 2>&1") == ProgramResult()
    assert sh(programs, "exit 3").exit_code == 3
    assert sh(programs, "nonsense").exit_code == 127
    assert sh(programs, "echo one >>/srv/x") == sh(programs, "echo two >> /srv/x") == ProgramResult()
    assert files["/srv/x"] == b"one\ntwo\n"


@pytest.mark.parametrize("script", ["echo `date`", "if true; then", "a | b", "echo $1", "true && true", "cat <x"])
def test_other_scripts_are_a_usage_error(programs: Programs, script: str) -> None:
    outcome = sh(programs, script)
    assert outcome.exit_code == 2
    assert b"supports only -c with a single command" in outcome.stderr


def test_date_sets_the_guests_clock(programs: Programs, clock: GuestClock) -> None:
    assert programs.run(["date", "-u", "-s", "@1700000000.5"]).exit_code == 0
    assert clock.set_to_ns == 1_700_000_000_500_000_000
    assert programs.run(["date", "-s", "tomorrow"]).exit_code == 2
