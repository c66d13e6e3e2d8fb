"""Calls of LTX VAE blocks with a piece of a video: the host's kept frames (per thread) go into a
region and are updated from it, so the host can continue from there.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..plans.plan import Passage, RegionCall, host_forward, shallow_copy
from .ltx_pieces import FRAMES, KEPT

#: Indices of the kept frames; those of a piece follow from zero on.
_OF_KEPT = tuple(range(-KEPT, 0))


class Picks:
    """Indices on the device, cached: few different ones recur in every block."""

    MOST = 256

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], torch.Tensor] = {}

    def get(self, index: Sequence[int], device: torch.device) -> torch.Tensor:
        key = (*index, device)
        if (found := self._made.get(key)) is None:
            if len(self._made) >= self.MOST:
                self._made.clear()
            found = self._made[key] = torch.tensor(index, dtype=torch.int64, device=device)
        return found


class _Piece(NamedTuple):
    """A convolution's part in a piece: frames kept, frames taken, whether more follow."""

    kept: torch.Tensor | None
    taken: tuple[int, ...]
    is_last: bool

    @property
    def gives(self) -> int:
        return len(self.taken) - KEPT

    def state(self, keeps: torch.Tensor) -> tuple[torch.Tensor | None, bool]:
        """The state that the host would find before the next piece."""
        return (None, True) if self.is_last else (keeps, False)


def _piece(convolution: Any, frames: int, causal: bool, thread: int) -> _Piece | None:
    """How a convolution advances by these frames; None if it kept fewer than it needs."""
    kept, is_last = convolution.temporal_cache_state.get(thread, (None, False))
    body: tuple[int, ...] = tuple(range(frames))
    if kept is not None:
        if kept.shape[FRAMES] != KEPT:
            return None
        before: tuple[int, ...] = _OF_KEPT
    else:
        before = (0, 0)
        if not causal:
            body = body[1:]
    after = (frames - 1,) if is_last and not causal else ()
    return _Piece(kept, before + body + after, is_last)


def _frames_like(x: torch.Tensor, channels: int, count: int) -> torch.Tensor:
    """Frames whose content is never read."""
    if x.shape[1] == channels and x.shape[FRAMES] >= count:
        return x[:, :, :count]
    return x.new_zeros((x.shape[0], channels, count, *x.shape[3:]))


def residual(
    module: Any, picks: Picks, call: RegionCall, x: torch.Tensor, causal: bool, timestep: Any
) -> torch.Tensor | None:
    """Compute a residual block on a piece; None if the host must."""
    thread, frames = threading.get_ident(), x.shape[FRAMES]
    past = module.temporal_cache_state.get(thread)
    held = 0 if past is None else past.shape[FRAMES]
    first = _piece(module.conv1, frames, causal, thread)
    if frames == 0 or held > KEPT or first is None or first.gives < 1:
        return None
    last = _piece(module.conv2, first.gives, causal, thread)
    if last is None or last.gives < 1 or last.gives > held + frames:
        return None
    if (timestep is None) is bool(module.timestep_conditioning):
        return None
    given = module.out_channels
    around = x if given == module.in_channels else module.conv_shortcut(module.norm3(x))
    if past is not None and held < KEPT:
        past = torch.cat([past] * KEPT, FRAMES)
    begin = KEPT - held
    end = begin + last.gives
    inputs = [
        x,
        _frames_like(x, module.in_channels, KEPT) if first.kept is None else first.kept,
        _frames_like(x, given, KEPT) if last.kept is None else last.kept,
        _frames_like(around, given, KEPT) if past is None else past,
        picks.get(first.taken, x.device),
        picks.get(last.taken, x.device),
        picks.get((0,) * KEPT + tuple(range(begin, end)), x.device),
    ]
    if around is not x:
        inputs.append(around)
    if timestep is not None:
        inputs.append(timestep)
    results = call(*inputs)
    if results is None:
        return None
    result: torch.Tensor = results[0]
    _, keeps_first, keeps_last = results
    module.conv1.temporal_cache_state[thread] = first.state(keeps_first)
    module.conv2.temporal_cache_state[thread] = last.state(keeps_last)
    module.temporal_cache_state[thread] = _left(past, around, end)
    return result


def _left(past: torch.Tensor | None, x: torch.Tensor, begin: int) -> torch.Tensor | None:
    """The frames of both that no result has taken, copied: a view would keep the whole piece."""
    if begin >= KEPT + x.shape[FRAMES]:
        return None
    rest = x[:, :, max(0, begin - KEPT) :]
    if begin < KEPT and past is not None:
        return torch.cat([past[:, :, begin:], rest], FRAMES)
    return rest.clone()


class _Past(tuple[Any, ...]):
    """What the host keeps of an upsampling, and the frame it was made from."""

    frame: torch.Tensor | None


def up(
    module: Any, picks: Picks, call: RegionCall, x: torch.Tensor, causal: bool
) -> torch.Tensor | None:
    """Compute an upsampling on a piece; None if the host must."""
    thread, frames = threading.get_ident(), x.shape[FRAMES]
    state = module.temporal_cache_state.get(thread, (None, True, True))
    drops = module.stride[0] == 2 and state[1]
    piece = _piece(module.conv, frames, causal, thread)
    if frames == 0 or piece is None or piece.gives < 1:
        return None
    channels = module.conv.in_channels
    inputs = [
        x,
        _frames_like(x, channels, KEPT) if piece.kept is None else piece.kept,
        picks.get(piece.taken, x.device),
    ]
    past = getattr(state, "frame", None)
    if module.residual:
        if state[0] is not None and past is None:
            return None  # the host began with this video
        begin = 1 if past is None else 0
        end = begin + piece.gives
        if end > 1 + frames or (state[1], state[2]) not in ((True, True), (False, False)):
            return None
        inputs.append(_frames_like(x, channels, 1) if past is None else past)
        inputs.append(picks.get((0,) * KEPT + tuple(range(begin, end)), x.device))
    results = call(*inputs)
    if results is None:
        return None
    result: torch.Tensor = results[0]
    keeps = results[1]
    module.conv.temporal_cache_state[thread] = piece.state(keeps)
    left = x[:, :, end - 1 :].clone() if module.residual and end <= frames else None
    module.temporal_cache_state[thread] = _past(module, left)
    return result[:, :, 1:] if drops else result


def _past(module: Any, frames: torch.Tensor | None) -> _Past:
    """What the host's own code would keep for these frames, so that it can make the next piece."""
    ahead = None
    if frames is not None:
        cut = shallow_copy(module, conv=_Nothing(module.conv))
        cut.temporal_cache_state = {threading.get_ident(): (None, False, False)}  # type: ignore
        host_forward(cut, frames)
        (ahead, _, _) = cut.temporal_cache_state[threading.get_ident()]  # type: ignore
    past = _Past((ahead, False, False))
    past.frame = frames
    return past


class _Nothing(Passage):
    """A causal convolution that gives no frames yet."""

    def __init__(self, convolution: Any) -> None:
        super().__init__()
        self.channels = convolution.out_channels

    def forward(self, x: torch.Tensor, causal: bool = True) -> torch.Tensor:
        return x.new_empty((x.shape[0], self.channels, 0, *x.shape[3:]))
