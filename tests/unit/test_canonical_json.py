"""Canonical text: one form for equal data, refusal of what has none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from warmgraph_backends.storing.canonical_json import canonical_json, sha256_hex
from warmgraph_tools.by_path import ADOPT

MODULE = Path(__file__).resolve().parents[2] / "backends" / "storing" / "canonical_json.py"


def test_order_of_keys_does_not_matter_and_order_of_lists_does() -> None:
    assert canonical_json({"b": 1, "a": [2, 1]}) == '{"a":[2,1],"b":1}'
    assert canonical_json({"a": [2, 1], "b": 1}) == canonical_json({"b": 1, "a": (2, 1)})
    assert canonical_json([1, 2]) != canonical_json([2, 1])


def test_values_that_differ_in_type_differ_in_text() -> None:
    texts = {canonical_json(value) for value in (1, 1.0, True, "1", [1], None, "None", -0.0, 0.0)}
    assert len(texts) == 9


def test_text_is_ascii_and_reads_back() -> None:
    value = {"größe": "高さ", "n": 1e-5}
    text = canonical_json(value)
    assert text.isascii()
    assert json.loads(text) == value


@pytest.mark.parametrize(
    "value",
    [{1: "a"}, {"a": [{None: 1}]}, {"a": {1, 2}}, b"bytes", float("nan"), [float("inf")], object()],
)
def test_what_has_no_single_form_is_refused(value: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        canonical_json(value)


def test_text_is_the_same_for_every_hash_seed() -> None:
    code = (
        f"{ADOPT}\n"
        "from warmgraph_backends.storing.canonical_json import canonical_json, sha256_hex\n"
        "names = {f'name{i}' for i in range(50)}\n"  # a set: its order hangs on the seed
        "print(sha256_hex(canonical_json({n: n for n in names})))\n"
    )
    hashes = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(hashes) == 1


def test_hash_of_text_is_that_of_its_utf8_bytes() -> None:
    assert sha256_hex("é") == sha256_hex("é".encode())
    assert sha256_hex(b"") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
