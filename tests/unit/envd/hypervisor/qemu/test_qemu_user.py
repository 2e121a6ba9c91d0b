"""The choice of the user that runs QEMU, and its reason."""

import grp
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from envd.base.errors import ConfigError
from envd.hypervisor.qemu.user import Account, QemuUser, choose_qemu_user

ALL = "000001ffffffffff"
WITHOUT_PTRACE = "000001fffff7ffff"
QEMU_ACCOUNT = Account(name="qemu", user_id=4_000_001, group_id=4_000_002, group_ids=frozenset({4_000_002}))
NO_ACCESS: dict[str, list[Path]] = {"directories": [], "files": []}


def status(*, user_id: int = 0, capabilities: str = ALL, umask: str = "0022") -> str:
    return f"Name:\tenvd\nUmask:\t{umask}\nUid:\t{user_id}\t{user_id}\t{user_id}\t{user_id}\nCapEff:\t{capabilities}\n"


@pytest.fixture(autouse=True)
def _accounts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `qemu` the only user; it owns no files and is in no other group."""
    monkeypatch.setattr(Account, "of", lambda name: QEMU_ACCOUNT if name == "qemu" else None)


@pytest.fixture
def public_dir() -> Iterator[Path]:
    """A directory that every user can enter, unlike pytest's."""
    directory = Path(tempfile.mkdtemp(prefix="envd-q-", dir="/tmp"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


def test_root_runs_qemu_as_the_usual_user_if_that_one_can_access_everything(public_dir: Path) -> None:
    image = public_dir / "disk.qcow2"
    image.touch(mode=0o644)
    chosen = choose_qemu_user("", directories=[public_dir / "not yet"], files=[image], status=status())
    assert chosen.account == QEMU_ACCOUNT


@pytest.mark.parametrize(("mode", "verb"), [(0o700, "enter"), (0o711, "")])
def test_root_runs_qemu_itself_if_the_user_cannot_enter_a_directory(public_dir: Path, mode: int, verb: str) -> None:
    hidden = public_dir / "hidden"
    hidden.mkdir()
    hidden.chmod(mode)
    chosen = choose_qemu_user("", directories=[hidden / "a" / "b"], files=[], status=status())
    assert (chosen.account is None) == bool(verb)
    assert not verb or chosen.why == f"qemu cannot {verb} {hidden}"


def test_root_runs_qemu_itself_if_the_user_cannot_read_a_file_or_open_a_device(public_dir: Path) -> None:
    secret = public_dir / "disk.qcow2"
    secret.touch(mode=0o600)
    assert choose_qemu_user("", directories=[], files=[secret], status=status()).why == f"qemu cannot read {secret}"
    device = public_dir / "kvm"
    device.touch(mode=0o644)
    chosen = choose_qemu_user("", directories=[], files=[], devices=[device], status=status())
    assert chosen.why == f"qemu cannot read and write {device}"


def test_rights_of_the_user_and_of_its_groups_count(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch(mode=0o640)
    status = file.stat()
    owner = Account(name="a", user_id=status.st_uid, group_id=0, group_ids=frozenset())
    member = Account(name="b", user_id=4_000_001, group_id=status.st_gid, group_ids=frozenset({status.st_gid}))
    assert [account.may(file, 6) for account in (owner, member, QEMU_ACCOUNT)] == [True, False, False]
    assert [account.may(file, 4) for account in (owner, member, QEMU_ACCOUNT)] == [True, True, False]


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (status(capabilities=WITHOUT_PTRACE), "envd lacks CAP_SYS_PTRACE"),
        (status(umask="0077"), "envd's umask 0077 hides its files from other users"),
    ],
)
def test_root_runs_qemu_itself_if_envd_lacks_a_privilege(facts: str, why: str) -> None:
    assert choose_qemu_user("", **NO_ACCESS, status=facts) == QemuUser(account=None, why=why)
    with pytest.raises(ConfigError, match=f"hypervisor.qemu_user: qemu cannot run QEMU: {why}"):
        choose_qemu_user("qemu", **NO_ACCESS, status=facts)


def test_root_or_an_unknown_user_can_be_named_and_a_usual_one_be_missing(
    public_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose_qemu_user("root", **NO_ACCESS, status=status()).account is None
    with pytest.raises(ConfigError, match="no-such-user"):
        choose_qemu_user("no-such-user", **NO_ACCESS, status=status())
    monkeypatch.setattr(Account, "of", lambda name: None)
    assert choose_qemu_user("", **NO_ACCESS, status=status()).why == "there is no user libvirt-qemu or qemu"


def test_an_unprivileged_envd_runs_qemu_only_as_its_own_user() -> None:
    facts = status(user_id=QEMU_ACCOUNT.user_id, capabilities="0")
    assert choose_qemu_user("", **NO_ACCESS, status=facts).account is None
    assert choose_qemu_user("qemu", **NO_ACCESS, status=facts).account is None
    with pytest.raises(ConfigError, match="only root"):
        choose_qemu_user("qemu", **NO_ACCESS, status=status(user_id=4_000_009))


def test_without_another_user_no_owner_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "chown", lambda *_: pytest.fail("changed an owner"))
    own = QemuUser(account=None, why="a test")
    own.chown(tmp_path)
    own.chown_memory(tmp_path / "m.ram")
    assert list(tmp_path.iterdir()) == []


def test_directories_of_envd_are_closed_to_other_users(public_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed: list[tuple[Path, int, int]] = []
    monkeypatch.setattr(os, "chown", lambda *arguments: changed.append(arguments))
    monkeypatch.setattr(os, "geteuid", lambda: public_dir.stat().st_uid)
    QemuUser(account=QEMU_ACCOUNT, why="a test").restrict(public_dir)
    assert changed == [(public_dir, -1, QEMU_ACCOUNT.group_id)]
    assert public_dir.stat().st_mode & 0o027 == 0
    # QEMU's user gets access again when it is chosen, also after a start at which root ran QEMU.
    directories = [public_dir, public_dir / "machines"]
    assert choose_qemu_user("", directories=directories, files=[], status=status()).account == QEMU_ACCOUNT


def test_a_directory_of_others_or_of_several_users_is_not_closed(
    public_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = QemuUser(account=None, why="a test")
    public_dir.chmod(0o1777)
    own.restrict(public_dir)
    assert public_dir.stat().st_mode & 0o7777 == 0o1777
    public_dir.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: public_dir.stat().st_uid + 1)
    own.restrict(public_dir)
    assert public_dir.stat().st_mode & 0o7777 == 0o755


def test_the_group_with_the_name_of_qemus_user_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    group = grp.struct_group(("qemu", "x", 4_000_003, []))
    monkeypatch.setattr(grp, "getgrnam", lambda _: group)
    assert QEMU_ACCOUNT.own_group_id == QEMU_ACCOUNT.group_id, "it is not in that group"
    member = replace(QEMU_ACCOUNT, group_ids=frozenset({QEMU_ACCOUNT.group_id, 4_000_003}))
    assert member.own_group_id == 4_000_003
