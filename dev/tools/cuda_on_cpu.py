"""Our CUDA source on a processor, with its system's C++ compiler: the very text that a GPU runs,
for what it computes, not for how quick it is.

Blocks run one after another, and their threads by turns (`cuda_on_cpu.h`). A warp whose threads do
not all come to a shuffle is an error, as are threads that do not come to a barrier. What of CUDA
other source needs is added to that header. On Linux alone.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

_HEADER = Path(__file__).with_suffix(".h")
#: Products and sums are each rounded, unless the source says otherwise.
_OPTIONS = ("-std=c++17", "-O2", "-w", "-shared", "-fPIC", "-ffp-contract=off")
#: `asm("NAME %0, %1;" : "=f"(RESULT) : "f"(OPERAND));`
_INSTRUCTION = re.compile(r'asm\("([\w.]+) %0, %1;" : "=\w"\((\w+)\) : "\w"\((.+?)\)\);')


def compile_cuda(source: str, name: str) -> Callable[[int, int, Sequence[Any]], None]:
    """Compile a kernel and return what launches it, with tensors of the processor.

    Args:
        source: CUDA C++ that includes nothing; the kernel is `extern "C"`.

    Raises:
        RuntimeError: the compiler refuses it.
    """
    run = _compiled(source, name)

    def launch(blocks: int, threads: int, arguments: Sequence[Any]) -> None:
        slots = (ctypes.c_uint64 * len(arguments))()
        for n, argument in enumerate(arguments):
            slots[n] = argument.data_ptr() if hasattr(argument, "data_ptr") else int(argument)
        first = ctypes.addressof(slots)
        places = (ctypes.c_void_p * len(arguments))(*(first + 8 * n for n in range(len(arguments))))
        if threads % 32 or not 0 < threads <= 1024:
            raise RuntimeError(f"{name} is to have whole warps, up to 1024 threads, got {threads}")
        if run(blocks, threads, places):
            raise RuntimeError(f"threads of {name} wait for others that do not come")

    return launch


@cache
def _compiled(source: str, name: str) -> Any:
    found = re.search(rf'extern "C" __global__ [^;{{]*?\b{name}\(([^)]*)\)', source)
    if found is None:
        raise RuntimeError(f'there is no extern "C" kernel {name}')
    types = [parameter.rpartition(" ")[0] for parameter in found[1].split(",")]
    arguments = ", ".join(f"*(({type.strip()}*)places[{n}])" for n, type in enumerate(types))
    code = "\n".join(
        (
            f'#include "{_HEADER}"',
            _INSTRUCTION.sub(_as_function, source),
            "static void** places;",
            f"static void body() {{ {name}({arguments}); }}",
            'extern "C" int run(int blocks, int threads, void** given) {',
            "    places = given;",
            "    return turns::run(blocks, threads, body);",
            "}",
        )
    )
    compiler = os.environ.get("CXX", "c++")
    with tempfile.TemporaryDirectory() as folder:
        file, library = Path(folder, f"{name}.cpp"), Path(folder, f"{name}.so")
        file.write_text(code)
        ran = subprocess.run(
            [compiler, *_OPTIONS, file, "-o", library], capture_output=True, text=True, check=False
        )
        if ran.returncode:
            raise RuntimeError(f"{compiler} refuses {name}: {ran.stderr[:2000]}")
        return ctypes.CDLL(str(library)).run


def _as_function(found: re.Match[str]) -> str:
    name, result, operand = found.groups()
    return f"{result} = ptx_{name.replace('.', '_')}({operand});"
