"""What changes the maths with no code of the model replaced.

Attributes set in place, functions that instances have of their own, hooks of all modules, modes,
autocast, methods of all tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from warmgraph_tools.inprocess import Host

from .lab import TOLERANCE, Lab, left_behind, relative
from .rows import some_rows
from .subject import Subject, reasons
from .test_cancel import after_a_block
from .test_replaced_code import PACK, around_the_model

Harm = Callable[[], contextlib.AbstractContextManager[Any]]


@pytest.fixture(scope="module")
def xl(lab: Lab, host: Host) -> Subject:
    return Subject(lab, host, "narrowxl")


@pytest.fixture
def ours(xl: Subject) -> Iterator[Any]:
    """A model of which nothing new is built; afterwards all of it is compiled as before."""
    plain, jobs = xl.sample(xl.model), xl.lab.jobs()
    compiled = xl.lab.compiled(xl.model, when_missing="never")
    xl.lab.settle()
    assert relative(xl.sample(compiled), plain) < TOLERANCE
    assert reasons(xl.report(compiled)) == {}
    yield compiled
    for _ in range(2):
        assert relative(xl.sample(compiled), plain) < TOLERANCE
    assert reasons(xl.report(compiled)) == {} and left_behind(xl.unet) == []
    assert xl.lab.jobs() == jobs


# --- attributes ----------------------------------------------------------------------------------

#: By class, the attribute that a node sets and what it makes of it.
SET: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "CrossAttention": ("heads", lambda heads: 2 * heads),
    "GroupNorm": ("num_groups", lambda groups: groups // 2),
    "LayerNorm": ("eps", lambda eps: 0.5),
    "ResBlock": ("skip_t_emb", lambda skips: not skips),
    "Conv2d": ("dilation", lambda _: (2, 2)),
}


@contextlib.contextmanager
def attribute_set(root: torch.nn.Module, cls: str) -> Iterator[None]:
    """An attribute of all modules of a class is another one for as long as this lasts."""
    name, change = SET[cls]
    parts = [part for part in root.modules() if type(part).__name__ == cls]
    if cls == "Conv2d":
        parts = [part for part in parts if part.kernel_size == (3, 3) and part.stride == (1, 1)]
        before = [(part, part.padding, part.dilation) for part in parts]
        for part in parts:
            part.dilation, part.padding = (2, 2), (2, 2)
        try:
            yield
        finally:
            for part, padding, dilation in before:
                part.padding, part.dilation = padding, dilation
        return
    values = [vars(part)[name] for part in parts]
    assert values
    for part, value in zip(parts, values, strict=True):
        setattr(part, name, change(value))
    try:
        yield
    finally:
        for part, value in zip(parts, values, strict=True):
            setattr(part, name, value)


@pytest.mark.parametrize("cls", SET)
def test_an_attribute_set_in_place_is_what_counts_from_the_next_run_on(
    xl: Subject, ours: Any, cls: str
) -> None:
    plain = xl.sample(xl.model)
    with attribute_set(xl.unet, cls):
        eager = xl.sample(xl.model)
        assert relative(eager, plain) > 1e-3, "the node does nothing"
        assert relative(xl.sample(ours), eager) < TOLERANCE
        assert xl.report(ours)["regions"]["eager"] > 0


@pytest.mark.parametrize("outermost", [True, False])
def test_an_attribute_set_around_each_step_leaves_the_step_to_the_host(
    xl: Subject, ours: Any, outermost: bool
) -> None:
    patch = around_the_model(lambda: attribute_set(xl.unet, "LayerNorm"), outermost=outermost)
    eager = xl.sample(patch(xl.model))
    assert relative(xl.sample(patch(ours)), eager) < TOLERANCE
    [reason] = reasons(xl.report(ours))
    assert reason == "another node sets eps of a LayerNorm"


def test_an_item_put_into_a_list_is_noticed(xl: Subject, ours: Any) -> None:
    from warmgraph_backends.runtime.attributes import Attributes

    part = torch.nn.LayerNorm(4)
    part.normalized_shape = [4]  # type: ignore[assignment]
    attributes = Attributes([part])
    attributes.look()
    assert attributes.set_since == []
    part.normalized_shape.append(1)  # type: ignore[attr-defined]
    attributes.look()
    assert attributes.set_since == [(part, "another node sets normalized_shape of a LayerNorm")]
    part.normalized_shape.pop()  # type: ignore[attr-defined]
    attributes.look()
    assert attributes.set_since == []
    part._v, part.of_a_pack = 1, {}  # type: ignore[assignment]
    attributes.look()
    assert attributes.set_since == [] and attributes.methods == []


@pytest.mark.parametrize("when", ["around each step", "within each step", "between two runs"])
def test_a_function_that_an_instance_has_of_its_own_runs_and_is_named(
    xl: Subject, ours: Any, when: str
) -> None:
    """Not as its `forward`: torch calls that through others."""
    [norm, *_] = [part for part in xl.unet.modules() if type(part).__name__ == "LayerNorm"]

    @contextlib.contextmanager
    def replaced() -> Iterator[None]:
        own = norm._call_impl
        norm._call_impl = lambda *args, **kwargs: own(*args, **kwargs) * 0.5
        try:
            yield
        finally:
            del norm.__dict__["_call_impl"]

    patch = around_the_model(replaced, outermost=when == "around each step")
    around = when != "between two runs"
    with contextlib.nullcontext() if around else replaced():
        eager = xl.sample(patch(xl.model) if around else xl.model)
        assert relative(eager, xl.sample(xl.model)) > 1e-4 or not around
        assert relative(xl.sample(patch(ours) if around else ours), eager) < TOLERANCE
    assert "another node replaces _call_impl of a LayerNorm" in reasons(xl.report(ours))


def test_a_replaced_function_is_named_while_a_graph_for_it_is_only_looked_for(
    xl: Subject, ours: Any
) -> None:
    [norm, *_] = [part for part in xl.unet.modules() if type(part).__name__ == "LayerNorm"]
    own = norm._call_impl

    @contextlib.contextmanager
    def replaced() -> Iterator[None]:
        norm._call_impl = lambda *args, **kwargs: own(*args, **kwargs) * 0.75
        try:
            yield
        finally:
            del norm.__dict__["_call_impl"]

    with xl.lab.held(), replaced():
        xl.sample(ours)
        named = set(reasons(xl.report(ours)))
    assert named == {"another node replaces _call_impl of a LayerNorm"}


# --- what changes all maths ----------------------------------------------------------------------


class Halving(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 0.5 if func is torch.nn.functional.group_norm else result


class Dropping(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "native_layer_norm" not in str(func):
            return result
        return (result[0] * 0.5, *result[1:])


@contextlib.contextmanager
def hooked() -> Iterator[None]:
    """All modules' results are looked at, and those of norms changed."""

    def hook(module: Any, args: Any, result: Any) -> Any:
        return result * 0.5 if isinstance(module, torch.nn.GroupNorm) else None

    handle = torch.nn.modules.module.register_module_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def replaced_method(name: str) -> Iterator[None]:
    """A method of all tensors, which torch's own class may inherit, is a pack's."""
    own = getattr(torch.Tensor, name)
    inherited = name not in vars(torch.Tensor)

    def half(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = own(self, *args, **kwargs)
        return [part * 0.5 for part in result] if name == "chunk" else torch.mul(result, 0.999)

    setattr(torch.Tensor, name, half)
    try:
        yield
    finally:
        if inherited:
            delattr(torch.Tensor, name)
        else:
            setattr(torch.Tensor, name, own)


HARMS: dict[str, tuple[Harm, str]] = {
    "a hook of all modules": (hooked, "another node hooks all modules"),
    "a function mode": (Halving, f"Halving of {PACK[1:-1]} sees each operation and may change it"),
    "a dispatch mode": (
        Dropping,
        f"Dropping of {PACK[1:-1]} sees each operation and may change it",
    ),
    "autocast": (
        lambda: torch.autocast("cpu", torch.bfloat16),
        "autocast is on: operations compute in other dtypes than the model's",
    ),
    "a method": (
        lambda: replaced_method("chunk"),
        f"another node {PACK} replaces Tensor.chunk",
    ),
    "an operator": (
        lambda: replaced_method("__add__"),
        f"another node {PACK} replaces Tensor.__add__",
    ),
}


@pytest.mark.parametrize("where", some_rows(["outside", "inside", "around the run"], ["inside"]))
@pytest.mark.parametrize("harm", HARMS)
def test_other_maths_around_a_step_is_the_hosts_and_named(
    xl: Subject, ours: Any, harm: str, where: str
) -> None:
    begin, reason = HARMS[harm]
    xl.lab.compare_anew()
    count, plain = xl.lab.compared(ours), xl.sample(xl.model)

    def run(model: Any) -> torch.Tensor:
        if where == "around the run":
            with begin():
                return xl.sample(model)
        return xl.sample(around_the_model(begin, outermost=where == "outside")(model))

    eager = run(xl.model)
    assert relative(eager, plain) > 1e-4, "the pack does nothing"
    image = run(ours)
    assert torch.equal(image, eager)
    assert set(reasons(xl.report(ours))) == {reason}
    assert xl.lab.compared(ours) == count, "nothing is compared in such surroundings"


def test_a_mode_that_says_where_tensors_go_leaves_everything_compiled(
    xl: Subject, ours: Any
) -> None:
    with torch.device("cpu"):
        image = xl.sample(ours)
    assert relative(image, xl.sample(xl.model)) < TOLERANCE
    assert reasons(xl.report(ours)) == {}


def test_a_mode_that_begins_within_a_step_leaves_the_rest_of_it_to_the_host(
    xl: Subject, ours: Any
) -> None:
    xl.lab.compare_anew()
    opened = contextlib.ExitStack()

    def begin() -> None:
        opened.enter_context(Halving())

    @contextlib.contextmanager
    def ended() -> Iterator[None]:
        with opened:
            yield

    def patch(model: Any) -> Any:
        return after_a_block(around_the_model(ended, outermost=True)(model), begin)

    eager = xl.sample(patch(xl.model), steps=1)
    assert relative(eager, xl.sample(xl.model, steps=1)) > 1e-4
    before = xl.report(ours)["calls"]["compiled"]
    assert relative(xl.sample(patch(ours), steps=1), eager) < TOLERANCE
    assert xl.report(ours)["calls"]["compiled"] > before
    assert reasons(xl.report(ours))[HARMS["a function mode"][1]] > 1


# --- a verdict -----------------------------------------------------------------------------------


def test_a_verdict_that_somebody_elses_maths_caused_is_not_the_last_word(
    xl: Subject, ours: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever of others' we do not see: here the reference itself is another one, once."""
    from warmgraph_backends.runtime.verifier import Verifier

    xl.lab.compare_anew()
    plain, computed = xl.sample(xl.model), Verifier._computed

    def other(self: Any, inputs: Any) -> Any:
        results = computed(self, inputs)
        if "Transformer block" not in self._graph.description.label:
            return results
        return tuple(result + 0.1 for result in results)

    fresh = xl.lab.compiled(xl.model, when_missing="never")
    with monkeypatch.context() as patch:
        patch.setattr(Verifier, "_computed", other)
        xl.sample(fresh)
        [reason] = reasons(xl.report(fresh))
        assert reason.startswith("differs from ComfyUI's result by")
        assert reason.endswith("with resident weights; the next run compares it once more")
        assert reasons(xl.report(fresh)) == {reason: xl.blocks}
    count = xl.lab.compared(fresh)
    assert relative(xl.sample(fresh), plain) < TOLERANCE
    assert xl.lab.compared(fresh) > count and reasons(xl.report(fresh)) == {}
