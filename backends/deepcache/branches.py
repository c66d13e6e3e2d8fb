"""One UNet as two: the whole one, which returns its deep feature, and the shallow one, which takes
it.

A *branch* is the skip connection at which the UNet is cut, 0 being the outermost. With branch `b`
the shallow network is the first `b + 1` input blocks and the last `b + 1` output blocks; what lies
between is replaced by the kept input of the first of those output blocks. Both are modules of the
host's own class over the same blocks: they run the host's own `_forward`, and the host's model is
not touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..host_api import unets
from ..plans.plan import Passage, shallow_copy
from ..runtime.root_copy import RootCopy
from .guard import own_part

_AFTER_MIDDLE = "middle_block_after_patch"


def depth(unet: Any) -> int:
    """Return how many branches a UNet has."""
    return min(len(unet.input_blocks), len(unet.output_blocks))


class Branch:
    """One way to cut a UNet in two. The modules are the host's; no feature is kept here.

    Attributes:
        number: which branch, from 0 (the outermost) to `depth(unet) - 1`.
    """

    def __init__(self, unet: Any, number: int) -> None:
        """Cut a UNet in two.

        Args:
            unet: the host's UNetModel.
            number: a branch that it has.

        Raises:
            ValueError: it has no such branch.
        """
        if not 0 <= number < depth(unet):
            raise ValueError(f"branch must be 0 to {depth(unet) - 1} for this UNet, got {number}")
        self.number = number
        self._layers = [(layer, type(layer)) for layer in _layers(unet)]
        self._kept = number + 1
        self._skipped_outputs = len(unet.output_blocks) - self._kept
        self._tap, self._source = _Tap(), _Source()
        self._full = _with_tap(unet, self._tap, self._skipped_outputs)
        blocks = torch.nn.ModuleList
        self._shallow: Any = shallow_copy(
            unet,
            input_blocks=blocks(list(unet.input_blocks)[: self._kept]),
            middle_block=_sequence(self._source),
            output_blocks=blocks(list(unet.output_blocks)[self._skipped_outputs :]),
        )
        skipped = [
            *list(unet.input_blocks)[self._kept :],
            unet.middle_block or (),
            *list(unet.output_blocks)[: self._skipped_outputs],
        ]
        self._skipped_transformers = sum(_transformers(block) for block in skipped)
        #: The two halves as others that compile the UNet may know them.
        self.whole = RootCopy(unet, self._full, self.full)
        self.outer = RootCopy(unet, self._shallow, self.shallow)

    def is_current(self) -> bool:
        """Whether the UNet still has the layers that it was cut with: others may patch or inject
        some for a run, or change their class.
        """
        now = _layers(self.whole.of)
        return len(now) == len(self._layers) and all(
            one is layer and type(one) is kind
            for one, (layer, kind) in zip(now, self._layers, strict=True)
        )

    def foreign_class(self) -> type | None:
        """Return the class of the UNet or of one of its blocks that is not the host's own, if any:
        only its owner knows what it calls.
        """
        host = unets.classes()
        unet: Any = self.whole.of
        if type(unet) is not host.unet:
            return type(unet)
        classes = map(type, (*unet.input_blocks, *unet.output_blocks))
        middle = type(unet.middle_block or unet.output_blocks[0])
        return next((kind for kind in (middle, *classes) if kind is not host.sequence), None)

    def full(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the whole UNet; returns its output and the feature at the cut, a tensor of its own,
        or None where another node's function ran in place of the block.

        Args:
            As of the host's `UNetModel._forward`.

        Raises:
            OwnError: the feature could not be kept.
        """
        try:
            output = unets.forward(self._full)(*args, **kwargs)
            return output, self._tap.feature
        finally:
            self._tap.feature = None

    def shallow(
        self,
        x: torch.Tensor,
        timesteps: torch.Tensor | None = None,
        context: torch.Tensor | None = None,
        y: torch.Tensor | None = None,
        control: dict[str, list[Any]] | None = None,
        transformer_options: dict[str, Any] | None = None,
        *,
        feature: torch.Tensor,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Run the outer blocks around a feature that `full` gave.

        Args:
            feature: may be used again: what patches do to it in place is not seen outside.
            Others: as of the host's `UNetModel._forward`.

        Raises:
            OwnError: the blocks' inputs could not be made.
        """
        with own_part():
            options = self._options(transformer_options or {})
            residuals = self._control(control)
        self._source.feature = feature
        try:
            output: torch.Tensor = unets.forward(self._shallow)(
                x, timesteps, context, y, residuals, options, **kwargs
            )
            return output
        finally:
            self._source.feature = None

    def _options(self, options: Mapping[str, Any]) -> _ShiftedOptions:
        shifted = _ShiftedOptions(options, self._skipped_outputs, self._skipped_transformers)
        if self._skipped_outputs and _AFTER_MIDDLE in (patches := options.get("patches", {})):
            shifted["patches"] = {n: p for n, p in patches.items() if n != _AFTER_MIDDLE}
        return shifted

    def _control(self, control: Mapping[str, list[Any]] | None) -> dict[str, Any] | None:
        """The residuals of the blocks that run. Each block takes the last remaining one of its
        side's list, so the outermost blocks' are at the end of one and the start of the other.
        """
        if control is None:
            return None
        mine = {side: list(residuals) for side, residuals in control.items()}
        if "output" in mine:
            mine["output"] = mine["output"][: max(0, len(mine["output"]) - self._skipped_outputs)]
        if self._skipped_outputs:  # it is in the feature
            mine.pop("middle", None)
        return mine


class _Tap(Passage):
    """The last layer before the cut: passes its input on, and keeps a copy."""

    feature: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with own_part():
            self.feature = x.clone()
        return x


class _Source(Passage):
    """Stands for all that is skipped: returns the feature for any input."""

    feature: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with own_part():
            assert self.feature is not None
            return self.feature.clone()


class _ShiftedOptions(dict[str, Any]):
    """`transformer_options` of a shallow call: output blocks are numbered as in the whole UNet."""

    def __init__(self, options: Mapping[str, Any], outputs: int, transformers: int) -> None:
        super().__init__(options)
        self._outputs, self._transformers = outputs, transformers
        self._passed = False

    def __setitem__(self, name: str, value: Any) -> None:
        with own_part():
            if name == "block" and value[0] == "output":
                value = ("output", value[1] + self._outputs)
                if not self._passed and "transformer_index" in self:
                    self._passed = True
                    self["transformer_index"] += self._transformers
        super().__setitem__(name, value)


def _with_tap(unet: Any, tap: torch.nn.Module, cut: int) -> Any:
    """The UNet with a tap after the block before the cut, which is an output or the middle one."""
    if cut == 0:
        return shallow_copy(unet, middle_block=_sequence(*(unet.middle_block or ()), tap))
    outputs = list(unet.output_blocks)
    outputs[cut - 1] = _sequence(*outputs[cut - 1], tap)
    return shallow_copy(unet, output_blocks=torch.nn.ModuleList(outputs))


def _layers(unet: Any) -> list[Any]:
    """All layers of the two halves."""
    layers = [unet, *unet.children()]
    for block in (*unet.input_blocks, unet.middle_block or (), *unet.output_blocks):
        layers += [block, *block]
    return layers


def _sequence(*layers: torch.nn.Module) -> torch.nn.Module:
    """A block like the host's, so that code that wraps or looks for them finds what it expects."""
    sequence: torch.nn.Module = unets.classes().sequence(*layers)
    return sequence


def _transformers(block: Any) -> int:
    transformer = unets.classes().transformer
    return sum(isinstance(layer, transformer) for layer in block)
