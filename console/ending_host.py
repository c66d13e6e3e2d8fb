"""ComfyUI that ends as Ctrl+C has it end once its standard input is closed: for Windows, where a
process without a console receives no Ctrl+C, and no other process of one ends with clean-up.

python ending_host.py [SCRIPT ARGUMENTS] COMFYUI/main.py FLAGS OF COMFYUI
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path

#: Until it is told again, in case Python lost it, as an exception in a callback.
_AGAIN_S = 20.0


def main() -> None:
    """Run the script in this process, with its folder in place of this one's."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=_end_with_the_pipe, name="warmgraph-ending", daemon=True).start()
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


def _end_with_the_pipe() -> None:
    while os.read(0, 1):
        pass
    while True:
        signal.raise_signal(signal.SIGINT)
        time.sleep(_AGAIN_S)


if __name__ == "__main__":
    main()
