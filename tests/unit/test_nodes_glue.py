"""What lies between the host's server and the engine, without a server."""

from __future__ import annotations

import re
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from warmgraph_backends.sessions.lines import line, plain
from warmgraph_backends.sessions.settings import SETTINGS

ROOT = Path(__file__).resolve().parents[2]


def _module(pack: ModuleType, name: str) -> Any:
    return sys.modules[f"{pack.__name__}.nodes.{name}"]


def _posted(extra: Any) -> dict[str, Any]:
    workflow = {"id": "a-b", "nodes": [], "extra": extra}
    return {"prompt": {}, "extra_data": {"extra_pnginfo": {"workflow": workflow}}}


def test_the_page_entry_leaves_the_workflow_that_images_carry(pack: ModuleType) -> None:
    posted = _posted({"ds": 1, "warmgraph": {"path": "workflows/x.json"}})
    taken = _module(pack, "workflow").take_workflow_entry(posted)
    assert taken["extra_data"]["warmgraph"] == {"path": "workflows/x.json"}
    assert taken["extra_data"]["extra_pnginfo"]["workflow"]["extra"] == {"ds": 1}


@pytest.mark.parametrize(
    "posted",
    [
        {},
        {"extra_data": None},
        {"extra_data": {"extra_pnginfo": None}},
        {"extra_data": {"extra_pnginfo": {"workflow": []}}},
        _posted(None),
        _posted([1]),
        _posted({}),
    ],
)
def test_other_prompts_pass_as_they_are(pack: ModuleType, posted: dict[str, Any]) -> None:
    before = repr(posted)
    assert repr(_module(pack, "workflow").take_workflow_entry(posted)) == before


@pytest.mark.parametrize(
    ("extra_data", "multi_user", "expected"),
    [
        ({"warmgraph": {"path": "workflows/x.json"}}, False, ("workflows/x.json", "default")),
        (
            {"warmgraph": {"path": "workflows/x.json", "user": "ann"}},
            False,
            ("workflows/x.json", "default"),
        ),
        (
            {"warmgraph": {"path": "workflows/x.json", "user": "ann"}},
            True,
            ("workflows/x.json", "ann"),
        ),
        ({"warmgraph": {"path": "workflows/x.json"}}, True, None),
        ({"warmgraph": {"path": 3}}, False, None),
        ({"warmgraph": "workflows/x.json"}, False, None),
        ({}, False, None),
    ],
)
def test_the_running_prompt_names_its_workflow(
    pack: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    extra_data: dict[str, Any],
    multi_user: bool,
    expected: tuple[str, str] | None,
) -> None:
    from execution import PromptQueue

    module = _module(pack, "workflow")
    server = SimpleNamespace(queue_updated=lambda: None)
    server.prompt_queue = PromptQueue(server)
    monkeypatch.setattr(module.PromptServer, "instance", server)
    monkeypatch.setattr(module.args, "multi_user", multi_user)
    assert module.current_workflow() is None, "no prompt runs yet"
    server.prompt_queue.put((0, "id", {}, {**_posted({})["extra_data"], **extra_data}, [], {}))
    server.prompt_queue.get()
    found = module.current_workflow()
    assert (found and (found.path, found.user)) == expected
    assert found is None or found.id == "a-b"


def test_what_runs_is_told_by_the_nodes_of_its_own_prompt(
    pack: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the host's cache has served it to a node of another id, in another prompt."""
    from comfy_execution.utils import CurrentNodeContext
    from execution import PromptQueue

    def node(kind: str, origin: str, **inputs: Any) -> dict[str, Any]:
        return {"class_type": kind, "inputs": {"model": [origin, 0], **inputs}}

    attached_by = _module(pack, "attachers").attached_by
    server = SimpleNamespace(queue_updated=lambda: None)
    queue = server.prompt_queue = PromptQueue(server)
    monkeypatch.setattr(_module(pack, "workflow").PromptServer, "instance", server)

    def run(prompt: dict[str, Any], extra_data: dict[str, Any]) -> None:
        queue.currently_running.clear()
        queue.put((0, "id", prompt, {**_posted({})["extra_data"], **extra_data}, [], {}))
        queue.get()

    loader = {"class_type": "UNETLoader", "inputs": {"unet_name": "x"}}
    compiled = {"L": loader, "x": node("Compile", "L"), "4": node("KSampler", "x")}
    assert attached_by(None) is None, "nothing runs"
    run(compiled, {"warmgraph": {"placed": {"x": ["57:4", "9"]}}})
    with CurrentNodeContext("id", "x"):
        first = attached_by(None)
    assert first[1:4] == ("a-b", ("57:4", "9"), True) and attached_by(first)[:4] == first[:4]
    assert not first.has_ended()
    run({"7": loader, "4": node("Compile", "7"), "x": node("KSampler", "4")}, {})
    assert first.has_ended()
    assert attached_by(first)[1:4] == ("a-b", ("4",), False)
    again = {"7": loader, "57/4": node("Compile", "7"), "5": node("Compile", "7")}
    run(again, {"warmgraph": {"placed": {"5": ["8"]}}})
    assert attached_by(first)[1:4] == ("a-b", ("57:4", "8"), False), "both are served the same"
    other = {"7": {**loader, "inputs": {"unet_name": "y"}}, "x": node("Compile", "7")}
    for prompt in (other, {"L": loader, "x": node("Compile", "L", backend="eager")}, {}):
        run(prompt, {})
        assert attached_by(first) is None, "another model, another setting, no such node"


def test_only_users_that_the_host_knows_have_a_workflows_folder(
    pack: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from app.user_manager import UserManager

    module = _module(pack, "workflow")
    root = Path(module.folder_paths.get_user_directory())
    assert module.workflows_root(None) == root / "default" / "workflows"
    root = tmp_path
    monkeypatch.setattr(module.folder_paths, "get_user_directory", lambda: str(root))
    monkeypatch.setattr(module.args, "multi_user", True)
    (root / "users.json").write_text('{"ann_1": "Ann", "__system": "x"}')
    server = SimpleNamespace(user_manager=UserManager())
    monkeypatch.setattr(module.PromptServer, "instance", server)
    assert module.workflows_root("ann_1") == root / "ann_1" / "workflows"
    for unknown in (None, "default", "../ann_1", "__system", ""):
        assert module.workflows_root(unknown) is None


def test_a_burst_of_changes_is_a_few_messages_and_the_last_is_sent(pack: ModuleType) -> None:
    state, seen = [0], []
    event = _module(pack, "server").ReportEvent(lambda: seen.append(state[0]), per_second=20)
    start = time.monotonic()
    while (took := time.monotonic() - start) < 0.3 or (len(seen) < 2 and took < 60):
        state[0] += 1
        event.changed()
        time.sleep(0.001)
    end = time.monotonic() + 60
    while seen[-1] != state[0] and time.monotonic() < end:
        time.sleep(0.01)
    assert seen[-1] == state[0]
    assert 2 <= len(seen) <= took * 20 + 2  # one at the start, one at the end


def test_changes_from_many_threads_are_told(pack: ModuleType) -> None:
    sent = threading.Event()
    event = _module(pack, "server").ReportEvent(sent.set)
    threads = [threading.Thread(target=event.changed) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert sent.wait(60)


def test_a_message_that_fails_is_logged_and_the_next_one_is_sent(
    pack: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    sent: list[int] = []

    def send() -> None:
        sent.append(len(sent))
        if len(sent) == 1:
            raise RuntimeError("on purpose")

    event = _module(pack, "server").ReportEvent(send, per_second=1000)
    for number in (1, 2):
        event.changed()
        end = time.monotonic() + 60
        while len(sent) < number and time.monotonic() < end:
            time.sleep(0.01)
    assert len(sent) == 2
    end = time.monotonic() + 60  # the first message's thread logs after it has counted
    while not caplog.records and time.monotonic() < end:
        time.sleep(0.01)
    assert [record.exc_info is not None for record in caplog.records] == [True]


def test_a_node_is_bound_to_its_report_and_has_its_lines(pack: ModuleType) -> None:
    lines = plain([line("parts", model="SDXL", compiled=3, total=4), line("note", note="a note")])
    ui = _module(pack, "compile_nodes").node_output("thing", "model-1", lines).ui
    assert ui == {
        "warmgraph": [
            {"id": "model-1", "text": "SDXL: 3 of 4 parts compiled\na note", "lines": lines}
        ]
    }


@pytest.mark.parametrize(
    ("node", "place"), [("7", "7"), ("12:7", "12:7"), ("115/75", "115:75"), ("1/2/3", "1:2:3")]
)
def test_a_line_of_progress_goes_to_the_page_that_waits(
    pack: ModuleType, monkeypatch: pytest.MonkeyPatch, node: str, place: str
) -> None:
    """With the node as the page calls it, whoever took the subgraphs apart."""
    sent: list[tuple[Any, ...]] = []
    server = _module(pack, "server")
    instance = SimpleNamespace(send_sync=lambda *message: sent.append(message))
    monkeypatch.setattr(server.PromptServer, "instance", instance)
    monkeypatch.setattr(server, "page_of_prompt", lambda _: "page")
    building = line("building", model="SDXL", done=3, total=23)
    with _module(pack, "progress").node_progress(node) as progress:
        for _ in range(3):
            progress(3, 23, building)
    shown = {"node": place, "text": "Compiling SDXL: 3 of 23", "lines": plain([building])}
    assert sent == [("warmgraph.report", shown, "page")], "once, for it said nothing new"


def test_sizes_and_batches_are_read_once_each(pack: ModuleType) -> None:
    module = _module(pack, "compile_report")
    assert module.parse_sizes("64x32\n 64 x 32, 720X960") == [(64, 32), (720, 960)]
    assert module.parse_batches("4, 1;4") == [4, 1]


LONG = "1024x1024, 7; " * (4 << 20)  # some 50 MiB


@pytest.mark.parametrize(
    ("module", "node", "given"),
    [
        ("compile_report", "WarmgraphWarmUp", {"sizes": LONG}),
        ("compile_report", "WarmgraphWarmUp", {"sizes": "x" * len(LONG)}),
        ("compile_report", "WarmgraphWarmUp", {"batches": LONG}),
        ("compile_report", "WarmgraphWarmUp", {"batches": "7" * 4000}),
        ("compile_model", "WarmgraphCompileModel", {"graphs": LONG}),
        ("compile_model", "WarmgraphCompileModel", {"graphs": "e\u0301" * 4000}),
        ("compile_vae", "WarmgraphCompileVAE", {"graphs": LONG}),
        ("compile_controlnet", "WarmgraphCompileControlNet", {"graphs": LONG}),
        ("compile_model", "WarmgraphLoadCompiledGraph", {"folder": LONG}),
        ("compile_vae", "WarmgraphLoadCompiledGraphVAE", {"folder": LONG}),
        ("deepcache", "WarmgraphDeepCache", {"schedule": LONG}),
        ("deepcache", "WarmgraphDeepCache", {"schedule": "custom", "full_steps": LONG}),
        ("deepcache", "WarmgraphDeepCache", {"schedule": "custom", "full_steps": "7" * 4001}),
        ("deepcache", "WarmgraphDeepCache", {"schedule": "custom", "full_steps": "9" * 20}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_a_widget_of_megabytes_is_refused_at_once_in_few_words(
    pack: ModuleType, module: str, node: str, given: dict[str, str]
) -> None:
    validate = getattr(_module(pack, module), node).validate_inputs
    began = time.process_time()
    answer = validate(**given)
    assert time.process_time() - began < 0.1
    assert isinstance(answer, str) and len(answer) < 250
    assert not re.search(r"[x7]{50}|(1024x1024, 7; ){4}", answer), (
        "no more than a few dozen characters"
    )


@pytest.mark.parametrize(
    "entry",
    [
        {"path": "workflows/" + "x" * (1 << 22) + ".json"},
        {"path": "workflows/\ud800.json"},
        {"path": ["workflows/x.json"]},
        {"path": None},
        ["path"],
        "path",
        1e400,
    ],
    ids=lambda entry: str(entry)[:20].encode("ascii", "replace").decode(),
)
def test_an_entry_that_names_no_workflow_goes_no_further(pack: ModuleType, entry: Any) -> None:
    module = _module(pack, "workflow")
    taken = module.take_workflow_entry(_posted({"warmgraph": entry}))
    assert "warmgraph" not in taken["extra_data"]
    assert taken["extra_data"]["extra_pnginfo"]["workflow"]["extra"] == {}
    assert module.workflow_of({**taken["extra_data"], "warmgraph": entry}) is None


def test_only_what_names_a_workflow_is_taken_from_an_entry(pack: ModuleType) -> None:
    nested: Any = []
    for _ in range(100_000):
        nested = [nested]
    module = _module(pack, "workflow")
    given = {"path": "workflows/x.json", "user": nested, "more": nested}
    taken = module.take_workflow_entry(_posted({"warmgraph": given}))
    assert taken["extra_data"]["warmgraph"] == {"path": "workflows/x.json"}
    found = module.workflow_of(taken["extra_data"])
    assert (found.path, found.user, found.id) == ("workflows/x.json", "default", "a-b")
    posted = _posted({"warmgraph": {"path": "workflows/x.json"}})
    posted["extra_data"]["extra_pnginfo"]["workflow"]["id"] = "i" * (1 << 22)
    assert module.workflow_of(module.take_workflow_entry(posted)["extra_data"]).id is None


def test_the_page_has_neither_words_nor_numbers_of_a_setting_of_its_own() -> None:
    """All of them come from the server's one table."""
    script = (ROOT / "web" / "js" / "settings.js").read_text(encoding="utf-8")
    for setting in SETTINGS.values():
        assert not any(word in script for word in (setting.name, setting.place, setting.title))
    assert not re.search(r"\b(min|max|default|defaultValue|minimum|maximum): *[\d.-]", script)


def test_the_page_keeps_its_settings_by_places_that_stay() -> None:
    assert {name: setting.place for name, setting in SETTINGS.items()} == {
        "workers": "Builder.Workers",
        "job_limit_s": "Builder.JobLimit",
        "idle_s": "Builder.Idle",
        "store_cap_gib": "Store.Cap",
        "captured_vram_percent": "Captured.Vram",
        "captured_limit_s": "Captured.Limit",
        "keep_captured": "Captured.Keep",
        "metrics": "Server.Metrics",
        "compile_all": "Speed.CompileAll",
        "compile_all_vaes": "Speed.CompileAllVaes",
        "make_faster_all": "Speed.MakeFasterAll",
        "learn_models": "Speed.LearnModels",
    }


def test_a_host_without_prompt_handlers_has_all_but_what_hangs_on_them(
    pack: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aiohttp import web

    module = _module(pack, "server")
    monkeypatch.setattr(module.folder_paths, "folder_names_and_paths", {})
    table = web.RouteTableDef()
    monkeypatch.setattr(module.PromptServer, "instance", SimpleNamespace(routes=table))
    module.register()
    assert "/warmgraph/places" in {route.path for route in table}  # type: ignore[union-attr]
