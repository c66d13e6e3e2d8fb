"""A worker of a build farm whose build process does other work (`builder_worker.py`):
`farm_worker.py [--backends FOLDER] SCHEDULER --name NAME`.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backends", type=Path, default=TESTS.parents[1] / "backends")
    parser.add_argument("scheduler")
    parser.add_argument("--name")
    options = parser.parse_args()
    sys.path.insert(0, str(options.backends / "worker"))
    from main import adopt_package

    adopt_package()
    from warmgraph_backends.building.farm_worker import serve

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    script = TESTS / "builder_worker.py"
    ended = serve(options.scheduler, TESTS, name=options.name, say=print, script=script)
    sys.exit(ended)


if __name__ == "__main__":
    main()
