"""A process of a newer host: decodes by a small H3 video VAE, beside eager.

`python newer_vae_child.py TREE BASE LAB FORMAT...`: prints what it saw as a line of JSON, the last
one; a FORMAT is that of the decoder's weights, "plain" for none.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from processes import import_tests  # a script: its folder is on the path

#: [frames, height, width] of a latent.
SIZES = ((1, 3, 2), (2, 5, 4), (7, 4, 2))


def main() -> None:
    """Decode every size in each format."""
    tree, base, root = map(Path, sys.argv[1:4])
    names = sys.argv[4:]
    import_tests()
    import torch
    from engine_tests.lab import Lab

    from warmgraph_tools import inprocess

    inprocess.boot(tree, base)
    lab = Lab(root)
    with torch.inference_mode():  # as a prompt loads and decodes
        seen = {name: _seen(lab, name) for name in names}
    lab.engine.close()
    print(json.dumps(seen))  # noqa: T201


def _seen(lab: Any, name: str) -> dict[str, Any]:
    from comfy.ldm.minimax import vae as host
    from engine_tests.lab import relative
    from engine_tests.test_video_vae import latent

    from warmgraph_tools.quantised import quantised
    from warmgraph_tools.small_vaes import h3_weights, load_h3

    weights = h3_weights() if name == "plain" else quantised(h3_weights(), name)
    plain = load_h3(weights)
    vae = lab.engine.compile_vae(plain, when_missing="wait")
    vae.decode(latent(2, 2, 2, channels=24))
    jobs, errors = lab.jobs(), []
    for size in SIZES:
        samples = latent(*size, channels=24)
        eager = plain.decode(samples)
        errors.append(relative(vae.decode(samples), eager))
    report = lab.engine.report(vae)
    host.FEW_BITS = False
    exact = relative(plain.decode(samples), eager)
    host.FEW_BITS = True
    return {
        "errors": errors,
        "exact": exact,
        "jobs": lab.jobs() - jobs,
        "regions": report["regions"],
        "reasons": sorted({entry["reason"] for entry in report["eager"]}),
    }


if __name__ == "__main__":
    main()
