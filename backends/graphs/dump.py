"""Writes each graph into a folder of its own, for a developer (`debugging.Debugging.dump`):

    description.json   the kind as it was described
    exported.txt       what was exported, before the compiler took it (from the worker)
    generated.py       all that the compiler generated, with the kernels' text (from the worker)
    source.py          what of it is in the graph file
    kernels.json       each kernel, and what was chosen for it by measurement

A graph that was loaded has no export. `exported.txt` is there for a build that failed, too.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

from .compiled_graph import CompiledGraph

logger = logging.getLogger(__name__)

_LABEL_CHARACTERS = 60
_KEY_CHARACTERS = 12


def dump_folder(root: Path, graph: CompiledGraph) -> Path:
    """Return where a graph is written down."""
    label = re.sub(r"[^A-Za-z0-9]+", "-", graph.description.label).strip("-")
    return root / f"{label[:_LABEL_CHARACTERS]}-{graph.key[:_KEY_CHARACTERS]}"


def dump_description(root: Path, graph: CompiledGraph) -> Path:
    """Write down what is to be built; returns the folder.

    What cannot be written costs a warning.
    """
    folder = dump_folder(root, graph)
    text = json.dumps(graph.description.to_dict(), indent=2, sort_keys=True)
    _write(folder, {"description.json": text})
    return folder


def dump_graph(root: Path, graph: CompiledGraph, payload: bytes) -> None:
    """Write down a graph that was built or loaded.

    Args:
        payload: unpacked, as the graph's backend loads it.
    """
    folder = dump_description(root, graph)
    try:
        facts = graph.backend.describe_payload(payload)
    except ValueError as error:
        logger.warning("%s is not written down: %s", graph.description.label, error)
        return
    kernels = [{**kernel._asdict(), "choices": kernel.choices} for kernel in facts.kernels]
    _write(folder, {"source.py": facts.source, "kernels.json": json.dumps(kernels, indent=2)})
    logger.debug("%s is written down in %s", graph.description.label, folder)


def _write(folder: Path, files: dict[str, str]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text + "\n", "utf-8")
    except OSError as error:
        logger.warning("Nothing could be written down in %s: %s", folder, error)
