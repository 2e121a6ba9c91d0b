"""The model that learns: forward passes over rows with one image each.

transformers attends to the images of a batch one after the other unless flash attention is installed. All images here
have one size, so their patches are one batch and their positions are computed once: a step of 128 rows takes 0.15 s
instead of 0.36 s on an H200. `tests/slime/test_learn_real.py` compares both with transformers' own forward.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from trainer.learn import LearnError

_TEMPORAL = 2  # a still image fills both frames of a patch


@contextmanager
def memory_errors(remedy: str = "") -> Iterator[None]:
    """Raise one error without GPU memory: cuBLAS and cuDNN do not take theirs from torch, and have errors of their own.

    Raises:
        torch.OutOfMemoryError: There is no remedy.
        LearnError: There is one, which it names.
    """
    try:
        yield
    except LearnError:
        raise
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "_STATUS_ALLOC_FAILED" not in str(error):
            raise
        if remedy:
            raise LearnError(f"no GPU memory is left: {error}; {remedy}") from error
        raise torch.OutOfMemoryError(str(error)) from error


class Policy:
    """A Qwen3-VL on one device, in float32 with bfloat16 arithmetic on a GPU."""

    def __init__(self, checkpoint: Path, *, device: str, image_px: tuple[int, int]) -> None:
        """Load a checkpoint. Raises: LearnError: It has another architecture."""
        from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor  # noqa: PLC0415 -- seconds
        from transformers.models.qwen3_vl import modeling_qwen3_vl  # noqa: PLC0415

        try:
            kind = AutoConfig.from_pretrained(checkpoint).model_type
        except (OSError, ValueError) as error:
            raise LearnError(f"checkpoint {checkpoint}: cannot be read: {error}; run the stage `demos`") from error
        if kind != "qwen3_vl":
            raise LearnError(
                f"checkpoint {checkpoint}: its model is {kind}, and only qwen3_vl learns here; use another"
            )
        self._modeling: Any = modeling_qwen3_vl
        self.checkpoint = checkpoint
        # Nearly every batch has another shape. With cuDNN, attention took half of the processor time of sampling.
        torch.backends.cuda.enable_cudnn_sdp(False)
        self.device = torch.device(device)
        self.model: Any = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32).to(self.device)
        self.processor: Any = AutoProcessor.from_pretrained(checkpoint, trust_remote_code=True)
        self.tokenizer = self.processor.tokenizer
        self.end_id = int(self.tokenizer.eos_token_id)
        self.pad_id = int(self.tokenizer.pad_token_id)
        self.image_id = int(self.tokenizer.convert_tokens_to_ids("<|image_pad|>"))
        # A sampled image placeholder would shift all later images.
        self._suppressed = torch.tensor([i for i in self.tokenizer.all_special_ids if i != self.end_id])
        self._suppressed = self._suppressed.to(self.device)
        self._set_up_images(image_px)
        self._encode_images = self._encode

    def compile(self) -> None:
        """Compile the layers: most of a training step is moving memory between small operations, which this joins."""
        self._encode_images = torch.compile(self._encode)
        for layer in self.model.model.language_model.layers:
            layer.compile()

    def _set_up_images(self, image_px: tuple[int, int]) -> None:
        self.image_px = image_px
        """Width and height of every image."""
        images, visual = self.processor.image_processor, self.model.model.visual
        self._patch, self._merge = int(images.patch_size), int(images.merge_size)
        width, height = image_px
        unit = self._patch * self._merge
        if width % unit or height % unit:
            raise LearnError(f"screen {width}x{height}: both sides must be multiples of {unit}; choose such a size")
        self.grid = (height // self._patch, width // self._patch)
        """Rows and columns of patches in an image."""
        self.image_token_count = self.grid[0] * self.grid[1] // self._merge**2
        self._mean = torch.tensor(images.image_mean, device=self.device)
        self._std = torch.tensor(images.image_std, device=self.device)
        grid_thw = torch.tensor([[1, *self.grid]])
        taps, weights = self._modeling.get_vision_interpolation_indices_and_weights(
            grid_thw,
            num_grid_per_side=visual.num_grid_per_side,
            mode=visual.interpolation_mode,
            align_corners=visual.interpolation_align_corners,
            spatial_merge_size=self._merge,
        )
        self._taps, self._tap_weights = taps.to(self.device), weights.to(self.device)
        places = self._modeling.get_vision_position_ids(grid_thw, self._merge).to(self.device)
        self._rope = visual.rotary_pos_emb(torch.zeros(1, device=self.device), places)

    # Images

    def patches(self, frames_BHW3: torch.Tensor) -> torch.Tensor:
        """Return frames (uint8) as the image processor's patches: (batch, patches, values)."""
        batch, (rows, columns) = len(frames_BHW3), self.grid
        pixels = ((frames_BHW3.to(self.device).float() / 255 - self._mean) / self._std).permute(0, 3, 1, 2)
        m, p = self._merge, self._patch
        pixels = pixels.reshape(batch, 3, rows // m, m, p, columns // m, m, p).permute(0, 2, 5, 3, 6, 1, 4, 7)
        both = pixels.unsqueeze(6).expand(*pixels.shape[:6], _TEMPORAL, p, p)
        return both.reshape(batch, rows * columns, -1)

    def _encode(self, patches_BPV: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the embeddings of image tokens, (batch x tokens, width), and those for the first text layers."""
        visual, (batch, count, _) = self.model.model.visual, patches_BPV.shape
        # A patch is as large as the kernel, and cuDNN is slow at that: github.com/huggingface/transformers/issues/45750
        kernel = visual.patch_embed.proj
        hidden = torch.nn.functional.linear(patches_BPV, kernel.weight.flatten(1), kernel.bias)
        hidden = hidden + (visual.pos_embed(self._taps) * self._tap_weights[:, :, None]).sum(1)
        deep: list[torch.Tensor] = []
        for index, block in enumerate(visual.blocks):
            hidden = hidden + self._attend(block.attn, block.norm1(hidden))
            hidden = hidden + block.mlp(block.norm2(hidden))
            if index in visual.deepstack_visual_indexes:
                merger = visual.deepstack_merger_list[visual.deepstack_visual_indexes.index(index)]
                deep.append(merger(hidden.reshape(batch * count, -1)))
        return visual.merger(hidden.reshape(batch * count, -1)), deep

    def _attend(self, attention: Any, hidden_BPC: torch.Tensor) -> torch.Tensor:
        batch, count, _ = hidden_BPC.shape
        query, key, value = attention.qkv(hidden_BPC).reshape(batch, count, 3, attention.num_heads, -1).unbind(2)
        query, key = self._modeling.apply_rotary_pos_emb_vision(query, key, *self._rope)
        heads = (part.transpose(1, 2).to(value.dtype) for part in (query, key, value))
        mixed = torch.nn.functional.scaled_dot_product_attention(*heads)
        projected: torch.Tensor = attention.proj(mixed.transpose(1, 2).reshape(batch, count, -1))
        return projected

    # Text

    def positions(self, ids_BT: torch.Tensor, place_BT: torch.Tensor | None = None) -> torch.Tensor:
        """Return the three rotary positions of each token, (3, batch, tokens). Each row has one image or none.

        Args:
            place_BT: Where each token lies in its own row, if rows are joined; see `hidden`.
        """
        length = ids_BT.shape[1]
        place = torch.arange(length, device=ids_BT.device)[None] if place_BT is None else place_BT
        is_image = ids_BT == self.image_id
        has_image = is_image.any(1, keepdim=True)
        start = torch.where(has_image, is_image.int().argmax(1, keepdim=True), length)
        inside = place - start
        rows, columns = self.grid[0] // self._merge, self.grid[1] // self._merge
        after = place - self.image_token_count + max(rows, columns)
        text = torch.where(inside >= self.image_token_count, after, place)
        vision = (start, start + inside // columns, start + inside % columns)
        return torch.stack([torch.where(is_image, each, text) for each in vision])

    def hidden(
        self,
        ids_BT: torch.Tensor,
        patches_IPV: torch.Tensor,
        *,
        use_cache: bool,
        image_B: torch.Tensor | None = None,
        branch_BT: torch.Tensor | None = None,
        place_BT: torch.Tensor | None = None,
    ) -> Any:
        """Run the model on rows of one image each, padded on their right; returns transformers' output.

        Args:
            use_cache: Whether to return keys and values.
            image_B: Index of each row's image, if rows share images; None if there is one for each row.
            branch_BT: If rows with equal beginnings are joined to one: 0 for the tokens of the beginning, and the
                number of its own row for each other token. It attends to the beginning and to its own row alone.
            place_BT: Where each token of joined rows lies in its own row.

        Raises:
            LearnError: A row has more or less than one image.
        """
        is_image = ids_BT == self.image_id
        count = len(patches_IPV) if image_B is None else len(image_B)
        if int(is_image.sum()) != count * self.image_token_count:
            raise LearnError("rows: each must hold one image; set images_per_row to 1")
        embeds = self.model.get_input_embeddings()(ids_BT)
        image_embeds, deep = self._encode_images(patches_IPV)
        if image_B is not None:
            # Repeated for the rows that show them.
            by_image = (each.unflatten(0, (-1, self.image_token_count)) for each in (image_embeds, *deep))
            image_embeds, *deep = (each[image_B].flatten(0, 1) for each in by_image)
        embeds = embeds.masked_scatter(is_image[..., None].expand_as(embeds), image_embeds.to(embeds.dtype))
        return self.model.model.language_model(
            inputs_embeds=embeds,
            attention_mask=None if branch_BT is None else _visible(branch_BT),
            position_ids=self.positions(ids_BT, place_BT),
            visual_pos_masks=is_image,
            deepstack_visual_embeds=deep,
            use_cache=use_cache,
        )

    def arithmetic(self, *, cache_casts: bool = True) -> torch.autocast:
        """Return the context of forward passes."""
        is_gpu = self.device.type == "cuda"
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=is_gpu, cache_enabled=cache_casts)

    def logits(
        self,
        ids_BT: torch.Tensor,
        patches_IPV: torch.Tensor,
        predicted: tuple[torch.Tensor, torch.Tensor],
        **joined: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the logits for the tokens at `predicted`, (rows, columns); for the other arguments see `hidden`."""
        with self.arithmetic():
            hidden = self.hidden(ids_BT, patches_IPV, use_cache=False, **joined).last_hidden_state
            rows, columns = predicted
            return self.next_logits(hidden[rows, columns - 1])

    def next_logits(self, hidden_BC: torch.Tensor) -> torch.Tensor:
        """Return the logits after positions with these states, (batch, vocabulary)."""
        logits: torch.Tensor = self.model.lm_head(hidden_BC)
        return logits.float().index_fill(-1, self._suppressed, -torch.inf)


def _visible(branch_BT: torch.Tensor) -> torch.Tensor:
    """Return which tokens each token of joined rows attends to: (batch, 1, tokens, tokens)."""
    query, key = branch_BT[:, :, None], branch_BT[:, None, :]
    length = branch_BT.shape[1]
    is_before = torch.ones(length, length, dtype=torch.bool, device=branch_BT.device).tril()
    return (((key == 0) | (key == query)) & is_before)[:, None]
