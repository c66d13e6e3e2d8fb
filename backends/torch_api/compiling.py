"""An exported graph through Inductor: `standalone_compile(..., aot=True)` under our settings.

Sources: torch/_inductor/{standalone_compile,codecache,choices}.py of torch 2.10-2.15.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import hashlib
import inspect
import os
import platform
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ..errors import BuildError
from ..reasons import of
from ..target.compiler_options import CONFIG as CONFIG
from ..target.compiler_options import PERSISTENT_ANY, PERSISTENT_ROW
from ..target.instructions import IS_X86
from . import turns
from .kernel_names import short_names
from .tracing import size_oblivious

#: A fork that waits for so long holds a lock that another thread had.
_LOADING_S = 20.0
#: The setting that lets a Triton kernel that Inductor did not write be launched without a compiler.
OWN_KERNELS = "static_launch_user_defined_triton_kernels"
#: The setting that has operators round what they read and give in float16.
ROUNDS = "emulate_precision_casts"


def start_no_compilers() -> None:
    """Have Inductor compile in this process: a worker is a process already."""
    try:
        from torch._inductor import config
    except ImportError:
        return
    settings: Any = config
    if hasattr(settings, "compile_threads"):
        settings.compile_threads = 1


def use_named_instructions() -> None:
    """Restrict C++ compilers to the instructions that Inductor and a graph's target name. Inductor
    asks for all of this processor's, and a file would end a process on any other.

    Scheduling stays this processor's. Only on x86: elsewhere targets name all of them.
    """
    if not IS_X86:
        return
    try:
        from torch._inductor import cpp_builder
    except ImportError:
        return
    builder: Any = cpp_builder
    ask = getattr(builder, "_get_optimization_cflags", None)
    if ask is None:
        return

    def named(*args: Any, **kwargs: Any) -> Any:
        flags, *rest = ask(*args, **kwargs)
        return ["mtune=native" if each == "march=native" else each for each in flags], *rest

    builder._get_optimization_cflags = named


def remember_vector_instructions(folder: Path, *, suffix: str) -> None:
    """Share between processes which vector instructions the compiler can use. Torch tries each in a
    new Python that imports torch, which takes seconds; here a fork does.

    Torch asks the CPU itself, in every process, whether it has them.

    Args:
        folder: holds an empty file per working one, named by machine, compiler, torch, flags and
            code.
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
        works = _builds_and_loads(self, code) if hasattr(os, "fork") else None
        if works is None:
            works = bool(check(self, code))
        if works:
            with contextlib.suppress(OSError):
                mark.touch()
        return works

    known.VecISA.check_build = remembered


def _builds_and_loads(isa: Any, code: str) -> bool | None:
    """Tell whether such a library compiles and loads; None if torch must be asked."""
    try:
        from torch._inductor import codecache, cpp_builder, cpu_vec_isa

        tools: Any = cpp_builder
        write: Any = codecache.write
        fingerprint: Any = cpu_vec_isa._get_isa_dry_compile_fingerprint
        name, source = write(code, "cpp", extra=fingerprint(isa._arch_flags))
        options = tools.CppTorchOptions(vec_isa=isa, warning_all=False)
        library = tools.CppBuilder(name, [source], options, os.path.dirname(source))
        path = library.get_target_file_path()
    except (AttributeError, ImportError, OSError, TypeError, ValueError):
        return None
    try:
        library.build()
    except Exception:  # the compiler's word, whatever torch wraps it in
        return False
    return _loads_in_a_copy(path)


def _loads_in_a_copy(path: str) -> bool | None:
    """Load a library in a fork, which may die of it; None if that gets stuck."""
    copy = os.fork()
    if copy == 0:
        code = 1
        try:
            faulthandler.disable()  # how it dies is an answer, no fault
            ctypes.CDLL(path)
            code = 0
        finally:
            os._exit(code)
    end = time.monotonic() + _LOADING_S
    while time.monotonic() < end:
        ended, status = os.waitpid(copy, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.005)
    os.kill(copy, signal.SIGKILL)
    os.waitpid(copy, 0)
    return None


def remember_headers(folder: Path, *, suffix: str) -> None:
    """Share precompiled C++ headers between processes, which saves six seconds.

    Each process has its own links to them, so they are whole whoever is killed meanwhile.

    Args:
        folder: holds the files, named by torch: by compiler, flags and headers.
        suffix: of the files' names there.
    """
    try:
        from torch._inductor import codecache
    except ImportError:
        return
    known: Any = codecache
    compile_header = getattr(known, "_precompile_header", None)
    if compile_header is None or not hasattr(known, "_HEADER_DIR"):
        return
    own = Path(known._HEADER_DIR)
    for file in folder.glob(f"*.h*{suffix}"):
        _link(file, own / file.name.removesuffix(suffix))

    def remembered(*args: Any, **named: Any) -> str:
        header: str = compile_header(*args, **named)
        for file in own.glob(f"{Path(header).name}*"):
            _link(file, folder / f"{file.name}{suffix}")
        return header

    known._precompile_header = remembered


def _link(file: Path, name: Path) -> None:
    """Give a file another name, which appears only with the whole file."""
    if name.exists():
        return
    with contextlib.suppress(OSError):
        name.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(file, name)
        except OSError:  # on another disk
            part = name.with_name(f".{os.getpid()}.{name.name}")
            shutil.copyfile(file, part)
            part.replace(name)


def call_whole(operator: torch._ops.OpOverload) -> None:
    """Have Inductor call one of torch's operators although it can decompose it.

    It does so for unknown ones, but with `CI` in the environment that is an error (torch 2.10 and
    2.11, `make_fallback` in torch/_inductor/lowering.py).
    """
    from torch._inductor import lowering

    known: Any = lowering
    if operator not in known.lowerings and hasattr(known, "make_fallback"):
        known.make_fallback(operator, warn=False)


def keep(node: torch.fx.Node) -> None:
    """Have Inductor write a node's result to memory once for all readers.

    For operators that it calls it would write a copy for each, if the node is only element-wise
    (`realize_to_strides` in torch/_inductor/graph.py).
    """
    node.meta["inductor_realize_to_strides"] = True


def launches_own_kernels() -> bool:
    """Whether graphs can hold Triton kernels that Inductor did not write."""
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
        config: Inductor settings for this call.
        wide: use 64-bit indices whatever the fakes' sizes.
        last_pass: changes the functional graph after Inductor's patterns, before reinplacing.

    Returns:
        The generated module, whose `call(list)` runs the graph, and its source.

    Raises:
        BuildError: the graph changes an input, holds constants, would call others' code in another
            order, or its module was not found.
    """
    from torch._inductor import standalone_compile
    from torch._inductor.codecache import PyCodeCache

    for node in graph_module.graph.nodes:
        if "val" in node.meta:
            node.meta["example_value"] = node.meta["val"]
    fakes = [n.meta["val"] for n in graph_module.graph.nodes if n.op == "placeholder"]
    known = len(PyCodeCache.modules)
    config = {**config, turns.BEFORE_FUSION: _as_custom_pass(turns.chain)}
    if last_pass is not None:
        config = {**config, "post_grad_custom_post_pass": _as_custom_pass(last_pass)}
    if not _reads_sizes_unasked():
        config = {**config, "size_asserts": True}
    indices = _wide_indices() if wide else contextlib.nullcontext()
    half = _kept_roundings() if config.get(ROUNDS) else contextlib.nullcontext()
    with torch.no_grad(), size_oblivious(), _persistent_rows(), short_names(), indices, half:
        artifact: Any = standalone_compile(
            graph_module,
            fakes,
            dynamic_shapes="from_graph",
            aot=True,
            options={"config_patches": _known_settings(config)},
        )
    graph = artifact.inner_fn.compiled_fn.serialize().compiled_fw.result
    if graph.mutated_inputs or graph.constants:
        raise BuildError(of("not_pure"))
    if not turns.are_kept(graph.source_code, graph_module.graph):
        raise BuildError(of("out_of_turn"))
    for module in reversed(PyCodeCache.modules[known:] or PyCodeCache.modules):
        path = getattr(module, "__file__", None)
        if path and hasattr(module, "call") and Path(path).read_text("utf-8") == graph.source_code:
            return module, graph.source_code
    raise BuildError(of("no_module"))


def _reads_sizes_unasked() -> bool:
    """Whether generated code names each size that it uses, whatever it asserts.

    From torch 2.14 on tensors' sizes are named only for asserts (`codegen_inputs` in
    torch/_inductor/codegen/wrapper.py, told by a new argument), which packing strips.
    """
    try:
        from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    except ImportError:
        return False
    assign = getattr(PythonWrapperCodegen, "codegen_input_symbol_assignment", None)
    return assign is not None and (
        "deferred_symbol_assignments" not in inspect.signature(assign).parameters
    )


def _as_custom_pass(change: Callable[[Any], Any]) -> Any:
    """As Inductor's pass class, with an id for its cache of graphs."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class Pass(CustomGraphPass):
        def __call__(self, graph: Any) -> Any:
            return change(graph)

        def uuid(self) -> bytes:
            return get_hash_for_files((inspect.getfile(change),), change.__qualname__)

    return Pass()


@contextlib.contextmanager
def _persistent_rows() -> Iterator[None]:
    """Reduce rows of up to `PERSISTENT_ROW` elements in registers, in this thread; of up to
    `PERSISTENT_ANY` if what follows reads the row in another order (rotations): it is read again
    then, and blocks of threads with long rows hide less of that.
    """
    from torch._inductor.choices import InductorChoices
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import V

    class Choices(InductorChoices):
        @staticmethod
        def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
            sizes: Any = V.graph.sizevars
            limit = PERSISTENT_ROW if _stays_in_order(features) else PERSISTENT_ANY
            is_row = features.get_reduction_hint() == ReductionHint.INNER or _picks_rows(features)
            if is_row and sizes.statically_known_leq(features.reduction_numel, limit):
                return True
            wanted: bool = InductorChoices.should_use_persistent_reduction(
                features, cooperative_reduction
            )
            return wanted

    with V.set_choices_handler(Choices()):
        yield


def _picks_rows(features: Any) -> bool:
    """Whether rows picked by an index are reduced: contiguous reads, though torch takes every
    indexed read for non-contiguous; False if this torch cannot say.
    """
    try:
        reads = [dep for node in features.reduction_nodes() for dep in node.read_writes.reads]
        picked = [dep for dep in reads if type(dep).__name__ == "MemoryDep" and dep.is_indirect()]
        return bool(picked) and all(
            dep.index.expand().coeff(dep.var_names[-1]) == 1 for dep in picked
        )
    except (AttributeError, IndexError):
        return False


def _stays_in_order(features: Any) -> bool:
    """Whether all element-wise work on a reduced row reads it contiguously
    (`has_non_contiguous_pw_in_reduction_kernel` in torch/_inductor/codegen/simd_kernel_features.py
    takes every index that is no linear sum as non-contiguous); False if this torch cannot say.
    """
    try:
        elements = features.numel * features.reduction_numel
        nodes = [node for node in features.scheduler_nodes() if not node.is_reduction()]
        reads = [
            dep
            for node in nodes
            if node.group[1][0] == elements
            for dep in node.read_writes.reads
            if type(dep).__name__ == "MemoryDep"
        ]
        return all(_is_linear(dep.index) for dep in reads)
    except AttributeError:
        return False


def _is_linear(index: Any) -> bool:
    """Whether an index has no quotients and remainders."""
    from torch.utils._sympy import functions

    names = ("FloorDiv", "ModularIndexing", "CleanDiv", "Mod", "PythonMod")
    divided = [getattr(functions, name) for name in names if hasattr(functions, name)]
    return not (hasattr(index, "has") and index.has(*divided))


@contextlib.contextmanager
def _kept_roundings() -> Iterator[None]:
    """Round in C++ where told to: Inductor drops conversions to float16 and back. In a worker,
    which compiles one graph at a time.
    """
    from torch._inductor.codegen.cpp import CppKernel

    kernel: Any = CppKernel
    remember = kernel.cache_dtype_convert
    kernel.cache_dtype_convert = lambda *_, **__: None
    try:
        yield
    finally:
        kernel.cache_dtype_convert = remember


@contextlib.contextmanager
def _wide_indices() -> Iterator[None]:
    """Use 64-bit indices, where Inductor goes by the example. A worker compiles one at a time."""
    from torch._inductor.codegen.simd import SIMDScheduling

    scheduling: Any = SIMDScheduling
    before = scheduling.__dict__.get("can_use_32bit_indexing")
    if before is None:
        raise BuildError(of("torch_without_wide", version=torch.__version__))
    scheduling.can_use_32bit_indexing = staticmethod(lambda *_: False)
    try:
        yield
    finally:
        scheduling.can_use_32bit_indexing = before


def _known_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Drop settings that this torch lacks; each only tunes."""
    from torch._inductor import config as inductor

    known = inductor.get_config_copy()
    return {name: value for name, value in config.items() if name in known}
