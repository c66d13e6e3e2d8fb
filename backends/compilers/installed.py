"""The target of this machine, read from installed files and the driver in milliseconds, without
importing PyTorch.
"""

from __future__ import annotations

from typing import Any

from ..device import libcuda
from ..device.kinds import GPU_TYPES
from ..target.target import TorchFacts, compose_target
from ..torch_api.version_files import constants_of
from .registry import COMPILERS


def installed_target(device: str, backend: str) -> dict[str, Any] | None:
    """Return the target of this Python's PyTorch.

    The same as `keys.target` in a process without arguments: whether a server asks for
    deterministic operators or hides its GPUs is not known here.

    Returns:
        None when this Python has no PyTorch, or the backend is not known.
    """
    constants = constants_of("torch", "version.py")
    version = constants.get("__version__")
    made_by = next((each for each in COMPILERS if each.name == backend), None)
    if not isinstance(version, str) or made_by is None:
        return None
    torch = TorchFacts(
        version=version,
        git_version=constants.get("git_version"),
        cuda=constants.get("cuda") or constants.get("hip"),
        deterministic=False,
        capability=libcuda.capability() if device in GPU_TYPES else None,
    )
    return compose_target(device, backend, made_by.installed_fingerprint(device), torch)
