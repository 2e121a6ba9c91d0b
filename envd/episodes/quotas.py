"""Limit the machines that each caller holds. Counts only; never waits."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from envd.base.errors import GroupTooLarge, TokenQuotaReached

#: An estimate: when the caller closes one of its own episodes is unknown.
_RETRY_AFTER_S = 5.0


class MachineQuotas:
    """Limits the machines of each owner over all pools: those of its episodes, and those being opened for it."""

    def __init__(self, held_count: Callable[[str], int]) -> None:
        """Start with no machines being opened. `held_count` returns how many machines an owner's episodes hold."""
        self._held_count = held_count
        self._opening: Counter[str] = Counter()

    @contextmanager
    def reserve(self, owner: str, count: int, *, max_machines: int | None) -> Iterator[None]:
        """Count `count` machines for `owner` during the block; afterwards its episodes hold them, or they are released.

        Raises:
            GroupTooLarge: `count` alone exceeds the limit.
            TokenQuotaReached: `count` and the machines held now exceed the limit.
        """
        if max_machines is not None:
            held = self._held_count(owner) + self._opening[owner]
            if count > max_machines:
                raise GroupTooLarge(
                    f"token {owner!r}: at most {max_machines} machines, and one request needs {count};"
                    " request a smaller group"
                )
            if held + count > max_machines:
                raise TokenQuotaReached(
                    f"token {owner!r}: at most {max_machines} machines, {held} are in use, and {count} more are"
                    " requested; close episodes",
                    retry_after_s=_RETRY_AFTER_S,
                )
        self._opening[owner] += count
        try:
            yield
        finally:
            self._opening[owner] -= count
            if not self._opening[owner]:
                del self._opening[owner]
