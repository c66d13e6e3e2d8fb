"""What workers answer: one that does not keep to the protocol fails its job in words, and no
thread.
"""

from __future__ import annotations

import json
import logging
import tempfile
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from warmgraph_backends.building.builder import Builder
from warmgraph_backends.building.contract import BuildResult, Job
from warmgraph_backends.errors import BuildError
from warmgraph_backends.storing.manifest import MAX_PAYLOAD_BYTES

SCRIPT = Path(__file__).with_name("telling_worker.py")
PATIENCE_S = 30.0
GOOD: list[dict[str, Any]] = [{"answer": {}}]
MEASURED: list[dict[str, Any]] = [
    {"text": '{"measure": "begin"}'},
    {"read": True},
    {"text": '{"measure": "end"}'},
    {"answer": {}},
]
_numbers = count()


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Builder]]:
    temp = tmp_path / "temp"
    temp.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temp))
    builders: list[Builder] = []

    def make_builder(**hello: Any) -> Builder:
        builder = Builder(
            hello=hello,
            spool=tmp_path / "spool",
            workers=lambda: 1,
            time_limit_s=lambda: 20.0,
            script=SCRIPT,
        )
        builders.append(builder)
        return builder

    yield make_builder
    for builder in builders:
        builder.close()


@pytest.fixture(autouse=True)
def nothing_escapes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[None]:
    caplog.set_level(logging.DEBUG)
    escaped: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", escaped.append)
    yield
    assert escaped == []
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR] == []


def result_of(builder: Builder, steps: list[dict[str, Any]]) -> BuildResult | BuildError:
    job = Job(f"key{next(_numbers)}", "ResBlock 320->640", 1, {"steps": steps, "facts": {"a": 1}})
    future = builder.submit(job)
    error = future.exception(PATIENCE_S)
    assert error is None or isinstance(error, BuildError)
    return future.result() if error is None else error


def failed(**answer: Any) -> list[dict[str, Any]]:
    whole = {"job": "$job", "ok": False, "error": "x", "remedy": "", "trace": "t", "clean": True}
    text = json.dumps({**whole, **answer}).replace('"$job"', "$job")
    return [{"text": text}]


def test_an_answer_by_the_protocol_is_taken(make: Callable[..., Builder]) -> None:
    builder = make()
    for steps in (GOOD, MEASURED):
        result = result_of(builder, steps)
        assert isinstance(result, BuildResult), result
        assert (result.facts, result.seconds, result.payload.raw_bytes) == ({"a": 1}, 0.5, 7)
    refused = result_of(builder, failed(error="no Triton here", remedy="install it"))
    assert isinstance(refused, BuildError)
    assert (refused.reason, refused.remedy) == ("no Triton here", "install it")
    assert str(refused.__cause__).strip() == "t"


WRONG: dict[str, list[dict[str, Any]]] = {
    "another job's": [{"answer": {"job": 77}}],
    "job true": [{"answer": {"job": True}}],
    "job as text": [{"answer": {"job": "1"}}],
    "no job": [{"answer": {}, "without": ["job"]}],
    "no ok": [{"answer": {}, "without": ["ok"]}],
    "ok is text": [{"answer": {"ok": "yes"}}],
    "ok is 1": [{"answer": {"ok": 1}}],
    "no size": [{"answer": {}, "without": ["packed_bytes"]}],
    "a size that is a text": [{"answer": {"packed_bytes": "7"}}],
    "another size": [{"answer": {"packed_bytes": 3}}],
    "a size out of bounds": [{"answer": {"packed_bytes": MAX_PAYLOAD_BYTES + 1}}],
    "half a payload": [{"answer": {"packed_bytes": 1000}}, {"leave": True}],
    "no hash": [{"answer": {"sha256": None}}],
    "another hash": [{"answer": {"sha256": "0" * 64}}],
    "raw_bytes is a float": [{"answer": {"raw_bytes": 7.0}}],
    "raw_bytes is negative": [{"answer": {"raw_bytes": -1}}],
    "raw_bytes out of bounds": [{"answer": {"raw_bytes": MAX_PAYLOAD_BYTES + 1}}],
    "facts are a list": [{"answer": {"facts": []}}],
    "seconds are text": [{"answer": {"seconds": "1"}}],
    "seconds are NaN": [{"text": '{"job": $job, "ok": true, "seconds": NaN}'}],
    "seconds are negative": [{"answer": {"seconds": -5}}],
    "an error that is no text": failed(error=["x"]),
    "clean is text": failed(clean="yes"),
    "no trace": failed(trace=None),
    "an error with a lone surrogate": failed(error="\ud800"),
    "a list": [{"text": "[1]"}],
    "a number": [{"text": "7"}],
    "no JSON": [{"text": "{'job'"}],
    "a number of many digits": [{"text": '{"job": ' + "9" * 5000 + "}"}],
    "deep nesting": [{"text": "[" * 90_000}],
    "bytes that are no text": [{"raw": "00000003fffefd"}],
    "a length out of bounds": [{"raw": "ffffffff00"}],
    "an unknown message": [{"text": '{"hello": 1}'}],
    "an empty message": [{"text": "{}"}],
    "measure of an unknown kind": [{"text": '{"measure": "twice"}'}],
    "measure is a list": [{"text": '{"measure": []}'}],
    "an end without a beginning": [{"text": '{"measure": "end"}'}, *GOOD],
    "two beginnings": [{"text": '{"measure": "begin"}'}, {"read": True}, MEASURED[0], *GOOD],
}


def test_whatever_else_is_answered_fails_that_job_in_words_and_the_next_is_built(
    make: Callable[..., Builder], tmp_path: Path
) -> None:
    builder = make()
    for case, steps in WRONG.items():
        steps = json.loads(json.dumps(steps))
        error = result_of(builder, steps)
        assert isinstance(error, BuildError), case
        assert '"ResBlock 320->640"' in error.reason, (case, error.reason)
        assert len(error.reason) < 400 and "\n" not in error.reason, case
        assert "signal 9" not in error.reason, (case, error.reason)
        assert error.__cause__ is not None, case
    assert isinstance(result_of(builder, GOOD), BuildResult)


@pytest.mark.parametrize(
    "ready", ["[]", '{"unfit": [1]}', "{}", '{"ready": "' + "x" * 9000 + '"', "[" * 90_000]
)
def test_a_greeting_that_is_none_is_a_worker_that_does_not_start(
    make: Callable[..., Builder], ready: str
) -> None:
    error = result_of(make(ready=ready), GOOD)
    assert isinstance(error, BuildError)
    assert len(error.reason) < 500
    assert error.__cause__ is not None
