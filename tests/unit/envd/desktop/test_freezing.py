"""The scripts that stop the agent's processes, on a copy of the files that the kernel would show."""

import subprocess
from pathlib import Path

import envd.guests

GROUPS = ("user.slice", "system.slice/envd-guestd.service", "system.slice/qemu-guest-agent.service")
STATUS = "Name:\t{name}\nState:\tS (sleeping)\nUid:\t{uid}\t1000\t{uid}\t1000\n"


def run(name: str, kernel: Path) -> None:
    directory = Path(envd.guests.__file__).parent / "shell"
    script = "".join((directory / f"{each}.sh").read_text() for each in ("groups", name))
    script = script.replace("/sys/fs/cgroup", f"{kernel}/cgroup").replace("|/proc/", f"|{kernel}/proc/")
    script = script.replace("#/proc/", f"#{kernel}/proc/")
    subprocess.run(["sh", "-c", script], check=True)


def guest(kernel: Path, *, processes: dict[int, int]) -> dict[str, Path]:
    """Make a guest whose guestd and its programs are `processes`, with their users; return its groups."""
    groups = {name: kernel / "cgroup" / name for name in GROUPS}
    for directory in groups.values():
        directory.mkdir(parents=True)
        (directory / "cgroup.procs").touch()
        (directory / "cgroup.events").write_text("populated 1\nfrozen 1\n")
    (kernel / "cgroup" / "cgroup.controllers").touch()
    (kernel / "cgroup" / "system.slice" / "ssh.service").mkdir()
    # The last one has ended.
    (groups[GROUPS[1]] / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in (*processes, 99)))
    for pid, uid in processes.items():
        (kernel / "proc" / str(pid)).mkdir(parents=True)
        (kernel / "proc" / str(pid) / "status").write_text(STATUS.format(name="Uid:\t0\t0", uid=uid))
    return groups


def test_all_groups_of_the_agent_stop_and_the_services_own_processes_continue(tmp_path: Path) -> None:
    groups = guest(tmp_path, processes={11: 1000, 12: 0, 13: 1000})
    run("freeze-session", tmp_path)
    assert {name: (group / "cgroup.freeze").read_text() for name, group in groups.items()} == dict.fromkeys(
        GROUPS, "1\n"
    )
    awake = tmp_path / "cgroup" / "system.slice" / "envd-awake"
    assert (awake / "cgroup.procs").read_text() == "12\n"
    others = {path.parent.name for path in tmp_path.rglob("cgroup.freeze")} - {group.name for group in groups.values()}
    assert not others
    run("thaw-session", tmp_path)
    assert {(group / "cgroup.freeze").read_text() for group in groups.values()} == {"0\n"}


def test_a_guest_without_services_has_only_its_session(tmp_path: Path) -> None:
    session = tmp_path / "cgroup" / "user.slice"
    session.mkdir(parents=True)
    (tmp_path / "cgroup" / "system.slice").mkdir()
    (tmp_path / "cgroup" / "cgroup.controllers").touch()
    (session / "cgroup.events").write_text("populated 1\nfrozen 1\n")
    run("freeze-session", tmp_path)
    assert (session / "cgroup.freeze").read_text() == "1\n"
