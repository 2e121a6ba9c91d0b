"""The slots that one client holds in a cluster, and who of its groups uses them. Pure: no I/O, no clock.

A cluster reserves whole groups, and cannot take back a part. The members of a group end at different times, so a
reservation that lasted until its last member ended would leave most of its slots unused: 39 % of the machines were in
use in a simulation (docs/scale.md). Therefore a client's later groups reuse the slots that its ended episodes leave on
a host. Reservations are given back when the client does not need them, and after `MAX_AGE_S` in any case, so that other
clients get their turn.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

Node = TypeVar("Node", bound=Hashable)
Handle = TypeVar("Handle")

#: A reservation is not reused after this.
MAX_AGE_S: Final = 300.0
#: After this, a client gathers the slots of its oldest waiting group one by one.
GATHER_AFTER_S: Final = 30.0
#: A client gathers again only after this, so that others get their turn: they look every second.
GATHER_REST_S: Final = 3.0
#: Unused slots are held for this long, for the client's next group.
LINGER_S: Final = 2.0


@dataclass(slots=True, eq=False)
class _Held(Generic[Handle]):
    handle: Handle
    count: int
    since_s: float
    is_old: bool = False
    is_freed: bool = False


@dataclass(slots=True)
class _Node(Generic[Handle]):
    serial: int
    held: list[_Held[Handle]] = field(default_factory=list)
    """Oldest first."""
    count: int = 0
    """Slots of all reservations."""
    young_count: int = 0
    """Slots of the reservations that may be reused."""
    used_count: int = 0
    given_s: float = 0.0
    """Last time at which slots were given back."""

    @property
    def unused_count(self) -> int:
        return self.count - self.used_count

    @property
    def reusable_count(self) -> int:
        """Slots that may be reused; those in use are counted in young reservations first, so that old ones end."""
        return max(0, self.young_count - self.used_count)


class SlotLedger(Generic[Node, Handle]):
    """Counts slots by node. A node here is a host and one of its pools. Times never decrease."""

    def __init__(self) -> None:
        self._nodes: dict[Node, _Node[Handle]] = {}
        self._serial = 0
        # A client may hold slots on a thousand nodes, and looks for a node whenever an episode has ended.
        self._by_reusable: defaultdict[int, dict[Node, None]] = defaultdict(dict)
        self._young: deque[tuple[Node, _Held[Handle]]] = deque()

    def __repr__(self) -> str:
        held = {
            node: f"{slots.used_count} of {slots.used_count + slots.unused_count}"
            for node, slots in self._nodes.items()
        }
        return f"<SlotLedger {held}>"

    def add(self, node: Node, handle: Handle, count: int, *, now_s: float) -> None:
        """Add a new reservation, all of it in use."""
        if node not in self._nodes:
            self._serial += 1
            self._nodes[node] = _Node(self._serial)
        held = _Held(handle, count, now_s)
        self._nodes[node].held.append(held)
        self._young.append((node, held))
        self._change(node, count=count, young_count=count, used_count=count)

    def find(self, count: int, *, accepts: Callable[[Node], bool] = lambda _node: True, now_s: float) -> Node | None:
        """Return the accepted node with the fewest unused slots that suffice, the oldest of several; None without."""
        self._expire(now_s)
        for reusable_count in sorted(many for many in self._by_reusable if many >= count):
            nodes = self._by_reusable[reusable_count]
            for node in sorted(nodes, key=lambda one: self._nodes[one].serial):
                if accepts(node):
                    return node
        return None

    def reusable_count(self, node: Node, *, now_s: float) -> int:
        """Return the slots of a node that a group could use."""
        self._expire(now_s)
        return self._nodes[node].reusable_count if node in self._nodes else 0

    def take(self, node: Node, count: int) -> None:
        """Use slots of a node that `find` returned."""
        self._change(node, used_count=count)

    @property
    def has_unused(self) -> bool:
        """Whether slots are held that no group uses."""
        return any(slots.unused_count > 0 for slots in self._nodes.values())

    def nodes(self) -> list[Node]:
        """Return the nodes on which slots are held."""
        return list(self._nodes)

    def give(self, node: Node, count: int, *, now_s: float) -> None:
        """Stop using slots. Nothing happens if the node was dropped."""
        slots = self._nodes.get(node)
        if slots is not None:
            slots.given_s = now_s
            self._change(node, used_count=-min(count, slots.used_count))

    def surplus(self, *, now_s: float, is_gathered: Callable[[Node], bool | None] = lambda _node: None) -> list[Handle]:
        """Remove and return the reservations to free: old ones, and those unused for a while.

        Args:
            is_gathered: True for a node on which this client gathers slots, where young ones are kept; False for one
                on which another client does, where all unused ones are freed; else None.
        """
        self._expire(now_s)
        freed: list[Handle] = []
        for node, slots in list(self._nodes.items()):
            gathered = is_gathered(node)
            is_idle = now_s - slots.given_s >= LINGER_S if gathered is None else not gathered
            for one in list(slots.held):
                if (one.is_old or is_idle) and one.count <= slots.unused_count:
                    slots.held.remove(one)
                    one.is_freed = True
                    freed.append(one.handle)
                    self._change(node, count=-one.count, young_count=0 if one.is_old else -one.count)
            if not slots.held:
                self._remove(node)
        return freed

    def drop(self, node: Node) -> list[Handle]:
        """Remove and return all reservations of a node."""
        slots = self._nodes.get(node)
        if slots is None:
            return []
        for one in slots.held:
            one.is_freed = True
        self._remove(node)
        return [one.handle for one in slots.held]

    def _expire(self, now_s: float) -> None:
        """Make reservations old whose time has come."""
        while self._young and (self._young[0][1].is_freed or now_s - self._young[0][1].since_s >= MAX_AGE_S):
            node, held = self._young.popleft()
            if not held.is_freed:
                held.is_old = True
                self._change(node, young_count=-held.count)

    def _change(self, node: Node, *, count: int = 0, young_count: int = 0, used_count: int = 0) -> None:
        slots = self._nodes[node]
        old = slots.reusable_count
        slots.count += count
        slots.young_count += young_count
        slots.used_count += used_count
        if slots.reusable_count != old:
            self._unindex(node, old)
            if slots.reusable_count:
                self._by_reusable[slots.reusable_count][node] = None

    def _remove(self, node: Node) -> None:
        self._unindex(node, self._nodes.pop(node).reusable_count)

    def _unindex(self, node: Node, reusable_count: int) -> None:
        if reusable_count:
            nodes = self._by_reusable[reusable_count]
            del nodes[node]
            if not nodes:
                del self._by_reusable[reusable_count]
