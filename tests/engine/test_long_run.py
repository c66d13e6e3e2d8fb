"""A long run by chance: prompts of two small models, beside packs that change what blocks get,
attributes in place, leaves, the root, and the maths around; interrupts and errors among them. No
image is another one than ComfyUI's, no prompt fails that would not fail without us, and after each
everything is compiled again.
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
from .lab import TOLERANCE, Lab, relative

#: Of a whole image, which adds up what its calls differ by.
IMAGE = 10 * TOLERANCE
SIZES = ((8, 8), (8, 12), (12, 8))

#: Gives a MODEL that a node of a pack made of another one.
Node = Callable[[Any], Any]
#: What a pack does to the live model, for as long as it lasts.
Harm = Callable[[Any], AbstractContextManager[Any]]


def _root(model: Any) -> Any:
    return model.model.diffusion_model


def _as_it_is(model: Any) -> Any:
    return model


def _leaves_alone(_: Any) -> AbstractContextManager[Any]:
    return nullcontext()


# --- what blocks are given ---


def keeping_what_a_block_was_given(model: Any) -> Any:
    """A function in a block's place that gives back what it gave the block."""

    def function(args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        given = args["img"]
        result = dict(extra["original_block"](args))
        return {**result, "img": given}

    clone = model.clone()
    clone.set_model_patch_replace(function, "dit", "double_block", 0)
    return clone


# --- the live model ---


@contextmanager
def attribute_set(model: Any) -> Iterator[None]:
    """A number that a norm computes with, set in place."""
    norm = next(m for m in _root(model).modules() if isinstance(m, torch.nn.LayerNorm))
    before, norm.eps = norm.eps, 0.5
    try:
        yield
    finally:
        norm.eps = before


def _put(owner: Any, name: str, value: Any) -> AbstractContextManager[Any]:
    @contextmanager
    def put() -> Iterator[None]:
        owner.__dict__[name] = value
        try:
            yield
        finally:
            del owner.__dict__[name]

    return put()


def _products(model: Any) -> list[Any]:
    return [
        layer
        for name, layer in _root(model).named_modules()
        if "blocks." in name and hasattr(layer, "in_features")
    ]


def product_replaced(model: Any) -> AbstractContextManager[Any]:
    """A product of a block that another function computes."""
    layer = _products(model)[0]
    host = type(layer).forward
    return _put(layer, "forward", lambda x: 0.5 * host(layer, x))


def root_replaced(model: Any) -> AbstractContextManager[Any]:
    """A forward on the root itself, which goes round what is wrapped around the model's own."""
    root = _root(model)
    return _put(root, "forward", lambda *args, **named: -type(root).forward(root, *args, **named))


def raising(model: Any) -> AbstractContextManager[Any]:
    """A layer that raises."""

    def forward(*_: Any) -> Any:
        raise SomebodyError("a layer of somebody's failed")

    return _put(_products(model)[-1], "forward", forward)


def cancelling(model: Any) -> AbstractContextManager[Any]:
    """Cancel is pressed while a layer computes."""
    import comfy.model_management as management

    layer = _products(model)[0]
    host = type(layer).forward

    def forward(x: torch.Tensor) -> Any:
        management.interrupt_current_processing()
        return host(layer, x)

    return _put(layer, "forward", forward)


# --- the maths around ---


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


def within_a_mode(_: Any) -> AbstractContextManager[Any]:
    return _Softer()


def within_autocast(_: Any) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


# --- nodes ---


def _lora(model: Any, count: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(9)
    names = {id(layer): name for name, layer in model.model.named_modules()}
    file = {}
    for layer in _products(model)[:count]:
        name = names[id(layer)]
        file[f"{name}.lora_up.weight"] = torch.randn(layer.out_features, 4, generator=draw)
        file[f"{name}.lora_down.weight"] = 0.05 * torch.randn(4, layer.in_features, generator=draw)
    return file


def with_lora(model: Any) -> Any:
    import comfy.sd

    return comfy.sd.load_lora_for_models(model, None, _lora(model, 5), 0.8, 0.0)[0]


def with_bypass_lora(model: Any) -> Any:
    import comfy.sd

    return comfy.sd.load_bypass_lora_for_models(model, None, _lora(model, 5), 0.8, 0.0)[0]


class Pack(NamedTuple):
    """What somebody does: by a node, to the live model; and what the prompt ends with, if it ends
    with an error.
    """

    name: str
    kinds: tuple[str, ...]
    node: Node = _as_it_is
    harm: Harm = _leaves_alone
    raises: str | None = None


BOTH = ("flux1", "wan")
PACKS = (
    Pack("nobody", BOTH),
    Pack("keeps", ("flux1",), node=keeping_what_a_block_was_given),
    Pack("attribute", BOTH, harm=attribute_set),
    Pack("product", BOTH, harm=product_replaced),
    Pack("root", BOTH, harm=root_replaced),
    Pack("hook", BOTH, harm=hooked_everywhere),
    Pack("mode", BOTH, harm=within_a_mode),
    Pack("autocast", BOTH, harm=within_autocast),
    Pack("lora", BOTH, node=with_lora),
    Pack("bypass", BOTH, node=with_bypass_lora),
    Pack("error", BOTH, harm=raising, raises="SomebodyError"),
    Pack("cancel", BOTH, harm=cancelling, raises="InterruptProcessingException"),
)


class Prompt(NamedTuple):
    """One by chance."""

    kind: str
    pack: Pack
    size: tuple[int, int]
    batch: int
    tokens: int
    cfg: float
    steps: int
    compiled_first: bool


def _draw(chance: random.Random, kind: str, pack: Pack) -> Prompt:
    return Prompt(
        kind,
        pack,
        chance.choice(SIZES),
        chance.choice((1, 2)),
        chance.randint(3, 30),
        chance.choice((1.0, 3.0)),
        chance.choice((1, 2)),
        chance.random() < 0.5,
    )


class Studio:
    """Two small models, each by itself and through Compile Model."""

    def __init__(self, host: Host, lab: Lab, when_missing: str) -> None:
        """Have the models' own graphs built.

        Args:
            when_missing: of those that a pack makes the models need besides.
        """
        self.host, self.lab, self.when_missing = host, lab, when_missing
        self.plain = {kind: transformers.load(kind) for kind in BOTH}
        for model in self.plain.values():
            lab.compiled(model)
        self.ours = {kind: self._compiled(model) for kind, model in self.plain.items()}

    def _compiled(self, model: Any) -> Any:
        ours = self.lab.compiled(model, when_missing=self.when_missing)
        self.lab.settle()
        return ours

    def image(self, model: Any, prompt: Prompt) -> Any:
        """The image, or the name of the error that the prompt ends with."""
        import comfy.model_management as management

        kind, (height, width) = prompt.kind, prompt.size
        texts = (transformers.conditioning(kind, prompt.tokens, seed=seed) for seed in (1, 2))
        latent = transformers.latent(kind, height, width, batch=prompt.batch)
        try:
            with prompt.pack.harm(model):
                return self.host.sample(
                    model,
                    *texts,
                    latent=latent,
                    steps=prompt.steps,
                    cfg=prompt.cfg,
                    scheduler="simple",
                )
        except (SomebodyError, management.InterruptProcessingException) as error:
            return type(error).__name__
        finally:
            management.interrupt_current_processing(False)

    def check(self, prompt: Prompt) -> None:
        """Sample beside a pack, then without it: both as ComfyUI does."""
        kind, node = prompt.kind, prompt.pack.node
        expected = self.image(node(self.plain[kind]), prompt)
        if prompt.compiled_first or node is _as_it_is:
            model = node(self.ours[kind])
        else:
            model = self._compiled(node(self.plain[kind]))
        self._compare(self.image(model, prompt), expected, prompt)
        self.lab.wait_until(lambda: self.lab.is_settled(model))
        free = prompt._replace(pack=PACKS[0])
        eager = self.image(self.plain[kind], free)
        self._compare(self.image(self.ours[kind], free), eager, prompt)
        report = self.lab.engine.report(self.ours[kind])
        assert report["regions"]["eager"] == 0, (prompt, report["eager"])

    def _compare(self, found: Any, expected: Any, prompt: Prompt) -> None:
        if prompt.pack.raises is not None and isinstance(expected, str):
            assert expected == prompt.pack.raises == found, (prompt, found)
        else:
            assert isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor), prompt
            assert relative(found, expected) <= IMAGE, prompt


@pytest.mark.parametrize(
    ("when_missing", "count"),
    [
        pytest.param("never", 7, id="short"),
        pytest.param("wait", 200, id="long", marks=pytest.mark.slow),
    ],
)
def test_no_prompt_is_wrong_or_fails_whatever_packs_do(
    host: Host, shared: Lab, when_missing: str, count: int
) -> None:
    studio, chance = Studio(host, shared, when_missing), random.Random(33)
    whole = [(kind, pack) for pack in PACKS for kind in pack.kinds]
    for kind, pack in whole:  # each once: what it needs of its own is built, if at all
        studio.check(_draw(chance, kind, pack))
    jobs = shared.jobs()
    for _ in range(count):
        kind, pack = chance.choice(whole)
        studio.check(_draw(chance, kind, pack))
    assert shared.jobs() == jobs
