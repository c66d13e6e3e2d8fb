"""Whether the private names that exporting and compiling need are there, as far as can be seen
without them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch


def missing_to_export() -> str | None:
    """Return what this torch lacks to export a region, in words, or None; never raises.

    It is what a worker needs whatever the backend.
    """
    return _told(_missing_to_export)


def missing_api() -> str | None:
    """Return which private API this torch lacks to export and to compile by Inductor, in words, or
    None; never raises.

    Only what can be seen without importing a compiler; the rest is for the `self_test` of a worker
    whose build failed.
    """
    return _told(_missing_in_inductor) or missing_to_export()


def _told(ask: Callable[[], str | None]) -> str | None:
    try:
        return ask()
    except ImportError as error:
        return f"torch {torch.__version__} lacks {error.name or error}"
    except Exception as error:
        return f"torch {torch.__version__} is another one: {type(error).__name__}: {error}"


def _missing_to_export() -> str | None:
    from torch.fx.experimental import _config

    if not hasattr(_config, "backed_size_oblivious"):
        return f"torch {torch.__version__} has no backed_size_oblivious setting"
    return None


def _missing_in_inductor() -> str | None:
    from torch._inductor import standalone_compile
    from torch._inductor.runtime.triton_heuristics import StaticTritonCompileResult

    # On some versions a submodule has the function's name, and is found in its place.
    if (
        not callable(standalone_compile)
        or "aot" not in inspect.signature(standalone_compile).parameters
    ):
        return (
            f"torch {torch.__version__} has no standalone_compile(aot=True), which came with 2.10"
        )
    if not hasattr(StaticTritonCompileResult, "make_launcher"):
        name = "StaticTritonCompileResult.make_launcher"
        return f"torch {torch.__version__} has no static Triton launcher ({name})"
    return None
