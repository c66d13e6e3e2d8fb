"""What other packs put in the place of the host's functions: described, carried over, undone."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from warmgraph_backends.code.purity import objection, options_kept
from warmgraph_backends.code.sources import Watch, attributes_read
from warmgraph_backends.code.transplant import transplanted
from warmgraph_backends.compilers.registry import backend_named
from warmgraph_backends.contract import RegionSpec
from warmgraph_backends.errors import BuildError, DescriptionError
from warmgraph_backends.families.spatial import spatial_transformer_change
from warmgraph_backends.families.unet import FORMS, SYMBOLS
from warmgraph_backends.plans.plan import Place, Plan
from warmgraph_backends.plans.specs import describe_place
from warmgraph_backends.runtime.wiring import replaced_function
from warmgraph_backends.target.keys import graph_key, target
from warmgraph_backends.worker import build
from warmgraph_tools.inprocess import Host

Install = Callable[[str, dict[str, str]], Path]

#: A pack that puts a function around the host's forward when one of its files is imported, and
#: remembers the options of the step on a class of its own.
WRAPS = """
import functools
from comfy.ldm.modules.attention import BasicTransformerBlock

class Notes:
    options = None

def note_options(cls, function):
    @functools.wraps(function)
    def forward(self, x, context=None, transformer_options={}):
        cls.options = transformer_options
        return RESULT
    return forward

BasicTransformerBlock.forward = note_options(Notes, BasicTransformerBlock.forward)
"""
#: One that puts a function around an operator of torch.
OPERATOR = """
import functools
import torch

def around(function):
    @functools.wraps(function)
    def gelu(x, *rest, **named):
        return 0.5 * function(x, *rest, **named)
    return gelu

F = torch.nn.functional
F.gelu = around(F.gelu)
NODE_CLASS_MAPPINGS = {}
"""
CALL = "function(self, x, context, transformer_options)"
INIT = {"__init__.py": "from .parts import around\nNODE_CLASS_MAPPINGS = {}\n"}


def wraps(result: str = f"0.5 * {CALL}", **changes: str) -> dict[str, str]:
    """The files of such a pack, with some text of the one that wraps replaced."""
    text = WRAPS.replace("RESULT", result)
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    return {**INIT, "parts/around.py": text}


def block() -> Any:
    from comfy.ldm.modules.attention import BasicTransformerBlock
    from comfy.ops import disable_weight_init

    made = BasicTransformerBlock(8, 2, 4, context_dim=6, operations=disable_weight_init)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made.eval()


def describe() -> RegionSpec:
    plan = Plan(symbols=SYMBOLS)
    return describe_place(
        Place("block", block(), FORMS["block"]), plan, dtype=torch.float32, device="cpu"
    )


def key_of(description: RegionSpec) -> str:
    return graph_key(description, target("cpu", backend_named("eager")))


def run_build(description: RegionSpec) -> None:
    """What a worker does, as far as the graph's export."""
    task = {
        "description": json.loads(json.dumps(description.to_dict())),
        "backend": "eager",
        "key": key_of(description),
    }
    build.run(task, measure=contextlib.nullcontext)


@contextlib.contextmanager
def elsewhere(host_forward: Any) -> Any:
    """As a worker is: the host alone, and again after each job."""
    from comfy.ldm.modules.attention import BasicTransformerBlock

    bound, BasicTransformerBlock.forward = BasicTransformerBlock.forward, host_forward
    modules = {n: m for n, m in sys.modules.items() if "custom_nodes" in n}
    for name in modules:
        del sys.modules[name]
    try:
        yield
        assert BasicTransformerBlock.forward is host_forward
        assert not [n for n in sys.modules if "custom_nodes" in n]
    finally:
        sys.modules.update(modules)
        BasicTransformerBlock.forward = bound


@pytest.fixture
def host_forward(host: Host) -> Any:
    from comfy.ldm.modules.attention import BasicTransformerBlock

    return BasicTransformerBlock.forward


# --- what a description says ---------------------------------------------------------------------


def test_without_packs_a_description_names_none(host: Host) -> None:
    assert describe().packs == ()


def test_the_file_of_a_wrapped_forward_travels_and_changes_the_key(
    host: Host, install_pack: Install
) -> None:
    plain = key_of(describe())
    folder = install_pack("Around", wraps())
    [file] = describe().packs
    assert (file.pack, file.replaces) == ("Around", "BasicTransformerBlock.forward")
    assert Path(file.path) == folder / "parts" / "around.py"
    assert file.text == (folder / "parts" / "around.py").read_text("utf-8")
    assert file.module in sys.modules and Path(file.folder) == folder
    assert key_of(describe()) != plain


def test_the_text_of_the_file_and_where_it_lies_are_no_part_of_the_key(
    host: Host, install_pack: Install, host_forward: Any
) -> None:
    from comfy.ldm.modules.attention import BasicTransformerBlock

    install_pack("Around", wraps())
    key = key_of(describe())
    BasicTransformerBlock.forward = host_forward
    files = wraps()
    files["parts/around.py"] += "\n\ndef other():\n    return 1\n"
    install_pack("Elsewhere", files)
    assert key_of(describe()) == key
    assert not [name for name in describe().sources if str(host.base) in name]
    BasicTransformerBlock.forward = host_forward
    install_pack("Stronger", wraps(f"0.6 * {CALL}"))
    assert key_of(describe()) != key


def test_the_twin_of_a_wrapped_class_has_what_the_wrapped_forward_reads(
    host: Host, install_pack: Install
) -> None:
    from comfy.ldm.modules.attention import BasicTransformerBlock

    before = attributes_read(BasicTransformerBlock)
    attributes = describe().module["attributes"]
    install_pack("Around", wraps())
    assert before <= attributes_read(BasicTransformerBlock)
    assert describe().module["attributes"] == attributes


def test_two_packs_travel_in_the_order_in_which_they_wrapped_and_it_counts(
    host: Host, install_pack: Install, host_forward: Any
) -> None:
    from comfy.ldm.modules.attention import BasicTransformerBlock

    keys = []
    for order in (("Half", "More"), ("More", "Half")):
        for name in order:
            result = f"0.5 * {CALL}" if name == "Half" else f"{CALL} + 0.1"
            install_pack(f"{name}{len(keys)}", wraps(result))
        description = describe()
        assert [file.pack[:4] for file in description.packs] == list(order)
        keys.append(key_of(description))
        BasicTransformerBlock.forward = host_forward
    assert keys[0] != keys[1]


def test_the_same_function_around_itself_counts_twice(host: Host, install_pack: Install) -> None:
    install_pack("Once", wraps())
    once = key_of(describe())
    install_pack("Twice", wraps())
    assert key_of(describe()) != once


def test_what_replaces_an_operator_of_torch_is_in_the_key(
    host: Host, install_pack: Install
) -> None:
    plain = key_of(describe())
    install_pack("Operator", {"__init__.py": OPERATOR})
    assert key_of(describe()) != plain


@pytest.mark.parametrize("layer", ["GroupNorm", "Conv2d", "Linear"])
def test_what_replaces_a_method_or_an_operator_under_a_layer_of_torch_is_in_the_key(
    host: Host, monkeypatch: pytest.MonkeyPatch, layer: str
) -> None:
    import comfy.ops

    from warmgraph_backends.code.sources import fingerprint

    cls = getattr(comfy.ops.disable_weight_init, layer)
    plain = fingerprint([], [cls])
    torch_class = getattr(torch.nn, layer)
    operator = {"GroupNorm": "group_norm", "Conv2d": "conv2d", "Linear": "linear"}[layer]
    for owner, name in [(torch_class, "forward"), (torch.nn.functional, operator)]:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, lambda *args, **named: args[0])
            assert fingerprint([], [cls]) != plain, (owner, name)
    assert fingerprint([], [cls]) == plain


# --- what no graph can stand for ------------------------------------------------------------------

REFUSED = {
    "keeps an activation": (
        {"cls.options = transformer_options": "cls.options = x"},
        "sets options of an object",
    ),
    "keeps a result": ({"RESULT": f"setattr(self, 'options', {CALL})"}, "calls setattr"),
    "reads a class of its own": (
        {"cls.options = transformer_options": "x = x * cls.scale"},
        "reads cls, which may change",
    ),
    "reads a table of its own": (
        {"class Notes:": "TABLE = {}\nclass Notes:", "RESULT": f"TABLE.get('a', 1) * {CALL}"},
        "reads TABLE.get, which may change",
    ),
    "imports while it runs": (
        {"cls.options = transformer_options": "import time"},
        "imports while it runs",
    ),
    "counts its calls": (
        {
            "class Notes:": "COUNT = 0\nclass Notes:",
            "cls.options = transformer_options": "global COUNT; COUNT += 1",
        },
        "keeps COUNT from call to call",
    ),
    "asks for an attribute by its name": (
        {"RESULT": f"getattr(self, 'scale', 1) * {CALL}"},
        "calls getattr",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_function_that_does_more_than_compute_is_refused_and_its_pack_named(
    host: Host, install_pack: Install, case: str
) -> None:
    changes, problem = REFUSED[case]
    result = changes.get("RESULT", CALL)
    rest = {old: new for old, new in changes.items() if old != "RESULT"}
    install_pack("More than that", wraps(result, **rest))
    with pytest.raises(DescriptionError) as refused:
        describe()
    assert refused.value.reason == (
        "More than that replaces BasicTransformerBlock.forward, and its code cannot be built "
        f"apart from it: it {problem}"
    )


def test_an_attribute_that_only_the_pack_reads_is_refused(
    host: Host, install_pack: Install
) -> None:
    from comfy.ldm.modules.attention import BasicTransformerBlock

    install_pack("Flags", wraps(f"self.strength * {CALL}"))
    made = block()
    made.strength = 0.5
    place = Place("block", made, FORMS["block"])
    with pytest.raises(DescriptionError, match=r"Flags replaces .* it reads strength of a"):
        describe_place(place, Plan(symbols=SYMBOLS), dtype=torch.float32, device="cpu")
    assert "strength" in attributes_read(BasicTransformerBlock)


def test_a_file_that_changed_since_it_was_imported_is_not_run(
    host: Host, install_pack: Install
) -> None:
    folder = install_pack("Updated", wraps())
    assert describe().packs
    (folder / "parts" / "around.py").write_text(wraps(f"0.7 * {CALL}")["parts/around.py"], "utf-8")
    with pytest.raises(DescriptionError, match=r"around\.py changed since it was imported"):
        describe()


def test_a_layers_forward_with_cast_weights_that_was_replaced_is_refused(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No graph runs through it, for its weights come in as they are: the host's calls do."""
    import comfy.ops

    layers = comfy.ops.disable_weight_init
    place = Place("block", block(), FORMS["block"])

    def describe() -> RegionSpec:
        return describe_place(place, Plan(symbols=SYMBOLS), dtype=torch.float32, device="cpu")

    with monkeypatch.context() as patch:
        patch.setattr(layers.LayerNorm, "forward_comfy_cast_weights", lambda self, x: -x)
        with pytest.raises(DescriptionError) as refused:
            describe()
    owner = __name__.partition(".")[0]
    assert refused.value.reason == f"{owner} replaces LayerNorm.forward_comfy_cast_weights"
    with monkeypatch.context() as patch:
        patch.setattr(layers.GroupNorm, "forward_comfy_cast_weights", lambda self, x: -x)
        assert describe().sources  # of a layer that the block does not have


def test_a_wrapped_spatial_transformer_stays_its_packs(host: Host, install_pack: Install) -> None:
    assert spatial_transformer_change() is None
    files = wraps("function(self, x, context, transformer_options)")
    files["parts/around.py"] = files["parts/around.py"].replace(
        "BasicTransformerBlock", "SpatialTransformer"
    )
    install_pack("Spatial", files)
    assert spatial_transformer_change() == "Spatial replaces SpatialTransformer.forward"


@pytest.mark.parametrize("case", [None, "counts its calls", "keeps an activation"])
def test_only_what_a_graph_can_stand_for_is_captured(
    host: Host, install_pack: Install, case: str | None
) -> None:
    changes, problem = REFUSED[case] if case else ({}, "")
    install_pack("Around", wraps(**changes))
    found = replaced_function(torch.nn.Sequential(block()), Watch())
    assert found == (f"code of Around takes part: it {problem}" if case else None)


# --- in a worker ----------------------------------------------------------------------------------


def test_a_worker_runs_the_files_alone_and_undoes_them(
    host: Host, install_pack: Install, host_forward: Any
) -> None:
    install_pack("Half", wraps())
    install_pack("More", wraps(f"{CALL} + 0.1"))
    description = describe()
    made, x, context = block(), torch.randn(1, 5, 8), torch.randn(1, 3, 6)
    expected = made(x, context)
    with elsewhere(host_forward):
        plain = made(x, context)
        with transplanted(description.packs):
            assert torch.equal(made(x, context), expected)
            for file in description.packs:
                package = file.parents[0][0]
                assert not hasattr(sys.modules[package], "NODE_CLASS_MAPPINGS")
        assert torch.equal(made(x, context), plain) and not torch.equal(plain, expected)
        with pytest.raises(BuildError, match="eager compiles nothing"):  # all before that went well
            run_build(description)


def test_one_worker_serves_jobs_with_and_without_a_pack_in_any_order(
    host: Host, install_pack: Install, host_forward: Any
) -> None:
    plain = describe()
    install_pack("Half", wraps())
    half = describe()
    install_pack("More", wraps(f"{CALL} + 0.1"))
    both = describe()
    with elsewhere(host_forward):
        for description in (half, plain, both, half, plain):
            with pytest.raises(BuildError, match="eager compiles nothing"):
                run_build(description)


def test_an_operator_of_torch_that_a_pack_replaced_is_put_in_place_for_one_job(
    host: Host, install_pack: Install, host_forward: Any
) -> None:
    functional = torch.nn.functional
    own = functional.gelu
    install_pack("Operator", {"__init__.py": OPERATOR})
    description = describe()
    assert [file.pack for file in description.packs] == ["Operator"]
    assert functional.gelu is not own
    functional.gelu = own
    with elsewhere(host_forward), pytest.raises(BuildError, match="eager compiles nothing"):
        run_build(description)
    assert functional.gelu is own


def test_a_file_that_needs_its_pack_is_refused_by_the_worker_and_its_pack_named(
    host: Host, install_pack: Install, host_forward: Any
) -> None:
    files = wraps(**{"import functools": "import functools\nfrom .. import READY"})
    files["__init__.py"] = "READY = True\n" + files["__init__.py"]
    install_pack("Needy", files)
    description = describe()
    with elsewhere(host_forward), pytest.raises(BuildError) as refused:
        run_build(description)
    assert refused.value.reason.startswith(
        "Needy replaces BasicTransformerBlock.forward, and its code cannot be built apart from "
        "it: ImportError: cannot import name 'READY'"
    )


def test_a_function_put_in_place_by_other_code_than_the_files_is_refused_by_the_worker(
    host: Host, install_pack: Install, host_forward: Any
) -> None:
    files = wraps()
    bind = "BasicTransformerBlock.forward = note_options(Notes, BasicTransformerBlock.forward)"
    assert bind in files["parts/around.py"]
    files["parts/around.py"] = files["parts/around.py"].replace(bind, "")
    files["__init__.py"] = INIT["__init__.py"] + bind.replace(
        "BasicTransformerBlock", "around.BasicTransformerBlock"
    ).replace("note_options(Notes", "around.note_options(around.Notes")
    install_pack("From outside", files)
    description = describe()
    with elsewhere(host_forward), pytest.raises(BuildError, match="leaves other code") as refused:
        run_build(description)
    assert refused.value.reason.startswith("From outside replaces")


READS = {
    "by name": "transformer_options.get('strength', 1.0)",
    "by asking": "(2.0 if 'strength' in transformer_options else 1.0)",
    "as a whole": "(2.0 if dict(transformer_options) else 1.0)",
}


@pytest.mark.parametrize("how", READS)
def test_a_function_that_looks_into_the_options_of_a_step_is_refused_by_the_worker(
    host: Host, install_pack: Install, host_forward: Any, how: str
) -> None:
    install_pack("Looks", wraps(f"{READS[how]} * {CALL}"))
    description = describe()
    with (
        elsewhere(host_forward),
        pytest.raises(BuildError, match=r"Looks replaces .* it reads or writes the step's options"),
    ):
        run_build(description)


def test_what_keeps_the_options_of_a_step_is_known(host: Host, install_pack: Install) -> None:
    from comfy.ldm.modules.attention import BasicTransformerBlock

    assert options_kept(BasicTransformerBlock.forward) == []
    install_pack("Half", wraps())
    install_pack("More", wraps(f"{CALL} + 0.1"))
    kept = options_kept(BasicTransformerBlock.forward)
    assert [(owner.__name__, name) for owner, name in kept] == [("Notes", "options")] * 2
    assert kept[0][0].__module__.endswith("More.parts.around")


def test_a_module_that_is_closed_over_counts_by_whose_it_is() -> None:
    """As in a wrapper that is made by a function with imports of its own."""

    def around(forward: Any, module: Any) -> Any:
        def wrapped(x: Any) -> Any:
            return forward(module.relu(x))

        return wrapped

    def forward(x: Any) -> Any:
        return x

    assert objection(around(forward, torch)) is None
    assert objection(around(forward, sys)) == "reads module, which may change"
