"""Turns a worker's result, a refused file or an error into a graph's outcome."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..building.contract import BuildResult
from ..errors import BuildError, GraphFileError
from ..kinds.module_tree import walk
from ..reasons import Reason, of
from ..storing.graph_file import Fault, RefusedFileError, unpack_payload
from ..storing.manifest import Facts
from .compiled_graph import CompiledGraph, Loaded, Refusal


def refusal_of(error: GraphFileError) -> Refusal:
    """Return why a file is not used: one line for all graphs of an untrusted folder; otherwise the
    file's own reason.
    """
    if isinstance(error, RefusedFileError) and error.fault is Fault.UNTRUSTED:
        return Refusal(error.of_folder, error.remedy, error.path.parent)
    return Refusal(error.reason, error.remedy, None)


def loaded_of(
    call: Callable[[list[Any]], Any], facts: Facts, payload_sha256: str, seconds: float
) -> Loaded:
    """Return what can be called, from a file or a worker's result.

    Args:
        seconds: of the build.
    """
    return Loaded(
        call,
        facts.weights,
        facts.work,
        payload_sha256=payload_sha256,
        build_seconds=seconds,
        binary_bytes=facts.binary_bytes,
    )


def what_stays(graph: CompiledGraph) -> str:
    """What happens without a graph."""
    return f"{graph.description.label} runs at normal speed"


def raw_of(result: BuildResult) -> bytes:
    """Return what a worker built.

    Raises:
        BuildError: it cannot be unpacked.
    """
    try:
        return unpack_payload(result.payload)
    except ValueError as error:
        raise BuildError(of("bad_payload", error=error)) from error


def words_of(error: BaseException) -> Reason:
    """An error in one line; some have no text."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return Reason.plain(text or type(error).__name__)


def cost_of(graph: CompiledGraph) -> int:
    """An estimate of build time: the number of modules in the region; rare graphs come last."""
    if graph.description.wide:
        return 0
    return sum(1 for _ in walk(graph.description.module))
