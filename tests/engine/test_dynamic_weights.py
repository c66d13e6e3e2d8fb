"""Pages of the host's dynamic VRAM: held while a call needs them and then let go, and what lies
there is the weight with its LoRA. The host's own functions run over a range in main memory.
"""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from warmgraph_backends.cuda_graphs.captured_call import undisturbed
from warmgraph_backends.weights.addresses import AddressBook
from warmgraph_backends.weights.casting import OneByOne
from warmgraph_backends.weights.dynamic import Dynamic
from warmgraph_backends.weights.fetching import ModelWeights
from warmgraph_tools.inprocess import Host

from .paged import Memory, Patch, Range, in_main_memory

DEVICE = torch.device("cpu")


@pytest.fixture
def pages() -> Range:
    return Range()


@pytest.fixture
def weights(pages: Range) -> ModelWeights:
    return ModelWeights(SimpleNamespace(dynamic_vbars={DEVICE: pages}), DEVICE, torch.float16)


def test_pages_are_held_once_by_all_that_hold_them(weights: ModelWeights, pages: Range) -> None:
    """A captured call holds them, and so does each region within it."""
    outer = weights.dynamic.hold()
    for _ in range(3):
        assert weights.dynamic.hold() == outer == b"\x07"
        weights.dynamic.release()
    assert (pages.pins, pages.faults, pages.floor) == (1, 1, pages.offset)
    weights.dynamic.release()
    assert (pages.pins, pages.floor) == (0, 0)
    assert weights.dynamic.hold() == outer
    weights.dynamic.release()
    assert (pages.pins, pages.faults, pages.floor) == (0, 2, 0)


def test_a_run_that_ended_in_the_middle_leaves_nothing_held(
    weights: ModelWeights, pages: Range
) -> None:
    weights.dynamic.hold()
    weights.dynamic.hold()
    weights.begin_run()
    assert (pages.pins, pages.floor) == (0, 0)


def test_pages_that_do_not_fit_are_not_asked_for_again_in_a_run(
    weights: ModelWeights, pages: Range
) -> None:
    pages.fits = False
    assert weights.dynamic.hold() is None and weights.dynamic.hold() is None
    weights.dynamic.release()
    assert (pages.pins, pages.faults, pages.floor) == (0, 1, 0)
    pages.fits = True
    weights.begin_run()
    assert weights.dynamic.hold() is not None
    weights.dynamic.release()
    assert pages.pins == 0


def test_only_pages_that_nobody_holds_are_given_up(weights: ModelWeights, pages: Range) -> None:
    weights.make_room(3)
    assert pages.given_up == 3
    weights.dynamic.hold()
    weights.make_room(4)
    assert pages.given_up == 3
    weights.dynamic.release()
    pages.offset = 0
    weights.make_room(5)
    assert pages.given_up == 3


def test_where_weights_may_not_come_together_no_page_is_asked_for(pages: Range) -> None:
    model = SimpleNamespace(dynamic_vbars={DEVICE: pages})
    weights = ModelWeights(model, DEVICE, torch.float16, together=False)
    assert weights.dynamic.hold() is None
    assert (pages.pins, pages.faults, pages.floor) == (0, 0, 0)


def test_no_page_is_taken_while_a_call_is_captured(
    host: Host, weights: ModelWeights, pages: Range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any loaded model: one that is held, and one that is not, beside one that was unloaded."""
    import comfy.model_management as management
    from comfy.model_patcher import ModelPatcher

    def loaded(ranges: dict[torch.device, Range]) -> Any:
        module = torch.nn.Module()
        module.dynamic_vbars = ranges
        patchers.append(ModelPatcher(module, DEVICE, DEVICE))
        entry = management.LoadedModel(patchers[-1])
        entry.real_model = weakref.ref(module)
        return entry

    patchers: list[Any] = []
    other, gone, elsewhere = Range(), loaded({}), Range()
    gone.real_model = None
    another_card = torch.device("meta")
    entries = [loaded({DEVICE: pages}), gone, loaded({DEVICE: other, another_card: elsewhere})]
    monkeypatch.setattr(management, "current_loaded_models", entries)
    weights.dynamic.hold()
    for failure in (None, RuntimeError("broken off")):
        try:
            with undisturbed(DEVICE):
                assert (pages.floor, other.floor) == (pages.max_size, other.max_size)
                assert elsewhere.floor == 0, "another card's captures hold its own"
                if failure:
                    raise failure
        except RuntimeError as error:
            assert error is failure
        assert (pages.floor, other.floor) == (pages.offset, 0)
    weights.dynamic.release()
    assert pages.floor == 0


# --- through the host's own functions -------------------------------------------------------------


class LoRA(Patch):
    """This one adds 1."""

    fails = False

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise torch.OutOfMemoryError("out of memory while the LoRA is applied")
        return weight + 1


class Module(NamedTuple):
    """One layer whose weight of 2 lies in a range, under a LoRA."""

    layer: Any
    memory: Memory
    lora: LoRA

    def fetch(self) -> torch.Tensor:
        brought = Dynamic(None, DEVICE, torch.float32).fetch([self.layer])
        assert brought.release is not None
        brought.release()
        weight: torch.Tensor = brought.pairs[id(self.layer)][0]
        return weight

    def weights(self) -> ModelWeights:
        return ModelWeights(self.layer, DEVICE, torch.float32)


@pytest.fixture
def module(host: Host, monkeypatch: pytest.MonkeyPatch) -> Module:
    import comfy.ops

    in_main_memory(monkeypatch)
    layer = comfy.ops.disable_weight_init.Linear(8, 8, bias=False)
    layer.weight = torch.nn.Parameter(torch.full((8, 8), 2.0), requires_grad=False)
    memory, lora = Memory(), LoRA()
    layer._v, layer._v_signature, layer.seed_key = (memory, 0, 1024), None, "layer"
    layer.weight_lowvram_function = lora
    return Module(layer, memory, lora)


PATCHED = torch.full((8, 8), 3.0)


def test_a_weight_is_brought_over_once_with_its_lora(module: Module) -> None:
    for _ in range(2):
        assert torch.equal(module.fetch(), PATCHED)
    assert module.memory.pins == 0 and module.layer._v == (module.memory, 0, 1024)


def test_where_weights_may_not_come_together_it_comes_as_a_copy_by_the_hosts_function_for_one_layer(
    module: Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    import comfy.model_management

    monkeypatch.setattr(comfy.model_management, "is_device_cpu", lambda _: False)
    other = torch.device("cpu", 1)  # the layer's own weight is not there
    for _ in range(2):
        brought = OneByOne(other, torch.float32).fetch([module.layer])
        weight, bias = brought.pairs[id(module.layer)]
        assert (brought.name, brought.may_be_kept, bias) == ("streamed", False, None)
        assert torch.equal(weight, PATCHED) and module.memory.pins == 0
        assert weight.data_ptr() != module.memory.bytes.data_ptr()


def test_a_lora_that_was_not_applied_is_applied_the_next_time(module: Module) -> None:
    """The host notes the page as good before it applies the LoRA to it."""
    import comfy.ops

    module.lora.fails = True
    with pytest.raises(ValueError, match="could not be brought over"):
        module.fetch()
    module.lora.fails = False
    options = (torch.float32, DEVICE, torch.float32)
    comfy.ops.cast_modules_with_vbar([module.layer], *options, False)
    weight, _ = comfy.ops.resolve_cast_module_with_vbar(module.layer, *options, None, False)
    assert torch.equal(weight, PATCHED), "the host's own code runs the call that we left to it"


def test_no_page_stays_held_when_the_host_fails_after_it_faulted_it_in(
    module: Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    import comfy.pinned_memory

    def no_room(*_: Any, **__: Any) -> None:
        raise RuntimeError("VRAM grow failed")

    monkeypatch.setattr(comfy.pinned_memory, "pin_memory", no_room)
    with pytest.raises(ValueError, match="VRAM grow failed"):
        module.fetch()
    assert module.memory.pins == 0 and module.layer._v == (module.memory, 0, 1024)


def test_what_was_brought_over_while_a_call_was_captured_is_brought_over_again(
    module: Module,
) -> None:
    """The copies were captured and not made; the host's notes say that the weights are there."""
    book = AddressBook(module.layer, module.weights())
    marks = book.marks()
    module.fetch()
    module.memory.bytes.zero_()
    module.layer._prefetch = {"signature": module.memory.fault(0, 1)}
    book.undo(marks)
    assert module.layer._v_signature is None and not hasattr(module.layer, "_prefetch")
    assert module.memory.pins == 0
    assert torch.equal(module.fetch(), PATCHED)


def test_what_was_broken_off_in_a_capture_is_let_go_and_brought_over_again(module: Module) -> None:
    """The host began to bring a module over and never resolved it: its signature is the old one."""
    module.fetch()
    book = AddressBook(module.layer, module.weights())
    marks = book.marks()
    module.memory.bytes.zero_()
    module.layer._prefetch = {"signature": module.memory.fault(0, 1), "resident": False}
    book.undo(marks)
    assert not hasattr(module.layer, "_prefetch") and module.memory.pins == 0
    assert torch.equal(module.fetch(), PATCHED), "with its LoRA"


def test_what_was_there_all_along_is_not_brought_over_again(module: Module) -> None:
    module.fetch()
    book = AddressBook(module.layer, module.weights())
    marks = book.marks()
    module.layer._prefetch = {"signature": module.memory.fault(0, 1), "resident": True}
    book.undo(marks)
    assert not hasattr(module.layer, "_prefetch") and module.memory.pins == 0
    assert module.layer._v_signature is marks[0]
