"""Reports of the caches over the steps of a run: their settings, and what the last run did."""

from __future__ import annotations

from typing import Any

from ..caching.tally import Tally
from ..deepcache.cache import DeepCache
from ..stepcache.cache import StepCache
from .lines import in_english, plain, told
from .words import deepcache_lines, deepcache_run, stepcache_lines


def cache_reports(deepcache: DeepCache | None, stepcache: StepCache | None) -> dict[str, Any]:
    """Return the reports of the caches that a MODEL carries besides a session; None without one."""
    return {
        "deepcache": None if deepcache is None else deepcache_report(deepcache),
        "stepcache": None if stepcache is None else stepcache_report(stepcache),
    }


def deepcache_report(cache: DeepCache) -> dict[str, Any]:
    """Return a DeepCache's settings and what its last run did, as JSON-plain data."""
    options, tally = cache.options, cache.tally
    report = {
        "id": cache.id,
        "schedule": options.schedule.value,
        "interval": options.interval,
        "branch": cache.branch.number,
        "wanted_branch": options.branch,
        "costs": [round(cost, 4) for cost in cache.costs],
        "ran": tally is not None,
        "chunks": [] if tally is None else tally.chunks,
        **_times(tally),
        "vram_bytes": 0 if tally is None else tally.feature_bytes,
        "problem": cache.problem,
        "problem_line": told(cache.problem)["reason_line"],
    }
    whole = deepcache_run(report)
    return {
        **report,
        "lines": plain(deepcache_lines(report)),
        "whole": plain(whole),
        "text": in_english(whole),
    }


def stepcache_report(cache: StepCache) -> dict[str, Any]:
    """Return a Step Cache's settings and what its last run did, as JSON-plain data."""
    options, tally = cache.options, cache.tally
    report = {
        "id": cache.id,
        "speed": options.speed,
        "schedule": options.schedule.value,
        "forecast": options.forecast.value,
        "ran": tally is not None,
        "steps": cache.steps,
        "computed": cache.computed,
        **_times(tally),
        "vram_bytes": cache.kept_bytes,
        "problem": cache.problem,
        "problem_line": told(cache.problem)["reason_line"],
    }
    whole = stepcache_lines(report)
    return {**report, "lines": plain(whole), "whole": plain(whole), "text": in_english(whole)}


def _times(tally: Tally | None) -> dict[str, float]:
    """The seconds that a run saved by its cache, and would have taken without it."""
    if tally is None:
        return {"seconds_saved": 0.0, "seconds_without": 0.0}
    return {
        "seconds_saved": round(tally.seconds_saved, 3),
        "seconds_without": round(tally.seconds_without, 3),
    }
