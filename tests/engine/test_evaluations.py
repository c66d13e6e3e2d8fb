"""Whose step a call is: models that run with another one's options, or past this node."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch

from warmgraph_backends.attaching.attached import KEY
from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host

from .lab import TOLERANCE, Lab, relative

PARTS = 5  # of a small Flux 1
STEPS = 2
#: Where a pack has its folder, this code has its package.
PACK = __name__.partition(".")[0]


class Flux:
    """A small Flux 1 of its own weights, with and without Compile Model."""

    def __init__(self, host: Host, lab: Lab, *, seed: int = 0) -> None:
        self.host, self.lab = host, lab
        self.plain = transformers.load("flux1", seed=seed)
        self.ours = lab.compiled(self.plain)

    @property
    def root(self) -> Any:
        return self.plain.model.diffusion_model

    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = self.lab.engine.report(self.ours)
        return report

    def sample(self, model: Any) -> torch.Tensor:
        result: torch.Tensor = self.host.sample(
            model,
            transformers.conditioning("flux1", 13),
            transformers.conditioning("flux1", 7, seed=2),  # a call of its own
            latent=transformers.latent("flux1", 8, 8),
            steps=STEPS,
            cfg=3.0,
            scheduler="simple",
        )
        assert result.isfinite().all()
        return result

    def guided(self, guider: Any) -> torch.Tensor:
        """As SamplerCustomAdvanced samples."""
        sigmas = torch.tensor([1.0, 0.6, 0.0])
        sampler = self.host.node("KSamplerSelect", sampler_name="euler")[0]
        latent = transformers.latent("flux1", 8, 8)["samples"]
        noise = torch.randn(latent.shape, generator=torch.Generator().manual_seed(3))
        result: torch.Tensor = guider.sample(noise, latent, sampler, sigmas, seed=3)
        assert result.isfinite().all()
        return result

    def is_compiled(self, *, calls: int, eager: int = 0) -> bool:
        """All of it, in so many calls since it was last asked."""
        report = self.report()
        assert report["regions"] == {"total": PARTS, "compiled": PARTS, "eager": 0}, report["eager"]
        assert report["standing"] == "compiled" and report["ready"] == 0
        assert report["calls"] == {"compiled": calls * PARTS, "eager": eager}
        return True


@pytest.fixture
def flux(host: Host, shared: Lab) -> Flux:
    return Flux(host, shared)


@pytest.fixture
def other(host: Host, shared: Lab) -> Flux:
    return Flux(host, shared, seed=7)


def _reason(report: dict[str, Any]) -> str:
    """Why nothing of a model ran compiled, the one reason."""
    assert report["standing"] == "eager" and report["regions"]["compiled"] == 0, report["regions"]
    (entry,) = report["eager"]
    assert entry["places"] == PARTS
    assert any(str(entry["reason"])[:60] in each["text"] for each in report["lines"])
    return str(entry["reason"])


# --- models that run with another one's options ---------------------------------------------------


def _dual(flux: Flux, model: Any, negative: Any) -> Any:
    return flux.host.node(
        "DualModelGuider",
        model=model,
        model_negative=negative,
        positive=transformers.conditioning("flux1", 13),
        negative=transformers.conditioning("flux1", 7, seed=2),
        cfg=3.0,
    )[0]


def test_each_model_of_a_dual_model_guider_runs_through_its_own_session(
    flux: Flux, other: Flux
) -> None:
    eager = flux.guided(_dual(flux, flux.plain, other.plain))
    jobs = flux.lab.jobs()
    for run in (1, 2):
        image = flux.guided(_dual(flux, flux.ours, other.ours))
        assert relative(image, eager) < TOLERANCE and not torch.equal(image, eager)
        for each in (flux, other):
            assert each.is_compiled(calls=run * STEPS)
    assert flux.lab.jobs() == jobs
    assert relative(eager, flux.guided(_dual(flux, flux.plain, flux.plain))) > 1e-3


def test_a_second_model_without_compile_model_is_named_on_the_first(
    flux: Flux, other: Flux
) -> None:
    eager = flux.guided(_dual(flux, flux.plain, other.plain))
    image = flux.guided(_dual(flux, flux.ours, other.plain))
    assert relative(image, eager) < TOLERANCE
    assert flux.is_compiled(calls=STEPS, eager=STEPS)
    assert any("Dual Model CFG Guider" in note for note in flux.report()["notes"])


def test_a_second_model_alone_with_compile_model_says_why_it_is_not_compiled(
    flux: Flux, other: Flux, caplog: pytest.LogCaptureFixture
) -> None:
    eager = flux.guided(_dual(flux, flux.plain, other.plain))
    assert torch.equal(flux.guided(_dual(flux, flux.plain, other.ours)), eager)
    assert "Dual Model CFG Guider" in _reason(other.report())
    assert "no step of the last run came to this node" in caplog.text
    other.sample(other.ours)
    assert other.is_compiled(calls=2 * STEPS)


def _swapping(second: Any, *, tells: bool) -> Any:
    """A sampler that makes its first step by the model that it is given, all others by another.

    Args:
        tells: whether it tells the other's MODEL of the run, as the host does.
    """
    import comfy.model_management as management
    from comfy.samplers import KSAMPLER

    def sample(model: Any, x: Any, sigmas: Any, *, extra_args: Any, callback: Any, **_: Any) -> Any:
        guider = model.inner_model
        first = guider.inner_model
        rows = x.new_ones([x.shape[0]])
        try:
            for number in range(len(sigmas) - 1):
                if number == 1:
                    management.load_models_gpu([second])
                    if tells:
                        second.pre_run()
                    second.model.current_patcher = second
                    guider.inner_model = second.model
                denoised = model(x, sigmas[number] * rows, **extra_args)
                slope = (x - denoised) / sigmas[number]
                x = x + slope * (sigmas[number + 1] - sigmas[number])
        finally:
            guider.inner_model = first
            if tells:
                second.cleanup()
        return x

    return KSAMPLER(sample)


@pytest.mark.parametrize("tells", [True, False])
def test_a_model_that_a_sampler_swaps_in_runs_through_its_own_session(
    flux: Flux, other: Flux, tells: bool
) -> None:
    def swapped(first: Any, second: Any) -> torch.Tensor:
        return flux.host.node(
            "SamplerCustom",
            model=first,
            add_noise=True,
            noise_seed=2,
            cfg=3.0,
            positive=transformers.conditioning("flux1", 13),
            negative=transformers.conditioning("flux1", 7, seed=2),
            sampler=_swapping(second, tells=tells),
            sigmas=torch.tensor([1.0, 0.7, 0.3, 0.0]),
            latent_image=transformers.latent("flux1", 8, 8),
        )[0]["samples"]

    eager = swapped(flux.plain, other.plain)
    jobs = flux.lab.jobs()
    for run in (1, 2):
        image = swapped(flux.ours, other.ours)
        assert relative(image, eager) < TOLERANCE and not torch.equal(image, eager)
        assert flux.is_compiled(calls=run * 2) and other.is_compiled(calls=run * 4)
        for each in (flux, other):
            session = each.ours.get_attachment(KEY)
            assert session.running is None and session.guests == []
    assert flux.lab.jobs() == jobs
    flux.sample(flux.ours)
    assert flux.is_compiled(calls=2 * 2 + 2 * STEPS)


# --- what goes round the wrapper ------------------------------------------------------------------


def _past_wrappers(self: Any, x: Any, timestep: Any, context: Any, *rest: Any, **named: Any) -> Any:
    """A pack's forward of a Flux: it calls what lies within the host's, and does something."""
    named.pop("control", None)
    return 0.9 * type(self)._forward(self, x, timestep, context, *rest, **named)


def _through_wrappers(self: Any, *args: Any, **named: Any) -> Any:
    return 0.9 * type(self).forward(self, *args, **named)


@pytest.mark.parametrize("forward", [_past_wrappers, _through_wrappers])
@pytest.mark.parametrize("how", ["object patch", "in place"])
def test_blocks_stay_compiled_within_a_forward_of_a_packs_on_the_model(
    flux: Flux, forward: Callable[..., Any], how: str
) -> None:
    bound = MethodType(forward, flux.root)

    def patched(model: Any) -> Any:
        clone = model.clone()
        if how == "object patch":
            clone.add_object_patch("diffusion_model.forward", bound)
        return clone

    before = flux.sample(flux.plain)
    jobs = flux.lab.jobs()
    try:
        if how == "in place":
            flux.root.forward = bound
        eager = flux.sample(patched(flux.plain))
        assert relative(eager, before) > 1e-3
        image = flux.sample(patched(flux.ours))
    finally:
        if how == "in place":
            del flux.root.forward
    assert relative(image, eager) < TOLERANCE and not torch.equal(image, eager)
    assert flux.is_compiled(calls=2 * STEPS)
    assert relative(flux.sample(flux.ours), before) < TOLERANCE
    assert flux.is_compiled(calls=4 * STEPS) and flux.lab.jobs() == jobs


class Wrapped(torch.nn.Module):
    """A module that a pack puts in place of the model's."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.dtype = inner, inner.dtype

    def forward(self, *args: Any, **named: Any) -> Any:
        return 0.9 * self.inner._forward(*args, **named)


def _other_module(model: Any) -> Any:
    clone, root = model.clone(), model.model.diffusion_model
    inner = root.inner if isinstance(root, Wrapped) else root  # as the last run has left it
    clone.add_object_patch("diffusion_model", Wrapped(inner))
    return clone


def _own_way(model: Any) -> Any:
    def around(apply: Any, given: dict[str, Any]) -> Any:
        others = given["c"]
        options = {n: o for n, o in others["transformer_options"].items() if n != "wrappers"}
        return 0.9 * apply(
            given["input"], given["timestep"], **{**others, "transformer_options": options}
        )

    clone = model.clone()
    clone.set_model_unet_function_wrapper(around)
    return clone


def _other_class(model: Any) -> Any:
    """A class of a pack's, whose forward asks for no wrappers of the host's."""
    clone, root = model.clone(), model.model.diffusion_model
    cls = next(each for each in type(root).__mro__ if each.__module__.startswith("comfy."))

    class Other(cls):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **named: Any) -> Any:
            return 0.9 * self._forward(*args, **named)

    clone.add_object_patch("diffusion_model.__class__", Other)
    return clone


@pytest.mark.parametrize(
    ("patch", "named"),
    [
        (_other_module, "puts a Wrapped in place of the model"),
        (_own_way, "runs the model in a way of its own"),
    ],
)
def test_a_run_without_a_step_of_ours_says_whose_code_is_in_the_place(
    flux: Flux, patch: Callable[[Any], Any], named: str
) -> None:
    eager = flux.sample(patch(flux.plain))
    ours = patch(flux.ours)
    assert torch.equal(flux.sample(ours), eager)
    reason = _reason(flux.report())
    assert f"{PACK} {named}" in reason, reason
    flux.sample(flux.ours)
    assert flux.report()["standing"] == "compiled"


def test_a_model_of_another_class_says_so_from_its_first_run_on(flux: Flux) -> None:
    eager = flux.sample(_other_class(flux.plain))
    ours = _other_class(flux.ours)
    for _ in range(2):
        assert torch.equal(flux.sample(ours), eager)
        report = flux.report()
        assert report["standing"] == "eager"
        (entry,) = report["eager"]
        assert entry["reason"].startswith(f"Other is another node's own class ({PACK})")
    flux.sample(flux.ours)


def test_a_model_that_torch_compile_runs_as_a_whole_says_so(flux: Flux) -> None:
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    def whole(model: Any) -> Any:
        clone = model.clone()
        set_torch_compile_wrapper(model=clone, backend="eager")
        return clone

    eager = flux.sample(flux.plain)
    for ours in (whole(flux.ours), flux.lab.compiled(whole(flux.plain))):
        assert relative(flux.sample(ours), eager) < TOLERANCE
        assert "TorchCompileModel" in _reason(flux.lab.engine.report(ours))


def test_a_model_whose_blocks_torch_compile_runs_says_so(flux: Flux) -> None:
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    def blocks(model: Any) -> Any:
        clone = model.clone()
        names = ("double_blocks", "single_blocks")
        keys = [
            f"diffusion_model.{name}.{number}"
            for name in names
            for number in range(len(getattr(flux.root, name)))
        ]
        set_torch_compile_wrapper(model=clone, backend="eager", keys=keys)
        return clone

    eager = flux.sample(flux.plain)
    ours = blocks(flux.ours)
    assert relative(flux.sample(ours), eager) < TOLERANCE
    found = [each["reason"] for each in flux.lab.engine.report(ours)["eager"]]
    assert any(reason.startswith("torch.compile runs these blocks") for reason in found), found
    assert not any("OptimizedModule" in reason for reason in found)


def test_a_run_that_fails_before_its_first_step_claims_nothing(flux: Flux) -> None:
    from comfy.patcher_extension import WrappersMP

    def fail(*_: Any) -> Any:
        raise ValueError("theirs")

    clone = flux.ours.clone()
    clone.add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, "somebody", fail)
    with pytest.raises(ValueError, match="theirs"):
        flux.sample(clone)
    report = flux.report()
    assert report["regions"]["eager"] == 0 and report["standing"] == "waiting"
