"""Prompts by chance for one small model: drawn from their number alone, so that each can be made
again by itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch

from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host

from .beside import SomebodyError
from .deepcache.cached import cached
from .lab import Lab
from .stepcache.stepped import stepped
from .test_transformer_controlnets import flux_network

UNET = "narrowxl"
KINDS = (UNET, "flux1", "wan", "zimage", "qwen", "sd3", "chroma", "hunyuan")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WEIGHTS = ("own", "own", "merged LoRA", "bypass LoRA", "hooked LoRA", "merged models")
CACHES = (None, None, None, "EasyCache", "Step Cache", "DeepCache")
ENDS = (*(None,) * 6, "cancel", "cancel at once", "error")
UNLOADED = (*("never",) * 4, "before", "between")
SAMPLERS = ("euler", "dpmpp_2m", "heun")
_KEY = "tests.campaign"


# --- what a pack does to the live model, or around it, for as long as a prompt lasts --------------


@contextmanager
def attribute_set(root: Any) -> Iterator[None]:
    """A number that a norm computes with, set in place."""
    norm = next(m for m in root.modules() if isinstance(m, torch.nn.LayerNorm))
    before, norm.eps = norm.eps, 0.5
    try:
        yield
    finally:
        norm.eps = before


@contextmanager
def root_replaced(root: Any) -> Iterator[None]:
    """A forward on the root itself, which goes round what is wrapped around the model's own."""
    root.forward = lambda *args, **named: -type(root).forward(root, *args, **named)
    try:
        yield
    finally:
        del root.forward


@contextmanager
def hooked_everywhere(_: Any) -> Iterator[None]:
    """A hook of torch's on all modules."""

    def hook(module: Any, _args: Any, result: Any) -> Any:
        return 0.9 * result if type(module).__name__ == "Linear" else result

    handle = torch.nn.modules.module.register_module_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


class _Softer(torch.overrides.TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        return 0.9 * result if function is torch.nn.functional.linear else result


AROUND: dict[str | None, Callable[[Any], AbstractContextManager[Any]]] = {
    None: lambda _: nullcontext(),
    "attribute": attribute_set,
    "root": root_replaced,
    "hook": hooked_everywhere,
    "mode": lambda _: _Softer(),
    "autocast": lambda _: torch.autocast("cpu", torch.bfloat16),
}


class Prompt(NamedTuple):
    """One by chance."""

    kind: str
    dtype: str
    number: int
    weights: str
    cache: str | None
    end: str | None
    unloaded: str
    controlled: bool
    compiled_first: bool
    size: tuple[int, int]
    batch: int
    frames: int
    tokens: tuple[int, int]
    cfg: float
    steps: int
    sampler: str
    seed: int
    around: str | None = None


def draw(kind: str, dtype: torch.dtype, number: int) -> Prompt:
    name = str(dtype).removeprefix("torch.")
    chance = random.Random(f"{kind}/{name}/{number}")
    cache = chance.choice(CACHES if kind == UNET else CACHES[:-1])
    prompt = Prompt(
        kind,
        name,
        number,
        chance.choice(WEIGHTS),
        cache,
        chance.choice(ENDS),
        chance.choice(UNLOADED),
        kind in (UNET, "flux1") and chance.random() < 0.3,
        chance.random() < 0.5,
        (2 * chance.randint(3, 9), 2 * chance.randint(3, 9)),
        chance.randint(1, 3),
        chance.randint(1, 2),
        (chance.randint(3, 90), chance.randint(3, 90)),
        chance.choice((1.0, 3.0)),
        chance.randint(7, 9) if cache else chance.randint(2, 4),
        chance.choice(SAMPLERS),
        chance.randint(1, 999),
    )
    may_meet = kind in ("flux1", "wan") and cache is None and prompt.weights == "own"
    return prompt._replace(around=chance.choice(list(AROUND))) if may_meet else prompt


def _load(host: Host, kind: str, dtype: torch.dtype, seed: int) -> tuple[Any, Any]:
    """A MODEL that computes in a dtype, and a CLIP if it came with one."""
    if kind != UNET:
        return transformers.load(kind, seed=seed, dtype=dtype), None
    from comfy import model_management

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_management, "unet_dtype", lambda **_: dtype)
        patch.setattr(model_management, "unet_manual_cast", lambda *_, **__: None)
        model, clip, _ = host.load(kind, seed=seed)
    assert model.model.get_dtype_inference() is dtype
    return model, clip


class Studio:
    """A model and another one of its kind, plain and through Compile Model, and all that prompts
    may do to them.
    """

    def __init__(self, host: Host, lab: Lab, kind: str, dtype: torch.dtype) -> None:
        """Have the model's own graphs built, and its network's."""
        self.host, self.lab, self.kind = host, lab, kind
        self.plain, self._clip = _load(host, kind, dtype, 0)
        self._other, _ = _load(host, kind, dtype, 1)
        self._lora = self._make_lora()
        self._controls = self._load_controls(dtype)
        self.ours = lab.compiled(self.plain)
        first = draw(kind, dtype, 0)._replace(weights="own", cache=None, end=None, batch=2)
        for controlled in {False, bool(self._controls)}:
            self.image(self.ours, first._replace(controlled=controlled), ours=True)
        lab.wait_until(lambda: lab.is_settled(self.ours))
        #: What has a graph of its own, which its first prompt asks for.
        self.may_build = {"bypass LoRA", "attribute"}

    def _make_lora(self) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(9)
        root = self.plain.model.diffusion_model
        layers = [
            (name, module)
            for name, module in root.named_modules(prefix="diffusion_model")
            if ("blocks." in name or "layers." in name) and hasattr(module, "in_features")
        ]
        file = {}
        for name, layer in layers[:5]:
            up = torch.randn(layer.out_features, 4, generator=generator)
            down = torch.randn(4, layer.in_features, generator=generator)
            file[f"{name}.lora_up.weight"] = up
            file[f"{name}.lora_down.weight"] = down / (4 * layer.in_features) ** 0.5
        return file

    def _load_controls(self, dtype: torch.dtype) -> tuple[Any, Any] | None:
        if self.kind == UNET:
            name = self.host.model_file("controlnet", base=UNET)
            (plain,) = self.host.node("ControlNetLoader", control_net_name=name)
        elif self.kind == "flux1":
            import comfy.ops

            made = {"operations": comfy.ops.disable_weight_init, "device": "cpu", "dtype": dtype}
            plain = flux_network(made)
        else:
            return None
        return plain, self.lab.controlled(plain)

    # --- what a prompt does -----------------------------------------------------------------------

    def changed(self, model: Any, weights: str) -> Any:
        """As a node gives a MODEL on with other weights."""
        import comfy.sd

        if weights == "merged LoRA":
            return comfy.sd.load_lora_for_models(model, None, self._lora, 0.8, 0.0)[0]
        if weights == "bypass LoRA":
            return comfy.sd.load_bypass_lora_for_models(model, None, self._lora, 0.8, 0.0)[0]
        if weights == "merged models":
            merge = {"model1": model, "model2": self._other, "ratio": 0.6}
            return self.host.node("ModelMergeSimple", **merge)[0]
        return model

    def _cached(self, model: Any, cache: str | None) -> Any:
        if cache == "DeepCache":
            return cached(model)
        if cache == "Step Cache":
            return stepped(model, speed=1.8)
        if cache == "EasyCache":
            given = {"reuse_threshold": 0.3, "start_percent": 0.1, "end_percent": 0.95}
            return self.host.node("EasyCache", model=model, **given, verbose=False)[0]
        return model

    def _text(self, prompt: Prompt, which: int) -> Any:
        tokens, facts = prompt.tokens[which], dict[str, Any]()
        if prompt.weights == "hooked LoRA" and not which:
            import comfy.hooks

            facts["hooks"] = comfy.hooks.create_hook_lora(self._lora, 0.8, 0.0)
        if self._clip is None:
            return transformers.conditioning(self.kind, tokens, seed=1 + which, **facts)
        encoded = self.host.encode(
            self._clip, " ".join(("cat", "hill")[which] for _ in range(tokens))
        )
        return [[text, {**options, **facts}] for text, options in encoded]

    def image(self, model: Any, prompt: Prompt, *, ours: bool) -> Any:
        """The image, or the name of the error that the prompt ends with."""
        import comfy.model_management as management

        texts = self._text(prompt, 0), self._text(prompt, 1)
        if prompt.controlled:
            assert self._controls is not None
            hint = torch.rand(1, 72, 104, 3, generator=torch.Generator().manual_seed(0))
            texts = self.host.control(texts, self._controls[ours], image=hint)
        height, width = prompt.size
        latent = (
            {"samples": torch.zeros(prompt.batch, 4, height, width)}
            if self.kind == UNET
            else transformers.latent(
                self.kind, height, width, batch=prompt.batch, frames=prompt.frames
            )
        )
        model = _ending(self._cached(model, prompt.cache), prompt.end)
        try:
            with AROUND[prompt.around](model.model.diffusion_model):
                return self.host.sample(
                    model,
                    *texts,
                    latent=latent,
                    steps=prompt.steps,
                    cfg=prompt.cfg,
                    seed=prompt.seed,
                    sampler=prompt.sampler,
                    scheduler="simple",
                )
        except (SomebodyError, management.InterruptProcessingException) as error:
            return type(error).__name__
        finally:
            management.interrupt_current_processing(False)

    def pair(self, prompt: Prompt) -> tuple[Any, Any]:
        """What ComfyUI alone and what we give for a prompt."""
        if prompt.unloaded == "before":
            self.host.unload()
        expected = self.image(self.changed(self.plain, prompt.weights), prompt, ours=False)
        if prompt.unloaded == "between":
            self.host.unload()
        if prompt.compiled_first or prompt.weights == "own":
            model = self.changed(self.ours, prompt.weights)
        else:
            model = self.lab.compiled(self.changed(self.plain, prompt.weights))
        found = self.image(model, prompt, ours=True)
        self.lab.wait_until(lambda: self.lab.is_settled(model))
        return found, expected


def _ending(model: Any, end: str | None) -> Any:
    """The model, with a node that ends the run in its second call, if it is to."""
    from comfy import model_management
    from comfy.patcher_extension import WrappersMP

    if end is None:
        return model
    calls: list[int] = []

    def wrapper(executor: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 2 and end == "error":
            raise SomebodyError("a node of somebody's failed")
        if len(calls) == 2:
            model_management.interrupt_current_processing()
            if end == "cancel at once":
                model_management.throw_exception_if_processing_interrupted()
        return executor(*args, **kwargs)

    clone = model.clone()
    clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, _KEY, wrapper)
    return clone


@contextmanager
def studios(host: Host, lab: Lab) -> Iterator[Callable[[str, torch.dtype], Studio]]:
    """Each one made when it is asked for first; only the last one is kept."""
    made: dict[tuple[str, torch.dtype], Studio] = {}

    def studio(kind: str, dtype: torch.dtype) -> Studio:
        if (kind, dtype) not in made:
            made.clear()
            made[kind, dtype] = Studio(host, lab, kind, dtype)
        return made[kind, dtype]

    yield studio
    made.clear()
