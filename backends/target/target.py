"""What generated code depends on besides the region: how facts make a target, and how two differ.

Importing this imports no PyTorch, which takes as long as starting a server.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..device.kinds import GPU_TYPES
from ..reasons import Reason, of
from ..storing.canonical_json import canonical_json, sha256_hex
from ..storing.manifest import Manifest
from .compiler_options import INSTRUCTIONS, OURS
from .instructions import shortly

_PLATFORM = "platform"
#: What people call facts whose names say less.
_WORDS = {
    "capability": of("gpu_capability"),
    "torch_source": of("torch_build"),
    INSTRUCTIONS: of("instructions"),
}


class TorchFacts(NamedTuple):
    """A target's facts of PyTorch and the GPU; `capability` is None without a GPU."""

    version: str
    git_version: str | None
    cuda: str | None
    deterministic: bool
    capability: str | None


def compose_target(
    device: str, backend: str, fingerprint: Mapping[str, Any], of_torch: TorchFacts
) -> dict[str, Any]:
    """Return a target as plain data.

    Args:
        device: its type, as PyTorch names it.
        backend: its name.
        fingerprint: what else its code depends on.
        of_torch: of this process, or of the installed files.
    """
    facts: dict[str, Any] = {
        "device": device,
        "torch": of_torch.version,
        "torch_source": of_torch.git_version,
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "deterministic": of_torch.deterministic,
        "backend": backend,
        **fingerprint,
    }
    if device in GPU_TYPES:
        # A GPU's code is the same on any system.
        facts["capability"] = of_torch.capability
        facts["cuda"] = of_torch.cuda
    else:
        facts[_PLATFORM] = f"{platform.system()}-{platform.machine()}"
    return facts


def target_name(facts: Mapping[str, Any]) -> str:
    """Return a name that equal targets have in common, in 16 hex digits."""
    return sha256_hex(canonical_json(facts).encode())[:16]


def explain_target(made_for: Mapping[str, Any], target_facts: Mapping[str, Any]) -> list[Reason]:
    """Say in words how the target of a graph file differs from this machine's; empty: it fits."""
    differing = {n for n in {*made_for, *target_facts} if made_for.get(n) != target_facts.get(n)}
    ours = OURS if INSTRUCTIONS in made_for else OURS | {INSTRUCTIONS}
    if _PLATFORM not in target_facts:  # it was a fact of GPUs', too
        ours |= {_PLATFORM}
    lines = [of("other_version")] if differing & ours else []
    for name in sorted(differing - ours):
        there, here = made_for.get(name), target_facts.get(name)
        if name == INSTRUCTIONS:
            there, here = shortly(str(there), str(here)), shortly(str(here), str(there))
        fact = _WORDS.get(name, name)
        lines.append(of("made_for", fact=fact, there=there, here=here))
    return lines


def explain_region(theirs: Manifest, ours: Manifest) -> list[Reason]:
    """Say in words how the regions of two graph files of a kind differ; empty: they do not."""
    return differing_regions(
        theirs.structure, ours.structure, recorded_inputs(theirs), recorded_inputs(ours)
    )


def recorded_inputs(manifest: Manifest) -> dict[str, Any]:
    """Return the part of a manifest that says what its graph takes."""
    return {"inputs": manifest.inputs, "symbols": manifest.symbols}


def differing_regions(
    their_structure: Mapping[str, Any],
    our_structure: Mapping[str, Any],
    their_inputs: Mapping[str, Any],
    our_inputs: Mapping[str, Any],
) -> list[Reason]:
    """Say in words how one region differs from another of its form; empty: it does not."""
    lines = []
    if their_structure["module"] != our_structure["module"]:
        lines.append(of("region_differs"))
    changed = _differing(their_structure["sources"], our_structure["sources"])
    if changed:
        lines.append(of("code_changed", names=", ".join(changed[:4])))
    if canonical_json(their_inputs) != canonical_json(our_inputs):
        lines.append(of("inputs_differ"))
    return lines


def _differing(a: Mapping[str, str], b: Mapping[str, str]) -> list[str]:
    return sorted(name for name in {*a, *b} if a.get(name) != b.get(name))
