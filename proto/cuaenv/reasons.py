"""Why a call fails: each reason that the service sends as `ErrorInfo.reason`, with its gRPC code.

The code determines the client's reaction, the reason is the cause. SETUP_FAILED is INTERNAL, not UNAVAILABLE: most
setups fail the same way each time, so a client that retried forever would waste machines. GUEST_UNRESPONSIVE is
DATA_LOSS, not DEADLINE_EXCEEDED: the caller's own deadline may be far off, and a retry would fail the same way.
"""

from collections.abc import Mapping
from typing import Final

#: Name of the gRPC code by reason.
CODE_BY_REASON: Final[Mapping[str, str]] = {
    # Fix the caller.
    "BAD_FIELD": "INVALID_ARGUMENT",
    "REQUEST_ID_REUSED": "INVALID_ARGUMENT",
    # Reset, or fix the name.
    "NOT_FOUND": "NOT_FOUND",
    "EPISODE_NOT_FOUND": "NOT_FOUND",
    "TASK_NOT_FOUND": "NOT_FOUND",
    "POOL_NOT_FOUND": "NOT_FOUND",
    "IMAGE_NOT_FOUND": "NOT_FOUND",
    "CHECKPOINT_NOT_FOUND": "NOT_FOUND",
    # Stop.
    "EPISODE_ENDED": "FAILED_PRECONDITION",
    "GUEST_ENDED": "FAILED_PRECONDITION",
    "GROUP_TOO_LARGE": "FAILED_PRECONDITION",
    # Wait until the person hands back, observe, and decide again.
    "HUMAN_IN_CONTROL": "FAILED_PRECONDITION",
    "GUEST_REFUSED": "FAILED_PRECONDITION",
    "NOT_FORKABLE": "FAILED_PRECONDITION",
    "CHECKPOINT_UNUSABLE": "FAILED_PRECONDITION",
    "CHECKPOINT_STORE_FULL": "FAILED_PRECONDITION",
    # Abandon the episode.
    "STEP_INDEX_MISMATCH": "ABORTED",
    "STALE_EPOCH": "ABORTED",
    # Wait, then retry with the same request_id.
    "POOL_EXHAUSTED": "RESOURCE_EXHAUSTED",
    "TOKEN_QUOTA": "RESOURCE_EXHAUSTED",
    "RATE_LIMITED": "RESOURCE_EXHAUSTED",
    # Use another host, or wait and retry.
    "DRAINING": "UNAVAILABLE",
    "POOL_FAILING": "UNAVAILABLE",
    "HYPERVISOR_UNAVAILABLE": "UNAVAILABLE",
    # Send a valid token.
    "UNAUTHENTICATED": "UNAUTHENTICATED",
    # Ask the operator.
    "ACCESS_DENIED": "PERMISSION_DENIED",
    "SCOPE_TOO_SMALL": "PERMISSION_DENIED",
    # Do not use the feature.
    "UNIMPLEMENTED": "UNIMPLEMENTED",
    # Void the sample.
    "MACHINE_LOST": "DATA_LOSS",
    "LOSS_UNDECIDED": "DATA_LOSS",
    "GUEST_UNRESPONSIVE": "DATA_LOSS",
    "GUEST_ERROR": "DATA_LOSS",
    "USER_UNAVAILABLE": "DATA_LOSS",
    # Report it, and void the sample.
    "SETUP_FAILED": "INTERNAL",
    "EVALUATOR_FAILED": "INTERNAL",
    "IMAGE_ERROR": "INTERNAL",
    "CONFIG_ERROR": "INTERNAL",
    "HYPERVISOR_ERROR": "INTERNAL",
    "TEMPLATE_CORRUPT": "INTERNAL",
    "CHECKPOINT_CORRUPT": "INTERNAL",
    "STORE_ERROR": "INTERNAL",
    "OSWORLD_ERROR": "INTERNAL",
    "BUG": "INTERNAL",
}
