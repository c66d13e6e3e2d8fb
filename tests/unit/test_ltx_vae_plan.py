"""LTX's plan: a region on a piece of a video gives what the host's block gives, whoever made the
piece before, and leaves the frames that the next one needs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from warmgraph_backends.families.catalogue import plan_model
from warmgraph_backends.plans.plan import Place, Plan
from warmgraph_backends.plans.specs import quick_signature
from warmgraph_tools.inprocess import Host

WIDTH = 8
BLOCKS = {
    "decoder_blocks": [
        ["res_x", 1],
        ["compress_space", {"multiplier": 2}],
        ["res_x_y", {"multiplier": 1}],
        ["compress_time", {"multiplier": 1}],
        ["res_x_y", {"multiplier": 2}],
        ["compress_all", {"multiplier": 2, "residual": True}],
        ["res_x", 2],
    ],
    "encoder_blocks": [
        ["res_x", 1],
        ["compress_space_res", {"multiplier": 2}],
        ["res_x_y", {"multiplier": 2}],
        ["compress_time_res", {"multiplier": 1}],
        ["compress_all_res", {"multiplier": 1}],
        ["res_x", 1],
    ],
}
#: [batch, frames, height, width] of a latent.
SIZES = [(1, 1, 2, 3), (2, 2, 3, 2), (1, 6, 2, 2)]
#: Bytes of a piece.
PIECES = [2**40, 60_000, 5_000, 1]


def make(**config: Any) -> Any:
    """A VAE of the host by its own class, whose activations are of order one."""
    from comfy.ldm.lightricks.vae.causal_video_autoencoder import VideoVAE

    model = VideoVAE(
        config={
            "dims": 3,
            "latent_channels": 128,
            "encoder_base_channels": WIDTH,
            "decoder_base_channels": WIDTH,
            "norm_layer": "pixel_norm",
            "patch_size": 4,
            "latent_log_var": "uniform",
            "causal_decoder": False,
            "timestep_conditioning": False,
            "spatial_padding_mode": "zeros",
            **BLOCKS,
            **config,
        }
    )
    generator = torch.Generator().manual_seed(0)
    for name, value in model.state_dict().items():
        noise = torch.randn(value.shape, generator=generator)
        if name.endswith("std-of-means"):
            value.copy_(1 + 0.1 * noise.abs())
        elif value.dim() > 1:
            value.copy_(noise / value[0].numel() ** 0.5)
        else:
            value.copy_(0.02 * noise)
    return model.eval().requires_grad_(False)


class Regions:
    """The places of a plan, each served by its form's own reference when `serves` says so."""

    def __init__(self, plan: Plan, serves: Callable[[], bool]) -> None:
        self.plan = plan
        self.serves = serves
        self.calls = 0

    def _call(self, place: Place) -> Any:
        specs = place.form.inputs(place.module, "float32")

        def call(*inputs: torch.Tensor) -> Any:
            if not self.serves():
                return None
            assert len(inputs) == len(specs)
            sizes: dict[str, int] = {}
            for spec, value in zip(specs, inputs, strict=True):
                assert str(value.dtype) == f"torch.{spec.dtype}"
                for dim, size in zip(spec.dims, value.shape, strict=True):
                    known = sizes.setdefault(dim, size) if isinstance(dim, str) else dim
                    assert known == size, spec
            self.calls += 1
            results = place.form.computed(place.module, inputs)
            return results if len(results) > 1 else results[0]

        return call

    def __enter__(self) -> Regions:
        for dispatch in self.plan.dispatches:
            calls: list[Any] = [self._call(place) for place in dispatch.regions]
            for module, name, forward in dispatch.forwards(calls):
                module.__dict__[name] = forward
        return self

    def __exit__(self, *_: object) -> None:
        for dispatch in self.plan.dispatches:
            dispatch.module.__dict__.pop("forward", None)
            if dispatch.follower is not None:
                dispatch.follower.module.__dict__.pop("forward", None)


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize(
    "config",
    [{}, {"spatial_padding_mode": "reflect"}, {"causal_decoder": True}, {"timestep": True}],
    ids=str,
)
def test_regions_give_what_the_host_does_and_either_goes_on_where_the_other_was(
    host: Host, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]
) -> None:
    from comfy.ldm.lightricks.vae import causal_video_autoencoder as module

    timed = config.pop("timestep", False)
    model = make(timestep_conditioning=timed, **config)
    plan = plan_model(model)
    assert isinstance(plan, Plan)
    assert len(plan.dispatches) == 9 - timed and len(plan.outside) == timed
    for piece, (batch, *sides) in itertools.product(PIECES, SIZES):
        if timed and batch > 1:  # which the host's own does not take
            continue
        monkeypatch.setattr(module, "get_max_chunk_size", lambda _, piece=piece: piece)
        generator = torch.Generator().manual_seed(1)
        latent = torch.randn((batch, 128, *sides), generator=generator)
        frames = 4 * sides[0] - 3
        pixels = torch.rand((batch, 3, frames, *(16 * n for n in sides[1:])), generator=generator)
        torch.manual_seed(2)
        expected = model.decode(latent), model.encode(pixels)
        turns = itertools.cycle((True, True, False, True, False))
        for serves in (lambda: True, lambda turns=turns: next(turns)):
            with Regions(plan, serves) as regions:
                torch.manual_seed(2)
                given = model.decode(latent), model.encode(pixels)
            assert regions.calls > 0
            torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-5)
            kept = [n for n, m in model.named_modules() if getattr(m, "temporal_cache_state", None)]
            assert kept == []


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"norm_layer": "group_norm"}, "VAE blocks with other norms than by pixels"),
        ({"decoder_blocks": [["res_x", {"num_layers": 1, "inject_noise": True}]]}, "add noise"),
    ],
)
def test_what_is_not_served_is_named(host: Host, config: dict[str, Any], reason: str) -> None:
    from comfy.ldm.lightricks.vae import causal_video_autoencoder as module

    width = {"encoder_base_channels": 32, "decoder_base_channels": 32}
    plan = plan_model(make(**config, **width))
    assert isinstance(plan, Plan)
    assert any(reason in words for _, words in plan.outside)

    class Other(module.ResnetBlock3D):  # type: ignore[name-defined, misc]
        pass

    model = make()
    model.decoder.up_blocks[0].res_blocks[0].__class__ = Other
    plan = plan_model(model)
    assert isinstance(plan, Plan)
    assert [name for name, _ in plan.outside] == ["decoder.up_blocks.0.res_blocks.0"]


def test_places_of_one_kind_take_the_same(host: Host) -> None:
    plan = plan_model(make())
    assert isinstance(plan, Plan)
    taken: dict[Any, Any] = {}
    for place in plan.places:
        inputs = place.form.inputs(place.module, "float32")
        assert taken.setdefault(quick_signature(place), inputs) == inputs, place.name
