"""A worker for tests that answers as its task says: by the protocol, nearly so, or not at all.

A task is {"steps": [...]}; a step is {"answer": changes of a good answer, "without": names of what
it lacks}, {"text": JSON text, in which $job stands for the job's number}, {"raw": hex of bytes},
{"read": true} or {"leave": true}. It imports nothing of the pack: it starts at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import sys
import zlib
from typing import Any

MARK = b"\n\x00warmgraph worker\x00."
incoming, outgoing = sys.stdin.buffer, sys.stdout.buffer


def read() -> dict[str, Any]:
    header = incoming.read(4)
    if len(header) < 4:
        sys.exit(0)
    message: dict[str, Any] = json.loads(incoming.read(struct.unpack(">I", header)[0]))
    return message


def write(data: bytes) -> None:
    outgoing.write(data)
    outgoing.flush()


def frame(text: str) -> bytes:
    body = text.encode("utf-8", "surrogatepass")
    return struct.pack(">I", len(body)) + body


PAYLOAD = zlib.compress(b"payload")


def good(number: int, facts: Any) -> dict[str, Any]:
    return {
        "job": number,
        "ok": True,
        "sha256": hashlib.sha256(PAYLOAD).hexdigest(),
        "packed_bytes": len(PAYLOAD),
        "raw_bytes": 7,
        "facts": facts,
        "seconds": 0.5,
    }


def main() -> None:
    write(MARK)
    hello = read()
    write(frame(hello.get("ready", json.dumps({"ready": os.getpid(), "seconds": 0.1}))))
    while True:
        message = read()
        number = message["job"]
        for step in message["task"]["steps"]:
            if "raw" in step:
                write(bytes.fromhex(step["raw"]))
            elif "read" in step:
                read()
            elif "leave" in step:
                sys.exit(3)
            elif "text" in step:
                write(frame(step["text"].replace("$job", str(number))))
            else:
                answer = good(number, message["task"].get("facts", {}))
                answer.update(step["answer"])
                for name in step.get("without", ()):
                    del answer[name]
                write(frame(json.dumps(answer)) + PAYLOAD)


if __name__ == "__main__":
    main()
