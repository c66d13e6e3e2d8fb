"""A graph that was built on Linux for a card, taken up by Windows' Python under Wine.

It is run there with two arguments, the file and the folder of the key that signed it. Neither a
driver nor a PyTorch for GPUs is there, so the loading of a kernel has a stand-in, which asks of a
kernel what a driver does: a file by its path, with code for the card.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .windows import Wine

CARD = "sm_89"


def build(wine: Wine) -> tuple[Path, Path]:
    """Build a block of Flux 1 for a card on this system; return its file and the key's folder."""
    from .setup import ROOT, SetupError

    folder = wine.home / "card"
    shutil.rmtree(folder, ignore_errors=True)
    ours, private = folder / "ours", folder / "private"
    ours.mkdir(parents=True)
    child = ROOT / "tests" / "compile" / "pretended_child.py"
    of_triton = {"TRITON_CACHE_DIR": str(ours / "t"), "TRITON_DISABLE_LINE_INFO": "1"}
    done = subprocess.run(
        [sys.executable, str(child), str(wine.tree), str(folder / "store"), str(private), CARD],
        env={**os.environ, **of_triton, "WARMGRAPH_WORKER": str(ours), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SetupError(f"no graph could be built for {CARD}:\n{done.stderr[-2000:]}")
    return Path(json.loads(done.stdout.splitlines()[-1])["file"]), private


class _Driver:
    """In place of `torch._C._StaticCudaLauncher`, which PyTorch for processors lacks."""

    def __init__(self) -> None:
        self.loaded: list[str] = []

    def _load_kernel(self, path: str, name: str, _shared: int, _card: int) -> tuple[int, int, int]:
        binary = Path(path).read_bytes()
        assert binary.startswith(b"\x7fELF") and name.encode() in binary, name
        assert CARD.encode() in binary, name
        self.loaded.append(name)
        return len(self.loaded), 32, 0

    def _launch_kernel(self, *_: Any) -> None:
        raise AssertionError("there is no card")


def take_up(file: Path, private: Path) -> list[str]:
    """Read, verify and unpack a file; return its kernels' names."""
    import torch
    from by_path import load_ours

    load_ours("backends")
    importlib.import_module("warmgraph_backends.runtime.region")  # brings what graphs call
    loading: Any = importlib.import_module("warmgraph_backends.torch_api.loading")
    from warmgraph_backends.compilers.registry import backend_named
    from warmgraph_backends.storing.graph_file import read_graph
    from warmgraph_backends.storing.signing import Signer
    from warmgraph_backends.target.compiler_options import inductor_fingerprint
    from warmgraph_backends.target.target import TorchFacts, compose_target, explain_target

    manifest, payload, *_ = read_graph(file, Signer(private))
    made_for = manifest.target
    # As this Python and system say it of PyTorch's build for such a card.
    of_torch = TorchFacts(
        version=made_for["torch"],
        git_version=made_for["torch_source"],
        cuda=made_for["cuda"],
        deterministic=made_for["deterministic"],
        capability=made_for["capability"],
    )
    fingerprint = inductor_fingerprint("cuda", importlib.import_module("triton").__version__)
    here = compose_target("cuda", made_for["backend"], fingerprint, of_torch)
    # Python's bytecode names the host's functions: a graph is of a Python, too.
    there = made_for["python"]
    assert explain_target({**made_for, "python": here["python"]}, here) == [], (made_for, here)
    assert there == here["python"] or len(explain_target(made_for, here)) == 1
    driver = _Driver()
    names = {"_StaticCudaLauncher": driver, "_cuda_getCurrentRawStream": lambda _card: 0}
    for name, value in names.items():
        setattr(torch._C, name, value)
    loading.in_use = lambda _card: contextlib.nullcontext()
    backend_named(made_for["backend"]).load(payload, card=0)
    return driver.loaded


if __name__ == "__main__":
    print(json.dumps(take_up(Path(sys.argv[1]), Path(sys.argv[2]))))
