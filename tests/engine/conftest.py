"""An engine over the real host in this process, with graphs built once for all tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from warmgraph_tools.inprocess import Host

from .lab import Lab, relative
from .probed import Probed

__all__ = ["Lab", "relative"]


class FirstPrompt(NamedTuple):
    """What the first prompt of a store gave, in the background and at cfg 1."""

    image: torch.Tensor
    eager: torch.Tensor
    report: dict[str, Any]


@pytest.fixture(scope="session")
def lab(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """The shared engine: what one test builds, the next one finds.

    WARMGRAPH_TEST_LAB names a folder that keeps its graphs between two runs of the tests.
    """
    root = Path(os.environ.get("WARMGRAPH_TEST_LAB") or tmp_path_factory.mktemp("lab"))
    lab = Lab(root)
    yield lab
    lab.engine.close()


@pytest.fixture(scope="session")
def first_prompt(lab: Lab, host: Host) -> FirstPrompt:
    """The first prompt ever: 64x64 latent, batch 1, cfg 1, eager while its graphs are being built."""
    model, clip, _ = host.load("narrowxl")
    prompt = host.encode(clip, "a cat")
    options = dict(width=512, height=512, batch=1, steps=1, cfg=1.0)
    eager = host.sample(model, prompt, prompt, **options)
    compiled = lab.compiled(model, when_missing="background")
    image = host.sample(compiled, prompt, prompt, **options)
    report = lab.engine.report(compiled)
    lab.wait_until(lambda: not lab.engine.report(compiled)["misses"])
    return FirstPrompt(image, eager, report)


@pytest.fixture(scope="session")
def probed(lab: Lab, host: Host, first_prompt: FirstPrompt) -> Probed:
    """The compiled narrow SDXL that tests share."""
    return Probed(lab, host)


@pytest.fixture
def make_lab(lab: Lab, first_prompt: FirstPrompt, tmp_path: Path) -> Iterator[Callable[..., Lab]]:
    """`make_lab(without=[...], empty=False)`: an engine as a new process has it, with its own store.

    The store is a copy of the shared one less the kinds in `without`; `empty` has another signing
    key as well.
    """
    made: list[Lab] = []

    def make(*, without: tuple[str, ...] = (), empty: bool = False) -> Lab:
        root = tmp_path / f"lab{len(made)}"
        new = Lab(root) if empty else lab.copy_to(root)
        made.append(new)
        for path in list(new.store.glob("*.safetensors")):
            manifest, _ = new.engine._store.read_manifest(path)
            if manifest["kind"] in without:
                path.unlink()
        return new

    yield make
    for each in made:
        each.engine.close()
