"""Keys: everything that must change one does, and nothing else."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from warmgraph_backends.compilers.inductor import Inductor
from warmgraph_backends.compilers.installed import installed_target
from warmgraph_backends.compilers.registry import backend_named
from warmgraph_backends.contract import InputSpec, RegionSpec, Symbol
from warmgraph_backends.families.catalogue import plan_model
from warmgraph_backends.plans.plan import Place
from warmgraph_backends.plans.specs import describe_place
from warmgraph_backends.storing.manifest import read_manifest
from warmgraph_backends.target import keys
from warmgraph_backends.target.compiler_options import inductor_fingerprint
from warmgraph_backends.target.own_code import own_fingerprint
from warmgraph_backends.target.target import TorchFacts, compose_target, explain_target
from warmgraph_backends.torch_api import compiling
from warmgraph_tools.inprocess import HOST_FLAGS, Host

from . import saved

ROOT = Path(__file__).resolve().parents[2]
Change = Callable[[Any], None]


def place_keys(model: Any, dtype: torch.dtype = torch.float32) -> dict[str, str]:
    """The key of every place of a ModelPatcher's model."""
    plan = plan_model(model.model.diffusion_model)
    assert not isinstance(plan, str), plan
    target = keys.target("cpu", Inductor())
    return {
        place.name: keys.graph_key(describe_place(place, plan, dtype=dtype, device="cpu"), target)
        for place in plan.places
    }


def first_place(model: Any, form: str) -> tuple[Place, Any]:
    plan = plan_model(model.model.diffusion_model)
    assert not isinstance(plan, str), plan
    return next(p for p in plan.places if p.form.name == form), plan


@pytest.fixture(scope="module")
def model(host: Host) -> Any:
    """A MODEL that no test changes."""
    return host.load("narrowxl")[0]


# --- what must not change a key --------------------------------------------------------------

_SCRIPT = """
import importlib, json, sys
folder, alias, architecture, tree, checkpoint, *flags = sys.argv[1:]
sys.argv = ["main.py", *flags]
sys.path.insert(0, tree)
import comfy.options
comfy.options.enable_args_parsing()
import comfy.sd, torch
sys.path.insert(0, architecture)
import narrow_arch
from by_path import load
sys.modules[alias.rpartition(".")[0]] = type(sys)("parent")
load(alias, folder)
def part(name):
    return importlib.import_module(f"{alias}.{name}")
torch.set_grad_enabled(False)
loaded = comfy.sd.load_checkpoint_guess_config(
    checkpoint, output_vae=False, output_clip=False)[0]
model = loaded.model.diffusion_model
plan = part("families.catalogue").plan_model(model)
target = part("target.keys").target("cpu", part("compilers.inductor").Inductor())
describe = part("plans.specs").describe_place
print("KEYS" + json.dumps({
    place.name: part("target.keys").graph_key(
        describe(place, plan, dtype=torch.float32, device="cpu"), target)
    for place in reversed(plan.places)}))
"""


def test_keys_are_the_same_in_another_process_with_another_hash_seed_name_and_checkpoint(
    host: Host, model: Any
) -> None:
    """The host mangles a pack's module name after its folder; hash seeds order sets."""
    assert os.environ.get("PYTHONHASHSEED") != "4711"
    other = host.base / "models" / "checkpoints" / host.model_file("narrowxl", seed=1)
    alias = "/srv/some place/custom_nodes/warm-graph.backends"
    folders = [str(ROOT / "backends"), alias, str(ROOT / "dev" / "tools"), str(host.tree)]
    arguments = [*folders, str(other), *HOST_FLAGS]
    run = subprocess.run(
        [sys.executable, "-c", _SCRIPT, *arguments],
        env={**os.environ, "PYTHONHASHSEED": "4711"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("KEYS")]
    assert lines, run.stderr[-2000:]
    theirs = json.loads(lines[0][4:])
    assert len(theirs) > 20 and theirs == place_keys(model)


def test_sampling_loras_and_prompts_of_any_length_leave_every_key(host: Host) -> None:
    model, clip, _ = host.load("narrowxl")
    before = place_keys(model)
    lora = host.model_file("lora")
    patched, _ = host.node(
        "LoraLoader", model=model, clip=clip, lora_name=lora, strength_model=0.7, strength_clip=1.0
    )
    negative = host.encode(clip, "")
    for prompt in ("a cat", "a cat and " * 60):
        for each in (model, patched):
            host.sample(each, host.encode(clip, prompt), negative, steps=1)
            assert place_keys(each) == before
    host.unload()
    assert place_keys(model) == before


def test_equal_places_have_one_key_and_object_ids_and_names_are_not_in_it(model: Any) -> None:
    found = place_keys(model)
    assert 3 < len(set(found.values())) < len(found)
    place, plan = first_place(model, "up")
    text = json.dumps(keys.structure(describe_place(place, plan, dtype=torch.half, device="cpu")))
    for word in (" at 0x", place.name, str(ROOT), "warmgraph_backends", "/"):
        assert word not in text


def test_a_label_is_for_people_only(model: Any) -> None:
    place, plan = first_place(model, "up")
    description = describe_place(place, plan, dtype=torch.float32, device="cpu")
    renamed = dataclasses.replace(description, label="another name")
    assert keys.graph_key(description, {}) == keys.graph_key(renamed, {})


def test_the_order_of_dict_entries_does_not_matter(model: Any) -> None:
    place, plan = first_place(model, "residual")
    description = describe_place(place, plan, dtype=torch.float32, device="cpu")

    def backwards(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: backwards(v) for k, v in reversed(value.items())}
        return [backwards(v) for v in value] if isinstance(value, list) else value

    other = RegionSpec.from_dict(backwards(json.loads(json.dumps(description.to_dict()))))
    target = keys.target("cpu", Inductor())
    assert list(other.sources) != list(description.sources)
    assert keys.graph_key(other, backwards(target)) == keys.graph_key(description, target)


def test_unread_attributes_and_host_bookkeeping_do_not_matter(host: Host) -> None:
    model, _, _ = host.load("narrowxl")
    before = place_keys(model)
    for module in model.model.diffusion_model.modules():
        module.a_note_of_some_other_node = "x" * 10
        if hasattr(module, "comfy_cast_weights"):
            module.comfy_cast_weights = not module.comfy_cast_weights
            module.weight_function = [lambda weight: weight]
            module._v = object()
    assert place_keys(model) == before


# --- what must change a key ------------------------------------------------------------------


class OtherConv(torch.nn.Conv2d):
    """Of the same shape, and not the host's."""


def _other_class(block: Any) -> None:
    block.__class__ = type(block).__mro__[1]


def _other_child(block: Any) -> None:
    block.out_layers[3] = OtherConv(64, 64, 3, padding=1)


def _no_bias(block: Any) -> None:
    block.in_layers[2].bias = None


def _wider(block: Any) -> None:
    layer = block.emb_layers[1]
    layer.weight = torch.nn.Parameter(torch.zeros(2 * layer.weight.shape[0], 256))


STRUCTURE: dict[str, Change] = {
    "class of the region": _other_class,
    "class of a child": _other_child,
    "bias": _no_bias,
    "shape of a parameter": _wider,
    "a flag that forward reads": lambda b: setattr(b, "use_scale_shift_norm", True),
    "eps of a norm": lambda b: setattr(b.in_layers[0], "eps", 1e-6),
    "stride": lambda b: setattr(b.in_layers[2], "stride", (2, 2)),
    "dilation": lambda b: setattr(b.in_layers[2], "dilation", (2, 2)),
    "padding": lambda b: setattr(b.in_layers[2], "padding", (0, 0)),
    "groups": lambda b: setattr(b.in_layers[0], "num_groups", 16),
    "order of layers": lambda b: b.in_layers._modules.update(
        {"0": b.in_layers[1], "1": b.in_layers[0]}
    ),
    "dtype of a parameter that no operator of the host casts": lambda b: setattr(
        b, "skip_connection", torch.nn.Conv2d(64, 64, 1, dtype=torch.double)
    ),
}


def copied_place(model: Any) -> tuple[Place, Any]:
    """A residual block of its own, for a test to change."""
    place, plan = first_place(model, "residual")
    return dataclasses.replace(place, module=copy.deepcopy(place.module)), plan


def key_of(place: Place, plan: Any) -> str:
    description = describe_place(place, plan, dtype=torch.float32, device="cpu")
    return keys.graph_key(description, {})


@pytest.mark.parametrize("what", STRUCTURE)
def test_a_change_of_structure_changes_the_key(model: Any, what: str) -> None:
    place, plan = copied_place(model)
    before = key_of(place, plan)
    STRUCTURE[what](place.module)
    assert key_of(place, plan) != before


def test_two_dtypes_of_one_foreign_layer_are_two_keys(model: Any) -> None:
    place, plan = copied_place(model)
    found = set()
    for dtype in (torch.float32, torch.float16, torch.float64):
        place.module.skip_connection = torch.nn.Conv2d(64, 64, 1, dtype=dtype)
        found.add(key_of(place, plan))
    assert len(found) == 3


def test_compute_dtype_and_device_change_every_key(model: Any) -> None:
    found = [place_keys(model, dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    for name in found[0]:
        assert len({each[name] for each in found}) == 3, name
    place, plan = first_place(model, "up")
    assert len({device_key(place, plan, device) for device in ("cpu", "cuda")}) == 2


def device_key(place: Place, plan: Any, device: str) -> str:
    description = describe_place(place, plan, dtype=torch.float32, device=device)
    facts = {**keys.target("cpu", Inductor()), "device": device}
    return keys.graph_key(description, facts)


def test_host_code_changes_the_key_of_those_that_run_through_it(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import comfy.ldm.modules.attention as attention
    import comfy.ldm.modules.diffusionmodules.openaimodel as unet

    before = place_keys(model)

    def forms_changed() -> set[str]:
        plan = plan_model(model.model.diffusion_model)
        assert not isinstance(plan, str)
        form = {place.name: place.form.name for place in plan.places}
        after = place_keys(model)
        return {form[name] for name in before if before[name] != after[name]}

    with monkeypatch.context() as patch:  # which attention is called is no part of a block's graph
        for name in ("optimized_attention", "optimized_attention_masked"):
            patch.setattr(attention, name, attention.attention_sub_quad)
        assert forms_changed() == set()
        patch.setattr(attention, "default", lambda value, other: other if value is None else value)
        assert forms_changed() == {"block"}
    with monkeypatch.context() as patch:
        patch.setattr(unet, "checkpoint", lambda function, inputs, params, flag: function(*inputs))
        assert forms_changed() == {"residual"}
    with monkeypatch.context() as patch:
        patch.setattr(unet.Upsample, "forward", lambda self, x, output_shape=None: x)
        assert forms_changed() == {"up"}
    assert forms_changed() == set()


def sample(**changes: Any) -> RegionSpec:
    plain = RegionSpec(
        "unet",
        "up",
        "Upsample 64",
        {"class": "a:B", "attributes": {"channels": 64}, "parameters": {}, "modules": []},
        (InputSpec("x", "float32", ("batch", 64, "height", "width")),),
        (Symbol("batch", 1, 64, 2),),
        {"a:B.forward": "0123456789abcdef"},
        "cpu",
    )
    return dataclasses.replace(plain, **changes)


INPUTS = {
    "family": {"family": "dit"},
    "form": {"form": "down"},
    "sources": {"sources": {"a:B.forward": "fedcba9876543210"}},
    "one more function": {"sources": {"a:B.forward": "0123456789abcdef", "a:f": "0"}},
    "dtype": {"inputs": (InputSpec("x", "float16", ("batch", 64, "height", "width")),)},
    "rank": {"inputs": (InputSpec("x", "float32", ("batch", 64, "height")),)},
    "fixed size": {"inputs": (InputSpec("x", "float32", ("batch", 32, "height", "width")),)},
    "symbolic instead of fixed": {
        "inputs": (InputSpec("x", "float32", ("batch", "width", "height", "width")),)
    },
    "order of dims": {"inputs": (InputSpec("x", "float32", ("batch", 64, "width", "height")),)},
    "one more input": {
        "inputs": (
            InputSpec("x", "float32", ("batch", 64, "height", "width")),
            InputSpec("out_height", "int", ("out_height",)),
        )
    },
    "lower end of a range": {"symbols": (Symbol("batch", 2, 64, 2),)},
    "upper end of a range": {"symbols": (Symbol("batch", 1, 128, 2),)},
}


@pytest.mark.parametrize("what", INPUTS)
def test_a_change_of_what_a_graph_takes_changes_the_key(what: str) -> None:
    target = keys.target("cpu", Inductor())
    assert keys.graph_key(sample(**INPUTS[what]), target) != keys.graph_key(sample(), target)


@pytest.mark.parametrize(
    "fact",
    [
        "device",
        "torch",
        "torch_source",
        "python",
        "platform",
        "deterministic",
        "backend",
        "options",
        "warmgraph",
        "instructions",
    ],
)
def test_every_fact_of_the_target_is_in_it_and_changes_the_key(fact: str) -> None:
    target = keys.target("cpu", Inductor())
    assert keys.graph_key(sample(), target) == keys.graph_key(
        sample(), json.loads(json.dumps(target))
    )
    assert fact in target
    assert keys.graph_key(sample(), {**target, fact: "another"}) != keys.graph_key(sample(), target)


def test_our_own_code_is_part_of_every_graphs_target() -> None:
    for device in ("cpu", "cuda"):
        assert inductor_fingerprint(device, "3.6.0")["warmgraph"] == own_fingerprint(device)
    assert "warmgraph" not in keys.target("cpu", backend_named("eager"))


def test_the_target_is_read_from_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    target = keys.target("cpu", Inductor())
    assert target["torch"] == torch.__version__
    assert target["python"] == f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert keys.target("cpu", backend_named("eager"))["backend"] == "eager"
    monkeypatch.setitem(compiling.CONFIG, "size_asserts", True)
    assert keys.target("cpu", Inductor()) != target
    monkeypatch.undo()
    assert keys.target("cpu", Inductor()) == target
    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(not before)
        assert keys.target("cpu", Inductor()) != target
    finally:
        torch.use_deterministic_algorithms(before)


def test_tritons_version_is_part_of_a_gpus_target() -> None:
    triton = pytest.importorskip("triton")
    assert Inductor().fingerprint("cuda")["triton"] == triton.__version__
    assert "triton" not in Inductor().fingerprint("cpu")


def test_a_processors_instructions_are_part_of_its_target_and_of_no_gpus() -> None:
    """Code for others ends a process that calls it; those are named that torch can ask for."""
    named = keys.target("cpu", Inductor())["instructions"].split()
    assert ("avx2" in named) is torch.cpu._is_avx2_supported()
    assert ("avx512f" in named) is torch.cpu._is_avx512_supported()
    assert ("avx512_vnni" in named) is torch.cpu._is_vnni_supported()
    assert ("amx_tile" in named) is torch.cpu._is_amx_tile_supported()
    assert "instructions" not in inductor_fingerprint("cuda", "3.6.0")


def test_a_gpus_graph_is_of_no_operating_system() -> None:
    of_torch = TorchFacts("2.11.0", None, "13.0", False, "8.9")
    facts = compose_target("cuda", "inductor", inductor_fingerprint("cuda", "3.6.0"), of_torch)
    assert "platform" not in facts and "platform" in keys.target("cpu", Inductor())
    older = {**facts, "platform": "Linux-x86_64", "warmgraph": "0" * 16}
    assert explain_target(older, facts) == ["made by another version of Warmgraph"]


@pytest.mark.parametrize("backend", ["inductor", "eager"])
def test_the_target_of_the_installed_files_is_this_processs(backend: str) -> None:
    assert installed_target("cpu", backend) == keys.target("cpu", backend_named(backend))
    assert installed_target("cpu", "another") is None


@pytest.mark.gpu
def test_the_target_of_the_installed_files_is_this_processs_on_a_gpu_as_well() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    assert installed_target("cuda", "inductor") == keys.target("cuda", Inductor())


@pytest.mark.gpu
def test_the_gpus_capability_and_cuda_are_part_of_its_target() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    target = keys.target("cuda", Inductor())
    assert target["capability"] == ".".join(map(str, torch.cuda.get_device_capability()))
    assert target["cuda"] == torch.version.cuda


# --- words ------------------------------------------------------------------------------------


_AVX2 = "avx2 fma f16c"
_AVX512 = f"{_AVX2} avx512f avx512dq avx512vl avx512bw"


@pytest.mark.parametrize(
    ("theirs", "ours", "words"),
    [
        (_AVX512, _AVX2, "made for AVX-512, this machine has AVX2"),
        (_AVX2, f"{_AVX512} avx512_vnni amx_tile", "made for AVX2, this machine has AMX"),
        (_AVX2, "", "made for AVX2, this machine has basic ones"),
        (
            f"{_AVX512} avx512_vnni avx512_bf16",
            _AVX512,
            "made for AVX-512 with avx512_bf16, avx512_vnni, this machine has AVX-512",
        ),
    ],
)
def test_a_file_of_another_processor_is_told_in_words(theirs: str, ours: str, words: str) -> None:
    here = {**keys.target("cpu", Inductor()), "instructions": ours}
    made_for = {**here, "instructions": theirs}
    assert explain_target(made_for, here) == [f"processor's instructions: {words}"]
    assert keys.graph_key(sample(), made_for) != keys.graph_key(sample(), here)


def test_a_miss_is_explained_in_words() -> None:
    here = keys.target("cpu", Inductor())
    made_for = {**here, "torch": "2.10.0", "capability": "8.9"}
    whole = {
        **saved.manifest("0" * 64, structure=keys.structure(sample()), **keys.inputs(sample())),
        "target": made_for,
        "format": 1,
        "payload": {"sha256": "0" * 64, "bytes": 1, "raw_bytes": 1, "compression": "zlib"},
    }
    assert explain_target(here, here) == []
    assert explain_target(made_for, here) == [
        "GPU compute capability: made for 8.9, this machine has None",
        f"torch: made for 2.10.0, this machine has {torch.__version__}",
    ]
    older = {**here, "payload": 4}
    del older["warmgraph"], older["instructions"]
    for other in (older, {**here, "warmgraph": "0" * 16}, {**here, "persistent_row": 1}):
        assert explain_target(other, here) == ["made by another version of Warmgraph"]
    assert len(explain_target({**older, "torch": "2.10.0"}, here)) == 2
    stored = read_manifest(json.loads(json.dumps(whole)))
    assert keys.explain_structure(stored, sample()) == []
    changed = sample(sources={"a:B.forward": "fedcba9876543210"})
    assert keys.explain_structure(stored, changed) == ["the host's code changed: a:B.forward"]
    assert keys.explain_structure(stored, sample(**INPUTS["dtype"])) == ["its inputs differ"]
    other = {**sample().module, "attributes": {"channels": 32}}
    assert keys.explain_structure(stored, sample(module=other)) == [
        "the region's layers, sizes or dtypes differ"
    ]
