"""A fresh process: runs a small transformer that nobody described over a store.

`python learned_child.py HOST BASE LAB KIND`: prints what it saw as a line of JSON, the last one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from processes import import_tests  # a script: its folder is on the path


def main() -> None:
    """Sample three times: watched, compared, compiled."""
    tree, base, root = map(Path, sys.argv[1:4])
    (kind,) = sys.argv[4:]
    import_tests()
    import torch
    from engine_tests.lab import Lab
    from engine_tests.learned_serving import CALLS, Served

    from warmgraph_tools import inprocess

    host = inprocess.boot(tree, base)
    lab = Lab(root)
    with torch.inference_mode():
        served = Served(host, lab, kind, when_missing="wait")
        seen = [served.run(CALLS[0]) for _ in range(3)]
    lab.engine.close()
    calls, errors = zip(*seen, strict=True)
    result = {"calls": calls, "errors": errors, "jobs": lab.jobs(), "builds": lab.builds()}
    print(json.dumps(result))  # noqa: T201


if __name__ == "__main__":
    main()
