"""Models that nobody described: what is learned of made-up ones and what is refused, by name; and
no call gives anything else than the model's own code.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from warmgraph_backends.errors import LearnError
from warmgraph_backends.learning.arguments import write_down
from warmgraph_backends.learning.values import put_together
from warmgraph_tools.inprocess import Host

from . import learned_models
from .learned import CALLS, Regions, arguments, error, learned_of, outside
from .learned_generator import made_up

#: Those of which something is learned: how many ways there are, and how blocks attend.
SERVED = {
    "Model": (1, "live"),
    "InPlace": (1, "live"),
    "Keeps": (1, "live"),
    "Moves": (1, "live"),
    "Number": (1, "live"),
    "Option": (1, "live"),
    "Sizes": (2, "live"),
    "Indexed": (2, "live"),  # an option that is fetched counts, whatever becomes of it
    "Bare": (1, "bare"),
    "Grouped": (1, "live"),
}
#: The others, and the key of the reason; of those in the second table nothing at all is.
REFUSED = {
    "Relies": "learned_returns",
    "Sets": "learned_settings",
    "Counts": "learned_settings",
    "Random": "learned_random",
    "Global": "learned_code",
    "Shared": "learned_shared",
    "Views": "learned_alias",
    "Count": "learned_returns",
    "Notes": "learned_writes_options",
    "Many": "learned_ways",
    "OneSize": "learned_one_size",
    "local": "class_at_run_time",
}
NOTHING = {"Reads": "learned_reads_data", "Lists": "learned_reads_data"}


@pytest.fixture(scope="module")
def models(host: Host) -> Iterator[Any]:
    yield learned_models.load()
    learned_models.unload()


def seeded(make: Any) -> torch.nn.Module:
    torch.manual_seed(3)
    model: torch.nn.Module = make()
    return model.eval()


@functools.cache
def learned(models: Any, name: str) -> Any:
    """The record of a model, from the first call."""
    return learned_of(getattr(models, name), *arguments(*CALLS[0]))


@pytest.mark.parametrize("name", SERVED)
def test_what_is_learned_computes_what_the_model_does(models: Any, name: str) -> None:
    """In a worker's export, at sizes other than the one that was watched."""
    model = seeded(getattr(models, name))
    record = learned(models, name)
    assert outside(record) == set()
    ways, attends = SERVED[name]
    assert {way["attends"] for _, way in record["ways"]} == {attends}
    assert len(record["ways"]) == ways
    regions = Regions(model, record, exported=True)
    for sizes in CALLS:
        reference = model(*arguments(*sizes))
        result = regions.run(lambda sizes=sizes: model(*arguments(*sizes)))
        assert regions.declined == [] and regions.served == 2
        assert error(result, reference) < 1e-5


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_graph_could_stand_for_is_refused_by_name(models: Any, name: str) -> None:
    record = learned(models, name)
    assert record["blocks"] == [] and record["ways"] == []
    assert {why["key"] for _, why in record["outside"]} == {REFUSED[name]}


@pytest.mark.parametrize("name", NOTHING)
def test_a_model_that_goes_by_what_is_in_tensors_is_refused(models: Any, name: str) -> None:
    with pytest.raises(LearnError) as raised:
        learned_of(getattr(models, name), *arguments(*CALLS[0]))
    assert raised.value.reason.key == NOTHING[name]
    assert raised.value.reason.values["name"] == f"{name}Block"


def test_a_class_of_another_pack_is_refused(models: Any) -> None:
    class Foreign(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    with pytest.raises(LearnError) as raised:
        learned_of(Foreign, torch.ones(1, 2))
    assert raised.value.reason.key == "own_class"


def declined(models: Any, name: str, *, options: dict[str, Any]) -> list[str]:
    """Why a model's blocks are the host's in a call with these options; its result is right."""
    model = seeded(getattr(models, name))
    regions = Regions(model, learned(models, name))
    given = arguments(*CALLS[1])
    reference = model(*given, transformer_options=dict(options))
    result = regions.run(lambda: model(*given, transformer_options=dict(options)))
    assert error(result, reference) < 1e-5
    return [why.key for why in regions.declined]


def test_calls_that_differ_from_what_was_learned_are_the_hosts(
    models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert declined(models, "Option", options={}) == []
    assert declined(models, "Option", options={"strength": 2.0}) == ["learned_option"] * 2
    assert declined(models, "Model", options={"strength": 2.0}) == []
    model = seeded(models.Number)
    regions = Regions(model, learned(models, "Number"))
    monkeypatch.setattr(models, "STATE", [0.7])
    regions.run(lambda: model(*arguments(*CALLS[1])))
    assert [why.key for why in regions.declined] == ["learned_another"] * 2


def test_ways_serve_without_one_another(models: Any) -> None:
    """A call that is made in one that has no graph is the host's, and named; the others are not."""
    model, record = seeded(models.Sizes), learned(models, "Sizes")
    met = set()
    for lacking, _ in record["ways"]:
        regions = Regions(model, record, lacking=lacking)
        for sizes in CALLS:
            given = arguments(*sizes)
            reference = model(*given)
            result = regions.run(lambda given=given: model(*given))
            assert error(result, reference) < 1e-5
            reasons = [why.key for why in regions.declined]
            assert (reasons, regions.served) in (([], 2), (["learned_no_graph"] * 2, 0))
            met.add((lacking, sizes, regions.served))
    assert {served for _, _, served in met} == {0, 2}
    assert len({(sizes, served) for _, sizes, served in met}) == 2 * len(CALLS)


@pytest.mark.parametrize("change", ["value", "new", "object"])
def test_settings_that_change_between_steps_make_a_call_the_hosts(models: Any, change: str) -> None:
    """Until they are what they were."""
    model, given = seeded(models.Scaled), arguments(*CALLS[1])
    regions = Regions(model, learned(models, "Scaled"))
    state = vars(model.blocks[1])
    before = dict(state)
    if change == "value":
        state["scale"] = 2.0
    elif change == "new":
        state["another"] = True
    else:
        state["scale"] = torch.tensor(2.0)
    regions.run(lambda: model(*given))
    assert [why.key for why in regions.declined] == ["learned_settings_now"]
    assert regions.served == 1
    state.clear()
    state.update(before)
    reference = model(*given)
    assert error(regions.run(lambda: model(*given)), reference) < 1e-5
    assert regions.declined == [] and regions.served == 2


def test_an_option_that_counts_is_what_it_was(models: Any) -> None:
    """Also where a graph is traced, without the step that was watched."""
    model, given = seeded(models.Option), {"strength": 2.0}
    record = learned_of(models.Option, *arguments(*CALLS[0]), transformer_options=dict(given))
    regions = Regions(model, record, exported=True)
    reference = model(*arguments(*CALLS[1]), transformer_options=dict(given))
    result = regions.run(lambda: model(*arguments(*CALLS[1]), transformer_options=dict(given)))
    assert regions.declined == [] and error(result, reference) < 1e-5
    regions.run(lambda: model(*arguments(*CALLS[1])))
    assert [why.key for why in regions.declined] == ["learned_option"] * 2


def test_attention_that_a_node_chooses_is_called_as_the_block_would(models: Any) -> None:
    """Where a block passes the step's options on; where it passes none, the node's is not asked."""
    called: list[int] = []

    def attend(function: Any, *args: Any, **named: Any) -> Any:
        called.append(1)
        return 2 * function(*args, **named)

    options = {"optimized_attention_override": attend}
    for name, times in (("Model", 4), ("Bare", 0), ("Grouped", 4)):
        called.clear()
        assert declined(models, name, options=options) == []
        assert len(called) == times


def test_texts_that_happen_to_be_of_one_length_are_told_apart(models: Any) -> None:
    """Where the model takes them at others; the record is that of unequal ones."""
    x, time, context = arguments(*CALLS[0])
    records = [
        learned_of(models.Texts, x, time, context, torch.randn(1, tokens, 64)) for tokens in (5, 9)
    ]
    assert records[0] == records[1] and outside(records[0]) == set()
    [[_, way]] = records[0]["ways"]
    assert [name for name, *_ in way["symbols"]] == ["batch", "tokens", "txt"]


def test_a_side_of_one_element_may_be_all_that_a_model_takes(models: Any) -> None:
    """As frames of a model for images; a latent's other sides must vary (`OneSize`)."""
    x, time, context = arguments(*CALLS[0])
    record = learned_of(models.OneFrame, x.unsqueeze(2), time, context)
    assert outside(record) == set() and record["ways"] == learned(models, "Model")["ways"]


def test_a_record_does_not_hang_on_the_call_that_was_watched(models: Any) -> None:
    for name in ("InPlace", "Indexed"):
        again = learned_of(getattr(models, name), *arguments(*CALLS[3]))
        assert again == learned(models, name), name


def test_a_choice_of_the_hosts_and_options_by_position_are_written_down(host: Host) -> None:
    from comfy.ldm.cosmos.model import DataType

    options = {"transformer_options": {"wrappers": print, "strength": 2.0}}
    facts = write_down(
        [torch.ones(1), DataType.VIDEO, options["transformer_options"]],
        options,
        ["x", "data_type", "transformer_options"],
    )
    facts = json.loads(json.dumps(facts))
    args, kwargs = put_together(facts["call"], [torch.ones(1)])
    assert args[1] is DataType.VIDEO and args[2] == {"strength": 2.0}
    assert kwargs == {"transformer_options": {"strength": 2.0}}


def wrong(seed: int) -> str | None:
    """Say what is wrong with what is learned of a drawn model, or None."""
    drawn = made_up(seed)
    torch.manual_seed(seed)
    module = learned_models.load(drawn.text)
    first, *others = (tuple(each) for each in DRAWN_CALLS)
    try:
        record = learned_of(module.Model, *narrow(first))
    except LearnError as refused:
        return None if drawn.hazard in ("reads", "lists", "shapes") else f"{seed}: {refused}"
    if drawn.hazard:
        return f"{seed}: {drawn.hazard} is learned" if record["blocks"] else None
    if record["outside"]:
        return f"{seed}: {outside(record)} of {drawn.drawn}"
    model = module.Model().eval()
    regions = Regions(model, record)
    for sizes in (first, *others):
        reference = model(*narrow(sizes))
        result = regions.run(lambda sizes=sizes: model(*narrow(sizes)))
        if regions.declined:
            return f"{seed}: {set(regions.declined)} of {drawn.drawn}"
        if error(result, reference) >= 1e-5:
            return f"{seed}: differs by {error(result, reference):.1e}: {drawn.drawn}"
    return None


def narrow(sizes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    x, time, context = arguments(*sizes)
    return x[:, :16].contiguous(), time, context[:, :, :16].contiguous()


#: The first is watched.
DRAWN_CALLS = ((1, 4, 6, 5), (2, 10, 30, 9), (3, 2, 3, 17), (1, 1, 2, 1))
#: Models with seven hazards, and seven with none.
HAZARDOUS = range(13, 28)


def test_of_models_drawn_at_random_nothing_wrong_is_learned(host: Host) -> None:
    """What no graph could stand for is refused; all else is learned, and computes the same."""
    found = [problem for seed in HAZARDOUS if (problem := wrong(seed)) is not None]
    learned_models.unload()
    assert found == []


@pytest.mark.slow
def test_of_two_thousand_nothing_wrong_is_learned(host: Host) -> None:
    found = [problem for seed in range(2000) if (problem := wrong(seed)) is not None]
    learned_models.unload()
    assert found == []
