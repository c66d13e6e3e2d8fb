"""The cases of VRAM: what many sizes take of it, and a card that has little."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .lab import BUILD_WORKERS, DEFAULT, OFF, Lab

SIX_SIZES = ((1024, 1024), (512, 512), (768, 768), (1152, 896), (832, 1216), (1536, 1024))
RESERVE_GIB = 2
#: VRAM that is left, in MiB: SDXL's UNet has 4.9 GB, of which a part fits beside what the host
#: keeps free; the others are cards of 8, 12 and 16 GB less 1 for the desktop.
LEAVE_MIB = {"sdxl": 5120, "zimage_int8": 7168, "flux1_int8": 11264, "wan14b_fp8": 15360}
#: Of which a prompt takes two, one after the other.
TWO_MODELS = ("wan14b_fp8",)
QUANTISED_CARDS = tuple(kind for kind in LEAVE_MIB if kind != "sdxl")
RESERVE = ("--reserve-vram", str(RESERVE_GIB))
SMALL_CARDS: dict[str, tuple[str, ...]] = {
    "default": RESERVE,
    "off": (*OFF, *RESERVE),
    "novram": ("--novram",),
}
Result = dict[str, Any]


def vram_six(kind: str) -> Callable[[Lab], Result]:
    """A case: six sizes, then the peak of the largest: eager and ours, each in its own process."""

    def run(lab: Lab) -> Result:
        lab.fill(kind, workers=lab.workers(BUILD_WORKERS))
        runs = {
            name: lab.run(
                "vram_sizes",
                DEFAULT,
                limit_s=600 if lab.smoke else 200,
                model=lab.file(kind),
                kind=lab.kind(kind),
                store=lab.store(kind),
                sizes=[lab.pixels(width, height) for width, height in SIX_SIZES],
                ours=name == "ours",
            )
            for name in ("eager", "ours")
        }
        ratios = {
            state: {
                count: round(runs["ours"][state][count] / eager, 3) if eager else None
                for count, eager in runs["eager"][state].items()
            }
            for state in ("peak", "peak_from_empty")
        }
        captured = runs["ours"]["captured"]
        lines = [
            f"peak of {runs['ours']['largest']}, MiB: "
            + ", ".join(f"{name} {run['peak']}" for name, run in runs.items()),
            f"ratios {ratios}; {captured['signatures']} sizes captured, "
            f"{captured['vram_bytes'] >> 20} MiB, not replayed {captured['not_replayed']}",
        ]
        return {
            "meaning": "peak: of one more run of the largest size after all six, each run until "
            "it was captured; device: the driver's count, polled; allocated, reserved: PyTorch's, "
            "in which what captured calls keep has its place and weights under dynamic VRAM have "
            "none; MiB",
            "peak_ratio": ratios["peak"]["device"],
            "ratios": ratios,
            "captured_bytes": captured["vram_bytes"],
            "runs": runs,
            "lines": lines,
        }

    return run


def small_cards(kind: str) -> Callable[[Lab], Result]:
    """A case: a card on which a part of a model fits, or where the host keeps nothing of it."""

    def run(lab: Lab) -> Result:
        quick: Result = {}
        if lab.smoke:
            quick = {"rounds": 1, "steps": 4}
        elif kind in QUANTISED_CARDS:  # a step takes as long as its weights need to come
            quick = {"rounds": 4, "steps": 6, "error_steps": 2}
        modes, lines = {}, []
        for name, flags in SMALL_CARDS.items():
            if lab.smoke and name == "novram":  # the host takes no `--cpu` beside it
                continue
            found = modes[name] = lab.run(
                "small_card",
                flags,
                limit_s=600 if lab.smoke else 400,
                model=lab.file(kind),
                kind=lab.kind(kind),
                store=lab.store(kind),
                size=lab.pixels(1024, 1024),
                second=lab.transformer(kind, second=True) if kind in TWO_MODELS else None,
                leave_mib=None if lab.smoke else LEAVE_MIB[kind],
                workers=lab.workers(BUILD_WORKERS),
                **quick,
            )
            row, captured = found["row"], found["captured"]
            lines.append(
                f"{name}: eager {row['eager']['unet_ms'].get('median')} ms, ours "
                f"{row['ours']['unet_ms'].get('median')} ms, x{row['speedup']}, rel L2 "
                f"{found['rel_l2']:.1e}, {found['loaded_mib']} of {found['model_mib']} MiB loaded, "
                f"peak {found['peak']['ours']['device']} MiB, eager's "
                f"{found['peak']['eager']['device']}, region calls {found['calls']}, "
                f"{found['eager_calls']} EAGER, captured {captured['captures']}, replayed "
                f"{captured['replayed']}, not {captured['not_replayed']}"
            )
            if (both := found["both"]) is not None:
                lines.append(
                    f"{name}, two models: eager {both['seconds']['eager']} s, ours "
                    f"{both['seconds']['ours']} s, rel L2 {both['rel_l2']:.1e}, "
                    f"{both['eager_calls']} EAGER"
                )
        return {
            "leave_mib": LEAVE_MIB[kind],
            "reserve_gib": RESERVE_GIB,
            "slowest_ratio": round(max(_slowest(mode) for mode in modes.values()), 3),
            "modes": modes,
            "lines": lines,
        }

    return run


def _slowest(mode: Result) -> float:
    """Time of ours by eager's: of a model's steps, or of a prompt that takes two models."""
    found = 1 / float(mode["row"]["speedup"])
    return found if mode["both"] is None else max(found, float(mode["both"]["ratio"]))
