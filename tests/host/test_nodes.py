"""The nodes over the API of a real server, with no page open."""

from __future__ import annotations

import http.client
import json
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
import websocket

from warmgraph_backends.sessions.lines import ENGLISH
from warmgraph_backends.sessions.settings import SETTINGS
from warmgraph_tools.host import Graph, HostError, Server


def _graph(checkpoint: str, *, seed: int = 1, **compile_inputs: str) -> Graph:
    """Return a prompt of 64x64 pixels with Compile Model, and a report after its sampling."""
    inputs = {"when_missing": "background", "graphs": "", "backend": "auto"} | compile_inputs
    return {
        "1": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": checkpoint}},
        "2": {"class_type": "WarmgraphCompileModel", "inputs": {"model": ["1", 0], **inputs}},
        "3": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["1", 1], "text": "a cat"}},
        "4": {
            "class_type": "EmptyLatentImage",
            "inputs": {"width": 64, "height": 64, "batch_size": 1},
        },
        "5": {
            "class_type": "KSampler",
            "inputs": {
                "model": ["2", 0],
                "positive": ["3", 0],
                "negative": ["3", 0],
                "latent_image": ["4", 0],
                "seed": seed,
                "steps": 1,
                "cfg": 7.0,
                "sampler_name": "euler",
                "scheduler": "normal",
                "denoise": 1.0,
            },
        },
        "6": {
            "class_type": "WarmgraphGraphReport",
            "inputs": {"model": ["2", 0], "after": ["5", 0]},
        },
    }


@pytest.fixture(scope="module")
def checkpoint(server: Server, place_model: Callable[..., str]) -> str:
    return place_model(server, "narrow15")


def _loading(checkpoint: str, **inputs: Any) -> Graph:
    graph = _graph(checkpoint, seed=7)
    graph["2"] = {
        "class_type": "WarmgraphLoadCompiledGraph",
        "inputs": {"model": ["1", 0], "folder": "not here", "strict": False, **inputs},
    }
    return graph


def test_a_report_is_made_on_every_run_while_the_rest_is_cached(
    server: Server, checkpoint: str
) -> None:
    graph = _graph(checkpoint, seed=3, when_missing="never")
    first, second = server.run(graph), server.run(graph)
    assert {"2", "5"} <= second.cached and "6" not in second.cached
    for run in (first, second):
        assert "parts compiled" in run.outputs["6"]["text"][0]
        shown = run.outputs["2"]["warmgraph"][0]
        assert [line["text"] for line in shown["lines"]] == shown["text"].splitlines()
        assert {line["key"] for line in shown["lines"]} & {"parts", "loading"}
    assert first.outputs["2"] == second.outputs["2"], "the text comes back with the cached result"


def test_a_model_that_only_lends_a_merge_its_weights_is_told_as_unused(
    server: Server, checkpoint: str
) -> None:
    graph = _graph(checkpoint, when_missing="never", graphs="lent")  # none that ran before
    del graph["6"]
    graph["7"] = {
        "class_type": "ModelMergeSimple",
        "inputs": {"model1": ["1", 0], "model2": ["2", 0], "ratio": 0.5},
    }
    graph["5"]["inputs"]["model"] = ["7", 0]
    graph["8"] = {"class_type": "VAEDecode", "inputs": {"samples": ["5", 0], "vae": ["1", 2]}}
    graph["9"] = {"class_type": "PreviewImage", "inputs": {"images": ["8", 0]}}
    shown = server.run(graph).outputs["2"]["warmgraph"][0]

    def report() -> Any:
        return next(each for each in server.report()["models"] if each["id"] == shown["id"])

    end = time.monotonic() + 30
    while not report()["unused"]:  # the prompt leaves the queue a moment after it is told as done
        assert time.monotonic() < end
        time.sleep(0.1)
    told = report()
    assert told["stage"] == "unused" and told["lines"][0]["text"] == ENGLISH["unused"]
    graph["7"]["inputs"] |= {"model1": ["2", 0], "model2": ["1", 0]}
    server.run(graph)
    assert not report()["unused"]


def test_a_model_that_ran_is_told_as_unused_once_samplers_do_without_it(
    server: Server, checkpoint: str
) -> None:
    """The host's cache serves Compile Model in every prompt but the first."""
    graph = _graph(checkpoint, when_missing="never", graphs="left")  # none that ran before
    identity = server.run(graph).outputs["2"]["warmgraph"][0]["id"]

    def is_unused() -> bool:
        (told,) = (each for each in server.report()["models"] if each["id"] == identity)
        told_so = told["lines"][0]["text"] == ENGLISH["unused"] == told["text"].splitlines()[0]
        assert told["unused"] == told_so == (told["stage"] == "unused")
        return told_so

    def run(*, seed: int, **inputs: Any) -> None:
        graph["5"]["inputs"] |= {"seed": seed, **inputs}
        assert "2" in server.run(graph).cached
        end = time.monotonic() + 60  # the prompt leaves the queue a moment after it is told as done
        while server.get("/queue")["queue_running"]:
            assert time.monotonic() < end
            time.sleep(0.1)

    assert not is_unused()
    run(seed=2, model=["1", 0])  # only the report still takes it
    assert is_unused()
    run(seed=2)  # the same again: the sampler's result is in the cache, too
    assert is_unused()
    run(seed=3, model=["2", 0])
    assert not is_unused()
    graph["7"] = {
        "class_type": "ModelMergeSimple",
        "inputs": {"model1": ["1", 0], "model2": ["2", 0], "ratio": 0.5},
    }
    run(seed=3)  # the merge makes no image here
    assert not is_unused()
    run(seed=4, model=["7", 0])
    assert is_unused()
    run(seed=5)
    assert is_unused()
    graph["7"]["inputs"] |= {"model1": ["2", 0], "model2": ["1", 0]}
    run(seed=5)
    assert not is_unused()
    graph["8"] = {"class_type": "VAEDecode", "inputs": {"samples": ["5", 0], "vae": ["1", 2]}}
    graph["9"] = {"class_type": "PreviewImage", "inputs": {"images": ["8", 0]}}
    run(seed=5)  # what this model sampled is decoded
    assert not is_unused()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"graphs": "../../x"}, "../../x"),
        ({"graphs": "C:\\x"}, "C:"),
        ({"when_missing": "sometimes"}, "sometimes"),
        ({"backend": "magic"}, "magic"),
        ({"form": "magic"}, "mode must be one of: auto, exact"),
    ],
)
def test_bad_values_are_refused_when_queued(
    server: Server, checkpoint: str, changes: dict[str, str], words: str
) -> None:
    with pytest.raises(HostError, match="refused") as caught:
        server.run(_graph(checkpoint, **changes))
    assert json.dumps(words).strip('"') in str(caught.value)


@pytest.mark.parametrize("form", ["any shape", "specialised"])
def test_a_form_of_older_workflows_is_taken(server: Server, checkpoint: str, form: str) -> None:
    run = server.run(_graph(checkpoint, seed=4, when_missing="never", form=form))
    assert "parts compiled" in run.outputs["6"]["text"][0]


def test_bad_sizes_are_refused_when_queued(server: Server, checkpoint: str) -> None:
    graph = _graph(checkpoint)
    graph["6"] = {
        "class_type": "WarmgraphWarmUp",
        "inputs": {"model": ["2", 0], "sizes": "big", "batches": "1"},
    }
    with pytest.raises(HostError, match="sizes must be entries such as 1024x1024, got 'big'"):
        server.run(graph)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schedule": "custom", "full_steps": "0, x"}, "full steps must be numbers from 0 on"),
        ({"start_percent": 0.8, "end_percent": 0.2}, "must not be larger than end_percent"),
        ({"interval": 0}, "interval"),
    ],
)
def test_bad_values_of_deepcache_are_refused_when_queued(
    server: Server, checkpoint: str, changes: dict[str, Any], words: str
) -> None:
    graph = _graph(checkpoint)
    inputs = {"interval": 3, "branch": 0, "schedule": "uniform", "start_percent": 0.0}
    inputs |= {"end_percent": 1.0, "center": 0.3, "power": 1.4, "full_steps": "", "threshold": 0.4}
    inputs |= {"model": ["2", 0], **changes}
    graph["7"] = {"class_type": "WarmgraphDeepCache", "inputs": inputs}
    graph["5"]["inputs"]["model"] = ["7", 0]
    with pytest.raises(HostError, match="refused") as caught:
        server.run(graph)
    assert words in str(caught.value)


def test_no_text_of_deepcache_is_wrong_once_a_run_has_ended(
    server: Server, checkpoint: str
) -> None:
    """A report that is not linked behind the image is made before the sampling, and its texts name
    what the newest ones are known by.
    """
    graph = _graph(checkpoint, seed=21, when_missing="never")
    inputs = {"interval": 3, "branch": 0, "schedule": "uniform", "start_percent": 0.0}
    inputs |= {"end_percent": 1.0, "center": 0.3, "power": 1.4, "full_steps": "", "threshold": 0.4}
    graph["7"] = {"class_type": "WarmgraphDeepCache", "inputs": {"model": ["2", 0], **inputs}}
    graph["5"]["inputs"] |= {"model": ["7", 0], "steps": 4}
    graph["6"]["inputs"] = {"model": ["7", 0]}
    graph["8"] = {
        "class_type": "SaveLatent",
        "inputs": {"samples": ["5", 0], "filename_prefix": "latents/cached"},
    }
    run = server.run(graph)
    known = server.report()
    newest = {report["id"]: report["text"] for report in known["models"] + known["deepcaches"]}
    of_model, of_cache = run.outputs["6"]["warmgraph"]
    assert "parts compiled" in newest[of_model["id"]]
    assert "last run: 2 full + 2 shallow" in newest[of_cache["id"]]
    assert of_cache["id"] == run.outputs["7"]["warmgraph"][0]["id"]
    for text in (of_cache["text"], run.outputs["7"]["warmgraph"][0]["text"]):
        assert "shown here once a run has ended" in text
    assert run.outputs["6"]["text"] == [f"{of_model['text']}\n{of_cache['text']}"]


def test_a_report_says_how_like_each_other_two_latents_are(server: Server, checkpoint: str) -> None:
    """With another seed, and with itself; what is not linked is said."""
    graph = _graph(checkpoint, seed=31, when_missing="never")
    graph["7"] = {**graph["5"], "inputs": {**graph["5"]["inputs"], "seed": 32}}
    graph["6"]["inputs"] = {"model": ["2", 0], "latent": ["7", 0], "compared_with": ["5", 0]}
    for node, inputs in (("8", {"compared_with": ["7", 0]}), ("9", {})):
        linked = {"model": ["2", 0], "latent": ["7", 0], **inputs}
        graph[node] = {"class_type": "WarmgraphGraphReport", "inputs": linked}
    outputs = server.run(graph).outputs
    said = {node: outputs[node]["text"][0].splitlines() for node in ("6", "8", "9")}
    assert all(any("parts compiled" in line for line in lines) for lines in said.values())
    last = {node: lines[-1] for node, lines in said.items()}
    assert re.fullmatch(r"latents: PSNR \d+\.\d dB, SSIM -?0\.\d{4}", last["6"]), last["6"]
    assert last["8"] == "latents: the same, bit for bit"
    assert "both have to be linked" in last["9"]
    of_model, of_latents = outputs["6"]["warmgraph"]
    assert of_model["id"] and of_latents["id"] == "", "it stays below what the page keeps live"
    assert [line["text"] for line in of_latents["whole"]] == [last["6"]]


def test_a_folder_that_is_not_there_costs_only_speed(server: Server, checkpoint: str) -> None:
    run = server.run(_loading(checkpoint))
    assert "not here" in run.outputs["6"]["text"][0]


def test_strict_refuses_and_says_what_is_missing(server: Server, checkpoint: str) -> None:
    with pytest.raises(HostError, match="strict loading of 'not here'"):
        server.run(_loading(checkpoint, strict=True))


def test_a_report_of_any_other_model_says_so(server: Server, checkpoint: str) -> None:
    graph = _graph(checkpoint)
    graph["6"]["inputs"] = {"model": ["1", 0]}
    run = server.run({key: graph[key] for key in ("1", "6")})
    assert run.outputs["6"]["text"] == ["this model did not come out of Warmgraph"]


def test_cancel_ends_the_waiting_at_once_and_the_builds_go_on(
    start_server: Callable[..., Server], place_model: Callable[..., str]
) -> None:
    own = start_server()
    graph = _graph(place_model(own, "narrow15"), when_missing="wait")
    prompt = own.submit(graph)
    deadline = time.monotonic() + 300
    while not own.report()["building"]["total"]:
        assert time.monotonic() < deadline, "nothing is being built"
        time.sleep(0.1)
    time.sleep(1)
    own.post("/interrupt", {})
    entry = own.wait(prompt, 300)
    assert [event for event, _ in entry["status"]["messages"]][-1] == "execution_interrupted"
    building = own.report()["building"]
    assert building["done"] < building["total"]
    own.stop()


def test_an_open_page_is_told_of_changes(server: Server, checkpoint: str) -> None:
    heard: list[dict[str, Any]] = []
    address = server.url.replace("http", "ws") + "/ws?clientId=listener"
    socket = websocket.create_connection(address, timeout=300)

    def listen() -> None:
        while not heard:
            message = socket.recv()
            if isinstance(message, str):
                event = json.loads(message)
                if event["type"] == "warmgraph.report":
                    heard.append(event["data"])

    listener = threading.Thread(target=listen)
    listener.start()
    server.run(_graph(checkpoint, seed=11, when_missing="never"))
    listener.join(300)
    socket.close()
    assert heard, "no event within 300 s"
    assert {"models", "building", "store", "settings"} <= set(heard[0])
    for report in heard[0]["models"]:
        assert "\n".join(line["text"] for line in report["whole"]) == report["text"] != ""


def test_the_host_serves_our_words_and_help_pages_in_chinese(server: Server) -> None:
    words = server.get("/i18n")["zh"]
    infos = server.object_info().items()
    ours = {name for name, info in infos if info["category"] == "Warmgraph"}
    assert ours and set(words["nodeDefs"]) == ours, "no other pack here has words"
    assert len(words["settings"]) == len(SETTINGS)
    assert set(words["warmgraph"]["lines"]) == set(ENGLISH)
    for name in ours:
        address = f"{server.url}/extensions/warmgraph/docs/{name}/zh.md"
        with urllib.request.urlopen(address) as answer:  # a page that is not there is an error
            page = answer.read().decode()
            assert "text/html" not in answer.headers["Content-Type"], "the host's page skips such"
        assert page.startswith(f"# {words['nodeDefs'][name]['display_name']}\n")


def _post(server: Server, body: bytes, kind: str, **headers: str) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(server.url + "/warmgraph/settings", data=body)
    for name, value in {"Content-Type": kind, **headers}.items():
        request.add_header(name.replace("_", "-"), value)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        text = error.read().decode()
        return error.code, json.loads(text) if text.startswith("{") else {"error": text}


def test_settings_are_changed_as_json_only(server: Server) -> None:
    before = server.report()["settings"]
    good = json.dumps({"idle_s": 31}).encode()
    for kind in ("application/x-www-form-urlencoded", "text/plain", "multipart/form-data"):
        status, answer = _post(server, good, kind)
        assert status == 415 and "application/json" in answer["error"]
    status, _ = _post(server, good, "application/json", Sec_Fetch_Site="cross-site")
    assert status == 403  # the host's own check
    for bad, words in [
        (b'{"idle_s": 0}', "idle_s must be"),
        (b'{"signing_key": 1}', "setting must be one of"),
        (b'{"remote": "s3://x"}', "setting must be one of"),
        (b"[1]", "must be a JSON object"),
        (b"{", "body must be JSON"),
        (b"\xff", "body must be JSON"),
        (b"[" * 60_000, "nested"),
        (b'{"idle_s": ' + b"[" * 900 + b"]" * 900 + b"}", "got a list"),
        (b'{"idle_s": 1' + b"0" * 5000 + b"}", "must be"),
        (b'{"' + b"x" * 60_000 + b'": 1}', "setting must be one of"),
    ]:
        status, answer = _post(server, bad, "application/json")
        assert status == 400 and words in answer["error"]
        assert len(answer["error"]) < 300
    assert server.report()["settings"] == before
    assert _post(server, good, "application/json")[1]["idle_s"] == 31
    assert server.report()["settings"]["idle_s"] == 31
    _post(server, json.dumps(before).encode(), "application/json")


def test_the_page_can_ask_for_each_settings_value_default_and_range(server: Server) -> None:
    table = server.get("/warmgraph/settings")
    values = server.report()["settings"]
    assert {name: setting["value"] for name, setting in table.items()} == values
    workers = {"name": "workers", "default": 0, "minimum": 0, "maximum": 64, "whole": True}
    assert workers.items() <= table["workers"].items()
    assert all(s["minimum"] <= s["default"] <= s["maximum"] for s in table.values())


@pytest.mark.parametrize("is_chunked", [False, True])
def test_settings_are_read_up_to_a_limit(server: Server, is_chunked: bool) -> None:
    """A chunked body says no length beforehand."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=180)
    body = b'{"idle_s": 31}' + b" " * (80 * 1024)
    connection.request(
        "POST",
        "/warmgraph/settings",
        body=iter([body[:1000], body[1000:]]) if is_chunked else body,
        headers={"Content-Type": "application/json"},
        encode_chunked=is_chunked,
    )
    answer = connection.getresponse()
    assert answer.status == 400
    assert "at most 64 KiB" in json.loads(answer.read())["error"]
    connection.close()
    assert server.report()["settings"]["idle_s"] != 31


def test_a_claim_of_gigabytes_is_refused_before_a_byte_of_it_came(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=180) as raw:
        raw.sendall(
            b"POST /warmgraph/settings HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            b"Content-Type: application/json\r\nContent-Length: 50000000000\r\n\r\n"
        )
        assert b" 400 " in raw.recv(4096).splitlines()[0]
