"""Keep the state before a mistake, and begin four episodes in it."""

import os

from cuaenv.client import Click, EnvClient, TypeText

with EnvClient(os.environ.get("ENVD_TARGET", "127.0.0.1:50051")) as client:
    with client.reset("fake/save-note") as episode:
        episode.step(Click(x=379, y=311))
        before = episode.checkpoint("before typing")
        episode.step(TypeText("a mistake"))
    # The episode is closed; the checkpoint is on the disk of its host.
    with client.reset_group(before, size=4) as copies:
        for number, copy in enumerate(copies):
            text = "Hello, fake desktop!" if number == 0 else f"attempt {number}"
            copy.step(TypeText(text), Click(x=82, y=86))
            print(f"attempt {number}: step {copy.step_count}, score {copy.evaluate().score:g}")
    client.delete_checkpoint(before)
