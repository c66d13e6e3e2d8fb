"""The manifest's schema: what the pack writes passes, and each wrong field is named."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from warmgraph_backends.contract import WeightSpec
from warmgraph_backends.errors import ManifestError
from warmgraph_backends.storing.manifest import (
    MAX_PAYLOAD_BYTES,
    check_plain,
    is_key,
    read_facts,
    read_manifest,
)

from . import mutations, saved

KEY = "0a" * 32


def whole() -> dict[str, Any]:
    payload = {"sha256": KEY, "bytes": 9, "raw_bytes": 20, "compression": "zlib"}
    return {**saved.manifest(KEY), "format": 1, "signer": "65b8bb36", "payload": payload}


def test_a_whole_manifest_is_read_with_its_types() -> None:
    manifest = read_manifest(whole())
    assert (manifest.key, manifest.kind, manifest.signer) == (KEY, saved.LABEL, "65b8bb36")
    assert manifest.facts.weights[0] == WeightSpec("proj.weight", (4, 4), "float32")
    assert manifest.payload == (KEY, 9, 20)
    assert manifest.build_seconds == 4.114
    assert manifest.data == whole()
    assert json.loads(json.dumps(manifest.facts.to_dict())) == saved.facts()


def test_a_manifest_that_nobody_signed_has_no_signer() -> None:
    data = whole()
    del data["signer"]
    assert read_manifest(data).signer is None


@pytest.mark.parametrize("name", sorted(set(whole()) - {"signer"}))
def test_each_field_is_needed_and_of_its_type(name: str) -> None:
    data = whole()
    del data[name]
    with pytest.raises(ManifestError, match=f"^{name} is missing$"):
        read_manifest(data)
    for value in (None, True, "\ud800", 1.5, [[]], {"\x1b": {}}, mutations.deep(70)):
        if name in ("work",) and value == 1.5:
            continue
        with pytest.raises(ManifestError) as caught:
            read_manifest({**whole(), name: value})
        assert caught.value.field.startswith((name, "phases"))
        assert str(caught.value).isprintable()


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "extra": lambda m: m.update(extra=1),
    "format": lambda m: m.update(format=True),
    "signer": lambda m: m.update(signer=None),
    "structure.sources": lambda m: m["structure"]["sources"].update({"\x00": "x"}),
    "structure.wide": lambda m: m["structure"].update(wide=0),
    "structure.layout": lambda m: m["structure"].pop("layout"),
    "inputs[0]": lambda m: m["inputs"][0].update(more=1),
    "inputs[0].dims": lambda m: m["inputs"][0].update(dims=[-1]),
    "symbols[0].maximum": lambda m: m["symbols"][0].update(maximum=2.0),
    "target": lambda m: m["target"].update({"a\nb": 1}),
    "target.torch": lambda m: m["target"].update(torch=["2.11.0"]),
    "target.options": lambda m: m["target"].update(options={"a": {"b": 1}}),
    "weights[0]": lambda m: m["weights"][0].append(1),
    "weights[1][1]": lambda m: m["weights"][1].__setitem__(1, [True]),
    "work": lambda m: m.update(work=-1.0),
    "binary_bytes": lambda m: m.update(binary_bytes=1.0),
    "checks[1].error": lambda m: m["checks"][1].update(error="0"),
    "checks[0].sizes.batch": lambda m: m["checks"][0]["sizes"].update(batch=None),
    "built": lambda m: m["built"].update(host="x"),
    "built.seconds": lambda m: m["built"].update(seconds=1e300),
    "phases.capture": lambda m: m["built"]["phases"].update(capture=-1),
    "payload": lambda m: m["payload"].pop("bytes"),
    "payload.compression": lambda m: m["payload"].update(compression="pickle"),
    "payload.raw_bytes": lambda m: m["payload"].update(raw_bytes=MAX_PAYLOAD_BYTES + 1),
    "payload.bytes": lambda m: m["payload"].update(bytes=True),
}


@pytest.mark.parametrize("field", CHANGES)
def test_a_wrong_field_is_named(field: str) -> None:
    data = copy.deepcopy(whole())
    CHANGES[field](data)
    with pytest.raises(ManifestError) as caught:
        read_manifest(data)
    assert caught.value.field.strip("'") == field


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (float("nan"), "finite"),
        (1 << 63, "63 bits"),
        ("\udcff", "Unicode"),
        ({"\udcff": 1}, "Unicode"),
        ({1: 1}, "names that are text"),
        ("x" * 70_000, "at most 65536"),
        (mutations.deep(65), "64 deep"),
        (mutations.deep(65, tables=True), "64 deep"),
        ([0] * 200_001, "at most 200000"),
        ({"a": (1, b"x")}, "plain data"),
    ],
    ids=range(10),
)
def test_plain_data_has_bounds(value: Any, words: str) -> None:
    with pytest.raises(ManifestError, match=words):
        check_plain(["fine", value], "structure")
    check_plain([mutations.deep(60), (1, 2.5, None, True, "é")], "structure")


def test_facts_leave_out_what_else_a_worker_says() -> None:
    facts = read_facts({**saved.facts(), "more": object()})
    assert facts.binary_bytes == 27856
    with pytest.raises(ManifestError, match="facts must be a table"):
        read_facts(None)


@pytest.mark.parametrize("text", [KEY.upper(), KEY + "\n", KEY[1:], "", None, 7])
def test_only_sixty_four_digits_are_a_key(text: object) -> None:
    assert is_key(KEY)
    assert not is_key(text)


def test_reading_one_takes_a_millisecond_or_so() -> None:
    data = whole()
    part = data["structure"]["module"]
    part["modules"] = [[str(n), copy.deepcopy(part)] for n in range(40)]  # as of a large block
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        read_manifest(data)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.02
