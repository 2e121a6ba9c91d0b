"""Perturbations: what a desktop in use has and a clean one does not. Pure.

A perturbation is one or more setup verbs before or after those of a task. Which ones a reset gets, and how they look,
follows from a seed alone, so equal seeds give equal worlds.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, get_args

from pydantic import TypeAdapter

from envd.base.errors import InvalidRequest
from envd.hypervisor.machine import GuestOs
from envd.tasks.fields import MAX_PERTURBATIONS, PerturbationKind
from envd.tasks.model import Task
from envd.tasks.templates import Sampler
from envd.tasks.verbs import SetupVerb

_VERBS: TypeAdapter[tuple[SetupVerb, ...]] = TypeAdapter(tuple[SetupVerb, ...])

_Entries = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PerturbationDraw:
    """What a reset asks for."""

    seed: int
    kinds: tuple[str, ...] = ()
    """Kinds to draw from; empty for all."""
    count: int = 1


def _shell(script: str) -> Mapping[str, Any]:
    return {"kind": "execute", "argv": ["sh", "-c", script]}


def _message(title: str, text: str, buttons: str, *options: str) -> Mapping[str, Any]:
    argv = ["xmessage", "-title", title, "-buttons", buttons, *options, text]
    return {"kind": "launch", "argv": argv, "window": {"title": f"^{title}$"}}


def _update(sampler: Sampler) -> _Entries:
    what = sampler.choice(
        ["12 updates are ready.", "A new version of this system is available.", "Updates were installed."]
    )
    return [_message("Software Updater", f"{what}\nThe computer has to restart.", "Restart now,Later", "-center")]


def _notification(sampler: Sampler) -> _Entries:
    text = sampler.choice(["3 new messages", "The backup has finished", "A device was disconnected"])
    corner = sampler.choice(["-20+20", "-20-60"])
    # It goes by itself, in the guest's time.
    return [_message("Notification", text, "Close", "-geometry", corner, "-timeout", str(sampler.randint(30, 120)))]


def _low_battery(sampler: Sampler) -> _Entries:
    share = sampler.randint(3, 9)
    return [
        _message("Battery low", f"{share} % of the battery is left.\nConnect the computer to power.", "OK", "-center")
    ]


def _theme(sampler: Sampler) -> _Entries:
    return [_gtk("gtk-application-prefer-dark-theme", "1"), *_background(sampler)]


def _font_scale(sampler: Sampler) -> _Entries:
    dpi = sampler.choice([120, 132, 144])
    return [_shell(f"echo 'Xft.dpi: {dpi}' | xrdb -merge"), _gtk("gtk-xft-dpi", str(dpi * 1024))]


def _gtk(key: str, value: str) -> Mapping[str, Any]:
    """Set a value that GTK reads when a program starts; a later group of the same name extends the earlier one."""
    directory = "$HOME/.config/gtk-3.0"
    return _shell(f"mkdir -p {directory} && printf '\\n[Settings]\\n{key}={value}\\n' >> {directory}/settings.ini")


def _background(sampler: Sampler) -> _Entries:
    colour = sampler.choice(["#204a33", "#5c3566", "#3a3a3a", "#8f5902"])
    return [_shell(f"xsetroot -solid '{colour}'")]


def _window_placement(sampler: Sampler) -> _Entries:
    # From the task's own window, if it has one.
    x, y, width, height = (sampler.randint(*bounds) for bounds in ((0, 300), (0, 200), (500, 800), (350, 500)))
    state = "wmctrl -r :ACTIVE: -b remove,maximized_vert,maximized_horz"
    return [_shell(f"{state}; wmctrl -r :ACTIVE: -e 0,{x},{y},{width},{height} || true")]


def _late_program(sampler: Sampler) -> _Entries:
    program = sampler.choice(["galculator", "xterm", "pcmanfm"])
    delay_s = sampler.randint(5, 40)
    return [_shell(f"setsid sh -c 'sleep {delay_s}; exec {program}' >/dev/null 2>&1 </dev/null &")]


def _extra_window(sampler: Sampler) -> _Entries:
    x, y = sampler.randint(100, 500), sampler.randint(60, 300)
    title = sampler.choice(["build.log", "notes", "htop"])
    argv = ["xterm", "-geometry", f"80x20+{x}+{y}", "-T", title, "-e", "sleep infinity"]
    return [{"kind": "launch", "argv": argv, "window": {"title": f"^{title}$"}}]


#: Each kind's verbs, and whether they come before the task's own: programs read settings when they start.
_KINDS: Final[Mapping[PerturbationKind, tuple[Callable[[Sampler], _Entries], bool]]] = {
    "background": (_background, True),
    "extra_window": (_extra_window, False),
    "font_scale": (_font_scale, True),
    "late_program": (_late_program, False),
    "low_battery": (_low_battery, False),
    "notification": (_notification, False),
    "theme": (_theme, True),
    "update": (_update, False),
    "window_placement": (_window_placement, False),
}
KINDS: Final = get_args(PerturbationKind)


def own_perturb(task: Task, reset_id: str) -> PerturbationDraw | None:
    """Return what a task itself perturbs in a reset: equal for equal ids, as of retries; None for a clean world."""
    if task.perturb is None:
        return None
    seed = int.from_bytes(hashlib.sha256(reset_id.encode()).digest()[:4]) >> 1
    return PerturbationDraw(seed=seed, kinds=task.perturb.kinds, count=task.perturb.count)


def perturb(task: Task, wanted: PerturbationDraw) -> tuple[Task, tuple[str, ...]]:
    """Return a task with the perturbations of a seed in its setup, and their kinds.

    Its state is not kept for later resets.

    Raises:
        InvalidRequest: A kind is unknown, there are fewer kinds than asked for, or the task is not for Linux.
    """
    if unknown := sorted(set(wanted.kinds) - set(KINDS)):
        raise InvalidRequest("perturb.kinds", f"{', '.join(unknown)}: unknown; choose of {', '.join(KINDS)}")
    if task.os is not GuestOs.LINUX:
        raise InvalidRequest("perturb", f"not supported in {task.os.value} guests, which task {task.task_id} needs")
    kinds = tuple(kind for kind in KINDS if not wanted.kinds or kind in wanted.kinds)
    if not 1 <= wanted.count <= min(MAX_PERTURBATIONS, len(kinds)):
        raise InvalidRequest("perturb.count", f"{wanted.count} is not 1 to {min(MAX_PERTURBATIONS, len(kinds))}")
    sampler = Sampler("perturb", wanted.seed)
    drawn = sorted(sampler.sample(kinds, wanted.count))
    before: list[Mapping[str, Any]] = []
    after: list[Mapping[str, Any]] = []
    for kind in drawn:
        make, is_before = _KINDS[kind]
        (before if is_before else after).extend(make(sampler))
    setup = (*_VERBS.validate_python(before), *task.setup, *_VERBS.validate_python(after))
    return task.model_copy(update={"setup": setup, "freeze_setup": False}), tuple(drawn)
