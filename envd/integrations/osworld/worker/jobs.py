"""The two jobs of a worker: set a guest up for a task with OSWorld's code, and score it with OSWorld's metrics.

Does what OSWorld's `DesktopEnv.reset` and `evaluate` do, without a `DesktopEnv` and without its faults: a failed setup
step is a failure, a missing result in `or` mode scores 0 instead of the previous variable's value, the guest's platform
is given instead of queried each time, and nothing that acts on the guest is retried.
"""

import importlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from envd.integrations.osworld.worker.chrome import chrome_command
from envd.integrations.osworld.worker.traffic import GuestTraffic

_MAX_QUOTED_CHARS = 300


class JobError(Exception):
    """The job failed for a reason that is not the agent's."""


class OsworldModules(NamedTuple):
    """The modules of OSWorld that are used."""

    metrics: ModuleType
    getters: ModuleType
    setup: ModuleType
    python: ModuleType
    requests: ModuleType


class Context:
    """The part of a `DesktopEnv` that getters use."""

    def __init__(
        self,
        tools: OsworldModules,
        cache_dir: str,
        *,
        port: int,
        platform: str,
        screen_px: tuple[int, int],
        password: str,
        is_stopped: bool,
    ) -> None:
        """Take the guest that a port of the sandbox leads to.

        Args:
            platform: Name that OSWorld's own service uses: Linux or Windows.
            is_stopped: Whether the processes of its session are stopped, the X server too.
        """
        self.traffic = GuestTraffic(f"http://127.0.0.1:{port}")
        self.traffic.watch(tools.requests)
        self.vm_ip = "127.0.0.1"
        self.server_port = port
        # Nothing listens on these: only the guest's service is forwarded.
        self.chromium_port, self.vlc_port = 9222, 8080
        self.cache_dir = cache_dir
        self.vm_platform = platform
        self.vm_screen_size = {"width": screen_px[0], "height": screen_px[1]}
        self.current_use_proxy = False
        self.controller = tools.python.PythonController(vm_ip=self.vm_ip, server_port=port)
        self.controller.retry_times, self.controller.retry_interval = 1, 0
        if is_stopped:
            # Each command of OSWorld imports pyautogui first, which waits for the X server.
            self.controller.pkgs_prefix = "{command}"
        self._requests = tools.requests
        self._setup = tools.setup.SetupController(
            vm_ip=self.vm_ip,
            server_port=port,
            chromium_port=self.chromium_port,
            vlc_port=self.vlc_port,
            cache_dir=cache_dir,
            client_password=password,
            screen_width=screen_px[0],
            screen_height=screen_px[1],
        )

    def perform(self, step: Mapping[str, Any], *, where: str, strict: bool) -> None:
        """Perform one setup step.

        Args:
            step: Its `type` and `parameters`.
            where: Its name in messages.
            strict: Whether a request that the guest refuses is a failure. After an episode it is not: an agent may have
                closed the window that is to be activated, and the score will show it.

        Raises:
            JobError: It failed.
        """
        verb = getattr(self._setup, f"_{step['type']}_setup", None)
        if verb is None:
            raise JobError(f"{where}: OSWorld has no setup verb {step['type']!r}")
        self.traffic.forget()
        try:
            command = chrome_command(step["type"], step["parameters"]) if self.vm_platform == "Linux" else None
            if command is None:
                verb(**step["parameters"])
            else:
                self._run_in_guest(command)
        except Exception as error:
            if strict or self.traffic.broken or not self.traffic.refused:
                raise JobError(f"{where} {step['type']}: {_described(error)}") from error
        # The last response counts: a step may retry until the guest accepts it.
        if self.traffic.broken or (strict and self.traffic.refused):
            raise JobError(f"{where} {step['type']}: {self.traffic.broken or self.traffic.refused}")

    def _run_in_guest(self, command: list[str]) -> None:
        url = f"http://{self.vm_ip}:{self.server_port}/execute"
        response = self._requests.post(url, json={"command": command, "shell": False})
        if response.status_code == 200 and (done := response.json())["returncode"]:
            # Of a traceback, the last line.
            message = (done["error"].strip().splitlines() or [f"exit code {done['returncode']}"])[-1]
            raise RuntimeError(message)


def set_up(
    context: Context, steps: Sequence[tuple[int, Mapping[str, Any]]], *, on_step: Callable[[int], None]
) -> dict[str, object]:
    """Perform steps of a task's `config`, by index; call `on_step` with the index of each as it starts.

    Raises:
        JobError: A step failed.
    """
    for index, step in steps:
        on_step(index)
        context.perform(step, where=f"config[{index}]", strict=True)
    return {}


def evaluate(context: Context, tools: OsworldModules, evaluator: Mapping[str, Any]) -> dict[str, object]:
    """Score the guest with a task's `evaluator`; returns `score` and `parts`.

    One that has only a `postconfig` performs it, and returns nothing. Raises: JobError.
    """
    for index, step in enumerate(evaluator.get("postconfig") or ()):
        context.perform(step, where=f"postconfig[{index}]", strict=False)
    if "func" not in evaluator:
        return {}
    is_list = isinstance(evaluator["func"], list)
    names: list[str] = evaluator["func"] if is_list else [evaluator["func"]]
    conjunction = evaluator.get("conj", "and")
    parts: list[list[object]] = []
    scores: list[float] = []
    for index, name in enumerate(names):
        result, expected, options = (
            _item(evaluator, key, index, is_list=is_list) for key in ("result", "expected", "options")
        )
        score, evidence = _measure(context, tools, name, result=result, expected=expected, options=options or {})
        parts.append([name, score, evidence])
        if (conjunction == "and" and score == 0.0) or (conjunction == "or" and score == 1.0):
            return {"score": score, "parts": parts}
        scores.append(score)
    return {"score": sum(scores) / len(scores) if conjunction == "and" else max(scores), "parts": parts}


def _item(evaluator: Mapping[str, Any], key: str, index: int, *, is_list: bool) -> Any:
    """Return the value of `key` for one metric; None if there is none."""
    value = evaluator.get(key)
    if not value:
        return None
    return value[index] if is_list and isinstance(value, list) else value


def _measure(
    context: Context, tools: OsworldModules, name: str, *, result: Any, expected: Any, options: Mapping[str, Any]
) -> tuple[float, str]:
    """Return the score of one metric, and the evidence for it. Raises: JobError."""
    metric = getattr(tools.metrics, name, None)
    if metric is None:
        raise JobError(f"OSWorld has no metric {name!r}")
    context.traffic.forget()
    try:
        arguments = [_get(context, tools, result)]
        # A missing result is the agent's fault; a missing expected value is not.
        absent = context.traffic.absent
        if expected is not None:
            try:
                arguments.append(_get(context, tools, expected))
            except FileNotFoundError as error:
                raise JobError(f"{name}: the expected value is missing: {_described(error)}") from error
        score = metric(*arguments, **options)
    except JobError:
        raise
    except FileNotFoundError as error:
        _require_responses(context, name)
        return 0.0, f"a file is missing: {error}"[:_MAX_QUOTED_CHARS]
    except Exception as error:
        _require_responses(context, name)
        # OSWorld's getters and metrics raise errors when results are missing.
        if context.traffic.absent:
            return 0.0, f"missing in the guest: {context.traffic.absent}"[:_MAX_QUOTED_CHARS]
        raise JobError(f"{name} raised an error: {_described(error)}") from error
    _require_responses(context, name)
    if not isinstance(score, bool | int | float) and not hasattr(score, "__float__"):
        raise JobError(f"{name} returned {score!r}, which is not a score")
    number = float(score)
    if math.isnan(number) or not 0.0 <= number <= 1.0:
        raise JobError(f"{name} returned {number}, which is not in [0, 1]")
    shown = repr(arguments[0])
    return number, (f"missing in the guest: {absent}" if absent else shown)[:_MAX_QUOTED_CHARS]


def _get(context: Context, tools: OsworldModules, config: Mapping[str, Any] | None) -> Any:
    if config is None:
        return None
    getter = getattr(tools.getters, f"get_{config['type']}", None)
    if getter is None:
        raise JobError(f"OSWorld has no getter {config['type']!r}")
    return getter(context, config)


def _require_responses(context: Context, name: str) -> None:
    if context.traffic.broken:
        raise JobError(f"{name}: the guest did not answer a request completely: {context.traffic.broken}")


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_MAX_QUOTED_CHARS]


def names(tools: OsworldModules) -> dict[str, list[str]]:
    """Return the names of the setup verbs, getters and metrics of this installation of OSWorld."""
    controller = vars(tools.setup.SetupController)
    return {
        "verbs": sorted(
            name.removeprefix("_").removesuffix("_setup")
            for name in controller
            if name.startswith("_") and name.endswith("_setup")
        ),
        "getters": sorted(name.removeprefix("get_") for name in vars(tools.getters) if name.startswith("get_")),
        "metrics": sorted(name for name, value in vars(tools.metrics).items() if callable(value)),
    }


def load_tools() -> OsworldModules:
    """Import OSWorld. Takes seconds and hundreds of megabytes. Raises: whatever its imports raise."""
    # easyocr pulls in torch, and one task of 418 uses it.
    sys.modules.setdefault("easyocr", ModuleType("easyocr"))
    return OsworldModules(
        metrics=importlib.import_module("desktop_env.evaluators.metrics"),
        getters=importlib.import_module("desktop_env.evaluators.getters"),
        setup=importlib.import_module("desktop_env.controllers.setup"),
        python=importlib.import_module("desktop_env.controllers.python"),
        requests=importlib.import_module("requests"),
    )
