"""What generated code depends on besides the region: how facts make a target, and the facts of the
installed PyTorch, read without importing it, which takes as long as starting a server.
"""

from __future__ import annotations

import ast
import ctypes
import importlib.util
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..contract import EAGER, INDUCTOR
from .instructions import shortly
from .options import INSTRUCTIONS, OURS, inductor_fingerprint

#: What people call facts whose names say less.
_WORDS = {
    "capability": "GPU compute capability",
    "torch_source": "torch build",
    INSTRUCTIONS: "processor's instructions",
}
_CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


class TorchFacts(NamedTuple):
    """What of PyTorch and the GPU a target says; `capability` is None without a GPU."""

    version: str
    git_version: str | None
    cuda: str | None
    deterministic: bool
    capability: str | None


def compose_target(
    device: str, backend: str, fingerprint: Mapping[str, Any], torch: TorchFacts
) -> dict[str, Any]:
    """Return a target as plain data.

    Args:
        device: "cuda" or "cpu".
        backend: its name.
        fingerprint: what else its code depends on.
        torch: of this process, or of the installed files.
    """
    facts: dict[str, Any] = {
        "device": device,
        "torch": torch.version,
        "torch_source": torch.git_version,
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "platform": f"{platform.system()}-{platform.machine()}",
        "deterministic": torch.deterministic,
        "backend": backend,
        **fingerprint,
    }
    if device == "cuda":
        facts["capability"] = torch.capability
        facts["cuda"] = torch.cuda
    return facts


def installed_target(device: str, backend: str) -> dict[str, Any] | None:
    """Return the target of this Python's PyTorch as its files and the driver tell, in milliseconds.

    It is what `keys.target` returns in a process without arguments of its own: whether a server
    asks for deterministic operators or hides its GPUs is not known here.

    Returns:
        None when this Python has no PyTorch, or the backend is not known.
    """
    constants = _constants("torch", "version.py")
    version = constants.get("__version__")
    if not isinstance(version, str) or backend not in (INDUCTOR, EAGER):
        return None
    on_gpu = device == "cuda"
    torch = TorchFacts(
        version=version,
        git_version=constants.get("git_version"),
        cuda=constants.get("cuda") or constants.get("hip"),
        deterministic=False,
        capability=_capability() if on_gpu else None,
    )
    triton = _constants("triton", "__init__.py").get("__version__") if on_gpu else None
    fingerprint = inductor_fingerprint(device, triton) if backend == INDUCTOR else {}
    return compose_target(device, backend, fingerprint, torch)


def has_driver() -> bool:
    """Whether there is a GPU that NVIDIA's driver knows, whatever PyTorch makes of it."""
    return _capability() is not None


def explain_target(made_for: Mapping[str, Any], target_facts: Mapping[str, Any]) -> list[str]:
    """Say in words how the target of a graph file differs from this machine's; empty: it fits."""
    differing = {n for n in {*made_for, *target_facts} if made_for.get(n) != target_facts.get(n)}
    ours = OURS if INSTRUCTIONS in made_for else OURS | {INSTRUCTIONS}
    lines = ["made by another version of Warmgraph"] if differing & ours else []
    for name in sorted(differing - ours):
        there, here = made_for.get(name), target_facts.get(name)
        if name == INSTRUCTIONS:
            there, here = shortly(str(there), str(here)), shortly(str(here), str(there))
        lines.append(f"{_WORDS.get(name, name)}: made for {there}, this machine has {here}")
    return lines


def _constants(package: str, file: str) -> dict[str, Any]:
    """Read the constants that a file of an installed package assigns, without running it."""
    try:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            return {}
        tree = ast.parse(Path(spec.origin).with_name(file).read_text("utf-8"))
    except (OSError, ValueError, SyntaxError):
        return {}
    found: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
        else:
            continue
        if isinstance(node.value, ast.Constant):
            found[name] = node.value.value
    return found


def _capability() -> str | None:
    """Ask the driver for the first GPU's compute capability; no context is made on it."""
    try:
        if sys.platform == "win32":
            driver: Any = ctypes.WinDLL("nvcuda.dll")
        else:
            driver = ctypes.CDLL("libcuda.so.1")
        device, parts = ctypes.c_int(), []
        if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
            return None
        for attribute in _CAPABILITY:
            value = ctypes.c_int()
            if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device):
                return None
            parts.append(str(value.value))
    except (OSError, AttributeError):  # no driver, or none that knows these
        return None
    return ".".join(parts)
