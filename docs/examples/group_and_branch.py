"""Open a group from one state, branch one member in mid-episode, and compare what became of each."""

import os

from cuaenv.client import Click, EnvClient, TypeText

ADDRESS = os.environ.get("ENVD_TARGET", "127.0.0.1:50051")
SAVE = Click(x=82, y=86)

with EnvClient(ADDRESS) as client, client.reset_group("fake/save-note", size=2) as (one, other):
    print("same first frame:", one.observation.frame_id == other.observation.frame_id)
    one.step(Click(x=379, y=311), TypeText("Hello, "))
    # A copy of the running desktop, with its unsaved text.
    with client.fork(one, count=1) as (branch,):
        branch.step(TypeText("fake desktop!"), SAVE)
        one.step(TypeText("world!"), SAVE)
        for name, episode in (("branch", branch), ("parent", one), ("other member", other)):
            print(f"{name}: {episode.evaluate().score:g}")
