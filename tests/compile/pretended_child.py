"""Compile one block of a small Flux 1 as a worker does for a card that is not there, and put it
into a store. Arguments: the ComfyUI tree, the store, the private folder, a target. Prints JSON.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT / "dev" / "tools")
from by_path import load_ours  # noqa: E402

sys.path.pop(0)


#: Paths of all that this process opens, makes or moves.
_paths: set[str] = set()


def _note(event: str, given: tuple[Any, ...]) -> None:
    if event in ("open", "os.mkdir", "os.rename"):
        _paths.update(os.fspath(each) for each in given[:2] if isinstance(each, (str, Path)))


def _below(folder: str) -> list[str]:
    """Those in a folder, without it."""
    return [path[len(folder) :] for path in _paths if path.startswith(folder)]


def main(tree: str, store: str, private: str, target: str) -> None:
    """Pretend, then do what a worker and its server do."""
    sys.addaudithook(_note)
    load_ours("backends", "tools")
    build = importlib.import_module("warmgraph_backends.worker.build")
    spool = Path(private, "spool")
    spool.mkdir(parents=True)
    build.prepare({"argv": ["main.py"], "host": tree, "spool": str(spool), "pretended": target})
    import torch
    from comfy import model_management

    from warmgraph_backends.building.contract import BuildResult
    from warmgraph_backends.compilers.registry import backend_named
    from warmgraph_backends.device import gpu
    from warmgraph_backends.families.catalogue import plan_model
    from warmgraph_backends.graphs.compiled_graph import CompiledGraph, manifest_of, validate_result
    from warmgraph_backends.plans.specs import describe_place
    from warmgraph_backends.storing.graph_file import compress_payload
    from warmgraph_backends.storing.signing import Signer
    from warmgraph_backends.storing.store import Store
    from warmgraph_backends.target import keys
    from warmgraph_tools import small_transformers

    model = small_transformers.make("flux1", dtype=torch.bfloat16)
    plan = plan_model(model.diffusion_model)
    place = next(place for place in plan.places if place.form.name == "single")
    description = describe_place(place, plan, dtype=torch.bfloat16, device="cuda")
    backend = backend_named("inductor")
    graph = CompiledGraph(
        keys.graph_key(description, keys.target("cuda", backend)), description, backend
    )
    task = {"key": graph.key, "description": description.to_dict(), "backend": "inductor"}
    began = time.monotonic()
    payload, said = build.run(task, measure=contextlib.nullcontext)
    result = BuildResult(graph.key, compress_payload(payload), said, time.monotonic() - began)
    facts, seconds = validate_result(graph, result)
    signer = Signer(Path(private))
    kept = Store(Path(store), signer, cap_bytes=lambda: 1 << 30, private=Path(private))
    path = kept.put(manifest_of(graph, facts, seconds), result.payload)
    device = model_management.get_torch_device()
    kernels = backend.describe_payload(payload).kernels
    sys.stdout.write(
        json.dumps(
            {
                "file": str(path),
                "seconds": round(seconds, 1),
                "checks": said["checks"],
                "says_where": os.environ["WARMGRAPH_WORKER"].encode() in payload,
                "kernels": len(kernels),
                "names": [kernel.name for kernel in kernels],
                "pid": os.getpid(),
                "paths": _below(os.environ["WARMGRAPH_WORKER"]),
                "pretended": gpu.pretended(),
                "fp8": model_management.supports_fp8_compute(device),
                "bf16": model_management.should_use_bf16(device),
                "nvfp4": model_management.supports_nvfp4_compute(device),
                "initialised": torch.cuda.is_initialized(),
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
