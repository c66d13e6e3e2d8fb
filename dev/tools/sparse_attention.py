"""An imitated node that has MiniMax H3's blocks attend to some blocks of keys only, as one of
ComfyUI 0.36 does: it gives a block its attention in calls that have enough tokens, at some sigmas.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch


class Attended(NamedTuple):
    """What one call of the function was given."""

    block: int
    tokens: int
    sigma: float


class SparseAttention:
    """What the node knows of one model, from step to step."""

    def __init__(
        self, least: int = 0, sigma: float = 1.0, *, block: int = 8, part: int = 2, fails: int = 0
    ) -> None:
        """Set up; nothing was called.

        Args:
            least: with fewer tokens, all is attended to.
            sigma: likewise above it.
            block: so many keys are left out or attended to together.
            part: one in so many blocks of keys is attended to.
            fails: which call of the function raises, from 1 on; 0 for none.
        """
        self.least, self.sigma = least, sigma
        self.block, self.part, self._fails = block, part, fails
        self.attended: list[Attended] = []
        self._means: dict[tuple[int, int], torch.Tensor] = {}
        self._options: object = None

    @property
    def calls(self) -> int:
        """How often the function was called in this run."""
        return len(self.attended)

    def begin_run(self) -> None:
        """Forget the run before."""
        self.attended.clear()
        self._means.clear()

    def patched(self, model: Any) -> Any:
        """Return a model whose blocks are called so.

        Raises:
            ValueError: its blocks take no attention.
        """
        blocks = model.model.diffusion_model.blocks
        if "attention" not in inspect.signature(type(blocks[0]).forward).parameters:
            raise ValueError("blocks must take an attention, as MiniMax H3's of ComfyUI 0.36 do")
        clone = model.clone()
        for number, block in enumerate(blocks):
            patch = self._patch(number, block)
            clone.set_model_patch_replace(patch, "dit", "double_block", number)
        return clone

    def _patch(self, number: int, block: Any) -> Any:
        def attention(h: Any, rope_freqs: Any = None, transformer_options: Any = {}) -> Any:  # noqa: B006
            assert transformer_options is self._options
            sigma = round(float(transformer_options["sigmas"][0]), 5)
            self.attended.append(Attended(number, h.shape[0], sigma))
            if len(self.attended) == self._fails:
                raise ZeroDivisionError
            return self._attend(number, block.attn, h, rope_freqs)

        def patch(args: dict[str, Any], extra: dict[str, Any]) -> Any:
            self._options = args["transformer_options"]
            sigma = float(args["transformer_options"]["sigmas"][0])
            if args["img"].shape[0] >= self.least and sigma <= self.sigma:
                args = {**args, "attention": attention}
            return extra["original_block"](args)

        return patch

    def _attend(self, number: int, attn: Any, h: torch.Tensor, rope_freqs: Any) -> torch.Tensor:
        """As the block's own, but for the keys, and a gate where there is one."""
        import comfy.quant_ops

        tokens, heads = h.shape[0], attn.heads
        q, k, v = attn.qkv_proj(h).view(tokens, 3, heads, attn.head_dim).unbind(1)
        q, k = comfy.quant_ops.ck.rms_rope_split_half(
            q[None].contiguous(),
            k[None].contiguous(),
            rope_freqs,
            attn.q_norm.weight.to(h),
            attn.k_norm.weight.to(h),
            epsilon=attn.q_norm.eps,
            rot_dim=2 * rope_freqs.shape[-3],
        )
        kept = self._kept(number, k[0])
        q, k, v = (each.transpose(0, 1)[None] for each in (q[0], k[0, kept], v[kept]))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        out = out[0].transpose(0, 1).reshape(tokens, -1)
        gate = getattr(attn, "to_gate_compress", None)
        result: torch.Tensor = attn.out_proj(out if gate is None else out * gate(h).sigmoid())
        return result

    def _kept(self, number: int, k: torch.Tensor) -> torch.Tensor:
        """The keys `[tokens, heads, D]` of those blocks that differ most from what all keys were in
        the step before.
        """
        tokens = k.shape[0]
        count = -(-tokens // self.block)
        mean = k.float().mean(0)
        last = self._means.get((number, tokens), torch.zeros_like(mean))
        self._means[number, tokens] = mean
        distance = (k.float() - last).square().sum((1, 2))
        padded = torch.nn.functional.pad(distance, (0, count * self.block - tokens))
        scores = padded.view(count, self.block).sum(1)  # in the same order each time, on a GPU too
        blocks = scores.topk(-(-count // self.part)).indices.sort().values
        places = blocks[:, None] * self.block + torch.arange(self.block, device=k.device)
        return places.flatten().clamp(max=tokens - 1)
