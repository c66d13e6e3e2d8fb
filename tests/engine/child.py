"""A fresh process: boots the host, compiles a narrow SDXL over a store, samples under a probe.

`python child.py HOST BASE LAB`: prints what it saw as a line of JSON, the last one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from processes import import_tests  # a script: its folder is on the path


def main() -> None:
    """Describe a real-size SDXL before anything is warm, then run a user's first prompt."""
    tree, base, root = map(Path, sys.argv[1:])
    import_tests()
    from engine_tests.lab import Lab
    from engine_tests.probed import Probed

    from warmgraph_tools import inprocess

    host = inprocess.boot(tree, base)
    lab = Lab(root)
    result: dict[str, Any] = {"describe": _describe_sdxl(lab), "hash": hash("warmgraph")}
    model = Probed(lab, host, when_missing="never")
    lab.settle()
    model.check(size=(45, 60), cfg=1.0)
    model.check(size=(8, 8), batch=3, steps=2)
    report = model.report()
    lab.engine.close()
    result |= {
        "keys": sorted(kind["key"] for kind in report["kinds"]),
        "builds": report["builds"],
        "loads": report["loads"],
        "eager": report["regions"]["eager"],
    }
    print(json.dumps(result))  # noqa: T201


def _describe_sdxl(lab: Any) -> list[dict[str, Any]]:
    """Calls of functions that describing SDXL's UNet takes, without weights: cold, and again."""
    import cProfile
    import pstats

    import torch
    from comfy import supported_models

    from warmgraph_backends.compilers.registry import backend_named
    from warmgraph_backends.families.catalogue import plan_model
    from warmgraph_backends.runtime.planner import Planner
    from warmgraph_backends.runtime.scope import Scope

    sdxl = supported_models.SDXL(
        {
            **supported_models.SDXL.unet_config,
            "image_size": 32,
            "in_channels": 4,
            "out_channels": 4,
            "num_res_blocks": [2, 2, 2],
            "channel_mult": [1, 2, 4],
            "transformer_depth": [0, 0, 2, 2, 10, 10],
            "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10],
            "transformer_depth_middle": 10,
            "num_head_channels": 64,
            "num_heads": -1,
            "legacy": False,
            "use_spatial_transformer": True,
            "num_classes": "sequential",
        }
    )
    sdxl.unet_config["dtype"] = torch.float32
    model = sdxl.get_model({}, device="meta")
    engine = lab.engine
    measured = []
    for _ in range(2):
        profile = cProfile.Profile()
        profile.enable()
        plan = plan_model(model.diffusion_model)
        scope = Scope(
            model.diffusion_model,
            model,
            Planner(lambda _, plan=plan: plan),
            plan,
            backend_named("inductor"),
            engine._shared,
        )
        scope.describe(torch.device("cpu"), torch.float32)
        profile.disable()
        calls = pstats.Stats(profile).total_calls
        measured.append({"calls": calls, "kinds": len(scope.kinds), "places": len(plan.places)})
    return measured


if __name__ == "__main__":
    main()
