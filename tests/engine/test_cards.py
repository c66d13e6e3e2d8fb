"""Models on several cards: MultiGPU CFG Split, and what the host's nodes place on another card.

Both cards are the processor. The split is the host's own: a copy of the model for the second card,
with weights of its own, and a thread for each of the two.
"""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch

from warmgraph_backends.several_cards import order
from warmgraph_tools.inprocess import Host

from .cards import FIRST, SECOND, cards, put, session_of, split
from .lab import TOLERANCE, Lab, relative
from .probed import Probed

__all__ = ["cards"]

pytestmark = pytest.mark.usefixtures("cards")


class Split:
    """A narrow SDXL under the split, with Compile Model before or behind it."""

    def __init__(self, lab: Lab, host: Host, order: str = "before") -> None:
        self.lab, self.model = lab, Probed(lab, host)
        self.plain = split(self.model.plain)
        before = order == "before"
        self.ours = split(self.model.model) if before else lab.compiled(self.plain)
        self.session = session_of(self.ours)

    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = self.lab.engine.report(self.ours)
        return report

    def check(self, **options: Any) -> torch.Tensor:
        """Sample, and assert that both halves ran all compiled, at no build, and are right."""
        jobs, before = self.lab.jobs(), self.report()["calls"]
        eager = self.model.sample(self.plain, **options)
        image = self.model.sample(self.ours, **options)
        report = self.report()
        assert relative(image, eager) < TOLERANCE and not torch.equal(image, eager)
        total = report["regions"]["total"]
        assert report["eager"] == [], (report["eager"], report["notes"])
        assert report["regions"] == {"total": total, "compiled": total, "eager": 0}
        assert report["calls"]["eager"] == before["eager"]
        calls = report["calls"]["compiled"] - before["compiled"]
        assert calls == 2 * options.get("steps", 1) * total > 0
        assert self.lab.jobs() == jobs and self.session.running is None
        return image


@pytest.mark.parametrize("order", ["before", "behind"])
def test_under_a_split_both_cards_run_compiled(lab: Lab, host: Host, order: str) -> None:
    it = Split(lab, host, order)
    threads, drops = set(), []
    step, bound = it.session.step, it.session.scope._bound
    it.session.scope.drop_captured = lambda: drops.append(1)

    def noted(*args: Any, **named: Any) -> Any:
        threads.add(threading.current_thread())
        return step(*args, **named)

    it.session.step = noted
    it.check(steps=3)
    it.check(steps=2, batch=4, size=(12, 8))
    assert it.session.scope._bound is bound and drops == [], "the first one's was described anew"
    [card] = it.session.cards
    assert card.scope.device == SECOND and card.scope.compiled_calls == 5 * len(
        card.scope.plan.places
    )
    assert len(threads) == 4
    it.model.check(steps=2)


def test_the_first_card_queues_its_step_while_the_others_have_theirs(
    lab: Lab, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies between cards wait for what was queued before them, on both."""
    monkeypatch.setattr(order, "LIMIT_S", 60.0)
    it, said = Split(lab, host), []
    it.check(steps=2)
    [card] = it.session.cards
    first, other, begin = it.session.scope, card.scope, it.session.cards.order.begin
    monkeypatch.setattr(
        it.session.cards.order, "begin", lambda count: (said.append(["begins"]), begin(count))
    )
    for scope, name in ((first, "first"), (other, "other")):

        def called(*args: Any, call: Any = scope.call, name: str = name, **named: Any) -> Any:
            said[-1].append(f"{name} is called")
            made = call(*args, **named)
            said[-1].append(f"{name} is queued")
            return made

        monkeypatch.setattr(scope, "call", called)
    step, comes = it.session.step, it.session.cards.order.other

    def left(*args: Any, **named: Any) -> Any:
        result = step(*args, **named)
        said[-1].append("other hands on" if named["scope"] is other else "first hands on")
        return result

    monkeypatch.setattr(it.session, "step", left)
    monkeypatch.setattr(
        it.session.cards.order,
        "other",
        lambda card: said[-1].append("other comes") or comes(card),
    )
    it.check(steps=3)
    assert len(said) == 3
    for each in said:
        assert len(each) == 8, said
        assert each.index("other comes") < each.index("first is called"), each
        assert each.index("first is queued") < each.index("other hands on"), each


def test_each_card_has_its_own_line_in_the_report(lab: Lab, host: Host) -> None:
    it = Split(lab, host)
    assert it.report()["cards"] == []
    it.check(steps=4)
    [card] = it.report()["cards"]
    total = it.report()["regions"]["total"]
    assert card["device"] == "cpu:0" and card["ms"] > 0 and card["eager"] == []
    assert card["regions"] == {"total": total, "compiled": total, "eager": 0}
    said = f"on cpu:0: {total} of {total} parts compiled"
    assert said in it.report()["text"]
    assert any(each["text"].startswith(said) for each in it.report()["lines"])


def test_what_one_card_leaves_to_the_host_is_named_for_that_card(lab: Lab, host: Host) -> None:
    """A hook on the copy alone: half of each step is the host's, and no report says otherwise."""
    it = Split(lab, host)
    it.check()
    [card] = it.session.cards
    part = card.scope.root.middle_block[0].in_layers[0]
    handle = part.register_forward_hook(lambda _module, _inputs, output: output * 1.0)
    try:
        image = it.model.sample(it.ours, steps=2)
    finally:
        handle.remove()
    assert relative(image, it.model.sample(it.plain, steps=2)) < TOLERANCE
    [card] = it.report()["cards"]
    regions = it.report()["regions"]
    assert card["regions"]["eager"] == regions["eager"] <= 1
    it.check(steps=2)


@pytest.mark.slow
def test_a_guidance_of_one_leaves_the_second_card_idle(lab: Lab, host: Host) -> None:
    it = Split(lab, host)
    it.check()
    [card] = it.session.cards
    before = card.scope.compiled_calls
    image = it.model.sample(it.ours, cfg=1.0)
    assert relative(image, it.model.sample(it.plain, cfg=1.0)) < TOLERANCE
    report = it.report()
    assert report["regions"]["eager"] == 0 and report["regions"]["compiled"] > 0
    assert card.scope.compiled_calls == before and not card.counts.took_part


@pytest.mark.parametrize("size", [(9, 13), pytest.param((8, 8), marks=pytest.mark.slow)])
def test_a_lora_is_on_both_cards(lab: Lab, host: Host, size: tuple[int, int]) -> None:
    it = Split(lab, host)
    without = it.check(size=size)

    def changed(model: Any) -> Any:
        clone = model.clone()
        generator = torch.Generator().manual_seed(0)
        patches = {
            name: ("diff", (0.05 * torch.randn(weight.shape, generator=generator),))
            for name, weight in clone.model.state_dict().items()
            if name.endswith("attn1.to_q.weight")
        }
        assert clone.add_patches(patches, 1.0)
        return clone

    plain, ours = changed(it.plain), changed(it.ours)
    jobs = lab.jobs()
    eager, image = it.model.sample(plain, size=size), it.model.sample(ours, size=size)
    assert relative(image, eager) < TOLERANCE < relative(image, without)
    report = lab.engine.report(ours)
    assert report["regions"]["eager"] == 0 and lab.jobs() == jobs
    assert [card["regions"]["eager"] for card in report["cards"]] == [0]


def test_a_workflow_without_the_split_lets_the_copy_go(lab: Lab, host: Host) -> None:
    model = Probed(lab, host)
    spread = split(model.model)
    model.sample(spread)
    session = session_of(spread)
    [card] = session.cards
    gone = weakref.ref(card.scope), weakref.ref(card.scope.root)
    del card, spread
    host.unload()
    model.check()
    gc.collect()
    assert [each() for each in gone] == [None, None] and list(session.cards) == []
    assert lab.engine.report(model.model)["cards"] == []


@pytest.mark.slow
def test_a_new_session_on_a_copy_that_stays_loaded_lets_the_old_ones_scope_go(
    lab: Lab, host: Host
) -> None:
    model = Probed(lab, host)
    spread = split(model.plain)
    ours = lab.compiled(spread)
    model.sample(ours)
    [card] = session_of(ours).cards
    gone, holder = weakref.ref(card.scope), card.scope.holder
    del card, ours
    ours = lab.compiled(spread)
    model.sample(ours)
    gc.collect()
    [card] = session_of(ours).cards
    assert gone() is None and card.scope.holder is holder, "the copy is the same"


@pytest.mark.parametrize(
    ("place", "error"),
    [
        (FIRST, None),
        pytest.param(FIRST, ValueError("theirs"), marks=pytest.mark.slow),
        pytest.param(SECOND, None, marks=pytest.mark.slow),
        (SECOND, ValueError("theirs")),
    ],
)
def test_after_an_error_or_a_cancel_on_one_card_the_next_prompt_is_well(
    lab: Lab, host: Host, place: torch.device, error: Exception | None
) -> None:
    from comfy.model_management import InterruptProcessingException
    from comfy.patcher_extension import WrappersMP

    it = Split(lab, host)
    it.check()
    error = error or InterruptProcessingException()
    is_second = place is SECOND

    def fail(executor: Any, *args: Any, **named: Any) -> Any:
        if (executor.class_obj is not it.session.scope.root) is is_second:
            raise error
        return executor(*args, **named)

    clone = it.ours.clone()
    clone.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "somebody", fail)
    with pytest.raises(type(error)):
        it.model.sample(clone)
    it.check(steps=2)


def test_a_model_that_is_put_on_the_second_card_behind_the_node_runs_compiled(
    lab: Lab, host: Host
) -> None:
    model = Probed(lab, host)
    moved, plain = put(model.model, SECOND), put(model.plain, SECOND)
    assert moved.load_device == SECOND and moved.model is not model.model.model
    image, eager = model.sample(moved, steps=2), model.sample(plain, steps=2)
    assert relative(image, eager) < TOLERANCE and not torch.equal(image, eager)
    report = lab.engine.report(moved)
    assert report["regions"]["eager"] == 0 and report["regions"]["compiled"] > 0
    assert report["calls"]["eager"] == 0
    [card] = report["cards"]
    assert card["device"] == "cpu:0" and card["regions"] == report["regions"]
    model.check()


@pytest.mark.slow
def test_models_of_two_cards_in_one_prompt_run_compiled(lab: Lab, host: Host) -> None:
    first, second = Probed(lab, host), Probed(lab, host, seed=1)
    ours = lab.compiled(put(second.plain, SECOND))
    assert session_of(ours).scope.device == SECOND
    for _ in range(2):
        first.check()
        image = second.sample(ours)
        assert relative(image, second.sample(second.plain)) < TOLERANCE
    report = lab.engine.report(ours)
    assert report["regions"]["eager"] == 0 and report["calls"]["eager"] == 0
