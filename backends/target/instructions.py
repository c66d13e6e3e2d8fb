"""The processor's instructions that generated code may use, without importing PyTorch.

Inductor's compilers use those that it names (torch/_inductor/cpu_vec_isa.py of torch 2.10-2.15), on
x86 no others (`torch_api.compiling.use_named_instructions`), and at most what the processor has.
"""

from __future__ import annotations

import ctypes
import platform
import re
import sys
from functools import cache
from typing import Any

from ..reasons import of

IS_X86 = platform.machine() in ("x86_64", "AMD64")
#: What Inductor names on x86, as Linux spells it.
_NAMED = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512dq",
    "avx512vl",
    "avx512bw",
    "avx512_vnni",
    "avx512_bf16",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "amx_fp16",
)
#: What people call them, the newest first.
_LEVELS = {"amx_tile": "AMX", "avx512f": "AVX-512", "avx2": "AVX2"}
_OLDEST = of("basic_instructions")
#: Of Windows: PF_AVX2_INSTRUCTIONS_AVAILABLE and PF_AVX512F_INSTRUCTIONS_AVAILABLE.
_WINDOWS = {"avx2": 40, "avx512f": 41}
_FACTS = "/proc/cpuinfo"
_LINE = re.compile(r"(?:flags|features|cpu)\s*:(.*)", re.IGNORECASE)


@cache
def instructions() -> str:
    """Return the names of the instructions for this machine's processor, in one line."""
    there = _there()
    return " ".join(name for name in (_NAMED if IS_X86 else sorted(there)) if name in there)


def shortly(instructions: str, others: str) -> str:
    """Return the common names of instructions, so that a difference from others shows."""
    level = _level(instructions)
    more = sorted({*instructions.split()} - {*others.split()})
    if more and level == _level(others):
        return of("level_with", level=level, more=", ".join(more))
    return level


def _level(instructions: str) -> str:
    names = instructions.split()
    return next((level for name, level in _LEVELS.items() if name in names), _OLDEST)


def _there() -> set[str]:
    """The first processor's instructions; nothing if the system does not say."""
    if sys.platform == "win32":
        kernel: Any = ctypes.WinDLL("kernel32")
        has = kernel.IsProcessorFeaturePresent
        return {name for name, number in _WINDOWS.items() if has(number)}
    try:
        with open(_FACTS, encoding="utf-8", errors="replace") as file:
            found = next(filter(None, map(_LINE.match, file)), None)
    except OSError:  # a system without
        return set()
    return {*found[1].split()} if found is not None else set()
