"""The builder with real worker processes that do other work (`builder_worker.py`)."""
