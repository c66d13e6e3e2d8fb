"""Show the whole way on a real server: first image, builds, any size and batch, a restart.

Runs in the virtual environment: `python dev demo` starts it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy
from safetensors.numpy import load_file

from warmgraph_console.convert import to_prompt

from . import templates
from .host import Graph, Run, Server
from .install import PACK, prepare_base

NAME = "text_to_image"
STEPS = 4
PIXELS_PER_UNIT = {"cpu": 64, "gpu": 128}
COLUMNS = ("run", "size", "batch", "seconds", "without", "compiled/eager", "builds", "difference")


class Case(NamedTuple):
    """One image to make; sides in units of `PIXELS_PER_UNIT`."""

    label: str
    width: float
    height: float
    batch: int = 1


FIRST = Case("first image, builds behind it", 4, 4)
WARM = (
    Case("graphs are there", 4, 4),
    Case("another batch", 4, 4, 3),
    Case("another size", 6, 4),
    Case("an odd size", 5.625, 3.125, 2),  # a latent of 45 x 25 on a CPU
)
RESTARTED = (Case("after a restart", 4, 4), Case("a size never seen", 3, 7, 2))


class Demo:
    """The server, its workflow and the rows of the table.

    Args:
        tree: The ComfyUI tree.
        folder: Where everything goes; what an earlier demo left there is replaced.
        cpu: Whether to sample on the CPU.
    """

    def __init__(self, tree: Path, folder: Path, *, cpu: bool) -> None:
        self.folder, self.cpu = folder, cpu
        base = folder / "ComfyUI"
        for old in ("user", "output", "custom_nodes", "models/compiled_graphs", "server.log"):
            path = base / old
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        prepare_base(base, tree, narrow=False)
        flags = ["--cpu"] if cpu else []
        self.server = Server(tree, base, flags=flags)
        self.workflow = templates.read(NAME)
        self.rows: list[Sequence[str]] = []
        self._built: set[tuple[str, float]] = set()  # builds that rows have counted

    def write_checkpoint(self) -> None:
        """Write a checkpoint of SD1.5's layout and choose it in the workflow."""
        # A .ckpt has 16 MB: big weights share storage. A GPU's dynamic VRAM maps safetensors.
        name = "random_sd15.ckpt" if self.cpu else "random_sd15.safetensors"
        loader = next(n for n in self.workflow["nodes"] if n["type"] == "CheckpointLoaderSimple")
        loader["widgets_values"][0] = name
        say(f"writing a checkpoint with random weights, unless it is there: {name}")
        command = [sys.executable, "-m", "dev.tools.checkpoints", "--host", str(self.server.tree)]
        command += ["--models", str(self.server.base / "models"), "--name", name, "sd15"]
        subprocess.run(command, cwd=PACK, check=True)

    def row(self, case: Case) -> None:
        """Make one image without and one with the pack, and add a row to the table."""
        seed = 1000 + len(self.rows)
        unit = PIXELS_PER_UNIT["cpu" if self.cpu else "gpu"]
        width, height = int(case.width * unit), int(case.height * unit)
        say(f"{case.label}: {width} x {height}, batch {case.batch}")
        plain = self.server.run(self.prompt(seed, width, height, case.batch, compiled=False))
        ours = self.server.run(
            self.prompt(seed, width, height, case.batch, compiled=True), workflow=self.workflow
        )
        (report,) = self.server.model_reports(ours)
        regions = report["regions"]
        self.server.wait_until_built()
        (after,) = self.server.model_reports(ours)
        built = {(k["key"], k["build_seconds"]) for k in after["kinds"] if k["source"] == "built"}
        self.rows.append(
            (
                case.label,
                f"{width}x{height}",
                str(case.batch),
                f"{ours.seconds:.2f}",
                f"{plain.seconds:.2f}",
                f"{regions['compiled']}/{regions['eager']}",
                str(len(built - self._built)),
                f"{difference(self.latent(ours), self.latent(plain)):.1e}",
            )
        )
        self._built |= built
        print(table(self.rows[-1:], header=len(self.rows) == 1), flush=True)

    def prompt(self, seed: int, width: int, height: int, batch: int, *, compiled: bool) -> Graph:
        """Return the workflow's prompt; without the pack its node is bypassed, as a user would."""
        workflow = json.loads(json.dumps(self.workflow))
        for node in workflow["nodes"]:
            values = node["widgets_values"]
            if node["type"] == "KSampler":
                values[0], values[2] = seed, STEPS
                sampler = [str(node["id"]), 0]
            elif node["type"] == "EmptyLatentImage":
                values[:] = [width, height, batch]
            elif node["type"] == "SaveImage":
                values[0] = f"{NAME}/{'with' if compiled else 'without'}"
            elif node["type"] == "WarmgraphCompileModel" and not compiled:
                node["mode"] = 4  # bypassed
        graph = to_prompt(workflow, self.server.object_info())
        inputs = {"samples": sampler, "filename_prefix": "latents/demo"}
        graph["latent"] = {"class_type": "SaveLatent", "inputs": inputs}
        return graph

    def latent(self, run: Run) -> numpy.ndarray[Any, Any]:
        """Return the latent that a run saved, [B, C, H, W] in float32."""
        (path,) = self.server.files(run, "latents")
        return load_file(path)["latent_tensor"].astype(numpy.float32)

    def run(self) -> None:
        """Make all rows, with a restart of the server in between."""
        self.write_checkpoint()
        say("starting ComfyUI")
        with self.server:
            path = self.server.save_workflow(NAME, self.workflow)
            self.workflow["extra"]["warmgraph"] = {"path": path, "user": "default"}  # as the page
            for case in (FIRST, *WARM):
                self.row(case)
            say("restarting ComfyUI")
            self.server.restart()
            for case in RESTARTED:
                self.row(case)
        print(f"\n{table(self.rows, header=True)}\n")
        print(
            "seconds: whole prompt; without: the same prompt without the pack; compiled/eager: "
            "regions when the image was done; difference: relative L2 of the latent\n"
        )
        (self.folder / "table.txt").write_text(table(self.rows, header=True), encoding="utf-8")
        user = self.server.base / "user" / "default" / "workflows"
        say(f"images:   {self.server.base / 'output' / NAME}")
        say(f"workflow: {user / f'{NAME}.json'}")
        say(f"graphs:   {user / f'{NAME}.graphs'} (names with a dot)")
        say(f"table:    {self.folder / 'table.txt'}, log: {self.server.log_file}")


def difference(ours: numpy.ndarray[Any, Any], reference: numpy.ndarray[Any, Any]) -> float:
    """Return the relative L2 distance to the reference."""
    return float(numpy.linalg.norm(ours - reference) / numpy.linalg.norm(reference))


def table(rows: Sequence[Sequence[str]], *, header: bool) -> str:
    """Lay out rows in columns of fixed width."""
    widths = [max(len(FIRST.label), len(COLUMNS[0])), 9, 5, 7, 7, 14, 6, 10]
    lines = [COLUMNS, *rows] if header else rows
    cells = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines]
    return "\n".join(map("  ".join, cells))


def say(text: str) -> None:
    """Tell the user what is going on."""
    print(f"[demo] {text}", flush=True)


def main() -> int:
    """Run the demo that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    Demo(Path(os.environ["WARMGRAPH_HOST"]), folder, cpu=options.cpu).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
