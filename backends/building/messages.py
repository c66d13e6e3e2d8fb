"""How a builder and its workers talk: framed JSON messages over the worker's standard streams.

A frame is four bytes of length (big-endian) and that many bytes of JSON text, always an object.
What a start-up hook prints on the worker's stdout before the worker takes the stream for itself is
skipped up to `MARK`.

    builder -> worker   {"argv", "host", "cwd", "cache", "spool", ...}: the hello, once
                        {"job": number, "task": {...}}
                        {"measure": "granted"}
                        the end of the stream: the worker is to end
    worker -> builder   `MARK`, then {"ready": pid, "seconds"} or {"unfit": words, "trace"}, once
                        {"measure": "begin"} and, after it was granted, {"measure": "end"}
                        {"job", "ok": true, "sha256", "packed_bytes", "raw_bytes", "facts",
                        "seconds"}, and the packed payload's bytes
                        {"job", "ok": false, "error", "remedy", "trace", "clean"}
"""

from __future__ import annotations

import json
import struct
from typing import Any, BinaryIO

from ..storing.canonical_json import read_json

MARK = b"\n\x00warmgraph worker\x00."
MESSAGE_LIMIT_BYTES = 1 << 24  # a description or a trace takes a thousandth of that
#: Suffix of what workers leave for one another in the spool; may be removed at any time.
REMEMBERED = ".works"
_LENGTH = struct.Struct(">I")


class ProtocolError(Exception):
    """What came over the pipe is not a message."""


def encode_message(message: dict[str, Any]) -> bytes:
    """Return the frame of a message.

    Raises:
        ProtocolError: the message is not plain JSON data, or larger than `MESSAGE_LIMIT_BYTES`.
    """
    try:
        body = json.dumps(message, separators=(",", ":"), allow_nan=False).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"a message must be plain JSON data, got {error}") from error
    if len(body) > MESSAGE_LIMIT_BYTES:
        raise ProtocolError(f"a message must be below {MESSAGE_LIMIT_BYTES} bytes, got {len(body)}")
    return _LENGTH.pack(len(body)) + body


def write_message(stream: BinaryIO, message: dict[str, Any]) -> None:
    """Write one message and flush it; encoding errors are raised before a byte is written."""
    stream.write(encode_message(message))
    stream.flush()


def read_message(stream: BinaryIO) -> dict[str, Any] | None:
    """Read one message from a buffered stream; None at the end of the stream.

    Raises:
        ProtocolError: the stream ends inside a message, or holds something else.
    """
    header = stream.read(_LENGTH.size)
    if not header:
        return None
    if len(header) < _LENGTH.size:
        raise ProtocolError("the stream ended inside a message")
    (length,) = _LENGTH.unpack(header)
    if length > MESSAGE_LIMIT_BYTES:
        raise ProtocolError(f"a message must be below {MESSAGE_LIMIT_BYTES} bytes, got {length}")
    body = stream.read(length)
    if len(body) < length:
        raise ProtocolError("the stream ended inside a message")
    try:
        message = read_json(body)
    except ValueError as error:
        raise ProtocolError(f"a message must be JSON, got {body[:80]!r}") from error
    if not isinstance(message, dict):
        raise ProtocolError(f"a message must be an object, got {type(message).__name__}")
    return message


def skip_noise(stream: BinaryIO) -> bool:
    """Drop everything up to and including `MARK`; False when the stream ends before it."""
    window = b""
    while window != MARK:
        byte = stream.read(1)
        if not byte:
            return False
        window = (window + byte)[-len(MARK) :]
    return True
