"""A harness: attaches to its episode, asks the model by chat completions, and performs the clicks that it names.

Its argument is a fault: `none`, `exit`, `hang`, `talk`, `close`, `mute` or `endless`.
"""

import json
import os
import sys
import time
import urllib.request

from cuaenv.client import Click, EnvClient
from trainer.agent.types import data_uri


def ask(messages: list[dict[str, object]]) -> str:
    request = urllib.request.Request(  # noqa: S310 -- http
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        data=json.dumps({"model": "policy", "messages": messages}).encode(),
        headers={"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:  # noqa: S310
        return str(json.load(response)["choices"][0]["message"]["content"])


def main(fault: str) -> None:
    if fault == "mute":
        return
    with EnvClient(os.environ["ENVD_TARGET"]) as client:
        episode = client.attach(os.environ["ENVD_EPISODE"], keep_open=fault != "close")
        messages: list[dict[str, object]] = [{"role": "system", "content": os.environ["ENVD_INSTRUCTION"]}]
        while True:
            picture = {"type": "image_url", "image_url": {"url": data_uri(episode.observation.image)}}
            messages.append({"role": "user", "content": [{"type": "text", "text": "The screen:"}, picture]})
            reply = ask(messages)
            if fault == "exit":
                sys.exit("the harness fails")
            if fault == "hang":
                time.sleep(600)
            if fault == "talk":
                print("x" * 100_000)
            if reply == "done" and fault != "endless":
                break
            messages.append({"role": "assistant", "content": reply})
            if reply != "done":
                x, y, count = map(int, reply.split())
                seen = episode.observation
                episode.step(Click(x * seen.width_px // 1000, y * seen.height_px // 1000, count=count))


if __name__ == "__main__":
    main(sys.argv[1])
