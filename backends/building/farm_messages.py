"""What a server and its build farm's workers say to each other: plain data.

Dask's own messages are pickles, so what is checked here is a broken worker's answer, not a
stranger's: who has no certificate must not reach the scheduler.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..storing.canonical_json import canonical_json
from ..torch_api.version_files import constants_in
from .answers import AnswerError, Result, built_of, read_answer
from .contract import BuildResult

#: The function of a worker that builds, as it finds it.
BUILD = "warmgraph_backends.building.farm_worker:build"
#: Under it a worker tells the scheduler the targets that it builds for.
TARGETS = "warmgraph"
_NUMBER = 0


def facts_of(target: Mapping[str, Any], host: Path, *, pretended: bool) -> dict[str, Any]:
    """Return what a server and its workers must have alike; the rest of a target is decided by the
    server's options, at both ends.
    """
    decided = {"deterministic", "capability"} if pretended else {"deterministic"}
    alike = {name: value for name, value in target.items() if name not in decided}
    return {**alike, "ComfyUI": constants_in(host / "comfyui_version.py").get("__version__")}


def resource_of(facts: Mapping[str, Any]) -> str:
    """Return the name of dask's resource that workers with these facts have."""
    return f"{TARGETS}-{hashlib.sha256(canonical_json(facts).encode()).hexdigest()[:16]}"


def answer(result: BuildResult) -> dict[str, Any]:
    """Return the message that a job is done, in a worker process's words."""
    return {
        "job": _NUMBER,
        "ok": True,
        "sha256": result.payload.sha256,
        "packed_bytes": len(result.payload.data),
        "raw_bytes": result.payload.raw_bytes,
        "facts": result.facts,
        "seconds": result.seconds,
        "payload": result.payload.data,
    }


def read(key: str, message: Any) -> BuildResult:
    """Check what a worker answers.

    Raises:
        AnswerError: it is no result; the text says why.
    """
    data = message.pop("payload", None) if isinstance(message, dict) else None
    if not isinstance(data, bytes):
        raise AnswerError("it has no payload")
    result = read_answer(message, _NUMBER)
    if not isinstance(result, Result):
        raise AnswerError("it is no result")
    return built_of(key, result, data)
