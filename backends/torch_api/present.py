"""Whether this torch has the private names for exporting and compiling, as far as can be seen."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch

from ..reasons import Reason, of


def missing_to_export() -> Reason | None:
    """Return what this torch lacks to export a region (for any backend), or None; never raises."""
    return _told(_missing_to_export)


def missing_api() -> Reason | None:
    """Return what this torch lacks to export and to compile by Inductor, or None; never raises.

    Imports no compiler: the rest is for a worker's `self_test` after a failed build.
    """
    return _told(_missing_in_inductor) or missing_to_export()


def _told(ask: Callable[[], Reason | None]) -> Reason | None:
    try:
        return ask()
    except ImportError as error:
        return of("torch_lacks", version=torch.__version__, name=error.name or error)
    except Exception as error:
        sort = type(error).__name__
        return of("torch_differs", version=torch.__version__, sort=sort, error=error)


def _missing_to_export() -> Reason | None:
    from torch.fx.experimental import _config

    if not hasattr(_config, "backed_size_oblivious"):
        return of("torch_without_setting", version=torch.__version__)
    return None


def _missing_in_inductor() -> Reason | None:
    from torch._inductor import standalone_compile
    from torch._inductor.runtime.triton_heuristics import StaticTritonCompileResult

    # On some versions a submodule has the function's name, and is found in its place.
    if (
        not callable(standalone_compile)
        or "aot" not in inspect.signature(standalone_compile).parameters
    ):
        return of("torch_without_aot", version=torch.__version__)
    if not hasattr(StaticTritonCompileResult, "make_launcher"):
        name = "StaticTritonCompileResult.make_launcher"
        return of("torch_without_launcher", version=torch.__version__, name=name)
    return None
