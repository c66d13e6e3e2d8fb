"""unprivileged.py PROGRAM ARGUMENT ...: run a Python program to which files say who may read and
write them, also where root runs it and may let go of its rights.
"""

import ctypes
import os
import sys

_SET_SECUREBITS, _NO_ROOT = 28, 0b11  # PR_SET_SECUREBITS, SECBIT_NOROOT and its lock

if __name__ == "__main__":
    if sys.platform == "linux" and os.geteuid() == 0:
        ctypes.CDLL(None).prctl(_SET_SECUREBITS, _NO_ROOT, 0, 0, 0)
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
