"""Backend `inductor`: a graph of a region by torch's own compiler, for any size or for one.

https://docs.pytorch.org/docs/stable/torch.compiler.html
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..contract import INDUCTOR, Compiled, Description, Measure, Requirement
from ..errors import BuildError, RequirementError
from ..host_api.attention import host_order
from ..kernels import attention, products
from ..kernels import head_rotation as head_rotation  # graphs call its operator
from ..kinds.layout import CHANNELS_LAST
from ..kinds.options import CHANNELS_LAST_CONFIG, base_config, inductor_fingerprint
from ..torch_api import compiling, loading, packing, present
from .self_test import self_test


class Inductor:
    """Compiles with `torch._inductor.standalone_compile`; kernels are Triton's on GPUs, C++ on
    CPUs.
    """

    name = INDUCTOR

    def requirements(self, device: str) -> Sequence[Requirement]:
        """Say what is missing here; never raises."""
        missing = present.missing_api()
        found = [
            Requirement("torch", missing is None, missing or "", "update torch to 2.10 or newer")
        ]
        if device == "cuda":
            found.append(
                Requirement(
                    "NVIDIA CUDA",
                    torch.cuda.is_available() and torch.version.cuda is not None,
                    "this backend runs on NVIDIA GPUs so far, and this torch has none",
                    "use an NVIDIA GPU, with a PyTorch that has CUDA",
                )
            )
            found.append(
                Requirement(
                    "Triton",
                    importlib.util.find_spec("triton") is not None,
                    "Triton is not installed",
                    "on Windows install triton-windows, on Linux reinstall torch",
                )
            )
        elif device == "cpu":
            compiler = "cl" if sys.platform == "win32" else "g++"
            found.append(
                Requirement(
                    "C++ compiler",
                    any(shutil.which(c) for c in (compiler, "c++", "clang++")),
                    f"no C++ compiler ({compiler}) on the path",
                    "install one",
                )
            )
        else:
            found.append(
                Requirement(
                    "device",
                    False,
                    f"this backend does not run on {device}",
                    "use an NVIDIA GPU",
                )
            )
        return found

    def fingerprint(self, device: str) -> dict[str, Any]:
        """Versions and options that change generated code."""
        if device != "cuda":
            return inductor_fingerprint(device, None)
        import triton

        return inductor_fingerprint(device, triton.__version__)

    def compile(self, program: Any, *, measure: Measure) -> Compiled:
        """Compile a `capture.Program`; the kernels measure themselves on one call at the example
        sizes.

        Raises:
            BuildError: Inductor failed, or the graph is no pure function.
        """
        description = program.description
        try:
            on_gpu = description.device == "cuda"
            if description.is_special and on_gpu:
                attention.choose(program.graph_module, measure)
                products.pair(program.graph_module, measure)
            with host_order():
                module, source = compiling.compile_wrapper(
                    program.graph_module,
                    _config(description),
                    wide=description.wide,
                    last_pass=products.finish if on_gpu else products.round_once,
                )
            weights, inputs = program.example()
            with torch.no_grad(), measure():
                module.call([*weights, *inputs])
                if on_gpu:
                    torch.cuda.synchronize()
            payload, binary_bytes = packing.pack(module, source)
        except BuildError:
            raise
        except Exception as error:
            raise BuildError(
                f"Inductor failed on {description.label}: {type(error).__name__}: "
                f"{(str(error).strip() or 'no text').splitlines()[0][:300]}"
            ) from error
        return Compiled(payload, {"binary_bytes": binary_bytes}, source)

    def explain_failure(self, device: str) -> RequirementError | None:
        """Try a one-line graph: where that fails, too, it is torch and not the region."""
        try:
            self_test(device)
        except RequirementError as error:
            return error
        return None

    def load(self, payload: bytes) -> Callable[[list[Any]], Any]:
        """Rebuild the callable of a verified payload."""
        index = torch.cuda.current_device() if torch.cuda.is_available() else 0
        return loading.unpack(payload, device_index=index)


def _config(description: Description) -> dict[str, Any]:
    """Inductor's settings for a kind; what they add to the device's follows from its key."""
    config = base_config(description.device)
    if description.layout == CHANNELS_LAST:
        config.update(CHANNELS_LAST_CONFIG)
    if description.wide:
        config["assume_32bit_indexing"] = False
    if description.is_special:  # only these call kernels of our own
        config[compiling.OWN_KERNELS] = True
    return config
