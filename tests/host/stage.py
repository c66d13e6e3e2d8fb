"""Shipped workflows on a real server, with and without our nodes."""

from __future__ import annotations

from typing import Any

import av
import numpy
from PIL import Image, ImageSequence

from warmgraph_console.convert import to_prompt
from warmgraph_tools import templates
from warmgraph_tools.host import Graph, Run, Server
from warmgraph_tools.templates import read

NAMES = sorted(templates.TEMPLATES)
STEPS = 2
OURS = (
    "WarmgraphCompileModel",
    "WarmgraphLoadCompiledGraph",
    "WarmgraphCompileControlNet",
    "WarmgraphCompileVAE",
)
#: What Save Video writes, with a loss.
FILM = ".mp4"


def nodes(name: str) -> list[dict[str, Any]]:
    """The nodes of a shipped workflow, those of its subgraphs included."""
    return templates.all_nodes(read(name))


def asked(name: str) -> set[str]:
    """The names of the model files that a workflow asks for."""
    return {model["name"] for node in nodes(name) for model in node["properties"].get("models", [])}


class Stage:
    """A server with the files that workflows ask for.

    Args:
        values: Inputs of nodes that are not as the workflows have them, by name.
    """

    def __init__(self, server: Server, **values: Any) -> None:
        self.server = server
        self.object_info = server.object_info()
        self.keys: set[str] = set()  # of all graphs that the workflows have had
        self._values = values
        self._seed = 0

    def prompt(self, name: str, *, seed: int, eager: bool = False, **values: Any) -> Graph:
        """A workflow's prompt with `seed`, few steps and these values."""
        workflow = read(name)
        for node in templates.all_nodes(workflow):
            if eager and node["type"] in OURS:
                node["mode"] = 4  # bypassed
            elif eager and node["type"] == "WarmgraphGraphReport":
                node["mode"] = 2  # muted
        prompt = to_prompt(workflow, self.object_info)
        for node in prompt.values():
            inputs = node["inputs"]
            changed = {"seed": seed, "noise_seed": seed, **self._values, **values}
            if "steps" in inputs:
                changed["steps"] = STEPS
                for end in ("start_at_step", "end_at_step"):  # of a part of all steps
                    if 0 < inputs.get(end, 0) < inputs["steps"]:
                        changed[end] = inputs[end] * STEPS // inputs["steps"]
            inputs.update({key: value for key, value in changed.items() if key in inputs})
        films = [node["inputs"] for node in prompt.values() if node["class_type"] == "CreateVideo"]
        for film in films:
            prompt.update(_as_they_are(film))
        return prompt

    def run(self, name: str, *, path: str | None = None, **values: Any) -> dict[str, Any]:
        """Run a workflow with and without our nodes on one new seed, and compare the pictures.

        Returns the model's report as it was when our run had ended.
        """
        return self.run_all(name, path=path, **values)[0]

    def run_all(
        self,
        name: str,
        *,
        path: str | None = None,
        within: tuple[float, float] = (3, 0.1),
        **values: Any,
    ) -> list[dict[str, Any]]:
        """As `run`; returns the reports of all that our nodes attached to, the models' first.

        Args:
            within: how far a pixel may be off at most, and all on average, of 255.
            values: of `prompt`.
        """
        self._seed += 1
        workflow = read(name)
        if path:  # what our page script adds to a saved workflow's prompt
            workflow["extra"]["warmgraph"] = {"path": path, "user": "default"}
        ours = self.server.run(self.prompt(name, seed=self._seed, **values), workflow=workflow)
        reports = self.server.model_reports(ours)
        reports.sort(key=lambda report: not report["id"].startswith("model-"))
        self.keys.update(kind["key"] for report in reports for kind in report["kinds"])
        said = [ui["text"][0] for ui in ours.outputs.values() if "text" in ui]
        assert len(said) == sum(node["type"] == "WarmgraphGraphReport" for node in nodes(name))
        assert all("parts compiled" in text for text in said)
        eager = self.server.run(self.prompt(name, seed=self._seed, eager=True, **values))
        self.assert_same_picture(ours, eager, within)
        return reports

    def pixels(self, run: Run) -> numpy.ndarray[Any, Any]:
        """All frames of the one picture or video that a run saved."""
        output = self.server.base / "output"
        saved = [file for file in self.server.files(run) if file.is_relative_to(output)]
        (file,) = (file for file in saved if file.suffix != FILM)
        frames = ImageSequence.Iterator(Image.open(file))
        return numpy.stack([numpy.asarray(frame.convert("RGB")) for frame in frames]).astype(
            numpy.int16
        )

    def sound(self, run: Run) -> numpy.ndarray[Any, Any] | None:
        """What is heard in the video that a run saved, None where it saved a picture."""
        for file in self.server.files(run, "audio"):
            with av.open(file) as sound:
                parts = [part.to_ndarray() for part in sound.decode(audio=0)]
            whole = numpy.concatenate(parts, axis=1)
            return whole / (numpy.iinfo(whole.dtype).max if whole.dtype.kind == "i" else 1.0)
        return None

    def film(self, run: Run) -> tuple[int, int]:
        """How many frames and how many sounds the one video has that a run saved."""
        (file,) = (file for file in self.server.files(run) if file.suffix == FILM)
        with av.open(file) as film:
            return sum(1 for _ in film.decode(video=0)), len(film.streams.audio)

    def assert_same_picture(
        self, ours: Run, eager: Run, within: tuple[float, float] = (3, 0.1)
    ) -> None:
        """Fail where two runs saved different pictures, or one of nothing."""
        a, b = self.pixels(ours), self.pixels(eager)
        assert a.shape == b.shape
        assert b.std() > 10  # something to see
        distance = numpy.abs(a - b)
        found = distance.max(), distance.mean()  # both are rounded to 8 bits
        assert found[0] <= within[0] and found[1] < within[1], found
        heard, expected = self.sound(ours), self.sound(eager)
        if heard is None or expected is None:
            assert heard is expected
            return
        assert self.film(ours) == self.film(eager) == (len(b), 1)
        assert heard.shape == expected.shape and expected.std() > 1e-3
        off = numpy.linalg.norm(heard - expected) / numpy.linalg.norm(expected)
        assert off <= within[0] / 255, off


def _as_they_are(film: dict[str, Any]) -> Graph:
    """Nodes that save a film's frames and sound without a loss, as Save Video cannot."""
    options = {"fps": 24.0, "lossless": True, "quality": 90, "method": "default"}
    frames = {"images": film["images"], "filename_prefix": "frames", **options}
    sound = {"audio": film["audio"], "filename_prefix": "sound"}
    return {
        "frames": {"class_type": "SaveAnimatedWEBP", "inputs": frames},
        "sound": {"class_type": "SaveAudio", "inputs": sound},
    }
