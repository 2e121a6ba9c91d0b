"""slime's own rollout on real machines: a group on forks of one desktop, and one that branches midway."""

import shutil
import tempfile
import zlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from cuaenv.client import Action, Done, PressKeys, TypeText, Wait
from envd.images.catalogue import Image
from tests.support.served import ServedDaemon
from tests.support.sglang import SglangServer
from tests.support.slime_job import SlimeJob, check_train_data, slime_args
from trainer.agent.grammars import grammar
from trainer.learn.slime_job import write_tasks
from trainer.slime.play.samples import facts_of, flatten

pytestmark = [pytest.mark.slime, pytest.mark.vm, pytest.mark.long, pytest.mark.timeout(1500)]

TASK = "desktop/type-greeting"
CONFIG = """\
[pools.desktop]
image = "desktop"
size = 1
capacity = 5

[hypervisor]
template_dir = "{template_dir}"
"""
SAY = grammar("qwen3-vl").render
GREET: list[Action] = [TypeText("Hello, desktop!"), PressKeys(["ctrl", "s"]), Wait(timedelta(seconds=5))]


@pytest.fixture(scope="module")
def address(desktop_image: Image, template_dir: Path) -> Iterator[str]:
    assert desktop_image.name == "desktop"
    # Below /tmp, not pytest's own deep directory: Unix sockets end at 107 bytes.
    parent = Path(tempfile.mkdtemp(prefix="envd-s-", dir="/tmp"))
    served = ServedDaemon(parent / "s", CONFIG.format(template_dir=template_dir))
    try:
        served.wait_for(r"pool desktop: (ready)", timeout_s=600)
        yield served.wait_for(r"listening on (\S+)")
    finally:
        served.end()
        shutil.rmtree(parent)


def greeting(prompt: str) -> str | None:
    """Let the model speak first; then what it said decides whether it goes about the task or only says so."""
    _, *replies = prompt.split("<|im_start|>assistant\n")
    first = replies[0].partition("<|im_end|>")[0]
    works = zlib.crc32(first.encode()) % 2 == 0
    return {2: SAY(GREET if works else [Wait(timedelta(seconds=1))]), 3: SAY([Done()])}.get(len(replies))


def args_for(address: str, checkpoint: Path, tmp_path: Path, engine: SglangServer, **envd: object) -> Any:
    agent = {
        "max_turns": 3,
        "image_max_pixels": 65_536,
        "reply_tokens": 400,
        "prompt_tokens": 4096,
        "context_tokens": 8192,
    }
    return slime_args(
        {"hosts": [address], "agent": agent, **envd},
        n_samples_per_prompt=4,
        sglang_server_concurrency=4,
        rollout_max_response_len=400,
        hf_checkpoint=str(checkpoint),
        prompt_data=str(write_tasks(tmp_path / "tasks.jsonl", [TASK])),
        sglang_router_ip=engine.host,
        sglang_router_port=engine.port,
    )


def test_a_group_of_four_on_real_machines_becomes_train_data(address: str, checkpoint: Path, tmp_path: Path) -> None:
    with SglangServer(checkpoint, script=greeting) as engine:
        args = args_for(address, checkpoint, tmp_path, engine)
        with SlimeJob(args) as job:
            output = job.rollout()
            data = check_train_data(job, output.samples)
    samples = flatten(output.samples)
    for sample in samples:
        facts = facts_of(sample)
        print(sample.status.name, sample.reward, facts.get("reason"), facts.get("timings_s"), facts.get("void"))
    assert [sample.status.name for sample in samples] == ["COMPLETED"] * 4
    assert len({facts_of(sample)["origin"] for sample in samples}) == 1
    # Each was scored by what it did: the first reply, the model's own, tells which way it went.
    for sample in samples:
        first = sample.response.partition("<|im_end|>")[0]
        assert sample.reward == float(zlib.crc32(first.encode()) % 2 == 0)
    assert len(data["tokens"]) == 4


def test_a_tree_of_four_keeps_text_typed_before_its_branch_point(
    address: str, checkpoint: Path, tmp_path: Path
) -> None:
    saved: list[bool] = []

    def say(prompt: str) -> str | None:
        """Type, branch, let the model speak, and save or not as its words decide."""
        _, *replies = prompt.split("<|im_start|>assistant\n")
        if len(replies) == 1:
            return SAY([TypeText("Hello, desktop!")])
        if len(replies) == 2:
            return None
        saved.append(zlib.crc32(replies[1].partition("<|im_end|>")[0].encode()) % 2 == 0)
        return SAY([PressKeys(["ctrl", "s"]), Wait(timedelta(seconds=5))] if saved[-1] else [Done()])

    with SglangServer(checkpoint, script=say) as engine:
        args = args_for(address, checkpoint, tmp_path, engine, group="tree", branch_every=1, branch_ways=4)
        with SlimeJob(args) as job:
            output = job.rollout()
            check_train_data(job, output.samples)
        answers = len(engine.answers)
    facts = [facts_of(sample) for sample in flatten(output.samples)]
    for one in facts:
        print(one.get("task_score"), one.get("reason"), one.get("timings_s"), one.get("void"))
    assert sorted(one["shared_turns"] for one in facts) == [0, 1, 1, 1]
    assert answers == 1 + 4 + 4, "what was typed before was said once"
    assert sorted(one["task_score"] for one in facts) == sorted(map(float, saved))
