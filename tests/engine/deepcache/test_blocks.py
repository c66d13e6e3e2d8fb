"""DeepCache under patches of blocks.

What acts in blocks by itself equals the reference bit for bit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .cached import CALLS, Pair, Patch, by_turns, cache_of, cached, changed

#: DeepCache's other tests show what is compiled; these take minutes.
pytestmark = pytest.mark.slow


def _attention(name: str) -> Patch:
    """Like IPAdapter's first kind: more tokens to look at."""

    def more(q: Any, k: Any, v: Any, extra: Any) -> Any:
        gain = 1 + 0.1 * extra["transformer_index"]
        return q, torch.cat([k, k[:, :5]], 1), torch.cat([v, -gain * v[:, :5]], 1)

    return changed(lambda model: model.set_model_patch(more, name))


def _scaled(name: str) -> Patch:
    """By block, so that one in another's place shows."""

    def scale(x: torch.Tensor, extra: Any) -> torch.Tensor:
        return x * (1.05 + 0.02 * extra["transformer_index"] + 0.1 * extra["block_index"])

    return changed(lambda model: model.set_model_patch(scale, name))


def _replaced(name: str) -> Patch:
    """Like IPAdapter's second kind: attention that fades over the run, in outer and deep blocks."""

    def attention(q: Any, k: Any, v: Any, extra: Any) -> torch.Tensor:
        from comfy.ldm.modules.attention import optimized_attention

        gain = 0.5 + extra["sigmas"][0] / 30
        return gain * optimized_attention(q, k, v, extra["n_heads"])

    def act(model: Any) -> None:
        replace = getattr(model, f"set_model_{name}_replace")
        places = [("input", n) for n in range(6)] + [("output", n) for n in range(6)]
        for block, number in [*places, ("middle", 1)]:
            replace(attention, block, number)

    return changed(act)


def _blocks(name: str) -> Patch:
    def one(h: torch.Tensor, options: Any) -> torch.Tensor:
        return h * (1.0 + 0.03 * options["block"][1])

    def two(h: torch.Tensor, skip: torch.Tensor, options: Any) -> Any:
        h[:, ::2] *= 1.0 + 0.03 * options["block"][1]  # in place, as FreeU
        return h, skip * 0.9

    def middle(given: dict[str, Any]) -> dict[str, Any]:
        return {**given, "h": given["h"] * 1.5 + 0.1}

    def embedding(emb: torch.Tensor, channels: int, options: Any) -> torch.Tensor:
        return emb * 1.2

    patch = {
        "output_block_patch": two,
        "middle_block_after_patch": middle,
        "emb_patch": embedding,
    }.get(name, one)
    return changed(lambda model: model.set_model_patch(patch, name))


def _layers(model: Any) -> None:
    """Some packs handle layers of a class by themselves."""
    from comfy.ldm.modules.diffusionmodules.openaimodel import ResBlock

    def handle(layer: Any, x: Any, emb: Any, *others: Any) -> Any:
        return layer(x, emb * 1.1)

    model.set_model_patch((ResBlock, handle), "forward_timestep_embed_patch")


def _override(model: Any) -> None:
    def attention(original: Any, q: Any, k: Any, v: Any, *rest: Any, **named: Any) -> Any:
        return original(q, k, v * 1.3, *rest, **named)

    model.model_options["transformer_options"]["optimized_attention_override"] = attention


BLOCKS: dict[str, Patch] = {
    **{name: _attention(name) for name in ("attn1_patch", "attn2_patch")},
    **{name: _scaled(name) for name in ("attn1_output_patch", "middle_patch")},
    "attn2_output_patch": _scaled("attn2_output_patch"),
    **{f"{name}_replace": _replaced(name) for name in ("attn1", "attn2")},
    **{
        name: _blocks(name)
        for name in (
            "input_block_patch",
            "input_block_patch_after_skip",
            "output_block_patch",
            "middle_block_after_patch",
            "emb_patch",
        )
    },
    "forward_timestep_embed_patch": changed(_layers),
    "optimized_attention_override": changed(_override),
}


@pytest.mark.parametrize(("kind", "branch", "name"), by_turns(BLOCKS))
def test_patches_of_blocks(pairs: dict[str, Pair], kind: str, branch: int, name: str) -> None:
    assert pairs[kind].check(BLOCKS[name], branch=branch, width=72) == CALLS


def test_several_patches_together(xl: Pair) -> None:
    def patch(model: Any) -> Any:
        for each in BLOCKS.values():
            model = each(model)
        return model

    assert xl.check(patch, branch=2) == CALLS


def test_another_patch_of_a_kind_is_checked_by_itself(xl: Pair) -> None:
    """One that outer blocks cannot follow is noticed, whatever was there before it."""
    calls = 0

    def fair(h: torch.Tensor, options: Any) -> torch.Tensor:
        return h * 1.1

    def unfair(h: torch.Tensor, options: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return h * (1 + 1e-3 * calls)

    ours = cached(xl.model)
    for patch in (fair, unfair, fair):
        model = ours.clone()
        model.set_model_input_block_patch(patch)
        xl.sample(model)
        assert (cache_of(model).problem is not None) == (patch is unfair)


def test_patches_see_each_block_once_a_call_but_for_one_check(xl: Pair) -> None:
    """Patches that count live on it. The first full call of a model that has them is checked by one
    more call of the outer blocks; no later one is.
    """
    seen: list[tuple[Any, float]] = []

    def note(h: torch.Tensor, options: Any) -> torch.Tensor:
        seen.append((options["block"], float(options["sigmas"][0])))
        return h

    ours = cached(xl.model)
    ours.set_model_input_block_patch(note)
    blocks = len(xl.unet.input_blocks)
    for check in (1, 0):
        seen.clear()
        xl.sample(ours)
        assert len(seen) == len(set(seen)) + check == 3 * blocks + 4 + check
