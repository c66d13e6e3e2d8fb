"""Where others put their own code into a layer of a block, the block is compiled around it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from warmgraph_backends.families.catalogue import plan_model
from warmgraph_backends.plans.plan import Plan
from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host

from .lab import TOLERANCE, Lab, relative
from .others import REPLACED, ROOT, Model, Patch, bypassed, called, lora_of, products
from .subject import Subject, reasons


def test_a_lora_in_bypass_mode_leaves_all_blocks_compiled(host: Host, shared: Lab) -> None:
    model = Model(host, shared, "zimage")
    everything = bypassed(lora_of(model.plain, products(model.plain)))
    found = model.check(everything)
    assert found[REPLACED] == len(products(model.plain))
    built = shared.jobs()
    few = products(model.plain, r"\.1\.attention\.qkv")
    assert model.check(bypassed(lora_of(model.plain, few)))[REPLACED] == len(few) > 0
    assert shared.jobs() == built  # the same graphs call any of a block's products


@pytest.mark.slow
def test_who_waits_for_graphs_waits_for_those_around_others_code_too(host: Host, lab: Lab) -> None:
    """Which the host puts in when it loads the model: after the node has waited."""
    from comfy.model_management import InterruptProcessingException

    model = Model(host, lab, "zimage")
    ready = bypassed(lora_of(model.plain, products(model.plain)))(model.compiled)

    def cancelled() -> None:
        raise InterruptProcessingException

    lab.cancelled = cancelled
    with pytest.raises(InterruptProcessingException):
        model.sample(ready)
    assert not lab.engine._prompts.is_busy()
    lab.cancelled = lambda: None
    model.sample(ready)
    report = model.report(ready)
    assert reasons(report) == {} and report["calls"]["eager"] == 0


# --- what packs do to Wan -------------------------------------------------------------------------


def object_patches(path: str, make: Callable[[Any], Callable[..., Any]]) -> Patch:
    """What a pack does that puts its own forward on a part of each block, for one MODEL."""

    def patch(model: Any) -> Any:
        clone = model.clone()
        for i, block in enumerate(model.model.diffusion_model.blocks):
            part = block.get_submodule(path)
            clone.add_object_patch(f"{ROOT}.blocks.{i}.{path}.forward", make(part))
        return clone

    return patch


def negative_guidance(part: Any) -> Callable[..., Any]:
    """Attention to a text, pushed away from what another one gives."""
    width = part.k.in_features
    other = torch.randn(1, 5, width, generator=torch.Generator().manual_seed(4))

    def forward(x: Any, context: Any, context_img_len: Any = 7, transformer_options: Any = None):
        from comfy.ldm.modules.attention import optimized_attention

        assert context_img_len is None and "cond_or_uncond" in transformer_options
        q = part.norm_q(part.q(x))
        found = []
        for text in (context, other.to(x).expand(x.shape[0], -1, -1)):
            k, v = part.norm_k(part.k(text)), part.v(text)
            found.append(
                optimized_attention(
                    q, k, v, heads=part.num_heads, transformer_options=transformer_options
                )
            )
        guided = 2.0 * found[0] - found[1]
        return part.o(0.3 * guided + 0.7 * found[0])

    return forward


def enhanced(part: Any) -> Callable[..., Any]:
    """Self-attention, scaled by how much frames attend to each other."""

    def forward(x: Any, freqs: Any, transformer_options: Any = None):
        scale = 1.0 + part.q(x).float().std()
        return type(part).forward(part, x, freqs, transformer_options=transformer_options) * scale

    return forward


def chunked(part: Any) -> Callable[..., Any]:
    """A feed-forward in pieces, which writes into what it was given and gives that back."""

    def forward(x: Any) -> Any:
        for piece in x.chunk(3, dim=1):
            piece.copy_(1.1 * part[2](part[1](part[0](piece))))
        return x

    return forward


@pytest.mark.parametrize(
    ("path", "make", "name"),
    [
        ("self_attn", enhanced, "WanSelfAttention"),
        # What the next test shows, too.
        pytest.param(
            *("cross_attn", negative_guidance, "WanT2VCrossAttention"), marks=pytest.mark.slow
        ),
        pytest.param("ffn", chunked, "Sequential", marks=pytest.mark.slow),
    ],
)
def test_what_packs_put_into_wan_leaves_its_blocks_compiled(
    host: Host, shared: Lab, path: str, make: Callable[[Any], Callable[..., Any]], name: str
) -> None:
    wan = Model(host, shared, "wan")
    blocks = wan.plain.model.diffusion_model.blocks
    found = wan.check(object_patches(path, make))
    if path == "ffn":  # of a class of its own on newer hosts
        name = type(blocks[0].ffn).__name__
    assert found == {f"another node replaces the forward of a {name}": len(blocks)}


def test_what_packs_put_into_wan_together(host: Host, shared: Lab) -> None:
    wan = Model(host, shared, "wan")

    def patch(model: Any) -> Any:
        for path, make in {"cross_attn": negative_guidance, "ffn": chunked}.items():
            model = object_patches(path, make)(model)
        lora = lora_of(wan.plain, products(wan.plain, r"blocks\.0\.self_attn\.[qk]"))
        return bypassed(lora)(model)

    found = wan.check(patch)
    assert found[REPLACED] == 2
    fed = type(wan.plain.model.diffusion_model.blocks[0].ffn).__name__
    for name in ("WanT2VCrossAttention", fed):
        assert found[f"another node replaces the forward of a {name}"] == 2


def test_what_a_pack_sets_of_a_part_of_its_own_is_the_parts(host: Host, shared: Lab) -> None:
    """Within the first step of a model that was just loaded: also a name that its class reads."""

    def setting(part: Any) -> Callable[..., Any]:
        guided = negative_guidance(part)

        def forward(*args: Any, **named: Any) -> Any:
            part.inplace, part.head_dim = True, -1
            return guided(*args, **named)

        return forward

    patch = object_patches("cross_attn", setting)
    first = Model(host, shared, "wan")
    ready = patch(first.compiled)
    first.sample(ready, steps=1)
    first.settled(ready)
    fresh, jobs = Model(host, shared, "wan"), shared.jobs()
    ready = patch(fresh.compiled)
    image = fresh.sample(ready, steps=3)
    report = fresh.report(ready)
    assert reasons(report) == {} and report["calls"]["eager"] == 0
    assert relative(image, fresh.sample(patch(fresh.plain), steps=3)) < TOLERANCE
    fresh.sample(ready, steps=3)
    assert reasons(fresh.report(ready)) == {} and shared.jobs() == jobs


# --- code that counts, draws, fails or does what it should not ------------------------------------

GATE = f"{ROOT}.layers.1.feed_forward.w3"


def replaced(name: str, around: Callable[..., Any]) -> Patch:
    """What a pack does that puts `around(forward, input)` in the place of a layer's forward."""

    def patch(model: Any) -> Any:
        clone = model.clone()
        forward = type(model.get_model_object(name)).forward
        layer = model.get_model_object(name)
        clone.add_object_patch(
            f"{name}.forward", lambda *given: around(lambda *x: forward(layer, *x), *given)
        )
        return clone

    return patch


@pytest.fixture
def zimage(host: Host, shared: Lab) -> Model:
    """With the graphs that call any of its products."""
    model = Model(host, shared, "zimage")
    ready = replaced(GATE, lambda forward, x: forward(x))(model.compiled)
    model.sample(ready, steps=1)
    model.settled(ready)
    return model


def test_code_that_counts_its_calls_or_draws_numbers_is_called_once(zimage: Model) -> None:
    calls = []

    def noisy(forward: Any, x: Any) -> Any:
        calls.append(tuple(x.shape))
        result = forward(x)  # which is normed later, so that factors would not count
        return result + 0.1 * len(calls) + torch.rand(result.shape[-1])

    eager = zimage.sample(replaced(GATE, noisy)(zimage.plain))
    assert relative(eager, zimage.sample(zimage.plain)) > 1e-3
    expected = list(calls)
    ours = replaced(GATE, noisy)(zimage.compiled)
    comparisons = zimage.lab.compared(ours)
    calls.clear()
    assert relative(zimage.sample(ours), eager) < TOLERANCE  # compared with the host's maths
    assert calls == expected
    assert zimage.lab.compared(ours) > comparisons
    calls.clear()
    assert relative(zimage.sample(ours), eager) < TOLERANCE
    assert calls == expected
    assert reasons(zimage.report(ours)) == {}


def test_what_such_code_raises_ends_the_prompt_as_it_would_without_us(zimage: Model) -> None:
    from comfy.model_management import InterruptProcessingException

    plain = zimage.sample(zimage.plain)
    for error in (ZeroDivisionError("of a pack"), InterruptProcessingException()):
        turns = iter((False, True))

        def failing(forward: Any, x: Any, turns: Any = turns, error: Any = error) -> Any:
            if next(turns, False):
                raise error
            return forward(x)

        ours = replaced(GATE, failing)(zimage.compiled)
        with pytest.raises(type(error)) as raised:
            zimage.sample(ours)
        assert raised.value is error
        assert relative(zimage.sample(ours), plain) < TOLERANCE
        assert reasons(zimage.report(ours)) == {}
    assert relative(zimage.sample(zimage.compiled), plain) < TOLERANCE
    assert reasons(zimage.report(zimage.compiled)) == {}


def test_a_result_of_another_size_leaves_its_block_to_the_host(zimage: Model) -> None:
    def narrow(forward: Any, x: Any) -> Any:
        return forward(x).mean(-1, keepdim=True)  # which the host's code broadcasts

    theirs = replaced(GATE, narrow)
    eager = zimage.sample(theirs(zimage.plain))
    ours = theirs(zimage.compiled)
    assert relative(zimage.sample(ours), eager) < TOLERANCE
    words = "another node's code in feed_forward.w3 gives something else than the host's"
    assert reasons(zimage.report(ours)) == {words: 1}
    # the graph itself is as good as it was
    other = replaced(GATE, lambda forward, x: 1.5 + forward(x))
    assert (
        relative(zimage.sample(other(zimage.compiled)), zimage.sample(other(zimage.plain)))
        < TOLERANCE
    )
    assert reasons(zimage.report(zimage.compiled)) == {}


def test_what_such_code_keeps_is_not_written_over(zimage: Model) -> None:
    kept: list[tuple[Any, Any]] = []

    def keeping(forward: Any, x: Any) -> Any:
        result = forward(x)
        kept.append((result, result.clone()))
        return result

    zimage.sample(replaced(GATE, keeping)(zimage.compiled))
    assert len(kept) > 1
    assert all(torch.equal(result, copy) for result, copy in kept)


def test_a_block_list_of_hooks_is_called_around_what_is_compiled(zimage: Model) -> None:
    root = zimage.plain.model.diffusion_model
    seen: list[Any] = []
    plain = zimage.sample(zimage.plain)

    def hook(module: Any, given: Any, result: Any) -> Any:
        seen.append(module)
        return 0.2 + result

    handles = [
        root.layers[0].register_forward_hook(hook),  # around the whole block
        root.layers[1].feed_forward.w3.register_forward_hook(hook),
    ]
    try:
        eager, expected = zimage.sample(zimage.plain), list(seen)
        seen.clear()
        assert relative(eager, plain) > 1e-3
        assert relative(zimage.sample(zimage.compiled), eager) < TOLERANCE
        assert seen == expected
        report = zimage.report(zimage.compiled)
        assert reasons(report) == {}
        assert called(report)["another node hooks a Linear"] == 1
    finally:
        for handle in handles:
            handle.remove()
    assert reasons(zimage.report(zimage.compiled)) == {}


def test_code_that_writes_into_what_others_read_leaves_its_block_to_the_host(
    zimage: Model,
) -> None:
    def writing(forward: Any, x: Any) -> Any:
        result = forward(x)
        x.add_(0.5)  # which the next layer is given, too
        return result

    theirs = replaced(GATE.replace("w3", "w1"), writing)
    eager = zimage.sample(theirs(zimage.plain))
    assert relative(eager, zimage.sample(zimage.plain)) > 1e-3
    ours = theirs(zimage.compiled)
    assert relative(zimage.sample(ours), eager) < TOLERANCE
    [(words, places)] = reasons(zimage.report(ours)).items()
    assert words.startswith("with another node's code in it, its result differs from ComfyUI's by")
    assert places == 1
    other = replaced(GATE, lambda forward, x: 1.5 + forward(x))
    ours = other(zimage.compiled)
    assert relative(zimage.sample(ours), zimage.sample(other(zimage.plain))) < TOLERANCE
    assert reasons(zimage.report(ours)) == {}


# --- what forms say of their parts ----------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["flux1", "zimage", "qwen", "krea", "sd3", "wan", "wan_image", "wan_5b", "anima"]
)
def test_parts_that_a_graph_may_call_take_tensors_and_give_one_like_the_first(
    host: Host, shared: Lab, kind: str
) -> None:
    """As the host calls them: with plain values besides, and the step's options."""
    plain = transformers.load(kind)
    root = plain.model.diffusion_model
    found: dict[str, list[Any]] = {}

    def note(name: str, given: Any, named: Any, result: Any) -> None:
        values = [*given, *(v for key, v in named.items() if key != "transformer_options")]
        tensors = [value for value in values if torch.is_tensor(value)]
        rest = {type(value) for value in values if not torch.is_tensor(value)}
        assert type(result) is torch.Tensor and result.shape == tensors[0].shape
        assert result.dtype is tensors[0].dtype and rest <= {int, bool, type(None)}
        found.setdefault(name, []).append(len(tensors))

    plan = plan_model(root)
    assert isinstance(plan, Plan)
    wanted = set()
    handles = []
    for place in plan.places:
        for path in place.form.parts:
            try:
                part = place.module.get_submodule(path)
            except AttributeError:
                continue
            name = f"{place.form.name}.{path}"
            wanted.add(name)
            hook = functools.partial(_noting, note, name)
            handles.append(part.register_forward_hook(hook, with_kwargs=True))
    assert wanted
    try:
        Model(host, shared, kind, plain, compiles=False).sample(plain, steps=1)
    finally:
        for handle in handles:
            handle.remove()
    assert {name for name in wanted if "frame" not in name} <= found.keys()


def _noting(note: Any, name: str, module: Any, given: Any, named: Any, result: Any) -> None:
    note(name, given, named, result)


@pytest.mark.slow
def test_a_lora_in_bypass_mode_on_all_products_and_convolutions_of_a_unet(
    host: Host, lab: Lab
) -> None:
    unet = Subject(lab, host, "narrow15")
    name = host.model_file("locon", base="narrow15")

    def patch(model: Any) -> Any:
        given = {"lora_name": name, "strength_model": 1.0}
        return host.node("LoraLoaderBypassModelOnly", model=model, **given)[0]

    assert reasons(unet.check(patch)) == {}
    jobs = lab.jobs()
    report = unet.check(patch)
    assert reasons(report) == {} and lab.jobs() == jobs
    found = called(report)
    assert found["another node replaces the forward of a Conv2d"] > 10
    assert found[REPLACED] > 10
    assert reasons(unet.check()) == {} and lab.jobs() == jobs
