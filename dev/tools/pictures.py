"""Make the pictures of the pages: for the README our node in a shipped workflow and the tab in the
sidebar, for the first steps where the command puts our nodes in templates of the host.

Drives a real server and a real Chromium, so that they can be made again: `python -m
dev.tools.pictures --host TREE` in the virtual environment that `python dev` made; `--only places`
makes the latter alone.
The server's model is a narrow SDXL with random weights on the CPU; the figures that the page is
given in the end are SDXL's own, as `dev/benchmarks/` measured them on a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from backends.runtime.gains import Figure, gain_of
from backends.sessions.lines import in_english, plain
from backends.sessions.stages import Stage
from backends.sessions.words import gain_told, node_lines, report_lines, speed_lines

from .chromium import find_chromium
from .host import Server
from .install import PACK, prepare_base
from .page import TAB_BUTTON, TOAST, Page, expect_no_welcome

MODEL = "sd_xl_base_1.0.safetensors"
#: Of the page in its own pixels; SCALE of the picture's make one of them.
WIDTH, HEIGHT = 1200, 760
SCALE = 1.25
MAX_BYTES = 200_000
#: Where our node's corner stands in the page.
CORNER = (400, 140)
SIDE, STEPS = 64, 4
#: A step of SDXL at SIZE in three forms, and what was kept on disk.
RESULTS = PACK / "dev" / "benchmarks" / "results"
MEASURED, KEPT, SIZE = RESULTS / "forms_default.json", RESULTS / "speed_default.json", "1024x1024"


class Place(NamedTuple):
    """A template of the host, the titles of the nodes that are shown with ours, and how much of
    the picture is left out below, in the canvas' own pixels.
    """

    template: str
    titles: tuple[str, ...]
    cut: int


#: By the picture's name: a loader in a subgraph, and two models in one.
PLACES = {
    "place_z_image": Place("image_z_image_turbo", ("Load Diffusion Model", "KSampler"), 60),
    "place_wan": Place("video_wan2_2_14B_i2v", ("Switch (Model)", "KSampler (Advanced)"), 440),
}
PLACE_WIDTH, PLACE_MAX_BYTES = 1100, 60_000
#: Around the nodes, in the canvas' own pixels, and what the page has around its canvas at most.
MARGIN, AROUND = 36, 120
#: Leaves of the page its canvas and what stands on nodes.
CANVAS_ALONE = """
    * { visibility: hidden !important }
    #graph-canvas, .dom-widget, .dom-widget * { visibility: visible !important }
"""
WANTED = ("readme", "places")


def make_pictures(tree: Path, wanted: Sequence[str] = WANTED) -> None:
    """Write the wanted pictures where they belong."""
    program = find_chromium()
    if program is None:
        raise SystemExit("no Chromium: install one, or set WARMGRAPH_CHROMIUM to its program")
    with tempfile.TemporaryDirectory() as temporary:
        base = prepare_base(Path(temporary, "ComfyUI"), tree)
        if "readme" in wanted:
            command = [sys.executable, "-m", "dev.tools.checkpoints", "--host", str(tree)]
            command += ["--models", str(base / "models"), "--name", MODEL, "narrowxl"]
            subprocess.run(command, cwd=PACK, check=True)
        with Server(tree, base) as server:
            expect_no_welcome(server)
            with Page(program, Path(temporary, "profile"), server) as page:
                if "places" in wanted:
                    for name, place in PLACES.items():
                        save_jpeg(photograph_place(page, place), PACK / "docs" / f"{name}.jpg")
                if "readme" in wanted:
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
    page.click(TAB_BUTTON)
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
    page.forget_toasts()
    return Image.open(io.BytesIO(page.screenshot()))


def as_measured(snapshot: dict[str, Any]) -> dict[str, Any]:
    """Return a server's snapshot with the speeds that were measured on a GPU."""
    row = json.loads(MEASURED.read_text("utf-8"))["rows"][SIZE]
    kept = json.loads(KEPT.read_text("utf-8"))["report"]
    sources = {"eager": "eager", "exact": "exact", "compiled": "any_shape"}
    ms = {form: row[source]["unet_ms"]["median"] for form, source in sources.items()}
    eager = ms["eager"]
    (model,) = snapshot["models"]
    model = {
        **model,
        "standing": "compiled",
        "stage": Stage.FASTER.value,
        **gain_told(gain_of(Figure(ms["compiled"]), Figure(eager), SIZE)),
        "speed": {"form": "compiled", "size": SIZE, "ms": ms},
        "regions": kept["regions"],
        "eager": [],
        "ready": 0,
        "idle": 0,
        "misses": [],
        "notes": [],
    }
    whole = report_lines(model, [])
    model |= {"said": plain(speed_lines(model)), "whole": plain(whole)}
    model["lines"] = plain(node_lines(model, []))
    model["text"] = in_english(whole)
    files, size = kept["builds"] + kept["loads"], kept["disk_bytes"]
    (stored,) = snapshot["stored"]
    (run, *_) = snapshot["runs"]
    runs = [
        {**run, "size": SIZE, "steps": 20, "form": form, "ms": ms[form], "eager_ms": eager}
        for form in ("eager", "exact", "exact", "compiled", "compiled")
    ]
    quick = [each for each in runs if each["form"] != "eager"]
    saved = sum(each["steps"] * (eager - each["ms"]) for each in quick) / 1000
    return {
        **snapshot,
        "models": [model],
        "building": {**snapshot["building"], "workers": 0},
        "store": {**snapshot["store"], "files": files, "bytes": size},
        "stored": [{**stored, "files": files, "bytes": size, "in_use": files}],
        "captured": {
            "vram_bytes": row["captured"]["any_shape"]["vram_bytes"],
            "budget_bytes": 14 << 30,
        },
        "runs": runs,
        "saved_today": {"seconds": round(saved, 1), "runs": len(quick)},
    }


def photograph_place(page: Page, place: Place) -> Image.Image:
    """Make a template of the host faster by the command, and show where our nodes are then."""
    page.resize(WIDTH, HEIGHT)
    page.open_server()
    for name in ("Comfy.Minimap.Visible", "Comfy.Graph.CanvasInfo"):
        page.set_setting(name, False)
    workflow = _template(place.template).read_text("utf-8")
    page.run(
        f"""
        const name = {place.template!r};
        await app.loadGraphData({workflow}, true, true, name, {{ openSource: 'template' }});
        await app.extensionManager.command.execute('Warmgraph.MakeFaster');
        """
    )
    page.click_first(f"{TOAST} button", "e.innerText === 'Show'")  # goes to the first of them
    ours = "app.canvas.graph.nodes.filter((n) => n.comfyClass === 'WarmgraphCompileModel')"
    page.wait_for(f"app.canvas.graph !== app.rootGraph && {ours}.some((n) => n.is_selected)")
    time.sleep(2)  # the page moves there
    left, top, right, bottom = page.run(
        f"""
        const titles = {json.dumps(place.titles)};
        const others = app.canvas.graph.nodes.filter((n) => titles.includes(n.title));
        const boxes = [...{ours}, ...others].map((n) => [...n.boundingRect]);
        return [
          Math.min(...boxes.map(([x]) => x)),
          Math.min(...boxes.map(([, y]) => y)),
          Math.max(...boxes.map(([x, , width]) => x + width)),
          Math.max(...boxes.map(([, y, , height]) => y + height)),
        ];
        """
    )
    width, height = (round(b - a + 2 * MARGIN) for a, b in ((left, right), (top, bottom)))
    height -= place.cut
    page.resize(width + AROUND, height + AROUND)
    x, y = page.run(
        f"""
        const style = document.createElement('style');
        style.textContent = {json.dumps(CANVAS_ALONE)};
        document.head.append(style);
        app.canvas.selectItems({ours}); // white, as are the links to and from them
        app.canvas.background_image = null; // its grid makes a file large
        app.canvas.ds.scale = 1;
        app.canvas.ds.offset = [{MARGIN} - {left}, {MARGIN} - {top}];
        app.canvas.setDirty(true, true);
        const box = app.canvas.canvas.getBoundingClientRect();
        return [box.x, box.y];
        """
    )
    time.sleep(2)
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    picture = picture.crop((round(x), round(y), round(x) + width, round(y) + height))
    size = (PLACE_WIDTH, round(height * PLACE_WIDTH / width))
    return picture.resize(size, Image.Resampling.LANCZOS)


def _template(name: str) -> Path:
    found = importlib.util.find_spec("comfyui_workflow_templates_json")
    if found is None or found.origin is None:
        raise SystemExit(
            "no package comfyui-workflow-templates-json: the host's requirements have it"
        )
    return Path(found.origin).parent / "templates" / f"{name}.json"


def save_jpeg(picture: Image.Image, file: Path) -> None:
    """Write a picture as a JPEG, as good as it may be and still be small.

    Raises:
        ValueError: it is not small however bad it is.
    """
    for quality in range(92, 50, -3):
        data = io.BytesIO()
        picture.save(data, "JPEG", quality=quality, optimize=True, progressive=True)
        if data.tell() <= PLACE_MAX_BYTES:
            break
    else:
        raise ValueError(
            f"{file.name} must have {PLACE_MAX_BYTES} bytes at most, got {data.tell()}"
        )
    file.write_bytes(data.getvalue())
    print(f"{file}: {picture.width}x{picture.height}, {data.tell() >> 10} KiB")


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
    parser.add_argument("--only", choices=WANTED, help="make these pictures alone")
    options = parser.parse_args(arguments)
    make_pictures(options.host.resolve(), (options.only,) if options.only else WANTED)


if __name__ == "__main__":
    main()
