"""Bounds on episodes: what holds where a request says nothing, and the most that it may ask for."""

from dataclasses import dataclass

from envd.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """One daemon's bounds. Checked once, when made."""

    lease_ttl_s: float = 300.0
    """Seconds without a call after which an episode's machine is taken back, where the request sets none."""
    lease_ttl_min_s: float = 10.0
    """Shortest lease that may be asked for: a shorter one would lapse over a hiccup of the network."""
    lease_ttl_max_s: float = 3600.0
    """Longest lease that may be asked for: how long a dead client can hold a machine."""
    max_steps: int = 1000
    """Most steps of an episode, whatever its task or request says."""
    setup_timeout_s: float = 300.0
    """Limit for a task's setup."""
    evaluate_timeout_s: float = 120.0
    """Limit for a task's checkers together."""
    heartbeat_interval_s: float = 60.0
    """After how much silence a guest is asked for a sign of life, during its next step."""
    hang_timeout_s: float = 60.0
    """How long it has to give one."""
    ledger_keep_s: float = 600.0
    """How long a recorded answer may be replayed."""
    ledger_step_count: int = 8
    """Most answers recorded of one episode; each holds a frame, so some hundred KiB."""
    ledger_reset_count: int = 128
    """Most resets recorded."""

    def __post_init__(self) -> None:
        if not 0 < self.lease_ttl_min_s <= self.lease_ttl_s <= self.lease_ttl_max_s:
            raise ConfigError(
                f"lease_ttl_s {self.lease_ttl_s:g} is not within"
                f" [{self.lease_ttl_min_s:g}, {self.lease_ttl_max_s:g}] s, its least and its most"
            )
        if self.max_steps < 1:
            raise ConfigError(f"max_steps {self.max_steps} is below 1, so no episode could take a step")
