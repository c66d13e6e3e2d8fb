"""`python -m dev.benchmarks`: see `run.py`."""

from .run import main

raise SystemExit(main())
