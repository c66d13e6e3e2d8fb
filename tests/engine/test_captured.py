"""What decides on captured calls, without a GPU: signatures, weights' places, memory."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from typing import Any

import pytest
import torch

from warmgraph_backends.code.watch import Watch
from warmgraph_backends.cuda_graphs import replays
from warmgraph_backends.cuda_graphs.captured_call import CaptureError
from warmgraph_backends.cuda_graphs.memory import CapturedMemory
from warmgraph_backends.cuda_graphs.replays import CLEAN_CALLS, Replays
from warmgraph_backends.cuda_graphs.signatures import (
    FixedCallError,
    arithmetic,
    read_call,
    result_form,
    run_steps,
)
from warmgraph_backends.cuda_graphs.streams import OwnStreams
from warmgraph_backends.families.catalogue import may_be_captured, unread_options
from warmgraph_backends.reasons import of
from warmgraph_backends.runtime.wiring import Wiring, replaced_function
from warmgraph_backends.weights.addresses import AddressBook
from warmgraph_backends.weights.fetching import ModelWeights
from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host
from warmgraph_tools.quantised import FORMATS

from .lab import TOLERANCE, Lab
from .probed import Probed


def _options(**more: Any) -> dict[str, Any]:
    return {"sigmas": torch.ones(1), "cond_or_uncond": [1, 0], "wrappers": {}, **more}


def _arguments(batch: int = 2, tokens: int = 77, **options: Any) -> tuple[Any, ...]:
    x, t = torch.randn(batch, 4, 8, 8), torch.rand(batch)
    return x, t, torch.randn(batch, tokens, 16), None, None, _options(**options)


def test_a_signature_holds_sizes_and_not_values(host: Host) -> None:
    unread = unread_options(host.load("narrowxl")[0].model.diffusion_model)

    def key(*args: Any) -> Any:
        return read_call(args, {}, unread).key

    first = key(*_arguments())
    assert key(*_arguments()) == first
    assert key(*_arguments(cond_or_uncond=[0, 1])) == first
    assert key(*_arguments(batch=3)) != first
    assert key(*_arguments(tokens=154)) != first
    assert key(*(a.half() if torch.is_tensor(a) else a for a in _arguments())) != first
    x, *rest = _arguments()
    assert key(x.transpose(2, 3), *rest) != first
    assert read_call(_arguments(cond_or_uncond=[0, 1]), {}).key != read_call(_arguments(), {}).key


def test_residuals_are_inputs_and_are_used_up_for_the_copy_only(host: Host) -> None:
    control = {"input": [torch.ones(2, 4, 8, 8), None], "middle": [], "output": [torch.ones(1)]}
    args = [*_arguments()]
    args[4] = control
    call = read_call(args, {})
    assert len(call.tensors) == 6  # x, t, context, two residuals, sigmas
    others = [torch.zeros_like(t) for t in call.tensors]
    copied, _ = call.over(others)
    assert copied[4]["input"][0] is others[3] and copied[4]["input"][1] is None
    copied[4]["input"].pop()
    assert len(control["input"]) == 2
    assert read_call(_arguments(), {}).key != call.key


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"patches": {"attn1_patch": [print]}}, "patches may do something else"),
        ({"patches_replace": {"attn1": {("input", 1): print}}}, "attention may do"),
        ({"optimized_attention_override": print}, "attention may do"),
        ({"of_another_node": object()}, "of_another_node has a object"),
        ({"of_another_node": OrderedDict(a=1)}, "of_another_node has a OrderedDict"),
        ({"mask": torch.ones(1, device="meta"), "area": torch.ones(1)}, "area is on the CPU"),
    ],
)
def test_what_another_node_does_in_the_call_is_not_captured(
    options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(FixedCallError, match=reason):
        read_call(_arguments(**options), {})
    read_call(_arguments(patches={}, patches_replace={}), {})


@pytest.fixture
def book(host: Host) -> tuple[Any, ModelWeights, AddressBook]:
    model = host.load("narrowxl")[0].model
    weights = ModelWeights(model, torch.device("cpu"), torch.float32)
    weights.begin_run()
    return model.diffusion_model, weights, AddressBook(model.diffusion_model, weights)


def test_weights_that_moved_are_noticed(book: tuple[Any, ModelWeights, AddressBook]) -> None:
    root, weights, place = book
    weights.begin_step()
    first = place.look()
    assert first is not None and place.look() is first
    assert len(first.pointers) == len(list(root.parameters())) + len(list(root.buffers()))
    layer = root.out[2]
    before = layer.weight
    try:
        layer.weight = torch.nn.Parameter(before.clone(), requires_grad=False)
        second = place.look()
        assert second is not None and second.pointers != first.pointers
    finally:
        layer.weight = before
    weights.begin_run()
    assert place.look() is not first


def test_weights_that_a_graph_cannot_read_are_named(
    book: tuple[Any, ModelWeights, AddressBook],
) -> None:
    root, weights, place = book
    layer = root.out[2]
    layer.weight_function = [lambda weight: weight]
    try:
        assert place.look() is None
        assert place.problem == "weights are computed anew at each call"
    finally:
        del layer.weight_function
    weights.begin_run()
    before = layer.weight
    try:
        layer.weight = torch.nn.Parameter(before.to("meta"), requires_grad=False)
        assert place.look() is None
        assert place.problem == "a part of the model is not in VRAM"
    finally:
        layer.weight = before


REPLAYED = ("fp8_e4m3fn", "fp8_e4m3fn_inputs", "int8", "int8_convrot")


def _book_of(form: str) -> AddressBook:
    root = transformers.load_quantised("flux1", form).model.diffusion_model
    weights = ModelWeights(root, torch.device("cpu"), torch.float32)
    weights.begin_run()
    weights.begin_step()
    return AddressBook(root, weights)


@pytest.mark.parametrize("form", [form for form in FORMATS if form not in REPLAYED])
def test_products_that_were_not_tried_in_a_capture_are_not_captured(host: Host, form: str) -> None:
    place = _book_of(form)
    assert place.look() is None
    assert (
        place.problem == f"products of {FORMATS[form].marks['format']} weights cannot be replayed"
    )


@pytest.mark.parametrize("form", REPLAYED)
def test_products_that_take_memory_by_stream_are_told_from_others(host: Host, form: str) -> None:
    """The host's library takes it for each stream and size: a capture would end the process."""
    addresses = _book_of(form).look()
    assert addresses is not None
    assert addresses.takes_memory_by_stream == form.startswith("int8")


def test_a_stream_of_its_own_serves_one_captured_call_at_a_time() -> None:
    made: list[object] = []

    def make(device: torch.device) -> object:
        made.append(object())
        return made[-1]

    own, first, second = OwnStreams(make), torch.device("cuda:0"), torch.device("cuda:1")
    one, other, elsewhere = own.take(first), own.take(first), own.take(second)
    assert [each.stream for each in (one, other, elsewhere)] == made
    one.held_bytes = 7
    own.give_back(first, one)
    assert own.take(second).stream is made[3], "one device's streams are of no use to another"
    assert own.take(first) is one and one.held_bytes == 7
    assert own.take(first).stream is made[4]


def test_a_quantised_weight_is_known_by_its_parts(host: Host) -> None:
    root = transformers.load_quantised("flux1", "fp8_e4m3fn").model.diffusion_model
    weights = ModelWeights(root, torch.device("cpu"), torch.float32)
    weights.begin_run()
    weights.begin_step()
    place = AddressBook(root, weights)
    first = place.look()
    assert first is not None and place.problem is None
    layer = root.double_blocks[0].img_mlp[0]
    parts = [layer.weight._qdata.data_ptr(), layer.weight.params.scale.data_ptr()]
    assert set(parts) <= set(first.pointers)
    assert all(type(part) in (torch.Tensor, torch.nn.Parameter) for part in first.loose)
    assert place.look() is first
    before = layer.weight
    layer.weight = torch.nn.Parameter(before.clone(), requires_grad=False)  # as a LoRA leaves it
    second = place.look()
    assert second is not None and second.pointers != first.pointers


def test_weights_are_not_kept_beyond_a_run(lab: Lab, host: Host) -> None:
    model = Probed(lab, host)
    model.sample(steps=2)
    scope = model.model.get_attachment("warmgraph").scope
    place = AddressBook(scope.root, scope._bound.weights)
    assert place.look() is not None
    place.forget()
    layer = model.unet.input_blocks[1][0].in_layers[2]
    before = weakref.ref(layer.weight)
    layer.weight = torch.nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
    gc.collect()
    assert before() is None


def test_code_of_others_is_found_wherever_it_hides(host: Host) -> None:
    from comfy.ldm.modules.diffusionmodules import openaimodel

    root = host.load("narrowxl")[0].model.diffusion_model
    watch, wiring = Watch(), Wiring(root)
    assert replaced_function(root, watch) is None and wiring.foreign() is None
    before = openaimodel.timestep_embedding
    openaimodel.timestep_embedding = lambda *args, **kwargs: before(*args, **kwargs)
    try:
        assert watch.changed()
        assert "code of another package takes part" in (replaced_function(root, Watch()) or "")
    finally:
        openaimodel.timestep_embedding = before

    layer = root.out[2]

    class Quantised(type(layer)):  # type: ignore[misc]
        """As packs of other formats have them: a cast of its own, the host's forward."""

    own = layer.__class__
    layer.__class__ = Quantised
    try:
        assert wiring.foreign() == "another node replaces the code of Quantised"
    finally:
        layer.__class__ = own
    layer._conv_forward = print
    try:
        assert wiring.foreign() == "another node replaces the forward of a Conv2d"
    finally:
        del layer._conv_forward
    attributes = wiring.attributes
    attributes.look()
    assert attributes.set_since is None
    layer.padding_mode = "circular"
    try:
        attributes.look()
        assert attributes.set_since == "another node sets padding_mode of a Conv2d"
    finally:
        layer.padding_mode = "zeros"


def test_a_node_that_makes_images_tile_is_obeyed_from_the_next_run_on(lab: Lab, host: Host) -> None:
    probed = Probed(lab, host, when_missing="never")  # nothing is left to be built behind the test
    lab.settle()
    probed.check()
    layers = [m for m in probed.unet.modules() if isinstance(m, torch.nn.Conv2d)]
    for layer in layers:
        layer.padding_mode = "circular"
    try:
        jobs = lab.jobs()
        probed.sample(probed.model)
        assert lab.jobs() == jobs
        assert max(call.error for call in probed.probe.calls) <= TOLERANCE
    finally:
        for layer in layers:
            layer.padding_mode = "zeros"
    probed.check()


def test_what_may_be_captured_is_known_by_class(host: Host) -> None:
    from comfy.cldm.cldm import ControlNet

    assert may_be_captured(host.load("narrowxl")[0].model.diffusion_model)
    assert not may_be_captured(torch.nn.Linear(2, 2))
    control = ControlNet.__new__(ControlNet)
    torch.nn.Module.__init__(control)
    assert may_be_captured(control)
    control.control_add_embedding = torch.nn.Identity()  # what makes it a union
    assert not may_be_captured(control)


def test_settings_of_the_arithmetic_are_part_of_a_signature() -> None:
    before = arithmetic()
    allowed = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = not allowed
    try:
        assert arithmetic() != before
    finally:
        torch.backends.cudnn.benchmark = allowed
    assert arithmetic() == before


def test_a_result_is_remembered_by_its_form_alone() -> None:
    residuals = {"output": [torch.ones(2, 4, 8, 8).to(memory_format=torch.channels_last), None]}
    form = result_form(residuals)
    assert [tensor.device.type for tensor in form.tensors] == ["meta"]
    assert form.tensors[0].stride() == residuals["output"][0].stride()
    rebuilt = form.over([torch.zeros(1)])[0][0]
    assert rebuilt["output"][0].shape == (1,) and rebuilt["output"][1] is None
    with pytest.raises(FixedCallError, match="returns no tensor"):
        result_form("nothing")


class _Held:
    """Holds memory as a captured graph does."""

    def __init__(self, size: int, *, own: int = 0) -> None:
        self.memory: torch.Tensor | None = torch.empty(size, dtype=torch.uint8)
        self.own_bytes = own

    def free(self) -> None:
        self.memory = None


class _Owner:
    def __init__(self) -> None:
        self.gone: list[Any] = []
        self.crowded: list[bool] = []

    def forget(self, graph: Any, *, crowded: bool) -> None:
        self.gone.append(graph)
        self.crowded.append(crowded)


CPU = torch.device("cpu")


def test_over_the_budget_those_go_that_were_not_used_for_longest_one_by_one(host: Host) -> None:
    released: list[torch.device] = []
    memory, owner = CapturedMemory(lambda _: 100, released.append), _Owner()
    graphs = [_Held(1, own=20) for _ in range(4)]
    for graph in graphs:
        assert memory.add(graph, owner, CPU, 10 if graph is graphs[0] else 0) is None
    assert owner.gone == [] and memory.used_bytes == 90
    memory.note_use(graphs[0])
    assert memory.add(fifth := _Held(1, own=40), owner, CPU, 0) is None
    assert owner.gone == graphs[1:3] and owner.crowded == [True, True]
    assert memory.holds(graphs[0]) and memory.holds(fifth) and memory.used_bytes == 90
    assert released == [], "the pool is the others'"
    memory.drop_all()
    assert owner.crowded == [True, True, False, False, False] and released == [CPU]


def test_where_the_pool_is_over_the_budget_nothing_less_than_all_gives_it_back(host: Host) -> None:
    memory, owner = CapturedMemory(lambda _: 100, lambda _: None), _Owner()
    graphs = [_Held(1, own=10) for _ in range(3)]
    assert [memory.add(graph, owner, CPU, 40) for graph in graphs] == [None, None, None]
    assert owner.gone == graphs and memory.used_bytes == 0
    assert "(110 MiB) is over" in (
        CapturedMemory(lambda _: 100 << 20, lambda _: None).add(
            _Held(1, own=10 << 20), owner, CPU, 100 << 20
        )
        or ""
    )


def test_over_the_budget_all_graphs_go_and_what_never_fits_is_named(host: Host) -> None:
    released: list[torch.device] = []
    memory, owner = CapturedMemory(lambda _: 100, released.append), _Owner()
    graphs = [_Held(40) for _ in range(3)]
    assert [memory.add(graph, owner, CPU, 40) for graph in graphs] == [None, None, None]
    assert owner.gone == graphs and all(graph.memory is None for graph in graphs)
    assert memory.used_bytes == 0 and released == [CPU]
    huge = _Held(200)
    assert "over the budget" in (memory.add(huge, owner, CPU, 200) or "")
    assert memory.used_bytes == 0 and huge.memory is None


def test_memory_that_graphs_share_is_counted_until_the_last_one_goes(host: Host) -> None:
    memory, owner = CapturedMemory(lambda _: 100, lambda _: None), _Owner()
    graphs = [_Held(40), _Held(0)]
    for graph in graphs:
        memory.add(graph, owner, CPU, 40 if graph is graphs[0] else 0)
    memory.drop(graphs[0])
    assert memory.used_bytes == 40
    memory.drop(graphs[1])
    assert memory.used_bytes == 0


def test_graphs_whose_model_is_gone_are_let_go(host: Host) -> None:
    memory, owner, graph = CapturedMemory(lambda _: 100, lambda _: None), _Owner(), _Held(40)
    memory.add(graph, owner, CPU, 40)
    memory.sweep()
    assert memory.holds(graph)
    del owner
    gc.collect()
    memory.sweep()
    assert not memory.holds(graph) and graph.memory is None and memory.used_bytes == 0


def test_the_driver_gets_back_what_the_last_graph_held(host: Host) -> None:
    """Its reserve would be counted as nothing, and given to the next capture for nothing."""
    released: list[Any] = []
    memory = CapturedMemory(lambda _: 1000, released.append)
    owner, device = _Owner(), torch.device("cpu")
    first, second = _Held(1), _Held(1)
    for graph in (first, second):
        memory.add(graph, owner, device, 100)
    memory.drop(first)
    assert released == []
    memory.drop(second)
    assert released == [device]
    memory.add(_Held(1), owner, device, 100)
    del owner
    gc.collect()
    memory.sweep()
    assert released == [device, device]


def test_the_host_sees_the_memory_and_gets_it_back(host: Host) -> None:
    import comfy.model_management as management

    memory, owner = CapturedMemory(lambda _: 1000, lambda _: None), _Owner()
    for round_ in range(2):  # it stands in the list again after it was unloaded
        graph = _Held(500)
        memory.add(graph, owner, CPU, 500)
        alive = [m for m in management.current_loaded_models if m.model is not None]
        listed = [m for m in alive if m.model_memory() == 500]
        assert len(listed) == 1 and not listed[0].currently_used, round_
        management.free_memory(1e30, CPU)
        assert graph.memory is None and memory.used_bytes == 0
        assert listed[0] not in management.current_loaded_models


def test_exact_needs_a_gpu_and_says_so(lab: Lab, host: Host) -> None:
    model = host.load("narrowxl")[0]
    exact = lab.engine.compile_model(model, form="exact")
    report = lab.engine.report(exact)
    assert report["regions"]["total"] == 0
    assert "that needs an NVIDIA GPU" in report["notes"][0]


# --- when a capture fails -------------------------------------------------------------------------


class _Weights:
    """Weights that never move; what the host brings over within a capture is told to `undo`."""

    problem = None
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.undone = 0

    def look(self) -> Any:
        return "anchor"

    def hold(self, addresses: Any) -> bool:
        return True

    def let_go(self, addresses: Any) -> None:
        pass

    def marks(self) -> list[Any]:
        return []

    def undo(self, marks: list[Any]) -> None:
        self.undone += 1

    def settle(self) -> None:
        pass


class _Compared:
    count = 0


class _Graph:
    """Stands for a CUDA graph: it computes as it would, and can be told to find no room."""

    room = True
    tries = 0
    regions = 0
    own_bytes = 0

    def __init__(self, *_: Any) -> None:
        self.freed = False

    def prepare(self, *_: Any) -> None: ...

    def capture(self, *_: Any) -> None:
        type(self).tries += 1
        if not self.room:
            raise CaptureError(of("no_memory_capturing"))

    def fits(self, addresses: Any) -> bool:
        return True

    def replay(self, addresses: Any, tensors: Any) -> Any:
        assert not self.freed
        return tensors[0] + 1

    def free(self) -> None:
        self.freed = True


@pytest.fixture
def memory(host: Host) -> CapturedMemory:
    return CapturedMemory(lambda _: 2**40, lambda _: None)


@pytest.fixture
def steps(memory: CapturedMemory, monkeypatch: pytest.MonkeyPatch) -> tuple[Replays, _Weights, Any]:
    """Captured calls without a GPU: the object, its weights, and a step in a form."""
    monkeypatch.setattr(replays, "CapturedCall", _Graph)
    monkeypatch.setattr(replays.driver, "free_bytes", lambda _: 2**40)
    monkeypatch.setattr(replays.driver, "reserved_bytes", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(_Graph, "room", True)
    monkeypatch.setattr(_Graph, "tries", 0)
    made, weights = Replays(memory, _Compared()), _Weights()  # type: ignore[arg-type]

    def step(
        form: str,
        *,
        complete: bool = True,
        rows: int = 2,
        steps: int | None = None,
    ) -> Any:
        """Returns in which form the call was captured, None where it was made."""
        sigmas = {} if steps is None else {"sample_sigmas": torch.ones(steps + 1)}
        call = read_call((torch.zeros(rows, 4), sigmas), {}, frozenset(("sample_sigmas",)))
        attempt = made.attempt(
            lambda x, _: x + 1,
            call,
            book=weights,  # type: ignore[arg-type]
            form=form,
            complete=complete,
            runner=lambda run, compiled=True: run(),
            steps=run_steps(call),
        )
        result = attempt.result
        if result is None:
            result = torch.zeros(rows, 4) + 1
            made.settle(attempt, weights, result)  # type: ignore[arg-type]
        assert torch.equal(result, torch.ones(rows, 4))
        return attempt.form

    return made, weights, step


def test_a_better_form_that_finds_no_room_leaves_the_one_that_is_there(
    steps: tuple[Replays, _Weights, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, weights, step = steps
    monkeypatch.setattr(replays.gpu, "mark", lambda device: "a mark")
    monkeypatch.setattr(replays.gpu, "is_passed", lambda mark: True)
    monkeypatch.setattr(replays.gpu, "seconds_between", lambda begin, end: 0.1)
    forms = [step("compiled", complete=False) for _ in range(CLEAN_CALLS + 2)]
    assert forms == [None] * CLEAN_CALLS + [replays.EXACT] * 2
    assert (made.captures, made.replayed) == (1, 2)
    monkeypatch.setattr(_Graph, "room", False)
    for _ in range(CLEAN_CALLS + 1):
        step("compiled")
    assert _Graph.tries == 2 and weights.undone == 1 and made.captured == 1
    assert step("compiled") == replays.EXACT, "by the graph that is there"
    assert made.replayed == 3

    monkeypatch.setattr(_Graph, "room", True)
    made.begin_run()
    for _ in range(CLEAN_CALLS + 2):
        step("compiled")
    assert (made.captures, made.captured) == (2, 1)


def test_a_captured_call_ends_with_a_graph_in_it_that_was_dropped(
    steps: tuple[Replays, _Weights, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _, step = steps
    for _ in range(CLEAN_CALLS + 1):
        step("compiled")
    monkeypatch.setattr(_Graph, "room", False)  # nothing better can be captured meanwhile
    for _ in range(CLEAN_CALLS + 3):
        step("one graph less")
    assert made.replayed == 1, "what was captured holds the graph"


def test_what_made_room_for_another_call_is_captured_anew_once_it_comes_often(
    steps: tuple[Replays, _Weights, Any], memory: CapturedMemory
) -> None:
    made, _, step = steps
    for _ in range(CLEAN_CALLS + 1):
        step("compiled")
    (graph,) = memory._owners
    memory.drop(graph, crowded=True)
    for _ in range(replays._BACK_OFF + CLEAN_CALLS):
        step("compiled")
    assert made.captures == 1
    step("compiled")
    assert made.captures == 2


def test_a_call_that_the_run_will_make_often_is_captured_after_one(
    steps: tuple[Replays, _Weights, Any],
) -> None:
    made, _, step = steps
    step("compiled", steps=20)
    step("compiled", steps=20)
    assert made.captures == 0, "the first calls of all do what is done once"
    step("compiled", steps=20)
    assert made.captures == 1
    made.begin_run()
    for rows in (3, 4, 3, 4):  # two prompts of unequal length
        step("compiled", rows=rows, steps=8)
    assert made.captures == 3 and made.replayed == 3
    made.begin_run()
    for _ in range(CLEAN_CALLS):
        step("compiled", rows=5, steps=replays.STEPS_LEFT)
    assert made.captures == 3, "too few are left"
    made.begin_run()
    for _ in range(CLEAN_CALLS):
        step("compiled", rows=6)
    assert made.captures == 3, "nobody says how many"


def test_a_first_call_that_took_long_is_not_the_last_word(
    steps: tuple[Replays, _Weights, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _, step = steps
    for _ in range(CLEAN_CALLS + 1):
        step("compiled")
    made._limit_s = lambda: 0.5
    times = iter((2.9, 0.1))
    monkeypatch.setattr(replays.gpu, "mark", lambda device: "a mark")
    monkeypatch.setattr(replays.gpu, "is_passed", lambda mark: True)
    monkeypatch.setattr(replays.gpu, "seconds_between", lambda begin, end: next(times))
    made.begin_run()
    for _ in range(CLEAN_CALLS + 1):
        step("compiled", rows=3, steps=20)
    assert made.captures == 2 and not made.reasons


def test_how_many_steps_a_run_has_is_asked_of_its_sigmas_alone() -> None:
    sigmas = torch.ones(21, device="meta")  # of which nothing could be read
    options = {"sample_sigmas": sigmas}
    assert run_steps(read_call(_arguments(**options), {}, frozenset(("sample_sigmas",)))) == 20
    assert run_steps(read_call(_arguments(), {})) is None


def test_cancel_while_a_call_is_captured_ends_the_prompt(
    steps: tuple[Replays, _Weights, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from comfy.model_management import InterruptProcessingException

    made, weights, step = steps

    def cancelled(self: Any, *_: Any) -> None:
        raise InterruptProcessingException

    monkeypatch.setattr(_Graph, "capture", cancelled)
    for _ in range(CLEAN_CALLS):
        step("compiled")
    with pytest.raises(InterruptProcessingException):
        step("compiled")
    assert weights.undone == 1 and made.captured == 0


def test_cancel_before_a_replay_ends_the_prompt_and_leaves_what_is_captured(
    steps: tuple[Replays, _Weights, Any],
) -> None:
    from comfy.model_management import (
        InterruptProcessingException,
        interrupt_current_processing,
    )

    made, weights, step = steps
    for _ in range(CLEAN_CALLS + 1):
        step("compiled")
    before = made.replayed, made.captured
    interrupt_current_processing(True)
    with pytest.raises(InterruptProcessingException):
        step("compiled")
    assert (made.replayed, made.captured) == before == (1, 1) and weights.undone == 0
    step("compiled")
    assert made.replayed == 2


def test_a_call_that_takes_long_is_not_captured(
    steps: tuple[Replays, _Weights, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _, step = steps
    seconds = 2.9
    made._limit_s = lambda: 0.5
    monkeypatch.setattr(replays.gpu, "mark", lambda device: "a mark")
    monkeypatch.setattr(replays.gpu, "is_passed", lambda mark: True)
    monkeypatch.setattr(replays.gpu, "seconds_between", lambda begin, end: seconds)
    for _ in range(CLEAN_CALLS + 3):
        step("compiled")
    assert _Graph.tries == 0 and made.captured == 0
    (reason,) = made.reasons
    assert reason == "one call takes 2.9 s, of which replaying it would save nothing"
    seconds = 0.1
    for _ in range(CLEAN_CALLS + 2):
        step("one graph more")
    assert made.captured == 1


def test_while_graphs_are_made_only_what_waits_for_the_processor_is_captured(
    steps: tuple[Replays, _Weights, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _, step = steps
    behind = True
    monkeypatch.setattr(replays.gpu, "mark", lambda device: "a mark")
    monkeypatch.setattr(replays.gpu, "is_passed", lambda mark: not behind)
    monkeypatch.setattr(replays.gpu, "seconds_between", lambda begin, end: 0.1)
    for _ in range(CLEAN_CALLS + 3):
        step("compiled", complete=False)
    assert _Graph.tries == 0
    (reason,) = made.reasons
    assert reason.startswith("compiled files are on their way")
    for _ in range(CLEAN_CALLS + 2):
        step("compiled")
    assert (made.captures, made.captured) == (1, 1), "the compiled call, whatever waits for what"

    behind = False
    made.drop()
    for _ in range(CLEAN_CALLS + 2):
        step("compiled", complete=False)
    assert (made.captures, made.replayed) == (2, 4)


def test_the_signature_that_is_used_is_not_the_first_to_be_forgotten(
    steps: tuple[Replays, _Weights, Any],
) -> None:
    made, _, _ = steps
    hot = made._known("hot")
    for other in range(2 * replays.MAX_SIGNATURES):
        made._known(other)
        assert made._known("hot") is hot
