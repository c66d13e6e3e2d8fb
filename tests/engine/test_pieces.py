"""Places replayed by themselves, where the host's Python runs between them: the same bits, and
nothing that anybody kept is written over. CUDA graphs are recorded (`recorded_graphs`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from warmgraph_backends.compilers import registry
from warmgraph_backends.cuda_graphs import piece as piece_room
from warmgraph_backends.cuda_graphs import pieces as pieces_room
from warmgraph_backends.cuda_graphs.piece import Statics
from warmgraph_backends.reasons import of
from warmgraph_backends.runtime.scope import Scope
from warmgraph_backends.weights.fetching import ModelWeights
from warmgraph_backends.weights.source import Brought, WeightSource
from warmgraph_backends.weights.streamed import made_of, parts_of
from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host

from . import made_up_compiler, recorded_graphs
from .lab import Lab
from .lacking_worker import COMPILER, LACKS, ROLL
from .recorded_graphs import Recorded, RecordedGraph

WORKER = Path(__file__).with_name("lacking_worker.py")
STEPS = 8
BLOCKS = 4
PLACES, KINDS = 5, 3


@pytest.fixture(scope="module")
def traced(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """An engine whose graphs run operator by operator, so that a recording sees each."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("traced")
        patch.setenv(COMPILER, str(made_up_compiler.__file__))
        patch.setenv(ROLL, str(folder / "roll"))
        patch.setenv(LACKS, "torch._inductor:standalone_compile")
        patch.setattr(registry, "COMPILERS", (Recorded(), *registry.COMPILERS))
        lab = Lab(folder)
        patch.setattr(lab.engine._builder, "_script", WORKER)
        yield lab
        lab.engine.close()


class Pieced:
    """A small Flux, or another model, compiled, whose places are captured; and the same with
    nothing captured.
    """

    def __init__(
        self,
        host: Host,
        lab: Lab,
        monkeypatch: pytest.MonkeyPatch,
        kind: str = "flux1",
        plain: Any = None,
    ) -> None:
        self.host, self.lab, self.kind = host, lab, kind
        self.plain = transformers.load(kind) if plain is None else plain
        self.calls = self.compiled(self.plain)
        self.sample(self.calls, steps=1)  # built, and compared with eager
        self.as_calls = self.sample(self.calls)
        recorded_graphs.use(monkeypatch)
        self.model = self.compiled(self.plain)

    def compiled(self, model: Any) -> Any:
        return self.lab.compiled(model, backend="traced")

    @property
    def scope(self) -> Scope:
        return self.model.get_attachment("warmgraph").scope

    @property
    def pieces(self) -> Any:
        return self.scope.pieces

    def sample(
        self,
        model: Any = None,
        *,
        steps: int = STEPS,
        width: int = 8,
        tokens: int = 13,
        **options: Any,
    ) -> torch.Tensor:
        text = transformers.conditioning(self.kind, tokens)
        result: torch.Tensor = self.host.sample(
            self.model if model is None else model,
            text,
            text,
            latent=transformers.latent(self.kind, height=8, width=width, batch=1, frames=1),
            steps=steps,
            cfg=1.0,
            scheduler="simple",
            **options,
        )
        return result


class Fresh(WeightSource):
    """Brings copies of all weights at each call, as where they lie elsewhere."""

    name = "fresh"

    def __init__(self) -> None:
        self.brought: list[Any] = []
        self.replayed_at: list[int] = []

    def takes(self, module: Any) -> bool:
        return getattr(module, "weight", None) is not None

    def fetch(self, modules: Sequence[Any]) -> Brought:
        pairs = {id(m): tuple(map(self._copy, (m.weight, m.bias))) for m in modules}
        return Brought(pairs, self.name, False, self._spoil)  # type: ignore[arg-type]

    def _copy(self, tensor: Any) -> Any:
        if tensor is None:
            return None
        parts = [part.detach().clone() for part in parts_of(tensor)]
        self.brought += parts
        return made_of(tensor, iter(parts))

    def _spoil(self) -> None:
        """The room is another's once the work is queued; here it is done by then."""
        self.replayed_at.append(RecordedGraph.replayed)
        for part in self.brought:
            part.zero_()
        self.brought.clear()


def with_fresh_weights(
    host: Host, lab: Lab, monkeypatch: pytest.MonkeyPatch, form: str
) -> tuple[Pieced, Fresh]:
    """A small Flux in a format, "" for none, whose weights come anew at each call."""
    model = transformers.load_quantised("flux1", form) if form else None
    made, fresh = Pieced(host, lab, monkeypatch, "flux1", model), Fresh()
    made.sample(steps=1)
    weights = made.scope._bound.weights  # type: ignore[union-attr]
    weights.sources = (*weights.sources, fresh)
    return made, fresh


@pytest.fixture
def pieced(host: Host, traced: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pieced]:
    made = Pieced(host, traced, monkeypatch)
    yield made
    made.scope._shared.captured.drop_all()  # no graph may outlive what stands for the device


def test_places_are_captured_after_one_clean_step_and_give_the_same_bits(pieced: Pieced) -> None:
    assert torch.equal(pieced.sample(), pieced.as_calls)
    pieces = pieced.pieces
    assert pieces.captures == PLACES and RecordedGraph.begun == PLACES and not pieces.cuts
    assert pieces.replayed == (STEPS - 2) * PLACES
    assert torch.equal(pieced.sample(), pieced.as_calls)
    assert pieces.captures == PLACES and pieces.replayed == (2 * STEPS - 2) * PLACES


def test_memory_that_outlives_a_recording_is_allocated_outside_of_it(
    pieced: Pieced, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be the graph's, and PyTorch would be told of its end by nobody."""
    made: list[bool] = []
    take_of = Statics.take_of

    def watched(statics: Statics, use: Any, form: Any) -> torch.Tensor:
        if (use, form) not in statics._tensors:
            made.append(RecordedGraph.now is not None)
        return take_of(statics, use, form)

    monkeypatch.setattr(Statics, "take_of", watched)
    pieced.sample()
    assert pieced.pieces.captures == PLACES and made and not any(made)


@pytest.mark.parametrize("tokens", [13, 16])
def test_results_take_no_memory_beside_the_inputs(pieced: Pieced, tokens: int) -> None:
    """They are left where inputs of their forms lay; also where all inputs are of one form."""
    assert torch.equal(pieced.sample(tokens=tokens), pieced.sample(pieced.calls, tokens=tokens))
    pieces = pieced.pieces
    assert pieces.captures == PLACES and pieces.replayed == (STEPS - 2) * PLACES
    found = [form for use, form in pieces._statics._tensors if use[0] == "result"]
    assert [form[0] for form in found] == [(1, 16, 64)], "the last layer's has no input's form"


def test_a_place_that_gives_something_else_when_recorded_is_not_replayed(
    pieced: Pieced, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(static: torch.Tensor, result: torch.Tensor) -> None:
        static.copy_(result * 1.1)

    with monkeypatch.context() as patch:
        patch.setattr(piece_room, "leave", wrong)
        assert torch.equal(pieced.sample(), pieced.as_calls)
    pieces = pieced.pieces
    assert pieces.captures == pieces.replayed == 0 and RecordedGraph.begun == PLACES
    (reason,) = pieces.refused
    assert "differs by" in str(reason) and pieces.refused[reason] == PLACES
    assert torch.equal(pieced.sample(), pieced.as_calls)
    assert pieces.captures == PLACES, "tried once more in the next run"


def test_too_short_a_run_is_not_captured_before_its_third_step(pieced: Pieced) -> None:
    pieced.sample(steps=4)
    assert pieced.pieces.captures == PLACES and pieced.pieces.replayed == PLACES
    pieced.sample(steps=2)
    assert pieced.pieces.replayed == 3 * PLACES, "it is known by now"


def test_where_the_gpu_has_work_nothing_is_captured(
    pieced: Pieced, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded_graphs.Gpu, "is_idle", False)
    assert torch.equal(pieced.sample(), pieced.as_calls)
    assert pieced.pieces.captures == RecordedGraph.begun == 0


def test_where_others_code_waits_for_the_gpu_at_each_block_nothing_is_captured(
    pieced: Pieced, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a block is done before the next is queued, though the GPU is what takes long."""
    monkeypatch.setattr(recorded_graphs.Gpu, "seconds", 1e3)
    assert torch.equal(pieced.sample(), pieced.as_calls)
    assert pieced.pieces.captures == RecordedGraph.begun == 0


def test_another_attention_runs_between_two_graphs_and_may_keep_what_it_gets(
    pieced: Pieced,
) -> None:
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    sigmas: list[float] = []

    def attend(function: Any, q: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        sigmas.append(float(named["transformer_options"]["sigmas"][0]))
        result: torch.Tensor = function(q, *args, **named)
        kept.append((q, q.clone()))
        kept.append((result, result.clone()))
        return result * (1.0 + 0.01 * (len(sigmas) % 7))  # hangs on how often it was called

    def image(model: Any) -> torch.Tensor:
        sigmas.clear()
        clone = model.clone()
        options = clone.model_options.setdefault("transformer_options", {})
        options["optimized_attention_override"] = attend
        return pieced.sample(clone)

    as_calls = image(pieced.calls)
    told = list(sigmas)
    assert torch.equal(image(pieced.model), as_calls) and not torch.equal(as_calls, pieced.as_calls)
    assert sigmas == told and len(sigmas) == STEPS * BLOCKS
    assert all(torch.equal(tensor, copy) for tensor, copy in kept)
    pieces = pieced.pieces
    assert pieces.replayed == (STEPS - 2) * PLACES
    (cut,) = pieces.cuts
    assert pieces.cuts[cut] == BLOCKS
    assert cut.startswith("another attention runs between what is replayed (reads ")
    # A block in two graphs, the last layer in one.
    assert RecordedGraph.begun == 2 * BLOCKS + 1
    assert torch.equal(pieced.sample(), pieced.as_calls), "and without it as ever"


def test_an_attention_that_keeps_nothing_is_captured_and_told_apart(pieced: Pieced) -> None:
    def override_by(scale: float) -> Any:
        def attend(function: Any, q: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
            result: torch.Tensor = function(q * scale, *args, **named)
            return result

        return attend

    def image(model: Any, scale: float) -> torch.Tensor:
        clone = model.clone()
        options = clone.model_options.setdefault("transformer_options", {})
        options["optimized_attention_override"] = override_by(scale)
        return pieced.sample(clone)

    images = [image(pieced.model, scale) for scale in (0.5, 1.5, 0.5)]
    assert torch.equal(images[0], images[2]) and not torch.equal(images[0], images[1])
    assert torch.equal(images[0], image(pieced.calls, 0.5))
    pieces = pieced.pieces
    assert not pieces.cuts and pieces.captures == 2 * BLOCKS + 1, "the last layer attends to none"
    assert pieces.replayed == 3 * STEPS * PLACES - 2 * pieces.captures


class Counting:
    """Attention of a node that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, function: Any, q: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        self.calls += 1
        result: torch.Tensor = function(q * 0.5, *args, **named)
        return result

    def image(self, pieced: Pieced, model: Any) -> torch.Tensor:
        self.calls = 0
        clone = model.clone()
        options = clone.model_options.setdefault("transformer_options", {})
        options["optimized_attention_override"] = self
        return pieced.sample(clone)


def test_an_attention_that_counts_its_calls_is_called_at_each_step(pieced: Pieced) -> None:
    one, pieces = Counting(), pieced.pieces
    as_calls = one.image(pieced, pieced.calls)
    assert torch.equal(one.image(pieced, pieced.model), as_calls)
    assert one.calls == STEPS * BLOCKS and pieces.replayed > 0
    (cut,) = pieces.cuts
    assert cut.key == "attention_between" and pieces.cuts[cut] == BLOCKS


def test_what_a_hook_keeps_of_a_block_is_its_own(pieced: Pieced) -> None:
    def kept_by(model: Any) -> list[torch.Tensor]:
        kept: list[torch.Tensor] = []

        def keep(args: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
            out: dict[str, Any] = more["original_block"](args)
            kept.extend(out.values())
            return {name: value.clone() for name, value in out.items()}

        clone = model.clone()
        for number in range(2):
            clone.set_model_patch_replace(keep, "dit", "double_block", number)
        assert torch.equal(pieced.sample(clone), pieced.as_calls)
        return kept

    as_calls = kept_by(pieced.calls)
    kept = kept_by(pieced.model)
    assert pieced.pieces.replayed > 0 and len(kept) == 2 * 2 * STEPS
    assert all(map(torch.equal, kept, as_calls))


def test_new_sizes_loras_and_other_settings_are_captured_anew(pieced: Pieced) -> None:
    pieced.sample()
    before = pieced.pieces.captures
    wide = pieced.sample(width=16)
    assert pieced.pieces.captures == before + PLACES
    assert torch.equal(wide, pieced.sample(pieced.calls, width=16))
    lora = pieced.model.clone()
    key = next(k for k in lora.model.state_dict() if "single_blocks.0.linear1.weight" in k)
    shape = lora.model.state_dict()[key].shape
    change = torch.randn(shape, generator=torch.Generator().manual_seed(5)) * 0.05
    lora.add_patches({key: ("diff", (change,))}, 1.0)
    changed = pieced.sample(lora)
    assert not torch.equal(changed, pieced.as_calls)
    of_calls = pieced.calls.clone()
    of_calls.add_patches({key: ("diff", (change,))}, 1.0)
    assert torch.equal(pieced.sample(of_calls), changed)
    assert torch.equal(pieced.sample(), pieced.as_calls)
    captures = pieced.pieces.captures
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_fp16_accumulation = matmul.allow_fp16_accumulation, True
    try:
        again = pieced.sample()
    finally:
        matmul.allow_fp16_accumulation = before
    assert torch.equal(again, pieced.as_calls)
    assert pieced.pieces.captures == captures + PLACES, "the same kernels, called for otherwise"


def test_no_graph_outlives_its_memory(pieced: Pieced) -> None:
    pieced.sample()
    memory = pieced.scope._shared.captured
    assert pieced.pieces.captured == PLACES and memory.used_bytes > 0
    memory.drop_all()
    assert pieced.pieces.captured == 0 and memory.used_bytes == 0
    assert pieced.pieces._statics.held_bytes == 0, "what pieces share goes with the last one"
    assert torch.equal(pieced.sample(), pieced.as_calls)
    assert pieced.pieces.captures == 2 * PLACES
    pieced.scope.unloaded()
    assert pieced.pieces.captured == 0


def test_a_cancelled_step_ends_within_a_place_and_leaves_nothing_behind(
    pieced: Pieced, monkeypatch: pytest.MonkeyPatch
) -> None:
    from comfy import model_management

    pieced.sample()
    replays = []

    def interrupt(*_: Any) -> None:
        replays.append(1)
        if len(replays) == 3:
            model_management.interrupt_current_processing()

    monkeypatch.setattr(recorded_graphs, "on_replay", interrupt)
    with pytest.raises(model_management.InterruptProcessingException):
        pieced.sample()
    assert len(replays) == 3
    monkeypatch.setattr(recorded_graphs, "on_replay", lambda: None)
    assert torch.equal(pieced.sample(), pieced.as_calls)


def test_what_cannot_be_captured_runs_as_calls_and_says_why(
    pieced: Pieced, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    def refuse(self: Any, **_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(RecordedGraph, "capture_begin", refuse)
    assert torch.equal(pieced.sample(), pieced.as_calls)
    (reason,) = pieced.pieces.refused
    assert "operation not permitted" in reason and pieced.pieces.refused[reason] == PLACES
    assert "operation not permitted" in log.text
    assert not pieced.scope.faults


@pytest.mark.parametrize("who", ["cache", "weights", "nobody"])
def test_where_there_is_no_room_the_cache_and_then_weights_make_some(
    pieced: Pieced, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """Asked once a run where nobody has any."""
    free, asked = [0], []

    def make(name: str, size: int) -> None:
        asked.append(name)
        free[0] += size if who == name else 0

    monkeypatch.setattr(pieces_room.driver, "free_bytes", lambda device: free[0])
    monkeypatch.setattr(pieces_room, "empty_cache", lambda: make("cache", 2**30))
    monkeypatch.setattr(ModelWeights, "make_room", lambda _, size: make("weights", size))
    for run in range(1, 3):
        assert torch.equal(pieced.sample(), pieced.as_calls)
        if who == "nobody":
            assert asked == run * ["cache", "weights"]
            assert pieced.pieces.captures == 0 and pieced.pieces.refused[of("no_room")] > 0
        else:
            assert asked == ["cache", "weights"][: 1 + (who == "weights")]
            assert pieced.pieces.captures == PLACES and not pieced.pieces.refused


@pytest.mark.parametrize("form", ["", "int8"])
def test_places_whose_weights_come_anew_share_the_piece_of_their_kind(
    host: Host, traced: Lab, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    pieced, _ = with_fresh_weights(host, traced, monkeypatch, form)
    assert torch.equal(pieced.sample(), pieced.as_calls)
    pieces = pieced.pieces
    assert pieces.captures == pieces.captured == KINDS and not pieces.refused
    # Of a kind one call is compared, one is clean, and one is captured.
    assert pieces.replayed == STEPS * PLACES - 3 * KINDS and not pieces.cuts
    assert torch.equal(pieced.sample(), pieced.as_calls) and pieces.captures == KINDS
    traced.engine._captured.drop_all()


@pytest.mark.parametrize("form", ["", "int8"])
def test_the_next_weights_may_come_while_a_shared_piece_computes(
    host: Host, traced: Lab, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Also where the piece finds no memory, and its copies are what a call has."""
    pieced, fresh = with_fresh_weights(host, traced, monkeypatch, form)
    assert torch.equal(pieced.sample(), pieced.as_calls)
    fresh.replayed_at.clear()
    before = RecordedGraph.replayed
    assert torch.equal(pieced.sample(), pieced.as_calls)
    assert fresh.replayed_at == list(range(before, before + STEPS * PLACES))

    def fail() -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(recorded_graphs, "on_replay", fail)
    assert torch.equal(pieced.sample(steps=1), pieced.sample(pieced.calls, steps=1))
    assert pieced.pieces.refused[of("no_memory")] == 1
    traced.engine._captured.drop_all()


def test_layers_of_one_input_run_between_two_graphs_where_one_of_them_must(
    host: Host, traced: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that fetches its own weights, for a LoRA at each call."""
    plain = transformers.load_quantised("wan", "int8")
    layer = plain.model.diffusion_model.blocks[1].self_attn.k
    pieced = Pieced(host, traced, monkeypatch, "wan", plain)
    layer.weight_function = [lambda weight: 1.5 * weight]  # the host's loading takes it away
    try:
        changed = pieced.sample()
        assert not torch.equal(changed, pieced.as_calls)
        assert torch.equal(changed, pieced.sample(pieced.calls))
        pieces = pieced.pieces
        fetches = "a layer that fetches its own weights runs between what is replayed"
        assert pieces.cuts == {fetches: 1}
        assert pieces.captures > 0 and pieces.replayed == (STEPS - 2) * pieces.captures
        layer.weight_function = [lambda weight: 0.5 * weight]
        replayed = pieces.replayed
        other = pieced.sample()
        assert not torch.equal(other, changed) and pieces.replayed > replayed
        assert torch.equal(other, pieced.sample(pieced.calls)), "it is called at each replay"
    finally:
        pieced.scope._shared.captured.drop_all()
