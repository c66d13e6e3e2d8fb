"""The structure of a model as one name: its class and settings, its parts, and all their code.

What was learned of a model holds for every model of this name, whatever its weights, their dtype
and place. Other code of the host, a pack or Warmgraph gives another name.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..code.sources import fingerprint
from ..host_api import attention, layers
from ..storing.canonical_json import canonical_json, sha256_hex
from ..target.own_code import hash_files
from .blocks import attributes_of
from .values import name_of

_BACKENDS = Path(__file__).resolve().parents[1]
_ROOMS = ("learning", "code")
_OF_TORCH = ("torch_api/fakes.py", "torch_api/guarding.py", "torch_api/known_values.py")
_PLAIN = (bool, int, float, str, type(None))


def structure_of(root: torch.nn.Module) -> str:
    """Return the name of a model's structure, 64 hex digits."""
    classes = sorted({type(part) for part in root.modules()}, key=name_of)
    return sha256_hex(
        canonical_json(
            {
                "parts": [[name, *_part(part)] for name, part in root.named_modules()],
                "code": fingerprint([], classes, live=attention.replaceable()),
                "learning": _own_code(),
            }
        )
    )


def _part(part: torch.nn.Module) -> list[Any]:
    """A part's class, settings and sizes, without what loading a model notes there."""
    cls = type(part)
    if layers.is_operator(part):  # torch lists the settings of only these
        settings = {name: getattr(part, name, None) for name in getattr(cls, "__constants__", ())}
    else:
        settings = attributes_of(part)
        settings.pop("training", None)
    sizes = [
        [name, None if tensor is None else list(tensor.shape)]
        for named in (part._parameters, part._buffers)
        for name, tensor in named.items()
    ]
    plain = {name: _read(value) for name, value in settings.items()}
    return [name_of(cls), {n: value for n, [value] in plain.items()}, sizes]


def _read(value: Any) -> list[Any]:
    """A setting as data; of one that is not plain the class alone, and of a dtype nothing, because
    the same model is loaded in several.
    """
    if isinstance(value, (torch.dtype, torch.device)):
        return [None]
    if isinstance(value, float):
        return [repr(value)]
    if isinstance(value, _PLAIN):
        return [value]
    if isinstance(value, (list, tuple)):
        return [[part for each in value for part in _read(each)]]
    return [name_of(type(value))]


@cache
def _own_code() -> str:
    """Our code that decides what is learned, and what is refused."""
    files = [f"{room}/{file.name}" for room in _ROOMS for file in (_BACKENDS / room).glob("*.py")]
    return hash_files(_BACKENDS, sorted([*files, *_OF_TORCH]))
