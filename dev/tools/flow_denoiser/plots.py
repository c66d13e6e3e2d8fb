"""Draw what `quality` measured: `python -m dev.tools.flow_denoiser.plots JSON PNG`, by matplotlib.

A panel for each model and sampler: how close images come to the run that computes every step, over
the share of steps that are computed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

WAYS = {
    "auto": ("Step Cache", "#c2410c", "o"),
    "EasyCache": ("EasyCache", "#1d4ed8", "s"),
    "fewer steps": ("fewer steps", "#6b7280", "^"),
    "DeepCache": ("DeepCache", "#15803d", "D"),
}
"""The ways that are drawn: what they are called, their colour and mark."""
_PANEL = 2.6  # inches

Row = Mapping[str, Any]


def points(rows: Iterable[Row], model: str, sampler: str, way: str) -> list[tuple[float, float]]:
    """Return (share of steps computed, PSNR in dB) of one line, from few steps to many."""
    wanted = (model, sampler, way)
    return sorted(
        (row["work"], row["psnr"])
        for row in rows
        if (row["model"], row["sampler"], row["way"]) == wanted
    )


def draw(rows: Sequence[Row], file: Path) -> None:
    """Write the picture."""
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(row["model"] for row in rows))
    samplers = list(dict.fromkeys(row["sampler"] for row in rows))
    size = (_PANEL * len(samplers), _PANEL * len(models) + 0.4)
    figure = Figure(figsize=size, dpi=110, layout="constrained")
    panels = figure.subplots(len(models), len(samplers), squeeze=False, sharex=True)
    for across, model in zip(panels, models, strict=True):
        for panel, sampler in zip(across, samplers, strict=True):
            for way, (name, colour, mark) in WAYS.items():
                found = points(rows, model, sampler, way)
                if found:
                    panel.plot(*zip(*found, strict=True), mark + "-", color=colour, label=name)
            panel.set_title(f"{model}, {sampler}", fontsize=9)
            panel.grid(alpha=0.25)
            panel.tick_params(labelsize=8)
        across[0].set_ylabel("PSNR to all steps, dB", fontsize=8)
    for panel in panels[-1]:
        panel.set_xlabel("share of steps computed", fontsize=8)
    lines = {line.get_label(): line for panel in panels.flat for line in panel.get_lines()}
    figure.legend(handles=lines.values(), loc="outside upper center", ncols=4, fontsize=9)
    figure.savefig(file)


def main() -> None:
    """Read the rows and draw them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("json", type=Path, help="what `quality` wrote")
    parser.add_argument("png", type=Path, help="the picture to write")
    options = parser.parse_args()
    draw(json.loads(options.json.read_text("utf-8"))["rows"], options.png)


if __name__ == "__main__":
    main()
