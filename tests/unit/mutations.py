"""Seeded damage of graph files, manifests and messages: what disks, editors and people leave."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from warmgraph_backends.storing.canonical_json import sha256_hex
from warmgraph_backends.storing.signing import Signer

from . import saved

#: What stands for a lone surrogate in JSON text, for numbers that JSON has no form for, and for
#: more nesting than Python can write.
_RAW = {
    "@surrogate@": '"\\ud800"',
    "@huge@": "9" * 5000,
    "@infinite@": "1e999",
    "@nan@": "NaN",
    "@deep@": "[" * 50_000 + "]" * 50_000,
}
_NAMES = ("", "key", "torch", "\ud800", "\x1b[2J", "n" * 3000, "__proto__", "1")


def deep(levels: int, *, tables: bool = False) -> Any:
    """Return lists or tables in one another."""
    value: Any = 1
    for _ in range(levels):
        value = {"a": value} if tables else [value]
    return value


def odd(rng: random.Random) -> Any:
    """Return a value of any kind, most of them wrong wherever they stand."""
    kinds: tuple[Callable[[], Any], ...] = (
        lambda: None,
        lambda: rng.random() < 0.5,
        lambda: rng.choice((0, 1, -1, 2**31, 2**63, -(2**70), 10**300)),
        lambda: rng.choice((0.0, 1.0, -0.5, 1e300, float("nan"), float("inf"), -float("inf"))),
        lambda: rng.choice(("", "x", "0" * 64, "cpu", "\ud800", "\x00", "\x1b[2J", "é" * 300)),
        lambda: "x" * rng.choice((257, 70_000)),
        lambda: rng.choice(tuple(_RAW)),
        list,
        dict,
        lambda: deep(rng.choice((5, 70, 200)), tables=rng.random() < 0.5),
        lambda: [odd(rng) for _ in range(rng.randrange(4))],
        lambda: {rng.choice(_NAMES): odd(rng) for _ in range(rng.randrange(3))},
        lambda: list(range(20_000)) if rng.random() < 0.02 else [1, "2", None],
    )
    return rng.choice(kinds)()


def mutate(data: Any, rng: random.Random) -> Any:
    """Return a copy of plain data with something wrong, as a rule, at some depth of it."""
    data = copy.deepcopy(data)
    if rng.random() < 0.03:
        return odd(rng)
    part = data
    while True:
        inner = [c for c in (part.values() if isinstance(part, dict) else part) if _is_open(c)]
        if not inner or rng.random() < 0.5:
            break
        part = rng.choice(inner)
    names: list[Any] = list(part) if isinstance(part, dict) else list(range(len(part)))
    name = rng.choice(names) if names else None
    what = rng.randrange(5)
    if isinstance(part, dict):
        if what == 0 and names:
            del part[name]
        elif what == 1:
            part[rng.choice(_NAMES)] = odd(rng)
        elif what == 2 and names:
            part[rng.choice(_NAMES)] = part.pop(name)
        else:
            part[name or "x"] = odd(rng)
    elif what == 0 and names:
        del part[name]
    elif what == 1 or not names:
        part.append(odd(rng))
    else:
        part[name] = odd(rng)
    return data


def _is_open(value: Any) -> bool:
    return isinstance(value, (dict, list)) and bool(value)


def text_of(data: Any, rng: random.Random) -> str:
    """Write data as text that may not be JSON."""
    text = json.dumps(data)
    for stand_in, raw in _RAW.items():
        text = text.replace(f'"{stand_in}"', raw)
    if rng.random() < 0.2:
        at = rng.randrange(len(text) + 1)
        snippets = ("\ud800", "{", "]", '"', ",", "\x00", "9" * 400, "NaN", " ", "\\", text[:40])
        text = text[:at] + rng.choice(snippets) + text[at + rng.randrange(3) :]
    return text


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Return bytes as a disk, a tool or a cut line may leave them."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 3, 20))):
        at = rng.randrange(len(out) + 1)
        length = rng.choice((1, 2, 8, 100))
        what = rng.randrange(6)
        if what == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif what == 1:
            del out[at:]
        elif what == 2:
            out[at:at] = rng.randbytes(length)
        elif what == 3:
            del out[at : at + length]
        elif what == 4:
            out[at : at + length] = rng.randbytes(length)
        else:
            out[:8] = rng.choice(
                (rng.randbytes(8), bytes(8), b"\xff" * 8, (20).to_bytes(8, "little"))
            )
    return bytes(out)


def mutate_container(data: bytes, rng: random.Random) -> bytes:
    """Change the safetensors container around an untouched manifest."""
    container, _, payload = saved.opened(data)
    what = rng.randrange(4)
    if what == 0:
        container = mutate(container, rng)
    elif what == 1:
        container["payload"] = mutate(container["payload"], rng)
    elif what == 2:
        container["__metadata__"]["signature"] = odd(rng)
    else:
        size = rng.choice((3 << 30, 2**63, 0, -1, len(payload) + 1))
        container["payload"] = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    header = text_of(container, rng).encode("utf-8", "surrogatepass")
    return len(header).to_bytes(8, "little") + header + payload


def mutate_manifest(data: bytes, rng: random.Random, signer: Signer | None) -> bytes:
    """Change what a file says, and sign that where a signer is given."""
    _, manifest, _ = saved.opened(data)
    for _ in range(rng.choice((1, 1, 2))):
        if isinstance(manifest, dict) and manifest:
            manifest = mutate(manifest, rng)
    text = text_of(manifest, rng)
    try:
        return saved.with_text(data, text, signer)
    except UnicodeEncodeError:  # nobody can sign that
        return saved.with_text(data, text, None)


def mutate_payload(data: bytes, rng: random.Random, signer: Signer | None) -> bytes:
    """Change what a file holds, with a manifest that says so."""
    container, manifest, payload = saved.opened(data)
    payload = mutate_bytes(payload, rng)
    manifest["payload"]["bytes"] = len(payload)
    manifest["payload"]["sha256"] = sha256_hex(payload)
    manifest["payload"]["raw_bytes"] = rng.choice(
        (manifest["payload"]["raw_bytes"], 0, 1 << 28, (1 << 28) + 1)
    )
    size = len(payload)
    container["payload"] = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    return saved.with_text(saved.closed(container, payload), json.dumps(manifest), signer)


def misname(path: Path, data: bytes, rng: random.Random) -> None:
    """Put something else than the right file under a name, or the right one under another."""
    what = rng.randrange(6)
    path.parent.mkdir(parents=True, exist_ok=True)
    if what == 0:
        path.mkdir()
    elif what == 1:
        path.symlink_to(path.name)  # a loop
    elif what == 2:
        path.symlink_to("nowhere")
    elif what == 3:
        saved.put_at(path.with_name("0" * 64 + ".safetensors"), data)
    elif what == 4:
        saved.put_at(path.with_name(path.name.upper()), data)
    else:
        saved.put_at(path, b"" if rng.random() < 0.5 else b"\x80\x04 a pickle")
