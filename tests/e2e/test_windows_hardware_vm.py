"""Groups, branches, checkpoints and a killed daemon over gRPC, on the hardware of Windows machines."""

import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest

from cuaenv.client import EnvClient, Episode, View
from envd.hypervisor.qemu.processes import owner_of, tpm_processes
from tests.support import uefi_guest
from tests.support.leftovers import machine_leftovers
from tests.support.served import ServedDaemon

pytestmark = [pytest.mark.vm, pytest.mark.long, pytest.mark.timeout(900)]

CONFIG = """\
cache_dir = "{cache_dir}"

[pools.uefi]
image = "{image}"
size = 1
capacity = 6
memory_mib = 512
allow_guest_access = true

[tasks]
suites = ["{suite}"]
"""
SUITE = """\
suite: uefi
tasks:
  - name: set-up
    level: 1
    instruction: Write the file.
    setup:
      - {kind: write_file, path: /var/tmp/set-up, text: "by the setup"}
      - {kind: execute, as_root: true, argv: [tpm2_nvdefine, -Q, -T, device:/dev/tpmrm0, "0x1500016", -s, "8"]}
    checker: {kind: file_text, path: /var/tmp/written, equals: "by a member"}
    oracle:
      - [done]
"""
LONG_TIMEOUT = timedelta(minutes=10)
NO_PIXELS = View(encoding="none")


@pytest.fixture
def state_dir() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="envd-w-", dir="/tmp"))
    yield directory / "s"
    shutil.rmtree(directory)


@pytest.fixture
def config(state_dir: Path, cache_dir: Path) -> str:
    catalogue = uefi_guest.build(cache_dir)
    suite = state_dir.parent / "uefi.yaml"
    suite.write_text(SUITE, encoding="utf-8")
    return CONFIG.format(cache_dir=catalogue.root.parent, image=uefi_guest.NAME, suite=suite)


def root(episode: Episode, script: str) -> str:
    argv = ("sh", "-ec", f"export TPM2TOOLS_TCTI=device:/dev/tpmrm0; {script}")
    result = episode.run_command(argv, as_root=True)
    assert result.exit_code == 0, result.stderr
    return result.stdout.decode()


VARIABLES = "/sys/firmware/efi/efivars"
GUID = "6f2d1e5c-0d4b-4b0e-9a57-0e5d5c1d2a03"


def change(episode: Episode, text: str) -> None:
    """Write to the TPM's memory, extend a register of it, and create a UEFI variable."""
    root(episode, f"printf %-8s {text} | tpm2_nvwrite -Q 0x1500016 -i -; tpm2_pcrextend 16:sha256={1:064x}")
    root(episode, f"printf '\\007\\000\\000\\000%s' value-of-{text} >{VARIABLES}/{text}-{GUID}")


def state_of(episode: Episode) -> list[str]:
    memory = root(episode, "tpm2_nvread -s 8 0x1500016; cat /sys/class/tpm/tpm0/pcr-sha256/16")
    return [memory, root(episode, f"cd {VARIABLES}; for each in *-{GUID}; do tail -c +5 $each; echo; done")]


def test_a_checkpoint_has_tpm_and_uefi_variables_in_a_rollback_and_under_a_later_daemon(
    state_dir: Path, config: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        listen = f"127.0.0.1:{free.getsockname()[1]}"
    with ExitStack() as daemons:
        first = daemons.enter_context(ServedDaemon(state_dir, config, listen=listen))
        first.wait_for(r"listening on (\S+)")
        with (
            EnvClient(listen) as client,
            client.reset("uefi/set-up", pool="uefi", view=NO_PIXELS, timeout=LONG_TIMEOUT) as episode,
        ):
            change(episode, "first")
            before = state_of(episode)
            assert (before[0].startswith("first "), before[1]) == (True, "value-of-first\n")
            checkpoint = episode.checkpoint(timeout=LONG_TIMEOUT)
            change(episode, "second")
            after = state_of(episode)
            assert (after[0] != before[0], after[1]) == (True, "value-of-first\nvalue-of-second\n")
            episode.rollback(checkpoint, timeout=LONG_TIMEOUT)
            assert state_of(episode) == before
            change(episode, "second")
            assert state_of(episode) == after
            first.end(signal.SIGKILL)
            second = daemons.enter_context(ServedDaemon(state_dir, config, listen=listen))
            second.wait_for(r"listening on (\S+)", timeout_s=300)
            with client.reset_group(checkpoint, size=2, view=NO_PIXELS, timeout=LONG_TIMEOUT) as copies:
                assert [state_of(copy) for copy in copies] == [before, before]
                change(copies[0], "second")
                assert [state_of(copy) for copy in copies] == [after, before]
            client.delete_checkpoint(checkpoint)
        assert second.end() == 0
    assert machine_leftovers(state_dir) == []


def test_a_group_with_a_setup_and_its_branches_have_tpms_of_their_own_which_end_with_a_killed_daemon(
    state_dir: Path, config: str, daemons: ExitStack
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        listen = f"127.0.0.1:{free.getsockname()[1]}"
    first = daemons.enter_context(ServedDaemon(state_dir, config, listen=listen))
    first.wait_for(r"listening on (\S+)")
    with (
        EnvClient(listen) as client,
        client.reset_group("uefi/set-up", size=2, pool="uefi", view=NO_PIXELS, timeout=LONG_TIMEOUT) as members,
    ):
        for number, member in enumerate(members):
            assert member.read_file("/var/tmp/set-up") == b"by the setup"  # noqa: S108
            root(member, f"printf member-{number} | tpm2_nvwrite -Q 0x1500016 -i -")
        root(members[1], "printf 'by a member' >/var/tmp/written")
        with client.fork(members[1], count=1, view=NO_PIXELS, timeout=LONG_TIMEOUT) as (branch,):
            root(members[1], "printf later--- | tpm2_nvwrite -Q 0x1500016 -i -")
            episodes = (*members, branch)
            read = "tpm2_nvread -s 8 0x1500016"
            assert [root(episode, read) for episode in episodes] == ["member-0", "later---", "member-1"]
            assert [episode.evaluate().score for episode in episodes] == [0.0, 1.0, 1.0]
            owner = owner_of(state_dir)
            killed = set(tpm_processes(owner))
            assert len(killed) >= len(episodes)
            first.end(signal.SIGKILL)
            second = daemons.enter_context(ServedDaemon(state_dir, config, listen=listen))
            second.wait_for(r"listening on (\S+)", timeout_s=300)
            assert killed.isdisjoint(tpm_processes(owner))
    assert second.end() == 0
    assert machine_leftovers(state_dir) == []
