"""Make the picture of the README: our node in a shipped workflow, and the tab in the sidebar.

Drives a real server and a real Chromium, so that they can be made again: `python -m tools.pictures
--host TREE` in the virtual environment that `dev.py` made. The server's model is a narrow SDXL with
random weights on the CPU; the figures that the page is given in the end are SDXL's own, as
`benchmarks/` measured them on a GPU.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from backends.sessions.lines import line, plain

from .chromium import find_chromium
from .host import Server
from .install import PACK, prepare_base
from .page import Page, expect_no_welcome

MODEL = "sd_xl_base_1.0.safetensors"
#: Of the page in its own pixels; SCALE of the picture's make one of them.
WIDTH, HEIGHT = 1200, 760
SCALE = 1.25
MAX_BYTES = 200_000
#: Where our node's corner stands in the page.
CORNER = (400, 140)
SIDE, STEPS = 64, 4
#: A step of SDXL at SIZE in three forms, and what was kept on disk.
RESULTS = PACK / "benchmarks" / "results"
MEASURED, KEPT, SIZE = RESULTS / "forms_default.json", RESULTS / "speed_default.json", "1024x1024"


def make_picture(tree: Path) -> None:
    """Write the picture where it belongs."""
    program = find_chromium()
    if program is None:
        raise SystemExit("no Chromium: install one, or set WARMGRAPH_CHROMIUM to its program")
    with tempfile.TemporaryDirectory() as temporary:
        base = prepare_base(Path(temporary, "ComfyUI"), tree)
        command = [sys.executable, "-m", "tools.checkpoints", "--host", str(tree)]
        command += ["--models", str(base / "models"), "--name", MODEL, "narrowxl"]
        subprocess.run(command, cwd=PACK, check=True)
        with Server(tree, base) as server:
            expect_no_welcome(server)
            with Page(program, Path(temporary, "profile"), server) as page:
                save(photograph(page), PACK / "docs" / "warmgraph.png")


def photograph(page: Page) -> Image.Image:
    """Run the first template until it is quick, and show it beside the tab."""
    page.resize(WIDTH, HEIGHT, scale=SCALE)
    page.open_server()
    page.set_setting("Comfy.Minimap.Visible", False)
    page.open_shipped("text_to_image")
    page.set_widget("KSampler", "steps", STEPS)
    for side in ("width", "height"):
        page.set_widget("EmptyLatentImage", side, SIDE)
    for seed in range(2):
        page.set_widget("KSampler", "seed", seed)
        page.run_workflow()
        page.server.wait_until_built()
    page.set_widget("KSampler", "steps", 20)
    page.click(".warmgraph-tab-button")
    shown = json.dumps(as_measured(page.server.report()))
    page.run(
        f"""
        const fetched = window.fetch;
        const answer = () => new Response(JSON.stringify({shown}));
        window.fetch = async (...asked) =>
          String(asked[0]).includes('/warmgraph/report') ? answer() : fetched(...asked);
        (await import('/extensions/warmgraph/js/reports.js')).refreshReports();
        """
    )
    page.wait_for("/faster/.test(document.querySelector('.warmgraph-headline')?.innerText)")
    page.run(
        f"""
        const node = app.rootGraph.nodes.find((n) => n.comfyClass === 'WarmgraphCompileModel');
        app.canvas.ds.scale = 1;
        app.canvas.ds.offset = [{CORNER[0]} - node.pos[0], {CORNER[1]} - node.pos[1]];
        app.canvas.deselectAll();
        app.canvas.setDirty(true, true);
        """
    )
    time.sleep(12)  # what the host says of the last run goes
    return Image.open(io.BytesIO(page.screenshot()))


def as_measured(snapshot: dict[str, Any]) -> dict[str, Any]:
    """Return a server's snapshot with the speeds that were measured on a GPU."""
    row = json.loads(MEASURED.read_text("utf-8"))["rows"][SIZE]
    kept = json.loads(KEPT.read_text("utf-8"))["report"]
    sources = {"eager": "eager", "exact": "exact", "compiled": "specialised"}
    ms = {form: row[source]["unet_ms"]["median"] for form, source in sources.items()}
    (model,) = snapshot["models"]
    factor, now, eager = f"{ms['eager'] / ms['compiled']:.1f}", ms["compiled"], ms["eager"]
    speed = line("speed_faster", factor=factor, now=f"{now:.0f} ms", eager=f"{eager:.0f} ms")
    parts = {name: kept["regions"][name] for name in ("compiled", "total")}
    model = {
        **model,
        "speed": {"form": "compiled", "size": SIZE, "ms": ms},
        "regions": kept["regions"],
        "lines": plain([speed, line("parts", model=model["model"], **parts)]),
    }
    files, size = kept["builds"] + kept["loads"], kept["disk_bytes"]
    (stored,) = snapshot["stored"]
    (run, *_) = snapshot["runs"]
    runs = [
        {**run, "size": SIZE, "steps": 20, "form": form, "ms": ms[form], "eager_ms": eager}
        for form in ("eager", "exact", "exact", "compiled", "compiled")
    ]
    return {
        **snapshot,
        "models": [model],
        "building": {**snapshot["building"], "workers": 0},
        "store": {**snapshot["store"], "files": files, "bytes": size},
        "stored": [{**stored, "files": files, "bytes": size, "in_use": files}],
        "captured": {
            "vram_bytes": row["captured"]["specialised"]["vram_bytes"],
            "budget_bytes": 14 << 30,
        },
        "runs": runs,
    }


def save(picture: Image.Image, file: Path) -> None:
    """Write a picture as a small PNG.

    Raises:
        ValueError: it is not small.
    """
    data = io.BytesIO()
    flat = picture.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    flat.save(data, "PNG", optimize=True)
    if len(data.getvalue()) > MAX_BYTES:
        raise ValueError(f"{file.name} must have {MAX_BYTES} bytes at most, got {data.tell()}")
    file.write_bytes(data.getvalue())
    print(f"{file}: {picture.width}x{picture.height}, {data.tell() >> 10} KiB")


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", type=Path, required=True, help="a ComfyUI tree")
    make_picture(parser.parse_args(arguments).host.resolve())


if __name__ == "__main__":
    main()
