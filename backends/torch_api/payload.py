"""A graph's payload for people: its source and kernels.

Needs no torch and runs nothing: classes that the payload names are replaced by inert ones.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from ..contract import KernelFacts, PayloadFacts

#: The classes that a payload may name; `loading` makes no others.
ALLOWED = frozenset(
    (
        ("torch._inductor.runtime.triton_heuristics", "StaticTritonCompileResult"),
        ("torch._inductor.runtime.triton_heuristics", "InductorConfig"),
        ("torch._inductor.runtime.static_triton_launcher", "StaticallyLaunchedCudaKernel"),
        ("torch._inductor.runtime.hints", "DeviceProperties"),
        ("torch._inductor.runtime.hints", "AttrsDescriptorWrapper"),
        ("torch._inductor.runtime.hints", "TileHint"),
        ("torch._inductor.runtime.hints", "ReductionHint"),
        ("torch._inductor.runtime.hints", "HeuristicType"),
        ("triton.runtime.autotuner", "Config"),
        ("torch.utils._ordered_set", "OrderedSet"),
        ("collections", "OrderedDict"),
        ("torch", "device"),
    )
)


def read_payload(payload: bytes) -> PayloadFacts:
    """Read a packed graph without running it.

    Args:
        payload: of a graph file with the right hash, whoever signed it.

    Raises:
        ValueError: not a packed graph, or it names what no graph needs.
    """
    try:
        parts = _Reader(io.BytesIO(payload)).load()
        triton = [_triton(name, *kernel) for name, kernel in parts["triton"].items()]
        cpp = [KernelFacts(name, "C++", len(binary), {}) for name, binary in parts["cpp"].items()]
        source = parts["source"]
        names = [kernel.name for kernel in triton + cpp]
        if not all(isinstance(text, str) for text in (source, *names)):
            raise ValueError("its source or a kernel's name is no text")
    except ValueError:
        raise
    except Exception as error:  # a pickle may be wrong in any way
        raise ValueError(f"it is no packed graph ({type(error).__name__})") from error
    return PayloadFacts(source, triton + cpp)


class _Inert:
    """Replaces an object of any class: takes everything, does nothing."""

    def __new__(cls, *_arguments: Any, **_names: Any) -> _Inert:
        return object.__new__(cls)

    def __init__(self, *_arguments: Any, **_names: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        slots = state[1] if isinstance(state, tuple) and len(state) == 2 else None
        for each in (state[0] if slots else state, slots):
            if isinstance(each, dict):
                self.__dict__.update(each)

    def __setitem__(self, name: Any, value: Any) -> None:
        pass

    def append(self, item: Any) -> None:
        pass

    def extend(self, items: Any) -> None:
        pass

    def add(self, item: Any) -> None:
        pass


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise ValueError(f"it names {module}.{name}, which no compiled graph needs")
        return type(name, (_Inert,), {})


def _triton(name: Any, result: Any, binary: bytes) -> KernelFacts:
    config = vars(result).get("config")
    facts = vars(config) if isinstance(config, _Inert) else {}
    kwargs = facts.get("kwargs")
    chosen = dict(kwargs) if isinstance(kwargs, dict) else {}
    chosen |= {key: facts[key] for key in ("num_warps", "num_stages") if key in facts}
    plain = {str(k): v for k, v in chosen.items() if isinstance(v, (int, str))}
    return KernelFacts(name, "Triton", len(binary), plain)
