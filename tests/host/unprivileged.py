"""unprivileged.py PROGRAM ARGUMENT ...: run a Python program to which files say who may read and
write them, also where root runs it.
"""

import ctypes
import os
import sys

_SET_SECUREBITS, _NO_ROOT = 28, 0b11  # PR_SET_SECUREBITS, SECBIT_NOROOT and its lock

if __name__ == "__main__":
    if sys.platform == "linux" and os.geteuid() == 0:
        done = ctypes.CDLL(None, use_errno=True).prctl(_SET_SECUREBITS, _NO_ROOT, 0, 0, 0)
        if done != 0:
            print("root stays root here:", os.strerror(ctypes.get_errno()), flush=True)  # noqa: T201
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
