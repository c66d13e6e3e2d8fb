"""The pack's commands at the server's own console.

    python cli.py doctor                look at all that compiling needs, and say what to do
    python cli.py report                say what a running server has compiled, and what not and why
    python cli.py explain FILE|FOLDER   say what is in compiled graphs and whether they fit here
    python cli.py source FILE           print the code that was generated for a compiled graph
    python cli.py trust FOLDER          check every compiled graph in FOLDER and sign it for here
    python cli.py learn MODEL           say how a model calls its blocks, to write a family for it
    python cli.py push | pull [URL]     send compiled graphs to a shared store, or get them from it
    python cli.py check-remote [URL]    say whether that store is well and what of it fits here
    python cli.py key new|trust|revoke|list      keys of others, whose compiled graphs are loaded
    python cli.py prebuild WORKFLOW ... compile what workflows need, for an image or in CI
    python cli.py build-worker ADDRESS  build for others, as a worker of a build farm

All but `doctor` and `learn` do without PyTorch, which takes seconds to import. Whether a compiled
graph fits is read from the versions of the installed files and the GPU's driver; `explain --fit`
asks PyTorch.

A compiled graph is a program that this machine runs when it is loaded. So trust is given here and
nowhere else: not by a node, a setting, a workflow or HTTP.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

PACK = Path(os.path.abspath(__file__)).parent
PRIVATE = "__warmgraph"
URL = "http://127.0.0.1:8188"

Parser = TypeVar("Parser", bound=argparse.ArgumentParser)


def main(arguments: list[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit status: 0 when all is well, 1 when a file was refused or something is to be done,
        2 for a wrong call.
    """
    options = parsed(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # consoles that cannot show every name
    from warmgraph_backends.errors import WarmgraphError
    from warmgraph_console.output import stop

    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except WarmgraphError as error:
        return stop(str(error))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `| head`
        sys.stderr.close()
        return 1


def parsed(arguments: list[str]) -> argparse.Namespace:
    """Return the parsed arguments; those after `--` of `prebuild` are ComfyUI's, as `flags`."""
    _import_packages()
    flags: list[str] = []
    if arguments[:1] == ["prebuild"] and "--" in arguments:
        at = arguments.index("--")
        arguments, flags = arguments[:at], arguments[at + 1 :]
    options = _parser().parse_args(arguments)
    options.flags = flags
    return options


def _trust(options: argparse.Namespace) -> int:
    from warmgraph_backends.fleet.keys import signer_of
    from warmgraph_console.graphs import trust

    return trust(options.folder, signer_of(_user_directory(options) / PRIVATE))


def _explain(options: argparse.Namespace) -> int:
    from warmgraph_backends.fleet.keys import signer_of
    from warmgraph_console.graphs import explain

    signer = signer_of(_user_directory(options) / PRIVATE)
    return explain(options.path, signer, ask_torch=options.fit)


def _source(options: argparse.Namespace) -> int:
    from warmgraph_backends.fleet.keys import signer_of
    from warmgraph_console.source import source

    return source(options.file, signer_of(_user_directory(options) / PRIVATE))


def _remote(options: argparse.Namespace) -> int:
    from warmgraph_console import remote

    store = options.store or _base_directory(options) / "models" / "compiled_graphs"
    here = remote.machine(_user_directory(options) / PRIVATE, store, options.remote_url)
    if isinstance(here, int):
        return here
    commands = {"push": remote.push, "pull": remote.pull, "check-remote": remote.check_remote}
    return commands[options.command](here)


def _key(options: argparse.Namespace) -> int:
    from warmgraph_console import keys

    private = _user_directory(options) / PRIVATE
    if options.key_command == "list":
        return keys.list_keys(private)
    if options.key_command == "new":
        return keys.new_key(options.name, private)
    change = keys.trust_key if options.key_command == "trust" else keys.revoke_key
    return change(options.key, private)


def _report(options: argparse.Namespace) -> int:
    from warmgraph_console.report import report

    return report(options.url, as_json=options.json)


def _doctor(options: argparse.Namespace) -> int:
    from warmgraph_console.asked import answer
    from warmgraph_console.doctor import Places, doctor

    if options.ask:
        return answer(options.ask)
    base = _base_directory(options)
    user = options.user_directory or base / "user"
    store = options.store or base / "models" / "compiled_graphs"
    places = Places(base, user, store, options.comfyui or PACK.parents[1])
    return doctor(places, options.device, options.save)


def _prebuild(options: argparse.Namespace) -> int:
    from warmgraph_console.output import stop
    from warmgraph_console.prebuild import Places, Wish, prebuild

    if not options.workflows and not options.checkpoint:
        return stop("prebuild takes a WORKFLOW, or --checkpoint NAME")
    comfyui = options.comfyui or PACK.parents[1]
    if not os.path.isfile(comfyui / "main.py"):
        return stop(f"there is no ComfyUI in {comfyui}; name its folder with --comfyui")
    if options.target and "--cpu" in options.flags:
        return stop("--target is for a card, and --cpu for none; leave one of them out")
    wish = Wish(options.workflows, options.checkpoint, options.vaes, options.target)
    base, user = options.base_directory, options.user_directory
    places = Places(comfyui.resolve(), base, user, options.store, options.log)
    environment: dict[str, str] = {}
    if options.scheduler is not None:
        from warmgraph_console.farm import Certificates, look_at, scheduler_environment

        certificates = Certificates(options.tls_ca_file, options.tls_cert, options.tls_key)
        if (problem := look_at(options.scheduler, certificates)) is not None:
            return stop(problem)
        environment = scheduler_environment(options.scheduler, certificates)
    return prebuild(wish, places, options.flags, environment=environment, json_file=options.json)


def _learn(options: argparse.Namespace) -> int:
    from warmgraph_console.learn import Wish, learn_all, learn_one
    from warmgraph_console.output import stop

    comfyui = options.comfyui or PACK.parents[1]
    if options.all:
        return learn_all(comfyui, options.against, as_json=options.json)
    if options.model is None:
        return stop("learn takes a MODEL, or --all")
    return learn_one(options.model, comfyui, Wish(options.json, options.skeleton), options.text)


def _build_worker(options: argparse.Namespace) -> int:
    from warmgraph_console.farm import Certificates, build_worker
    from warmgraph_console.output import stop

    comfyui = options.comfyui or PACK.parents[1]
    if not os.path.isfile(comfyui / "main.py"):
        return stop(f"there is no ComfyUI in {comfyui}; name its folder with --comfyui")
    certificates = Certificates(options.tls_ca_file, options.tls_cert, options.tls_key)
    return build_worker(
        options.scheduler, comfyui.resolve(), certificates, name=options.name, port=options.port
    )


def _base_directory(options: argparse.Namespace) -> Path:
    return Path(options.base_directory or PACK.parents[1])


def _user_directory(options: argparse.Namespace) -> Path:
    from warmgraph_console.output import stop

    user: Path = options.user_directory or _base_directory(options) / "user"
    if not os.path.isdir(user):
        message = f"there is no ComfyUI user folder {user}; name it with --user-directory"
        raise SystemExit(stop(message))
    return user


def _import_packages() -> None:
    """Make `backends/` and `console/` importable, and nothing else of the pack.

    The pack's folder must not stay on sys.path: its `nodes` would be taken for the host's.
    """
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != PACK.resolve()]
    for folder in (PACK / "backends", PACK / "console"):
        name = f"warmgraph_{folder.name}"
        if name in sys.modules:
            continue
        spec = importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None and spec.loader is not None
        package = importlib.util.module_from_spec(spec)
        sys.modules[name] = package
        spec.loader.exec_module(package)


def _parser() -> argparse.ArgumentParser:
    from warmgraph_backends.device.cards import CARDS

    parser = argparse.ArgumentParser(
        prog="cli.py", description="Look into Warmgraph, and trust compiled graphs."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    command = commands.add_parser(
        "doctor",
        help="look at all that compiling needs, and say what to do",
        description="Look at compiler, PyTorch, Triton, GPU, ComfyUI, store, signing key and "
        "leftovers: a line each, `ok` or what to do. It takes up to a minute.",
    )
    command.add_argument(
        "--device",
        choices=("auto", "cuda", "cpu"),
        default="auto",
        help="what models are to be compiled for (default: what PyTorch has here)",
    )
    command.add_argument(
        "--comfyui",
        type=Path,
        metavar="FOLDER",
        help="the folder with ComfyUI's main.py (default: two folders above this pack)",
    )
    command.add_argument(
        "--store", type=Path, metavar="FOLDER", help="default: BASE/models/compiled_graphs"
    )
    command.add_argument(
        "--save",
        type=Path,
        metavar="FILE",
        help="write what is said of the machine to this file, without the names of people, "
        "computers and folders, to be sent with an issue",
    )
    command.add_argument("--ask", nargs="+", help=argparse.SUPPRESS)
    _add_folders(command).set_defaults(run=_doctor)

    command = commands.add_parser(
        "explain", help="say what is in compiled graphs and whether they fit this machine"
    )
    command.add_argument("path", metavar="FILE_OR_FOLDER", type=Path)
    command.add_argument(
        "--fit", action="store_true", help="import PyTorch and ask it whether they fit (slow)"
    )
    _add_folders(command).set_defaults(run=_explain)

    command = commands.add_parser(
        "learn",
        help="say how a model calls its blocks, to write a family for it",
        description="Learn how a model calls its blocks, on a processor and without its weights, "
        "and say it: what they take, give, write and read, which sizes vary, and which blocks "
        "cannot be learned and why.",
    )
    command.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="a checkpoint file, or the name of a small model of the folder tools/",
    )
    command.add_argument("--all", action="store_true", help="every small model of tools/")
    command.add_argument(
        "--against",
        type=Path,
        metavar="FILE",
        help="with --all: say what is learned otherwise than --all --json said in FILE",
    )
    command.add_argument("--json", action="store_true", help="the record itself, for machines")
    command.add_argument(
        "--skeleton", action="store_true", help="the beginnings of a family's module"
    )
    command.add_argument(
        "--text", type=int, metavar="WIDTH", help="of a text's tokens, where MODEL does not say"
    )
    command.add_argument(
        "--comfyui",
        type=Path,
        metavar="FOLDER",
        help="the folder with ComfyUI's main.py (default: two folders above this pack)",
    )
    command.set_defaults(run=_learn)

    command = commands.add_parser(
        "prebuild",
        help="compile what workflows need, for an image or in CI",
        usage="cli.py prebuild [options] WORKFLOW ... [-- FLAGS OF COMFYUI]",
        description="Compile what saved workflows and checkpoints need, before anybody is served. "
        "A ComfyUI server is started for that, and the part of each workflow is run that leads to "
        "nodes which compile: no text, no sampler, no image. The files of their models must be "
        "there. Ends with 0 only if every part that should be compiled is. What stands behind `--` "
        "is for ComfyUI: give it the flags that the server has that will serve.",
    )
    command.add_argument(
        "workflows",
        metavar="WORKFLOW",
        nargs="*",
        type=Path,
        help="a file, as saved by the page or exported for the API",
    )
    command.add_argument(
        "--checkpoint",
        metavar="NAME",
        action="append",
        default=[],
        help="the model of a checkpoint, as ComfyUI lists it; may be given several times",
    )
    command.add_argument("--vaes", action="store_true", help="the checkpoints' VAEs, too")
    command.add_argument(
        "--store",
        type=Path,
        metavar="FOLDER",
        help="where compiled graphs are read and kept (default: as ComfyUI has it)",
    )
    command.add_argument(
        "--target",
        choices=CARDS,
        metavar="sm_NN",
        help=f"for a card that need not be in this machine: {', '.join(CARDS)}",
    )
    command.add_argument(
        "--scheduler", metavar="ADDRESS", help="have a build farm build: tls://HOST:8786"
    )
    _add_certificates(command)
    command.add_argument("--json", type=Path, metavar="FILE", help="write all of it, for machines")
    command.add_argument("--log", type=Path, metavar="FILE", help="keep what ComfyUI says")
    command.add_argument(
        "--comfyui",
        type=Path,
        metavar="FOLDER",
        help="the folder with ComfyUI's main.py (default: two folders above this pack)",
    )
    _add_folders(command).set_defaults(run=_prebuild)

    command = commands.add_parser(
        "build-worker",
        help="build for others, as a worker of a build farm",
        description="Build what servers ask a dask scheduler for, until it is gone. Whoever "
        "reaches the scheduler runs programs on this machine: use a private network, and TLS.",
    )
    command.add_argument(
        "scheduler", metavar="SCHEDULER", help="its address: tls://HOST:8786, or tcp://HOST:8786"
    )
    _add_certificates(command)
    command.add_argument("--name", help="of this worker (default: its address)")
    command.add_argument("--port", type=int, default=0, help="to listen at (default: any)")
    command.add_argument(
        "--comfyui",
        type=Path,
        metavar="FOLDER",
        help="the folder with ComfyUI's main.py (default: two folders above this pack)",
    )
    command.set_defaults(run=_build_worker)

    command = commands.add_parser(
        "report", help="say what a running server has compiled, and what not and why"
    )
    command.add_argument("--url", default=URL, help=f"the server's address (default: {URL})")
    command.add_argument("--json", action="store_true", help="all of it, for machines")
    command.set_defaults(run=_report)

    command = commands.add_parser(
        "source",
        help="print the code that was generated for a compiled graph",
        description="Print the code that was generated for a compiled graph, after what the file "
        "says of itself and which kernels were chosen, as comments. Nothing of it is run.",
    )
    command.add_argument("file", metavar="FILE", type=Path)
    _add_folders(command).set_defaults(run=_source)

    command = commands.add_parser(
        "trust",
        help="check every compiled graph in FOLDER and sign it for this machine",
        description="Check every compiled graph in FOLDER and sign it for this machine. They are "
        "programs: trust only what you made, or got from someone whose programs you would run.",
    )
    command.add_argument("folder", metavar="FOLDER", type=Path)
    _add_folders(command).set_defaults(run=_trust)

    _add_remote(commands)
    return parser


def _add_remote(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The commands about stores that machines share, and about keys."""
    added = [
        commands.add_parser(
            "push", help="send this machine's compiled graphs to a store of several"
        ),
        commands.add_parser(
            "pull", help="get the compiled graphs of such a store that fit this machine"
        ),
        commands.add_parser(
            "check-remote", help="say whether such a store is well, what of it fits here, and why"
        ),
    ]
    for command in added:
        command.add_argument(
            "remote_url", metavar="URL", nargs="?", help="default: what fleet.json says"
        )
        command.add_argument(
            "--store", type=Path, metavar="FOLDER", help="default: BASE/models/compiled_graphs"
        )
        _add_folders(command).set_defaults(run=_remote)

    command = commands.add_parser(
        "key",
        help="make, trust, revoke and list keys of several machines",
        description="Keys whose public half only verifies. Whoever has the private half can make "
        "files that every machine runs that trusts it.",
    )
    actions = command.add_subparsers(dest="key_command", required=True)
    action = actions.add_parser("new", help="make one; prints its public half")
    action.add_argument("name", metavar="NAME")
    _add_folders(action)
    action = actions.add_parser("trust", help="use what this key's owner signs")
    action.add_argument("key", metavar="KEY")
    _add_folders(action)
    action = actions.add_parser("revoke", help="use that no longer")
    action.add_argument("key", metavar="NAME_OR_KEY")
    _add_folders(action)
    _add_folders(actions.add_parser("list", help="say which keys this machine has"))
    command.set_defaults(run=_key)


def _add_certificates(command: Parser) -> Parser:
    command.add_argument(
        "--tls-ca-file", type=Path, metavar="FILE", help="who signed the farm's certificates (PEM)"
    )
    command.add_argument(
        "--tls-cert", type=Path, metavar="FILE", help="this machine's certificate (PEM)"
    )
    command.add_argument("--tls-key", type=Path, metavar="FILE", help="its private key (PEM)")
    return command


def _add_folders(command: Parser) -> Parser:
    command.add_argument(
        "--user-directory", type=Path, help="ComfyUI's user folder (default: BASE/user)"
    )
    command.add_argument(
        "--base-directory",
        type=Path,
        help="ComfyUI's base folder (default: two folders above this pack)",
    )
    return command


if __name__ == "__main__":
    raise SystemExit(main())
