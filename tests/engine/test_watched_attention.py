"""No model of the host keeps what another node's attention gets or gives: else none could be
captured on a user's word (`vouched`).
"""

from __future__ import annotations

from typing import Any

import pytest

from warmgraph_backends.cuda_graphs.vouched import Vouched
from warmgraph_backends.host_api.options import ATTENTION
from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host

from .transformer_runs import EXPECTED


class Attends:
    """Another node's attention, which counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return function(*args, **kwargs)


def _watched(model: Any) -> tuple[Any, Attends, list[Any]]:
    """The model under such an attention, and what becomes of it after each step."""
    from comfy.patcher_extension import WrappersMP

    clone, attends, found = model.clone(), Attends(), []
    clone.model_options.setdefault("transformer_options", {})[ATTENTION] = attends
    vouched = Vouched(lambda: True)
    vouched.begin_run()

    def step(executor: Any, *args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        with vouched.look(values).watch:  # type: ignore[union-attr]
            result = executor(*args, **kwargs)
        found.append(vouched.look(values))
        return result

    clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "watches", step)
    return clone, attends, found


@pytest.mark.parametrize("kind", EXPECTED)
def test_no_transformer_keeps_what_an_attention_is_given(host: Host, kind: str) -> None:
    if not transformers.is_here(kind):
        pytest.skip(f"this ComfyUI has no {kind}")
    model, attends, found = _watched(transformers.load(kind))
    text = transformers.conditioning(kind, 13)
    latent = transformers.latent(kind, height=8, width=8, batch=1, frames=1)
    host.sample(model, text, text, latent=latent, steps=1, cfg=1.0, scheduler="simple")
    assert attends.calls > 0 and found == [(attends, None, None)]


def test_no_unet_does(host: Host) -> None:
    plain, clip, _ = host.load("narrowxl")
    model, attends, found = _watched(plain)
    text = host.encode(clip, "a lake")
    host.sample(model, text, text, steps=1, cfg=1.0)
    assert attends.calls > 0 and found == [(attends, None, None)]
