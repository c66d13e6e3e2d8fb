"""What a page may see of a server and ask of it: builds, store, memory, runs, figures."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import websocket

from warmgraph_tools.host import Graph, Server

from .test_nodes import _graph


@pytest.fixture(scope="module")
def own(start_server: Callable[..., Server]) -> Iterator[Server]:
    """A server whose store a test may clear; one graph of a narrow SDXL is to be built."""
    server = start_server(lend=1)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def prompt(own: Server, place_model: Callable[..., str]) -> Callable[[int], Graph]:
    checkpoint = place_model(own, "narrowxl")

    def make(seed: int) -> Graph:
        graph = _graph(checkpoint, seed=seed)
        graph["5"]["inputs"]["steps"] = 4
        return graph

    return make


def _wait(condition: Callable[[], Any], seconds: float = 600) -> Any:
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.2)
    return value


def _refused(server: Server, path: str, body: bytes, **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(server.url + path, data=body)
    for name, value in {"Content-Type": "application/json", **headers}.items():
        request.add_header(name.replace("_", "-"), value)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request)
    text = caught.value.read().decode()
    return caught.value.code, json.loads(text)["error"] if text.startswith("{") else text


def test_builds_are_paused_resumed_and_cancelled_and_a_later_run_builds_them(
    own: Server, prompt: Callable[[int], Graph]
) -> None:
    assert own.report()["building"]["paused"] is False
    paused = own.post("/warmgraph/builds", {"action": "pause"})["building"]
    assert paused["paused"] is True and paused["total"] == 0
    own.run(prompt(1))
    building = _wait(lambda: (b := own.report()["building"])["total"] and b)
    time.sleep(1)
    building = own.report()["building"]
    assert building["done"] == 0 and building["running"] == [] and building["workers"] == 0
    (model,) = own.report()["models"]
    assert model["standing"] == "building"
    cancelled = own.post("/warmgraph/builds", {"action": "cancel"})["building"]
    assert cancelled["paused"] is False  # or the next run would wait for what nobody builds
    (model,) = _wait(lambda: [m for m in own.report()["models"] if m["standing"] != "building"])
    assert {miss["reason"] for miss in model["misses"]} == {"compiling it was cancelled"}
    own.run(prompt(2))
    _wait(lambda: own.report()["models"][0]["standing"] in ("compiled", "waiting"))
    assert own.report()["models"][0]["misses"] == []


def test_the_store_and_the_runs_are_told(own: Server, prompt: Callable[[int], Graph]) -> None:
    eager = prompt(3)
    eager["2"]["inputs"]["backend"] = "eager"
    own.run(eager)
    own.run(prompt(3))
    report = own.report()
    stored, usage = report["stored"], report["store"]
    assert sum(family["files"] for family in stored) == usage["files"] > 0
    assert sum(family["bytes"] for family in stored) == usage["bytes"] < usage["cap_bytes"]
    (unet,) = [family for family in stored if family["family"] == "unet"]
    assert unet["title"].startswith("UNets") and unet["in_use"] and not unet["unfit"]
    assert abs(unet["last_used"] - time.time()) < 3600
    last = report["runs"][-1]
    assert last["model"] == "SDXL" and last["form"] == "compiled" and last["misses"] == 0
    assert (last["size"], last["batch"], last["steps"]) == ("64x64", 1, 4)
    assert last["ms"] > 0 and last["eager_ms"] > 0
    assert len(report["runs"]) == report["runs_made"]
    assert report["warnings"] == [] and report["captured"]["vram_bytes"] == 0


def test_clearing_leaves_what_is_loaded_at_work(
    own: Server, prompt: Callable[[int], Graph]
) -> None:
    files = own.report()["store"]["files"]
    assert own.post("/warmgraph/store", {"action": "clear", "what": "unused"})["removed"] == 0
    assert own.post("/warmgraph/store", {"action": "clear", "what": "unfit"})["removed"] == 0
    address = own.url.replace("http", "ws") + "/ws?clientId=another"
    with closing(websocket.create_connection(address, timeout=300)) as other_page:
        cleared = own.post("/warmgraph/store", {"action": "clear", "what": "all"})
        while True:  # a test that waits for ever fails by the socket's time limit
            message = other_page.recv()
            event = json.loads(message) if isinstance(message, str) else {"type": ""}
            if event["type"] == "warmgraph.report" and not event["data"]["store"]["files"]:
                break
    assert cleared["removed"] == files and cleared["bytes"] > 0
    report = own.report()
    assert report["store"]["files"] == 0 and report["stored"] == []
    own.run(prompt(4))
    (*_, model) = own.report()["models"]
    assert model["standing"] == "compiled" and own.report()["runs"][-1]["builds"] == 0
    assert own.post("/warmgraph/captured", {"action": "free"}) == {"bytes": 0, "done": True}


@pytest.mark.parametrize(
    ("path", "good", "bad"),
    [
        ("builds", {"action": "pause"}, {"action": "stop"}),
        ("store", {"action": "clear", "what": "all"}, {"action": "clear", "what": "../.."}),
        ("store", {"action": "clear", "what": "all"}, {"action": "trust", "what": "all"}),
        ("captured", {"action": "free"}, {"action": ["free"]}),
    ],
)
def test_a_post_is_json_of_this_page_and_one_of_few_words(
    own: Server, path: str, good: dict[str, Any], bad: dict[str, Any]
) -> None:
    path, body = f"/warmgraph/{path}", json.dumps(good).encode()
    status, words = _refused(own, path, body, Content_Type="text/plain")
    assert status == 415 and "application/json" in words
    assert _refused(own, path, body, Sec_Fetch_Site="cross-site")[0] == 403  # the host's own check
    for wrong in (json.dumps(bad).encode(), b"[]", b"3", b"{", b"[" * 60_000):
        status, words = _refused(own, path, wrong)
        assert status == 400 and len(words) < 300
    assert own.report()["building"]["paused"] is False


def test_figures_are_there_for_who_wants_them(own: Server) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        own.get("/warmgraph/metrics")
    assert caught.value.code == 404 and "metrics are off" in caught.value.read().decode()
    own.post("/warmgraph/settings", {"metrics": True})
    try:
        text = own.request("/warmgraph/metrics").decode()
    except urllib.error.HTTPError as error:
        assert "prometheus_client" in error.read().decode()
        return
    assert "warmgraph_store_files 0.0" in text and 'form="compiled"' in text
