"""ComfyUI on a machine without a card, deciding as on one: for `prebuild --target`.

python pretended_host.py sm_90 COMFYUI/main.py FLAGS OF COMFYUI
"""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path

PACK = Path(__file__).resolve().parents[1]


def main() -> None:
    """Pretend, then run ComfyUI in this process, with its folder in place of this script's."""
    target, script, *flags = sys.argv[1:]
    sys.path[0] = str(PACK / "backends" / "worker")
    importlib.import_module("main").adopt_package()
    del sys.modules["main"]  # ComfyUI has one, too
    importlib.import_module("warmgraph_backends.torch_api.cuda_pretended").pretend(target)
    sys.path[0] = str(Path(script).parent)
    sys.argv = [script, *flags]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
