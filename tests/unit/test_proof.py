"""A whole step made twice: the host's result is given on, and nothing of the other one is left."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from warmgraph_backends.host_api.execution import let_pass
from warmgraph_backends.runtime.proof import Proven, prove, structure_of_call

pytestmark = pytest.mark.usefixtures("host")

CPU = torch.device("cpu")


class Noisy(torch.nn.Module):
    """Draws, counts its calls, and writes into what it is given, and what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.held = {
            "list": ["a"],
            "set": {"a"},
            "queue": deque(["a", "b"], maxlen=2),
            "order": OrderedDict(b=1, a=2),
        }
        self.list, self.set = self.held["list"], self.held["set"]
        self.queue, self.order = self.held["queue"], self.held["order"]
        self.part = torch.nn.Sequential(torch.nn.Linear(4, 4))
        self.calls = 0

    def forward(self, x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        self.calls += 1
        self.part.last = self.calls
        self.count = self.count + 1
        self._parameters["own"] = torch.nn.Parameter(self.count.clone(), requires_grad=False)
        self.list.append(self.calls)
        self.set.add(len(self.set))
        self.queue.append(len(self.list))
        self.order[self.order.popitem(last=False)[0]] = len(self.list)
        self.held[f"{len(self.list)}"] = self.calls
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
    alone.part.load_state_dict(root.part.state_dict())
    torch.manual_seed(1)
    given = torch.ones(2, 4)
    assert torch.equal(found.result, alone(given, {"seen": 1})) and torch.equal(x, given)
    assert (root.calls, root.part.last, options) == (1, 1, {"seen": 2})
    assert torch.equal(torch.randn(3), _after_one())
    assert root.count == alone.count == root.own == 1
    assert root.held == alone.held and list(root.order) == list(alone.order) == ["a", "b"]


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


def _raises(error: BaseException) -> Callable[[torch.Tensor], Any]:
    def fail(result: torch.Tensor) -> Any:
        raise error

    return fail


def test_the_hosts_interrupt_passes(root: Noisy) -> None:
    from comfy.model_management import InterruptProcessingException

    with pytest.raises(InterruptProcessingException):
        proven(root, _raises(InterruptProcessingException()))
    assert root.calls == 0  # nothing is left of it


def test_too_little_memory_for_both_says_nothing_and_the_host_makes_its_own(root: Noisy) -> None:
    found, *_ = proven(root, _raises(torch.OutOfMemoryError("full")))
    assert found.is_good is None and found.problem is None
    assert torch.is_tensor(found.result) and root.calls == 1 and root.list == ["a", 1]


def test_an_error_of_the_hosts_code_beside_its_own_step_does_not_pass(root: Noisy) -> None:
    error = ValueError("the host's")
    let_pass(error)
    found, *_ = proven(root, _raises(error))
    assert found.problem is not None and found.problem.key == "learned_step_failed"
    assert torch.is_tensor(found.result) and root.calls == 1


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), ValueError("in full")])
def test_nothing_fails_once_the_hosts_result_is_there(root: Noisy, error: Exception) -> None:
    """The host's code is run again, to see how much counts."""
    calls: list[int] = []

    def theirs(args: Any, kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:
            raise error
        return root(*args, **kwargs)

    def ours(args: Any, kwargs: Any) -> Any:
        return 1.001 * root(*args, **kwargs)

    given = (torch.ones(2, 4),), {"options": {}}
    found = prove(root, CPU, ours, theirs, *given, is_quantised=True)
    assert found.is_good is None and torch.is_tensor(found.result)
    assert len(calls) > 1 and root.calls == 1


def test_the_interrupt_passes_while_it_is_compared(root: Noisy) -> None:
    from comfy.model_management import InterruptProcessingException

    calls: list[int] = []

    def theirs(args: Any, kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:
            raise InterruptProcessingException
        return root(*args, **kwargs)

    def ours(args: Any, kwargs: Any) -> Any:
        return 1.001 * root(*args, **kwargs)

    with pytest.raises(InterruptProcessingException):
        prove(root, CPU, ours, theirs, (torch.ones(2, 4),), {"options": {}}, is_quantised=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_results_that_no_bound_is_known_for_say_nothing(dtype: torch.dtype) -> None:
    def call(args: Any, kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = args[0].to(dtype)
        return result

    found = prove(torch.nn.Module(), CPU, call, call, (torch.ones(4),), {}, is_quantised=False)
    assert found.is_good is None and found.problem is None and found.result.dtype is dtype


class Writes(torch.nn.Module):
    """Counts within a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x + 1


def test_a_step_that_writes_into_a_buffer_is_not_served() -> None:
    """Nothing puts that back, so it must not be made beside the host's."""

    def call(args: Any, kwargs: Any) -> Any:
        return root(*args, **kwargs)

    root = Writes()
    found = prove(root, CPU, call, call, (torch.ones(4),), {}, is_quantised=False)
    assert found.is_good is False and found.problem is not None
    assert found.problem.key == "learned_settings"
    with torch.inference_mode():  # PyTorch does not tell
        root = Writes()
        found = prove(root, CPU, call, call, (torch.ones(4),), {}, is_quantised=False)
    assert found.is_good


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
