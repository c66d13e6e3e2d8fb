"""Small VAEs of the host, of classes whose size no file tells, with random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

#: How the names of weights end that scale what there is.
_SCALES = ("norm1.weight", "norm2.weight", "norm_out.weight", "scale1", "scale2", "latents_std")


@contextmanager
def small_h3(*, layers: int = 2, heads: int = 4) -> Iterator[Callable[[], Any]]:
    """While this lasts, the host makes MiniMax H3's VAE small: heads of 64, an encoder of 32
    channels; gives what makes one.
    """
    from comfy.ldm.minimax import vae as host

    decoder = partial(host.ViT3DDecoder, num_layers=layers, heads=heads)
    whole = partial(host.MiniMaxH3VideoVAE, ch=32, ch_mult=(1,) * 6, num_res_blocks=1)
    with patch.multiple(host, ViT3DDecoder=decoder, MiniMaxH3VideoVAE=whole):
        yield whole


def h3_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """What a file of a small MiniMax H3 VAE holds; activations stay of order one."""
    with small_h3() as make, torch.device("meta"):
        shapes = {name: value.shape for name, value in make().state_dict().items()}
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        drawn = torch.randn(shape, generator=generator)
        if name.endswith(_SCALES):
            drawn = 1.0 + 0.1 * drawn
        elif drawn.dim() > 1:
            drawn = drawn / drawn[0].numel() ** 0.5
        else:
            drawn = 0.1 * drawn
        weights[name] = drawn
    return weights


def load_h3(weights: dict[str, torch.Tensor], **options: Any) -> Any:
    """A VAE by the host's own detection."""
    import comfy.sd

    with small_h3():
        return comfy.sd.VAE(sd=weights, **options)
