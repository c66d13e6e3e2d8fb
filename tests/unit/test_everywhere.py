"""What the setting does with posted prompts, with the host's own handlers and classes."""

from __future__ import annotations

import copy
import json
import logging
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from .test_bypassed import INNER, as_subgraph, chain, compile_node, with_subgraphs
from .test_placing import LOADER, node

OURS = {"model": ["1", 0], "when_missing": "background"}


class Posted:
    """What comes of posted prompts under some settings."""

    def __init__(self, pack: ModuleType, folder: Path) -> None:
        self.modules = {
            name: sys.modules[f"{pack.__name__}.{name}"]
            for name in ("nodes.everywhere", "nodes.workflow", "nodes.classes")
        }
        settings = sys.modules[f"{pack.__name__}.backends.sessions.settings"].Settings(folder)
        self.settings = settings
        self.changes = 0
        self.classes = self.modules["nodes.classes"].host_classes
        self.everywhere = self.modules["nodes.everywhere"].Everywhere(
            settings=lambda: settings, classes=lambda: self.classes(), on_change=self._changed
        )

    def _changed(self) -> None:
        self.changes += 1

    def __call__(self, json_data: Any) -> Any:
        return self.everywhere.take(self.modules["nodes.workflow"].take_workflow_entry(json_data))

    @property
    def left(self) -> dict[str, str]:
        """Why models of the last prompt were left alone, by node."""
        left = self.everywhere.plain()["everywhere"]["left"]
        return {each.get("node", ""): each["line"]["text"] for each in left}


@pytest.fixture
def posted(pack: ModuleType, tmp_path: Path) -> Posted:
    posted = Posted(pack, tmp_path)
    posted.settings.update({"compile_all": True})
    return posted


def prompt() -> dict[str, Any]:
    return {"1": LOADER, "2": node("KSampler", model="1.0"), "3": node("VAEDecode", vae="1.2")}


def test_off_nothing_is_touched(posted: Posted) -> None:
    posted.settings.update({"compile_all": False, "compile_all_vaes": True})
    data = {"prompt": prompt(), "extra_data": {}}
    assert posted(data) is data and data == {"prompt": prompt(), "extra_data": {}}
    assert posted.everywhere.plain() == {"everywhere": {"on": False, "left": []}}


def test_on_a_prompt_gets_the_nodes_and_tells_which(posted: Posted) -> None:
    made = posted({"prompt": prompt(), "extra_data": {"a": 1}, "client_id": "x"})
    assert made["prompt"]["warmgraph_1_0_model"]["inputs"] == OURS
    assert made["prompt"]["2"]["inputs"] == {"model": ["warmgraph_1_0_model", 0]}
    assert made["prompt"]["3"] == prompt()["3"]
    entry = {"placed": {"warmgraph_1_0_model": ["2"]}}
    assert made["extra_data"] == {"a": 1, "warmgraph": entry} and made["client_id"] == "x"
    posted.settings.update({"compile_all_vaes": True})
    made = posted({"prompt": prompt()})
    assert made["prompt"]["3"]["inputs"] == {"vae": ["warmgraph_1_2_vae", 0]}
    assert set(made["extra_data"]["warmgraph"]["placed"]) == {
        "warmgraph_1_0_model",
        "warmgraph_1_2_vae",
    }


def test_the_workflows_entry_and_ours_go_together(posted: Posted) -> None:
    workflow = {"id": "w", "extra": {"warmgraph": {"path": "workflows/x.json"}}}
    made = posted({"prompt": prompt(), "extra_data": {"extra_pnginfo": {"workflow": workflow}}})
    assert made["extra_data"]["warmgraph"] == {
        "path": "workflows/x.json",
        "placed": {"warmgraph_1_0_model": ["2"]},
    }


def test_in_a_prompt_to_compare_with_steps_are_timed_alone(posted: Posted) -> None:
    posted.settings.update({"compile_all_vaes": True})
    workflow = {"extra": {"warmgraph": {"path": "workflows/x.json"}}}
    extra = {"warmgraph": {"plain": True}, "extra_pnginfo": {"workflow": workflow}}
    made = posted({"prompt": prompt(), "extra_data": extra})
    placed = made["extra_data"]["warmgraph"]
    assert placed == {
        "plain": True,
        "path": "workflows/x.json",
        "placed": {"warmgraph_1_0_model": ["2"]},
    }
    assert made["prompt"]["warmgraph_1_0_model"]["inputs"] == {**OURS, "backend": "eager"}
    assert made["prompt"]["3"] == prompt()["3"]


def test_nobody_else_says_what_the_server_put_there(posted: Posted) -> None:
    extra = {"warmgraph": {"placed": {"9": ["2"]}}}
    ours = {**prompt(), "2": node("KSampler", model="9.0"), "9": node("WarmgraphCompileModel")}
    for value in (True, False):
        posted.settings.update({"compile_all": value})
        made = posted({"prompt": ours, "extra_data": copy.deepcopy(extra)})
        assert "placed" not in made["extra_data"]["warmgraph"]


def test_models_that_are_left_alone_are_named_once(
    posted: Posted, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    ours = {
        **prompt(),
        "4": node("TorchCompileModel", model="1.0"),
        "5": node("KSampler", model="4.0"),
        "9": node("WarmgraphCompileModel", model="1.0"),
        "10": node("KSampler", model="9.0"),
    }
    for _ in range(2):
        made = posted({"prompt": ours})
        assert [key for key in made["prompt"] if key not in ours] == ["warmgraph_1_0_model"]
        assert posted.left == {"5": "TorchCompileModel (4) compiles it"}
    said = [each.getMessage() for each in caplog.records]
    assert said == [
        "Warmgraph leaves the model of KSampler (5) as it is: TorchCompileModel (4) compiles it"
    ]
    assert posted.changes == 1
    posted({"prompt": prompt()})
    assert posted.left == {} and posted.changes == 2


def test_a_bypassed_node_says_not_this_one_in_the_root_and_in_a_subgraph(posted: Posted) -> None:
    ours = {
        "1": LOADER,
        "99": node("KSampler", model="1.0"),
        "57:99": node("KSampler", model="1.0"),
        "58:99": node("KSampler", model="1.0"),
    }
    inner = as_subgraph(INNER, chain(compile_node(2, 0)), takes=1)
    workflow = with_subgraphs(chain(compile_node(2, 0)), inner)
    for number in (57, 58):
        inputs = [{"name": "model", "type": "MODEL", "link": number}]
        kind = INNER if number == 57 else "other"
        workflow["nodes"].append({"id": number, "type": kind, "mode": 0, "inputs": inputs})
        workflow["links"].append([number, 1, 0, number, 0, "MODEL"])
    made = posted({"prompt": ours, "extra_data": {"extra_pnginfo": {"workflow": workflow}}})
    assert made["extra_data"]["warmgraph"]["placed"] == {"warmgraph_1_0_model": ["58:99"]}
    assert posted.left == dict.fromkeys(("99", "57:99"), "a node of Warmgraph is bypassed there")


def test_a_mistake_of_ours_leaves_the_prompt_as_it_is_and_says_why(
    posted: Posted, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> Any:
        raise RuntimeError("no classes today")

    posted.classes = broken
    data = {"prompt": prompt(), "extra_data": {}}
    assert posted(data) == {"prompt": prompt(), "extra_data": {}}
    assert "no classes today" in caplog.text
    assert posted.left == {"": "the setting failed: no classes today"}


def _damaged(random_: random.Random, value: Any) -> Any:
    """Something else than this value, or it with something else in it."""
    odd = [
        None,
        [],
        {},
        "",
        "1",
        0,
        -1,
        1e400,
        True,
        ["1", 0],
        ["1"],
        [["1"], 0],
        "\ud800",
        1 << 80,
    ]
    if random_.random() < 0.15 or not isinstance(value, (dict, list)) or not value:
        return copy.deepcopy(random_.choice([*odd, value, value]))
    changed = copy.copy(value)
    where = random_.choice(list(value) if isinstance(value, dict) else range(len(value)))
    if isinstance(value, dict) and random_.random() < 0.2:
        changed[random_.choice(["1", "", "2:3", "inputs", "nodes"])] = changed.pop(where)
    else:
        changed[where] = _damaged(random_, value[where])
    return changed


def test_thousands_of_damaged_prompts_change_nothing_else_and_end(
    posted: Posted, pack: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    """No exception in the handler, no place at a node that is not there, none changed in place."""
    posted.settings.update({"compile_all_vaes": True})
    plain = sys.modules[f"{pack.__name__}.nodes.plain"].plain_prompt
    whole = {
        **prompt(),
        "57:2": node("LoraLoaderModelOnly", model="1.0"),
        "57:99": node("KSampler", model="57:2.0"),
        "5": node("WarmgraphDeepCache", model="57:2.0"),
        "6": node("SamplerCustom", model="5.0"),
        "7": node("ComfySwitchNode", on_false="5.0", on_true="1.0"),
        "8": node("KSampler", model="7.0"),
        "9": node("SaveImage", images="3.0"),
    }
    inner = as_subgraph(INNER, chain(compile_node(2, 0)), takes=1)
    root = chain(compile_node(2, 0))
    inputs = [{"name": "model", "type": "MODEL", "link": 57}]
    root["nodes"].append({"id": 57, "type": INNER, "mode": 0, "inputs": inputs})
    root["links"].append([57, 1, 0, 57, 0, "MODEL"])
    workflow = with_subgraphs(root, inner)
    base = {"prompt": whole, "extra_data": {"extra_pnginfo": {"workflow": workflow}}}
    random_, placed = random.Random(35), 0
    for _ in range(4000):
        data = base
        for _ in range(random_.randint(1, 4)):
            data = _damaged(random_, data)
        if not isinstance(data, dict):
            continue
        before = json.dumps(data.get("prompt"))
        made = posted(copy.deepcopy(data))
        entry = made.get("extra_data")
        names = entry.get("warmgraph", {}).get("placed", {}) if isinstance(entry, dict) else {}
        for name, consumers in names.items():
            placed += 1
            assert made["prompt"][name]["class_type"].startswith("WarmgraphCompile")
            assert consumers and set(consumers) <= set(data["prompt"])
        if isinstance(data.get("prompt"), dict):
            rest = {key: made["prompt"][key] for key in data["prompt"]}
            assert set(made["prompt"]) == {*rest, *names}
            plain(data["prompt"])
        assert json.dumps(data.get("prompt")) == before
    assert placed > 1000
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []
