"""`doctor` checks all that compiling needs on this machine: a line each, ok or what to do."""

from __future__ import annotations

import platform
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from warmgraph_backends.sessions.settings import Settings

from . import nameless, windows
from .asked import ask
from .embedded import headers
from .fleet import fleet
from .kept import GIB, PRIVATE, beside_workflows, leftovers, signing_key, store
from .line import Line
from .output import say

PACK = Path(__file__).resolve().parents[1]
_ELSE = "without that every model runs at normal speed"


class Places(NamedTuple):
    """The folders on this machine.

    Attributes:
        base: ComfyUI's base folder, with `models`.
        user: its user folder.
        store: the shared store of graphs.
        comfyui: the folder with ComfyUI's own code.
    """

    base: Path
    user: Path
    store: Path
    comfyui: Path


def doctor(places: Places, device: str, saved: Path | None = None) -> int:
    """Check everything, and print each result at once.

    Args:
        places: where to look; nothing is changed there.
        device: "cuda", "cpu" or "auto": what PyTorch has here.
        saved: the file that gets what was said of the machine, without names; None: none does.

    Returns:
        0 when all is well, 1 when anything needs the user.
    """
    to_do, texts = 0, []
    for line, is_of_machine in _lines(places, device):
        text = f"{'ok   ' if line.ok else 'TO DO'}  {line.name}: {line.text}"
        say(text)
        to_do += not line.ok
        if is_of_machine:
            texts.append(text)
    if saved is not None:
        names = nameless.of_machine({PACK: "<warmgraph>", places.comfyui: "<ComfyUI>"})
        saved.write_text(nameless.text("\n".join(texts), names) + "\n", "utf-8")
        say(f"ok     {saved}: holds what was said of this machine, without names")
    say("all is well" if not to_do else f"{to_do} {'thing' if to_do == 1 else 'things'} to do")
    return 1 if to_do else 0


def _lines(places: Places, device: str) -> Iterator[tuple[Line, bool]]:
    """Each result, and whether it is one of the machine; others are of what a user keeps there."""
    for line in _of_machine(places, device):
        yield line, True
    for line in _of_kept(places):
        yield line, False


def _of_machine(places: Places, device: str) -> Iterator[Line]:
    yield Line("Warmgraph", True, f"{_version()} in {PACK}")
    yield Line("Python", True, f"{platform.python_version()}, {platform.platform()}")
    yield from headers(Path(sys.executable).parent, platform.python_version())
    if sys.platform == "win32":
        yield from windows.lines(windows.look())
    with tempfile.TemporaryDirectory(prefix="warmgraph-doctor-") as folder:
        graph = Path(folder, "graph")
        facts, died = ask("torch", device, str(graph), limit_s=600.0)
        yield from _torch(facts, died)
        if graph.exists():
            yield _replayed(facts, *ask("graph", facts["device"], str(graph), limit_s=300.0))
    yield from _host(places, device=facts.get("device", "cpu"))
    yield from _vram(places.user, facts.get("gpus", []))


def _of_kept(places: Places) -> Iterator[Line]:
    yield signing_key(places.user)
    yield from fleet(places.user / PRIVATE)
    yield from store(places.store, places.user)
    yield from beside_workflows(places.user)
    yield leftovers(places.user)


def _version() -> str:
    try:
        text = (PACK / "pyproject.toml").read_text("utf-8")
    except OSError:
        return "version unknown"
    found = re.search(r'^version = "([^"]+)"', text, re.MULTILINE)
    return found[1] if found else "version unknown"


def _torch(facts: dict[str, Any], died: str | None) -> Iterator[Line]:
    """PyTorch, the GPU, the backend's requirements, and a graph compiled and run."""
    if "torch" not in facts:
        why = facts.get("no torch") or died or "it says nothing"
        remedy = "run this with the Python that runs ComfyUI"
        yield Line("PyTorch", False, f"{sys.executable} cannot use it: {why}; {remedy}")
        return
    gpus = facts["gpus"]
    for requirement in facts["requirements"]:
        name, met, reason, remedy, detail = requirement
        yield Line(name, met, detail if met else f"{reason}; {remedy}")
    for name, gpu, is_first in _named("GPU", gpus):
        if "problem" in gpu:
            remedy = "end what else uses it, or hide it with CUDA_VISIBLE_DEVICES"
            text = f"{gpu['name']} cannot be used now ({gpu['problem']}); {remedy}"
            yield Line(name, not is_first, text)
            continue
        yield Line(name, True, f"{gpu['name']}, {gpu['total'] / GIB:.1f} GiB, {gpu['capability']}")
        yield from (Line("attention", True, text) for text in gpu["attention"] if is_first)
    if not gpus and facts["driver"]:
        remedy = "install a PyTorch with CUDA (pytorch.org), or look whether the driver is too old"
        yield Line("GPU", False, f"there is one, but this PyTorch cannot use it; {remedy}")
    elif not gpus and facts["device"] == "cpu":
        yield Line("GPU", True, "no NVIDIA one; models are compiled for the processor")
    if facts["device"] == "cpu":
        yield Line("Triton", True, f"{facts['triton'] or 'none'}; only GPUs need it")
    elif facts.get("cpp"):
        yield Line("C++ compiler", True, f"{facts['cpp']}; only processors need it")
    if not all(met for _, met, *_ in facts["requirements"]):
        return  # nothing can be compiled
    yield from (Line(name, False, f"{why}; {mend}") for name, why, mend in facts["doubts"])
    if "built" not in facts:
        yield Line("a small compiled graph", False, f"compiling it ended the process: {died}")
        return
    problem, seconds = facts["built"]
    good = f"compiled for {facts['device']}, packed, loaded and run in {seconds} s"
    yield Line("a small compiled graph", not problem, f"{problem}; {_ELSE}" if problem else good)


def _replayed(built: dict[str, Any], facts: dict[str, Any], died: str | None) -> Line:
    """The same graph in a process that has not compiled it."""
    problem, seconds = facts.get("replayed", (f"it ended the process: {died}", 0.0))
    good = f"loaded, run and, as a CUDA graph, replayed in {seconds} s, with the right results"
    if built["device"] == "cpu":
        good = f"loaded and run in {seconds} s, with the right results; no card was tried"
    return Line(
        "the same one in a new process", not problem, f"{problem}; {_ELSE}" if problem else good
    )


def _host(places: Places, device: str) -> Iterator[Line]:
    if not (places.comfyui / "comfy").is_dir():
        yield Line("ComfyUI", False, f"not found in {places.comfyui}; name it with --comfyui")
        return
    facts, died = ask("host", str(places.comfyui), device, limit_s=300.0)
    if "version" not in facts:
        remedy = "start ComfyUI itself and see what it says"
        yield Line("ComfyUI", False, f"{places.comfyui} cannot be imported: {died}; {remedy}")
        return
    lacking = facts["missing"]
    yield Line("ComfyUI", True, f"{facts['version']} in {places.comfyui}")
    if not lacking:
        yield Line("ComfyUI's insides", True, "all that Warmgraph uses is there")
    for feature, reason in sorted(lacking.items()):
        remedy = "look for a newer version of Warmgraph, or use an older ComfyUI"
        yield Line("ComfyUI's insides", False, f"{feature}: off, for {reason}; {remedy}")


def _named(what: str, gpus: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Each card with its line's name, numbered if there are several, and whether it is the first
    one: problems of the others do not count as errors.
    """
    for number, gpu in enumerate(gpus):
        yield what if len(gpus) == 1 else f"{what} {number}", gpu, number == 0


def _vram(user: Path, gpus: list[dict[str, Any]]) -> Iterator[Line]:
    """How much of each card captured calls may take."""
    share = Settings(user / PRIVATE).captured_vram_share if gpus else 0.0
    remedy = "end what else uses the card, or lower captured_vram_percent in the settings"
    for name, gpu, is_first in _named("VRAM", gpus):
        if "problem" in gpu:
            continue
        budget, free = share * gpu["total"], gpu["free"]
        text = f"{share:.0%} of the card ({budget / GIB:.1f} GiB) for CUDA graphs"
        text += f", {free / GIB:.1f} GiB are free now"
        if not share:
            text = "the settings give none to CUDA graphs, so no step is captured"
        fits = free >= budget
        yield Line(name, fits or not is_first, text if fits else f"{text}; {remedy}")
