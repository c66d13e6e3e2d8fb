"""Values of small tensors that code makes out of nothing while it runs on torch's fakes: it may
read them, as it would on a device. Arguments and weights have no values.

Sources: torch/_subclasses/fake_tensor.py (`FakeTensor.constant`, which holds one number alone) and
torch/utils/weak.py of torch 2.10-2.15.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from .fakes import asks_for_values, is_random, written_by

#: Elements of a tensor whose values are kept.
_MOST = 4096
#: Operators that make a tensor of nothing but numbers.
_MADE = ("aten::zeros", "aten::ones", "aten::full", "aten::arange", "aten::scalar_tensor")
_LIFTED = ("aten::lift_fresh", "aten::lift_fresh_copy")
#: Those whose result has no values yet. They are zeros here, until code writes all of them.
_UNSET = ("aten::empty_like", "aten::new_empty")


class KnownValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within a FakeTensorMode: keeps values that follow from the code alone."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        #: By the fake: a tensor with its values, which shares memory as the fakes do.
        self._values: Any = WeakTensorKeyDictionary()
        #: Memory of such into which something unknown was written.
        self._lost: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        is_known = self._follows(func, args, named)
        try:
            result = func(*args, **named)
        except Exception as error:
            if not (is_known and asks_for_values(error)):
                raise
            return self._faked(self._computed(func, args, named))
        if not is_known:
            self._lose(func, args, named)
        elif all(each.numel() <= _MOST for each in _tensors(result)):
            self._keep(result, self._computed(func, args, named))
        return result

    def _value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        value = self._values.get(tensor)
        return None if value is None or _memory(value) in self._lost else value

    def _follows(self, func: Any, args: Any, named: Any) -> bool:
        """Tell whether an operator's result follows from the code alone."""
        name = func._schema.name
        if name in _LIFTED:
            return all(each.numel() <= _MOST for each in _tensors(args))
        given = list(_tensors((args, named)))
        if not given:
            return name in _MADE
        return not is_random(func) and all(self._value(each) is not None for each in given)

    def _computed(self, func: Any, args: Any, named: Any) -> Any:
        def known(tensor: torch.Tensor) -> torch.Tensor:
            value = self._value(tensor)
            return tensor if value is None else value

        args, named = tree_map_only(torch.Tensor, known, (args, named))
        with no_dispatch():
            result = func(*args, **named)
            if func._schema.name in _UNSET:
                result.zero_()
            # torch lifts what it made of a list; that one stays in its hands
            return result.clone() if func._schema.name in _LIFTED else result

    def _keep(self, result: Any, values: Any) -> None:
        for fake, value in zip(_tensors(result), _tensors(values), strict=True):
            self._values[fake] = value

    def _lose(self, func: Any, args: Any, named: Any) -> None:
        for each in written_by(func, args, named):
            if (value := self._values.get(each)) is not None:
                self._lost.add(_memory(value))

    def _faked(self, value: Any) -> Any:
        """What an operator gave whose result the fakes cannot tell, as a fake."""

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty(tensor.shape, dtype=tensor.dtype)

        result = tree_map_only(torch.Tensor, fake, value)
        self._keep(result, value)
        return result


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (each for each in tree_iter(value) if isinstance(each, torch.Tensor))


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
