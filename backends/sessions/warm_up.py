"""Warm Up's empty steps: work that the first image of a size would otherwise wait for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ..cuda_graphs.capture_table import CLEAN_CALLS
from ..families.catalogue import empty_inputs, guided_together
from ..host_api import models
from ..reasons import of
from ..runtime.session import Session
from .lines import line
from .prompts import Progress

#: Calls of a size until it is replayed, where that is possible: the first ones, then the capture.
_CALLS = CLEAN_CALLS + 3

_UNKNOWN = of("warmed_up")


def run_empty_steps(
    session: Session,
    model: Any,
    sizes: Sequence[tuple[int, int]],
    batches: Sequence[int],
    check_cancelled: Callable[[], None],
    on_progress: Progress | None,
) -> None:
    """Run a compiled MODEL on empty images of each size.

    Args:
        sizes: (width, height) in pixels.
        batches: images at once; each runs doubled where guidance does that.
    """
    # Largest first: what it needs serves the others, too.
    images = [(batch, *size) for size in sizes for batch in batches]
    images.sort(key=math.prod, reverse=True)
    for number, image in enumerate(images):
        check_cancelled()
        if on_progress is not None:
            batch, width, height = image
            size = f"{width}x{height}"
            on_progress(number, len(images), line("waits_step", size=size, batch=batch))
        if not _run(session, model, *image):
            session.note(_UNKNOWN)
            break


def _run(session: Session, model: Any, batch: int, width: int, height: int) -> bool:
    """Run the steps of one size; False if the model's inputs are not known."""
    root = models.diffusion_model(model)
    rows = 2 * batch if guided_together(root) else batch
    latent = models.latent_shape(model, rows, width, height)
    inputs = empty_inputs(root, models.settings(model), latent)
    if inputs is None:
        return False
    for _ in range(_CALLS if session.scope.replays else 1):
        models.run_forward(model, latent, inputs)
    return True
