"""group: tree, branch: "my_branch:early"."""

from trainer.agent.types import Reply


def early(*, turns_since: int, reply: Reply) -> bool:
    """Branch every third turn, and where a single token was a surprise."""
    return turns_since >= 3 or min(reply.log_probs, default=0.0) < -3.0
