"""Desktops for Harbor: an environment whose machine is an episode, and a verifier that returns the episode's score.

`harbor run --env trainer.adapters.harbor:DesktopEnvironment` needs no other registration. Commands and files of the
guest need a pool that allows guest access. Harbor's interface has no screenshots and no input: agents that use the
desktop take `environment.session`.

A fault of ours is `SessionVoid` as the trial's exception. Such a trial has no reward, and `--max-retries` repeats it on
another machine. See docs/adapters.md.
"""

import shlex
import tomllib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.environments.definition import has_agent_environment_definition
from harbor.environments.tar_transfer import extract_dir_from_bytes, pack_dir_to_bytes
from harbor.models.task.verifier_mode import VerifierEnvironmentMode, resolve_task_verifier_mode
from harbor.models.trial.paths import EnvironmentPaths
from harbor.models.verifier.result import VerifierResult
from harbor.verifier.base import BaseVerifier

from cuaenv.client import AccessDenied, AsyncEpisode, Done, EnvError, GuestEnded, NotFound, View
from trainer.adapters.session import Session, SessionSettings, SessionVoid, open_session, task_of_row
from trainer.agent.ownership import is_fault

T = TypeVar("T")
#: Exit status of `timeout` for a command that it ended.
_TIMED_OUT = 124
_GUEST_ENDED = 255
_LONGEST_COMMAND_S = 590


class DesktopEnvironment(BaseEnvironment):
    """One desktop, for the daemon's task that `task_id` in `[metadata]` of task.toml names."""

    def __init__(
        self,
        *args: Any,
        task_id: str = "",
        envd: str = "",
        pool: str = "",
        max_steps: int = 0,
        max_width_px: int = 0,
        group_size: int = 1,
        desktop_user: str = "user",
        **kwargs: Any,
    ) -> None:
        """Check the options, which are those of `--ek`.

        Args:
            task_id: Id of the daemon's task; by default that of task.toml.
            envd: The daemon, or several with commas; by default the variable `ENVD_TARGET`. The token is `ENVD_TOKEN`.
            pool: Pool to use; by default the task's own.
            max_steps: Steps after which the episode is truncated; 0 for the task's own limit.
            max_width_px: Scale screenshots down to this width; 0 for the screen's own.
            group_size: Attempts of a task that start on forks of one state, for `--n-attempts` at the same time.
            desktop_user: User whose commands run in the desktop's session.

        Raises:
            ValueError: An option is out of range, or the task defines an environment that a desktop cannot be.
        """
        self._task_id = task_id
        self._desktop_user = desktop_user
        self._session: Session | None = None
        self._settings = SessionSettings.connect(
            envd,
            run="harbor",
            pool=pool,
            max_steps=max_steps,
            view=View(max_width_px=max_width_px),
            # Harbor has its own limit, `build_timeout_sec`.
            reset_timeout=timedelta(hours=1),
            group_size=group_size,
        )
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        """Return the name in Harbor's messages."""
        return "envd"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        """What Harbor may ask for: nothing beyond commands and files."""
        return EnvironmentCapabilities()

    @property
    def session(self) -> Session:
        """The episode: instruction, screenshot, `step`, `score`. Raises: RuntimeError: it was not started."""
        if self._session is None:
            raise RuntimeError(f"environment {self.session_id}: not started, or stopped; call start")
        return self._session

    def _validate_definition(self) -> None:
        """Refuse images, because a desktop's system is that of its pool, and find the task's id."""
        where = f"task {self.environment_name}"
        if has_agent_environment_definition(self.environment_dir, docker_image=self.task_env_config.docker_image):
            raise ValueError(
                f"{where}: defines a container image, but a desktop's system is its pool's image; remove"
                " environment/Dockerfile, docker-compose.yaml and docker_image"
            )
        if self._has_files() and not self.task_env_config.workdir:
            raise ValueError(f"{where}: its environment has files but no place for them; set workdir in [environment]")
        if not self._task_id:
            file = self.environment_dir.parent / "task.toml"
            try:
                self._task_id = task_of_row(tomllib.loads(file.read_text(encoding="utf-8")))
            except (OSError, ValueError) as error:
                raise ValueError(
                    f'{where}: names no task of the daemon; add task_id = "..." to [metadata] of {file}, or use'
                    " --ek task_id=..."
                ) from error

    async def start(self, force_build: bool) -> None:  # noqa: ARG002 -- Harbor's signature
        """Open the episode, and make Harbor's directories and the task's files in the guest.

        Raises:
            SessionVoid: The episode could not be opened, or was lost.
            EnvError: The task, the pool or the token is wrong.
        """
        async with _faults():
            self._session = await open_session(self._task_id, settings=self._settings)
        try:
            paths = EnvironmentPaths.for_os(self.os)
            folders = (paths.agent_dir, paths.verifier_dir, paths.artifacts_dir, paths.tests_dir, paths.solution_dir)
            argv = ["mkdir", "-p", "--mode=777", *map(str, folders)]
            await self._call(lambda episode: episode.run_command(argv, as_root=True))
            if self._has_files():
                await self.upload_dir(self.environment_dir, self.task_env_config.workdir)
        except AccessDenied as error:
            # Enough for an agent that uses the desktop and a verifier that asks for the episode's score.
            self.logger.warning("%s; commands and files fail", error)
        except BaseException:
            await self.stop(delete=True)
            raise

    async def stop(self, delete: bool) -> None:  # noqa: ARG002 -- no machine outlives its episode
        """Release the machine. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a shell command in the guest, as root unless a user is given.

        The desktop's user runs it in the desktop's session, where windows can be opened.

        Raises:
            SessionVoid: The episode was lost, or an earlier call was cancelled.
            RuntimeError: It did not end in time, and was terminated.
        """
        limit_s = min(timeout_sec or _LONGEST_COMMAND_S, _LONGEST_COMMAND_S)
        user = self._resolve_user(user)
        in_session = user == self._desktop_user
        argv = ["bash", "-c", command]
        if cwd := cwd or self.task_env_config.workdir:
            argv = ["env", "-C", cwd, *argv]
        if variables := self._merge_env(env):
            argv = ["env", *(f"{name}={value}" for name, value in variables.items()), *argv]
        if not in_session and user not in (None, "root", 0, "0"):
            # `id` takes names and numbers, `runuser` only names.
            argv = ["sh", "-c", 'exec runuser -u "$(id -nu -- "$0")" -- "$@"', str(user), *argv]
        # Ended in the guest: a call that times out voids the episode.
        argv = ["timeout", "-k", "5", str(limit_s), *argv]
        limit = timedelta(seconds=limit_s + 10)
        try:
            result = await self._call(lambda episode: episode.run_command(argv, as_root=not in_session, timeout=limit))
        except GuestEnded as error:
            # The trial continues to its score: an exception would repeat it.
            return ExecResult(stdout="", stderr=str(error), return_code=_GUEST_ENDED)
        if result.exit_code == _TIMED_OUT:
            raise RuntimeError(f"command {command!r}: not done within {limit_s} s; start longer work in the background")
        out, errors = (stream.decode(errors="replace") for stream in (result.stdout, result.stderr))
        return ExecResult(stdout=out, stderr=errors, return_code=result.exit_code)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Copy a file to the guest, and make its directory."""
        data = Path(source_path).read_bytes()
        await self._shell(f"mkdir -p -- {shlex.quote(str(Path(target_path).parent))}")
        await self._call(lambda episode: episode.write_file(target_path, data))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Copy a directory's content to the guest, as root's files."""
        data = pack_dir_to_bytes(source_dir, compress=True).getvalue()
        target = shlex.quote(target_dir)
        async with self._archive() as archive:
            await self._call(lambda episode: episode.write_file(archive, data))
            await self._shell(
                f"mkdir -p -- {target} && tar -xzf {archive} --no-same-owner --no-overwrite-dir -C {target}"
            )

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Copy a file from the guest."""
        try:
            data = await self._call(lambda episode: episode.read_file(source_path))
        except NotFound as error:
            raise FileNotFoundError(2, str(error), source_path) from error
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        Path(target_path).write_bytes(data)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Copy a directory's content from the guest. Links and members that would leave the target are not copied."""
        async with self._archive() as archive:
            await self._shell(f"tar -czf {archive} -C {shlex.quote(source_dir)} .")
            data = await self._call(lambda episode: episode.read_file(archive))
        extract_dir_from_bytes(data, target_dir)

    def _has_files(self) -> bool:
        return self.environment_dir.is_dir() and any(self.environment_dir.iterdir())

    async def _call(self, work: Callable[[AsyncEpisode], Awaitable[T]]) -> T:
        return await self.session.call(work)

    async def _shell(self, command: str) -> None:
        result = await self.exec(command, cwd="/", user="root")
        if result.return_code != 0:
            raise RuntimeError(f"command {command!r}: failed with status {result.return_code}: {result.stderr}")

    @asynccontextmanager
    async def _archive(self) -> AsyncIterator[str]:
        """Name a temporary file of the guest, and remove it after use."""
        path = f"/tmp/harbor-{uuid.uuid4().hex}.tar.gz"  # noqa: S108 -- in the guest
        try:
            yield path
        finally:
            await self._shell(f"rm -f {path}")


class TaskVerifier(BaseVerifier):
    """Scores a trial by the checks of the daemon's task: the reward `reward`, in [0, 1]."""

    async def verify(self) -> VerifierResult:
        """End the episode, if the agent did not, and score it.

        Raises:
            SessionVoid: The episode was lost. The trial has no reward.
            ValueError: The trial has no desktop that the agent used.
        """
        shared = resolve_task_verifier_mode(self.task.config) is VerifierEnvironmentMode.SHARED
        if not isinstance(self.environment, DesktopEnvironment) or not shared or self.step_name is not None:
            raise ValueError(
                f"task {self.task.name}: TaskVerifier scores the agent's own desktop, once; use it with"
                " DesktopEnvironment, one step and a shared verifier environment"
            )
        session = self.environment.session
        try:
            if not (session.done or session.void):
                await session.step(Done())
        except EnvError as error:
            if not is_fault(error):
                raise
        result = await session.score()
        if result.value is None:
            raise SessionVoid(result.void)
        for check in result.checks:
            self.logger.info("%s: %g %s", check.name, check.score, check.evidence)
        return VerifierResult(rewards={"reward": result.value})


@asynccontextmanager
async def _faults() -> AsyncIterator[None]:
    """Raise faults of ours as `SessionVoid`, so that results name them alike."""
    try:
        yield
    except EnvError as error:
        if not is_fault(error):
            raise
        raise SessionVoid(f"{error.reason or type(error).__name__}: {error}", code=error.code) from error
