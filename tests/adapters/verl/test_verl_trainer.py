"""A whole training step of verl's own trainer, on drawn desktops and a CPU; `cpu_plugin` stands for the accelerator."""

import json
import os
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

from tests.support.desktops import DrawnDesktops
from tests.support.program import run_program

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
TARGET = "trainer.adapters.verl.DesktopAgentLoop"


@pytest.mark.timeout(900)
async def test_a_training_step_rolls_out_a_group_scores_it_and_updates_the_weights(
    desktops: DrawnDesktops, model: Path, tmp_path: Path
) -> None:
    loops, rows = tmp_path / "loops.yaml", tmp_path / "rows.parquet"
    metrics, checksums = tmp_path / "metrics.jsonl", tmp_path / "checksums"
    settings = {"hosts": [desktops.address], "attempts": 1}
    OmegaConf.save(OmegaConf.create([{"name": "desktop", "_target_": TARGET, "envd": settings}]), loops)
    row = {"prompt": [{"role": "user", "content": "Use the desktop."}], "data_source": "envd", "task_id": "fake/enable"}
    pq.write_table(pa.Table.from_pylist([row]), rows)
    actor, rollout, hf = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
    overrides = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": rows,
        "data.val_files": rows,
        "data.train_batch_size": 1,
        "data.trust_remote_code": True,
        "data.dataloader_num_workers": 0,
        f"{rollout}.n": 2,
        f"{rollout}.prompt_length": 4096,
        f"{rollout}.response_length": 8192,
        f"{rollout}.calculate_log_probs": True,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": 1,
        f"{rollout}.agent.num_workers": 1,
        f"{rollout}.agent.default_agent_loop": "desktop",
        f"{rollout}.agent.agent_loop_config_path": loops,
        f"{actor}.optim.lr": 0.001,
        f"{actor}.ppo_mini_batch_size": 1,
        f"{actor}.ppo_micro_batch_size_per_gpu": 1,
        "trainer.total_training_steps": 1,
        "trainer.val_before_train": False,
        "trainer.resume_mode": "disable",
        "trainer.default_local_dir": tmp_path / "checkpoints",
        "trainer.logger": "[file]",
        "trainer.n_gpus_per_node": 1,
        # What a CPU needs: the plug-in's platform and engine, and none of the kernels for GPUs.
        "trainer.device": "cpu",
        f"{rollout}.name": "scripted",
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.free_cache_engine": False,
        f"{hf}.path": model,
        f"{hf}.trust_remote_code": True,
        f"{hf}.use_remove_padding": False,
        f"+{hf}.override_config.attn_implementation": "eager",
        f"{actor}.strategy": "fsdp2",
        f"{actor}.use_torch_compile": False,
        f"{actor}.fsdp_config.use_torch_compile": False,
        # verl's actors reserve more CPUs than a small machine has.
        "ray_kwargs.ray_init.num_cpus": 16,
        "+ray_kwargs.ray_init.num_gpus": 1,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    }
    plugin = {
        "VERL_USE_EXTERNAL_MODULES": "cpu_plugin",
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_FILE_LOGGER_PATH": str(metrics),
        "CHECKSUMS": str(checksums),
        # Of verl's workers too.
        "PYTHONPATH": os.pathsep.join(map(str, [HERE, ROOT, ROOT / "proto"])),
    }
    done = await run_program(
        sys.executable,
        "-m",
        "verl.trainer.main_ppo",
        *(f"{name}={value}" for name, value in overrides.items()),
        cwd=tmp_path,
        env={**os.environ, **plugin},
    )
    assert done.status == 0, (done.out + done.err)[-5000:]
    step = json.loads(metrics.read_text().splitlines()[0])["data"]
    # One member of the group clicked, the other did nothing.
    assert (step["critic/score/min"], step["critic/score/mean"], step["critic/score/max"]) == (0.0, 0.5, 1.0)
    assert step["actor/grad_norm"] > 0
    before, after = checksums.read_text().splitlines()
    assert before != after, "the engine must receive other weights after the step"
