"""Daemons that are killed at random points: a checkpoint continues under the next one as if nothing had happened."""

import random
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import pytest

from cuaenv.client import Action, Click, EnvClient, EnvError, EpisodeNotFound, PressKeys, SampleVoid, Settle, TypeText
from tests.support.leftovers import machine_leftovers
from tests.support.served import ServedDaemon

_NEXT = 5
_START = timedelta(minutes=30)
CONFIG = """\
[pools.desktop]
size = 1
capacity = 4

[hypervisor]
{hypervisor}
"""


class Host:
    """A host whose daemon is killed and started again, with the same address, state and checkpoints."""

    def __init__(self, directory: Path, *, hypervisor: str, images: Path | None) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self.state_dir, self.cache_dir = directory / "state", directory / "cache"
        self.cache_dir.mkdir()
        if images is not None:
            (self.cache_dir / "images").symlink_to(images)
        self._config = CONFIG.format(hypervisor=hypervisor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Check that nothing is left; after a failure only end the daemon."""
        status = self.daemon.end()
        if kind is None:
            assert status == 0
            assert list((self.cache_dir / "checkpoints").iterdir()) == []
            assert machine_leftovers(self.state_dir) == []

    def start(self) -> None:
        self.daemon = ServedDaemon(
            self.state_dir, self._config, "--cache-dir", str(self.cache_dir), listen=self.address
        )
        self.daemon.wait_for(r"listening on (\S+)", timeout_s=300)

    def kill(self) -> None:
        self.daemon.end(signal.SIGKILL)
        self.start()


def plan_of(rng: random.Random, count: int) -> list[Action]:
    """Return actions whose result depends on all those before."""
    kinds = (
        lambda: TypeText("".join(rng.choices("abc xyz", k=6))),
        lambda: PressKeys([rng.choice(("Left", "BackSpace", "End", "Return"))]),
        lambda: Click(rng.randrange(300, 500), rng.randrange(300, 500)),
    )
    return [Click(640, 400), *(rng.choices(kinds, (4, 2, 1))[0]() for _ in range(count - 1))]


@contextmanager
def running(step: threading.Thread) -> Iterator[None]:
    step.start()
    yield
    step.join()


def play(host: Host, task: str, *, seed: int, points: int, settle: Settle | None = None) -> None:
    """Play an episode with a kill of the daemon at each of some random points, and compare it with a twin."""
    rng = random.Random(seed)
    length = 2 * points + _NEXT
    plan, stops = plan_of(rng, length), sorted(rng.sample(range(1, 2 * points), points))
    options: dict[str, Any] = {"settle": settle, "timeout": _START, "max_steps": 100}
    host.start()
    with EnvClient(host.address) as client:
        with client.reset(task, **options) as twin:
            frames = [twin.step(action).observation.frame_id for action in plan]
        episode = client.open(task, **options)
        for stop in stops:
            while episode.step_count < stop:
                at = episode.step_count
                assert episode.step(plan[at]).observation.frame_id == frames[at]
            checkpoint = episode.checkpoint()
            lost = episode

            def act_on(acting=lost, action=plan[stop]) -> None:  # type: ignore[no-untyped-def]
                with suppress(EnvError):
                    acting.step(action, timeout=timedelta(seconds=5))

            killing = threading.Timer(rng.uniform(0, 0.3), host.kill)
            with running(threading.Thread(target=act_on)), running(killing):
                pass
            with pytest.raises((EpisodeNotFound, SampleVoid)):
                lost.step(plan[0], timeout=timedelta(minutes=1))
            lost.close()
            episode = client.open(checkpoint, settle=settle, timeout=_START)
            assert (episode.step_count, episode.observation.frame_id) == (stop, checkpoint.frame_id)
            for at in range(stop, stop + _NEXT):
                assert episode.step(plan[at]).observation.frame_id == frames[at], f"seed {seed}, step {at}"
            # Back to the point, for the next ones.
            assert episode.rollback(checkpoint).frame_id == checkpoint.frame_id
        episode.close()
        for each in (*client.list_checkpoints(), checkpoint):
            client.delete_checkpoint(each)
        assert client.list_checkpoints() == []
        assert client.list_episodes() == []


@pytest.mark.timeout(600)
def test_drawn_desktops_continue_after_kills(tmp_path: Path) -> None:
    with Host(tmp_path, hypervisor='uri = "fake"', images=None) as host:
        play(host, "fake/save-note", seed=1, points=2)


@pytest.mark.vm
@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(20))
def test_five_points_of_each_of_twenty_episodes_continue_after_kills(
    short_dir: Path, template_dir: Path, cache_dir: Path, seed: int
) -> None:
    # On a busy host a guest may draw late.
    settle = Settle(quiet=timedelta(seconds=1), max=timedelta(minutes=1))
    with Host(short_dir, hypervisor=f'template_dir = "{template_dir}"', images=cache_dir / "images") as host:
        play(host, "desktop/type-greeting", seed=seed, points=5, settle=settle)
