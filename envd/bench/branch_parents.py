"""Parents of the branch benchmark: what their guests have done, and how a child is compared with them."""

import os
from datetime import timedelta

from cuaenv.actions import Action, Move, PressKeys, TypeText, Wait
from cuaenv.client import AsyncEpisode, View
from envd.bench.report import Condition
from envd.bench.session import BenchSession
from envd.hypervisor.machine import GuestOs

#: The target of a branch is for a parent that has written at most this much memory.
TARGET_DIRTY_MIB = 32
STEP_TIMEOUT = timedelta(minutes=5)
_CHILD_TEXT, _PARENT_TEXT = "and the child", "and the parent"
_FILE_TIMEOUT = timedelta(minutes=2)


class EditorParent:
    """Types between the branches into the document of an editor, of which each child has a copy."""

    who = "an editor"

    def __init__(self, task_id: str, document: str) -> None:
        """Branch episodes of a task that opens the document in an editor."""
        self.task_id = task_id
        self._path = document
        self._saved = ""
        self._text = ""

    def nudge(self, number: int) -> Action:
        """Return the step that a fresh desktop takes before a branch."""
        return Move(x=400 + 10 * (number % 20), y=300)

    async def begin(self, bench: BenchSession, episode: AsyncEpisode) -> None:  # noqa: ARG002 see WritingParent
        """Work before the first branch."""
        self._saved = self._text = await _read(episode, self._path)
        await episode.step(PressKeys(["ctrl", "end"]), timeout=STEP_TIMEOUT)

    async def advance(self, episode: AsyncEpisode, word: str) -> None:
        """Work before each branch."""
        await episode.step(TypeText(word), timeout=STEP_TIMEOUT)
        self._text += word

    async def check(self, parent: AsyncEpisode, child: AsyncEpisode, *, frame_id: str) -> Condition:
        """Let the child work, observe the parent, then let it work. `frame_id` is its frame at the branch."""
        first_frame_id = child.observation.frame_id
        save = (PressKeys(["ctrl", "s"]), Wait(timedelta(seconds=1)))
        await child.step(TypeText(_CHILD_TEXT), *save, timeout=STEP_TIMEOUT)
        # Before reading the file: that runs the guest, and its caret blinks.
        later_frame_id = await frame_id_of(parent)
        file_after_child = await _read(parent, self._path)
        await parent.step(TypeText(_PARENT_TEXT), *save, timeout=STEP_TIMEOUT)
        return check_branch(
            parent_frame_ids=(frame_id, later_frame_id),
            child_frame_id=first_frame_id,
            parent_file=(self._saved, file_after_child),
            child_saved=(self._text + _CHILD_TEXT, await _read(child, self._path)),
            parent_saved=(self._text + _PARENT_TEXT, await _read(parent, self._path)),
        )


class WritingParent:
    """Writes the document itself, on images whose programs are unknown; else like `EditorParent`.

    At first it writes files until nearly as much memory as in the target is written.
    """

    who = "a guest that wrote files"
    _BLOCK_BYTES = 1 << 20
    #: Branches and the document add the rest.
    _GOAL_BYTES = (TARGET_DIRTY_MIB - 8) << 20

    def __init__(self, task_id: str, os: GuestOs) -> None:
        self.task_id = task_id
        self._path = r"C:\Users\Public\envd-bench" if os is GuestOs.WINDOWS else "/var/tmp/envd-bench"  # noqa: S108
        self._text = ""

    def nudge(self, number: int) -> Action:  # noqa: ARG002 see EditorParent
        # Not every guest has a pointer.
        return Wait(timedelta(milliseconds=200))

    async def begin(self, bench: BenchSession, episode: AsyncEpisode) -> None:
        for number in range(TARGET_DIRTY_MIB):
            if (written_bytes := bench.written_bytes()) is not None and written_bytes >= self._GOAL_BYTES:
                break
            await episode.write_file(f"{self._path}-{number}", os.urandom(self._BLOCK_BYTES), timeout=STEP_TIMEOUT)

    async def advance(self, episode: AsyncEpisode, word: str) -> None:
        self._text += word
        await _write(episode, self._path, self._text)

    async def check(self, parent: AsyncEpisode, child: AsyncEpisode, *, frame_id: str) -> Condition:
        first_frame_id = child.observation.frame_id
        await _write(child, self._path, await _read(child, self._path) + _CHILD_TEXT)
        later_frame_id = await frame_id_of(parent)
        file_after_child = await _read(parent, self._path)
        await _write(parent, self._path, file_after_child + _PARENT_TEXT)
        return check_branch(
            parent_frame_ids=(frame_id, later_frame_id),
            child_frame_id=first_frame_id,
            parent_file=(self._text, file_after_child),
            child_saved=(self._text + _CHILD_TEXT, await _read(child, self._path)),
            parent_saved=(self._text + _PARENT_TEXT, await _read(parent, self._path)),
        )


BranchParent = EditorParent | WritingParent


async def frame_id_of(episode: AsyncEpisode) -> str:
    """Return the id of an episode's current frame, without running its guest."""
    return (await episode.observe(view=View(encoding="none"))).frame_id


async def _read(episode: AsyncEpisode, path: str) -> str:
    return (await episode.read_file(path, timeout=_FILE_TIMEOUT)).decode(errors="replace")


async def _write(episode: AsyncEpisode, path: str, text: str) -> None:
    await episode.write_file(path, text.encode(), timeout=_FILE_TIMEOUT)


def check_branch(
    *,
    parent_frame_ids: tuple[str, str],
    child_frame_id: str,
    parent_file: tuple[str, str],
    child_saved: tuple[str, str],
    parent_saved: tuple[str, str],
) -> Condition:
    """Check that a child continued from its parent and left the parent unchanged. Pure.

    Args:
        parent_frame_ids: The parent's frame at the branch, and after text was typed into the child.
        child_frame_id: The child's first.
        parent_file: The parent's document before the branch, and after the child saved its own.
        child_saved: The document that the child should have saved, and the one it saved.
        parent_saved: The same for the parent.
    """
    problems = []
    at_branch, later = parent_frame_ids
    if child_frame_id != at_branch:
        problems.append(f"the child's first frame was {child_frame_id}, the parent's frame {at_branch}")
    if later != at_branch:
        problems.append(f"the parent's frame was {at_branch}, but {later} after the child typed")
    if parent_file[0] != parent_file[1]:
        problems.append(f"the parent's file was {parent_file[0]!r}, but {parent_file[1]!r} after the child saved")
    for who, (expected, found) in (("child", child_saved), ("parent", parent_saved)):
        if found != expected:
            problems.append(f"the {who} saved {found!r}, not {expected!r}")
    return Condition(
        name="a child continues its parent's text, and the parent is unchanged",
        passed=not problems,
        evidence="; ".join(problems)
        or f"the child started with the parent's frame and saved {child_saved[1]!r}; after that the parent had the same"
        f" frame and file, and saved {parent_saved[1]!r}",
    )
