"""What a server and a worker of its build farm say to each other: plain data, checked."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple, TypedDict

from ..errors import BuildError
from ..storing.graph_file import CompressedPayload
from ..storing.manifest import MAX_PAYLOAD_BYTES
from .answers import AnswerError, Failure, Result, read_answer

#: The function of a worker that builds, as it finds it.
BUILD = "warmgraph_backends.building.farm_worker:build"
#: Under it a worker says that it has begun with a job.
TOPIC = "warmgraph"
_NUMBER = 0


class Ask(TypedDict):
    """A job, as it is sent.

    Attributes:
        name: of it at the scheduler.
        key, label, cost, task: see `contract.Job`.
        target: of the server that asks; another is refused.
        hello: how the host computes: "argv", and "pretended", the card that need not be there.
        limit_s: seconds that it may take.
    """

    name: str
    key: str
    label: str
    cost: int
    task: dict[str, Any]
    target: dict[str, Any]
    hello: dict[str, Any]
    limit_s: float


class Answer(NamedTuple):
    """What became of a job.

    Attributes:
        worker: its address.
        unfit: whether the failure is the machine's, and another may build it.
        outcome: payload, facts and seconds; or why there are none.
    """

    worker: str
    unfit: bool
    outcome: tuple[CompressedPayload, dict[str, Any], float] | BuildError


def built(
    worker: str, payload: CompressedPayload, facts: dict[str, Any], seconds: float
) -> dict[str, Any]:
    """Return the message that a job is done."""
    message = {
        "job": _NUMBER,
        "ok": True,
        "file": "",
        "sha256": payload.sha256,
        "raw_bytes": payload.raw_bytes,
        "facts": facts,
        "seconds": seconds,
    }
    return {"worker": worker, "unfit": False, "message": message, "payload": payload.data}


def failed(worker: str, error: BuildError, *, unfit: bool) -> dict[str, Any]:
    """Return the message that a job has failed."""
    message = {
        "job": _NUMBER,
        "ok": False,
        "error": error.reason.to_plain(),
        "remedy": error.remedy.to_plain(),
        "final": False,  # for that machine only
        "trace": str(error.__cause__ or ""),
        "clean": True,
    }
    return {"worker": worker, "unfit": unfit, "message": message, "payload": b""}


def read(message: Any) -> Answer:
    """Check what a worker answers.

    Raises:
        AnswerError: it is no answer; the text says why.
    """
    if not isinstance(message, dict) or not isinstance(message.get("message"), dict):
        raise AnswerError("it is no table of a message")
    worker, data = str(message.get("worker")), message.get("payload")
    answer = read_answer(message["message"], _NUMBER)
    if isinstance(answer, Failure):
        return Answer(worker, message.get("unfit") is True, answer.error)
    if not isinstance(answer, Result) or not isinstance(data, bytes):
        raise AnswerError("it is neither a result nor a failure")
    if len(data) > MAX_PAYLOAD_BYTES or hashlib.sha256(data).hexdigest() != answer.sha256:
        raise AnswerError("its payload is not what the worker made")
    payload = CompressedPayload(data, answer.sha256, answer.raw_bytes)
    return Answer(worker, False, (payload, answer.facts, answer.seconds))
