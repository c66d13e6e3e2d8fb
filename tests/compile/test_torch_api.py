"""The room of private APIs: its self-test, what a payload holds, and what it may not name."""

from __future__ import annotations

import _imp
import gc
import importlib.machinery
import inspect
import os
import pickle
import platform
import re
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from warmgraph_backends.cleanup import owners, temporary
from warmgraph_backends.compilers.self_test import self_test
from warmgraph_backends.errors import BuildError, GraphFileError, RequirementError
from warmgraph_backends.target.compiler_options import base_config
from warmgraph_backends.target.instructions import IS_X86, instructions
from warmgraph_backends.torch_api import (
    compiling,
    lean_source,
    loading,
    operators,
    packing,
    present,
    tracing,
)
from warmgraph_tools.by_path import ADOPT

ROOT = Path(__file__).resolve().parents[2]
Packed = tuple[str, bytes]


class Probe(torch.nn.Module):
    """One kernel of each sort: generated C++, and a library's matrix product."""

    def forward(self, weight: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.nn.functional.silu(x @ weight) + x.mean(dim=1, keepdim=True),)


def probe_result(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return Probe()(weight, x)[0]


def build(sample: Sequence[torch.Tensor]) -> Packed:
    """Compile and pack the probe for any number of rows."""
    rows = torch.export.Dim("rows", min=2, max=1024)
    with torch.no_grad(), tracing.size_oblivious():
        exported = torch.export.export(
            Probe(), tuple(sample), dynamic_shapes=({}, {0: rows}), strict=False
        )
    module, source = compiling.compile_wrapper(exported.graph_module, base_config("cpu"))
    module.call(list(sample))
    payload, _ = packing.pack(module, source)
    return source, payload


@pytest.fixture(scope="module")
def packed() -> Packed:
    """A generated module's source, and the payload made of it."""
    return build((torch.randn(8, 16), torch.randn(512, 8)))


def test_the_self_test_passes_here() -> None:
    self_test("cpu")


def test_a_payload_computes_at_any_size_and_empties_its_list(packed: Packed) -> None:
    call = loading.unpack(packed[1])
    for rows in (1, 2, 7, 300):
        weight, x = torch.randn(8, 16), torch.randn(rows, 8)
        arguments = [weight, x]
        torch.testing.assert_close(call(arguments)[0], probe_result(weight, x))
        assert arguments == []


def test_folders_that_kernels_are_loaded_from_name_their_owner(
    packed: Packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The libraries' folder stays with the process, and is made anew where a system removed it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(loading, "_library_folder", [tmp_path / "removed"])
    call = loading.unpack(packed[1])
    weight, x = torch.randn(8, 16), torch.randn(3, 8)
    torch.testing.assert_close(call([weight, x])[0], probe_result(weight, x))
    assert [temporary.owner_of(folder.name) for folder in tmp_path.iterdir()] == [owners.me()]


def test_kernels_load_where_libraries_end_otherwise(
    packed: Packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows loads a module from `.pyd` alone; here the interpreter does so, too."""
    monkeypatch.setattr("_imp.extension_suffixes", lambda: [".cp312-win_amd64.pyd", ".pyd"])
    monkeypatch.setattr(importlib.machinery, "EXTENSION_SUFFIXES", _imp.extension_suffixes())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(loading, "_library_folder", [])
    weight, x = torch.randn(8, 16), torch.randn(3, 8)
    result = loading.unpack(packed[1])([weight, x])[0]
    torch.testing.assert_close(result, probe_result(weight, x))
    assert {path.suffix for path in loading._library_folder[0].iterdir()} == {".pyd"}


def test_a_payload_has_no_kernel_text_no_paths_and_no_compiler(packed: Packed) -> None:
    source, payload = packed
    assert "async_compile.cpp" in source and "#include" in source
    lean = pickle.loads(payload)["source"]
    assert "def call" in lean
    for text in ("#include", "async_compile", "benchmark", 'extern "C"', "/tmp", "__main__"):
        assert text not in lean, text
    assert "assert_" not in lean


def test_a_torch_that_names_sizes_for_its_asserts_only_compiles_and_packs_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As torch does from 2.14 on, whichever runs here: the self-test, too, fails there without."""
    monkeypatch.setattr(compiling, "_reads_sizes_unasked", lambda: False)
    source, payload = build((torch.randn(8, 16), torch.randn(5, 8)))
    assert re.search(r"assert_size_stride\w*\(", source)
    assert "assert_" not in pickle.loads(payload)["source"]
    weight, x = torch.randn(8, 16), torch.randn(7, 8)
    result = loading.unpack(payload)([weight, x])[0]
    torch.testing.assert_close(result, probe_result(weight, x))


def test_a_block_of_nothing_but_asserts_stays_a_block() -> None:
    lean, _ = lean_source.lean_source(
        "def call(args):\n    with guard():\n        assert_size_stride(args[0], (1,), (1,))\n"
    )
    assert "assert_" not in lean
    compile(lean, "lean", "exec")


def test_a_loaded_kernel_outlives_the_graph_that_it_came_with(tmp_path: Path) -> None:
    """Torch takes it from the GPU with its object, from 2.13 on; captured calls may replay it."""

    class Kernel:
        hash = "0" * 8

    class Result:
        def __init__(self) -> None:
            self.kernel, self.compile_meta = Kernel(), {}

        def make_launcher(self) -> Callable[..., None]:
            return lambda: None

    result = Result()
    kernel = weakref.ref(result.kernel)
    launcher = loading._launcher(result, b"binary", tmp_path, 0)
    assert result.compile_meta == {"device": 0}
    del result, launcher
    gc.collect()
    assert kernel() is not None


_FRESH = """
from pathlib import Path
payload, expected = sys.argv[1:]
import torch
from warmgraph_backends.cleanup import owners, temporary
from warmgraph_backends.torch_api import lean_source, loading
call = loading.unpack(Path(payload).read_bytes())
data = torch.load(expected)
result = call([data["weight"], data["x"]])[0]
torch.testing.assert_close(result, data["result"])
print("heavy:", [m for m in ("torch._dynamo", "torch._functorch.aot_autograd",
    "torch._inductor.compile_fx", "torch._inductor.select_algorithm", "triton.compiler")
    if m in sys.modules])
"""


def test_a_fresh_process_loads_a_payload_without_compilers(packed: Packed, tmp_path: Path) -> None:
    """Neither g++ on the path, nor Dynamo, AOTAutograd or Inductor's own compiler imported."""
    weight, x = torch.randn(8, 16), torch.randn(3, 8)
    (tmp_path / "payload").write_bytes(packed[1])
    result = probe_result(weight, x)
    torch.save({"weight": weight, "x": x, "result": result}, tmp_path / "data")
    run = subprocess.run(
        [sys.executable, "-c", ADOPT + _FRESH, tmp_path / "payload", tmp_path / "data"],
        env={**os.environ, "PATH": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "c")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.strip() == "heavy: []"
    assert not (tmp_path / "c").exists()  # nothing was compiled there either


_THREADS = """
import os
from pathlib import Path
[payload] = sys.argv[1:]
import torch
from warmgraph_backends.torch_api import loading
call = loading.unpack(Path(payload).read_bytes())
weight, x = torch.ones(8, 16), torch.ones(1024, 8)
x @ weight
found = []
for threads in (1, 2):
    torch.set_num_threads(threads)
    before = len(os.listdir("/proc/self/task"))
    call([weight, x])
    found.append(len(os.listdir("/proc/self/task")) - before)
print(found)
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted there")
def test_a_graph_runs_on_as_many_threads_as_the_process_that_calls_it_has(
    packed: Packed, tmp_path: Path
) -> None:
    """Whatever the process had that compiled it: with more, each loop would wait for all of them to
    get their turn on processors that were not meant for it.
    """
    source, payload = packed
    (tmp_path / "payload").write_bytes(payload)
    run = subprocess.run(
        [sys.executable, "-c", ADOPT + _THREADS, tmp_path / "payload"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.strip() == "[0, 1]"
    assert "#pragma omp parallel" in source and "num_threads(" not in source


# --- what a payload may not do ---------------------------------------------------------------


class Call:
    """Pickles as a call of any function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.parts = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.parts


@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        (os.system, ("true",), "system"),
        (eval, ("1",), "builtins.eval"),
        (exec, ("1",), "builtins.exec"),
        (open, ("x", "w"), "open"),
        (getattr, ("x", "upper"), "builtins.getattr"),
        (__import__, ("os",), "builtins.__import__"),
        (subprocess.Popen, (["true"],), "subprocess.Popen"),
        (torch.load, ("x",), "torch.serialization.load"),
        (pickle.loads, (b"N.",), "_pickle.loads"),
    ],
)
def test_a_payload_that_names_another_function_is_refused(
    function: Callable[..., Any], arguments: tuple[Any, ...], name: str
) -> None:
    for payload in (
        pickle.dumps(Call(function, *arguments)),
        pickle.dumps({"source": "", "triton": {}, "cpp": {"k": Call(function, *arguments)}}),
    ):
        with pytest.raises(GraphFileError, match="which no compiled graph needs") as refusal:
            loading.unpack(payload)
        assert name in refusal.value.reason


def test_a_dotted_name_does_not_reach_through_an_allowed_module() -> None:
    """Protocol 4 looks attributes up step by step: `torch` + `os.system` must not pass."""
    for module, name in [("torch", "os.system"), ("collections", "OrderedDict.fromkeys")]:
        payload = b"\x80\x04\x8c" + bytes([len(module)]) + module.encode()
        payload += b"\x8c" + bytes([len(name)]) + name.encode() + b"\x93."
        with pytest.raises(GraphFileError, match="which no compiled graph needs"):
            loading.unpack(payload)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"warmgraph_tests.gone.default": "gone(Tensor x) -> Tensor"},
            "gone.default, which is not",
        ),
        (
            {"aten.mm.default": "mm(Tensor self, Tensor mat2, bool fast) -> Tensor"},
            "aten.mm.default, which is another one here",
        ),
    ],
    ids=["gone", "other arguments"],
)
def test_a_graph_whose_operators_are_not_those_it_was_built_with_is_refused(
    packed: Packed, changed: dict[str, str], words: str
) -> None:
    parts = pickle.loads(packed[1])
    assert operators.schemas("torch.ops.aten.mm.default(a, b)") == {
        "aten.mm.default": str(torch.ops.aten.mm.default._schema)
    }
    parts["operators"] |= changed
    with pytest.raises(GraphFileError) as refusal:
        loading.unpack(pickle.dumps(parts))
    assert words in refusal.value.reason


@pytest.mark.parametrize(
    "payload",
    [b"", b"\x00" * 64, pickle.dumps([1, 2]), pickle.dumps({"source": "def call(:"})],
    ids=["empty", "zeros", "another object", "no graph"],
)
def test_a_payload_that_is_none_is_refused_in_words(payload: bytes) -> None:
    with pytest.raises(
        GraphFileError, match=f"does not load with torch {re.escape(torch.__version__)}"
    ):
        loading.unpack(payload)


# --- what a torch may lack -------------------------------------------------------------------


def _without_aot(graph: Any, inputs: Any, *, dynamic_shapes: str, options: Any) -> None: ...


def test_each_missing_private_api_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor
    from torch._inductor.runtime.triton_heuristics import StaticTritonCompileResult
    from torch.fx.experimental import _config

    assert present.missing_api() is None
    version = torch.__version__
    with monkeypatch.context() as patch:
        patch.delattr(torch._inductor, "standalone_compile")
        assert f"torch {version} has no standalone_compile" in str(present.missing_api())
        with pytest.raises(RequirementError, match="has no standalone_compile"):
            self_test("cpu")
    with monkeypatch.context() as patch:
        patch.setattr(torch._inductor, "standalone_compile", _without_aot)
        assert "aot" not in inspect.signature(torch._inductor.standalone_compile).parameters
        assert "standalone_compile(aot=True), which came with 2.10" in str(present.missing_api())
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch._inductor.runtime.triton_heuristics", None)
        assert "triton_heuristics" in str(present.missing_api())
    with monkeypatch.context() as patch:
        for owner in StaticTritonCompileResult.__mro__:
            if "make_launcher" in vars(owner):
                patch.delattr(owner, "make_launcher")
        assert "no static Triton launcher" in str(present.missing_api())
    with monkeypatch.context() as patch:
        patch.delitem(_config._config, "backed_size_oblivious")
        assert "no backed_size_oblivious setting" in str(present.missing_api())
    assert present.missing_api() is None


def test_the_self_test_names_the_step_that_broke(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lean_source, "_KERNEL_CALLS", frozenset())  # as if codegen had changed
    with pytest.raises(RequirementError, match=r"(packing|loading|running) failed with torch"):
        self_test("cpu")


def test_a_graph_that_changes_its_input_is_refused() -> None:
    class Changes(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.add_(1) * 2

    with torch.no_grad():
        exported = torch.export.export(Changes(), (torch.ones(4),), strict=False)
    with pytest.raises(BuildError, match="pure function of its inputs"):
        compiling.compile_wrapper(exported.graph_module, base_config("cpu"))


def test_settings_are_scoped_to_the_compile(packed: Packed) -> None:
    from torch._inductor import config
    from torch.fx.experimental import _config

    assert config.size_asserts and not config.assume_32bit_indexing
    assert not _config.backed_size_oblivious


def test_headers_are_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import codecache, cpp_builder

    compiled = []
    build = cpp_builder.CppBuilder.build

    def counting(self: Any) -> None:
        build(self)
        if str(self.get_target_file_path()).endswith(".gch"):
            compiled.append(self)

    monkeypatch.setattr(cpp_builder.CppBuilder, "build", counting)
    torchs_own = codecache._precompile_header.__wrapped__
    spool = tmp_path / "spool"
    spool.mkdir()
    for process in ("one", "two"):  # each has a folder of its own
        monkeypatch.setattr(codecache, "_HEADER_DIR", str(tmp_path / process))
        monkeypatch.setattr(codecache, "_HEADER_LOCK_DIR", str(tmp_path / process / "locks"))
        monkeypatch.setattr(codecache, "_precompile_header", torchs_own)
        compiling.remember_headers(spool, suffix=".works")
        header = Path(codecache._precompile_header("cstddef", "", device_type="cpu"))
        assert header.is_file() and header.with_name(f"{header.name}.gch").stat().st_size > 0
        assert len(compiled) == 1
    names = sorted(file.name for file in spool.iterdir())
    assert names == [f"{header.name}.gch.works", f"{header.name}.works"]


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="for x86 processors")
def test_vector_instructions_are_tried_out_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.cpp_builder import CppBuilder
    from torch._inductor.cpu_vec_isa import VecAVX2, VecISA

    tried = []
    build, torchs_own = CppBuilder.build, VecISA.check_build

    def counting(self: Any) -> None:
        tried.append(self)
        build(self)

    monkeypatch.setattr(CppBuilder, "build", counting)
    compiling.remember_vector_instructions(tmp_path, suffix=".works")
    first = VecAVX2().check_build(VecISA._avx_code)
    if not first:
        pytest.skip("no C++ compiler, or no AVX2")
    monkeypatch.setattr(VecISA, "check_build", torchs_own)  # as in another process
    compiling.remember_vector_instructions(tmp_path, suffix=".works")
    assert VecAVX2().check_build(VecISA._avx_code)
    assert len(tried) == 1
    other = VecAVX2()
    other._arch_flags += " -mno-avx512f"
    assert other.check_build(VecISA._avx_code) and len(tried) == 2, "by other flags"
    for _ in range(2):
        assert not VecAVX2().check_build("this is no C++")
    assert len(tried) == 4, "what fails may work another time"


@pytest.mark.skipif(not IS_X86, reason="elsewhere the target names all that there are")
def test_code_uses_no_instructions_but_those_that_its_target_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What of the processor's is not named, such as BMI2, another processor may lack."""
    from torch._inductor import cpp_builder
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    def asked() -> set[str]:
        options = cpp_builder.CppTorchOptions(vec_isa=pick_vec_isa())
        words = f"{' '.join(options.get_cflags())} {' '.join(options.get_passthrough_args())}"
        return {word.strip("-") for word in words.split()}

    if not any("arch" in flag for flag in asked()):
        pytest.skip("this torch asks for none by itself")
    own = cpp_builder._get_optimization_cflags
    monkeypatch.setattr(cpp_builder, "_get_optimization_cflags", own)
    compiling.use_named_instructions()
    sets = {
        flag.removeprefix("m") for flag in asked() if re.match(r"m(avx|fma|f16c|amx|arch)", flag)
    }
    spelled = {name.replace("_", "").replace("-", "") for name in instructions().split()}
    assert {flag.replace("-", "") for flag in sets} <= spelled, sets


LIBRARY = """
#include <cstdlib>
struct Bad { Bad() { std::%s; } } bad;
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="torch's own trial is taken there")
@pytest.mark.parametrize(("does", "loads"), [("abs(1)", True), ("abort()", False)])
def test_a_library_that_ends_the_process_that_loads_it_ends_a_copy_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, loads: bool
) -> None:
    """As one does whose instructions the CPU lacks."""
    from torch._inductor.cpu_vec_isa import VecAVX2, VecISA

    monkeypatch.setattr(VecISA, "check_build", VecISA.check_build)
    compiling.remember_vector_instructions(tmp_path, suffix=".works")
    assert VecAVX2().check_build(LIBRARY % does) is loads


def test_an_index_that_divides_is_told_from_one_that_only_adds_up() -> None:
    """What a rotation reads of its row: a neighbour by a quotient, a head's part by a remainder."""
    import sympy
    from torch.utils._sympy.functions import FloorDiv, ModularIndexing

    row, place = sympy.symbols("row place", integer=True)
    for index in (place, 5120 * row + place, 5120 * row + 2 * place + 1, sympy.Integer(3), 3):
        assert compiling._is_linear(index)
    for index in (2 * FloorDiv(place, 2) + 5120 * row, ModularIndexing(place, 1, 128) + row):
        assert not compiling._is_linear(index)
