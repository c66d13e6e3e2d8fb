"""A node that computes some of a run's steps and forecasts the others: Step Cache."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from comfy_api.latest import io
from typing_extensions import override

from ..backends.caching.numbers import parse_steps
from ..backends.sessions.lines import line, plain
from ..backends.stepcache.forecast import Forecast
from ..backends.stepcache.run import FEWEST_FIRST, StepCacheOptions
from ..backends.stepcache.schedule import Schedule
from . import server
from .cache_inputs import SHARE, numbers_problem, part_problem, schedule_problem
from .compile_nodes import node_output

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

logger = logging.getLogger(__name__)

_DEFAULTS = StepCacheOptions()


class WarmgraphStepCache(io.ComfyNode):
    """Compute some steps of a run, and make the others from those before."""

    @classmethod
    @override
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WarmgraphStepCache",
            display_name="Step Cache",
            category="Warmgraph",
            description=(
                "Makes sampling faster at a small cost in quality: from step to step a model's "
                "result changes along a line, so some steps are forecast instead of computed. For "
                "all models that are sampled in 10 steps and more. Works with any sampler, size, "
                "ControlNet and LoRA, and with Compile Model in either order."
            ),
            search_aliases=["teacache", "easycache", "spectrum", "skip steps", "warmgraph"],
            inputs=[
                io.Model.Input("model", tooltip="The model to speed up. It is not changed."),
                io.Float.Input(
                    "speed",
                    default=_DEFAULTS.speed,
                    min=1.0,
                    max=4.0,
                    step=0.1,
                    tooltip=(
                        "Steps for each one that is computed: at 2, half of them are. 1: every "
                        "step is computed, nothing changes. 1.8: close to the full image. 3 and "
                        "more: much faster, details differ."
                    ),
                ),
                io.Combo.Input(
                    "forecast",
                    options=[each.value for each in Forecast],
                    default=_DEFAULTS.forecast.value,
                    tooltip=(
                        "How a step is made that is not computed. line: the change between the "
                        "last two computed steps goes on. reuse: as in the last one. half: half "
                        "way between both. auto: from half to all of the line, as would have been "
                        "best for the last computed step."
                    ),
                ),
                io.Combo.Input(
                    "schedule",
                    options=[each.value for each in Schedule],
                    default=_DEFAULTS.schedule.value,
                    advanced=True,
                    tooltip=(
                        "Which steps are computed. even: spread half by number and half by how "
                        "much noise is left. uniform: by number. custom: those in full_steps."
                    ),
                ),
                io.Int.Input(
                    "first_full",
                    default=_DEFAULTS.first_full,
                    min=FEWEST_FIRST,
                    max=20,
                    advanced=True,
                    tooltip="How many steps at the beginning are computed in any case.",
                ),
                io.Float.Input(
                    "start_percent",
                    default=_DEFAULTS.start_percent,
                    **SHARE,
                    advanced=True,
                    tooltip="Where in the run it begins, from 0 to 1. Before, all are computed.",
                ),
                io.Float.Input(
                    "end_percent",
                    default=_DEFAULTS.end_percent,
                    **SHARE,
                    advanced=True,
                    tooltip="Where in the run it ends, from 0 to 1. After, all are computed.",
                ),
                io.String.Input(
                    "full_steps",
                    default="0,1,2,5,8,11,14,17,19",
                    advanced=True,
                    tooltip=(
                        "For custom: the numbers of the steps that are computed, the first being "
                        "0. The first ones and the last one always are."
                    ),
                ),
            ],
            outputs=[
                io.Model.Output(
                    display_name="model", tooltip="The same model, sampling with forecast steps."
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
        speed: float,
        forecast: str,
        schedule: str,
        first_full: int,
        start_percent: float,
        end_percent: float,
        full_steps: str,
    ) -> io.NodeOutput:
        try:
            chosen = Schedule(schedule)
            options = StepCacheOptions(
                speed=speed,
                first_full=first_full,
                schedule=chosen,
                forecast=Forecast(forecast),
                start_percent=start_percent,
                end_percent=end_percent,
                full_steps=tuple(parse_steps(full_steps)) if chosen is Schedule.CUSTOM else (),
            )
            clone, identifier = server.get_engine().caches.stepcache(model, options)
            report = server.get_engine().report(clone)
        except Exception as error:  # nothing may fail a prompt that eager would have finished
            logger.warning("Step Cache is left out: %s", error)
            return node_output(model, "", plain([line("note", note=error)]))
        return node_output(clone, identifier, report["stepcache"]["lines"])
