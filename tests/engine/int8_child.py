"""A fresh process: boots the host, takes the graphs of int8 products from a lab, and calls them.

`python int8_child.py HOST BASE LAB DTYPE...`: prints what it saw as a line of JSON, the last one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from processes import import_tests  # a script: its folder is on the path


def main() -> None:
    """See the graph of each dtype, and build none."""
    tree, base, root = map(Path, sys.argv[1:4])
    names = sys.argv[4:]
    import_tests()
    import torch
    from engine_tests.int8_graph import seen
    from engine_tests.lab import Lab

    from warmgraph_tools import inprocess

    inprocess.boot(tree, base)
    lab = Lab(root)
    found = {name: seen(lab, getattr(torch, name), build=False) for name in names}
    lab.engine.close()
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main()
