"""GRPO with TRL: eight samples of a task start on forks of one state. `pip install '.[trl]' datasets`"""

import os
from functools import partial

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from cuaenv.client import EnvClient, View
from trainer.adapters.session import SessionSettings
from trainer.adapters.trl import DesktopEnvironment

MODEL = os.environ.get("MODEL", "Qwen/Qwen3-VL-2B-Instruct")
SAMPLES = int(os.environ.get("SAMPLES", "8"))
STEPS = int(os.environ.get("STEPS", "100"))

target = os.environ.get("ENVD_TARGET", "127.0.0.1:50051")
with EnvClient(target) as client:
    tasks = [task.task_id for task in client.list_tasks() if task.task_id.startswith("fake/")]

prompt = [{"role": "user", "content": "Do this task on the desktop, then call done. "}]
# Samples with one `group` are compared with each other, and begin in one state.
rows = [{"prompt": prompt, "task_id": task_id, "group": task_id} for task_id in tasks]
settings = SessionSettings.connect(target, group_size=SAMPLES, view=View(max_width_px=640))
GRPOTrainer(
    model=MODEL,
    train_dataset=Dataset.from_list(rows),
    environment_factory=partial(DesktopEnvironment, settings),
    args=GRPOConfig(
        output_dir="out/grpo",
        num_generations=SAMPLES,
        per_device_train_batch_size=SAMPLES,
        max_steps=STEPS,
        max_completion_length=4096,
        logging_steps=1,
        report_to=[],
    ),
).train()
