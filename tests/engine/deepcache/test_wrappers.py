"""DeepCache within other nodes' wrappers of a model's call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from .cached import CALLS, Pair, Patch, changed

#: DeepCache's other tests show what is compiled; these take minutes.
pytestmark = pytest.mark.slow


def _wrapped(kind: str) -> Patch:
    def around(executor: Any, *args: Any, **kwargs: Any) -> Any:
        if kind in ("apply_model", "diffusion_model"):
            args = (args[0] * 1.02, *args[1:])
        result = executor(*args, **kwargs)
        return [each * 0.99 for each in result] if isinstance(result, list) else result * 0.99

    return changed(lambda model: model.add_wrapper_with_key(kind, "another", around))


@pytest.mark.parametrize(
    "kind", ["predict_noise", "calc_cond_batch", "apply_model", "diffusion_model"]
)
def test_wrappers_of_the_host(xl: Pair, kind: str) -> None:
    assert xl.check(_wrapped(kind), branch=1) == CALLS


def _function(
    wrapper: Callable[[Callable[..., torch.Tensor], dict[str, Any]], torch.Tensor],
) -> Patch:
    return changed(lambda model: model.set_model_unet_function_wrapper(wrapper))


def test_a_wrapper_of_the_models_function(xl: Pair) -> None:
    def scaled(apply: Any, given: dict[str, Any]) -> torch.Tensor:
        result: torch.Tensor = apply(given["input"] * 1.02, given["timestep"], **given["c"])
        return result * 0.99

    assert xl.check(_function(scaled)) == CALLS


def _behind(patch: Patch, sample: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A way to sample under a patch that leaves a plain image as it is."""
    return lambda model, **sampling: sample(patch(model), **sampling)


def _sliced(value: Any, rows: slice, batch: int) -> Any:
    if isinstance(value, torch.Tensor) and value.shape[0] == batch:
        return value[rows]
    return value


def test_a_wrapper_that_runs_each_row_of_a_batch_by_itself(xl: Pair) -> None:
    """Its calls differ in nothing but their place in the evaluation."""

    def rows(apply: Any, given: dict[str, Any]) -> torch.Tensor:
        x, t = given["input"], given["timestep"]
        return torch.cat(
            [
                apply(
                    x[n : n + 1],
                    t[n : n + 1],
                    **{k: _sliced(v, slice(n, n + 1), len(x)) for k, v in given["c"].items()},
                )
                for n in range(len(x))
            ]
        )

    sample = _behind(_function(rows), xl.sample)  # it changes an image by rounding, if at all
    assert xl.check(sample=sample, width=72) == {"full": 6, "shallow": 8}


def test_a_wrapper_that_runs_tiles(xl: Pair) -> None:
    """As nodes for images larger than memory do."""

    def tiles(apply: Any, given: dict[str, Any]) -> torch.Tensor:
        x, t = given["input"], given["timestep"]
        return torch.cat(
            [apply(tile.contiguous(), t, **given["c"]) for tile in x.chunk(3, dim=3)], dim=3
        )

    assert xl.check(_function(tiles), width=192) == {"full": 9, "shallow": 12}


@pytest.mark.parametrize(
    ("causal", "schedule"),
    [
        *((True, "standard_static"), (False, "looped_uniform")),
        pytest.param(True, "looped_uniform", marks=pytest.mark.slow),
        pytest.param(False, "standard_static", marks=pytest.mark.slow),
    ],
)
def test_context_windows(xl: Pair, schedule: str, causal: bool) -> None:
    """Windows over a batch of images: several calls of one form in each evaluation. A schedule may
    move them from step to step.
    """
    windows = xl.patch(
        "ContextWindowsManual",
        context_length=3,
        context_overlap=1,
        context_schedule=schedule,
        context_stride=1,
        closed_loop=False,
        fuse_method="pyramid",
        dim=0,
        freenoise=False,
        cond_retain_index_list="",
        split_conds_to_windows=False,
        latent_retain_index_list="",
        causal_window_fix=causal,
    )
    xl.check(sample=_behind(windows, xl.sample), batch=7)
