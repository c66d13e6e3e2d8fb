"""`python -m benchmarks`: see `run.py`."""

from .run import main

raise SystemExit(main())
