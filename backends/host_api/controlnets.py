"""A CONTROL_NET: its network, copies, run and device.

Relies on the host's `comfy/controlnet.py`.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from . import memory

#: What a copy's instance carries. `copy_to` is what every `copy()` of the host calls, and
#: `__reduce_ex__` what other copies of Python's come to.
METHODS = ("get_control", "copy_to", "pre_run", "cleanup", "__reduce_ex__")


def is_control(thing: Any) -> bool:
    """Tell whether a thing is a ControlNet, the host's or a pack's."""
    cls = getattr(sys.modules.get("comfy.controlnet"), "ControlBase", None)
    return cls is not None and isinstance(thing, cls)


def is_hosts(cls: type) -> bool:
    """Tell whether a class of ControlNets is the host's."""
    return cls.__module__ == "comfy.controlnet"


def network_attribute(cls: type) -> str:
    """Return the name of the network's attribute."""
    return "t2i_model" if cls.__name__ == "T2IAdapter" else "control_model"


def is_per_run(cls: type) -> bool:
    """Tell whether the host makes the network anew in each run."""
    return cls.__name__ == "ControlLora"


def copy(control: Any) -> Any:
    """Return the host's own copy, which shares network and patcher."""
    return type(control).copy(control)


def patcher(control: Any) -> Any:
    """Return the network's ModelPatcher; None for adapters and per-run networks."""
    return vars(control).get("control_model_wrapped")


def device(control: Any) -> torch.device:
    """Return the network's device; a copy on another card knows it by its patcher."""
    facts, own = vars(control), patcher(control)
    if own is not None:
        found: torch.device = own.load_device
        return found
    return facts.get("load_device") or facts.get("device") or memory.default_device()


def compute_dtype(control: Any, network: Any) -> torch.dtype:
    found: torch.dtype = vars(control).get("manual_cast_dtype") or getattr(
        network, "dtype", torch.float32
    )
    return found


def plain_state(cls: Any, control: Any, protocol: Any) -> tuple[Any, ...]:
    """Return what Python copies or pickles an instance from, without our methods."""
    make, arguments, state, *rest = cls.__reduce_ex__(control, protocol)
    return make, arguments, {k: v for k, v in state.items() if k not in METHODS}, *rest
