"""What is told of learned models is so: why a block is not served, and which parts the last run
called, compared, or left for the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from warmgraph_tools.inprocess import Host

from . import learned_models
from .learned import CALLS, Regions, arguments, error, learned_of, outside
from .learned_steps import Steps, exported_here

#: Nothing is compiled: what is told is the same.
BUILT = exported_here
SOURCE = """


class IdleBlock(Block):
    def forward(self, x, vec, transformer_options={}):
        index = transformer_options["block_index"]
        return x + self.mix(x, vec, transformer_options)


class Idle(Model):
    block = IdleBlock

    def run(self, h, vec, options):
        for i, block in enumerate(self.blocks):
            options["block_index"] = i
            h = block(h, vec, transformer_options=options)
        return h


class ListedBlock(Block):
    def forward(self, x, vec, transformer_options={}):
        first = transformer_options.get("parts", [1])[0]
        return x + first * self.mix(x, vec, transformer_options)


class Listed(Model):
    block = ListedBlock


class NamedBlock(Block):
    def forward(self, x, vec, transformer_options={}):
        first = transformer_options.get("parts", {}).get("first", 1)
        return x + first * self.mix(x, vec, transformer_options)


class Named(Model):
    block = NamedBlock


class OneImageBlock(Block):
    def forward(self, x, vec, transformer_options={}):
        if x.shape[0] > 1:
            raise ValueError("one image at a time")
        return x + self.mix(x, vec, transformer_options)


class OneImage(Model):
    block = OneImageBlock

    def run(self, h, vec, options):
        for block in self.blocks:
            try:
                h = block(h, vec, transformer_options=options)
            except ValueError:
                rows = zip(h.split(1), vec.split(1))
                h = torch.cat([block(*row, transformer_options=options) for row in rows])
        return h


class NeverBlock(Block):
    def forward(self, x, vec, transformer_options={}):
        raise NotImplementedError


class Never(Model):
    block = NeverBlock

    def run(self, h, vec, options):
        for block in self.blocks:
            try:
                h = block(h, vec, transformer_options=options)
            except NotImplementedError:
                h = h + block.mix(h, vec, options)
        return h


class LooksAtDataBlock(Block):
    def forward(self, x, vec, transformer_options={}):
        return x + self.mix(x, vec, transformer_options) * float(vec.max())


class LooksAtData(Never):
    block = LooksAtDataBlock

    def run(self, h, vec, options):
        for block in self.blocks:
            try:
                h = block(h, vec, transformer_options=options)
            except Exception:
                h = h * 2
        return h


class TwoWaysBlock(Block):
    def other(self, x, vec):
        return x + vec.unsqueeze(1)

    def forward(self, x, vec, more=None, transformer_options={}):
        x = x + self.mix(x, vec, transformer_options)
        return x if more is None else x + more


class TwoWays(Model):
    block = TwoWaysBlock

    def run(self, h, vec, options):
        way = options.get("way", "")
        for block in self.blocks if way != "none" else ():
            if way == "method":
                h = block.other(h, vec)
            elif way == "more":
                h = block(h, vec, 2 * h, transformer_options=options)
            elif way == "odd":
                more = torch.nn.Parameter(2 * h, requires_grad=False)
                h = block(h, vec, more, transformer_options=options)
            else:
                h = block(h, vec, transformer_options=options)
        return h


class TwoParts(Model):
    def __init__(self):
        super().__init__()
        self.others = torch.nn.ModuleList([Block() for _ in range(2)])

    def run(self, h, vec, options):
        for block in self.others if options.get("others") else self.blocks:
            h = block(h, vec, transformer_options=options)
        return h
"""


@pytest.fixture(scope="module")
def models(host: Host) -> Iterator[Any]:
    yield learned_models.load(learned_models.SOURCE + SOURCE)
    learned_models.unload()


def record_of(models: Any, name: str, sizes: Any = CALLS[0], **options: Any) -> Any:
    given = {"transformer_options": options}
    with torch.no_grad():
        return learned_of(getattr(models, name), *arguments(*sizes), **given)


def keys(record: Any) -> set[str]:
    """Why blocks were refused."""
    return {why["key"] for _, why in record["outside"]}


@pytest.mark.parametrize("value", [2, True, 2.0])
def test_an_option_with_a_whole_number_is_learned_as_it_was(models: Any, value: Any) -> None:
    """It is there in the step that a worker makes, and what it is told apart from is the host's."""
    record = record_of(models, "Option", strength=value)
    assert outside(record) == set()
    model = models.Option().eval()
    regions = Regions(model, record, exported=True)
    for options in ({"strength": value}, {"strength": 3}, {"strength": 3.0}, {}):
        given = arguments(*CALLS[1])
        with torch.no_grad():
            reference = model(*given, transformer_options=dict(options))
            result = regions.run(
                lambda given=given, options=options: model(
                    *given, transformer_options=dict(options)
                )
            )
        assert error(result, reference) < 1e-5
        is_that = options == {"strength": value}
        assert regions.served == (2 if is_that else 0)
        assert [why.key for why in regions.declined] == ["learned_option"] * (0 if is_that else 2)


@pytest.mark.parametrize(("name", "value"), [("Listed", [2]), ("Named", {"first": 2})])
def test_an_option_that_is_no_plain_value_is_refused_by_what_it_is(
    models: Any, name: str, value: Any
) -> None:
    record = record_of(models, name, parts=value)
    assert record["blocks"] == [] and keys(record) == {"learned_option_sort"}
    assert {why["values"]["sort"] for _, why in record["outside"]} == {type(value).__name__}


def test_options_that_no_block_reads_count_for_nothing(models: Any) -> None:
    """Though they are handed on to the attention."""
    told = {"number": 3, "numbers": [0, 1], "word": "a", "table": {"a": 1}}
    record = record_of(models, "Model", **told)
    assert record == record_of(models, "Model") and outside(record) == set()


def test_an_option_that_is_fetched_by_its_name_and_not_used_counts_for_nothing(
    models: Any,
) -> None:
    """Its graph is built, and serves whatever it is."""
    record = record_of(models, "Idle")
    assert outside(record) == set() and len(record["ways"]) == 1
    model = models.Idle().eval()
    regions = Regions(model, record, exported=True)
    for sizes in CALLS:
        with torch.no_grad():
            reference = model(*arguments(*sizes))
            result = regions.run(lambda sizes=sizes: model(*arguments(*sizes)))
        assert regions.declined == [] and regions.served == 2
        assert error(result, reference) < 1e-5


@pytest.mark.parametrize(
    ("name", "sizes"), [("OneImage", CALLS[0]), ("OneImage", CALLS[1]), ("Never", CALLS[0])]
)
def test_a_block_that_raises_what_its_model_catches_is_refused_by_that(
    models: Any, name: str, sizes: Any
) -> None:
    """In the step that was watched, or at a size at which it is made without data."""
    record = record_of(models, name, sizes)
    assert record["blocks"] == [] and keys(record) == {"learned_raises"}
    raised = {"OneImage": "ValueError", "Never": "NotImplementedError"}[name]
    assert {why["values"]["sort"] for _, why in record["outside"]} == {raised}


def test_a_block_that_reads_data_is_refused_by_that_though_its_model_catches_all(
    models: Any,
) -> None:
    record = record_of(models, "LooksAtData")
    assert record["blocks"] == [] and keys(record) == {"learned_reads_data"}


def test_a_step_that_was_compared_waits_for_the_next_one(
    learned_steps: Callable[[str], Steps],
) -> None:
    """Its parts were called, and the next run uses them."""
    made = learned_steps("Model")
    made.run()
    for sizes in (CALLS[0], CALLS[1]):
        assert made.run(sizes) == (0, 0.0)
        assert made.told() == {"ready": 2}
        assert made.run(sizes)[0] == 2 and made.told() == {"compiled": 2}
    made.make(CALLS[2], 3)  # compared in its first step
    assert made.told() == {"compiled": 2}


def test_a_comparison_that_tells_nothing_is_named(
    learned_steps: Callable[[str], Steps], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For as long as it is so; the next run uses nothing."""
    from warmgraph_backends.kinds import tolerance

    made = learned_steps("Model")
    made.run()
    with monkeypatch.context() as patched:
        patched.setattr(tolerance, "_tells_nothing", lambda references: True)
        for _ in range(4):
            assert made.run() == (0, 0.0)
            assert made.told() == {"eager": 2} and made.reasons() == {"learned_unsure"}


def test_a_step_that_was_watched_is_told_until_something_was_learned_of_it(
    learned_steps: Callable[[str], Steps],
) -> None:
    made = learned_steps("TwoWays")
    made.run()
    assert made.served()[0] == 2
    assert made.run(way="more") == (0, 0.0) and made.reasons() == {"learned_another"}
    with made.here.held():
        assert made.run(way="more") == (0, 0.0) and made.reasons() == {"learned_soon"}
        assert made.told()["eager"] == 2
    assert made.told() == {"ready": 2}
    assert made.run(way="more") == (0, 0.0) and made.told() == {"ready": 2}  # compared
    assert made.run(way="more")[0] == 2 and made.told() == {"compiled": 2}
    assert made.served()[0] == 2 and made.told() == {"compiled": 2}


def test_a_way_of_which_nothing_is_learned_does_not_wait(
    learned_steps: Callable[[str], Steps],
) -> None:
    """The next run would not use it: why is told, in the run that is watched, too."""
    made = learned_steps("TwoWays")
    made.run()
    assert made.served()[0] == 2
    for _ in range(4):
        assert made.run(way="odd") == (0, 0.0)
        assert made.reasons() == {"learned_another"} and made.told() == {"eager": 2}
    assert made.here.jobs > 1


def test_blocks_that_another_call_comes_to_are_learned_from_that(
    learned_steps: Callable[[str], Steps],
) -> None:
    """A model may have several ways through itself; then all of them are compiled."""
    made = learned_steps("TwoParts")
    made.run()
    assert made.served()[0] == 2 and made.reasons() == {"learned_not_called"}
    assert made.run(others=True) == (0, 0.0)
    assert made.lines()[0] == "Model: the last run called none of its 2 compiled parts"
    for _ in range(2):  # watched, and compared
        assert made.run(others=True) == (0, 0.0)
    assert made.run(others=True)[0] == 2 and made.reasons() == set()
    assert made.told() == {"compiled": 2, "idle": 2}
    assert made.served()[0] == 2 and made.told() == {"compiled": 2, "idle": 2}


@pytest.mark.parametrize("way", ["method", "none"])
def test_only_parts_that_were_not_called_are_told_of_as_such(
    learned_steps: Callable[[str], Steps], way: str
) -> None:
    """As they are compiled: by their forward."""
    made = learned_steps("TwoWays")
    made.run()
    assert made.served()[0] == 2
    for _ in range(3):
        assert made.run(way=way) == (0, 0.0)
    assert made.told()["idle"] == 2
    assert made.lines()[:1] == ["Model: the last run called none of its 2 compiled parts"]


def test_ways_of_a_block_are_one_part(learned_steps: Callable[[str], Steps]) -> None:
    made = learned_steps("Sizes")
    made.run()
    assert made.run() == (0, 0.0) and made.told() == {"ready": 2}
    for sizes in (CALLS[0], CALLS[4]):
        assert made.served(sizes)[0] == 2 and made.told() == {"compiled": 2}
