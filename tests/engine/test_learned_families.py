"""What is learned of the host's own models: as families describe them, or where nobody did; and a
whole step by a worker's export of it is the host's.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from warmgraph_backends.building.worker_process import WorkerProcess
from warmgraph_backends.compilers.registry import backend_named
from warmgraph_backends.errors import BuildError, LearnError
from warmgraph_backends.families.catalogue import plan_model
from warmgraph_backends.host_api.process import host_arguments
from warmgraph_backends.learning.form import Learned
from warmgraph_backends.learning.record import learn
from warmgraph_backends.plans.plan import Plan
from warmgraph_backends.plans.region_code import RegionCode
from warmgraph_backends.plans.specs import describe_place
from warmgraph_backends.runtime.planner import Planner
from warmgraph_backends.runtime.scope import Scope
from warmgraph_backends.storing.canonical_json import canonical_json
from warmgraph_backends.storing.graph_file import CompressedPayload, unpack_payload
from warmgraph_backends.worker import main as worker
from warmgraph_backends.worker.export import export
from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host
from warmgraph_tools.watched import FIRST, lesson, sample

from .lab import Lab
from .learned import Regions, error
from .rows import some_rows

#: Another first call: height, width, batch, tokens of the text, frames.
OTHER = (16, 24, 2, 77, 1)
#: Calls that were not watched.
CALLS = ((12, 8, 1, 1, 1), (16, 10, 2, 40, 1), (4, 6, 3, 300, 1))
#: Models that nobody described: ways, blocks, and how these attend.
UNDESCRIBED = {
    "aura": (2, 4, {"live"}),
    "kandinsky": (2, 2, {"live"}),
    "omnigen": (1, 2, {"live"}),
    "ernie": (1, 2, {"bare"}),
    "cosmos": (1, 2, {"live"}),
    "mage_flow": (1, 2, {"live"}),
    "lens": (1, 2, {"live"}),
    "joyimage": (1, 2, {"live"}),
    "boogu": (3, 8, {"live"}),
    "pixeldit": (2, 4, {"live"}),
    "hydit": (2, 4, {"bare"}),
    "cogvideo": (1, 2, {"live"}),
    "hunyuan_3d": (2, 4, {"live"}),
    "stable_audio": (1, 2, {"live"}),
    "ace_step": (4, 12, {"bare"}),
}
#: Why blocks of these are not, by key: Boogu has some for images that it is to look at.
OUTSIDE = {"boogu": {"learned_not_called"}}
#: Of those: two ways, one that attends barely, and blocks that are called otherwise.
QUICK = ("aura", "ernie", "pixeldit", "stable_audio")
#: Whose step a worker exports in a few seconds.
EXPORTED = ("aura", "omnigen", "ernie", "lens", "joyimage", "hydit", "cogvideo", "hunyuan_3d")


class Models:
    """Small transformers of the host, and what was learned of them, each once."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._models: dict[str, Any] = {}
        self._records: dict[tuple[str, tuple[int, ...]], Any] = {}

    def model(self, kind: str) -> Any:
        if kind not in self._models:
            self._models[kind] = transformers.load(kind)
        return self._models[kind]

    def root(self, kind: str) -> torch.nn.Module:
        root: torch.nn.Module = self.model(kind).model.diffusion_model
        return root

    def task(self, kind: str, sizes: tuple[int, ...] = FIRST) -> dict[str, Any]:
        return lesson(self.host, kind, model=self.model(kind), sizes=sizes)

    def record(self, kind: str, sizes: tuple[int, ...] = FIRST) -> Any:
        if (kind, sizes) not in self._records:
            self._records[kind, sizes] = learn(self.task(kind, sizes))
        return self._records[kind, sizes]

    def step(self, kind: str, sizes: tuple[int, ...]) -> torch.Tensor:
        return sample(self.host, kind, self.model(kind), sizes)


@pytest.fixture(scope="module")
def models(host: Host) -> Iterator[Models]:
    found = Models(host)
    yield found
    found.host.unload()


def inputs_of(form: Any, block: torch.nn.Module) -> Counter[Any]:
    """What a region takes, whatever it is called and in which order."""
    return Counter((spec.dtype, spec.dims) for spec in form.inputs(block, "float32"))


@pytest.mark.parametrize(("kind", "places"), [("flux1", 4), ("zimage", 6)])
def test_a_described_model_is_learned_as_it_is_described(
    models: Models, kind: str, places: int
) -> None:
    """Sizes, the rotation table in its parts, what is written into, whose attention it is."""
    root = models.root(kind)
    written = plan_model(root)
    assert isinstance(written, Plan)
    by_name = {place.name: place for place in written.places}
    learned = Regions(root, models.record(kind)).plan.places
    assert len(learned) == places
    for place in learned:
        assert isinstance(place.form, Learned)
        form = by_name[place.name].form
        assert inputs_of(place.form, place.module) == inputs_of(form, place.module)
        assert (place.form.writes, place.form.live_attention) == (form.writes, form.live_attention)


@pytest.mark.parametrize("kind", some_rows(UNDESCRIBED, QUICK))
def test_a_model_that_nobody_described_is_learned(models: Models, kind: str) -> None:
    ways, blocks, attends = UNDESCRIBED[kind]
    record = models.record(kind)
    assert {why["key"] for _, why in record["outside"]} == OUTSIDE.get(kind, set())
    assert (len(record["ways"]), len(record["blocks"])) == (ways, blocks)
    assert {way["attends"] for _, way in record["ways"]} == attends


def test_a_model_that_is_made_of_data_is_not_learned(models: Models) -> None:
    """TripoSplat draws places as it is made."""
    with pytest.raises(LearnError) as raised:
        models.record("triposplat")
    assert raised.value.reason.key == "learned_no_step"


def test_a_block_whose_sizes_no_input_has_is_learned_and_not_exported(models: Models) -> None:
    """PixelDiT's last blocks take rows of images in one size. The others serve by themselves."""
    record = models.record("pixeldit")
    plan = Regions(models.root("pixeldit"), record).plan
    last = next(each for each in plan.places if each.name.startswith("pixel_blocks"))
    description = describe_place(last, plan, dtype=torch.float32, device="cpu")
    assert isinstance(last.form, Learned)
    with pytest.raises(BuildError) as raised:
        export(RegionCode(description, last.form))
    assert raised.value.reason.key == "export_failed"
    regions = Regions(models.root("pixeldit"), record, exported=True, lacking=last.form.name)
    for sizes in CALLS:
        reference = models.step("pixeldit", sizes)
        result = regions.run(lambda sizes=sizes: models.step("pixeldit", sizes))
        assert regions.served == 2
        assert error(result, reference) < 1e-5


@pytest.mark.parametrize("kind", some_rows(EXPORTED, QUICK))
def test_a_step_by_a_workers_export_of_what_was_learned_is_the_hosts(
    models: Models, kind: str
) -> None:
    record = models.record(kind)
    regions = Regions(models.root(kind), record, exported=True)
    for sizes in CALLS:
        reference = models.step(kind, sizes)
        result = regions.run(lambda sizes=sizes: models.step(kind, sizes))
        assert regions.declined == [] and regions.served == len(record["blocks"])
        assert error(result, reference) < 1e-5


def test_a_graph_of_what_was_learned_is_keyed_by_the_code_that_makes_it(models: Models) -> None:
    """Ours among it, which makes the form of the way."""
    plan = Regions(models.root("ernie"), models.record("ernie")).plan
    description = describe_place(plan.places[0], plan, dtype=torch.float32, device="cpu")
    own = {f"warmgraph.learning.form:Learned.{name}" for name in ("reference", "_values")}
    assert own <= description.sources.keys()


@pytest.mark.slow
def test_one_way_of_a_learned_model_serves_without_the_others_graph(
    models: Models, tmp_path: Path
) -> None:
    """Kandinsky's block computes otherwise beyond 8192 tokens; the report names what is missing."""
    record, root = models.record("kandinsky"), models.root("kandinsky")
    lab = Lab(tmp_path)
    try:
        scope = Scope(
            root,
            models.model("kandinsky").model,
            Planner(lambda root: plan_model(root, record)),
            Plan(),
            backend_named("inductor"),
            lab.engine._shared,
        )
        graphs = scope.describe(torch.device("cpu"), torch.float32)
        small = [g for g in graphs if any(s.maximum == 8192 for s in g.description.symbols)]
        assert (len(graphs), len(small)) == (2, 1)
        lab.engine._graphs.request(small, [], build=True)
        lab.settle()
        lab.engine._prompts.wait("the graph", small, lab.engine._builder, None)
        reference = models.step("kandinsky", CALLS[0])
        scope.begin_run()
        own = partial(type(root).forward, root)
        root.__dict__["forward"] = lambda *args, **kwargs: scope.call(own, args, kwargs).result
        compared = models.step("kandinsky", CALLS[0])
        assert error(compared, reference) == 0 and scope.compiled_calls == 0  # the host's own
        scope.begin_run()
        result = models.step("kandinsky", CALLS[0])
        assert scope.compiled_calls == len(record["blocks"])
        assert error(result, reference) < 1e-5
        missing = scope.eager_places()
        assert len(missing) == len(record["blocks"])
        assert all(":1" in name or ":" not in name for name, _ in missing)
        assert {why.key for _, why in missing} == {"no_file"}
    finally:
        root.__dict__.pop("forward", None)
        lab.engine.close()


@pytest.mark.slow
def test_a_block_that_computes_long_calls_in_parts_has_a_graph_for_them(
    models: Models, tmp_path: Path
) -> None:
    """Kandinsky's: of the parts of a length no algebra knows that there are as many."""
    record, root = models.record("kandinsky"), models.root("kandinsky")
    lab = Lab(tmp_path)
    try:
        regions = Regions(root, record, built=partial(lab.graph, build=True))
        for sizes in ((96, 96, 1, 13, 4), (100, 92, 1, 5, 4), (96, 98, 2, 13, 4)):
            reference = models.step("kandinsky", sizes)
            result = regions.run(lambda sizes=sizes: models.step("kandinsky", sizes))
            assert regions.declined == [] and regions.served == len(record["blocks"])
            assert error(result, reference) < 1e-5
        assert lab.builds() == 1
    finally:
        lab.engine.close()


@pytest.mark.parametrize(
    "kind",
    some_rows(("zimage", "ernie", "mage_flow", "lens", "boogu", "pixeldit", "hydit"), ("ernie",)),
)
def test_a_record_of_a_model_does_not_hang_on_the_first_call(models: Models, kind: str) -> None:
    assert models.record(kind, OTHER) == models.record(kind)


def test_a_worker_learns_from_data_alone(models: Models, tmp_path: Path) -> None:
    """The same record as here; and what it cannot learn it says as a job's failure."""
    task = models.task("ernie")
    process = WorkerProcess(Path(worker.__file__))
    try:
        process.send({**host_arguments(), "cache": str(process.cache), "spool": str(tmp_path)})
        assert "ready" in process.receive()
        process.send({"job": 1, "task": task})
        answer = process.receive()
        assert answer["ok"], answer
        data = process.receive_bytes(answer["packed_bytes"])
        raw = unpack_payload(CompressedPayload(data, answer["sha256"], answer["raw_bytes"]))
        assert raw.decode() == canonical_json(models.record("ernie"))
        process.send({"job": 2, "task": {**task, "model": "NoSuchModel"}})
        answer = process.receive()
        assert answer["error"]["key"] == "learned_no_step" and answer["clean"]
        process.send({"job": 3, "task": {**task, "watched": {**task["watched"], "leaves": 1}}})
        answer = process.receive()  # an error that nobody foresaw; it goes on as before
        assert not answer["ok"] and answer["error"]["text"].startswith("TypeError")
        assert answer["clean"]
        process.send({"job": 4, "task": task})
        again = process.receive()
        assert again["sha256"] == hashlib.sha256(data).hexdigest()
    finally:
        process.end()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        *("kandinsky", "cosmos", "mage_flow", "boogu"),
        *("sd3", "wan", "ltxv", "hunyuan", "hunyuan_15"),
    ],
)
def test_a_step_of_further_models_is_the_hosts(models: Models, kind: str) -> None:
    record = models.record(kind)
    regions = Regions(models.root(kind), record, exported=True)
    for sizes in CALLS:
        reference = models.step(kind, sizes)
        result = regions.run(lambda sizes=sizes: models.step(kind, sizes))
        assert regions.declined == [] and regions.served >= len(record["blocks"])
        assert error(result, reference) < 1e-5
