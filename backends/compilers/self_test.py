"""Whether torch's private APIs are those that we know: compiles, packs and runs a one-line graph.

A worker calls it after a failed build, to tell a region that cannot be compiled from a torch with
which nothing can.
"""

from __future__ import annotations

import torch

from ..errors import RequirementError, WarmgraphError
from ..reasons import of
from ..target.compiler_options import base_config
from ..torch_api.compiling import compile_wrapper
from ..torch_api.loading import unpack
from ..torch_api.packing import pack
from ..torch_api.present import missing_api
from ..torch_api.tracing import fake_mode, fakes_worked_out, size_oblivious

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
    step = "finding the private APIs"
    try:
        if (missing := missing_api()) is not None:
            raise RequirementError(missing, final=True)
        step = "making fakes"
        fake_mode()
        step = "exporting with symbolic sizes"
        rows = torch.export.Dim("rows", min=1, max=1024)
        with torch.no_grad(), size_oblivious(), fakes_worked_out():
            sample = torch.ones(2, 8, device=device)
            exported = torch.export.export(
                _Probe(), (sample,), dynamic_shapes=({0: rows},), strict=False
            )
        step = "compiling"
        graph, config = exported.graph_module, base_config(device)
        module, source = compile_wrapper(graph, config, last_pass=_change_nothing)
        module.call([sample])
        step = "packing"
        payload, _ = pack(module, source)
        step = "loading"
        call = unpack(payload)
        step = "running"
        value = torch.full((3, 8), 2.0, device=device)
        if not torch.allclose(call([value])[0], _Probe()(value)):
            raise RequirementError(of("computed_wrong", version=torch.__version__), final=True)
    except RequirementError:
        raise
    except Exception as error:
        raise RequirementError(
            of(
                "step_failed",
                step=step,
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
