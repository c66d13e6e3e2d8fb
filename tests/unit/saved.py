"""Whole graph files for tests: a small region, what a worker says of it, a backend that counts."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from warmgraph_backends.contract import InputSpec, RegionSpec, Requirement, Symbol
from warmgraph_backends.storing import graph_file
from warmgraph_backends.storing.graph_file import CompressedPayload, compress_payload
from warmgraph_backends.storing.signing import Signer

LABEL = "ResBlock 320->640"
PAYLOAD = b"the graph itself " * 20


def description(label: str = LABEL, *, channels: int = 4) -> RegionSpec:
    """Return one kind as a session describes it; `channels` makes another kind of it."""
    leaf = {
        "class": "torch.nn:Linear",
        "attributes": {"in_features": channels, "out_features": 4},
        "parameters": {
            "weight": {"shape": [4, channels], "dtype": "float32"},
            "bias": {"shape": [4], "dtype": "float32"},
        },
        "modules": [],
    }
    module = {
        "class": "comfy.some:Block",
        "attributes": {"sizes": {"tuple": [1, 2]}, "scale": 0.5, "up": False, "skip": None},
        "parameters": {},
        "modules": [["proj", leaf]],
    }
    return RegionSpec(
        family="unet",
        form="residual",
        label=label,
        module=module,
        inputs=(InputSpec("x", "float32", ("batch", channels)),),
        symbols=(Symbol("batch", 1, 64, 2),),
        sources={"comfy.some:Block.forward": "00109e422115b77d"},
        device="cpu",
    )


def facts(channels: int = 4) -> dict[str, Any]:
    """Return what a worker says of the graph that it built."""
    return {
        "weights": [["proj.weight", [4, channels], "float32"], ["proj.bias", [4], "float32"]],
        "work": 3.5,
        "binary_bytes": 27856,
        "checks": [{"sizes": {"batch": 1}, "error": 0.0}, {"sizes": {"batch": 3}, "error": 2e-7}],
        "phases": {"capture": 0.147, "compile": 3.931, "check": 0.035},
    }


def manifest(key: str, **changes: Any) -> dict[str, Any]:
    """Return a whole manifest, as `Store.put` and `encode` take it."""
    kind = description()
    data = kind.to_dict()
    said = facts()
    phases = said.pop("phases")
    whole = {
        "key": key,
        "kind": LABEL,
        "structure": {
            name: data[name] for name in ("family", "form", "module", "sources", "layout", "wide")
        },
        "inputs": data["inputs"],
        "symbols": data["symbols"],
        "target": {"device": "cpu", "torch": "2.11.0", "backend": "eager", "options": {"a": True}},
        **said,
        "built": {"seconds": 4.114, "phases": phases, "date": "2026-08-24"},
    }
    return json.loads(json.dumps({**whole, **changes}))  # type: ignore[no-any-return]


def packed(raw: bytes = PAYLOAD) -> CompressedPayload:
    """Return a payload as workers send it."""
    return compress_payload(raw)


def opened(data: bytes) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """Return a file's container, its manifest and its payload."""
    (length,) = struct.unpack("<Q", data[:8])
    container = json.loads(data[8 : 8 + length])
    return container, json.loads(container["__metadata__"]["manifest"]), data[8 + length :]


def closed(container: dict[str, Any], payload: bytes) -> bytes:
    """Return the bytes of a container."""
    header = json.dumps(container).encode()
    return struct.pack("<Q", len(header)) + header + payload


def with_text(data: bytes, text: str, signer: Signer | None) -> bytes:
    """Give a file another manifest text, signed as only the owner of the key can, or not at all."""
    container, _, payload = opened(data)
    container["__metadata__"] = {"manifest": text}
    if signer is not None:
        signature = signer.sign(graph_file._PURPOSE + text)
        container["__metadata__"]["signature"] = signature
    return closed(container, payload)


def changed(data: bytes, change: Callable[[dict[str, Any]], Any], signer: Signer | None) -> bytes:
    """Change a file's manifest, in whatever way, and sign it properly (or not at all)."""
    found = copy.deepcopy(opened(data)[1])
    change(found)
    return with_text(data, json.dumps(found), signer)


def put_at(path: Path, data: bytes) -> Path:
    """Write a file of a test, with its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


class Counting:
    """A backend without a compiler: it counts what it is given to load."""

    name = "counting"

    def __init__(self) -> None:
        self.loaded: list[bytes] = []
        self.error: BaseException | None = None

    def requirements(self, device: str) -> Sequence[Requirement]:
        """Need nothing."""
        return ()

    def needs_to_build(self, device: str) -> Sequence[Requirement]:
        """Need nothing for builds either."""
        return ()

    def fingerprint(self, device: str) -> dict[str, Any]:
        """Say what code is made with."""
        return {"payload": 1, "options": {"a": True}}

    def compile(self, program: Any, *, measure: Any) -> Any:
        """Compile nothing."""
        raise NotImplementedError

    def load(self, payload: bytes, card: int | None = None) -> Callable[[list[Any]], Any]:
        """Count a payload."""
        if self.error is not None:
            raise self.error
        self.loaded.append(payload)
        return lambda arguments: payload
