"""What a graph file says about itself, as one strict schema for all who write or read it.

A manifest may come from anywhere: a folder somebody copied, a store that another version shares, a
damaged disk. So nobody takes a value out of one before its type, range and length were checked
here, and whoever gets a `Manifest` may rely on every field. What a worker says of the graph that it
built passes the same checks (`read_facts`), so that nothing is written that would not be read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

from ..contract import WeightSpec
from ..errors import ManifestError

FORMAT = 1
COMPRESSION = "zlib"
#: Bytes of a payload, packed or not: a hundred times the largest graph that was ever built.
MAX_PAYLOAD_BYTES = 1 << 28

_MAX_INTEGER = 1 << 62
_MAX_SECONDS = 1e9
_MAX_TEXT = 256  # characters of what people read: names, versions
_MAX_PLAIN_TEXT = 1 << 16
_MAX_DEPTH = 64  # a block of three levels of modules takes 18
_MAX_VALUES = 200_000
_MAX_WEIGHTS = 1 << 14
_MAX_DIMS = 16
_MAX_ITEMS = 1024
_SHOWN = 60
_KEY = re.compile(r"[0-9a-f]{64}")
_SIGNER = re.compile(r"[0-9a-f]{8}")
_REQUIRED = frozenset(
    (
        "format",
        "key",
        "kind",
        "structure",
        "inputs",
        "symbols",
        "target",
        "weights",
        "work",
        "binary_bytes",
        "checks",
        "built",
        "payload",
    )
)


class PackedFacts(NamedTuple):
    """A payload's SHA-256 as packed, its bytes as packed, and its bytes when unpacked."""

    sha256: str
    packed_bytes: int
    raw_bytes: int


class Facts(NamedTuple):
    """What a build says about its graph.

    Attributes:
        weights: what the graph takes, in call order.
        work: elements of the largest tensor in the region, per element of its first input.
        binary_bytes: size of the kernels' binaries.
        checks: sizes and relative L2 errors of the comparisons with eager.
        phases: seconds of each part of the build.
    """

    weights: list[WeightSpec]
    work: float
    binary_bytes: int
    checks: list[dict[str, Any]]
    phases: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as plain data, as a worker sends and a manifest holds them."""
        return {
            **self._asdict(),
            "weights": [[w.name, list(w.shape), w.dtype] for w in self.weights],
        }


class Manifest(NamedTuple):
    """A manifest that passed every check; `data` is all of it as plain data, to write it again.

    `structure`, `inputs`, `symbols` and `target` are what the key was made of (`keys`); whatever
    lies deeper in them than `read_manifest` says is plain data of any shape.
    """

    data: dict[str, Any]
    key: str
    kind: str
    signer: str | None
    structure: dict[str, Any]
    inputs: list[dict[str, Any]]
    symbols: list[dict[str, Any]]
    target: dict[str, Any]
    facts: Facts
    build_seconds: float
    payload: PackedFacts


def is_key(text: object) -> bool:
    """Tell whether `text` is a graph's key: 64 lower-case hex digits, nothing else."""
    return isinstance(text, str) and _KEY.fullmatch(text) is not None


def is_format(version: object) -> bool:
    """Tell whether a manifest's format is the one that this version reads and writes."""
    return type(version) is int and version == FORMAT


def read_manifest(data: Mapping[str, Any]) -> Manifest:
    """Check a manifest from end to end.

    Args:
        data: what JSON text holds (`canonical_json.read_json`); without `signer` nobody
            signed it.

    Raises:
        ManifestError: it is not exactly what a manifest is; the text names the first wrong field.
    """
    names = set(data)
    if unknown := names - _REQUIRED - {"signer"}:
        _refuse(_shown(min(map(str, unknown))), "is no field of a manifest")
    if missing := _REQUIRED - names:
        _refuse(min(missing), "is missing")
    if not is_format(data["format"]):
        _refuse("format", f"must be {FORMAT}, got {_shown(data['format'])}")
    for name in sorted(names):
        check_plain(data[name], name)
    key = data["key"]
    if not is_key(key):
        _refuse("key", f"must be 64 lower-case hex digits, got {_shown(key)}")
    built = _table(data["built"], "built", ["seconds", "phases", "date"])
    _text(built["date"], "built.date")
    facts = {name: data[name] for name in ("weights", "work", "binary_bytes", "checks")}
    return Manifest(
        data=dict(data),
        key=key,
        kind=_text(data["kind"], "kind"),
        signer=_pattern(data["signer"], "signer", _SIGNER, 8) if "signer" in data else None,
        structure=_structure(data["structure"]),
        inputs=_inputs(data["inputs"]),
        symbols=_symbols(data["symbols"]),
        target=_target(data["target"]),
        facts=_facts({**facts, "phases": built["phases"]}),
        build_seconds=read_seconds(built["seconds"], "built.seconds"),
        payload=_payload(data["payload"]),
    )


def read_facts(data: object) -> Facts:
    """Check what a worker says about the graph that it built; what it says besides is left out.

    Raises:
        ManifestError: a field is missing or wrong; the text names it.
    """
    facts = _mapping(data, "facts")
    wanted = {name: facts[name] for name in Facts._fields if name in facts}
    for name, value in wanted.items():
        check_plain(value, name)
    return _facts(wanted)


def read_seconds(value: object, field: str = "seconds") -> float:
    """Check a duration in seconds.

    Raises:
        ManifestError: it is no finite number of at least 0.
    """
    return _number(value, field, _MAX_SECONDS)


def read_payload_bytes(value: object, field: str) -> int:
    """Check a size of a payload in bytes, packed or not.

    Raises:
        ManifestError: it is no integer of at least 0, or more than `MAX_PAYLOAD_BYTES`.
    """
    return _integer(value, field, 0, MAX_PAYLOAD_BYTES)


def check_plain(data: object, field: str) -> None:
    """Check that data is what JSON holds, all of it writable and none of it without bounds.

    Raises:
        ManifestError: it holds something else, text that is no Unicode, a number out of range, or
            it is too deep, too long or too large.
    """
    waiting = [(data, 0)]
    count = 0
    while waiting:
        value, depth = waiting.pop()
        count += 1
        if count > _MAX_VALUES:
            _refuse(field, f"must hold at most {_MAX_VALUES} values")
        kind = type(value)
        if kind is str:
            _check_unicode(value, field)  # type: ignore[arg-type]
        elif kind is float:
            if not math.isfinite(value):  # type: ignore[arg-type]
                _refuse(field, f"must hold finite numbers, got {value}")
        elif kind is int:
            if abs(value) > _MAX_INTEGER:  # type: ignore[arg-type]
                _refuse(field, "must hold integers of less than 63 bits")
        elif kind is dict:
            for name in value:  # type: ignore[attr-defined]
                if type(name) is not str:
                    _refuse(field, f"must have names that are text, got {_shown(name)}")
                _check_unicode(name, field)
            waiting += [(item, depth + 1) for item in value.values()]  # type: ignore[attr-defined]
        elif kind is list or kind is tuple:
            waiting += [(item, depth + 1) for item in value]  # type: ignore[attr-defined]
        elif value is not None and kind is not bool:
            _refuse(field, f"must be plain data, got {kind.__name__}")
        if depth > _MAX_DEPTH:
            _refuse(field, f"must be nested at most {_MAX_DEPTH} deep")


def _structure(value: object) -> dict[str, Any]:
    structure = _mapping(value, "structure")
    for name in ("family", "form", "layout"):
        _text(structure.get(name), f"structure.{name}")
    _mapping(structure.get("module"), "structure.module")
    for name, code in _mapping(structure.get("sources"), "structure.sources").items():
        _text(name, "structure.sources")
        _text(code, f"structure.sources[{name}]")
    if type(structure.get("wide")) is not bool:
        _refuse("structure.wide", f"must be true or false, got {_shown(structure.get('wide'))}")
    return structure


def _inputs(value: object) -> list[dict[str, Any]]:
    for at, item in enumerate(_list(value, "inputs", _MAX_ITEMS)):
        field = f"inputs[{at}]"
        spec = _table(item, field, ["name", "dtype", "dims"])
        _text(spec["name"], f"{field}.name")
        _text(spec["dtype"], f"{field}.dtype")
        for size in _list(spec["dims"], f"{field}.dims", _MAX_DIMS):
            if type(size) is not str:
                _integer(size, f"{field}.dims", 0, _MAX_INTEGER)
            else:
                _text(size, f"{field}.dims")
    return value  # type: ignore[return-value]


def _symbols(value: object) -> list[dict[str, Any]]:
    for at, item in enumerate(_list(value, "symbols", _MAX_ITEMS)):
        field = f"symbols[{at}]"
        symbol = _table(item, field, ["name", "minimum", "maximum", "example"])
        _text(symbol["name"], f"{field}.name")
        for name in ("minimum", "maximum", "example"):
            _integer(symbol[name], f"{field}.{name}", 0, _MAX_INTEGER)
    return value  # type: ignore[return-value]


def _target(value: object) -> dict[str, Any]:
    target = _mapping(value, "target")
    for name, fact in target.items():
        _text(name, "target")
        for part in (fact, *fact, *fact.values()) if isinstance(fact, dict) else (fact,):
            if isinstance(part, str):
                _text(part, f"target.{name}")
            elif isinstance(part, (list, tuple)) or (isinstance(part, dict) and part is not fact):
                _refuse(f"target.{name}", "must be one value, or a table of such")
    return target


def _facts(facts: Mapping[str, Any]) -> Facts:
    for name in Facts._fields:
        if name not in facts:
            _refuse(name, "is missing")
    phases = _mapping(facts["phases"], "phases")
    for name, seconds in phases.items():
        read_seconds(seconds, f"phases.{_text(name, 'phases')}")
    return Facts(
        weights=[
            _weight(item, f"weights[{at}]")
            for at, item in enumerate(_list(facts["weights"], "weights", _MAX_WEIGHTS))
        ],
        work=_number(facts["work"], "work", float(_MAX_INTEGER)),
        binary_bytes=_integer(facts["binary_bytes"], "binary_bytes", 0, _MAX_INTEGER),
        checks=[
            _check(item, f"checks[{at}]")
            for at, item in enumerate(_list(facts["checks"], "checks", _MAX_ITEMS))
        ],
        phases=phases,
    )


def _weight(value: object, field: str) -> WeightSpec:
    parts = _list(value, field, 3)
    if len(parts) != 3:
        _refuse(field, f"must be name, shape and dtype, got {len(parts)} parts")
    shape = tuple(
        _integer(size, f"{field}[1]", 0, _MAX_INTEGER)
        for size in _list(parts[1], f"{field}[1]", _MAX_DIMS)
    )
    return WeightSpec(_text(parts[0], f"{field}[0]"), shape, _text(parts[2], f"{field}[2]"))


def _check(value: object, field: str) -> dict[str, Any]:
    check = _table(value, field, ["sizes", "error"])
    for name, size in _mapping(check["sizes"], f"{field}.sizes").items():
        _integer(size, f"{field}.sizes.{_text(name, field)}", 0, _MAX_INTEGER)
    _number(check["error"], f"{field}.error", float(_MAX_INTEGER))
    return check


def _payload(value: object) -> PackedFacts:
    payload = _table(value, "payload", ["sha256", "bytes", "raw_bytes", "compression"])
    if payload["compression"] != COMPRESSION:
        shown = _shown(payload["compression"])
        _refuse("payload.compression", f"must be {COMPRESSION}, got {shown}")
    return PackedFacts(
        _pattern(payload["sha256"], "payload.sha256", _KEY, 64),
        read_payload_bytes(payload["bytes"], "payload.bytes"),
        read_payload_bytes(payload["raw_bytes"], "payload.raw_bytes"),
    )


def _table(value: object, field: str, names: list[str]) -> dict[str, Any]:
    table = _mapping(value, field)
    if set(table) != set(names):
        _refuse(field, f"must have {', '.join(names)}, got {_shown(sorted(table))}")
    return table


def _mapping(value: object, field: str) -> dict[str, Any]:
    if type(value) is not dict:
        _refuse(field, f"must be a table, got {_shown(value)}")
    return value  # type: ignore[no-any-return,unused-ignore]


def _list(value: object, field: str, limit: int) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        _refuse(field, f"must be a list, got {_shown(value)}")
    if len(value) > limit:
        _refuse(field, f"must have at most {limit} items, got {len(value)}")
    return value  # type: ignore[return-value]


def _integer(value: object, field: str, lowest: int, highest: int) -> int:
    if type(value) is not int or not lowest <= value <= highest:
        _refuse(field, f"must be an integer of {lowest} to {highest}, got {_shown(value)}")
    return value


def _number(value: object, field: str, highest: float) -> float:
    # Integers are compared before they are converted: one of a thousand digits is no float.
    if type(value) not in (int, float) or not 0 <= value <= highest:  # type: ignore[operator]
        _refuse(field, f"must be a number of 0 to {highest:g}, got {_shown(value)}")
    return float(value)  # type: ignore[arg-type]


def _text(value: object, field: str) -> str:
    if not isinstance(value, str) or len(value) > _MAX_TEXT or not value.isprintable():
        limit = f"printable text of at most {_MAX_TEXT} characters"
        _refuse(field, f"must be {limit}, got {_shown(value)}")
    return value


def _pattern(value: object, field: str, pattern: re.Pattern[str], length: int) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        _refuse(field, f"must be {length} lower-case hex digits, got {_shown(value)}")
    return value


def _check_unicode(text: str, field: str) -> None:
    if len(text) > _MAX_PLAIN_TEXT:
        _refuse(field, f"must hold text of at most {_MAX_PLAIN_TEXT} characters")
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            _refuse(field, f"must hold Unicode text, got {_shown(text)}")


def _shown(value: object) -> str:
    """Return a few characters of a value of any kind and size, in ASCII."""
    if isinstance(value, (dict, list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, int) and abs(value) > _MAX_INTEGER:
        return "an integer of more than 62 bits"
    text = ascii(value[: _SHOWN + 1] if isinstance(value, str) else value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _refuse(field: str, problem: str) -> NoReturn:
    raise ManifestError(field, problem)
