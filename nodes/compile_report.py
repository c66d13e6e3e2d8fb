"""Output nodes: Compile Report and Warm Up."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from comfy_api.latest import io
from typing_extensions import override

from ..backends.errors import shown, validate_length
from ..backends.sessions.latents import latents_part
from ..backends.sessions.lines import line
from . import server
from .progress import node_progress

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

logger = logging.getLogger(__name__)

MAX_SIDE = 8192
MAX_BATCH = 64
MAX_ENTRIES = 64
LATENT_PIXEL = 8


class WarmgraphGraphReport(io.ComfyNode):
    """Say what is compiled, what is not and why."""

    @classmethod
    @override
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WarmgraphGraphReport",
            display_name="Compile Report",
            category="Warmgraph",
            description=(
                "Shows what Warmgraph did for a model: which parts are compiled, which run at "
                "normal speed and why, which graphs were compiled, loaded or are missing, disk, "
                "VRAM and seconds saved. Link the finished image to `after` to see the figures of "
                "this very run. Link two latents to see how like each other they are."
            ),
            search_aliases=["statistics", "graph report", "warmgraph"],
            inputs=[
                io.MultiType.Input(
                    "model",
                    types=[io.Model, io.Vae, io.ControlNet],
                    tooltip="A model, VAE or ControlNet that came out of a Warmgraph node.",
                ),
                io.AnyType.Input(
                    "after",
                    optional=True,
                    tooltip=(
                        "Anything that has to be finished before the report is made: link the "
                        "image, and the report covers its sampling. The value is not used."
                    ),
                ),
                io.Latent.Input(
                    "latent",
                    optional=True,
                    tooltip=(
                        "A sampler's result. With compared_with the report says how like that one "
                        "it is: PSNR in dB, and SSIM."
                    ),
                ),
                io.Latent.Input(
                    "compared_with",
                    optional=True,
                    tooltip=(
                        "What latent is compared with: the result of another sampler, of the same "
                        "seed and size. Its own range of values is PSNR's peak."
                    ),
                ),
            ],
            outputs=[io.String.Output(display_name="report", tooltip="The report as text.")],
            is_output_node=True,
            not_idempotent=True,
        )

    @classmethod
    @override
    def fingerprint_inputs(cls, **_inputs: Any) -> float:
        return float("nan")  # never equal, so the host never serves a report from its cache

    @classmethod
    @override
    def execute(
        cls,
        model: ModelPatcher,
        after: Any = None,
        latent: Any = None,
        compared_with: Any = None,
    ) -> io.NodeOutput:
        is_asked = latent is not None or compared_with is not None
        more = [latents_part(latent, compared_with)] if is_asked else []
        return _report_output(lambda: server.get_engine().report(model), more)


class WarmgraphWarmUp(io.ComfyNode):
    """Prepare all graphs for a list of sizes and batches, without making an image."""

    @classmethod
    @override
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WarmgraphWarmUp",
            display_name="Warm Up",
            category="Warmgraph",
            description=(
                "Loads or compiles everything that a model needs for these sizes and batches, "
                "without making an image. Not needed for speed later on: compiled graphs fit "
                "every size. Use it to have all work done before the first image."
            ),
            search_aliases=["warmup", "precompile", "warmgraph"],
            inputs=[
                io.Model.Input("model", tooltip="A model that came out of a Warmgraph node."),
                io.String.Input(
                    "sizes",
                    default="1024x1024",
                    multiline=True,
                    tooltip=(
                        "Image sizes as WIDTHxHEIGHT in pixels, separated by commas or lines, for "
                        "example 1024x1024, 720x960."
                    ),
                ),
                io.String.Input(
                    "batches",
                    default="1",
                    tooltip="Batch sizes (images at once), separated by commas, for example 1, 2.",
                ),
            ],
            outputs=[
                io.String.Output(
                    display_name="report", tooltip="The report after the warm-up, as text."
                )
            ],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
            not_idempotent=True,
        )

    @classmethod
    @override
    def validate_inputs(cls, sizes: str | None = None, batches: str | None = None) -> bool | str:
        try:
            if sizes is not None:
                parse_sizes(sizes)
            if batches is not None:
                parse_batches(batches)
        except ValueError as error:
            return str(error)
        return True

    @classmethod
    @override
    def execute(cls, model: ModelPatcher, sizes: str, batches: str) -> io.NodeOutput:
        def warm_up() -> dict[str, Any]:
            with node_progress(cls.hidden.unique_id) as progress:
                return server.get_engine().warm_up(
                    model, parse_sizes(sizes), parse_batches(batches), on_progress=progress
                )

        return _report_output(warm_up)


def parse_sizes(text: str) -> list[tuple[int, int]]:
    """Return the (width, height) pairs, in pixels, that `text` lists, each once.

    Raises:
        ValueError: an entry is not WIDTHxHEIGHT, or a side is out of range.
    """
    sizes = []
    for entry in _entries(text, "sizes", "1024x1024, 720x960"):
        match = re.fullmatch("([0-9]{1,6}) *[xX*\u00d7] *([0-9]{1,6})", entry)
        if match is None:
            raise ValueError(f"sizes must be entries such as 1024x1024, got {shown(entry)}")
        width, height = int(match[1]), int(match[2])
        for side in (width, height):
            if not LATENT_PIXEL <= side <= MAX_SIDE:
                raise ValueError(
                    f"sides must be from {LATENT_PIXEL} to {MAX_SIDE} pixels, got {shown(entry)}"
                )
        sizes.append((width, height))
    return list(dict.fromkeys(sizes))


def parse_batches(text: str) -> list[int]:
    """Return the batch sizes that `text` lists, each once.

    Raises:
        ValueError: an entry is not a whole number, or out of range.
    """
    batches = []
    for entry in _entries(text, "batches", "1, 2, 4"):
        number = int(entry) if re.fullmatch(r"[0-9]{1,6}", entry) else 0
        if not 1 <= number <= MAX_BATCH:
            raise ValueError(
                f"batches must be whole numbers from 1 to {MAX_BATCH}, got {shown(entry)}"
            )
        batches.append(number)
    return list(dict.fromkeys(batches))


def _entries(text: str, name: str, example: str) -> list[str]:
    validate_length(name, text)
    entries = [entry.strip() for entry in re.split(r"[,;\n]", text) if entry.strip()]
    if not entries:
        raise ValueError(f"{name} must have at least one entry, such as {example}")
    if len(entries) > MAX_ENTRIES:
        raise ValueError(f"{name} must have at most {MAX_ENTRIES} entries, got {len(entries)}")
    return entries


def _report_output(
    make_report: Callable[[], dict[str, Any]], more: Sequence[dict[str, Any]] = ()
) -> io.NodeOutput:
    """Return a report as text, with `more` below it; a failure is reported and does not fail the
    prompt.
    """
    try:
        report = make_report()
        # Apart, for the page keeps each part live: what runs compiled, and what caches did.
        caches = [each for each in map(report.get, ("deepcache", "stepcache")) if each is not None]
        is_told = not caches or report["id"] or report["notes"]
        parts = [
            {name: each[name] for name in ("id", "text", "whole")}
            for each in ([report] if is_told else []) + caches
        ]
    except Exception as error:  # nothing may fail a prompt that eager would have finished
        logger.exception("No report could be made")
        parts = [{"id": "", "text": line("no_report", error=error).text}]
    parts += more
    text = "\n".join(part["text"] for part in parts)
    return io.NodeOutput(text, ui={"warmgraph": parts, "text": [text]})
