"""What development needs and users do not: set-up, servers, small checkpoints, the demo."""

import sys

from .by_path import ROOT, load

if "warmgraph_console" not in sys.modules:  # servers of tests are those that users start there
    load("warmgraph_console", ROOT / "console")
