"""A whole step made twice: the host's result is given on, and nothing of the other one is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from warmgraph_backends.runtime.proof import Proven, prove, structure_of_call

pytestmark = pytest.mark.usefixtures("host")

CPU = torch.device("cpu")


class Noisy(torch.nn.Module):
    """Draws, counts its calls, and writes into what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.part = torch.nn.Sequential(torch.nn.Linear(4, 4))
        self.calls = 0

    def forward(self, x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        self.calls += 1
        self.part.last = self.calls
        x += torch.randn_like(x)
        options["seen"] = options.get("seen", 0) + 1
        result: torch.Tensor = self.part(x) * options["seen"]
        return result


@pytest.fixture
def root() -> Noisy:
    torch.manual_seed(0)
    return Noisy().requires_grad_(False)


def proven(
    root: Noisy, change: Callable[[torch.Tensor], Any] = lambda result: result
) -> tuple[Proven, torch.Tensor, dict[str, Any]]:
    x, options = torch.ones(2, 4), {"seen": 1}

    def theirs(args: Any, kwargs: Any) -> Any:
        return root(*args, **kwargs)

    def ours(args: Any, kwargs: Any) -> Any:
        return change(root(*args, **kwargs))

    torch.manual_seed(1)
    found = prove(root, CPU, ours, theirs, (x,), {"options": options}, is_quantised=True)
    return found, x, options


def test_a_step_leaves_what_one_call_of_the_hosts_does(root: Noisy) -> None:
    """Random numbers, attributes, arguments; so both results are equal, too."""
    found, x, options = proven(root)
    assert found.is_good and found.problem is None
    alone = Noisy()
    alone.load_state_dict(root.state_dict())
    torch.manual_seed(1)
    given = torch.ones(2, 4)
    assert torch.equal(found.result, alone(given, {"seen": 1})) and torch.equal(x, given)
    assert (root.calls, root.part.last, options) == (1, 1, {"seen": 2})
    assert torch.equal(torch.randn(3), _after_one())


def _after_one() -> torch.Tensor:
    torch.manual_seed(1)
    torch.randn(2, 4)
    return torch.randn(3)


def _wide(result: torch.Tensor) -> torch.Tensor:
    return torch.cat((result, result))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda result: 1.001 * result, "learned_step_differs"),
        (_wide, "learned_step_differs"),
        (lambda result: result.double(), "learned_step_differs"),
        (lambda result: (result, result), "learned_step_differs"),
        (lambda result: torch.full_like(result, float("nan")), "learned_step_differs"),
        (lambda result: "text", "returns_no_tensor"),
        (lambda result: result / [], "learned_step_failed"),
    ],
)
def test_what_differs_or_fails_is_told_and_the_hosts_result_is_given_on(
    root: Noisy, change: Callable[[torch.Tensor], Any], key: str
) -> None:
    found, *_ = proven(root, change)
    assert found.is_good is False and found.problem is not None and found.problem.key == key
    assert torch.is_tensor(found.result) and root.calls == 1


def test_a_step_without_one_finite_value_says_nothing(root: Noisy) -> None:
    root.part[0].weight.fill_(float("nan"))
    found, *_ = proven(root)
    assert found.is_good is None and found.problem is None


def test_too_little_memory_and_the_hosts_interrupt_pass(root: Noisy) -> None:
    from comfy.model_management import InterruptProcessingException

    for error in (torch.OutOfMemoryError("full"), InterruptProcessingException()):

        def fail(result: torch.Tensor, error: BaseException = error) -> Any:
            raise error

        with pytest.raises(type(error)):
            proven(root, fail)
        assert root.calls == 0  # nothing is left of it


def test_what_the_host_raises_passes_whatever_became_of_the_other_one(root: Noisy) -> None:
    def theirs(args: Any, kwargs: Any) -> Any:
        raise ValueError("the host's")

    with pytest.raises(ValueError, match="the host's"):
        prove(root, CPU, theirs, theirs, (torch.ones(1),), {}, is_quantised=False)


def test_calls_of_one_structure_differ_in_sizes_and_numbers_alone() -> None:
    """But for a side of one, and for a number that may be a choice."""

    def structure(**changed: Any) -> Any:
        options = {"cond_or_uncond": [0], "sigma": torch.ones(1), "uuids": [1], "note": {"a": 1}}
        given = {"x": torch.ones(2, 4, 8, 8), "y": None, "flag": True, "refs": [torch.ones(1)]}
        options |= changed.pop("options", {})
        call = {**given, **changed, "transformer_options": options}
        return structure_of_call((call.pop("x"), 0.5), call, frozenset({"uuids"}))

    same = [
        {"x": torch.ones(3, 4, 9, 9)},
        {"options": {"cond_or_uncond": [0, 0], "uuids": [2, 3]}},
        {"options": {"patches": {}}},
    ]
    other = [
        {"x": torch.ones(4, 8, 8)},
        {"x": torch.ones(1, 4, 8, 8)},
        {"x": torch.ones(2, 4, 8, 8).double()},
        {"y": torch.ones(1)},
        {"flag": False},
        {"refs": [torch.ones(1), torch.ones(1)]},
        {"more": 1},
        {"more": 2},
        {"options": {"cond_or_uncond": [1, 0]}},
        {"options": {"another": 1}},
        {"options": {"patches": {"attn1_patch": [1]}}},
    ]
    assert all(structure(**each) == structure() for each in same)
    assert len({structure(), *(structure(**each) for each in other)}) == 1 + len(other)
