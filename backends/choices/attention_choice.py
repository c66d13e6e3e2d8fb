"""Chooses the attention kernel at run time where the host would use PyTorch's own.

The host prefers flash attention. Which exact kernel is the fastest (`exact_attention`) depends on
the card and the size, so those that are there are timed (`autotuner`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Hashable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..device import gpu
from ..kinds.tolerance import Outcome, judge
from ..reasons import Reason, of
from . import exact_attention
from .autotuner import HOST, Autotuner
from .exact_attention import CUDNN, HALF, KERNELS, Found, Kernel

logger = logging.getLogger(__name__)

FILE_NAME = "attention.json"
#: Steps of one size that are to pay for what a kernel sets up: some images' in a process. How many
#: a run has left says less: the choice stays, in what is captured, too.
STEPS = 200
#: Times differ by as much by themselves.
LEAST_MS = 0.004
#: Fewer products of queries and keys take less time than could be saved.
FEWEST_PRODUCTS = 2**20
#: So many rows of a first result are compared, from all over it.
_COMPARED = 256
_BACKENDS: Any = torch.backends


class AttentionChoice:
    """The times of this machine, and the choices that they make; for any thread."""

    def __init__(self, directory: Path, machine: str, kernels: Sequence[Kernel] = KERNELS) -> None:
        """Read the times that were kept; packages are looked for at a card's first attention.

        Args:
            directory: the pack's private folder.
            machine: a name for this machine's card and PyTorch.
            kernels: that may be there.
        """
        self.ways = Autotuner(directory / FILE_NAME, machine, [kernel.name for kernel in kernels])
        self._kernels = kernels
        self._there: dict[torch.device, list[Found]] = {}
        self._good: set[tuple[str, Hashable]] = set()
        self._out: dict[str, Reason] = {}
        self._most_rows: dict[torch.device, int] = {}

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        heads: int,
        *,
        split: bool,
        calls: int,
        host: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        """Compute attention without a mask, by the fastest kernel.

        Args:
            query: [batch, rows, heads * width], or [batch, heads, rows, width] where `split`.
            key: likewise; of fewer heads if heads share them.
            value: as `key`.
            calls: how many such calls a step makes.
            host: the same by the host's function, which would use PyTorch's own here.

        Returns:
            [batch, rows, heads * width].
        """
        if not _is_open(query):
            return host()
        others = self._kernels_for(query, query.shape[-1] // (1 if split else heads))
        shapes = query.shape, key.shape, query.stride(), key.stride()
        form = (*shapes, query.dtype, heads, split, query.device, *(each.name for each in others))

        def given() -> list[torch.Tensor]:
            return [_heads(tensor, heads, split) for tensor in (query, key, value)]

        def by(kernel: Found) -> Callable[[], torch.Tensor]:
            return lambda: self._checked(kernel, form, given(), others, host)

        return self.ways.run(
            form,
            lambda: self._class(given(), others),
            {HOST: host, **{each.name: by(each) for each in others}},
            must_save_ms={each.name: must_save_ms(calls, each.kernel) for each in others},
            device=query.device,
        )

    def notes(self) -> list[Reason]:
        """Return why kernels that are installed are not used."""
        return list(self._out.values())

    def could_install(self) -> list[Kernel]:
        """Return kernels that would have been worth a try in this process, and are not there."""
        found = {
            kernel
            for device, rows in self._most_rows.items()
            for kernel in exact_attention.missing(self._kernels, _major(device))
            if kernel.worth_rows is not None and rows >= kernel.worth_rows
        }
        return sorted(found, key=self._kernels.index)

    def _kernels_for(self, query: torch.Tensor, width: int) -> list[Found]:
        device = query.device
        if device not in self._there:
            there, broken = exact_attention.found(self._kernels, _major(device))
            for kernel, error in broken:
                self._put_out(kernel, of("attention_fails", kernel=kernel.title, error=error))
            self._there[device] = there
        is_on = _BACKENDS.cuda.cudnn_sdp_enabled() and _BACKENDS.cudnn.enabled
        return [
            each
            for each in self._there[device]
            if each.takes(query.dtype, width) and (is_on or each.kernel is not CUDNN)
        ]

    def _checked(
        self,
        kernel: Found,
        form: Hashable,
        given: Sequence[torch.Tensor],
        others: Collection[Found],
        host: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        """Return a kernel's result: in each class of sizes once it was compared with the host's.

        Raises:
            RuntimeError: it does not compute this, or not rightly.
        """
        if (kernel.name, form) in self._good:
            return kernel.attend(*given)
        device = given[0].device
        of_class = kernel.name, (device, self._class(given, others))
        if of_class not in self._good:
            if gpu.is_capturing(device):
                return host()
            result, is_good = self._compared(kernel, given, host)
            if not is_good:
                return result
        else:
            result = kernel.attend(*given)
        self._good |= {of_class, (kernel.name, form)}
        return result

    def _compared(
        self, kernel: Found, given: Sequence[torch.Tensor], host: Callable[[], torch.Tensor]
    ) -> tuple[torch.Tensor, bool]:
        """Return a kernel's result and whether it was found right; else the host's."""
        device, title = given[0].device, kernel.kernel.title
        try:
            result = kernel.attend(*given)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a package's may raise anything
            why = f"{type(error).__name__}: {error}"
            if kernel.kernel.package:
                self._leave(kernel, device, of("attention_fails", kernel=title, error=why))
            raise RuntimeError(why) from error
        try:
            reference = host()
        except torch.OutOfMemoryError:  # there is no room for two
            del result
            return host(), False
        rows = slice(None, None, max(reference.shape[1] // _COMPARED, 1))
        judged = judge([result[:, rows]], [reference[:, rows]], given)
        if judged.outcome is Outcome.BAD:
            differs = of("attention_differs", kernel=title, error=f"{judged.error:.1e}")
            self._leave(kernel, device, differs)
            raise RuntimeError(differs)
        return (result, True) if judged.is_good else (reference, False)

    def _leave(self, kernel: Found, device: torch.device, why: Reason) -> None:
        """Use a kernel no more on a card in this process."""
        self._there[device] = [each for each in self._there[device] if each is not kernel]
        self._put_out(kernel.kernel, why)

    def _put_out(self, kernel: Kernel, why: Reason) -> None:
        if kernel.name not in self._out:
            logger.warning("Warmgraph: %s", why)
        self._out[kernel.name] = why

    def _class(self, given: Sequence[torch.Tensor], others: Collection[Found]) -> str | None:
        """The class of these sizes; None: the host's kernel without timing."""
        q, k, v = given
        batch, heads, rows, width = q.shape
        groups = k.shape[1]
        if k.shape != v.shape or k.shape[0] != batch or width % 8 or heads % groups:
            return None
        if rows * k.shape[2] < FEWEST_PRODUCTS:
            return None
        self._most_rows[q.device] = max(rows, self._most_rows.get(q.device, 0))
        if not others:
            return None
        order = "split" if q.is_contiguous() else "joint"
        if groups != heads:
            order += f" {heads // groups}"
        counts = " ".join(str(round(2 * math.log2(n))) for n in (batch * heads, rows, k.shape[2]))
        name = f"{str(q.dtype).removeprefix('torch.')} {width} {order} {counts}"
        packages = (each.version_name for each in others if each.kernel is not CUDNN)
        return " ".join((name, *packages))


def must_save_ms(calls: int, kernel: Kernel) -> float:
    """How much each of so many calls in a step must save by a kernel, to pay for its set-up."""
    return max(kernel.set_up_ms / (STEPS * calls), LEAST_MS)


def _is_open(query: torch.Tensor) -> bool:
    """Whether there is a choice in this process, with its current settings."""
    return (
        gpu.kind_of(query.device).has_cudnn_attention
        and query.dtype in HALF
        and not torch.are_deterministic_algorithms_enabled()
    )


def _major(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


def _heads(tensor: torch.Tensor, heads: int, split: bool) -> torch.Tensor:
    """As [batch, heads, rows, width]."""
    if split:
        return tensor
    return tensor.view(*tensor.shape[:2], heads, -1).transpose(1, 2)
