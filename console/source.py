"""`source` prints the code that was generated for a graph; nothing of the file is run."""

from __future__ import annotations

from pathlib import Path

from warmgraph_backends.compilers.registry import backend_named
from warmgraph_backends.errors import GraphFileError, RequirementError
from warmgraph_backends.storing.graph_file import (
    read_for_trust,
    read_header,
    trust_remedy,
    unpack_payload,
)
from warmgraph_backends.storing.signing import Signer

from .output import say, say_lines, stop, words


def source(path: Path, signer: Signer) -> int:
    """Print a graph's source, after a few lines of comment about its file and its kernels.

    Args:
        path: a graph file of any origin: it is checked and read, never loaded.
        signer: tells whether this machine signed it, without making a key.
    """
    if path.is_dir():
        return stop(f"{path} is a folder; name one compiled graph (`explain FOLDER` lists them)")
    try:
        header = read_header(path)
        manifest, payload = read_for_trust(path)
        signed = header.is_signed(signer)
        backend = backend_named(str(manifest.target.get("backend")))
        facts = backend.describe_payload(unpack_payload(payload))
    except (GraphFileError, RequirementError, OSError, ValueError, MemoryError) as error:
        say(f"refused: {path.name}: {words(error)}")
        return 1
    say(f"# {manifest.kind}")
    say(f"# graph {manifest.key}")
    say(f"# made for: {', '.join(f'{k} {v}' for k, v in sorted(manifest.target.items()))}")
    say("# intact: yes")
    by = "by this machine" if signed else f"not by this machine; {trust_remedy(path, signer)}"
    say(f"# signed: {by}")
    for kernel in facts.kernels:
        say(f"# kernel {kernel.words}")
    say("")
    say_lines(facts.source)
    return 0
