"""Open an episode, act, save the screen, and ask for the score."""

import os

from cuaenv.client import Click, Done, EnvClient, TypeText

with EnvClient(os.environ.get("ENVD_TARGET", "127.0.0.1:50051")) as client, client.reset("fake/save-note") as episode:
    print(episode.instruction)
    episode.observation.image.save("before.png")
    step = episode.step(Click(x=379, y=311), TypeText("Hello, fake desktop!"))
    if step.errors:  # mistakes of the agent, such as an unknown key
        print(step.errors)
    step = episode.step(Click(x=82, y=86))
    step.observation.image.save("after.png")
    episode.step(Done())
    print("score:", episode.evaluate().score)
