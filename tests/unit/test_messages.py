"""Frames between builder and worker: what goes in comes out, nothing else is a message."""

from __future__ import annotations

import io

import pytest

from warmgraph_backends.building.messages import (
    MARK,
    ProtocolError,
    encode_message,
    read_message,
    skip_noise,
    write_message,
)


def test_messages_come_out_as_they_went_in():
    messages = [
        {"job": 1, "task": {"text": "grün\n\x00", "list": [1, 2.5, None, True]}},
        {},
        {"a": "b" * 100_000},
    ]
    stream = io.BytesIO()
    for message in messages:
        write_message(stream, message)
    stream.seek(0)
    assert [read_message(stream) for _ in messages] == messages
    assert read_message(stream) is None


@pytest.mark.parametrize("cut", [1, 3, 4, 9])
def test_a_stream_that_ends_inside_a_message_is_an_error(cut):
    frame = encode_message({"job": 1})
    with pytest.raises(ProtocolError, match="ended inside"):
        read_message(io.BytesIO(frame[:cut]))


def test_a_length_out_of_bounds_is_refused_without_reading_it():
    with pytest.raises(ProtocolError, match="below"):
        read_message(io.BytesIO(b"\xff\xff\xff\xff" + b"x" * 100))


@pytest.mark.parametrize("body", [b"not json", b"[1, 2]", b"3"])
def test_only_objects_are_messages(body):
    with pytest.raises(ProtocolError):
        read_message(io.BytesIO(len(body).to_bytes(4, "big") + body))


def test_a_message_that_is_not_plain_data_is_refused_before_a_byte_is_written():
    stream = io.BytesIO()
    with pytest.raises(ProtocolError, match="plain JSON"):
        write_message(stream, {"object": object()})
    assert stream.getvalue() == b""


@pytest.mark.parametrize("noise", [b"", b"hello\n", b"x" * 5000, MARK[:-1], MARK[:4] + MARK[:9]])
def test_noise_before_the_mark_is_skipped(noise):
    stream = io.BytesIO(noise + MARK + encode_message({"ready": 1}))
    assert skip_noise(stream)
    assert read_message(stream) == {"ready": 1}


def test_a_stream_without_a_mark_is_no_worker():
    assert not skip_noise(io.BytesIO(b"usage: python [option] ..."))
