"""A worker's answers to its job, validated before anything in them is used.

A worker may run out of memory or break. One that violates the protocol fails its job and is
replaced.
"""

from __future__ import annotations

import contextlib
import hashlib
from enum import Enum
from typing import Any, NamedTuple, NoReturn, TypeVar

from ..errors import BuildError, ManifestError
from ..reasons import ENGLISH, Reason, of
from ..storing.graph_file import CompressedPayload
from ..storing.manifest import (
    check_plain,
    read_payload_bytes,
    read_seconds,
)
from .contract import BuildResult
from .messages import ProtocolError

Kind = TypeVar("Kind")
_REASON_CHARACTERS = 2000
_SHOWN = 80
#: Reasons within one another that are read.
_MOST_NESTED = 8


class AnswerError(ProtocolError):
    """A message is none that a worker may send now."""


class WorkerError(Exception):
    """An error as it happened in a worker: the cause of the `BuildError` that its job ends with."""

    def __init__(self, trace: str) -> None:
        super().__init__("\n" + trace)


class Measure(str, Enum):
    """A worker asks to measure on the GPU, or has done so."""

    BEGIN = "begin"
    END = "end"


class Result(NamedTuple):
    """A job is done: its payload's hash, size as packed and unpacked, facts, seconds."""

    sha256: str
    packed_bytes: int
    raw_bytes: int
    facts: dict[str, Any]
    seconds: float


class Failure(NamedTuple):
    """A job has failed; `clean` where nothing of it can be in the way of the worker's next one."""

    error: BuildError
    clean: bool


def read_answer(message: dict[str, Any], number: int) -> Measure | Result | Failure:
    """Check a message that came while a worker has a job.

    Args:
        message: any JSON object.
        number: the number of the worker's job.

    Raises:
        AnswerError: it is none of the three; the text says why.
    """
    try:
        check_plain(message, "message")
        if "job" not in message:
            return _measure(message)
        if _field(message, "job", int) != number:
            _refuse(f"job must be {number}, got {_shown(message['job'])}")
        return _result(message) if _field(message, "ok", bool) else _failure(message)
    except ManifestError as error:
        raise AnswerError(error.reason) from error


def read_greeting(message: dict[str, Any]) -> None:
    """Check the first message of a worker.

    Raises:
        BuildError: it says that the worker cannot start, with the worker's trace as its cause, or
            is no greeting.
    """
    if type(message.get("ready")) is int:
        return
    trace = message.get("trace")
    reason = of("no_workers", error=_said(message.get("unfit")) or _shown(message))
    raise BuildError(reason, final=message.get("final") is True) from WorkerError(
        _printable(trace) if isinstance(trace, str) else _shown(message)
    )


def built_of(key: str, result: Result, data: bytes) -> BuildResult:
    """Return what a worker built for a key, with the bytes that came beside its answer.

    Raises:
        AnswerError: they are not what it says.
    """
    if hashlib.sha256(data).hexdigest() != result.sha256:
        raise AnswerError("its payload is not what the worker made")
    payload = CompressedPayload(data, result.sha256, result.raw_bytes)
    return BuildResult(key, payload, result.facts, result.seconds)


def _measure(message: dict[str, Any]) -> Measure:
    if set(message) == {"measure"} and message["measure"] in [kind.value for kind in Measure]:
        return Measure(message["measure"])
    _refuse(f"{_shown(message)} is no answer to a job")


def _result(message: dict[str, Any]) -> Result:
    return Result(
        _field(message, "sha256", str),
        read_payload_bytes(message.get("packed_bytes"), "packed_bytes"),
        read_payload_bytes(message.get("raw_bytes"), "raw_bytes"),
        _field(message, "facts", dict),
        read_seconds(message.get("seconds")),
    )


def _failure(message: dict[str, Any]) -> Failure:
    reason, remedy = _reason(message, "error"), _reason(message, "remedy")
    final = message.get("final") is True
    error = BuildError(reason or Reason("no reason"), remedy=remedy, final=final)
    error.__cause__ = WorkerError(_printable(_field(message, "trace", str)))
    return Failure(error, _field(message, "clean", bool))


def _field(message: dict[str, Any], name: str, kind: type[Kind]) -> Kind:
    value = message.get(name)
    if type(value) is not kind:  # true is no number
        _refuse(f"{name} must be of the type {kind.__name__}, got {_shown(value)}")
    return value


def _reason(message: dict[str, Any], name: str) -> Reason:
    reason = _said(message.get(name))
    if reason is None:
        _refuse(f"{name} must be a reason, got {_shown(message.get(name))}")
    return reason


def _said(reason: object, nested: int = _MOST_NESTED) -> Reason | None:
    """Read what `Reason.to_plain` made of a reason in another process, or words alone; None where
    it is neither.
    """
    if isinstance(reason, str):
        return Reason(_line(reason))
    match reason:
        case {"key": str(key), "values": dict(values)} if key in ENGLISH and nested:
            read = {str(name): _said(value, nested - 1) for name, value in values.items()}
            with contextlib.suppress(KeyError):  # another version's, with other values
                if None not in read.values():
                    return of(key, **read)
    match reason:
        case {"text": str(text)}:
            return Reason(_line(text))
    return None


def _line(text: str) -> str:
    return " ".join(_printable(text).split())[:_REASON_CHARACTERS]


def _printable(text: str) -> str:
    """Text that a log and a console can show."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _refuse(problem: str) -> NoReturn:
    raise AnswerError(problem)
