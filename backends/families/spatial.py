"""Regions of the host's SpatialTransformer before its first block and after its last.

Both are the host's own forward: run up to the first block, or with the blocks left out. Between
them the blocks are called as the host calls them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..code.packs import owner_of
from ..code.sources import is_foreign
from ..contract import InputSpec
from ..kinds.layout import CHANNELS_LAST
from ..plans.binding import OR_NONE, TAKEN, Arguments
from ..plans.plan import Form, RegionCall, host_forward, shallow_copy
from ..reasons import Reason, of


class _ReachedError(Exception):
    """Ends the host's forward at its first transformer block, carrying the tokens."""

    def __init__(self, tokens: torch.Tensor) -> None:
        super().__init__()
        self.tokens = tokens


class _Stop(torch.nn.Module):
    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        raise _ReachedError(x)


class _Give(torch.nn.Module):
    def __init__(self, tokens: torch.Tensor) -> None:
        super().__init__()
        self.tokens = tokens

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        return self.tokens


class Entry(Form):
    """SpatialTransformer up to its first block: `x [batch, C, h, w]` -> `[batch, tokens, C']`."""

    family = "unet"
    name = "entry"
    layout = CHANNELS_LAST
    children: tuple[str, ...] | None = ("norm", "proj_in")

    def label(self, module: Any) -> str:
        return f"Transformer entry {module.in_channels}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        return (InputSpec("x", dtype, ("batch", module.in_channels, "height", "width")),)

    def reference(self, module: Any, *inputs: Any) -> torch.Tensor:
        cut = shallow_copy(module, transformer_blocks=torch.nn.ModuleList([_Stop()]))
        try:
            host_forward(cut, inputs[0], None, {})
        except _ReachedError as reached:
            return reached.tokens
        raise RuntimeError("SpatialTransformer.forward must call its transformer blocks")


class Exit(Form):
    """SpatialTransformer after its last block: `(tokens [batch, C', height, width], x [batch, C,
    height, width])` -> as x. Tokens come as an image (in channels-last order the same memory), so
    their number needs no symbol.
    """

    family = "unet"
    name = "exit"
    layout = CHANNELS_LAST
    children: tuple[str, ...] | None = ("proj_out",)

    def label(self, module: Any) -> str:
        return f"Transformer exit {module.in_channels}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        inner = module.proj_out.weight.shape[1]
        return (
            InputSpec("tokens", dtype, ("batch", inner, "height", "width")),
            InputSpec("x", dtype, ("batch", module.in_channels, "height", "width")),
        )

    def reference(self, module: Any, *inputs: Any) -> torch.Tensor:
        tokens, x = inputs
        cut = shallow_copy(
            module,
            norm=torch.nn.Identity(),
            proj_in=torch.nn.Identity(),
            transformer_blocks=torch.nn.ModuleList([_Give(tokens.movedim(1, 3).flatten(1, 2))]),
        )
        return host_forward(cut, x, None, {})


ENTRY, EXIT = Entry(), Exit()


#: Of the module as a whole; what is taken begins with the step's options.
ARGUMENTS = Arguments(x=TAKEN, context=OR_NONE, transformer_options=OR_NONE)


def serve_spatial(
    module: Any, calls: Sequence[RegionCall], options: Any, x: torch.Tensor, context: Any
) -> torch.Tensor | None:
    entry, leave = calls
    options = {} if options is None else options
    tokens = entry(x)
    if tokens is None:
        return None
    contexts = context if isinstance(context, list) else None
    # What the host's forward leaves for patches to read (see `spatial_transformer_change`).
    options["activations_shape"] = list(x.shape)
    for i, block in enumerate(module.transformer_blocks):
        options["block_index"] = i
        chosen = context if contexts is None else contexts[i]
        tokens = block(tokens, context=chosen, transformer_options=options)
    image = tokens.unflatten(1, x.shape[2:]).movedim(3, 1)
    result: torch.Tensor | None = leave(image, x)
    return EXIT.reference(module, image, x) if result is None else result


class _Witness(torch.nn.Module):
    """A transformer block that records its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        options = kwargs.get("transformer_options", {})
        shapes = [tuple(a.shape) for a in args]
        self.calls.append((shapes, sorted(kwargs), kwargs.get("context"), dict(options)))
        return args[0] + 1.0


class _Uncompiled:
    """A region's call by the host's code."""

    def __init__(self, form: Form, module: torch.nn.Module) -> None:
        self._form, self._module = form, module

    def __call__(self, *inputs: Any) -> Any:
        return self._form.reference(self._module, *inputs)

    def decline(self, reason: Reason) -> Any:
        return None


def spatial_transformer_change() -> Reason | None:
    """Return how this host's SpatialTransformer differs from `serve_spatial`, or None: both run
    once on a tiny instance with recording blocks and must make equal calls, options and results.
    """
    from comfy.ldm.modules.attention import SpatialTransformer
    from comfy.ops import disable_weight_init

    key = SpatialTransformer.forward
    if is_foreign(key):  # it acts around the blocks, outside both graphs
        return of("pack_replaces", owner=owner_of(key), name="SpatialTransformer.forward")
    if key not in _PROBED:
        _PROBED[key] = _compare_spatial(SpatialTransformer, disable_weight_init)
    return _PROBED[key]


_PROBED: dict[Any, Reason | None] = {}


def _compare_spatial(cls: Any, operations: Any) -> Reason | None:
    seen = []
    for ours in (False, True):
        with torch.no_grad():
            layer = cls(32, 1, 32, depth=2, context_dim=8, operations=operations, device="cpu")
            for parameter in layer.parameters():
                parameter.fill_(0.01)
            blocks = [_Witness(), _Witness()]
            layer.transformer_blocks = torch.nn.ModuleList(blocks)
            x = torch.linspace(-1, 1, 2 * 32 * 3 * 5).reshape(2, 32, 3, 5)
            options: dict[str, Any] = {"block": ("input", 1)}
            contexts = ["first", "second"]
            result: Any
            if ours:
                calls = [_Uncompiled(form, layer) for form in (ENTRY, EXIT)]
                result = serve_spatial(layer, calls, options, x, contexts)
            else:
                result = layer.forward(x, contexts, options)
        seen.append(([b.calls for b in blocks], options, result))
    (theirs, left, expected), (calls_made, left_by_us, got) = seen
    if theirs != calls_made or left != left_by_us or not torch.equal(expected, got):
        return of("transformer_does_more")
    return None
