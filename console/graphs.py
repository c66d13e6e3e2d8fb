"""`trust` signs what is intact in a folder; `explain` says what is in compiled graphs."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from warmgraph_backends.compilers.installed import installed_target
from warmgraph_backends.compilers.registry import COMPILERS
from warmgraph_backends.device.kinds import CPU, GPU_TYPES
from warmgraph_backends.errors import GraphFileError
from warmgraph_backends.storing.files import write_whole
from warmgraph_backends.storing.graph_file import (
    SUFFIX,
    encode,
    key_of,
    read_for_trust,
    read_header,
)
from warmgraph_backends.storing.signing import Signer
from warmgraph_backends.target.target import explain_target

from .output import say, stop, words

_DEVICES = {CPU, *GPU_TYPES}


def trust(folder: Path, signer: Signer) -> int:
    """Check every graph file of a folder and sign each one that is intact with this machine's key.

    Files are rewritten in one step each; whatever is not a graph file is left alone and named.
    """
    if not os.path.isdir(folder):
        return stop(f"{folder} is not a folder")
    if signer.keyring.private is None and not signer.path.exists():
        say("making a new signing key: run this as the user who runs ComfyUI")
    private = signer.keyring.private
    whose = signer.path if private is None else private.public.name
    say(f"signing with key {signer.fingerprint} of {whose}")
    trusted = refused = 0
    for path, problem in graph_files(folder):
        try:
            if problem:
                raise GraphFileError(problem)
            manifest, payload = read_for_trust(path)
            header = read_header(path)
            outdated = private is not None and signer.is_own(header.data.get("signer"))
            if header.is_signed(signer) and not outdated:
                say(f"already trusted: {path.name} ({manifest.kind})")
            else:
                write_whole(path, encode(manifest.data, payload, signer))
                say(f"trusted: {path.name} ({manifest.kind})")
            trusted += 1
        except (GraphFileError, OSError, ValueError, MemoryError) as error:
            say(f"refused: {path.name}: {words(error)}")
            refused += 1
    say(f"{trusted} compiled graphs trusted, {refused} files refused")
    if not trusted and not refused:
        return stop(f"no compiled graph in {folder}; give the NAME.graphs folder itself")
    return 1 if refused else 0


def explain(path: Path, signer: Signer, *, ask_torch: bool = False) -> int:
    """Say what is in one graph file (with its manifest) or in each of a folder, and why it fits.

    Args:
        ask_torch: whether to ask PyTorch itself, or only its files.
    """
    is_folder = os.path.isdir(path)
    if is_folder:
        files = list(graph_files(path))
        if not files:
            return stop(f"no compiled graph in {path}")
    elif os.path.lexists(path):
        files = [(path, "")]
    else:
        return stop(f"{path} does not exist")
    fit = _fit_by_torch if ask_torch else _fit
    outcomes = [_explain_file(file, problem, signer, fit) for file, problem in files]
    if not is_folder and outcomes[0] is not None:
        for line in json.dumps(outcomes[0], indent=2, sort_keys=True).splitlines():
            say(line)
    return 0 if all(outcome is not None for outcome in outcomes) else 1


def _explain_file(
    path: Path, problem: str, signer: Signer, fit: Callable[[dict[str, Any]], list[str]]
) -> dict[str, Any] | None:
    """Print a few lines about one file; return its manifest, None when the file is refused."""
    say(path.name)
    try:
        if problem:
            raise GraphFileError(problem)
        header = read_header(path)
        manifest = header.read()
        say(f"  kind: {manifest.kind}")
        for name in ("built", "target"):
            facts = manifest.data[name]
            say(f"  {name}: {', '.join(f'{k} {v}' for k, v in sorted(facts.items()))}")
        if header.is_signed(signer):
            key = signer.keyring.keys.get(str(header.data.get("signer")))
            say(f"  signed: {'by this machine' if key is None else f'with the key {key.name}'}")
        else:
            say("  signed: not by this machine; `python cli.py trust FOLDER` trusts it")
        read_for_trust(path)
        say(f"  intact: yes, {path.stat().st_size / 2**20:.2f} MiB")
    except (GraphFileError, OSError, ValueError, MemoryError) as error:
        say(f"  refused: {words(error)}")
        return None
    for line in fit(manifest.target):
        say(f"  {line}")
    return manifest.data


def _fit(facts: dict[str, Any]) -> list[str]:
    """Say whether a graph was made for a machine like this, and if not, why, without PyTorch."""
    here = installed_target(str(facts.get("device")), str(facts.get("backend")))
    if here is None and importlib.util.find_spec("torch") is None:
        return ["fits: not known, this Python has no PyTorch; use the one that runs ComfyUI"]
    if here is None or facts.get("device") not in _DEVICES:
        return [_unknown(facts)]
    if reasons := explain_target(facts, here):
        return [f"does not fit: {reason}" for reason in reasons]
    return [
        "fits this machine, as its installed versions tell (`--fit` asks PyTorch itself); "
        "ComfyUI's own code is compared when a model is loaded"
    ]


def _fit_by_torch(facts: dict[str, Any]) -> list[str]:
    """Say whether a graph fits, and whether its backend can work here; imports PyTorch."""
    try:
        from warmgraph_backends.target.keys import target
    except ImportError as error:
        return [f"fits: not known, this Python cannot import PyTorch ({error})"]
    device, name = facts.get("device"), facts.get("backend")
    backend = next((backend for backend in COMPILERS if backend.name == name), None)
    if backend is None or device not in _DEVICES:
        return [_unknown(facts)]
    unmet = [item.reason for item in backend.requirements(device) if not item.met]
    if reasons := unmet or explain_target(facts, target(device, backend)):
        return [f"does not fit: {reason}" for reason in reasons]
    return ["fits this machine; ComfyUI's own code is compared when a model is loaded"]


def _unknown(facts: dict[str, Any]) -> str:
    made_by, device = facts.get("backend"), facts.get("device")
    return f"does not fit: made by backend {made_by} for {device}, which is not known here"


def graph_files(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the files of a folder that are or pretend to be graphs, each with why it is refused."""
    inside = Path(os.path.realpath(folder))
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise GraphFileError(f"{folder} cannot be read: {error.strerror or error}") from error
    for path in paths:
        if path.suffix != SUFFIX:
            continue
        if key_of(path) is None:
            yield path, "its name is not a compiled graph's"
        elif path.is_symlink() and inside not in Path(os.path.realpath(path)).parents:
            yield path, f"it is a link that leads out of {folder}"
        else:
            yield path, ""
