"""Bounds on episodes: the defaults for requests that set no value, and the maximum that a request may set."""

from dataclasses import dataclass

from envd.base.errors import ConfigError, InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """One daemon's bounds. Checked once, when made."""

    lease_ttl_s: float = 300.0
    """Default: seconds without a call after which an episode's machine is reclaimed."""
    lease_ttl_min_s: float = 10.0
    """Shortest lease a request may set: a shorter one would expire during a network hiccup."""
    lease_ttl_max_s: float = 3600.0
    """Longest lease a request may set: how long a dead client can hold a machine."""
    max_steps: int = 1000
    """Maximum steps of an episode; overrides its task and request."""
    setup_timeout_s: float = 300.0
    """Limit for a task's setup."""
    evaluate_timeout_s: float = 120.0
    """Limit for all checkers of a task together."""
    heartbeat_interval_s: float = 60.0
    """Silence after which the next step also checks that the guest is alive."""
    hang_timeout_s: float = 60.0
    """How long the guest has to answer that check."""
    ledger_keep_s: float = 600.0
    """How long a recorded response can be replayed."""
    ledger_step_count: int = 8
    """Maximum responses kept per episode; each holds a frame of several hundred KiB."""
    ledger_reset_count: int = 128
    """Maximum reset responses kept."""

    def __post_init__(self) -> None:
        if not 0 < self.lease_ttl_min_s <= self.lease_ttl_s <= self.lease_ttl_max_s:
            raise ConfigError(
                f"lease_ttl_s: {self.lease_ttl_s:g} is outside"
                f" [{self.lease_ttl_min_s:g}, {self.lease_ttl_max_s:g}] s (lease_ttl_min_s, lease_ttl_max_s)"
            )
        if self.max_steps < 1:
            raise ConfigError(f"max_steps: {self.max_steps} is below 1, so no episode could take a step")

    def lease_ttl_for(self, requested_s: float | None) -> float:
        """Return the lease length of a request in seconds. Raises: InvalidRequest: out of range."""
        if requested_s is None:
            return self.lease_ttl_s
        if not self.lease_ttl_min_s <= requested_s <= self.lease_ttl_max_s:
            raise InvalidRequest(
                "lease_ttl", f"{requested_s:g} s is outside [{self.lease_ttl_min_s:g} s, {self.lease_ttl_max_s:g} s]"
            )
        return requested_s

    def max_steps_for(self, requested: int | None, *, task_max_steps: int) -> int:
        """Return the maximum steps of an episode. Raises: InvalidRequest: out of range."""
        if requested is None:
            return min(task_max_steps, self.max_steps)
        if not 1 <= requested <= self.max_steps:
            raise InvalidRequest("max_steps", f"{requested} is outside [1, {self.max_steps}]")
        return requested
