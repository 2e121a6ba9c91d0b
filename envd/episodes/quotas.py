"""How many machines each caller has in hand, and that none takes more than it may. Counts, and waits for nobody."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from envd.errors import GroupTooLarge, TokenQuotaReached

#: Nobody knows when the caller will close one of its own.
_RETRY_AFTER_S = 5.0


class MachineQuotas:
    """Bounds the machines of each owner, over all pools: those of its episodes, and those that are on their way."""

    def __init__(self, held_by: Callable[[str], int]) -> None:
        """Have none on their way. `held_by` tells how many machines an owner's episodes hold."""
        self._held_by = held_by
        self._coming: Counter[str] = Counter()

    @contextmanager
    def taken(self, owner: str, count: int, *, most: int | None) -> Iterator[None]:
        """Count machines for their owner until the block is left, when its episodes hold them or nobody does.

        Args:
            owner: Whose they will be.
            count: Of them.
            most: How many the owner may have; None for any number.

        Raises:
            GroupTooLarge: It may never have so many.
            TokenQuotaReached: It has too many others now.
        """
        if most is not None:
            held = self._held_by(owner) + self._coming[owner]
            if count > most:
                raise GroupTooLarge(f"token {owner!r} may hold {most} machines, and {count} are asked for at once")
            if held + count > most:
                raise TokenQuotaReached(
                    f"token {owner!r} may hold {most} machines, has {held}, and asks for {count} more; close episodes",
                    retry_after_s=_RETRY_AFTER_S,
                )
        self._coming[owner] += count
        try:
            yield
        finally:
            self._coming[owner] -= count
            if not self._coming[owner]:
                del self._coming[owner]
