"""The nodes' schemas, read by the real host: ids, order of widgets, tooltips, help pages."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from warmgraph_tools.inprocess import Host

from .published import NODES, published

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def classes(pack: ModuleType) -> dict[str, Any]:
    """The pack's node classes, by id, as the host gets them."""

    async def load() -> list[Any]:
        extension = await pack.comfy_entrypoint()
        return list(await extension.get_node_list())

    return {cls.GET_SCHEMA().node_id: cls for cls in asyncio.run(load())}


@pytest.fixture(scope="module")
def schemas(classes: dict[str, Any]) -> dict[str, Any]:
    return {node_id: cls.GET_SCHEMA() for node_id, cls in classes.items()}


def test_the_ids_are_the_published_ones(classes: dict[str, Any]) -> None:
    assert list(classes) == list(NODES)


@pytest.mark.parametrize("node_id", NODES)
def test_a_saved_workflow_finds_every_input_and_output_where_it_was(
    schemas: dict[str, Any], node_id: str
) -> None:
    """Workflows hold widgets' values by position: append, never insert, never reorder."""
    assert published(schemas[node_id]) == NODES[node_id]


@pytest.mark.parametrize("node_id", NODES)
def test_the_page_has_the_widgets_in_that_order_as_well(
    classes: dict[str, Any], node_id: str
) -> None:
    """It puts those that a prompt need not name behind all others."""
    inputs = classes[node_id].INPUT_TYPES()
    shown = [name for group in ("required", "optional") for name in inputs.get(group, ())]
    assert shown == [entry["id"] for entry in NODES[node_id]["inputs"]]


def test_a_prompt_by_api_need_not_name_what_has_a_good_default(
    host: Host, classes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    execution = importlib.import_module("execution")
    for node_id, cls in classes.items():
        monkeypatch.setitem(host.nodes.NODE_CLASS_MAPPINGS, node_id, cls)
    loader = {"ckpt_name": host.model_file("narrowxl")}
    prompt = {"1": {"class_type": "CheckpointLoaderSimple", "inputs": loader}}
    for node_id, name, output in (("Model", "model", 0), ("VAE", "vae", 2)):
        inputs = {name: ["1", output], "when_missing": "background"}
        prompt[node_id] = {"class_type": f"WarmgraphCompile{node_id}", "inputs": inputs}
        report = {"class_type": "WarmgraphGraphReport", "inputs": {"model": [node_id, 0]}}
        prompt[f"{node_id} report"] = report
    valid, error, outputs, errors = asyncio.run(execution.validate_prompt("1", prompt, None))
    assert valid and len(outputs) == 2, (error, errors)


@pytest.mark.parametrize("node_id", NODES)
def test_everything_says_what_it_is_for(schemas: dict[str, Any], node_id: str) -> None:
    schema = schemas[node_id]
    assert schema.category == "Warmgraph"
    assert len(schema.description) > 80
    for entry in (*schema.inputs, *schema.outputs):
        assert entry.tooltip and entry.tooltip.endswith("."), f"{entry.id} has no tooltip"


@pytest.mark.parametrize("node_id", NODES)
def test_each_node_has_a_help_page_that_names_its_inputs(
    schemas: dict[str, Any], node_id: str
) -> None:
    page = (ROOT / "web" / "docs" / f"{node_id}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# {schemas[node_id].display_name}\n")
    for entry in schemas[node_id].inputs:
        assert f"`{entry.id}`" in page


def test_choices_and_defaults_of_compile_model(schemas: dict[str, Any]) -> None:
    inputs = {entry.id: entry for entry in schemas["WarmgraphCompileModel"].inputs}
    assert inputs["when_missing"].options == ["background", "wait", "never"]
    assert inputs["when_missing"].default == "background"
    assert inputs["graphs"].default == ""
    assert inputs["backend"].options == ["auto", "inductor", "eager"]
    assert inputs["form"].options == ["auto", "exact"]
    assert (inputs["form"].default, inputs["backend"].default) == ("auto", "auto")
    assert inputs["backend"].advanced and not inputs["when_missing"].advanced


def test_shares_of_deepcache_are_from_zero_to_one(schemas: dict[str, Any]) -> None:
    inputs = {entry.id: entry for entry in schemas["WarmgraphDeepCache"].inputs}
    for name in ("start_percent", "end_percent", "center", "threshold"):
        assert (inputs[name].min, inputs[name].max, inputs[name].step) == (0.0, 1.0, 0.01)


def test_both_vae_nodes_offer_the_same_parts(schemas: dict[str, Any]) -> None:
    found = {
        node_id: next(entry for entry in schemas[node_id].inputs if entry.id == "parts")
        for node_id in ("WarmgraphCompileVAE", "WarmgraphLoadCompiledGraphVAE")
    }
    for parts in found.values():
        assert parts.options == ["decoder and encoder", "decoder", "encoder"]
        assert parts.default == "decoder and encoder" and parts.advanced
    assert found["WarmgraphLoadCompiledGraphVAE"].optional  # older prompts do not name it


def test_report_and_warm_up_run_by_themselves(schemas: dict[str, Any]) -> None:
    for node_id in ("WarmgraphGraphReport", "WarmgraphWarmUp"):
        assert schemas[node_id].is_output_node and schemas[node_id].not_idempotent


def test_a_report_is_never_served_from_the_cache(
    classes: dict[str, Any], schemas: dict[str, Any]
) -> None:
    first, second = (classes["WarmgraphGraphReport"].fingerprint_inputs() for _ in range(2))
    assert first != second
    (after,) = (e for e in schemas["WarmgraphGraphReport"].inputs if e.id == "after")
    assert after.optional and after.io_type == "*"


def test_a_node_whose_result_is_cached_gets_its_text_back(schemas: dict[str, Any]) -> None:
    assert schemas["WarmgraphCompileModel"].has_intermediate_output
    assert schemas["WarmgraphLoadCompiledGraph"].has_intermediate_output


@pytest.mark.parametrize(
    ("node_id", "values", "words"),
    [
        ("WarmgraphCompileModel", {"graphs": "../../x"}, "../../x"),
        ("WarmgraphCompileModel", {"graphs": "C:\\x"}, "C:"),
        ("WarmgraphCompileModel", {"graphs": "n" * 300}, "120"),
        ("WarmgraphCompileModel", {"form": "x" * 300}, "mode must be one of: auto, exact"),
        ("WarmgraphDeepCache", {"schedule": "cubic"}, "got 'cubic'"),
        ("WarmgraphDeepCache", {"start_percent": 7.0, "end_percent": 8.0}, "from 0 to 1, got 7.0"),
        ("WarmgraphDeepCache", {"start_percent": 0.5, "end_percent": -1.0}, "got -1.0"),
        ("WarmgraphDeepCache", {"start_percent": 0.5, "end_percent": 0.4}, "got 0.5 and 0.4"),
        ("WarmgraphDeepCache", {"schedule": "custom", "full_steps": "one"}, "got 'one'"),
        ("WarmgraphWarmUp", {"sizes": "1024", "batches": "1"}, "got '1024'"),
        ("WarmgraphWarmUp", {"sizes": "", "batches": "1"}, "sizes must have at least one entry"),
        ("WarmgraphWarmUp", {"sizes": "9x9, 4x9", "batches": "1"}, "from 8 to 8192 pixels"),
        ("WarmgraphWarmUp", {"sizes": "64x64", "batches": "1, two"}, "got 'two'"),
        ("WarmgraphWarmUp", {"sizes": "64x64", "batches": "0"}, "from 1 to 64"),
        ("WarmgraphWarmUp", {"sizes": "64x64", "batches": "65"}, "from 1 to 64"),
        ("WarmgraphWarmUp", {"sizes": "8x8," * 65, "batches": "1"}, "at most 64 entries"),
    ],
)
def test_bad_values_are_refused_in_words_when_queued(
    classes: dict[str, Any], node_id: str, values: dict[str, Any], words: str
) -> None:
    answer = classes[node_id].validate_inputs(**values)
    assert isinstance(answer, str) and words in answer


@pytest.mark.parametrize(
    ("node_id", "values"),
    [
        ("WarmgraphCompileModel", {"graphs": ""}),
        ("WarmgraphCompileModel", {"graphs": "  "}),
        ("WarmgraphCompileModel", {"graphs": "Winter Märchen 冬"}),
        ("WarmgraphCompileModel", {"graphs": None}),
        ("WarmgraphCompileModel", {"graphs": "", "form": "exact"}),
        ("WarmgraphCompileModel", {"graphs": "", "form": "specialised"}),
        ("WarmgraphCompileModel", {"graphs": "", "form": "any shape"}),
        ("WarmgraphCompileModel", {"graphs": "", "form": None}),
        ("WarmgraphDeepCache", {"schedule": "uniform", "full_steps": "one"}),
        ("WarmgraphDeepCache", {"schedule": None, "start_percent": None, "end_percent": 0.0}),
        ("WarmgraphDeepCache", {"schedule": "custom", "full_steps": "0, 2", "start_percent": 0.0}),
        ("WarmgraphLoadCompiledGraph", {"folder": "of another machine"}),
        ("WarmgraphLoadCompiledGraph", {"folder": None}),
        ("WarmgraphWarmUp", {"sizes": " 1024 x 1024,\n720X960;8\u00d78192 ", "batches": "1,64"}),
        ("WarmgraphWarmUp", {"sizes": None, "batches": None}),
    ],
)
def test_good_and_linked_values_pass(
    classes: dict[str, Any], node_id: str, values: dict[str, Any]
) -> None:
    assert classes[node_id].validate_inputs(**values) is True
