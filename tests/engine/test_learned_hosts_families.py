"""Each family of the host's that nobody described, learned from a run and served: at any size,
beside what other nodes do to it, and by the next server.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host

from .lab import TOLERANCE, Lab, assert_same_calls
from .learned_serving import Served
from .quantised_runs import QUANTISED

pytestmark = pytest.mark.slow

#: Height, width, batch, tokens of the text, frames: none is the one that was watched.
CALLS = (
    (12, 8, 1, 1, 2),
    (16, 10, 2, 40, 1),
    (4, 6, 3, 300, 3),
    (24, 16, 1, 77, 1),
    (6, 20, 4, 13, 1),
    (16, 16, 2, 154, 2),
)


class Family(NamedTuple):
    """What is served of a small model.

    Attributes:
        calls: of blocks by graphs, in a step.
        graphs: that are ready.
        left: why other parts are the host's, by key.
    """

    calls: int
    graphs: int
    left: frozenset[str] = frozenset()


FAMILIES = {
    "aura": Family(4, 2),
    "kandinsky": Family(2, 2),
    "omnigen": Family(2, 1),
    "cosmos": Family(2, 1),
    "mage_flow": Family(2, 1),
    "lens": Family(2, 1),
    "joyimage": Family(2, 1),
    "boogu": Family(8, 3, frozenset({"learned_not_called"})),
    "pixeldit": Family(2, 1, frozenset({"compiling_failed"})),
    "hydit": Family(4, 2),
    "cogvideo": Family(2, 1),
    "hunyuan_3d": Family(4, 2),
}
#: Whose noise is thousands of times what its blocks add.
LOUD = {"cogvideo": 1e-7}
#: Of what a new server tries again.
FAILED = {"compiling_failed"}
#: Whose blocks the host hands no options to attend with.
BARE = ("hydit",)
#: Whose blocks the host calls with other arguments where one is replaced.
OTHERWISE = {"aura": [("unknown_arguments", 1)]}


@pytest.fixture(autouse=True)
def _unloaded(host: Host) -> Iterator[None]:
    with torch.inference_mode():
        yield
    host.unload()


def _lab(root: Path) -> Lab:
    lab = Lab(root)
    return lab


@pytest.fixture(scope="module")
def learning(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """The engine that learns them all."""
    lab = _lab(tmp_path_factory.mktemp("learning"))
    yield lab
    lab.engine.close()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, host: Host, learning: Lab) -> Served:
    """A small model that was learned, and whose graphs were built."""
    served = Served(host, learning, request.param)
    with torch.inference_mode():
        assert served.run() == (0, 0.0)  # it is watched
        served.settle()
        served.run()  # by graphs that it has in common with another family, if there are any
        served.settle()
    return served


def _check(
    served: Served, *sizes: int, most: float = TOLERANCE, left: Collection[tuple[str, int]] = ()
) -> None:
    """One step, by graphs wherever there are some; before it one in which they are compared, where
    the like of it was not.

    Args:
        left: why blocks are the host's in this step, by key, and how many.
    """
    expected = FAMILIES[served.kind]
    wanted = expected.calls - sum(count for _, count in left)
    calls, error = served.run(sizes or (8, 8, 1, 13, 1))
    if calls < wanted:
        assert error <= LOUD.get(served.kind, most)
        calls, error = served.run(sizes or (8, 8, 1, 13, 1))
    assert calls == wanted, served.report["eager"]
    assert error <= LOUD.get(served.kind, most) and served.reasons() == expected.left | {
        key for key, _ in left
    }
    states = [kind["state"] for kind in served.report["kinds"]]
    assert states.count("ready") == expected.graphs, states


def test_a_step_of_any_size_is_compiled_and_nothing_is_built(family: Served) -> None:
    jobs = family.lab.jobs()
    for sizes in CALLS:
        _check(family, *sizes)
    assert family.lab.jobs() == jobs


def test_a_lora_changes_the_image_and_no_graph(family: Served) -> None:
    _check(family)
    plain, jobs, model = family.result, family.lab.jobs(), family.model
    weights = family.plain.model.diffusion_model.named_parameters(prefix="diffusion_model")
    compiled = tuple(f"diffusion_model.{name}." for name in family.session.scope.ran_places)
    key, weight = next((n, w) for n, w in weights if w.dim() == 2 and n.startswith(compiled))
    change = torch.randn(weight.shape, generator=torch.Generator().manual_seed(9))
    family.model = model.clone()
    assert family.model.add_patches({key: ("diff", (0.05 * change,))}) == [key]
    try:
        _check(family)
        assert not torch.equal(family.result, plain)
    finally:
        family.model = model
    _check(family)
    assert torch.equal(family.result, plain) and family.lab.jobs() == jobs


def test_another_nodes_attention_is_called_at_each_site_in_the_order_of_eager(
    family: Served,
) -> None:
    calls: list[torch.Tensor] = []

    def attend(function: Any, *args: Any, **named: Any) -> Any:
        named.pop("transformer_options", None)
        calls.append(function(*args, **named))
        return 0.5 * calls[-1]

    _check(family)
    plain, model = family.result, family.model
    family.model = model.clone()
    family.model.model_options["transformer_options"]["optimized_attention_override"] = attend
    try:
        _check(family)
    finally:
        family.model = model
    eager, is_bare = len(calls) // 2, family.kind in BARE
    assert len(calls) == 2 * eager and (eager == 0) == is_bare
    if not is_bare:
        assert_same_calls(calls, len(family.probe.calls))
    assert torch.equal(family.result, plain) == is_bare


def test_a_replaced_block_is_called_and_is_compiled_within(family: Served) -> None:
    source = sys.modules[type(family.plain.model.diffusion_model).__module__]
    if "blocks_replace" not in Path(source.__file__ or "").read_text("utf-8"):
        pytest.skip("this model's blocks cannot be replaced")
    if family.kind == "kandinsky":
        pytest.skip("the host calls its own blocks wrongly where one is replaced")
    seen = []

    def replacement(args: Any, extra: Any) -> Any:
        seen.append(args)
        return {**extra["original_block"](args), "img": 1.5 * args["img"]}

    _check(family)
    plain, model = family.result, family.model
    family.model = model.clone()
    family.model.set_model_patch_replace(replacement, "dit", "double_block", 0)
    try:
        _check(family, left=OTHERWISE.get(family.kind, ()))
    finally:
        family.model = model
    assert len(seen) == 2 and not torch.equal(family.result, plain)


def test_the_next_server_compiles_its_first_step_without_a_job(
    host: Host, family: Served, tmp_path: Path
) -> None:
    lab = family.lab.copy_to(tmp_path)
    try:
        served = Served(host, lab, family.kind, when_missing="wait")
        _check(served, *CALLS[1])
        _check(served, *CALLS[2])
        assert lab.builds() == 0 and lab.jobs() == len(FAMILIES[family.kind].left & FAILED)
    finally:
        lab.engine.close()


@pytest.mark.parametrize(
    ("kind", "form"), [("mage_flow", "int8_convrot"), ("hunyuan_3d", "fp8_e4m3fn")]
)
def test_a_quantised_file_is_learned_and_served(
    host: Host, tmp_path: Path, kind: str, form: str
) -> None:
    lab = _lab(tmp_path)
    try:
        served = Served(host, lab, kind, loaded=transformers.load_quantised(kind, form))
        served.learn()
        jobs = lab.jobs()
        for sizes in CALLS:
            _check(served, *sizes, most=QUANTISED)
        assert lab.jobs() == jobs
        notes = served.report["notes"]
        assert any("linear layers stay as they are (quantised" in note for note in notes), notes
    finally:
        lab.engine.close()
