"""Applies OSWorld's setup and evaluators to our guests; implements `envd.tasks.bridge.TaskBridge`."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from envd.base.errors import GuestError
from envd.desktop.desktop import Desktop
from envd.hypervisor.machine import GuestOs
from envd.integrations.osworld.downloads import asset_urls, getter_configs
from envd.integrations.osworld.workers import OsworldWorkers, WorkerJob
from envd.tasks.assets import AssetCache, AssetMissing
from envd.tasks.fields import AssetRef
from envd.tasks.text import CheckOutcome

_PLATFORMS = {GuestOs.LINUX: "Linux", GuestOs.WINDOWS: "Windows"}
#: Limit of a job that the caller's own limit does not end first.
_LONGEST_JOB_S = 1800.0
#: How long to wait for an idle guest before input. LibreOffice takes a minute to start in an emulated guest.
_REST_PATIENCE_S = 90.0
#: OSWorld's verbs that start programs, that need a program's window, and libraries that send keys or clicks.
_STARTING_VERBS = frozenset({"launch", "open"})
_WINDOW_VERBS = frozenset({"activate_window", "close_window"})
_INPUT = re.compile(r"pyautogui|xdotool|pynput")
#: OSWorld's getters that read files of the guest, or nothing of it. Any other asks the session, which cannot be stopped
#: meanwhile: the screen, its windows or their accessibility tree, a program's own port, or whatever a command asks.
_FILE_GETTERS = frozenset(
    """audio_in_slide background_image_in_slide bookmarks cache_file chrome_font_size chrome_language cloud_file
    content_from_vm_file cookie_data data_delete_automacally default_search_engine enable_do_not_track
    enable_enhanced_safety_browsing enable_safe_browsing enabled_experiments extensions_installed_from_shop
    find_installed_extension_name find_unpacked_extension_path gimp_config_file history list_directory new_startup_page
    profile_name rule rule_relativeTime shortcuts_on_desktop vlc_config vm_file""".split()  # noqa: SIM905 - 28 lines otherwise
)


class WorkerBridge:
    """Performs setups and evaluations in worker processes, never in this one."""

    def __init__(self, workers: OsworldWorkers, *, assets: AssetCache, client_password: str = "") -> None:
        self._workers = workers
        self._assets = assets
        self._client_password = client_password

    async def set_up(
        self, desktop: Desktop, steps: Sequence[Mapping[str, Any]], *, os: GuestOs, on_step: Callable[[str], None]
    ) -> None:
        """Perform setup steps in OSWorld's form; call `on_step` with the name of each as it starts.

        Raises:
            GuestError: A step failed, even if OSWorld would only have logged it; or a file of the task is not in the
                cache.
            MachineLost: The machine is gone.
        """
        for first, part in parts_between_rests(steps):
            if first:
                # A program that is still starting, behind a splash screen, would lose the input.
                await desktop.wait_idle(max_wait_s=_REST_PATIENCE_S)
            await self._run(desktop, "set_up", part, {}, os, first_step=first, on_step=on_step)

    async def evaluate(self, desktop: Desktop, evaluator: Mapping[str, Any], *, os: GuestOs) -> CheckOutcome:
        """See `TaskBridge`. The session is stopped after `postconfig`, if only files are read."""
        if not reads_only_files(evaluator):
            return outcome_of(await self._run(desktop, "evaluate", (), evaluator, os))
        if postconfig := evaluator.get("postconfig"):
            await self._run(desktop, "evaluate", (), {"postconfig": postconfig}, os)
        async with desktop.frozen():
            without = {**evaluator, "postconfig": ()}
            return outcome_of(await self._run(desktop, "evaluate", (), without, os, is_stopped=True))

    async def _run(
        self,
        desktop: Desktop,
        kind: str,
        steps: Sequence[Mapping[str, Any]],
        evaluator: Mapping[str, Any],
        os: GuestOs,
        *,
        first_step: int = 0,
        is_stopped: bool = False,
        on_step: Callable[[str], None] = lambda _: None,
    ) -> Mapping[str, Any]:
        files = self._files_of(steps, evaluator)

        async def work(guest_url: str) -> Mapping[str, Any]:
            job = WorkerJob(
                kind=kind,
                guest_url=guest_url,
                platform=_PLATFORMS[os],
                screen_px=desktop.screen_size,
                time_s=_LONGEST_JOB_S,
                steps=steps,
                first_step=first_step,
                evaluator=evaluator,
                files=files,
                password=self._client_password,
                is_stopped=is_stopped,
                on_step=on_step,
            )
            return await self._workers.run(job)

        return await desktop.with_guestd(work)

    def _files_of(self, steps: Sequence[Mapping[str, Any]], evaluator: Mapping[str, Any]) -> dict[str, Path]:
        try:
            urls = asset_urls(steps, evaluator)
            return {name: self._assets.find(AssetRef(url)) for name, url in urls.items()}
        except (AssetMissing, ValueError) as error:
            raise GuestError(str(error)) from error


def reads_only_files(evaluator: Mapping[str, Any]) -> bool:
    """Return whether an evaluator, after its `postconfig`, asks nothing of the session."""
    getters = (getter for key in ("result", "expected") for getter in getter_configs(evaluator, key))
    return all(getter.get("type") in _FILE_GETTERS for getter in getters)


def parts_between_rests(steps: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Sequence[Mapping[str, Any]]]]:
    """Yield parts of a setup, each with the index of its first step; before each but the first, the guest must be idle.

    A new part begins at a step that needs the window of a program that was started in an earlier step.
    """
    first, is_starting = 0, False
    for index, step in enumerate(steps):
        if is_starting and (step["type"] in _WINDOW_VERBS or _INPUT.search(json.dumps(step))):
            yield first, steps[first:index]
            first, is_starting = index, False
        is_starting = is_starting or step["type"] in _STARTING_VERBS
    yield first, steps[first:]


def outcome_of(result: Mapping[str, Any]) -> CheckOutcome:
    """Return the outcome in a worker's untrusted result. Raises: GuestError: It is malformed."""
    try:
        parts = [(str(name), _score(score), str(found)) for name, score, found in result["parts"]]
        evidence = "; ".join(f"{name} {score:g}: {found}" for name, score, found in parts)
        return CheckOutcome(_score(result["score"]), evidence)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise GuestError(f"malformed result from OSWorld's worker: {error!r}") from error


def _score(value: object) -> float:
    """Return a score. Raises: ValueError: It is not a number in [0, 1]."""
    if not isinstance(value, int | float) or not 0 <= value <= 1:  # also false for NaN
        raise ValueError(f"{repr(value)[:100]} is not a score in [0, 1]")
    return float(value)
