"""Rebuild the call of a packed graph, without Dynamo, AOTAutograd or any compiler.

The payload is a pickle read through an allow-list, after the file's signature and hash were
verified. Sources: torch/_inductor/codecache.py and
torch/_inductor/runtime/{triton_heuristics,static_triton_launcher}.py of torch 2.10-2.15.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ..cleanup import temporary
from ..device.gpu import current_index, in_use
from ..errors import GraphFileError
from ..reasons import of
from ..several_cards.generated import on_card
from . import operators
from .payload import ALLOWED

_NOTHING = contextlib.nullcontext()
_EXTERN = ("mm", "addmm", "bmm", "baddbmm", "convolution")


def unpack(payload: bytes, *, card: int | None = None) -> Callable[[list[Any]], Any]:
    """Rebuild the call of a packed module.

    Args:
        payload: bytes from `pack`, already verified by the store.
        card: the GPU's number; None: the current one.

    Raises:
        GraphFileError: it names anything outside the allow-list, or does not fit this torch.
    """
    card = current_index() if card is None else card
    try:
        parts = _Unpickler(io.BytesIO(payload)).load()
        operators.check(parts["operators"])
        kernels: dict[str, Any] = {}
        with temporary.made("load") as folder, in_use(card) if parts["triton"] else _NOTHING:
            for name, (result, binary) in parts["triton"].items():
                kernels[name] = _Kernel(_launcher(result, binary, folder, card))
            for name, library in parts["cpp"].items():
                kernels[name] = _load_library(library)
        return _execute(on_card(parts["source"], card), kernels)
    except GraphFileError:
        raise
    except Exception as error:
        raise GraphFileError(
            of(
                "payload_unloadable",
                version=torch.__version__,
                sort=type(error).__name__,
                error=error,
            )
        ) from error


class _Kernel:
    """A loaded Triton kernel; generated code calls `kernel.run(*args, stream=...)`.

    Tensors are passed as addresses: the launcher would ask the driver about each, which does not
    know memory allocated within a CUDA graph that has not run yet.
    """

    __slots__ = ("_launch",)

    def __init__(self, launch: Callable[..., None]) -> None:
        self._launch = launch

    def run(self, *args: Any, stream: int) -> None:
        self._launch(
            *[a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args], stream=stream
        )


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise GraphFileError(of("payload_names", module=module, name=name))
        return super().find_class(module, name)


class _Extern:
    """Library calls of generated code, without importing Inductor's kernel selection."""

    def __getattr__(self, name: str) -> Any:
        if name in _EXTERN:
            return getattr(torch, name)
        from torch._inductor.select_algorithm import extern_kernels

        return getattr(extern_kernels, name)


class _SourceLoader(importlib.abc.InspectLoader):
    def __init__(self, source: str) -> None:
        self.source = source

    def get_source(self, fullname: str) -> str:
        return self.source


def _execute(source: str, kernels: dict[str, Any]) -> Callable[[list[Any]], Any]:
    loader = _SourceLoader(source)
    spec = importlib.util.spec_from_loader("warmgraph_graph", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__dict__.update(kernels, extern_kernels=_Extern())
    loader.exec_module(module)
    call: Callable[[list[Any]], Any] = module.call
    return call


#: Kernels stay on the GPU while the process lives. From torch 2.13 on one goes with its object
#: (`close` in torch/_inductor/runtime/static_triton_launcher.py), but queued calls and captures may
#: still use it.
_loaded: list[Any] = []


def _launcher(result: Any, binary: bytes, folder: Path, card: int) -> Callable[..., None]:
    path = folder / f"{result.kernel.hash}.cubin"
    path.write_bytes(binary)
    result.kernel.cubin_path = str(path)
    result.compile_meta["device"] = card
    launcher: Callable[..., None] = result.make_launcher()
    _loaded.append(result.kernel)
    return launcher


_libraries_lock = threading.Lock()

_library_folder: list[Path] = []


def _load_library(binary: bytes) -> Any:
    """Load a C++ kernel from its shared library, whose file stays while the process lives."""

    with _libraries_lock:
        if not _library_folder or not _library_folder[0].is_dir():  # systems clear up, too
            _library_folder[:] = [temporary.make_for_life("kernels")]
        digest = hashlib.sha256(binary).hexdigest()[:32]
        path = _library_folder[0] / (digest + importlib.machinery.EXTENSION_SUFFIXES[-1])
        if not path.exists():
            path.write_bytes(binary)
        guards: Any = torch._C._dynamo.guards
        pointer = guards._torchinductor_pyobject_tensor_data_ptr
        # Read once by the library's own initialiser, as torch's loader does it.
        with _environment("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", str(pointer)):
            spec = importlib.util.spec_from_file_location(f"{digest}.kernel", path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
    return module.kernel


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
