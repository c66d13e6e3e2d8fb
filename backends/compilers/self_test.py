"""Whether torch's private APIs are those that we know: compiles, packs and runs a one-line graph.

A worker calls it after a failed build, to tell a region that cannot be compiled from a torch with
which nothing can.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from ..errors import RequirementError, WarmgraphError
from ..reasons import of
from ..target.compiler_options import base_config
from ..torch_api.compiling import compile_wrapper
from ..torch_api.loading import unpack
from ..torch_api.packing import pack
from ..torch_api.present import missing_api
from ..torch_api.tracing import fake_mode, fakes_worked_out, size_oblivious

Record = Callable[[Callable[[], torch.Tensor]], tuple[torch.Tensor, Callable[[], None]]]
"""Captures a call; returns its result, and what computes it again (`cuda_graphs.driver.record`)."""

#: What code raises that meets other names, signatures or classes than it was written for.
_LASTING = (
    ImportError,
    AttributeError,
    NameError,
    TypeError,
    LookupError,
    AssertionError,
    NotImplementedError,
    WarmgraphError,
)


def self_test(device: str) -> None:
    """Compile, pack, unpack and run a one-line graph on `device`.

    Raises:
        RequirementError: the step that does not work with this torch; a final one if it cannot work
            in this process.
    """
    check(device, build(device))


def build(device: str) -> bytes:
    """Compile a one-line graph on `device`, and return it packed.

    Raises:
        RequirementError: see `self_test`.
    """
    with _step("finding the private APIs"):
        if (missing := missing_api()) is not None:
            raise RequirementError(missing, final=True)
    with _step("making fakes"):
        fake_mode()
    with _step("exporting with symbolic sizes"):
        rows = torch.export.Dim("rows", min=1, max=1024)
        with torch.no_grad(), size_oblivious(), fakes_worked_out():
            sample = torch.ones(2, 8, device=device)
            exported = torch.export.export(
                _Probe(), (sample,), dynamic_shapes=({0: rows},), strict=False
            )
    with _step("compiling"):
        graph, config = exported.graph_module, base_config(device)
        module, source = compile_wrapper(graph, config, last_pass=_change_nothing)
        module.call([sample])
    with _step("packing"):
        return pack(module, source)[0]


def check(device: str, payload: bytes, *, record: Record | None = None) -> None:
    """Unpack what `build` returned, run it on `device` and compare; in any process.

    Args:
        device: a GPU's or "cpu".
        payload: the graph.
        record: captures a call, which is then replayed on other values.

    Raises:
        RequirementError: see `self_test`.
    """
    with _step("loading"):
        call = unpack(payload)
    with _step("running"), torch.no_grad():
        value = torch.full((3, 8), 2.0, device=device)
        _compare(call([value.clone()])[0], value)
    if record is None:
        return
    with _step("replaying"), torch.no_grad():
        static = value.clone()
        result, replay = record(lambda: call([static])[0])
        for factor in (-1.0, 0.5):
            static.copy_(value * factor)
            replay()
            _compare(result, value * factor)


def _compare(result: torch.Tensor, value: torch.Tensor) -> None:
    if not torch.allclose(result, _Probe()(value)):
        raise RequirementError(of("computed_wrong", version=torch.__version__), final=True)


@contextlib.contextmanager
def _step(name: str) -> Iterator[None]:
    """Say which step failed; refusals pass."""
    try:
        yield
    except RequirementError:
        raise
    except Exception as error:
        raise RequirementError(
            of(
                "step_failed",
                step=name,
                version=torch.__version__,
                sort=type(error).__name__,
                error=error,
            ),
            final=_is_lasting(error),
        ) from error


def _is_lasting(error: BaseException) -> bool:
    """Whether an error comes from code that differs from what we know, and not from a machine
    without memory, disk or a working GPU.
    """
    inner = (
        getattr(error, "inner_exception", None) or error.__cause__
    )  # the original error within Inductor's own
    if isinstance(inner, BaseException):
        return _is_lasting(inner)
    return isinstance(error, _LASTING)


def _change_nothing(graph: torch.fx.Graph) -> None:
    """A last pass that changes nothing, to try the route of those that do."""


class _Probe(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x) + x.mean(dim=1, keepdim=True)
