"""Doubles of slime and its engine without torch, sockets or a checkpoint.

`make slime-proof` checks `Sample` against the real class.

```python
engine = ScriptedEngine(say)
with stand_in_slime(engine):
    sample = await generate(args, Sample(index=0, metadata={"task_id": "fake/save-note"}), {"max_new_tokens": 64})
```
"""

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

from PIL import Image

from trainer.learn.server import answer_of, picture_of
from trainer.learn.slime_job import OVERRIDES
from trainer.slime.config import SlimeConfig
from trainer.slime.monitor import metrics_of, records_of
from trainer.slime.play.engine import SlimeEngine
from trainer.tokens.engine_client import EngineClient
from trainer.tokens.picture_files import PictureFiles

IMAGE = "<|image_pad|>"
END = "<|im_end|>"
_SPECIAL = ("<|im_start|>", END, "<|vision_start|>", "<|vision_end|>", IMAGE)
_PATCH_PX, _MERGE = 16, 2


@dataclass
class Sample:
    """`slime.utils.types.Sample`: the fields that the trainer reads or writes."""

    class Status(Enum):
        """slime's states of a sample."""

        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: Any = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: Any = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: Any = None
    rollout_top_p_token_offsets: Any = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    status: Enum = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    session_id: str | None = None
    non_generation_time: float = 0.0
    spec_info: Any = field(default_factory=SimpleNamespace)
    prefix_cache_info: Any = field(default_factory=SimpleNamespace)

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Any = None,
        log_probs: Any = None,
        trainable: bool = True,
        meta_info: dict[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Append tokens with masks and log-probabilities. Raises: ValueError."""
        tokens = list(tokens or ())
        if trainable == (log_probs is None):
            raise ValueError("trainable tokens need log_probs, others must not have them")
        log_probs = list(log_probs) if trainable else [0.0] * len(tokens)
        if len(log_probs) != len(tokens):
            raise ValueError(f"{len(tokens)} tokens with {len(log_probs)} log-probabilities")
        self.response += text or ""
        self.tokens += tokens
        self.response_length += len(tokens)
        self.loss_mask = [*(self.loss_mask or ()), *([int(trainable)] * len(tokens))]
        self.rollout_log_probs = [*(self.rollout_log_probs or ()), *log_probs]
        if update_terminal_info and meta_info is not None and "weight_version" in meta_info:
            self.weight_versions.append(meta_info["weight_version"])


class Tokenizer:
    """One token per character and per special token."""

    eos_token = END

    def __init__(self) -> None:
        self.added_tokens_decoder = {
            number: SimpleNamespace(content=text, special=True) for number, text in enumerate(_SPECIAL)
        }

    def convert_tokens_to_ids(self, token: str) -> int:
        """Return a special token's id."""
        return _SPECIAL.index(token)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return a text's ids."""
        ids = []
        while text:
            special = next((token for token in _SPECIAL if text.startswith(token)), "")
            ids.append(_SPECIAL.index(special) if special else len(_SPECIAL) + ord(text[0]))
            text = text[len(special) or 1 :]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of ids."""
        return "".join(_SPECIAL[i] if i < len(_SPECIAL) else chr(i - len(_SPECIAL)) for i in ids)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, tokenize: bool, add_generation_prompt: bool, **_: Any
    ) -> str:
        """Render messages in Qwen's frame."""
        assert not tokenize
        text = "".join(f"<|im_start|>{message['role']}\n{_content(message['content'])}{END}\n" for message in messages)
        return f"{text}<|im_start|>assistant\n" if add_generation_prompt else text


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    image = f"<|vision_start|>{IMAGE}<|vision_end|>"
    return "".join(image if part["type"] == "image" else part["text"] for part in content)


class _Tensor(list[tuple[int, ...]]):
    """Rows of numbers with the methods of a tensor that we use."""

    def prod(self, *, dim: int) -> "_Tensor":
        assert dim == 1
        return _Tensor((a * b * c,) for a, b, c in self)

    def sum(self) -> int:
        return sum(row[0] for row in self)

    def is_floating_point(self) -> bool:
        return False


class ImageProcessor:
    """Counts patches of 16 px, merged 2 by 2."""

    merge_size = _MERGE

    def get_number_of_image_patches(self, height: int, width: int, options: Mapping[str, Any]) -> int:
        """Return the number of patches of an image."""
        _, rows, columns = _grid(width, height)
        return rows * columns

    def __call__(self, *, images: Sequence[Image.Image], return_tensors: str) -> dict[str, Any]:
        return {"image_grid_thw": _Tensor(_grid(image.width, image.height) for image in images)}


def _grid(width_px: int, height_px: int) -> tuple[int, int, int]:
    side_px = _PATCH_PX * _MERGE
    return 1, round(height_px / side_px) * _MERGE, round(width_px / side_px) * _MERGE


class Processor:
    """The processor of a vision model."""

    image_token = IMAGE
    chat_template = None

    def __init__(self) -> None:
        self.image_processor = ImageProcessor()


class ScriptedEngine:
    """SGLang's `/generate` with scripted replies."""

    def __init__(self, say: Callable[[str], str]) -> None:
        """Take the script, a function from the decoded prompt to the reply."""
        self.requests: list[Any] = []
        self.finish = "stop"
        self.prompt_token_error = 0
        self.say = say
        self.log_prob: Callable[[str], float] = lambda _: -0.5
        """The log-probability of a reply's first token."""
        self._tokenizer = Tokenizer()

    async def post(
        self, url: str, payload: Mapping[str, Any], *, max_retries: int, headers: Mapping[str, str] | None
    ) -> Any:
        """Handle one request; if the script raises, the engine fails."""
        sizes = [picture_of(uri).size for uri in _images(payload)]
        prompt: Sequence[int] = payload["input_ids"]
        image_tokens = sum(rows * columns // _MERGE**2 for _, rows, columns in (_grid(*size) for size in sizes))
        ids, log_probs, finish = self.generate(payload, prompt, payload["sampling_params"]["max_new_tokens"])
        return answer_of(
            self._tokenizer.decode(ids),
            ids,
            log_probs,
            finish=finish,
            prompt_tokens=len(prompt) - len(sizes) + image_tokens + self.prompt_token_error,
            weight_version="7",
        )

    def generate(self, request: Any, prompt: Sequence[int], limit: int) -> tuple[list[int], list[float], str]:
        """Record a request; return the reply's ids and log-probabilities, and why it finished."""
        self.requests.append(request)
        text = self._tokenizer.decode(prompt)
        ids = self._tokenizer.encode(self.say(text) + END)[:limit]
        finish = self.finish if ids[-1] == self._tokenizer.convert_tokens_to_ids(END) else "length"
        return ids, [self.log_prob(text) - position / 1000 for position in range(len(ids))], finish


#: Arguments of a small job that differ from slime's defaults.
SMALL_JOB: dict[str, Any] = {
    "hf_checkpoint": None,
    "rollout_batch_size": 1,
    "over_sampling_batch_size": 1,
    "n_samples_per_prompt": 2,
    "global_batch_size": 2,
    "rollout_shuffle": False,
    "rollout_max_response_len": 256,
    "prompt_data": None,
    "sglang_router_ip": "127.0.0.1",
    "sglang_router_port": 0,
    "sglang_server_concurrency": 8,
    "use_dynamic_batch_size": True,
    "max_tokens_per_gpu": 8192,
    "micro_batch_size": 1,
    "balance_data": False,
    "balance_by_flops": False,
    "wandb_always_use_train_step": False,
    "custom_rollout_log_function_path": "trainer.slime.hooks.log_rollout",
    "custom_eval_rollout_log_function_path": "trainer.slime.hooks.log_evaluation",
}


def stand_in_args(envd: Mapping[str, Any], **changed: Any) -> Namespace:
    """Return the arguments of a small job, without slime: those that the trainer reads."""
    return Namespace(**{**OVERRIDES, **SMALL_JOB, "save": None, "load": None, "envd": dict(envd), **changed})


def slime_engine(*, client: EngineClient | None = None, files: PictureFiles | None = None) -> SlimeEngine:
    """Return an engine of a sample within `stand_in_slime`, which makes one attempt."""
    return SlimeEngine(
        stand_in_args({}),
        Sample(index=0),
        {},
        config=SlimeConfig(hosts=("h:1",), engine_retries=1),
        client=cast(EngineClient, client),
        files=files,
    )


def rollout_metrics(args: Any, samples: Sequence[Any]) -> dict[str, float]:
    """Return the metrics of the rollouts among samples."""
    return metrics_of(records_of(args, samples))


def _images(payload: Mapping[str, Any]) -> Sequence[str]:
    return payload.get("image_data") or ()


def stand_in_state(*, has_vision: bool = True) -> SimpleNamespace:
    """Return a `GenerateState`."""
    return SimpleNamespace(tokenizer=Tokenizer(), processor=Processor() if has_vision else None, aborted=False)


@contextmanager
def stand_in_slime(engine: ScriptedEngine, *, has_vision: bool = True) -> Iterator[SimpleNamespace]:
    """Make `import slime` find doubles; yields the process's `GenerateState`."""
    state = stand_in_state(has_vision=has_vision)
    places: dict[str, dict[str, Any]] = {
        "slime": {},
        "slime.rollout": {},
        "slime.rollout.sglang_rollout": {"GenerateState": lambda args: state},
        "slime.rollout.filter_hub": {},
        "slime.rollout.filter_hub.base_types": {"DynamicFilterOutput": SimpleNamespace},
        "slime.utils": {},
        "slime.utils.data": {"read_file": lambda path: map(json.loads, Path(path).read_text("utf-8").splitlines())},
        "slime.utils.http_utils": {"post": engine.post, "get_rollout_num_engines": lambda args: 1},
    }
    modules = {}
    for name, attributes in places.items():
        modules[name] = ModuleType(name)
        modules[name].__dict__.update(attributes, __path__=[])
    with patch.dict(sys.modules, modules):
        yield state
