"""Gymnasium's loop. `pip install '.[gymnasium]'`"""

import gymnasium

env = gymnasium.make(
    "trainer.adapters.gymnasium:envd/Desktop-v0", task="fake/enable", max_steps=5
)  # on the daemon that ENVD_TARGET names, or else 127.0.0.1:50051
screen, info = env.reset(seed=1)
print(info["instruction"], screen.shape)
ended = False
while not ended:
    action = env.action_space.sample()  # your policy
    screen, reward, terminated, truncated, info = env.step(action)
    ended = terminated or truncated
    if info["void"]:
        print("lost, not scored:", info["void"])
print("reward:", reward)
env.close()
