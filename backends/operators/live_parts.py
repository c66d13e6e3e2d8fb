"""Parts of a region whose code another pack replaced: its graph calls each of them when it runs.

Products and norms use the operator of `host_layer`. Here are two more: a convolution, and a whole
attention or feed-forward, which takes tensors and other arguments and returns one tensor of the
first one's shape. Everything else in the region is compiled, independent of whose code is called.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..errors import BuildError, DescriptionError
from ..host_api.options import ATTENTION
from ..kinds.layout import memory_format
from ..kinds.module_tree import walk
from ..reasons import Reason, of
from . import host_layer, live_arguments, registering
from .call_context import options_of_step
from .host_layer import CLASS, CONVOLUTION, LIVE, PART
from .left_layers import LeftLayers
from .stand_in import StandIn

#: Why a product is called that nobody replaced.
_NEIGHBOUR = of("neighbours")
_CONVOLUTIONS = ("Conv1d", "Conv2d", "Conv3d")
_NORMS = (torch.nn.LayerNorm, torch.nn.RMSNorm, torch.nn.GroupNorm)
_OF_A_CONVOLUTION = ("kernel_size", "stride", "padding", "dilation")


class LivePart(NamedTuple):
    """Which parts of a region its graph calls.

    Attributes:
        products: whether it calls all products and convolutions.
        parts: paths of norms, attentions and feed-forwards.
    """

    products: bool
    parts: tuple[str, ...]


# --- which parts a graph can call -----------------------------------------------------------------


def is_product(part: torch.nn.Module) -> bool:
    """Tell whether a module computes a product or a convolution whose result's sizes are known."""
    if type(part).__name__ in _CONVOLUTIONS:
        return _shape_of(part) is not None
    return not isinstance(part, _NORMS) and host_layer.widths(part) is not None


def is_norm(part: torch.nn.Module) -> bool:
    """Tell whether a module is a norm whose result has its input's form."""
    return isinstance(part, _NORMS)


def called_live(
    description: dict[str, Any], module: torch.nn.Module, live: LivePart, *, layout: str
) -> dict[str, Any]:
    """Return a described tree in which some parts are called when the graph runs.

    Args:
        description: of the tree without any replacement.
        module: the live one.
        layout: of activations in the region.

    Raises:
        DescriptionError: it has no such part.
    """
    left = set(live.parts)
    result = _called(description, module, "", live, left, layout)
    if left:
        raise DescriptionError(of("replaces_uncalled", name=min(left)))
    return host_layer.unrounded(result)


def _called(
    description: dict[str, Any],
    module: torch.nn.Module,
    path: str,
    live: LivePart,
    left: set[str],
    layout: str,
) -> dict[str, Any]:
    if path in live.parts or (live.products and path and is_product(module)):
        left.discard(path)
        return _written(path, module, layout)
    modules = []
    for name, child in description["modules"]:
        where, inner = f"{path}.{name}".lstrip("."), module._modules[name]
        assert inner is not None
        modules.append([name, _called(child, inner, where, live, left, layout)])
    return {**description, "modules": modules}


def _written(path: str, module: torch.nn.Module, layout: str) -> dict[str, Any]:
    if (layer := host_layer.describe(path, module)) is not None:
        return layer
    attributes: dict[str, Any] = {"path": path, "layout": layout}
    if type(module).__name__ not in _CONVOLUTIONS:
        return {"class": PART, "attributes": attributes, "parameters": {}, "modules": []}
    attributes |= {"out_channels": module.out_channels, **(_shape_of(module) or {})}
    return {"class": CONVOLUTION, "attributes": attributes, "parameters": {}, "modules": []}


def _shape_of(layer: Any) -> dict[str, list[int]] | None:
    """What the sizes of a convolution's result depend on, None unless plain numbers."""
    found = {name: getattr(layer, name, None) for name in _OF_A_CONVOLUTION}
    if not all(isinstance(v, tuple) and all(type(n) is int for n in v) for v in found.values()):
        return None
    return {name: list(value or ()) for name, value in found.items()}


def count(
    description: dict[str, Any], live: LivePart, words: Mapping[str, str]
) -> Counter[LeftLayers]:
    """Count the parts that a graph calls, by sort and reason.

    Args:
        description: of the module as the graph has it.
        words: what others did, by the paths of the parts.
    """
    found: Counter[LeftLayers] = Counter()
    for _, part in walk(description):
        if part["class"] in LIVE:
            path = part["attributes"]["path"]
            what = _what(part, path in live.parts)
            found[LeftLayers(what, "others", words.get(path, _NEIGHBOUR))] += 1
    return found


def _what(part: dict[str, Any], is_part: bool) -> str:
    if part["class"] == CLASS:
        return "norms" if is_part else "products"
    return "convolutions" if part["class"] == CONVOLUTION else "parts"


# --- what stands for them in a twin ---------------------------------------------------------------


class HostPart(StandIn):
    """Stands in a twin for a part that is called when the graph runs."""

    def __init__(self, path: str, layout: str) -> None:
        """Set up for one part.

        Args:
            path: where it is in the region's module.
            layout: of activations there.
        """
        super().__init__(path)
        self.layout = layout

    def forward(self, *args: Any, **named: Any) -> torch.Tensor:
        tensors, sizes, how = taken_apart(self.path, args, named)
        result: torch.Tensor = OPERATOR(tensors, sizes, self.path, how, self.layout)
        return result


class HostConvolution(StandIn):
    """Stands in a twin for a convolution: `[batch, in, ...] -> [batch, out, ...]`."""

    def __init__(
        self,
        path: str,
        layout: str,
        out_channels: int,
        kernel_size: list[int],
        stride: list[int],
        padding: list[int],
        dilation: list[int],
    ) -> None:
        """Set up for one convolution; its result's sizes hang on what follows `layout`.

        Args:
            path: where it is in the region's module.
            layout: of activations there.
            out_channels: the channels of its result.
            kernel_size: its kernel's size on each side.
            stride: its stride on each side.
            padding: its padding on each side.
            dilation: its dilation on each side.
        """
        super().__init__(path)
        self.layout, self.out_channels = layout, out_channels
        self.kernel_size, self.stride = kernel_size, stride
        self.padding, self.dilation = padding, dilation

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        sides = [
            (side + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
            for side, kernel, stride, padding, dilation in zip(
                input.shape[2:],
                self.kernel_size,
                self.stride,
                self.padding,
                self.dilation,
                strict=True,
            )
        ]
        shape = [input.shape[0], self.out_channels, *sides]
        result: torch.Tensor = CONVOLVE(input, self.path, shape, self.layout)
        return result


#: By what stands for their class in a description.
STAND_INS: dict[str, Callable[..., torch.nn.Module]] = {
    CLASS: host_layer.HostLayer,
    PART: HostPart,
    CONVOLUTION: HostConvolution,
}


# --- a call as tensors and text -------------------------------------------------------------------


def taken_apart(
    path: str, args: Sequence[Any], named: Mapping[str, Any]
) -> tuple[list[torch.Tensor], list[Any], str]:
    """Describe a call: its tensors, its sizes, and the rest as text.

    Raises:
        BuildError: it is given something that a graph cannot pass on.
    """
    tensors: list[torch.Tensor] = []
    sizes: list[Any] = []

    def write(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return {"tensor": len(tensors) - 1}
        if isinstance(value, torch.SymInt):
            sizes.append(value)
            return {"size": len(sizes) - 1}
        if isinstance(value, dict) and value.keys() <= {ATTENTION}:
            return {"options": None}
        if isinstance(value, live_arguments.LiveArgument):
            return {"live": value.name}
        if isinstance(value, (list, tuple)):
            return {type(value).__name__: [write(each) for each in value]}
        if value is None or isinstance(value, (bool, int, float, str)):
            return {"value": value}
        raise BuildError(of("guest_is_given", path=path, sort=type(value).__name__))

    written = {
        "args": [write(value) for value in args],
        "named": {name: write(value) for name, value in named.items()},
    }
    if not tensors:
        raise BuildError(of("guest_no_tensor", path=path))
    return tensors, sizes, json.dumps(written)


def _put_together(
    tensors: Sequence[torch.Tensor], sizes: Sequence[int], how: str
) -> tuple[list[Any], dict[str, Any]]:
    def read(value: dict[str, Any]) -> Any:
        [(tag, content)] = value.items()
        if tag == "tensor":
            return tensors[content]
        if tag == "size":
            return sizes[content]
        if tag == "options":
            return options_of_step()
        if tag == "live":
            return live_arguments.of_step(content)
        if tag in ("list", "tuple"):
            items = [read(each) for each in content]
            return items if tag == "list" else tuple(items)
        return content

    written = _read(how)
    return (
        [read(value) for value in written["args"]],
        {name: read(value) for name, value in written["named"].items()},
    )


@lru_cache(maxsize=256)
def _read(how: str) -> dict[str, Any]:
    written: dict[str, Any] = json.loads(how)
    return written


# --- the operators --------------------------------------------------------------------------------


def _run(
    tensors: list[torch.Tensor], sizes: list[int], path: str, how: str, layout: str
) -> torch.Tensor:
    shape = tuple(tensors[0].shape)
    part: Any = live_arguments.of_step(path)  # brought by the call itself
    if part is None and (part := host_layer.part_at(path)) is None:
        return _laid_out(_stand_in(tensors, shape), layout)

    def compute() -> Any:
        args, named = _put_together(tensors, sizes, how)
        return part(*args, **named)

    return host_layer.called(path, compute, shape, *tensors, layout=layout)


def _run_convolution(input: torch.Tensor, path: str, shape: list[int], layout: str) -> torch.Tensor:
    if (part := host_layer.part_at(path)) is None:
        return _laid_out(_stand_in([input], shape), layout)

    def compute() -> Any:
        return part(input)

    return host_layer.called(path, compute, tuple(shape), input, layout=layout)


def _why_apart(*_: Any) -> Reason | None:
    return host_layer.OTHERS


def _stand_in(tensors: Sequence[torch.Tensor], shape: Iterable[int]) -> torch.Tensor:
    """A tensor of these sizes that depends on all of these tensors: a worker has no others' code,
    and compares what surrounds it.
    """
    result = tensors[0]
    for axis, size in enumerate(shape):
        have = result.shape[axis]
        place = torch.arange(size, device=result.device)
        # Twice the size, or half of it: each place is of another one of the tensor's.
        result = result.index_select(axis, place * have // size if size != have else place.flip(0))
    for other in tensors[1:]:
        result = result + 0.1 * other.float().mean().to(result.dtype)
    return 0.9 * result


def _laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    return tensor.contiguous(memory_format=memory_format(tensor, layout))


def _fake(
    tensors: list[torch.Tensor], sizes: list[Any], path: str, how: str, layout: str
) -> torch.Tensor:
    return _empty(tensors[0], tensors[0].shape, layout)


def _fake_convolution(
    input: torch.Tensor, path: str, shape: list[Any], layout: str
) -> torch.Tensor:
    return _empty(input, shape, layout)


def _empty(like: torch.Tensor, shape: Collection[Any], layout: str) -> torch.Tensor:
    result = like.new_empty(tuple(shape))
    return result.contiguous(memory_format=memory_format(result, layout))


OPERATOR, _ = registering.register(
    "host_part(Tensor[] tensors, SymInt[] sizes, str path, str how, str layout) -> Tensor",
    _run,
    _fake,
    None,
    _why_apart,
)
CONVOLVE, _ = registering.register(
    "host_convolution(Tensor input, str path, SymInt[] shape, str layout) -> Tensor",
    _run_convolution,
    _fake_convolution,
    None,
    _why_apart,
)
