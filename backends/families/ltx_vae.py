"""The region plan of the host's LTX video VAEs (LTX-Video 0.9, LTX-2, 2.3).

Regions: residual block, upsampling, the last norm with the SiLU after it. The host makes a video in
pieces of some frames: each convolution keeps the last two frames that it took, and joins them with
the next piece. A region takes those frames, and an index that says which frames each convolution
sees, so that one graph is for a first piece, one between two others, a last one and a whole video.
Norms go by single pixels: they come after frames are picked, in the same pass.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..contract import InputSpec, Symbol
from ..kinds.layout import CHANNELS_LAST
from . import vae
from .family import Family
from .pairs import norm_and_activation
from .plan import (
    Call,
    Form,
    Forward,
    Passage,
    Place,
    Plan,
    dispatch_one,
    host_forward,
    shallow_copy,
    unknown_layer,
)

NAME = "ltx_vae"

#: Frames that a convolution over three of them keeps from one piece to the next.
KEPT = 2
#: Where videos lie along their frames.
_FRAMES = 2
#: Indices of the kept frames; those of a piece follow from zero on.
_OF_KEPT = tuple(range(-KEPT, 0))

SYMBOLS = vae.SYMBOLS | {
    s.name: s
    for s in (
        Symbol("frames", 1, 4096, 9),
        # What the convolutions take: what they give has two frames less.
        Symbol("taken_first", 3, 4096, 11),
        Symbol("taken_last", 3, 4096, 11),
        # A border of one pixel is mirrored in another.
        Symbol("mirrored_height", 2, 8192, 136),
        Symbol("mirrored_width", 2, 8192, 120),
    )
}


class Residual(Form):
    """ResnetBlock3D on a piece: the piece, frames that its convolutions and its way past them kept,
    and indices -> the result, and what both convolutions keep.
    """

    family = NAME
    name = "residual"
    layout = CHANNELS_LAST
    children = ("norm1", "conv1", "norm2", "conv2", "non_linearity", "dropout")
    hidden = (
        "scale_shift_table",  # a buffer that its code does not read
        "temporal_cache_state",
        "conv1.temporal_cache_state",
        "conv2.temporal_cache_state",
    )

    def label(self, module: Any) -> str:
        return f"LTX VAE residual {module.in_channels}->{module.out_channels}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        taken, given = module.in_channels, module.out_channels
        sides = _sides(module.conv1)
        specs = [
            InputSpec("x", dtype, ("batch", taken, "frames", *sides)),
            InputSpec("kept_first", dtype, ("batch", taken, KEPT, *sides)),
            InputSpec("kept_last", dtype, ("batch", given, KEPT, *sides)),
            InputSpec("kept_past", dtype, ("batch", given, KEPT, *sides)),
            InputSpec("first", "int64", ("taken_first",)),
            InputSpec("last", "int64", ("taken_last",)),
            InputSpec("past", "int64", ("taken_last",)),
        ]
        if taken != given:
            specs.append(InputSpec("narrowed", dtype, ("batch", given, "frames", *sides)))
        if module.timestep_conditioning:
            specs.append(InputSpec("timestep", dtype, ("batch", 4 * taken, 1, 1, 1)))
        return tuple(specs)

    def reference(self, module: Any, *inputs: Any) -> Any:
        x, kept_first, kept_last, kept_past, first, last, past, *others = inputs
        timestep = others.pop() if module.timestep_conditioning else None
        (around,) = others or (x,)
        ways = (
            _Way(module.conv1, first, kept_first),
            _Way(module.conv2, last, kept_last),
        )
        cut = shallow_copy(
            module,
            norm1=_Norm(module.norm1, ways[0]),
            conv1=_Convolution(ways[0]),
            norm2=_Norm(module.norm2, ways[1]),
            conv2=_Convolution(ways[1]),
            norm3=torch.nn.Identity(),
            conv_shortcut=_Given(_picked(torch.cat([kept_past, around], _FRAMES), past[KEPT:])),
        )
        cut.temporal_cache_state = _State()  # type: ignore[assignment]
        result = host_forward(cut, x, timestep=timestep)
        return result, ways[0].keeps, ways[1].keeps


class Up(Form):
    """DepthToSpaceUpsample on a piece: as `Residual`, with one convolution -> the result with all
    of its frames, and what the convolution keeps.
    """

    family = NAME
    name = "up"
    layout = CHANNELS_LAST
    hidden = ("temporal_cache_state", "conv.temporal_cache_state")

    def label(self, module: Any) -> str:
        return f"LTX VAE upsampling {module.conv.in_channels}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        channels, sides = module.conv.in_channels, _sides(module.conv)
        specs = [
            InputSpec("x", dtype, ("batch", channels, "frames", *sides)),
            InputSpec("kept", dtype, ("batch", channels, KEPT, *sides)),
            InputSpec("taken", "int64", ("taken_first",)),
        ]
        if module.residual:
            specs.append(InputSpec("kept_past", dtype, ("batch", channels, 1, *sides)))
            specs.append(InputSpec("past", "int64", ("taken_first",)))
        return tuple(specs)

    def reference(self, module: Any, *inputs: Any) -> Any:
        x, kept, taken, *others = inputs
        way = _Way(module.conv, taken, kept)
        past = x
        if module.residual:
            kept_past, index = others
            past = _picked(torch.cat([kept_past, x], _FRAMES), index[KEPT:])
        cut = shallow_copy(module, conv=_Convolution(way, x))
        cut.temporal_cache_state = _State((None, False, False))  # type: ignore[assignment]
        return host_forward(cut, past), way.keeps


class NormSiLU(Form):
    """A last norm and its SiLU: `x [batch, C, frames, height, width]` -> the same. The module is
    made of both, and of the convolution that takes what they give.
    """

    family = NAME
    name = "norm_silu"
    layout = CHANNELS_LAST
    children = ("0", "1")

    def label(self, module: Any) -> str:
        return f"LTX VAE last norm {module[2].in_channels}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        dims = ("batch", module[2].in_channels, "frames", "height", "width")
        return (InputSpec("x", dtype, dims),)

    def reference(self, module: Any, *inputs: Any) -> torch.Tensor:
        return host_forward(module[1], host_forward(module[0], *inputs))


FORMS: dict[str, Form] = {form.name: form for form in (Residual(), Up(), NormSiLU())}


def plan_ltx(model: Any) -> Plan:
    """Cut a VAE with LTX's causal convolutions into regions, wherever in it they are."""
    from comfy.ldm.lightricks.vae.causal_video_autoencoder import (
        Decoder,
        DepthToSpaceUpsample,
        Encoder,
        ResnetBlock3D,
    )

    plan = Plan(symbols=SYMBOLS)
    picks = _Picks()
    for name, layer in model.named_modules():
        cls = type(layer)
        if issubclass(cls, (ResnetBlock3D, DepthToSpaceUpsample)):
            if (problem := _problem(layer)) is not None:
                plan.outside.append((name, problem))
            elif cls is ResnetBlock3D:
                place = Place(name, layer, FORMS["residual"])
                plan.dispatches.append(dispatch_one(place, _residual(layer, picks)))
            elif cls is DepthToSpaceUpsample:
                place = Place(name, layer, FORMS["up"])
                plan.dispatches.append(dispatch_one(place, _up(layer, picks)))
            else:
                plan.outside.append((name, unknown_layer(layer)))
        elif cls in (Encoder, Decoder):
            last = (layer.conv_norm_out, layer.conv_act, layer.conv_out)
            if (problem := _last_problem(layer)) is not None:
                plan.outside.append((f"{name}.conv_norm_out", problem))
                continue
            pair = torch.nn.Sequential(*last)
            place = Place(f"{name}.conv_norm_out", pair, FORMS["norm_silu"])
            plan.dispatches.append(norm_and_activation(place, last[0], last[1]))
    return plan


FAMILY = Family(
    title="VAEs of LTX",
    roots={
        "comfy.ldm.lightricks.vae.causal_video_autoencoder:VideoVAE": plan_ltx,
        # Of whose parts the encoder is the same.
        "comfy.ldm.lightricks.vae.na_diffusion_decoder:CausalDiffusionVAE": plan_ltx,
    },
    forms=FORMS,
)


def _problem(layer: Any) -> str | None:
    """Why a block of the host is not one of those that the forms stand for."""
    from comfy.ldm.lightricks.vae.causal_conv3d import CausalConv3d
    from comfy.ldm.lightricks.vae.pixel_norm import PixelNorm

    parts = dict(layer.named_children())
    norms = [part for name, part in parts.items() if name in ("norm1", "norm2")]
    convolutions = [part for name, part in parts.items() if name in ("conv", "conv1", "conv2")]
    if not all(type(norm) is PixelNorm and norm.dim == 1 for norm in norms):
        return "VAE blocks with other norms than by pixels have no region yet"
    if not all(type(each) is CausalConv3d and _is_plain(each) for each in convolutions):
        return "VAE blocks with other convolutions than LTX's have no region yet"
    if getattr(layer, "inject_noise", False):
        return "VAE blocks that add noise have no region yet"
    return None


def _is_plain(convolution: Any) -> bool:
    """Whether a causal convolution takes each three frames with one pixel around."""
    layer = convolution.conv
    return (
        convolution.time_kernel_size == KEPT + 1
        and convolution.time_stride == 1
        and tuple(layer.kernel_size) == (3, 3, 3)
        and tuple(layer.stride) == tuple(layer.dilation) == (1, 1, 1)
        and tuple(layer.padding) == (0, 1, 1)
        and layer.padding_mode in ("zeros", "reflect")
    )


def _last_problem(half: Any) -> str | None:
    """Why a decoder's or encoder's last norm and SiLU are not called one after the other."""
    from comfy.ldm.lightricks.vae.pixel_norm import PixelNorm

    norm, act = half.conv_norm_out, half.conv_act
    if type(norm) is not PixelNorm or norm.dim != 1 or type(act) is not torch.nn.SiLU:
        return "VAE blocks with other norms than by pixels have no region yet"
    if getattr(half, "timestep_conditioning", False):
        return "a last norm that a timestep modulates has no region yet"
    return None


def _sides(convolution: Any) -> tuple[str, str]:
    """The symbols of an image's sides."""
    mirrors = _mirrors(convolution)
    return ("mirrored_height", "mirrored_width") if mirrors else ("height", "width")


def _mirrors(convolution: Any) -> bool:
    return bool(convolution.conv.padding_mode == "reflect")


def _picked(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Frames of a video by an index; those that it does not have are any."""
    return x.index_select(_FRAMES, index.clamp(min=0))


def _by_channels(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last_3d)


class _Way:
    """One convolution of a block within a region: by which frames of a piece it goes, what it kept
    before, and what it keeps.
    """

    def __init__(self, convolution: Any, index: torch.Tensor, kept: torch.Tensor) -> None:
        self.layer = convolution.conv
        self.mirrors = _mirrors(convolution)
        self.index = index
        self.kept = kept
        self.keeps: torch.Tensor | None = None

    def pick(self, x: torch.Tensor) -> torch.Tensor:
        """The frames of a piece that the convolution takes."""
        return _picked(x, self.index)

    def convolve(self, picked: torch.Tensor) -> torch.Tensor:
        """What the convolution gives, the kept frames put in their place."""
        more = self.index.shape[0] - KEPT
        kept = torch.nn.functional.pad(self.kept, (0, 0, 0, 0, 0, more))
        is_kept = (self.index < 0).reshape(1, 1, -1, 1, 1)
        taken = _by_channels(torch.where(is_kept, kept, picked))
        self.keeps = taken[:, :, more:].clone()
        if not self.mirrors:
            return host_forward(self.layer, taken)
        # The layer would do the same, and leave the result's order in memory to the compiler.
        layer = copy.copy(self.layer)
        layer.padding, layer.padding_mode = (0, 0, 0), "zeros"
        taken = torch.nn.functional.pad(taken, (1, 1, 1, 1, 0, 0), mode="reflect")
        return host_forward(layer, _by_channels(taken))


class _Norm(Passage):
    """A norm of a region, on the frames that the convolution after it takes."""

    def __init__(self, norm: torch.nn.Module, way: _Way) -> None:
        super().__init__()
        self.norm = norm
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return host_forward(self.norm, self.way.pick(x))


class _Convolution(Passage):
    """A causal convolution of a region, on frames that were picked, or on all that it is given."""

    def __init__(self, way: _Way, given: torch.Tensor | None = None) -> None:
        super().__init__()
        self.way = way
        self.given = given

    def forward(self, x: torch.Tensor, causal: bool = True) -> torch.Tensor:
        return self.way.convolve(x if self.given is None else self.way.pick(self.given))


class _Given(Passage):
    """Gives what is known already."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.value = value

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        return self.value


class _State:
    """What the host's code finds kept, by thread, in a region: nothing, or one thing; what it keeps
    is for nobody.
    """

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def get(self, _: int, default: Any = None) -> Any:
        return default if self.value is None else self.value

    def __setitem__(self, thread: int, value: Any) -> None:
        pass


class _Picks:
    """Indices on the device; those of few forms come over and over, in every block."""

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
    """What one convolution does with a piece: the frames that it kept before, if any; which of all
    it takes; and whether more will come.
    """

    kept: torch.Tensor | None
    taken: tuple[int, ...]
    is_last: bool

    @property
    def gives(self) -> int:
        return len(self.taken) - KEPT

    def state(self, keeps: torch.Tensor) -> tuple[torch.Tensor | None, bool]:
        """What the host would find of it before the next piece."""
        return (None, True) if self.is_last else (keeps, False)


def _piece(convolution: Any, frames: int, causal: bool, thread: int) -> _Piece | None:
    """How a convolution goes by so many frames; None where it kept less than it needs."""
    kept, is_last = convolution.temporal_cache_state.get(thread, (None, False))
    body: tuple[int, ...] = tuple(range(frames))
    if kept is not None:
        if kept.shape[_FRAMES] != KEPT:
            return None
        before: tuple[int, ...] = _OF_KEPT
    else:
        before = (0, 0)
        if not causal:
            body = body[1:]
    after = (frames - 1,) if is_last and not causal else ()
    return _Piece(kept, before + body + after, is_last)


def _frames_like(x: torch.Tensor, channels: int, count: int) -> torch.Tensor:
    """Frames that nobody reads."""
    if x.shape[1] == channels and x.shape[_FRAMES] >= count:
        return x[:, :, :count]
    return x.new_zeros((x.shape[0], channels, count, *x.shape[3:]))


def _residual(module: Any, picks: _Picks) -> Callable[[Call, Forward], Forward]:
    """Return what makes a residual block's forward."""

    def serve(call: Call, x: torch.Tensor, causal: bool, timestep: Any) -> torch.Tensor | None:
        thread, frames = threading.get_ident(), x.shape[_FRAMES]
        past = module.temporal_cache_state.get(thread)
        held = 0 if past is None else past.shape[_FRAMES]
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
            past = torch.cat([past] * KEPT, _FRAMES)
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

    def make(call: Call, host: Forward) -> Forward:
        def forward(
            input_tensor: torch.Tensor, causal: bool = True, timestep: torch.Tensor | None = None
        ) -> torch.Tensor:
            result = serve(call, input_tensor, causal, timestep)
            return host() if result is None else result

        return forward

    return make


def _left(past: torch.Tensor | None, x: torch.Tensor, begin: int) -> torch.Tensor | None:
    """The frames of both that no result took yet, in memory of their own: a view would keep the
    whole piece.
    """
    if begin >= KEPT + x.shape[_FRAMES]:
        return None
    rest = x[:, :, max(0, begin - KEPT) :]
    if begin < KEPT and past is not None:
        return torch.cat([past[:, :, begin:], rest], _FRAMES)
    return rest.clone()


class _Past(tuple[Any, ...]):
    """What the host keeps of an upsampling, with the frame that it was made of."""

    frame: torch.Tensor | None


def _up(module: Any, picks: _Picks) -> Callable[[Call, Forward], Forward]:
    """Return what makes an upsampling's forward."""

    def serve(call: Call, x: torch.Tensor, causal: bool) -> torch.Tensor | None:
        thread, frames = threading.get_ident(), x.shape[_FRAMES]
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

    def make(call: Call, host: Forward) -> Forward:
        def forward(
            x: torch.Tensor, causal: bool = True, timestep: torch.Tensor | None = None
        ) -> torch.Tensor:
            result = serve(call, x, causal)
            return host() if result is None else result

        return forward

    return make


def _past(module: Any, frames: torch.Tensor | None) -> _Past:
    """What the host would keep for these frames, by its own code: where it makes the next piece, it
    goes on from there.
    """
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
