"""Attention kernels of installed packages: timed beside the others, used where they are quicker and
right, named where they are not. The packages are made up; their maths is real.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from warmgraph_backends.choices import attention_choice, autotuner, exact_attention
from warmgraph_backends.choices.attention_choice import AttentionChoice
from warmgraph_backends.choices.choices import Choices
from warmgraph_backends.choices.exact_attention import KERNELS, Kernel
from warmgraph_backends.operators.host_attention import ungrouped
from warmgraph_backends.sessions import words

MODULE = "made_up_attention"
RIGHT = """
import torch

calls = 0

def attend(query, key, value):
    global calls
    calls += 1
    tensors = (tensor.transpose(1, 2) for tensor in (query, key, value))
    result = torch.nn.functional.scaled_dot_product_attention(*tensors, enable_gqa=True)
    return result.transpose(1, 2)
"""
PAIR = RIGHT.replace("return result.transpose(1, 2)", "return result.transpose(1, 2), None")
WRONG = RIGHT.replace("return result", "return 1.1 * result")
RAISES = RIGHT.replace("    calls += 1\n", '    calls += 1\n    raise TypeError("no such card")\n')
NO_GROUPS = RIGHT.replace(", enable_gqa=True", "")
BROKEN = "import no_such_library\n"
ROWS, WIDTH = 1100, 64


def kernel(**facts: Any) -> Kernel:
    given = {"cards": (9,), "worth_rows": 1000, **facts}
    return Kernel("made", "Made-up attention", "made-up-attention", f"{MODULE}:attend", **given)


class Card:
    """A GPU on which ways take these milliseconds; what is refused is refused for real."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: Mapping[str, float]) -> None:
        self.is_capturing = False
        self.timed: list[set[str]] = []

        def by_turns(runs: Mapping[str, Callable[[], Any]], **_: Any) -> dict[str, float]:
            taken = {}
            for name, run in runs.items():
                try:
                    run()
                except RuntimeError:
                    continue
                taken[name] = times[name]
            self.timed.append(set(taken))
            return taken

        monkeypatch.setattr(attention_choice, "_is_open", lambda query: True)
        monkeypatch.setattr(attention_choice, "_major", lambda device: 9)
        monkeypatch.setattr(autotuner, "by_turns", by_turns)
        monkeypatch.setattr(attention_choice.gpu, "is_capturing", lambda device: self.is_capturing)
        monkeypatch.setattr(
            torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing, raising=False
        )


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    return Card(monkeypatch, {"host": 1.0, "made": 0.5})


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Put a package's text where Python finds it."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(text: str) -> None:
        (tmp_path / f"{MODULE}.py").write_text(text)

    yield write
    sys.modules.pop(MODULE, None)


def calls() -> int:
    found: int = sys.modules[MODULE].calls
    return found


def attended(
    choice: AttentionChoice, *, groups: int = 4, rows: int = ROWS
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The result of four heads, the host's, and how often the host computed."""
    heads, times = 4, []
    draw = torch.Generator().manual_seed(7)
    query, key, value = (
        torch.randn(1, count, rows, WIDTH, generator=draw).bfloat16()
        for count in (heads, groups, groups)
    )

    def host() -> torch.Tensor:
        times.append(1)
        copies = (ungrouped(each, heads) for each in (key, value))
        result = torch.nn.functional.scaled_dot_product_attention(query, *copies)
        return result.transpose(1, 2).flatten(2)

    found = choice.attend(query, key, value, heads, split=True, calls=1, host=host)
    count = len(times)
    return found, host(), count


@pytest.mark.parametrize("text", [RIGHT, PAIR], ids=["result", "pair"])
@pytest.mark.parametrize("groups", [4, 2])
def test_a_kernel_that_is_quicker_and_right_is_used(
    card: Card, install: Callable[[str], None], tmp_path: Path, text: str, groups: int
) -> None:
    install(text)
    choice = AttentionChoice(tmp_path, "card", [kernel()])
    attended(choice, groups=groups)
    before = calls()
    found, hosts, by_host = attended(choice, groups=groups)
    assert calls() == before + 1 and by_host == 0
    assert card.timed == [{"host", "made"}]
    torch.testing.assert_close(found, hosts, rtol=2e-2, atol=2e-2)
    assert choice.notes() == [] and choice.could_install() == []


def test_a_kernel_that_is_slower_is_not_used(
    monkeypatch: pytest.MonkeyPatch, install: Callable[[str], None], tmp_path: Path
) -> None:
    install(RIGHT)
    Card(monkeypatch, {"host": 1.0, "made": 1.1})
    choice = AttentionChoice(tmp_path, "card", [kernel()])
    attended(choice)
    before = calls()
    assert attended(choice)[2] == 1 and calls() == before
    assert choice.notes() == []


@pytest.mark.parametrize(
    ("text", "groups", "said"),
    [
        (WRONG, 4, "its attention differs from ComfyUI's by 1.0e-01"),
        (RAISES, 4, "its attention fails (TypeError: no such card)"),
        (NO_GROUPS, 2, "its attention fails (RuntimeError: "),
        (BROKEN, 4, "its attention fails (ModuleNotFoundError: No module named 'no_such_library')"),
    ],
    ids=["wrong", "raises", "no groups", "broken"],
)
def test_a_kernel_that_is_wrong_or_fails_is_out_and_named(
    card: Card, install: Callable[[str], None], tmp_path: Path, text: str, groups: int, said: str
) -> None:
    install(text)
    choice = Choices.kept(tmp_path, "card")
    assert choice.attention is not None
    choice.attention._kernels = [kernel()]
    found, hosts, _ = attended(choice.attention, groups=groups)
    assert torch.equal(found, hosts)
    before = calls() if MODULE in sys.modules else 0
    for rows in (ROWS, 2 * ROWS):
        found, hosts, _ = attended(choice.attention, groups=groups, rows=rows)
        assert torch.equal(found, hosts)
    assert before == (calls() if MODULE in sys.modules else 0)
    (note,) = choice.notes()
    assert "Made-up attention is not used on this card" in note and said in note
    assert choice.could_install() == []


def test_a_kernel_that_turned_wrong_is_found_in_the_next_process(
    card: Card, install: Callable[[str], None], tmp_path: Path
) -> None:
    """Its times are kept, its first result is compared anew."""
    install(RIGHT)
    attended(AttentionChoice(tmp_path, "card", [kernel()]))
    del sys.modules[MODULE]
    install(WRONG + "# another size, so that no bytecode is taken for it\n")
    choice = AttentionChoice(tmp_path, "card", [kernel()])
    found, hosts, _ = attended(choice)
    assert len(card.timed) == 1 and torch.equal(found, hosts) and len(choice.notes()) == 1


def test_what_was_not_compared_is_not_used_while_a_call_is_captured(
    card: Card, install: Callable[[str], None], tmp_path: Path
) -> None:
    install(RIGHT)
    attended(AttentionChoice(tmp_path, "card", [kernel()]))
    choice = AttentionChoice(tmp_path, "card", [kernel()])
    card.is_capturing = True
    before = calls()
    assert attended(choice)[2] == 1 and calls() == before
    card.is_capturing = False
    attended(choice)
    card.is_capturing = True
    assert attended(choice)[2] == 0 and calls() == before + 2


def test_what_a_kernel_does_not_take_is_not_asked_of_it(
    card: Card, install: Callable[[str], None], tmp_path: Path
) -> None:
    install(RIGHT)
    for facts in ({"dtypes": (torch.float16,)}, {"widest": WIDTH - 8}, {"cards": (8, 10)}):
        choice = AttentionChoice(tmp_path, "card", [kernel(**facts)])
        assert attended(choice)[2] == 1 and choice.notes() == []
    assert card.timed == [] and (MODULE not in sys.modules or calls() == 0)


def test_what_a_card_could_use_and_lacks_is_told_where_it_would_matter(
    card: Card, tmp_path: Path
) -> None:
    choice = AttentionChoice(tmp_path, "card", [kernel(worth_rows=ROWS + 1)])
    attended(choice)
    assert choice.could_install() == []
    attended(choice, rows=2 * ROWS)
    assert [each.package for each in choice.could_install()] == ["made-up-attention"]
    (told,) = [
        words.line("attention_to_install", kernel=each.title, package=each.package)
        for each in choice.could_install()
    ]
    assert told.text.endswith("pip install made-up-attention")


def test_packages_are_looked_for_and_not_imported_until_a_card_attends(
    install: Callable[[str], None], tmp_path: Path
) -> None:
    install(RIGHT)
    assert exact_attention.is_installed(kernel())
    AttentionChoice(tmp_path, "card", [kernel()])
    assert MODULE not in sys.modules


def test_the_table_names_each_kernel_once() -> None:
    names = [each.name for each in KERNELS]
    assert len(set(names)) == len(names)
    for each in KERNELS:
        assert bool(each.package) == bool(each.function) == bool(each.cards)
