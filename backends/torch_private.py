"""Every use of torch's private APIs, in one room; `self_test` says in words what broke.

Compile side: `compile_wrapper` runs `standalone_compile(..., aot=True)` and returns Inductor's
generated module; `pack` takes out of it what a call needs (its Python source without kernel
sources, the chosen binary of each kernel) and nothing else. Load side: `unpack` rebuilds the call
from those bytes without Dynamo, AOTAutograd or any compiler.

The payload is a pickle read through an allow-list; it is only ever read after the file's signature
and hash were verified. Sources: torch/_inductor/{standalone_compile,codecache}.py and
torch/_inductor/runtime/{triton_heuristics,static_triton_launcher}.py of torch 2.10-2.15.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib.abc
import importlib.util
import inspect
import io
import os
import pickle
import platform
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from . import temporary
from .errors import BuildError, GraphFileError
from .lean_source import lean_source
from .options import CONFIG as CONFIG
from .options import PERSISTENT_ROW

#: The setting that lets a Triton kernel that Inductor did not write be launched without a compiler.
OWN_KERNELS = "static_launch_user_defined_triton_kernels"
_EXTERN = ("mm", "addmm", "bmm", "baddbmm", "convolution")
_ALLOWED = frozenset(
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


def fake_mode() -> Any:
    """Return a fresh FakeTensorMode with symbolic shapes, for twins without weights."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def size_oblivious() -> Any:
    """Patch: symbols may be 0 or 1 without specialising; must be held while exporting and
    lowering.
    """
    import torch.fx.experimental._config as settings

    config: Any = settings
    return config.patch(backed_size_oblivious=True)


def kept(value: torch.Tensor) -> torch.Tensor:
    """Have a traced value computed once and kept in memory, where Inductor would compute it anew
    for every element that reads it.

    Needs an operator that torch has for its own tests; without it the value is only slower.
    """
    try:
        import torch._inductor.test_operators  # registers it

        realize: Any = torch.ops._inductor_test.realize
    except (ImportError, AttributeError):
        return value
    result: torch.Tensor = realize(value)
    return result


def is_surely(condition: Any) -> bool:
    """Whether a condition over symbolic sizes holds for all that they may be; asking narrows
    nothing.
    """
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(condition))


def start_no_compilers() -> None:
    """Have Inductor compile in this process: a worker is a process for that already."""
    from torch._inductor import config

    settings: Any = config
    if hasattr(settings, "compile_threads"):
        settings.compile_threads = 1


def remember_vector_instructions(folder: Path, *, suffix: str) -> None:
    """Let this process know which of the CPU's vector instructions the compiler can use, where
    another one has tried: torch starts a process to try each, which takes seconds.

    Whether the CPU has them torch asks the CPU, in every process.

    Args:
        folder: holds an empty file for each that works, named by what it hangs on: machine,
            compiler, torch, flags and code. Where it is removed, they are tried anew.
        suffix: of the files' names.
    """
    try:
        from torch._inductor import cpu_vec_isa
    except ImportError:
        return
    known: Any = cpu_vec_isa
    check = getattr(getattr(known, "VecISA", None), "check_build", None)
    fingerprint = getattr(known, "_get_isa_dry_compile_fingerprint", None)
    if check is None or fingerprint is None:
        return

    def remembered(self: Any, code: str) -> bool:
        facts = "\n".join((platform.node(), fingerprint(self._arch_flags), code))
        mark = folder / f"{hashlib.sha256(facts.encode()).hexdigest()[:32]}{suffix}"
        if mark.exists():
            return True
        works: bool = check(self, code)
        if works:
            with contextlib.suppress(OSError):
                mark.touch()
        return works

    known.VecISA.check_build = remembered


def call_whole(operator: torch._ops.OpOverload) -> None:
    """Have Inductor call one of torch's operators in this process, although it knows how to take it
    apart.

    It does so by itself where nobody said so, but with `CI` in the environment that is an error
    (torch 2.10 and 2.11, `make_fallback` in torch/_inductor/lowering.py).
    """
    from torch._inductor import lowering

    known: Any = lowering
    if operator not in known.lowerings and hasattr(known, "make_fallback"):
        known.make_fallback(operator, warn=False)


def missing_api() -> str | None:
    """Return which private API this torch lacks, in words, or None; never raises.

    Only what can be seen without importing a compiler; the rest is for the `self_test` of a worker
    whose build failed.
    """
    try:
        return _missing_api()
    except ImportError as error:
        return f"torch {torch.__version__} lacks {error.name or error}"
    except Exception as error:
        return f"torch {torch.__version__} is another one: {type(error).__name__}: {error}"


def _missing_api() -> str | None:
    from torch._inductor import standalone_compile
    from torch._inductor.runtime.triton_heuristics import StaticTritonCompileResult
    from torch.fx.experimental import _config

    # On some versions a submodule has the function's name, and is found in its place.
    if (
        not callable(standalone_compile)
        or "aot" not in inspect.signature(standalone_compile).parameters
    ):
        return (
            f"torch {torch.__version__} has no standalone_compile(aot=True), which came with 2.10"
        )
    if not hasattr(_config, "backed_size_oblivious"):
        return f"torch {torch.__version__} has no backed_size_oblivious setting"
    if not hasattr(StaticTritonCompileResult, "make_launcher"):
        name = "StaticTritonCompileResult.make_launcher"
        return f"torch {torch.__version__} has no static Triton launcher ({name})"
    return None


def pause(cycles: int) -> None:
    """Have the current CUDA stream do nothing for so many cycles of the GPU."""
    sleep: Any = torch.cuda._sleep
    sleep(cycles)


def launches_own_kernels() -> bool:
    """Whether graphs can hold a Triton kernel that Inductor did not write itself."""
    return bool(_known_settings({OWN_KERNELS: True}))


def compile_wrapper(
    graph_module: torch.fx.GraphModule,
    config: dict[str, Any],
    *,
    wide: bool = False,
    last_pass: Callable[[torch.fx.Graph], None] | None = None,
) -> tuple[ModuleType, str]:
    """Lower an exported graph with Inductor.

    Args:
        graph_module: placeholders carry fakes on the run device in `meta["val"]`.
        config: Inductor settings, scoped to this call.
        wide: index with 64 bits whatever the sizes of the fakes are.
        last_pass: changes the functional graph after Inductor's own patterns; what Inductor does
            about operators that change memory still follows.

    Returns:
        The generated module, whose `call(list)` runs the graph, and its source.

    Raises:
        BuildError: the graph changes an input, holds constants, or its module was not found.
    """
    from torch._inductor import standalone_compile
    from torch._inductor.codecache import PyCodeCache

    for node in graph_module.graph.nodes:
        if "val" in node.meta:
            node.meta["example_value"] = node.meta["val"]
    fakes = [n.meta["val"] for n in graph_module.graph.nodes if n.op == "placeholder"]
    known = len(PyCodeCache.modules)
    if last_pass is not None:
        config = {**config, "post_grad_custom_post_pass": _as_custom_pass(last_pass)}
    if not _reads_sizes_unasked():
        config = {**config, "size_asserts": True}
    indices = _wide_indices() if wide else contextlib.nullcontext()
    with torch.no_grad(), size_oblivious(), _persistent_rows(), indices:
        artifact: Any = standalone_compile(
            graph_module,
            fakes,
            dynamic_shapes="from_graph",
            aot=True,
            options={"config_patches": _known_settings(config)},
        )
    graph = artifact.inner_fn.compiled_fn.serialize().compiled_fw.result
    if graph.mutated_inputs or graph.constants:
        raise BuildError("a region must be a pure function of its inputs")
    for module in reversed(PyCodeCache.modules[known:] or PyCodeCache.modules):
        path = getattr(module, "__file__", None)
        if path and hasattr(module, "call") and Path(path).read_text("utf-8") == graph.source_code:
            return module, graph.source_code
    raise BuildError("Inductor's generated module was not found")


def _reads_sizes_unasked() -> bool:
    """Whether generated code gives each size that it uses a name, whatever it asserts.

    From torch 2.14 on it names those of tensors only for its asserts about them (`codegen_inputs`
    in torch/_inductor/codegen/wrapper.py, told by an argument that came with it); what is packed
    has no asserts in either case.
    """
    try:
        from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    except ImportError:
        return False
    assign = getattr(PythonWrapperCodegen, "codegen_input_symbol_assignment", None)
    return assign is not None and (
        "deferred_symbol_assignments" not in inspect.signature(assign).parameters
    )


def _as_custom_pass(change: Callable[[torch.fx.Graph], None]) -> Any:
    """As Inductor wants it: with a name that its own cache of graphs tells it by."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class Pass(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            change(graph)

        def uuid(self) -> bytes:
            return get_hash_for_files((inspect.getfile(change),), change.__qualname__)

    return Pass()


@contextlib.contextmanager
def _persistent_rows() -> Iterator[None]:
    """Reduce rows of up to `PERSISTENT_ROW` elements in registers, in this thread."""
    from torch._inductor.choices import InductorChoices
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import V

    class Choices(InductorChoices):
        @staticmethod
        def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
            sizes: Any = V.graph.sizevars
            is_row = features.get_reduction_hint() == ReductionHint.INNER
            if is_row and sizes.statically_known_leq(features.reduction_numel, PERSISTENT_ROW):
                return True
            wanted: bool = InductorChoices.should_use_persistent_reduction(
                features, cooperative_reduction
            )
            return wanted

    with V.set_choices_handler(Choices()):
        yield


@contextlib.contextmanager
def _wide_indices() -> Iterator[None]:
    """Let kernels index with 64 bits; Inductor decides by the sizes that it happens to see.

    In a worker, which compiles one graph at a time.
    """
    from torch._inductor.codegen.simd import SIMDScheduling

    scheduling: Any = SIMDScheduling
    before = scheduling.__dict__.get("can_use_32bit_indexing")
    if before is None:
        raise BuildError(f"torch {torch.__version__} cannot be told to index with 64 bits")
    scheduling.can_use_32bit_indexing = staticmethod(lambda *_: False)
    try:
        yield
    finally:
        scheduling.can_use_32bit_indexing = before


def pack(module: ModuleType, source: str) -> tuple[bytes, int]:
    """Collect what a call of a generated module needs; returns it and the bytes of its binaries.

    Must run after the module has been called once, which makes each Triton kernel choose its
    configuration; only the chosen one is kept.
    """
    lean, kernels = lean_source(source)
    triton: dict[str, tuple[Any, bytes]] = {}
    cpp: dict[str, bytes] = {}
    for name in kernels:
        kernel = getattr(module, name)
        if hasattr(kernel, "launchers"):
            triton[name] = _chosen(name, kernel)
        else:
            cpp[name] = _library_of(kernel).read_bytes()
    binaries = [binary for _, binary in triton.values()] + list(cpp.values())
    parts = {"source": lean, "triton": triton, "cpp": cpp}
    return pickle.dumps(parts, protocol=4), sum(map(len, binaries))


def unpack(payload: bytes, *, device_index: int = 0) -> Callable[[list[Any]], Any]:
    """Rebuild the call of a packed module.

    Args:
        payload: bytes from `pack`, already verified by the store.
        device_index: the CUDA device that kernels are loaded on.

    Raises:
        GraphFileError: the payload names anything outside the allow-list or does not fit this
        torch.
    """
    try:
        parts = _Unpickler(io.BytesIO(payload)).load()
        with temporary.made("load") as folder:
            kernels: dict[str, Any] = {}
            for name, (result, binary) in parts["triton"].items():
                kernels[name] = _Kernel(_launcher(result, binary, folder, device_index))
            for name, library in parts["cpp"].items():
                kernels[name] = _load_library(library)
        return _execute(parts["source"], kernels)
    except GraphFileError:
        raise
    except Exception as error:
        raise GraphFileError(
            f"its payload does not load with torch {torch.__version__}: "
            f"{type(error).__name__}: {error}"
        ) from error


class _Kernel:
    """A loaded Triton kernel; generated code calls `kernel.run(*args, stream=...)`.

    Tensors are handed on as addresses: the launcher would ask the driver about each, and the driver
    does not know memory that is allocated within a CUDA graph before the graph has run.
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
        if (module, name) not in _ALLOWED:
            raise GraphFileError(f"its payload names {module}.{name}, which no graph needs")
        return super().find_class(module, name)


class _Extern:
    """Library calls of generated code, without importing Inductor's kernel selection for them."""

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


def _known_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Drop settings that this torch does not have; each only tunes."""
    from torch._inductor import config as inductor

    known = inductor.get_config_copy()
    return {name: value for name, value in config.items() if name in known}


def _chosen(name: str, kernel: Any) -> tuple[Any, bytes]:
    """The configuration that a Triton kernel chose, and its binary."""
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir
    from torch._inductor.runtime.runtime_utils import triton_hash_to_path_key

    if len(kernel.launchers) != 1:
        raise BuildError(f"kernel {name} has not chosen among {len(kernel.launchers)} forms")
    config = kernel.launchers[0].config
    for result in kernel.compile_results:
        if result.config == config and hasattr(result.kernel, "arg_tys"):
            folder = triton_cache_dir(result.compile_meta.get("device", 0))
            path = Path(folder, triton_hash_to_path_key(result.kernel.hash))
            path /= f"{result.kernel.name}.cubin"
            kept = copy.copy(result)
            kept.kernel = copy.copy(result.kernel)
            kept.kernel.__dict__.pop("C_impl", None)
            kept.kernel.cubin_raw = None
            return kept, path.read_bytes()
    raise BuildError(f"kernel {name} cannot be launched without Triton's compiler")


#: Kernels stay on the GPU while the process lives. From torch 2.13 on one goes with its object
#: (`close` in torch/_inductor/runtime/static_triton_launcher.py), which a captured call that still
#: replays the kernel, or one that waits for the GPU, would not survive.
_loaded: list[Any] = []


def _launcher(result: Any, binary: bytes, folder: Path, device_index: int) -> Callable[..., None]:
    path = folder / f"{result.kernel.hash}.cubin"
    path.write_bytes(binary)
    result.kernel.cubin_path = str(path)
    result.compile_meta["device"] = device_index
    launcher: Callable[..., None] = result.make_launcher()
    _loaded.append(result.kernel)
    return launcher


def _library_of(kernel: Any) -> Path:
    """The shared library behind a C++ kernel's Python binding."""
    owner = getattr(kernel, "__self__", None)
    path = getattr(owner, "__file__", None)
    if path is None:
        raise BuildError(f"the library of C++ kernel {kernel!r} was not found")
    return Path(path)


_libraries_lock = threading.Lock()
_library_folder: list[Path] = []


def _load_library(binary: bytes) -> Any:
    """Load a C++ kernel from its shared library; the file stays while the process lives."""
    import hashlib

    with _libraries_lock:
        if not _library_folder or not _library_folder[0].is_dir():  # systems clear up, too
            _library_folder[:] = [temporary.make_for_life("kernels")]
        digest = hashlib.sha256(binary).hexdigest()[:32]
        path = _library_folder[0] / f"{digest}.so"
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
