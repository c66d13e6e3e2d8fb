"""A torch that lacks one of the private names: each is taken away in turn, inside this process."""

from __future__ import annotations

import ast
import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from warmgraph_backends.compilers.inductor import Inductor
from warmgraph_backends.compilers.registry import resolve_backend
from warmgraph_backends.compilers.self_test import self_test
from warmgraph_backends.errors import BuildError, RequirementError
from warmgraph_backends.families.catalogue import plan_model
from warmgraph_backends.kinds.tolerance import Judgement, Outcome
from warmgraph_backends.plans.specs import describe_place
from warmgraph_backends.target import keys
from warmgraph_backends.torch_api import compiling, present
from warmgraph_backends.worker import build, checks
from warmgraph_tools.inprocess import Host

BACKENDS = Path(__file__).resolve().parents[2] / "backends"
Name = tuple[str, str]

#: Without these nothing compiles, or nothing that was compiled can be loaded.
NEEDED: tuple[Name, ...] = (
    ("torch._inductor", "config"),
    ("torch._inductor", "standalone_compile"),
    ("torch._inductor.choices", "InductorChoices"),
    ("torch._inductor.codecache", "PyCodeCache"),
    ("torch._inductor.custom_graph_pass", "CustomGraphPass"),
    ("torch._inductor.custom_graph_pass", "get_hash_for_files"),
    ("torch._inductor.runtime", "triton_heuristics"),
    ("torch._inductor.runtime.hints", "ReductionHint"),
    ("torch._inductor.runtime.triton_heuristics", "StaticTritonCompileResult"),
    ("torch._inductor.select_algorithm", "extern_kernels"),
    ("torch._inductor.virtualized", "V"),
    ("torch._subclasses", "fake_tensor"),
    ("torch._subclasses.fake_tensor", "FakeTensorMode"),
    ("torch.fx.experimental", "_config"),
    ("torch.fx.experimental.symbolic_shapes", "ShapeEnv"),
)
#: We could do without these, but torch's own code asks for them in some of its versions.
NEEDED_BY_SOME: tuple[Name, ...] = (
    ("torch._dynamo", "config"),
    ("torch._dynamo", "trace_rules"),
    ("torch._guards", "TracingContext"),
    ("torch._inductor", "codecache"),
    ("torch._inductor", "utils"),
    ("torch._inductor.codegen", "triton"),
    ("torch._inductor.codegen.wrapper", "PythonWrapperCodegen"),
    ("torch.fx.experimental.symbolic_shapes", "statically_known_true"),
)
#: What their objects must have besides.
NEEDED_PARTS: tuple[Name, ...] = (
    ("torch._C._dynamo.guards", "_torchinductor_pyobject_tensor_data_ptr"),
    ("torch._inductor.codecache.PyCodeCache", "modules"),
    ("torch._inductor.config", "get_config_copy"),
    ("torch._inductor.runtime.triton_heuristics.StaticTritonCompileResult", "make_launcher"),
    ("torch._inductor.virtualized.V", "set_choices_handler"),
)
#: Where a hook has another name, Inductor's own choice is taken.
USEFUL_PARTS: tuple[Name, ...] = (
    ("torch._inductor.codegen.triton", "get_fused_kernel_name"),
    ("torch._inductor.choices.InductorChoices", "should_use_persistent_reduction"),
    ("torch._inductor.utils", "aggregate_origins"),
)
#: Only some graphs need these, on GPUs, or all go on without them.
NOT_BY_ALL: tuple[Name, ...] = (
    # Where a card is pretended.
    ("torch._dynamo", "device_interface"),
    # In float16 on a processor; where others' code is called.
    ("torch._inductor.codegen.cpp", "CppKernel"),
    ("torch._inductor.dependencies", "WeakDep"),
    ("torch._inductor.fx_passes", "joint_graph"),
    ("torch._inductor.fx_passes", "post_grad"),
    ("torch._inductor.fx_passes.joint_graph", "UniformValueConstantFolder"),
    ("torch._inductor.runtime", "triton_helpers"),
    ("torch._inductor", "cpp_builder"),
    ("torch._inductor", "cpu_vec_isa"),
    ("torch._inductor", "lowering"),
    ("torch._inductor.codegen.simd", "SIMDScheduling"),
    ("torch._inductor.runtime.cache_dir_utils", "triton_cache_dir"),
    ("torch._inductor.runtime.runtime_utils", "triton_hash_to_path_key"),
)


def _private(module: str) -> bool:
    return module.startswith(("torch._", "torch.fx.experimental"))


def _imported(path: Path) -> set[Name]:
    """Every private name of torch that a module imports, wherever in it."""
    names: set[Name] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and _private(node.module):
            names |= {(node.module, each.name) for each in node.names}
    return names


def test_private_names_are_imported_in_one_room_and_all_are_tried_here() -> None:
    room = BACKENDS / "torch_api"
    imported = [_imported(path) for path in room.glob("*.py")]
    assert set().union(*imported) == {*NEEDED, *NEEDED_BY_SOME, *NOT_BY_ALL}
    for path in BACKENDS.rglob("*.py"):
        assert path.parent == room or not _imported(path), path


@pytest.fixture(scope="module", autouse=True)
def _all_is_imported() -> None:
    """Torch imports most of itself late, and from its own modules by the same names."""
    self_test("cpu")


@contextlib.contextmanager
def without(owner: str, name: str) -> Iterator[None]:
    """Take one name away from a module or class of torch."""
    target = _resolve(owner)
    with pytest.MonkeyPatch.context() as patch:
        for each in (target, *getattr(target, "__mro__", ()), *type(target).__mro__):
            if name in vars(each):
                patch.delattr(each, name)
        assert not hasattr(target, name)
        submodule = f"{owner}.{name}"
        if submodule in sys.modules:
            patch.setitem(sys.modules, submodule, None)
        yield


def _resolve(path: str) -> Any:
    if path in sys.modules:
        return sys.modules[path]
    parent, _, name = path.rpartition(".")
    try:
        return importlib.import_module(path)
    except ImportError:
        return getattr(_resolve(parent), name)


@pytest.mark.parametrize(("owner", "name"), [*NEEDED, *NEEDED_PARTS])
def test_a_torch_without_a_needed_name_is_told_by_name_and_for_good(owner: str, name: str) -> None:
    with without(owner, name):
        with pytest.raises(RequirementError) as refusal:
            self_test("cpu")
        resolve_backend("auto", "cpu")  # a session starts, whatever is missing
    assert refusal.value.final
    assert f"torch {torch.__version__}" in refusal.value.reason
    assert name in refusal.value.reason or owner.rpartition(".")[2] in refusal.value.reason
    self_test("cpu")


@pytest.mark.parametrize(("owner", "name"), NEEDED_BY_SOME)
def test_a_torch_without_a_name_of_its_own_is_told_or_compiles(owner: str, name: str) -> None:
    with without(owner, name):
        try:
            self_test("cpu")
        except RequirementError as refusal:
            assert refusal.final and name in refusal.reason


@pytest.mark.parametrize(("owner", "name"), [*NOT_BY_ALL, *USEFUL_PARTS])
def test_a_torch_without_a_name_that_not_all_need_compiles(owner: str, name: str) -> None:
    with without(owner, name):
        self_test("cpu")


def test_another_signature_is_told_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.codecache import PyCodeCache

    def compile_otherwise(graph: Any, inputs: Any, *, aot: bool) -> Any: ...

    monkeypatch.setattr(torch._inductor, "standalone_compile", compile_otherwise)
    with pytest.raises(RequirementError, match="unexpected keyword argument") as refusal:
        self_test("cpu")
    assert refusal.value.final
    monkeypatch.setattr(torch._inductor, "standalone_compile", lambda *_, aot, **__: object())
    with pytest.raises(RequirementError, match="no attribute 'inner_fn'") as refusal:
        self_test("cpu")
    assert refusal.value.final
    monkeypatch.undo()
    monkeypatch.setattr(PyCodeCache, "modules", {})  # no list any more
    with pytest.raises(RequirementError, match="compiling failed with torch") as refusal:
        self_test("cpu")
    assert refusal.value.final


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), MemoryError()])
def test_what_may_pass_is_not_for_good(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise BuildError("it failed") from error

    monkeypatch.setattr(sys.modules["warmgraph_backends.compilers.self_test"], "pack", fail)
    with pytest.raises(RequirementError, match="packing failed") as refusal:
        self_test("cpu")
    assert not refusal.value.final
    assert Inductor().explain_failure("cpu") is not None


def test_requirements_never_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._inductor, "standalone_compile", min)  # it has no signature
    found = Inductor().requirements("cpu")
    assert present.missing_api() == found[0].reason
    assert not found[0].met and f"torch {torch.__version__}" in found[0].reason


def test_vector_instructions_and_compilers_of_another_torch_stop_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import config, cpu_vec_isa

    with without("torch._inductor", "config"):
        compiling.start_no_compilers()
    with without("torch._inductor", "cpu_vec_isa"):
        compiling.remember_vector_instructions(tmp_path, suffix=".works")
    with without("torch._inductor", "cpp_builder"):
        isa = cpu_vec_isa.VecAVX2()
        assert compiling._builds_and_loads(isa, isa._avx_code) is None, "torch is asked itself"
    with without("torch._inductor", "codecache"):
        compiling.remember_headers(tmp_path, suffix=".works")
    with without("torch._inductor.codecache", "_precompile_header"):
        compiling.remember_headers(tmp_path, suffix=".works")
    monkeypatch.delattr(cpu_vec_isa, "VecISA")
    compiling.remember_vector_instructions(tmp_path, suffix=".works")
    monkeypatch.setitem(sys.modules, "torch._inductor.config", object())
    monkeypatch.setattr(torch._inductor, "config", object())
    compiling.start_no_compilers()
    monkeypatch.undo()
    before = config.compile_threads
    try:
        compiling.start_no_compilers()
        assert config.compile_threads == 1
    finally:
        config.compile_threads = before


@pytest.fixture(scope="module")
def task(host: Host) -> dict[str, Any]:
    """The build of a narrow SDXL's upsampling convolution."""
    model = host.load("narrowxl")[0].model.diffusion_model
    plan = plan_model(model)
    assert not isinstance(plan, str)
    place = next(place for place in plan.places if place.form.name == "up")
    description = describe_place(place, plan, dtype=torch.float32, device="cpu")
    key = keys.graph_key(description, keys.target("cpu", Inductor()))
    return {"description": description.to_dict(), "backend": "inductor", "key": key}


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        ("torch._subclasses.fake_tensor", "FakeTensorMode"),
        ("torch._inductor.codecache", "PyCodeCache"),
        ("torch._C._dynamo.guards", "_torchinductor_pyobject_tensor_data_ptr"),
    ],
    ids=["exporting", "compiling", "loading"],
)
def test_a_build_fails_in_words_for_good_whichever_step_meets_such_a_torch(
    task: dict[str, Any], owner: str, name: str
) -> None:
    with without(owner, name), pytest.raises(BuildError, match=name) as failure:
        build.run(task, measure=contextlib.nullcontext)
    assert failure.value.final
    assert failure.value.reason.startswith("nothing compiles here: ")
    assert f"torch {torch.__version__}" in failure.value.reason


def test_a_build_that_fails_by_itself_is_not_for_good(
    task: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the host's code takes no float64, in which the two would be compared once more."""
    from comfy.ldm.modules.diffusionmodules.openaimodel import Upsample

    own = Upsample.forward

    def forward(self: Any, x: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        if x.dtype is torch.float64:
            raise ValueError("no kernel takes float64")
        return own(self, x, *rest, **named)

    program = build.export
    wrong = Judgement(Outcome.BAD, (1.0,), (0.5,))
    monkeypatch.setattr(checks, "judge", lambda *_, **__: wrong)

    def exported(*args: Any) -> Any:
        made = program(*args)
        monkeypatch.setattr(Upsample, "forward", forward)
        return made

    monkeypatch.setattr(build, "export", exported)
    with pytest.raises(BuildError, match="differs from ComfyUI's result") as failure:
        build.run(task, measure=contextlib.nullcontext)
    assert not failure.value.final
