"""Attention as one operator in a graph: it calls, when it runs, what the host would call there.

So the choice of attention (SageAttention, FlashAttention, another pack's function in the options)
is not part of a graph: it serves them all, and the choice can change between steps.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

from ..code.steady import steady
from ..errors import BuildError
from ..host_api import attention
from ..host_api.options import ATTENTION
from ..reasons import Reason, of
from . import live_arguments, registering
from .attention_layer import AttentionLayer
from .call_context import Choice, now, options_of_step, using
from .host_layer import part_at

#: Why a call of the operator is not recorded.
_BY_THE_CALL = of("attention_of_call")
_OF_A_LAYER = of("attention_between", why=of("own_attention"))


@contextlib.contextmanager
def traced(*, layers: bool) -> Iterator[None]:
    """Until this ends, redirect every name by which the host's code calls attention to the
    operator.

    Args:
        layers: whether what is traced has parts that may name their own attention.
    """
    with attention.answered_by(stand_in), using(layers_attend=layers):
        yield


def stand_in(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Stand in for the host's attention functions (`attention_pytorch` and its like).

    Raises:
        BuildError: it is called with something that the operator cannot pass on.
    """
    try:
        given = _CALL.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise BuildError(of("attention_unknown", error=error)) from error
    named = given.pop("named", {})
    low_precision = named.pop("low_precision_attention", True)
    layer = named.pop(attention.PREFERRED, None)
    for name in ("transformer_options", "_inside_attn_wrapper"):
        named.pop(name, None)
    tensors = [given[name] for name in ("query", "key", "value")]
    contained = all(map(attention.is_container, tensors))
    if contained:
        tensors = [each.take() for each in tensors]
    grouped = bool(named.pop("enable_gqa", False))
    heads_first = bool(given.get("skip_output_reshape"))
    precision = given.get("attn_precision")
    unknown = sorted(named)
    if layer is not None and not isinstance(layer, AttentionLayer):
        unknown.append(f"a {type(layer).__name__}")
    mask: Any = given.get("mask")
    masked_by = ""
    if isinstance(mask, live_arguments.LiveMask):
        mask, masked_by = None, mask.name
    wrong = [each for each in tensors if not torch.is_tensor(each)]
    wrong += [mask] if mask is not None and not torch.is_tensor(mask) else []
    unknown += [f"a {type(each).__name__}" for each in wrong]
    if unknown:
        raise _unknown(*unknown)
    result: torch.Tensor = OPERATOR(
        *tensors,
        mask,
        given["heads"],
        bool(given.get("skip_reshape")),
        low_precision,
        contained,
        "" if layer is None else layer.path,
        masked_by,
        "",
        "" if precision is None else str(precision).removeprefix("torch."),
        grouped,
        heads_first,
    )
    if heads_first:
        batch, tokens, _ = result.shape
        result = result.view(batch, tokens, given["heads"], -1).transpose(1, 2)
    return result


def _unknown(*arguments: str) -> BuildError:
    return BuildError(of("attention_given", arguments=", ".join(arguments)))


class LiveAttention(live_arguments.LiveArgument):
    """Stands, while a block is traced, for an attention function that the block is called with:
    `(query, key, value [batch, rows, heads, width], heads, preferred_attention=)` to `[batch, rows,
    heads * width]`.
    """

    def __call__(
        self, query: Any, key: Any, value: Any, heads: int, preferred_attention: Any = None
    ) -> torch.Tensor:
        """Have the graph call the step's own function.

        Raises:
            BuildError: it is called with something that the operator cannot pass on.
        """
        layer = preferred_attention
        if layer is not None and not isinstance(layer, AttentionLayer):
            raise _unknown(f"a {type(layer).__name__}")
        path = "" if layer is None else layer.path
        parts = [part.flatten(2) for part in (query, key, value)]
        result: torch.Tensor = OPERATOR(
            *parts, None, heads, False, True, False, path, "", self.name
        )
        return result


def _signature(
    query: Any,
    key: Any,
    value: Any,
    heads: int,
    mask: Any = None,
    attn_precision: Any = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    **named: Any,
) -> None:
    """The arguments of the host's attention functions."""


_CALL = inspect.signature(_signature)


def opaque(function: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """As `stand_in`, by the host's own means: `transformer_options` that name it. A layer's own
    attention does not reach it.
    """
    if now().layers_attend:
        raise BuildError(of("attention_unnamed"))
    return stand_in(*args, **kwargs)


#: What a form's reference calls the host's block with where no step's options are there.
OPTIONS: dict[str, Any] = {ATTENTION: opaque}


@contextlib.contextmanager
def asking(function: Any) -> Iterator[None]:
    """Until this ends, have our own function call this step's attention of another node.

    Args:
        function: None leaves it as it is.
    """
    options = options_of_step()
    if function is None:
        yield
        return
    before, options[ATTENTION] = options[ATTENTION], function
    try:
        yield
    finally:
        options[ATTENTION] = before


def options() -> dict[str, Any]:
    """Return the options that a form's reference passes to the host's block: in a region's call the
    step's own, as in the host.
    """
    options = now().options
    return OPTIONS if options is None else dict(options)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    heads: int,
    split: bool,
    low_precision: bool,
    contained: bool,
    path: str,
    masked_by: str,
    called: str,
    precision: str = "",
    grouped: bool = False,
    heads_first: bool = False,
) -> torch.Tensor:
    options = options_of_step()
    layer = part_at(path) if path else None
    if masked_by:
        mask = live_arguments.of_step(masked_by)
    own = live_arguments.of_step(called) if called else None

    def host() -> torch.Tensor:
        result = attention.attend(
            query,
            _for_each(key),
            _for_each(value),
            mask,
            heads,
            split=split,
            low_precision=low_precision,
            contained=contained,
            layer=layer,
            options=options,
            precision=getattr(torch, precision) if precision else None,
            grouped=grouped,
            heads_first=heads_first,
        )
        return result.transpose(1, 2).flatten(2) if heads_first else result

    def _for_each(tensor: torch.Tensor) -> torch.Tensor:
        return ungrouped(tensor, heads) if split and not grouped else tensor

    def compute() -> torch.Tensor:
        choice = now().choice
        if (
            mask is not None
            or (choice and not attention.is_plain(options, layer))
            or (grouped and not split)
        ):
            choice = None
        if own is not None:
            named = attention.named_by(options, _by(choice)) if choice else contextlib.nullcontext()
            with named:
                return attention.call(own, query, key, value, heads, layer)
        if choice is None:
            return host()
        return choice.attend(query, key, value, heads, split=split, calls=now().calls, host=host)

    return registering.live("attention", compute, _shape(query, heads, split), query, key, value)


def _why_apart(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    heads: int,
    split: bool,
    low_precision: bool,
    contained: bool,
    path: str,
    masked_by: str,
    called: str,
    *_: Any,
) -> Reason | None:
    """Why a call cannot be recorded: it runs code that may do something else the next time."""
    layer = part_at(path) if path else None
    masked = live_arguments.of_step(masked_by) if masked_by else None
    if called or not isinstance(masked, (torch.Tensor, type(None))):
        return _BY_THE_CALL
    functions = attention.chosen(options_of_step(), layer)
    if functions is None:
        return _OF_A_LAYER
    for each in functions:
        if (problem := steady(each).why_not) is not None:
            return of("attention_between", why=problem)
    return None


def name_of_step() -> Hashable:
    """Return what is equal for steps whose attention goes to functions that do the same."""
    functions = attention.chosen(options_of_step()) or ()
    return tuple(steady(each).name for each in functions)


def _by(choice: Choice) -> Callable[..., torch.Tensor]:
    """Make the function that options name in place of the host's attention: a kernel by this
    choice.
    """

    def attend(
        function: Callable[..., torch.Tensor],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        heads: int,
        *args: Any,
        **named: Any,
    ) -> torch.Tensor:
        def host() -> torch.Tensor:
            return function(query, key, value, heads, *args, **named)

        if args or not attention.is_of_queries_alone(named):
            return host()
        return choice.attend(query, key, value, heads, split=False, calls=now().calls, host=host)

    return attend


def ungrouped(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeat keys or values `[batch, groups, rows, width]` for the heads that share them."""
    groups = tensor.shape[1]
    return tensor if groups == heads else tensor.repeat_interleave(heads // groups, dim=1)


def _shape(query: torch.Tensor, heads: int, split: bool) -> tuple[Any, ...]:
    if not split:
        return tuple(query.shape)
    return (query.shape[0], query.shape[2], heads * query.shape[3])


def _fake(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    heads: int,
    split: bool,
    *_: Any,
) -> torch.Tensor:
    return query.new_empty(_shape(query, heads, split))


OPERATOR, _ = registering.register(
    "host_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, int heads, bool split,"
    " bool low_precision, bool contained, str path, str masked_by, str called,"
    ' str precision="", bool grouped=False, bool heads_first=False) -> Tensor',
    _attend,
    _fake,
    None,
    _why_apart,
)
