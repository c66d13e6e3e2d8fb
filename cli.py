"""The pack's commands at the server's own console: trust a folder of graphs, explain a graph.

    python cli.py trust FOLDER          check every graph file in FOLDER and sign it for here
    python cli.py explain FILE|FOLDER   say what is in graph files and whether they fit here

Neither imports PyTorch, which takes seconds: whether a graph fits is told from the versions of the
installed files and the GPU's driver. `explain --fit` asks PyTorch itself.

A graph file is code that this machine runs when it is loaded, so trust is given here and nowhere
else: not by a node, a setting, a workflow or HTTP.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from warmgraph_backends.storing.signing import Signer

PACK = Path(os.path.abspath(__file__)).parent
PRIVATE = "__warmgraph"


def main(arguments: list[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit status: 0 when all is well, 1 when a file was refused, 2 for a wrong call.
    """
    options = _parser().parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # consoles that cannot show every name
    try:
        user = _user_directory(options)
        _import_backends()
        from warmgraph_backends.errors import WarmgraphError
        from warmgraph_backends.storing.signing import Signer

        try:
            signer = Signer(user / PRIVATE)
            if options.command == "trust":
                return trust(options.folder, signer)
            return explain(options.path, signer, ask_torch=options.fit)
        except WarmgraphError as error:
            raise SystemExit(_stop(str(error))) from error
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `| head`
        sys.stderr.close()
        return 1


def trust(folder: Path, signer: Signer) -> int:
    """Check every graph file of a folder and sign each one that is intact with this machine's key.

    Files are rewritten in one step each; whatever is not a graph file is left alone and named.
    """
    from warmgraph_backends.errors import GraphFileError
    from warmgraph_backends.storing.files import write_whole
    from warmgraph_backends.storing.graph_file import encode, read_for_trust, read_header

    if not os.path.isdir(folder):
        return _stop(f"{folder} is not a folder")
    if not signer.path.exists():
        _say("making a new signing key: run this as the user who runs ComfyUI")
    _say(f"signing with key {signer.fingerprint} of {signer.path}")
    trusted = refused = 0
    for path, problem in _graph_files(folder):
        try:
            if problem:
                raise GraphFileError(problem)
            manifest, payload = read_for_trust(path)
            if read_header(path).is_signed(signer):
                _say(f"already trusted: {path.name} ({manifest.kind})")
            else:
                write_whole(path, encode(manifest.data, payload, signer))
                _say(f"trusted: {path.name} ({manifest.kind})")
            trusted += 1
        except (GraphFileError, OSError, ValueError, MemoryError) as error:
            _say(f"refused: {path.name}: {_words(error)}")
            refused += 1
    _say(f"{trusted} graphs trusted, {refused} files refused")
    if not trusted and not refused:
        return _stop(f"there is no graph file in {folder}; give the NAME.graphs folder itself")
    return 1 if refused else 0


def explain(path: Path, signer: Signer, *, ask_torch: bool = False) -> int:
    """Say what is in one graph file (with its manifest) or in each of a folder, and why it fits.

    Args:
        ask_torch: whether PyTorch is asked what it can do here, or only its files.
    """
    is_folder = os.path.isdir(path)
    if is_folder:
        files = list(_graph_files(path))
        if not files:
            return _stop(f"there is no graph file in {path}")
    elif os.path.lexists(path):
        files = [(path, "")]
    else:
        return _stop(f"{path} does not exist")
    fit = _fit_by_torch if ask_torch else _fit
    outcomes = [_explain_file(file, problem, signer, fit) for file, problem in files]
    if not is_folder and outcomes[0] is not None:
        for line in json.dumps(outcomes[0], indent=2, sort_keys=True).splitlines():
            _say(line)
    return 0 if all(outcome is not None for outcome in outcomes) else 1


def _explain_file(
    path: Path, problem: str, signer: Signer, fit: Callable[[dict[str, Any]], list[str]]
) -> dict[str, Any] | None:
    """Print a few lines about one file; return its manifest, None when the file is refused."""
    from warmgraph_backends.errors import GraphFileError
    from warmgraph_backends.storing.graph_file import read_for_trust, read_header

    _say(path.name)
    try:
        if problem:
            raise GraphFileError(problem)
        header = read_header(path)
        manifest = header.read()
        _say(f"  kind: {manifest.kind}")
        for name in ("built", "target"):
            facts = manifest.data[name]
            _say(f"  {name}: {', '.join(f'{k} {v}' for k, v in sorted(facts.items()))}")
        if signer.path.exists() and header.is_signed(signer):
            _say("  signed: by this machine")
        else:
            _say("  signed: not by this machine; `python cli.py trust FOLDER` trusts it")
        read_for_trust(path)
        _say(f"  intact: yes, {path.stat().st_size / 2**20:.2f} MiB")
    except (GraphFileError, OSError, ValueError, MemoryError) as error:
        _say(f"  refused: {_words(error)}")
        return None
    for line in fit(manifest.target):
        _say(f"  {line}")
    return manifest.data


def _fit(facts: dict[str, Any]) -> list[str]:
    """Say whether a graph was made for a machine like this, and if not, why, without PyTorch."""
    from warmgraph_backends.kinds.target import explain_target, installed_target

    here = installed_target(str(facts.get("device")), str(facts.get("backend")))
    if here is None and importlib.util.find_spec("torch") is None:
        return ["fits: not known, this Python has no PyTorch; use the one that runs ComfyUI"]
    if here is None or facts.get("device") not in ("cuda", "cpu"):
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
        from warmgraph_backends.compilers.registry import BACKENDS
        from warmgraph_backends.kinds.keys import target
        from warmgraph_backends.kinds.target import explain_target
    except ImportError as error:
        return [f"fits: not known, this Python cannot import PyTorch ({error})"]
    device, name = facts.get("device"), facts.get("backend")
    backend = next((backend for backend in BACKENDS if backend.name == name), None)
    if backend is None or device not in ("cuda", "cpu"):
        return [_unknown(facts)]
    unmet = [item.reason for item in backend.requirements(device) if not item.met]
    if reasons := unmet or explain_target(facts, target(device, backend)):
        return [f"does not fit: {reason}" for reason in reasons]
    return ["fits this machine; ComfyUI's own code is compared when a model is loaded"]


def _unknown(facts: dict[str, Any]) -> str:
    made_by, device = facts.get("backend"), facts.get("device")
    return f"does not fit: made by backend {made_by} for {device}, which is not known here"


def _graph_files(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the files of a folder that are or pretend to be graphs, each with why it is refused."""
    from warmgraph_backends.errors import GraphFileError
    from warmgraph_backends.storing.graph_file import SUFFIX, key_of

    inside = Path(os.path.realpath(folder))
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise GraphFileError(f"{folder} cannot be read: {error.strerror or error}") from error
    for path in paths:
        if path.suffix != SUFFIX:
            continue
        if key_of(path) is None:
            yield path, "its name is not a graph file's"
        elif path.is_symlink() and inside not in Path(os.path.realpath(path)).parents:
            yield path, f"it is a link that leads out of {folder}"
        else:
            yield path, ""


def _words(error: BaseException) -> str:
    return str(error) or "there is not enough memory to read it"


def _say(text: str, file: TextIO | None = None) -> None:
    """Print one line that cannot play tricks on a console, whoever wrote what is in it."""
    print("".join(c if c.isprintable() else ascii(c)[1:-1] for c in text), file=file)


def _user_directory(options: argparse.Namespace) -> Path:
    base = options.base_directory or PACK.parents[1]
    user: Path = options.user_directory or base / "user"
    if not os.path.isdir(user):
        message = f"there is no ComfyUI user folder {user}; name it with --user-directory"
        raise SystemExit(_stop(message))
    return user


def _stop(message: str) -> int:
    _say(message, sys.stderr)
    return 2


def _import_backends() -> None:
    """Make `backends/` importable as `warmgraph_backends`, and nothing else of the pack.

    The pack's folder must not stay on sys.path: its `nodes` would be taken for the host's.
    """
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != PACK.resolve()]
    if "warmgraph_backends" in sys.modules:
        return
    folder = PACK / "backends"
    spec = importlib.util.spec_from_file_location(
        "warmgraph_backends", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["warmgraph_backends"] = package
    spec.loader.exec_module(package)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cli.py", description="Trust and explain graph files of Warmgraph."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    trusting = commands.add_parser(
        "trust",
        help="check every graph file in FOLDER and sign it for this machine",
        description="Check every graph file in FOLDER and sign it for this machine. Graph files "
        "are code: trust only what you made, or got from someone whose programs you would run.",
    )
    trusting.add_argument("folder", metavar="FOLDER", type=Path)
    explaining = commands.add_parser(
        "explain", help="say what is in graph files and whether they fit this machine"
    )
    explaining.add_argument("path", metavar="FILE_OR_FOLDER", type=Path)
    explaining.add_argument(
        "--fit", action="store_true", help="import PyTorch and ask it whether they fit (slow)"
    )
    for command in (trusting, explaining):
        command.add_argument(
            "--user-directory", type=Path, help="ComfyUI's user folder (default: BASE/user)"
        )
        command.add_argument(
            "--base-directory",
            type=Path,
            help="ComfyUI's base folder (default: two folders above this pack)",
        )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
