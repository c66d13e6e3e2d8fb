"""Import the real host's model code into a script's process: no server, no custom nodes."""

from __future__ import annotations

import sys
from pathlib import Path


def import_host(tree: Path, *, cpu: bool) -> None:
    """Import the host from `tree`, with PyTorch's attention, and register the denoiser's class.

    Replaces the first entry of sys.path, which is the pack's root in `python -m`: its `nodes` would
    hide the host's.

    Args:
        cpu: leave a GPU alone.
    """
    sys.path[0] = str(tree)
    import comfy.options

    comfy.options.enable_args_parsing(False)
    from comfy.cli_args import args

    args.cpu = cpu  # before comfy.model_management is imported
    args.use_pytorch_cross_attention = True
    from . import arch  # noqa: F401  registers by being imported
