"""One lesson: a watched step goes in, a record of how the model calls its blocks comes out. Runs in
a worker process, like a build.
"""

from __future__ import annotations

from typing import Any

from ..contract import Measure
from ..learning.record import learn
from ..storing.canonical_json import canonical_json


def run(task: dict[str, Any], *, measure: Measure) -> tuple[bytes, dict[str, Any]]:
    """Learn how a model calls its blocks.

    Args:
        task: `learning.watching.task`.
        measure: as a build's; nothing is measured.

    Returns:
        The record as canonical JSON, and no facts.

    Raises:
        LearnError: nothing can be learned of this model.
    """
    return canonical_json(learn(task)).encode(), {}
