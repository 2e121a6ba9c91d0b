"""States for the rewards of CUA-Gym's mock sites."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cua_gym.feed import answer_of, main, score, states_of

INITIAL: dict[str, Any] = {
    "user": {"id": "u1"},
    "emails": [
        {"id": "email_1", "subject": "Deals", "folder": "inbox", "labels": []},
        {"id": "email_2", "subject": "Lunch", "folder": "inbox", "labels": []},
    ],
    "labels": [{"id": "l1", "name": "Work"}],
}
GOLDEN = {**INITIAL, "emails": [{**INITIAL["emails"][0], "folder": "spam"}, INITIAL["emails"][1]]}
#: Asks for one folder, as some published rewards do.
REWARD = """
import json
import urllib.request

sid = open("/tmp/task_web_sid").read().strip()
with urllib.request.urlopen(f"https://example.org/go?sid={sid}", timeout=30) as response:
    state = json.loads(response.read().decode())["current_state"]
print("REWARD:", float(state["emails"][0]["folder"] == "spam"))
"""


def test_each_state_differs_from_the_goal_in_one_respect() -> None:
    states = {(state.kind, state.name): state.content for state in states_of(INITIAL, GOLDEN)}
    assert states["right", "the goal"] == GOLDEN
    assert states["lazy", "nothing done"] == INITIAL
    assert states["almost", "emails.0.folder differs"]["emails"][0]["folder"] == "spax"
    moved = states["damage", "emails: another's folder changed, too"]
    assert [each["folder"] for each in moved["emails"]] == ["spam", "inbox"[:-1] + "y"]
    assert states["damage", "all other emails deleted"]["emails"] == GOLDEN["emails"][:1]
    assert [label["name"] for label in states["damage", "labels: another's name changed, too"]["labels"]] == ["Worx"]
    # A text of a mail that arrived cannot be changed on the site.
    assert not any("subject" in name for _, name in states)
    before = {"events": [{"id": "e", "start": "2026-03-20T09:00:00Z", "description": "TBD"}]}
    after = {"events": [{"id": "e", "start": "2026-03-20T15:00:00Z", "description": "bring a badge"}]}
    events = {state.name: state.content["events"][0] for state in states_of(before, after)}
    assert events["events.0.start differs"]["start"] == "2026-03-20T16:00:00Z"
    assert events["events.0.description has two values"]["description"] == "bring a badge or TBD"
    current = {**GOLDEN, "emails": [GOLDEN["emails"][0], {"id": "email_3", "folder": "sent"}]}
    difference = answer_of(INITIAL, current)["state_diff"]
    assert difference["newEmails"] == [{"id": "email_3", "folder": "sent"}]
    assert difference["deletedEmails"] == ["email_2"]
    assert difference["modifiedEmails"] == {"email_1": {"folder": "spam"}}


def test_a_reward_is_run_without_its_site(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = tmp_path / "spam"
    task.mkdir()
    for name, content in (("initial", INITIAL), ("golden", GOLDEN)):
        (task / f"{name}.json").write_text(json.dumps(content))
    (task / "reward.py").write_text(REWARD)
    main([str(tmp_path)])
    lines = {line["name"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
    assert lines["the goal"] == {"task": "spam", "kind": "right", "name": "the goal", "score": 1.0}
    assert lines["nothing done"]["score"] == 0
    assert lines["all other emails deleted"]["score"] == 1


@pytest.mark.parametrize("reward", ["raise SystemExit(1)", "print('no verdict')", "import os; os._exit(3)"])
def test_a_reward_that_fails_has_no_score(reward: str) -> None:
    assert score(reward, {}) is None
