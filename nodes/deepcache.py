"""A node that keeps the deep features of a UNet over neighbouring steps: DeepCache."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from comfy_api.latest import io
from typing_extensions import override

from ..backends.caching.numbers import parse_steps
from ..backends.deepcache.run import DeepCacheOptions
from ..backends.deepcache.schedule import Schedule
from ..backends.sessions.lines import line, plain
from . import server
from .cache_inputs import SHARE, numbers_problem, part_problem, schedule_problem
from .compile_nodes import node_output

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

logger = logging.getLogger(__name__)

_DEFAULTS = DeepCacheOptions()


class WarmgraphDeepCache(io.ComfyNode):
    """Compute the whole UNet in some steps only, and its outermost blocks in the others."""

    @classmethod
    @override
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WarmgraphDeepCache",
            display_name="DeepCache",
            category="Warmgraph",
            description=(
                "Makes sampling faster at some cost in quality: what the deep blocks of a UNet "
                "(SD1.5, SD2, SDXL) compute changes slowly, so it is kept for a few steps while "
                "only the outermost blocks run. Works at any size, with ControlNet, LoRA and other "
                "patches, and with Compile Model in either order."
            ),
            search_aliases=["step cache", "feature cache", "skip steps", "warmgraph"],
            inputs=[
                io.Model.Input("model", tooltip="The model to speed up. It is not changed."),
                io.Int.Input(
                    "interval",
                    default=_DEFAULTS.interval,
                    min=1,
                    max=10,
                    tooltip=(
                        "Steps from one full step to the next. 1: every step is full, nothing "
                        "changes. 2 to 3: close to the full image. 5 and more: much faster, "
                        "details are lost. The adaptive and custom schedules do not use it."
                    ),
                ),
                io.Int.Input(
                    "branch",
                    default=_DEFAULTS.branch,
                    min=0,
                    max=11,
                    tooltip=(
                        "How much still runs in every step. 0: the outermost blocks only, the "
                        "fastest. Higher: more blocks, slower and closer to the full image. The "
                        "text on the node lists what each costs for this model."
                    ),
                ),
                io.Combo.Input(
                    "schedule",
                    options=[schedule.value for schedule in Schedule],
                    default=_DEFAULTS.schedule.value,
                    tooltip=(
                        "Which steps are full. uniform: every interval-th. quadratic: as many, "
                        "closer together around center, at first the run's beginning. adaptive: "
                        "when the latent has drifted by more than threshold since the last full "
                        "step. custom: those in full_steps."
                    ),
                ),
                io.Float.Input(
                    "start_percent",
                    default=_DEFAULTS.start_percent,
                    **SHARE,
                    tooltip="Where in the run it begins, from 0 to 1. Before, every step is full.",
                ),
                io.Float.Input(
                    "end_percent",
                    default=_DEFAULTS.end_percent,
                    **SHARE,
                    tooltip="Where in the run it ends, from 0 to 1. After, every step is full.",
                ),
                io.Float.Input(
                    "center",
                    default=_DEFAULTS.center,
                    **SHARE,
                    advanced=True,
                    tooltip="For quadratic: where full steps are closest, as a share of the steps.",
                ),
                io.Float.Input(
                    "power",
                    default=_DEFAULTS.power,
                    min=1.0,
                    max=4.0,
                    step=0.1,
                    advanced=True,
                    tooltip="For quadratic: how much closer they are there. 1 is even.",
                ),
                io.String.Input(
                    "full_steps",
                    default="0,1,2,5,9,14",
                    advanced=True,
                    tooltip=(
                        "For custom: the numbers of the full steps, the first being 0. The first "
                        "step is always a full one."
                    ),
                ),
                io.Float.Input(
                    "threshold",
                    default=_DEFAULTS.threshold,
                    **SHARE,
                    advanced=True,
                    tooltip=(
                        "For adaptive: how far the latent may drift from that of the last full "
                        "step, relative to its size. Lower: more full steps, closer to the full "
                        "image. 0.4 takes about as many as interval 3."
                    ),
                ),
            ],
            outputs=[
                io.Model.Output(
                    display_name="model", tooltip="The same model, sampling with kept features."
                )
            ],
            has_intermediate_output=True,  # its text comes back when the host's cache serves it
        )

    @classmethod
    @override
    def validate_inputs(
        cls,
        schedule: str | None = None,
        full_steps: str | None = None,
        start_percent: float | None = None,
        end_percent: float | None = None,
    ) -> bool | str:
        # What is named here the host no longer checks by itself.
        names = [each.value for each in Schedule]
        is_custom = schedule == Schedule.CUSTOM.value
        return (
            schedule_problem(schedule, names)
            or part_problem(start_percent, end_percent)
            or numbers_problem(full_steps, is_custom)
            or True
        )

    @classmethod
    @override
    def execute(
        cls,
        model: ModelPatcher,
        interval: int,
        branch: int,
        schedule: str,
        start_percent: float,
        end_percent: float,
        center: float,
        power: float,
        full_steps: str,
        threshold: float,
    ) -> io.NodeOutput:
        try:
            chosen = Schedule(schedule)
            options = DeepCacheOptions(
                interval=interval,
                branch=branch,
                schedule=chosen,
                start_percent=start_percent,
                end_percent=end_percent,
                center=center,
                power=power,
                full_steps=tuple(parse_steps(full_steps)) if chosen is Schedule.CUSTOM else (),
                threshold=threshold,
            )
            clone, identifier = server.get_engine().caches.deepcache(model, options)
            report = server.get_engine().report(clone)
        except Exception as error:  # nothing may fail a prompt that eager would have finished
            logger.warning("DeepCache is left out: %s", error)
            return node_output(model, "", plain([line("note", note=error)]))
        return node_output(clone, identifier, report["deepcache"]["lines"])
