"""How this process runs the host, and how a worker imports it alike.

Relies on the host's `comfy/options.py` and `comfy/cli_args.py`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from ..device.gpu import pretended


def host_arguments() -> dict[str, Any]:
    """Return what a worker needs to import the host as this process did."""
    import comfy

    return {
        "argv": _parsed_arguments(),
        "host": str(Path(next(iter(comfy.__path__))).parent),
        "cwd": os.getcwd(),
        "pretended": pretended(),
    }


def host_flags() -> list[str]:
    """Return the names of this process's command-line options, without values."""
    return sorted({word for word in _parsed_arguments() if word.startswith("--")})


def portable_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the `host_arguments` that decide how another machine computes: switches, `--fast`'s
    list, the pretended card. Folders, addresses and card numbers are this machine's.
    """
    from comfy.cli_args import args

    kept, listing = ["main.py"], False
    for word in arguments["argv"][1:]:
        if word.startswith("--"):
            listing = word == "--fast"
            if listing or getattr(args, word[2:].replace("-", "_"), None) is True:
                kept.append(word)
        elif listing:
            kept.append(word)
    return {"argv": kept, "pretended": arguments["pretended"]}


def import_host(argv: list[str], folder: str) -> None:
    """Import the host in a worker, with its parent's command line.

    Args:
        folder: of the ComfyUI tree.
    """
    sys.argv = list(argv)
    sys.path.insert(0, folder)
    import comfy.options

    comfy.options.enable_args_parsing()
    import comfy.ops


def _parsed_arguments() -> list[str]:
    """The command line that the host parsed, if any."""
    import comfy.options

    if comfy.options.args_parsing:
        return list(sys.argv)
    from comfy.cli_args import args

    flags = ["main.py"]
    if args.cpu:
        flags.append("--cpu")
    if args.use_pytorch_cross_attention:
        flags.append("--use-pytorch-cross-attention")
    return flags
