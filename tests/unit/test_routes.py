"""What pages may tell the server, and in which words it refuses."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from warmgraph_backends.sessions.lines import ENGLISH
from warmgraph_backends.sessions.settings import SETTINGS

#: Requests that are refused: the route, the body, its type, and the sentence that says why.
REFUSED = [
    ("builds", b'{"action": "explode"}', "application/json", "refused_choice"),
    ("builds", b"[]", "application/json", "refused_choice"),
    ("store", b'{"action": "clear", "what": "../.."}', "application/json", "refused_choice"),
    ("captured", b'{"action": ["free"]}', "application/json", "refused_choice"),
    ("builds", b'{"action": "pause"}', "text/plain", "refused_type"),
    ("builds", b"{", "application/json", "refused_json"),
    ("builds", b"\xff", "application/json", "refused_json"),
    ("builds", b"[" * 60_000, "application/json", "refused_nested"),
    ("builds", b" " * 70_000, "application/json", "refused_size"),
    ("places", b'{"prompt": []}', "application/json", "refused_table"),
    ("places", b'{"prompt": {}}', "application/json", "refused_choice"),
    ("places", b'{"prompt": {}, "kinds": ["lora"]}', "application/json", "refused_choice"),
    ("plain", b"3", "application/json", "refused_table"),
    ("compared", b'{"first": 3}', "application/json", "refused_text"),
    ("settings", b"[]", "application/json", "refused_settings"),
    ("settings", b'{"worker": 3}', "application/json", "refused_choice"),
    ("settings", b'{"workers": 65}', "application/json", "refused_whole"),
    ("settings", b'{"store_cap_gib": 0}', "application/json", "refused_number"),
    ("settings", b'{"metrics": "on"}', "application/json", "refused_toggle"),
    ("settings", b'{"workers": 1}', "application/json", "refused_unkept"),
]


def _post(pack: ModuleType, folder: Path, path: str, body: bytes, kind: str) -> tuple[int, Any]:
    """Ask a server whose settings are kept in a folder."""
    settings = sys.modules[f"{pack.__name__}.backends.sessions.settings"].Settings(folder)
    routes = sys.modules[f"{pack.__name__}.nodes.routes"]
    engine, everywhere = SimpleNamespace(overview=None), SimpleNamespace()

    async def ask() -> tuple[int, Any]:
        table = web.RouteTableDef()
        routes.register(
            table, engine=lambda: engine, settings=lambda: settings, everywhere=lambda: everywhere
        )
        app = web.Application()
        app.add_routes(table)
        async with TestClient(TestServer(app)) as client:
            headers = {"Content-Type": kind}
            answer = await client.post(f"/warmgraph/{path}", data=body, headers=headers)
            return answer.status, await answer.json()

    return asyncio.run(ask())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One that cannot be made."""
    (tmp_path / "file").touch()
    return tmp_path / "file" / "folder"


@pytest.mark.parametrize(("path", "body", "kind", "key"), REFUSED)
def test_a_refusal_is_data_that_a_page_may_show_in_its_language(
    pack: ModuleType, folder: Path, path: str, body: bytes, kind: str, key: str
) -> None:
    status, answer = _post(pack, folder, path, body, kind)
    assert status == {"refused_type": 415, "refused_unkept": 500}.get(key, 400)
    line = answer["line"]
    assert line["key"] == key and answer["error"] == line["text"]
    assert ENGLISH[key].format(**line["values"]) == line["text"] and len(line["text"]) < 300


def test_every_sentence_of_refusals_is_one_that_is_met() -> None:
    met = {key for *_, key in REFUSED}
    assert met == {key for key in ENGLISH if key.startswith("refused_")}


def test_what_is_wrong_is_named(pack: ModuleType, folder: Path) -> None:
    body = json.dumps({"captured_vram_percent": 91}).encode()
    _, answer = _post(pack, folder, "settings", body, "application/json")
    setting = SETTINGS["captured_vram_percent"]
    assert answer["line"]["values"] == {
        "name": setting.name,
        "minimum": "0",
        "maximum": "90",
        "got": "91",
    }


def test_prompts_may_be_larger_than_other_requests(pack: ModuleType, folder: Path) -> None:
    text = {"class_type": "CLIPTextEncode", "inputs": {"text": "a cat" * 100_000}}
    prompt = {
        "1": {"class_type": "UNETLoader", "inputs": {}},
        "2": {"class_type": "KSampler", "inputs": {"model": ["1", 0]}},
        "3": text,
    }
    body = json.dumps({"prompt": prompt, "kinds": ["model", "step_cache"]}).encode()
    status, answer = _post(pack, folder, "places", body, "application/json")
    assert status == 200 and [place["node"] for place in answer["places"]] == ["2"]
    status, answer = _post(pack, folder, "plain", body, "application/json")
    assert (status, answer) == (200, {"prompt": prompt, "changed": 0})
    body = b" " * (9 << 20)
    status, answer = _post(pack, folder, "plain", body, "application/json")
    assert status == 400 and answer["line"]["values"] == {"limit": "8192"}
