"""Named additions of the contract: what a daemon's release has beyond the first one.

`GetServer` and `ListPools` return the names. A name is never removed or reused, and each addition gets one, in the
order of releases.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple


class Capability(NamedTuple):
    """One addition."""

    elements: tuple[str, ...]
    """The methods, and fields as `Message.field`, by which a caller uses it."""
    text: str
    """What it does."""


CAPABILITIES: Final[Mapping[str, Capability]] = {
    "port_forwarding": Capability(("ForwardGuestPort",), "Carries TCP connections to ports of a guest."),
    "queue": Capability(("ListPoolsRequest.include_queue",), "Lists the groups that wait for machines, with reasons."),
    "guest_end": Capability(
        ("Episode.guest_end_cause",), "Scores an episode whose guest ended itself, with its cause."
    ),
    "score_basis": Capability(("EvaluateResponse.basis_digest",), "Identifies what a score depends on."),
    "checkpoints": Capability(
        ("CreateCheckpoint", "ListCheckpoints", "DeleteCheckpoint", "ResetRequest.checkpoint_id"),
        "Stores states of episodes, and opens episodes in them.",
    ),
    "checkpoint_transfer": Capability(("ExportCheckpoint", "ImportCheckpoint"), "Carries checkpoints between hosts."),
    "evaluation_epoch": Capability(("EvaluateRequest.epoch",), "Refuses to score a later attempt of an episode."),
    "checkpoint_evaluation": Capability(("EvaluateRequest.checkpoint_id",), "Scores a checkpoint."),
    "automatic_checkpoints": Capability(
        ("ResetRequest.checkpoint_every_steps", "ResetRequest.checkpoint_on"), "Stores checkpoints on chosen occasions."
    ),
    "rollback": Capability(
        ("Rollback", "Episode.epoch"), "Puts an open episode back into a checkpoint, and refuses calls from before."
    ),
    "control": Capability(
        ("ObserveResponse.controller",),
        "Lets a person control an episode in the console, and refuses the agent meanwhile.",
    ),
    "tools": Capability(
        (
            "Action.run_shell",
            "Action.read_file",
            "Action.write_file",
            "Action.edit_file",
            "Action.list_directory",
            "Action.call_tool",
            "Action.ask_user",
            "Episode.tools",
        ),
        "Performs tools as actions: a shell, files, MCP servers, questions to a task's user.",
    ),
    "unrecorded_requests": Capability(
        ("StepResponse.unrecorded_requests",), "Names the requests of a guest that its web recording does not have."
    ),
    "perturb": Capability(("ResetRequest.perturb",), "Perturbs the world of episodes, drawn from a seed."),
    "shared_images": Capability(
        ("ResetRequest.share_images", "ForkRequest.share_images"), "Sends an image that a group shows only once."
    ),
    "close_opening": Capability(("CloseRequest.opening_id",), "Ends a reset or fork by its request id."),
    "not_forkable": Capability(
        ("Pool.not_forkable", "Origin.is_new_session"),
        "Says which pools cannot copy running machines, and which episodes began in a new session.",
    ),
    "get": Capability(
        ("GetServer", "GetEpisode", "GetCheckpoint", "GetTask"),
        "Returns one server, episode, checkpoint or task, and a server's release and limits.",
    ),
    "parking": Capability(
        ("StepRequest.expects_idle", "Episode.parked", "Pool.parked_count", "Pool.resident_count"),
        "Parks idle episodes, so that more may be open than machines; says which are.",
    ),
}
