"""What a machine's owner says of its fleet: in a file of the private folder, or by environment."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from warmgraph_backends.errors import GraphFileError
from warmgraph_backends.fleet.fleet import Fleet
from warmgraph_backends.fleet.schemes import SCHEMES, redacted
from warmgraph_backends.fleet.settings import FILE, FleetSettings, read_settings, write_file

KEY = f"fleet:{'5f' * 32}"


def told(tmp_path: Path, content: Any) -> FleetSettings:
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / FILE).write_text(text, "utf-8")
    return read_settings(tmp_path, {})


def test_without_a_word_there_is_no_fleet(tmp_path: Path) -> None:
    assert read_settings(tmp_path, {}) == FleetSettings()
    fleet = Fleet(tmp_path)
    store = fleet.store(tmp_path / "store", lambda: 1)
    assert fleet.remote(store) is None and fleet.report()["remote"] is None


def test_the_file_says_all_of_it_and_the_environment_counts_more(tmp_path: Path) -> None:
    content = {
        "remote": "s3://bucket/graphs",
        "mode": "write",
        "patience_s": 3,
        "options": {"endpoint_url": "http://there"},
        "trusted_keys": [KEY],
        "signing_key_file": "keys/fleet.private",
    }
    found = told(tmp_path, content)
    assert (found.remote, found.mode, found.patience_s) == ("s3://bucket/graphs", "write", 3.0)
    assert found.options == content["options"] and found.trusted[0].text == KEY
    assert found.signing_key_file == tmp_path / "keys/fleet.private" and found.signs
    other = f"other:{'0a' * 32}"
    environment = {
        "WARMGRAPH_REMOTE": "gs://other",
        "WARMGRAPH_REMOTE_MODE": "read",
        "WARMGRAPH_TRUSTED_KEYS": f"{other}, {KEY}",
        "WARMGRAPH_SIGNING_KEY_FILE": "none",
    }
    found = read_settings(tmp_path, environment)
    assert (found.remote, found.mode, found.signs) == ("gs://other", "read", False)
    assert [key.text for key in found.trusted] == [other, KEY] and found.signing_key_file is None
    assert found.patience_s == 3.0 and not found.problems


BAD: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", "it is no JSON: "),
    "no table": ([], "it must be a table in braces"),
    "deep": ("[" * 100_000, "it is no JSON"),
    "a field that is none": ({"url": "s3://x"}, "'url' is no field"),
    "a URL of another sort": ({"remote": "ftp://u:secret@x"}, "remote must begin with one of"),
    "a URL with a token": ({"remote": "https://x/y?sig=secret"}, "neither ? nor #"),
    "a chained URL": ({"remote": "simplecache::s3://secret"}, "remote must begin with one of"),
    "a path": ({"remote": "/mnt/secret"}, "remote must begin with one of"),
    "a number": ({"remote": 3}, "remote must be text"),
    "a mode": ({"mode": "secret"}, "mode must be read or write"),
    "no time": ({"patience_s": True}, "patience_s must be a number"),
    "no patience": ({"patience_s": 0}, "patience_s must be more than 0"),
    "options": ({"options": ["secret"]}, "options must be a table"),
    "a key": ({"trusted_keys": ["fleet:secret"]}, "a public key must be NAME:64 hex digits"),
    "keys": ({"trusted_keys": "secret"}, "trusted_keys must be a list"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_in_the_file_is_told_and_none_of_it_counts(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    content, words = BAD[name]
    if isinstance(content, dict):
        content = {"trusted_keys": [KEY], **content}
    found = told(tmp_path, content)
    (problem,) = found.problems
    assert words in problem and str(tmp_path / FILE) in problem and "secret" not in problem
    assert found == FleetSettings(problems=found.problems)
    caplog.set_level(logging.WARNING)
    fleet = Fleet(tmp_path)
    store = fleet.store(tmp_path / "store", lambda: 1)
    assert fleet.remote(store) is None and fleet.signer.fingerprint
    assert caplog.text.count(words) == 1


def test_a_wrong_variable_is_told_and_the_others_count(tmp_path: Path) -> None:
    found = read_settings(
        tmp_path, {"WARMGRAPH_REMOTE": "s3://b/g", "WARMGRAPH_REMOTE_MODE": "all"}
    )
    assert found.remote == "s3://b/g" and found.mode == "read"
    assert "WARMGRAPH_REMOTE_MODE of the environment is not used" in found.problems[0]


def test_changing_one_field_keeps_the_others(tmp_path: Path) -> None:
    told(tmp_path, {"remote": "s3://b/g"})
    write_file(tmp_path, {"trusted_keys": [KEY]})
    assert json.loads((tmp_path / FILE).read_text()) == {
        "remote": "s3://b/g",
        "trusted_keys": [KEY],
    }
    (tmp_path / FILE).write_text("{", "utf-8")
    with pytest.raises(GraphFileError, match="it is no JSON"):
        write_file(tmp_path, {"trusted_keys": []})
    assert (tmp_path / FILE).read_text() == "{"


def test_a_package_that_is_missing_is_named_and_all_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    told(tmp_path, {"remote": "gs://bucket/secret-path"})
    fleet = Fleet(tmp_path)
    store = fleet.store(tmp_path / "store", lambda: 1)
    if fleet.remote(store) is None:
        assert "-m pip install gcsfs" in caplog.text
    assert "secret-path" not in caplog.text + str(fleet.report())


def test_every_extra_is_declared_in_the_project() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8")
    extras = text.partition("[project.optional-dependencies]")[2].partition("[project.urls]")[0]
    packages = {scheme.package for scheme in SCHEMES.values()} - {""}
    brought = {"fsspec", "aiohttp", "huggingface_hub"}  # by torch and by ComfyUI
    assert all(f'"{package}>=' in extras for package in packages - brought)
    assert '"cryptography>=' in extras


def test_a_url_is_shown_without_its_user() -> None:
    assert redacted("https://me:pass@host:8080/graphs") == "https://host:8080/graphs"
    assert redacted("s3://bucket/graphs") == "s3://bucket/graphs"
