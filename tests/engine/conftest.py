"""An engine over the real host in this process, with graphs built once for all tests."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from warmgraph_backends.debugging import OFF, Debugging
from warmgraph_tools.inprocess import Host
from warmgraph_tools.kept_graphs import keeping

from .lab import TOLERANCE, Lab, relative
from .learned_steps import Steps
from .made_up import built_here
from .probed import Probed

__all__ = ["Lab", "relative"]


@pytest.fixture(scope="module", autouse=True)
def _short_collections() -> Iterator[None]:
    """Leave what is there already out of garbage collections: the host makes a full one before a
    run whenever the last clone that it sampled is gone.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Small models run quicker so; servers have all threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def lab(host: Host, run_folder: Path, built_once: Any) -> Iterator[Lab]:
    """The shared engine: what one test builds, the next one finds, in another process of the run as
    well.

    Its first prompt ever built what a narrow SDXL needs: in the background, with a 64x64 latent,
    batch 1 and cfg 1.
    """
    with keeping(run_folder / "lab"):
        with built_once.lock:
            lab = Lab(run_folder / "lab")
            lab.first_keys = _first_prompt(lab, host)
            built_once.note(lab.root, lab.first_keys)
        yield lab
        lab.engine.close()


@pytest.fixture(scope="module")
def own_lab(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """An engine of the file's own, with nothing built."""
    lab = Lab(tmp_path_factory.mktemp("own"))
    yield lab
    lab.engine.close()


@pytest.fixture
def learned_steps(
    models: Any, own_lab: Lab, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[[str], Steps]]:
    """Steps of one of a file's made-up `models`, by its name, as the file has them `BUILT`."""
    built = getattr(request.module, "BUILT", built_here)
    with torch.inference_mode():
        yield lambda name: Steps(own_lab, tmp_path, getattr(models, name), built)


@pytest.fixture(scope="session")
def shared(transformers_store: tuple[Path, FileLock]) -> Iterator[Lab]:
    """An engine for all small transformers: its workers start once, and graphs that it or another
    process of the run has built are found.
    """
    root, lock = transformers_store
    with lock:
        lab = Lab(root)
    yield lab
    lab.engine.close()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The log, from warnings on."""
    caplog.set_level(logging.WARNING)
    return caplog


@pytest.fixture
def multiplies_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load files as under --supports-fp8-compute: PyTorch has a product for processors, too."""
    from comfy import model_management

    monkeypatch.setattr(model_management, "SUPPORT_FP8_OPS", True)


def _first_prompt(lab: Lab, host: Host) -> list[str]:
    """Returns the keys of its graphs."""
    model, clip, _ = host.load("narrowxl")
    prompt = host.encode(clip, "a cat")
    size = {"width": 512, "height": 512, "batch": 1}
    eager = host.sample(model, prompt, prompt, cfg=1.0, steps=1, **size)
    compiled = lab.compiled(model, when_missing="background")
    image = host.sample(compiled, prompt, prompt, cfg=1.0, steps=1, **size)
    assert relative(image, eager) < TOLERANCE
    lab.wait_until(lambda: lab.is_settled(compiled))
    report = lab.engine.report(compiled)
    assert report["regions"]["eager"] == 0, report["misses"]
    return [kind["key"] for kind in report["kinds"]]


@pytest.fixture(scope="session")
def probed(lab: Lab, host: Host) -> Probed:
    """The compiled narrow SDXL that tests share."""
    return Probed(lab, host)


@pytest.fixture
def make_lab(lab: Lab, tmp_path: Path) -> Iterator[Callable[..., Lab]]:
    """`make_lab(without=(), empty=False, debugging=OFF)`: an engine as a new process has it.

    Its store is a copy of the shared one less the kinds in `without`; an `empty` one has a signing
    key of its own.
    """
    made: list[Lab] = []

    def make(
        *, without: tuple[str, ...] = (), empty: bool = False, debugging: Debugging = OFF
    ) -> Lab:
        root = tmp_path / f"lab{len(made)}"
        new = Lab(root, debugging) if empty else lab.copy_to(root, debugging)
        made.append(new)
        for path in list(new.store.glob("*.safetensors")):
            manifest = new.engine._store.read_manifest(path)
            if manifest.kind in without:
                path.unlink()
        return new

    yield make
    for each in made:
        each.engine.close()
