"""The slots that a client holds in a cluster: reuse, and when reservations are freed."""

import random

from cuaenv.client.slots import LINGER_S, MAX_AGE_S, SlotLedger


def test_a_later_group_reuses_the_slots_of_ended_episodes_on_the_fullest_host_that_suffices() -> None:
    ledger: SlotLedger[str, str] = SlotLedger()
    ledger.add("a", "first", 8, now_s=0.0)
    ledger.add("b", "second", 8, now_s=0.0)
    ledger.give("a", 6, now_s=1.0)
    ledger.give("b", 4, now_s=1.0)
    assert ledger.find(4, now_s=1.0) == "b"
    assert ledger.find(5, now_s=1.0) == "a"
    assert ledger.find(5, accepts=lambda node: node == "b", now_s=1.0) is None
    ledger.take("b", 4)
    assert ledger.find(4, now_s=1.0) == "a"


def test_unused_reservations_are_freed_after_a_while_and_those_in_use_are_kept() -> None:
    ledger: SlotLedger[str, str] = SlotLedger()
    ledger.add("a", "first", 8, now_s=0.0)
    ledger.add("a", "second", 4, now_s=0.0)
    ledger.give("a", 5, now_s=10.0)
    assert ledger.has_unused
    assert ledger.surplus(now_s=10.0 + LINGER_S / 2) == []
    assert ledger.surplus(now_s=10.0 + LINGER_S) == ["second"]
    ledger.give("a", 7, now_s=20.0)
    assert ledger.surplus(now_s=20.0 + LINGER_S) == ["first"]
    assert (ledger.nodes(), ledger.has_unused) == ([], False)


def test_an_old_reservation_is_not_reused_and_freed_as_soon_as_enough_slots_are_unused() -> None:
    ledger: SlotLedger[str, str] = SlotLedger()
    ledger.add("a", "old", 8, now_s=0.0)
    ledger.add("a", "young", 8, now_s=MAX_AGE_S / 2)
    ledger.give("a", 8, now_s=MAX_AGE_S)
    assert ledger.find(1, now_s=MAX_AGE_S) is None
    assert ledger.surplus(now_s=MAX_AGE_S) == ["old"]
    ledger.give("a", 4, now_s=MAX_AGE_S)
    assert ledger.find(4, now_s=MAX_AGE_S) == "a"


def test_the_reservations_of_a_lost_host_are_dropped_and_its_groups_give_nothing_back() -> None:
    ledger: SlotLedger[str, str] = SlotLedger()
    ledger.add("a", "first", 8, now_s=0.0)
    assert ledger.drop("a") == ["first"]
    ledger.give("a", 8, now_s=1.0)
    assert (ledger.nodes(), ledger.drop("a")) == ([], [])


def test_nodes_are_found_as_if_all_were_counted_whatever_happens_to_them() -> None:
    rng = random.Random(1)
    ledger: SlotLedger[int, int] = SlotLedger()
    held: dict[int, tuple[int, int, float]] = {}
    used: dict[int, int] = {}
    order: list[int] = []
    now_s = 0.0
    for step in range(3000):
        now_s += rng.expovariate(0.5)
        node, count = rng.randrange(6), rng.randint(1, 8)
        match rng.choice(["add", "take", "give", "surplus", "drop"] if step % 10 == 0 else ["add", "take", "give"]):
            case "add":
                ledger.add(node, step, count, now_s=now_s)
                held[step] = (node, count, now_s)
                used[node] = used.get(node, 0) + count
                order += [node] if node not in order else []
            case "take":
                free = {
                    one: sum(many for at, many, since_s in held.values() if at == one and now_s - since_s < MAX_AGE_S)
                    - used[one]
                    for one in order
                }
                wanted = min((one for one in order if free[one] >= count), key=lambda one: free[one], default=None)
                assert ledger.find(count, now_s=now_s) == wanted
                if wanted is not None:
                    ledger.take(wanted, count)
                    used[wanted] += count
            case "give":
                ledger.give(node, count, now_s=now_s)
                if node in used:
                    used[node] = max(0, used[node] - count)
            case "surplus":
                for handle in ledger.surplus(now_s=now_s):
                    del held[handle]
            case _:
                assert sorted(ledger.drop(node)) == sorted(key for key, one in held.items() if one[0] == node)
                held = {key: one for key, one in held.items() if one[0] != node}
        order = [one for one in order if any(at == one for at, _, _ in held.values())]
        used = {one: used[one] for one in order}
        assert ledger.nodes() == order
