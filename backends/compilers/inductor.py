"""Compiler `inductor`: a graph of a region by torch's own compiler, for any size or for one.

https://docs.pytorch.org/docs/stable/torch.compiler.html
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..contract import INDUCTOR, Compiled, Measure, PayloadFacts, Program, Requirement
from ..device.kinds import CPU, KINDS
from ..errors import RequirementError
from ..reasons import NOTHING, of
from ..target.compiler_options import inductor_fingerprint
from ..torch_api import payload as payloads
from ..torch_api.version_files import constants_of
from .toolchain import cpp_compiler


class Inductor:
    """Compiles with `torch._inductor.standalone_compile`; kernels are Triton's on GPUs, C++ on
    CPUs.
    """

    name = INDUCTOR

    def requirements(self, device: str) -> Sequence[Requirement]:
        """Say what is missing here; never raises."""
        return [_torch(), *_of_device(device)]

    def needs_to_build(self, device: str) -> Sequence[Requirement]:
        """A C++ compiler, for processors' kernels; on GPUs the C compiler with which Triton
        compiles its launchers.
        """
        if device == CPU:
            return [cpp_compiler()]
        if sys.platform == "win32":  # triton-windows brings one along
            return ()
        compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
        return [
            Requirement(
                "C compiler",
                compiler is not None,
                of("no_c_compiler"),
                of("do_install_gcc"),
            )
        ]

    def fingerprint(self, device: str) -> dict[str, Any]:
        """Versions and options that change generated code."""
        if device == CPU:
            return inductor_fingerprint(device, None)
        import triton

        return inductor_fingerprint(device, triton.__version__)

    def installed_fingerprint(self, device: str) -> dict[str, Any]:
        """The same from Triton's files."""
        triton = None
        if device != CPU:
            triton = constants_of("triton", "__init__.py").get("__version__")
        return inductor_fingerprint(device, triton)

    def prepare_worker(self, folder: Path, *, suffix: str) -> None:
        """Compile in this process, for the instructions that targets name; remember in the folder
        what C++ compilers can do and the headers that they compiled, where graphs are the CPU's.
        """
        from ..device.gpu import is_there
        from ..torch_api import compiling, present

        if present.missing_api() is not None:
            return
        compiling.start_no_compilers()
        compiling.use_named_instructions()
        if not is_there():
            compiling.remember_vector_instructions(folder, suffix=suffix)
            compiling.remember_headers(folder, suffix=suffix)

    def compile(self, program: Program, *, measure: Measure) -> Compiled:
        """Compile a program; the kernels measure themselves on one call at the example sizes.

        Raises:
            BuildError: Inductor failed, or the graph is not a pure function.
        """
        from .lowering import lower

        return lower(program, measure)

    def explain_failure(self, device: str) -> RequirementError | None:
        """Try a one-line graph: if that fails, too, the cause is torch and not the region."""
        from .self_test import self_test

        try:
            self_test(device)
        except RequirementError as error:
            return error
        return None

    def load(self, payload: bytes, card: int | None = None) -> Callable[[list[Any]], Any]:
        """Rebuild the callable of a verified payload."""
        from ..device.gpu import pretended
        from ..operators import head_rotation as head_rotation  # graphs call its operator
        from ..torch_api import loading

        if pretended() is not None:
            from ..torch_api import cuda_pretended

            return cuda_pretended.never_called
        return loading.unpack(payload, card=card)

    def describe_payload(self, payload: bytes) -> PayloadFacts:
        """Read the source and the kernels of a packed graph."""
        return payloads.read_payload(payload)


def _torch() -> Requirement:
    from ..torch_api import present

    missing = present.missing_api()
    remedy = of("do_update_torch")
    return Requirement("torch", missing is None, missing or NOTHING, remedy, is_final=True)


def _of_device(device: str) -> list[Requirement]:
    from ..device.gpu import is_there, kind_of

    if device == CPU:
        return []
    if not any(kind.has_packed_kernels for kind in KINDS if kind.type == device):
        reason = of("no_such_device", device=device)
        return [Requirement("device", False, reason, of("do_use_nvidia"))]
    return [
        Requirement(
            "NVIDIA CUDA",
            is_there(device) and kind_of(device).has_packed_kernels,
            of("no_cuda"),
            of("do_use_nvidia_torch"),
        ),
        Requirement(
            "Triton",
            importlib.util.find_spec("triton") is not None,
            of("no_triton"),
            of("do_install_triton"),
        ),
    ]
