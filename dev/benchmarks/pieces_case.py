"""The cases of blocks that are replayed one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .lab import BUILD_WORKERS, DEFAULT, Lab

Result = dict[str, Any]


class Row(NamedTuple):
    """A model, a size as `transformers.sample` takes it, and whose attention a node puts there."""

    kind: str
    size: tuple[int, ...]
    override: str = ""


#: By the case's name.
PIECES = {
    "flux1_512_known": Row("flux1", (512, 512, 1), "known"),
    "flux1_512_unknown": Row("flux1", (512, 512, 1), "unknown"),
    "ltx23_fp8_3520": Row("ltx23_fp8", (640, 352, 16, 1, 1)),
    "ltx23_fp8_14080": Row("ltx23_fp8", (1280, 704, 16, 1, 1)),
    "h3_int8_7600": Row("h3_int8", (896, 512, 17)),
    # Needs ComfyUI 0.36, or what `tests/engine/newer_tree.py` makes of 0.30.
    "h3_int8_15700_given": Row("h3_int8", (864, 480, 37), "given"),
}
#: Whose step takes some three seconds on an H100.
LONG = ("flux1", (2048, 2048, 1, 4))


def pieces(name: str) -> Callable[[Lab], Result]:
    """A case of eager, ours by calls alone, and ours, by turns."""
    row = PIECES[name]

    def run(lab: Lab) -> Result:
        result = lab.run(
            "pieces",
            DEFAULT,
            **_given(lab, row.kind, row.size),
            override=row.override,
            **({"rounds": 1, "steps": 3} if lab.smoke else {}),
        )
        medians = {form: times["median"] for form, times in result["step_ms"].items()}
        return {
            "meaning": "speedup: eager / ours, a sampler's whole step by the GPU's clock, medians "
            "by turns in one process; calls: ours, where no block is replayed by itself; "
            "max_abs_diff: of the last latent of ours against calls'",
            **result,
            "lines": [
                f"{row.kind} {row.size} {row.override}: {medians} ms, x{result['speedup']} "
                f"(calls x{result['speedup_of_calls']}), rel L2 {result['rel_l2']:.1e}, "
                f"against calls {result['max_abs_diff']}, {result['captured']}"
            ],
        }

    return run


def interrupt(lab: Lab) -> Result:
    """A cancel within a step of some seconds, ours and eager's."""
    kind, size = LONG
    result = lab.run("interrupt", DEFAULT, **_given(lab, kind, size))
    return {
        "meaning": "seconds from a cancel within a run's second step until the GPU is free",
        **result,
        "lines": [
            f"a step of {result['step_seconds']} s ends {result['ours_seconds']} s after a cancel, "
            f"eager's {result['eager_seconds']} s"
        ],
    }


def _given(lab: Lab, kind: str, size: tuple[int, ...]) -> dict[str, Any]:
    return {
        "limit_s": 3000 if lab.smoke else 590,
        "name": lab.kind(kind),
        "path": lab.transformer(kind),
        "store": lab.store(kind),
        "size": [*lab.pixels(*size[:2]), *size[2:]],
        "workers": lab.workers(BUILD_WORKERS),
    }
