"""What a machine's owner says of its fleet: in a file of the private folder, or by environment.

    PRIVATE/fleet.json
        remote              URL of a store that machines share
        mode                "read", or "write" for reading and writing
        patience_s          seconds that anybody waits for it, at most
        options             what fsspec is told besides: an endpoint, credentials
        trusted_keys        public keys whose files are used, as `cli.py key list` prints them
        signing_key_file    a private key to sign with; "none": this machine signs nothing
    WARMGRAPH_REMOTE, WARMGRAPH_REMOTE_MODE, WARMGRAPH_TRUSTED_KEYS, WARMGRAPH_SIGNING_KEY_FILE

Nothing else can say any of it: no setting, node, workflow or route. What is wrong in the file is
told, and then none of the file counts.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import GraphFileError
from ..reasons import Reason, of
from ..storing.files import open_regular, write_whole
from ..storing.public_keys import PublicKey, parse_keys
from .schemes import why_not

FILE = "fleet.json"
READ, WRITE = "read", "write"
#: In the place of a file's name: there is to be none.
NONE = "none"
PATIENCE_S = 10.0
_MOST_BYTES = 1 << 16
_MOST_PATIENCE_S = 600.0
_REMOTE, _MODE = "WARMGRAPH_REMOTE", "WARMGRAPH_REMOTE_MODE"
TRUSTED, _SIGNING = "WARMGRAPH_TRUSTED_KEYS", "WARMGRAPH_SIGNING_KEY_FILE"
_FIELDS = ("remote", "mode", "patience_s", "options", "trusted_keys", "signing_key_file")


@dataclass(frozen=True)
class FleetSettings:
    """What was asked for. Its text holds neither URL nor options.

    Attributes:
        remote: the URL; empty without one.
        mode: "read" or "write".
        patience_s: seconds.
        options: of fsspec.
        trusted: public keys.
        signing_key_file: of a private key; None for the machine's own.
        signs: whether the machine has any key that signs.
        problems: what was asked for and does not count.
    """

    remote: str = field(default="", repr=False)
    mode: str = READ
    patience_s: float = PATIENCE_S
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    trusted: tuple[PublicKey, ...] = ()
    signing_key_file: Path | None = None
    signs: bool = True
    problems: tuple[Reason, ...] = ()


def read_settings(private: Path, environment: Mapping[str, str] = os.environ) -> FleetSettings:
    """Read the file, and then the environment, which counts more.

    Args:
        private: the pack's folder that no HTTP route reaches.
        environment: of the process.
    """
    found = FleetSettings()
    try:
        found = _of_file(read_file(private), private)
    except GraphFileError as error:
        found = replace(found, problems=(error.told,))
    for name, key in ((_REMOTE, "remote"), (_MODE, "mode"), (_SIGNING, "signing_key_file")):
        if text := environment.get(name, "").strip():
            found = _changed(found, name, {key: text}, private)
    if keys := environment.get(TRUSTED, "").replace(",", " ").split():
        found = _changed(found, TRUSTED, {"trusted_keys": keys}, private)
    return found


def read_file(private: Path) -> dict[str, Any]:
    """Return what the file holds; nothing where there is none.

    Raises:
        GraphFileError: it cannot be read, or is no JSON object.
    """
    path = private / FILE
    try:
        with open_regular(path) as file:
            text = file.read(_MOST_BYTES)
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError("it must be a table in braces")
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise _bad(path, error.strerror or "it cannot be read") from error
    except json.JSONDecodeError as error:
        raise _bad(path, f"it is no JSON: {error.msg} in line {error.lineno}") from None
    except (ValueError, RecursionError) as error:
        raise _bad(path, error if type(error) is ValueError else "it is no JSON") from None
    return content


def write_file(private: Path, changes: Mapping[str, Any]) -> Path:
    """Change some fields of the file, for the console; the others stay.

    Raises:
        GraphFileError: what is there cannot be read, or it cannot be written.
    """
    path = private / FILE
    content = {**read_file(private), **changes}
    _of_file(content, private)
    try:
        private.mkdir(parents=True, exist_ok=True, mode=0o700)
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
        write_whole(path, (json.dumps(content, indent=2) + "\n").encode())
        path.chmod(mode)
    except OSError as error:
        raise GraphFileError(of("unwritable", path=path, error=error.strerror or error)) from error
    return path


def _changed(
    before: FleetSettings, name: str, change: dict[str, Any], private: Path
) -> FleetSettings:
    """Settings with what a variable says; with a problem more where that is wrong."""
    try:
        return _with(before, change, private)
    except ValueError as error:
        problem = of("fleet_variable", name=name, error=error)
        return replace(before, problems=(*before.problems, problem))


def _of_file(content: Mapping[str, Any], private: Path) -> FleetSettings:
    try:
        return _with(FleetSettings(), content, private)
    except ValueError as error:
        raise _bad(private / FILE, error) from None


def _bad(path: Path, error: object) -> GraphFileError:
    return GraphFileError(of("fleet_file", path=path, error=error))


def _with(before: FleetSettings, content: Mapping[str, Any], private: Path) -> FleetSettings:
    """Settings with some fields changed.

    Raises:
        ValueError: one of them is wrong; the text names it and repeats no value of it.
    """
    if unknown := sorted(set(content) - set(_FIELDS)):
        raise ValueError(f"{unknown[0][:40]!a} is no field; there are {', '.join(_FIELDS)}")
    values: dict[str, Any] = {}
    for name in ("remote", "mode", "signing_key_file"):
        if name in content and not isinstance(content[name], str):
            raise ValueError(f"{name} must be text")
    if "remote" in content:
        url = content["remote"].strip()
        if url and (why := why_not(url)):
            raise ValueError(f"remote {why}")
        values["remote"] = url
    if (mode := content.get("mode", before.mode)) not in (READ, WRITE):
        raise ValueError(f"mode must be {READ} or {WRITE}")
    values["mode"] = mode
    if "patience_s" in content:
        values["patience_s"] = _seconds(content["patience_s"])
    if "options" in content:
        if not isinstance(content["options"], dict):
            raise ValueError("options must be a table in braces")
        values["options"] = content["options"]
    if "trusted_keys" in content:
        keys = content["trusted_keys"]
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            raise ValueError("trusted_keys must be a list of texts in quotes")
        try:
            values["trusted"] = parse_keys(keys)
        except GraphFileError as error:
            raise ValueError(f"trusted_keys: {error}") from None
    if name := content.get("signing_key_file", "").strip():
        values["signs"] = name != NONE
        values["signing_key_file"] = None if name == NONE else private / name
    return replace(before, **values)


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError("patience_s must be a number of seconds")
    if not 0 < value <= _MOST_PATIENCE_S:
        raise ValueError(f"patience_s must be more than 0 and at most {_MOST_PATIENCE_S:g}")
    return float(value)
