"""One compiled graph as one file: a safetensors container, its manifest signed, its payload packed.

Layout (https://github.com/huggingface/safetensors#format): the metadata holds `manifest` (canonical
JSON) and `signature` (HMAC over that text); one U8 tensor, `payload`, holds the packed graph. The
manifest names the graph's key and the payload's hash, so the signature covers all that counts.

Reading goes: header -> signature -> file name equals key -> format -> every field of the manifest
(`manifest`) -> payload hash -> unpack. Each step runs only after the one before has passed, and
nothing here unpickles or runs what it has read.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy
from safetensors.numpy import save

from ..errors import GraphFileError, ManifestError
from ..reasons import NOTHING, Reason, of
from .canonical_json import canonical_json, read_json, sha256_hex
from .files import open_regular
from .manifest import (
    COMPRESSION,
    FORMAT,
    MAX_PAYLOAD_BYTES,
    Manifest,
    PackedFacts,
    is_format,
    is_key,
    read_manifest,
)
from .signing import Signer

SUFFIX = ".safetensors"

_PURPOSE = "warmgraph graph file\n"  # so that no other signed text can pass for a manifest
_LEVEL = 6  # zlib: 9 takes three times as long for about 1 % less
_MAX_HEADER_BYTES = 8 << 20
_LENGTH_BYTES = 8
_STEP_BYTES = 1 << 16  # packed ones, unpacked at a time: at most a thousand times as many come out


class Fault(str, Enum):
    """Which check a file did not pass."""

    UNREADABLE = "unreadable"  # gone, no permission, not a regular file
    DAMAGED = "damaged"  # truncated, bits flipped, or no graph file at all
    UNTRUSTED = "untrusted"  # unsigned, or signed with another key
    FORGED = "forged"  # names a public key that is trusted, and that has not signed it
    MISNAMED = "misnamed"  # a signed file under another file's name
    FORMAT = "format"  # written by another version of Warmgraph


class RefusedFileError(GraphFileError):
    """A graph file did not pass a check; `fault` says which and `what` in words, `path` whose.

    `of_folder` is the reason without the file's own name: the same for all such files of a folder.
    """

    def __init__(self, path: Path, fault: Fault, what: Reason, *, remedy: Reason = NOTHING) -> None:
        super().__init__(of("file", path=path, what=what), remedy=remedy)
        self.path = path
        self.what = what
        self.fault = fault
        self.of_folder = of("file_of_folder", folder=path.parent, what=what)


def trust_remedy(path: Path, signer: Signer) -> Reason:
    """Say what to do about a file that this machine did not sign."""
    return of("do_trust", command=signer.trust_command(path.parent))


class CompressedPayload(NamedTuple):
    """A packed payload, its SHA-256 as packed, and its size when unpacked."""

    data: bytes
    sha256: str
    raw_bytes: int


class GraphFile(NamedTuple):
    """A graph file that passed every check: its manifest, its unpacked payload and its path."""

    manifest: Manifest
    payload: bytes
    path: Path


class Header(NamedTuple):
    """What a graph file says about itself; nothing in it is verified yet.

    `data` is the manifest of any version, its values of any type: take none out of it but by
    comparing it whole; `read` gives one whose fields were checked.
    """

    path: Path
    data: dict[str, Any]
    text: str
    signature: str
    payload_bytes: int

    def read(self) -> Manifest:
        """Return the manifest once its name, its format and every field are right.

        Raises:
            RefusedFileError: they are not.
        """
        _validate_name_and_format(self, self.path)
        try:
            return read_manifest(self.data)
        except ManifestError as error:
            raise _damaged(self.path, of("in_manifest", error=error.reason)) from error

    def is_signed(self, signer: Signer) -> bool:
        """Tell whether this machine's key has signed the manifest, or one that it trusts."""
        return signer.verify(_PURPOSE + self.text, self.signature)

    def claims(self, signer: Signer) -> bool:
        """Tell whether the manifest names this machine's own key, rightly or not.

        Anybody can write a public key's name, so a file that names one is never taken for a
        damaged file of this machine.
        """
        return signer.is_own(self.data.get("signer"))


def file_name(key: str, *, hidden: bool = False) -> str:
    """Return the file name of a graph: `KEY.safetensors`, with a dot in front below `workflows/`.

    Raises:
        ValueError: `key` is no key, so it must not become part of a path.
    """
    if not is_key(key):
        raise ValueError(f"key must be 64 lower-case hex digits, got {key!r}")
    return f"{'.' if hidden else ''}{key}{SUFFIX}"


def key_of(path: Path) -> str | None:
    """Return the key that a graph file's name stands for, None when it is no graph file's name."""
    name = path.name[1:] if path.name.startswith(".") else path.name
    key = name[: -len(SUFFIX)]
    return key if name.endswith(SUFFIX) and is_key(key) else None


def compress_payload(raw: bytes) -> CompressedPayload:
    """Pack a payload for `encode`; the slow half of writing, for the worker's process."""
    data = zlib.compress(raw, _LEVEL)
    return CompressedPayload(data, sha256_hex(data), len(raw))


def encode(manifest: Mapping[str, Any], payload: CompressedPayload, signer: Signer) -> bytes:
    """Return the bytes of a signed graph file.

    Args:
        manifest: Plain data as `manifest.read_manifest` takes it. `format`, `signer` and `payload`
            are this layer's own and are written anew.
        payload: From `compress_payload`; its hash is checked.
        signer: Signs the manifest.

    Raises:
        GraphFileError: the payload is not what its hash says, no reader would take the manifest, or
            the signing key cannot be used.
        ValueError: the manifest has no proper key.
    """
    key = manifest.get("key")
    if not is_key(key):
        raise ValueError(f"manifest key must be 64 lower-case hex digits, got {key!r}")
    if sha256_hex(payload.data) != payload.sha256:
        raise GraphFileError(of("payload_damaged", key=key))
    whole = {
        **manifest,
        "format": FORMAT,
        "signer": signer.fingerprint,
        "payload": {
            "sha256": payload.sha256,
            "bytes": len(payload.data),
            "raw_bytes": payload.raw_bytes,
            "compression": COMPRESSION,
        },
    }
    try:
        text = canonical_json(whole)
        read_manifest(read_json(text))
    except (TypeError, ValueError, RecursionError, ManifestError) as error:
        raise GraphFileError(of("file_unwritable", path=key, error=error)) from error
    return save(
        {"payload": numpy.frombuffer(payload.data, numpy.uint8)},
        {"manifest": text, "signature": signer.sign(_PURPOSE + text)},
    )


def read_header(path: Path) -> Header:
    """Read what a graph file says about itself, without verifying it and without its payload.

    Raises:
        RefusedFileError: it cannot be read or is not a whole graph file.
    """
    with _opened(path) as file:
        return _header(file, path)


def read_graph(path: Path, signer: Signer) -> GraphFile:
    """Read a graph file made on this machine.

    All checks are made on the very bytes that are returned: a file replaced meanwhile changes
    nothing.

    Raises:
        RefusedFileError: it did not pass a check; `fault` says which.
        GraphFileError: the signing key cannot be used.
    """
    with _opened(path) as file:
        header = _header(file, path)
        validate_signature(header, path, signer)
        manifest = header.read()
        _, raw = _payload(file, header, manifest.payload)
        return GraphFile(manifest, raw, path)


def read_for_trust(path: Path) -> tuple[Manifest, CompressedPayload]:
    """Read a graph file of any origin, checking all but its signature, to be signed anew.

    Raises:
        RefusedFileError: it is damaged, misnamed or of another format.
    """
    with _opened(path) as file:
        header = _header(file, path)
        manifest = header.read()
        data, raw = _payload(file, header, manifest.payload)
        return manifest, CompressedPayload(data, manifest.payload.sha256, len(raw))


def unpack_payload(payload: CompressedPayload) -> bytes:
    """Unpack a payload, never to more than it says, in steps that take little memory each.

    Raises:
        ValueError: it is not packed, or not what it says it is.
    """
    if not 0 <= payload.raw_bytes <= MAX_PAYLOAD_BYTES:
        raise ValueError(f"it says that it unpacks to {payload.raw_bytes} bytes")
    unpack, raw, packed = zlib.decompressobj(), bytearray(), memoryview(payload.data)
    try:
        for start in range(0, len(packed), _STEP_BYTES):
            room = payload.raw_bytes - len(raw) + 1
            raw += unpack.decompress(packed[start : start + _STEP_BYTES], room)
            if len(raw) > payload.raw_bytes or unpack.unused_data:
                break
    except zlib.error as error:
        raise ValueError("it cannot be unpacked") from error
    if len(raw) != payload.raw_bytes or not unpack.eof or unpack.unused_data:
        raise ValueError("it does not unpack to the size it says")
    return bytes(raw)


def validate_signature(header: Header, path: Path, signer: Signer) -> None:
    """Refuse a manifest that does not carry this machine's signature, saying why it might not.

    Raises:
        RefusedFileError: DAMAGED when it names this machine's own key, FORGED when a public one
            that is trusted, else UNTRUSTED.
    """
    if header.is_signed(signer):
        return
    if header.claims(signer):
        raise RefusedFileError(path, Fault.DAMAGED, of("tampered"), remedy=of("do_nothing_again"))
    other = header.data.get("signer")
    known = isinstance(other, str) and re.fullmatch(r"[0-9a-f]{8}", other) and header.signature
    if known and other in signer.keyring.keys:
        what = of("not_loaded", why=of("not_by_key", key=other))
        raise RefusedFileError(path, Fault.FORGED, what, remedy=of("do_nothing_anew"))
    origin = of("other_key", key=other) if known else of("unsigned")
    remedy = trust_remedy(path, signer)
    raise RefusedFileError(path, Fault.UNTRUSTED, of("not_loaded", why=origin), remedy=remedy)


def _opened(path: Path) -> BinaryIO:
    try:
        return open_regular(path)
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> RefusedFileError:
    return RefusedFileError(path, Fault.UNREADABLE, of("unreadable", error=error.strerror or error))


def _damaged(path: Path, what: Reason) -> RefusedFileError:
    return RefusedFileError(
        path, Fault.DAMAGED, of("damaged", what=what), remedy=of("do_nothing_damaged")
    )


def _header(file: BinaryIO, path: Path) -> Header:
    """Parse the container; it must have exactly the parts that `encode` writes and no byte more."""
    try:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if length > min(_MAX_HEADER_BYTES, size - _LENGTH_BYTES):
            raise _damaged(path, of("header_length", count=length))
        raw = file.read(length)
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        container = read_json(raw)
        metadata, payload_bytes = container["__metadata__"], container["payload"]["shape"][0]
        offsets = [0, payload_bytes]
        tensor = {"dtype": "U8", "shape": [payload_bytes], "data_offsets": offsets}
        text, signature = metadata["manifest"], metadata.get("signature", "")
        text.encode(), signature.encode()  # else there is nothing to verify
        manifest = read_json(text)
        exact = set(container) == {"__metadata__", "payload"} and (
            canonical_json(container["payload"]) == canonical_json(tensor)  # 1 is not True or 1.0
        )
    except (KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, of("bad_header")) from error
    except ValueError as error:
        raise _damaged(path, of("bad_header_for", error=error)) from error
    if not exact or not isinstance(manifest, dict):
        raise _damaged(path, of("bad_header"))
    if not set(metadata) <= {"manifest", "signature"}:
        raise _damaged(path, of("more_metadata"))
    if type(payload_bytes) is not int or _LENGTH_BYTES + length + payload_bytes != size:
        raise _damaged(path, of("wrong_length", count=size))
    if payload_bytes > MAX_PAYLOAD_BYTES:
        raise _damaged(path, of("payload_length", count=payload_bytes))
    return Header(path, manifest, text, signature, payload_bytes)


def _validate_name_and_format(header: Header, path: Path) -> None:
    key, version = header.data.get("key"), header.data.get("format")
    if key_of(path) is None or key != key_of(path):
        raise RefusedFileError(
            path,
            Fault.MISNAMED,
            of("misnamed", key=_shown(key)),
            remedy=of("do_rename"),
        )
    if not is_format(version):
        raise RefusedFileError(
            path,
            Fault.FORMAT,
            of("other_format", found=_shown(version), format=FORMAT),
            remedy=of("do_other_version"),
        )


def _shown(value: object) -> str:
    """A value that nobody has checked, in a few words."""
    known = value is None or isinstance(value, (bool, float, str))
    text = ascii(value) if known or type(value) is int else f"of type {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _payload(file: BinaryIO, header: Header, stated: PackedFacts) -> tuple[bytes, bytes]:
    """Read and check the payload that follows the header; return it packed and unpacked."""
    path = header.path
    if stated.packed_bytes != header.payload_bytes:
        raise _damaged(path, of("payload_short"))
    try:
        data = file.read(header.payload_bytes)
    except OSError as error:
        raise _unreadable(path, error) from error
    if len(data) != header.payload_bytes:
        raise _damaged(path, of("payload_short"))
    if sha256_hex(data) != stated.sha256:
        raise _damaged(path, of("payload_hash"))
    try:
        return data, unpack_payload(CompressedPayload(data, stated.sha256, stated.raw_bytes))
    except ValueError as error:
        raise _damaged(path, of("payload_wrong", error=error)) from error
