"""Find out who caused the failure of a call on an episode, from the evidence of its machine."""

from envd.base.errors import (
    DisplayError,
    EnvdError,
    EvaluatorFailed,
    GuestError,
    GuestUnresponsive,
    HypervisorError,
    HypervisorUnavailable,
    MachineLost,
)
from envd.base.losses import Loss, LossOwner
from envd.episodes.episode import Episode


async def find_loss(episode: Episode, error: BaseException) -> Loss | None:
    """Return who caused an error of an episode's machine or guest; None if the error says nothing about either.

    A desktop that is still asleep has run nothing of the agent since it was forked, so its failure is ours.
    """
    machine = episode.machine.machine
    symptom = _symptom(error)
    if symptom is None or isinstance(symptom, HypervisorUnavailable):
        return machine.loss
    if episode.machine.desktop.is_asleep and not machine.lost.is_set():
        return machine.loss
    try:
        # A paused guest answers nothing.
        async with episode.machine.running():
            loss = await machine.examine()
    except EnvdError:
        loss = await machine.examine()
    is_of_qemu = isinstance(symptom, MachineLost | DisplayError | HypervisorError)
    if loss.explains_display and not isinstance(symptom, HypervisorError):
        return loss
    if machine.loss is None and loss.owner is LossOwner.GUEST and is_of_qemu:
        # QEMU serves the display and the monitor: one that fails while QEMU runs does not show that the guest failed.
        return Loss(LossOwner.UNDECIDED, str(error))
    return loss


def _symptom(error: BaseException) -> BaseException | None:
    """Return the error of the machine or guest behind an error.

    That a checker could not do something in the guest may be the checker's mistake; that the guest did not answer is
    not.
    """
    kinds: tuple[type[BaseException], ...] = (MachineLost, GuestUnresponsive, HypervisorError)
    if not isinstance(error, EvaluatorFailed):
        kinds = (*kinds, GuestError)
    return _find(error, kinds)


def _find(error: BaseException | None, kinds: tuple[type[BaseException], ...]) -> BaseException | None:
    while error is not None and not isinstance(error, kinds):
        error = error.__cause__
    return error
