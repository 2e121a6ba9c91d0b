"""Sample replies token by token, for many requests at once.

A request joins when there is a free slot and leaves when its reply ends, so no reply waits for the longest one. Keys
and values of a slot stay at one place on the device. So the forward pass of one token has the same shapes each time,
and on a GPU it is one CUDA graph instead of some hundred kernels that Python starts one by one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainer.learn.policy import Policy, memory_errors

#: Room for tokens grows in such steps; each step needs a new graph.
_ROOM_STEP = 128
_WARMUP_RUNS = 2


@dataclass(slots=True, kw_only=True, eq=False)
class SamplerRequest:
    """What to reply to, and the reply so far."""

    ids: Sequence[int] | npt.NDArray[np.int32]
    """Tokens, with a placeholder for each token of the image."""
    frame_HW3: torch.Tensor
    limit: int
    """Most tokens of the reply."""
    temperature: float
    """0 for the most likely reply."""
    picture: object = field(default_factory=object)
    """Equal for equal frames, which are then encoded once."""
    reply_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    """Log-probabilities under the distribution that was sampled from; at temperature 0, the model's own."""
    is_complete: bool = False
    """Whether the reply ended with the end token."""


class ReplySampler:
    """Slots of one policy. Weights may change between two tokens; a reply is then sampled from both."""

    def __init__(self, policy: Policy, *, generator: torch.Generator, slot_count: int) -> None:
        """Allocate slots; room for tokens follows with the first prompts."""
        text = policy.model.config.text_config
        self._policy, self._generator = policy, generator
        self._text: Any = policy.model.model.language_model
        self._head_dim: int = text.head_dim
        self._kv_head_count: int = text.num_key_value_heads
        self._running: dict[int, SamplerRequest] = {}
        self._free = list(reversed(range(slot_count)))
        device = policy.device
        self._rows = torch.arange(slot_count, device=device)
        self._token = torch.zeros(slot_count, dtype=torch.long, device=device)
        self._length = torch.zeros_like(self._token)
        """Tokens of each slot whose keys and values are stored."""
        self._position = torch.zeros_like(self._token)
        """Rotary position of the token of each slot."""
        self._temperature = torch.ones(slot_count, device=device)
        width, height = policy.image_px
        # Kept: the kernel clears new memory, so 200 pictures in a new tensor took 50 ms instead of 12.
        self._frames = torch.empty(
            (slot_count, height, width, 3), dtype=torch.uint8, pin_memory=policy.device.type == "cuda"
        )
        self._keys: list[torch.Tensor] = []
        """Cache of each layer: (slots, heads, room, head_dim)."""
        self._values: list[torch.Tensor] = []
        self._room = 0
        self._graph: Callable[[], torch.Tensor] | None = None

    @property
    def free_count(self) -> int:
        """Slots without a request."""
        return len(self._free)

    @property
    def running_count(self) -> int:
        """Slots with a request."""
        return len(self._running)

    @memory_errors()
    def add(self, prompts: Sequence[SamplerRequest]) -> list[SamplerRequest]:
        """Read at most `free_count` prompts and sample their first tokens; returns those whose replies have ended.

        Raises:
            torch.OutOfMemoryError: There is no memory for so many; none was added.
        """
        policy = self._policy
        lengths = [len(each.ids) for each in prompts]
        longest = max(lengths)
        self._make_room(longest + max(each.limit for each in prompts))
        table = np.full((len(prompts), longest + 1), policy.pad_id)
        for row, each in zip(table, prompts, strict=True):
            row[: len(each.ids)] = each.ids
        ids = torch.from_numpy(table).to(policy.device)
        last = torch.tensor(lengths, device=policy.device)
        each_row = torch.arange(len(prompts), device=policy.device)
        # Padding follows the prompt, so causal attention never sees it.
        with torch.no_grad(), policy.arithmetic():
            # Members of a group begin with one picture.
            frames = {each.picture: each.frame_HW3 for each in prompts}
            places = {picture: place for place, picture in enumerate(frames)}
            image = torch.tensor([places[each.picture] for each in prompts], device=policy.device)
            patches = policy.patches(torch.stack([*frames.values()], out=self._frames[: len(frames)]))
            state = policy.hidden(ids[:, :longest], patches, use_cache=True, image_B=image)
            logits = policy.next_logits(state.last_hidden_state[each_row, last - 1])
        slots = [self._free.pop() for _ in prompts]
        at = torch.tensor(slots, device=policy.device)
        for index, layer in enumerate(state.past_key_values.layers):
            self._keys[index][at, :, :longest] = layer.keys.to(self._keys[index].dtype)
            self._values[index][at, :, :longest] = layer.values.to(self._values[index].dtype)
        # The last token of a prompt may belong to an image, whose tokens have other positions.
        after = policy.positions(ids)[0, each_row, last]
        self._length[at], self._position[at] = last, after
        self._temperature[at] = torch.tensor([each.temperature for each in prompts], device=policy.device)
        self._running.update(zip(slots, prompts, strict=True))
        return self._take(slots, *choose(logits, self._temperature[at], self._generator), at)

    def step(self) -> list[SamplerRequest]:
        """Sample one more token of each reply; returns the requests whose replies have ended."""
        slots = list(self._running)
        if not slots:
            return []
        logits = self._forward() if self._graph is None else self._graph()
        at = torch.tensor(slots, device=self._policy.device)
        self._length[at] += 1
        self._position[at] += 1
        return self._take(slots, *choose(logits[at], self._temperature[at], self._generator), at)

    def drop(self) -> None:
        self._free += self._running
        self._running.clear()

    def _take(
        self, slots: Sequence[int], token_B: torch.Tensor, log_prob_B: torch.Tensor, at: torch.Tensor
    ) -> list[SamplerRequest]:
        self._token[at] = token_B
        ended = []
        for slot, token, log_prob in zip(slots, token_B.tolist(), log_prob_B.tolist(), strict=True):
            request = self._running[slot]
            request.reply_ids.append(token)
            request.log_probs.append(log_prob)
            request.is_complete = token == self._policy.end_id
            if request.is_complete or len(request.reply_ids) >= request.limit:
                ended.append(request)
                del self._running[slot]
                self._free.append(slot)
        return ended

    # The forward pass of one token

    def _make_room(self, tokens: int) -> None:
        room = -(-tokens // _ROOM_STEP) * _ROOM_STEP
        if room <= self._room:
            return
        self._graph = None
        dtype = torch.bfloat16 if self._policy.device.type == "cuda" else torch.float32
        shape = (len(self._rows), self._kv_head_count, room, self._head_dim)
        for stored in (self._keys, self._values):
            # Zeros, not any memory: a masked NaN is still NaN after the product with its weight of 0.
            larger = [torch.zeros(shape, dtype=dtype, device=self._policy.device) for _ in self._text.layers]
            for new, old in zip(larger, stored, strict=False):
                new[:, :, : self._room] = old
            stored[:] = larger
        self._room = room
        if self._policy.device.type == "cuda":
            self._graph = self._capture()

    def _capture(self) -> Callable[[], torch.Tensor]:
        """Record the forward pass. Its inputs and outputs keep their places; writes go where the next one writes."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARMUP_RUNS):
                self._forward()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            logits = self._forward()

        def replay() -> torch.Tensor:
            graph.replay()
            return logits

        return replay

    def _forward(self) -> torch.Tensor:
        """Return the logits after the token of each slot, and store its keys and values. Free slots give anything."""
        rotary, policy = self._text.rotary_emb, self._policy
        # Cached casts of weights would outlive an update of the weights inside a graph.
        with torch.no_grad(), policy.arithmetic(cache_casts=False):
            place = self._length.clamp_max(self._room - 1)
            mask = (torch.arange(self._room, device=policy.device)[None] <= place[:, None])[:, None, None]
            # Text has the same position on all three axes, so it is the usual rotation.
            angle = self._position.float()[:, None, None] * rotary.inv_freq.float()
            angle = torch.cat([angle, angle], dim=-1)
            turn = angle.cos() * rotary.attention_scaling, angle.sin() * rotary.attention_scaling
            hidden = policy.model.get_input_embeddings()(self._token)
            for layer, keys, values in zip(self._text.layers, self._keys, self._values, strict=True):
                normal = layer.input_layernorm(hidden)
                hidden = hidden + self._attend(
                    layer.self_attn, normal, keys=keys, values=values, turn=turn, place=place, mask=mask
                )
                hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            return policy.next_logits(self._text.norm(hidden))

    def _attend(
        self,
        attention: Any,
        hidden_SC: torch.Tensor,
        *,
        keys: torch.Tensor,
        values: torch.Tensor,
        turn: tuple[torch.Tensor, torch.Tensor],
        place: torch.Tensor,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        count = len(hidden_SC)
        heads = (count, -1, self._head_dim)
        query = _rotated(attention.q_norm(attention.q_proj(hidden_SC).view(heads)), *turn)
        keys[self._rows, :, place] = _rotated(attention.k_norm(attention.k_proj(hidden_SC).view(heads)), *turn).to(
            keys.dtype
        )
        values[self._rows, :, place] = attention.v_proj(hidden_SC).view(heads).to(values.dtype)
        # Query heads that share keys are rows of one query, so that keys need no copies.
        query = query.reshape(count, self._kv_head_count, -1, self._head_dim).to(keys.dtype)
        mixed = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        projected: torch.Tensor = attention.o_proj(mixed.reshape(count, -1))
        return projected


def choose(
    logits_BV: torch.Tensor, temperature_B: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a token for each row, the most likely one at temperature 0, and its log-probability."""
    is_greedy = temperature_B == 0
    table = torch.log_softmax(logits_BV / torch.where(is_greedy, 1.0, temperature_B)[:, None], dim=-1)
    # Of exponential variables with rates p, the one at i is the smallest with probability p[i].
    noise = torch.empty_like(table).exponential_(generator=generator)
    token = torch.where(is_greedy, table.argmax(-1), (table.exp() / noise).argmax(-1))
    return token, table.gather(1, token[:, None])[:, 0]


def _rotated(vectors_SHD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = vectors_SHD.chunk(2, dim=-1)
    return vectors_SHD * cos + torch.cat([-high, low], dim=-1) * sin
