"""The file format: what is written loads, and nothing that differs in a single bit does."""

from __future__ import annotations

import json
import os
import struct
import sys
import time
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from warmgraph_backends.errors import GraphFileError
from warmgraph_backends.storing import graph_file
from warmgraph_backends.storing.canonical_json import canonical_json, sha256_hex
from warmgraph_backends.storing.graph_file import (
    CompressedPayload,
    Fault,
    RefusedFileError,
    compress_payload,
    encode,
    file_name,
    key_of,
    read_for_trust,
    read_graph,
    read_header,
)
from warmgraph_backends.storing.manifest import MAX_PAYLOAD_BYTES
from warmgraph_backends.storing.signing import Signer

from . import saved

KEY = sha256_hex("a graph")
RAW = bytes(range(256)) * 40
MANIFEST = saved.manifest(KEY, target={"torch": "2.11.0"})


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    return Signer(tmp_path / "private")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / file_name(KEY)


def write(path: Path, signer: Signer, raw: bytes = RAW, **manifest: Any) -> bytes:
    data = encode({**MANIFEST, **manifest}, compress_payload(raw), signer)
    path.write_bytes(data)
    return data


def fault_of(path: Path, signer: Signer) -> Fault:
    with pytest.raises(RefusedFileError) as caught:
        read_graph(path, signer)
    assert caught.value.path == path
    assert str(path) in caught.value.reason
    return caught.value.fault


def resigned(data: bytes, signer: Signer, change: Callable[[dict[str, Any]], Any]) -> bytes:
    """Change a file's manifest and sign it properly, as only the owner of the key can."""
    (length,) = struct.unpack("<Q", data[:8])
    container = json.loads(data[8 : 8 + length])
    manifest = json.loads(container["__metadata__"]["manifest"])
    change(manifest)
    text = canonical_json(manifest)
    signature = signer.sign(graph_file._PURPOSE + text)
    container["__metadata__"] = {"manifest": text, "signature": signature}
    header = json.dumps(container).encode()
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


def test_what_was_written_is_read(path: Path, signer: Signer) -> None:
    write(path, signer)
    graph = read_graph(path, signer)
    assert graph.payload == RAW
    assert graph.path == path
    assert graph.manifest.kind == "ResBlock 320->640"
    assert graph.manifest.target == {"torch": "2.11.0"}


def test_file_is_a_safetensors_file_with_its_manifest_in_the_metadata(
    path: Path, signer: Signer
) -> None:
    data = write(path, signer)
    with safe_open(str(path), framework="np") as file:
        manifest = json.loads(file.metadata()["manifest"])
        stored = file.get_tensor("payload").tobytes()
        assert list(file.keys()) == ["payload"]
    assert manifest == {
        **MANIFEST,
        "format": 1,
        "signer": signer.fingerprint,
        "payload": {
            "sha256": sha256_hex(stored),
            "bytes": len(stored),
            "raw_bytes": len(RAW),
            "compression": "zlib",
        },
    }
    assert zlib.decompress(stored) == RAW
    assert data.count(b"ResBlock 320->640") == 1


@pytest.mark.parametrize("raw", [b"", b"x", os.urandom(5000)])
def test_payloads_of_any_size_survive(path: Path, signer: Signer, raw: bytes) -> None:
    write(path, signer, raw)
    assert read_graph(path, signer).payload == raw


def test_every_truncation_is_refused_as_damage(path: Path, signer: Signer) -> None:
    data = write(path, signer)
    header_end = 8 + struct.unpack("<Q", data[:8])[0]
    for length in {*range(0, header_end + 9), *range(header_end, len(data), 97), len(data) - 1}:
        path.write_bytes(data[:length])
        assert fault_of(path, signer) is Fault.DAMAGED, length


def test_appended_bytes_are_refused_as_damage(path: Path, signer: Signer) -> None:
    data = write(path, signer)
    path.write_bytes(data + b"\0")
    assert fault_of(path, signer) is Fault.DAMAGED


def test_flipped_bits_of_every_header_byte_are_refused(path: Path, signer: Signer) -> None:
    data = write(path, signer)
    header_end = 8 + struct.unpack("<Q", data[:8])[0]
    faults = []
    for offset in range(header_end):
        for bit in (5, offset % 5):  # bit 5 is the case of a letter
            flipped = bytearray(data)
            flipped[offset] ^= 1 << bit
            path.write_bytes(flipped)
            faults.append(fault_of(path, signer))
    # bits of the signer's name make a file look foreign; all others are known as damage
    assert faults.count(Fault.UNTRUSTED) <= 2 * len(f'"signer":"{signer.fingerprint}"')
    assert faults.count(Fault.DAMAGED) == len(faults) - faults.count(Fault.UNTRUSTED)


def test_flipped_bits_of_the_payload_are_refused_as_damage(path: Path, signer: Signer) -> None:
    data = write(path, signer)
    header_end = 8 + struct.unpack("<Q", data[:8])[0]
    for offset in {header_end, len(data) - 1, *range(header_end, len(data), 31)}:
        flipped = bytearray(data)
        flipped[offset] ^= 1 << offset % 8
        path.write_bytes(flipped)
        assert fault_of(path, signer) is Fault.DAMAGED


def test_a_changed_manifest_is_refused(path: Path, signer: Signer) -> None:
    data = write(path, signer)
    path.write_bytes(data.replace(b"2.11.0", b"2.12.0"))
    assert fault_of(path, signer) is Fault.DAMAGED


def test_file_of_another_key_is_untrusted_and_names_the_remedy(
    path: Path, signer: Signer, tmp_path: Path
) -> None:
    other = Signer(tmp_path / "other machine")
    write(path, other)
    assert fault_of(path, signer) is Fault.UNTRUSTED
    with pytest.raises(GraphFileError) as caught:
        read_graph(path, signer)
    assert other.fingerprint in caught.value.reason
    assert signer.trust_command(path.parent) in caught.value.remedy


@pytest.mark.parametrize("signature", [None, "", "0" * 64])
def test_unsigned_file_is_untrusted(path: Path, signer: Signer, signature: str | None) -> None:
    data = write(path, signer)
    (length,) = struct.unpack("<Q", data[:8])
    container = json.loads(data[8 : 8 + length])
    manifest = json.loads(container["__metadata__"]["manifest"])
    del manifest["signer"]
    container["__metadata__"] = {"manifest": canonical_json(manifest)}
    if signature is not None:
        container["__metadata__"]["signature"] = signature
    header = json.dumps(container).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])
    assert fault_of(path, signer) is Fault.UNTRUSTED
    with pytest.raises(GraphFileError, match="is not signed"):
        read_graph(path, signer)


def test_signature_of_another_purpose_does_not_pass(path: Path, signer: Signer) -> None:
    data = write(path, signer)
    (length,) = struct.unpack("<Q", data[:8])
    container = json.loads(data[8 : 8 + length])
    metadata = container["__metadata__"]
    metadata["signature"] = signer.sign(metadata["manifest"])
    header = json.dumps(container).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])
    assert fault_of(path, signer) is Fault.DAMAGED


def test_signed_file_under_another_name_is_refused(path: Path, signer: Signer) -> None:
    data = write(path, signer)
    for name in (
        file_name(sha256_hex("another")),
        f"..{KEY}.safetensors",
        f"{KEY}.safetensors.bak",
    ):
        other = path.with_name(name)
        other.write_bytes(data)
        assert fault_of(other, signer) is Fault.MISNAMED


def test_hidden_name_is_the_same_name(path: Path, signer: Signer) -> None:
    data = write(path, signer)
    hidden = path.with_name(file_name(KEY, hidden=True))
    hidden.write_bytes(data)
    assert read_graph(hidden, signer).payload == RAW


@pytest.mark.parametrize("version", [0, 2, "1", None, True, 1.0])
def test_other_format_version_is_refused_in_words(
    path: Path, signer: Signer, version: object
) -> None:
    data = write(path, signer)
    path.write_bytes(resigned(data, signer, lambda manifest: manifest.update(format=version)))
    assert fault_of(path, signer) is Fault.FORMAT
    with pytest.raises(GraphFileError, match=f"has format {version!r}, this version reads 1"):
        read_graph(path, signer)


@pytest.mark.parametrize(
    "payload",
    [
        None,
        {},
        {"raw_bytes": -1},
        {"raw_bytes": len(RAW) - 1},
        {"raw_bytes": len(RAW) + 1},
        {"raw_bytes": 10**40},
        {"raw_bytes": "5"},
        {"bytes": 3},
        {"sha256": "0" * 64},
        {"compression": "pickle"},
    ],
)
def test_signed_manifest_that_misdescribes_its_payload_is_refused(
    path: Path, signer: Signer, payload: dict[str, Any] | None
) -> None:
    def change(manifest: dict[str, Any]) -> None:
        manifest["payload"] = {**manifest["payload"], **payload} if payload else payload

    path.write_bytes(resigned(write(path, signer), signer, change))
    assert fault_of(path, signer) is Fault.DAMAGED


def test_payload_never_unpacks_to_more_than_it_says(path: Path, signer: Signer) -> None:
    bomb = zlib.compress(bytes(64 << 20), 9)
    payload = CompressedPayload(bomb, sha256_hex(bomb), 1000)
    path.write_bytes(encode(MANIFEST, payload, signer))
    tracemalloc.start()
    try:
        assert fault_of(path, signer) is Fault.DAMAGED
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.skipif(sys.platform == "win32", reason="a file with holes is large there")
def test_a_file_that_claims_gigabytes_is_refused_before_they_are_read(
    path: Path, signer: Signer
) -> None:
    container, manifest, _ = saved.opened(write(path, signer))
    size = 3 << 30
    container["payload"] = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    for stated in (size, MAX_PAYLOAD_BYTES):
        manifest["payload"]["bytes"] = stated
        container["__metadata__"]["manifest"] = canonical_json(manifest)
        header = saved.closed(container, b"")
        with open(path, "wb") as file:
            file.write(header)
            file.truncate(len(header) + size)
        tracemalloc.start()
        try:
            for read in (lambda: read_header(path), lambda: read_for_trust(path)):
                with pytest.raises(RefusedFileError, match="cannot be 3221225472 bytes long"):
                    read()
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("claimed", [MAX_PAYLOAD_BYTES + 1, 1 << 40, -1, True, 1.0])
def test_a_payload_of_impossible_size_is_never_unpacked(
    path: Path, signer: Signer, claimed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write(path, signer)
    path.write_bytes(resigned(data, signer, lambda m: m["payload"].update(raw_bytes=claimed)))
    monkeypatch.setattr(graph_file.zlib, "decompressobj", None)
    with pytest.raises(RefusedFileError, match=r"payload\.raw_bytes must be an integer"):
        read_graph(path, signer)


@pytest.mark.parametrize("text", ['{"key": "\ud800"}', "\ud800", '{"a": NaN}', "[" * 5000])
def test_a_manifest_that_is_no_json_text_is_refused_as_damage(
    path: Path, signer: Signer, text: str
) -> None:
    path.write_bytes(saved.with_text(write(path, signer), text, None))
    for read in (lambda: read_header(path), lambda: read_graph(path, signer)):
        with pytest.raises(RefusedFileError) as caught:
            read()
        assert caught.value.fault is Fault.DAMAGED


@pytest.mark.parametrize(
    "tensor",
    [{"shape": [True]}, {"data_offsets": [False, "size"]}, {"data_offsets": [0.0, "size"]}],
)
def test_numbers_of_the_container_are_integers(
    path: Path, signer: Signer, tensor: dict[str, list[Any]]
) -> None:
    container, _, payload = saved.opened(write(path, signer))
    (name, value), *_ = tensor.items()
    container["payload"][name] = [len(payload) if part == "size" else part for part in value]
    path.write_bytes(saved.closed(container, payload))
    assert fault_of(path, signer) is Fault.DAMAGED


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0",
        b"\0" * 8,
        b"\xff" * 64,
        struct.pack("<Q", 2) + b"{}",
        struct.pack("<Q", 4) + b"null",
        struct.pack("<Q", 20000) + b"[" * 20000,
        struct.pack("<Q", 1 << 62) + b"{}",
        b"PK\x03\x04 a zip file, not one of ours",
        b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00 a pickle",
    ],
)
def test_what_is_no_graph_file_is_refused_as_damage(
    path: Path, signer: Signer, data: bytes
) -> None:
    path.write_bytes(data)
    assert fault_of(path, signer) is Fault.DAMAGED


def test_container_with_more_than_a_graph_in_it_is_refused(path: Path, signer: Signer) -> None:
    data = write(path, signer)
    (length,) = struct.unpack("<Q", data[:8])
    container = json.loads(data[8 : 8 + length])
    tensor = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    metadata = container["__metadata__"]
    for changed in (
        {**container, "extra": tensor},
        {**container, "__metadata__": {**metadata, "extra": "x"}},
        {**container, "payload": {**container["payload"], "dtype": "I8"}},
    ):
        header = json.dumps(changed).encode()
        path.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])
        assert fault_of(path, signer) is Fault.DAMAGED


def test_missing_file_folder_and_pipe_are_refused_at_once(path: Path, signer: Signer) -> None:
    assert fault_of(path, signer) is Fault.UNREADABLE
    path.mkdir()
    assert fault_of(path, signer) is Fault.UNREADABLE
    if hasattr(os, "mkfifo"):
        path.rmdir()
        os.mkfifo(path)
        assert fault_of(path, signer) is Fault.UNREADABLE  # and does not wait for a writer


def test_unverified_payload_is_never_unpacked(
    path: Path, signer: Signer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write(path, Signer(tmp_path / "other machine"))

    def fail(*_: object) -> None:
        raise AssertionError("a payload was unpacked before its signature was verified")

    monkeypatch.setattr(graph_file.zlib, "decompressobj", fail)
    assert fault_of(path, signer) is Fault.UNTRUSTED
    path.write_bytes(resigned(data, signer, lambda manifest: manifest.update(key="0" * 64)))
    assert fault_of(path, signer) is Fault.MISNAMED
    flipped = bytearray(write(path, signer))
    flipped[-1] ^= 1
    path.write_bytes(flipped)
    assert fault_of(path, signer) is Fault.DAMAGED


def test_reading_for_trust_checks_all_but_the_signature(
    path: Path, signer: Signer, tmp_path: Path
) -> None:
    data = write(path, Signer(tmp_path / "other machine"))
    manifest, payload = read_for_trust(path)
    path.write_bytes(encode(manifest.data, payload, signer))
    assert read_graph(path, signer).payload == RAW
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(RefusedFileError, match="does not match its hash"):
        read_for_trust(path)
    other = path.with_name(file_name("0" * 64))
    other.write_bytes(data)
    with pytest.raises(RefusedFileError, match="not what its name says"):
        read_for_trust(other)


def test_header_alone_is_read_without_the_payload(path: Path, signer: Signer) -> None:
    data = bytearray(write(path, signer))
    data[-1] ^= 1
    path.write_bytes(data)
    header = read_header(path)
    assert header.is_signed(signer)
    assert header.read().kind == "ResBlock 320->640"


def test_payload_that_changed_on_its_way_is_not_signed(signer: Signer) -> None:
    payload = compress_payload(RAW)._replace(sha256="0" * 64)
    with pytest.raises(GraphFileError, match="damaged on its way"):
        encode(MANIFEST, payload, signer)


@pytest.mark.parametrize("key", ["", "../../x", "A" * 64, "0" * 63, "0" * 65, "0" * 64 + "\n"])
def test_only_a_key_becomes_a_file_name(signer: Signer, key: str) -> None:
    with pytest.raises(ValueError, match="64 lower-case hex digits"):
        file_name(key)
    with pytest.raises(ValueError, match="64 lower-case hex digits"):
        encode({**MANIFEST, "key": key}, compress_payload(b""), signer)
    assert key_of(Path(f"{key}.safetensors")) is None


def test_reading_a_megabyte_takes_a_few_milliseconds(path: Path, signer: Signer) -> None:
    raw = os.urandom(1 << 20) + bytes(3 << 20)
    write(path, signer, raw)
    seconds = []
    for _ in range(5):
        start = time.thread_time()
        read_graph(path, signer)
        seconds.append(time.thread_time() - start)
    assert min(seconds) < 0.2  # 5 ms on a quiet machine
