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
from .compiler_options import INSTRUCTIONS, OURS
from .instructions import shortly

#: What people call facts whose names say less.
_WORDS = {
    "capability": of("gpu_capability"),
    "torch_source": of("torch_build"),
    INSTRUCTIONS: of("instructions"),
}


class TorchFacts(NamedTuple):
    """What of PyTorch and the GPU a target says; `capability` is None without a GPU."""

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
        "platform": f"{platform.system()}-{platform.machine()}",
        "deterministic": of_torch.deterministic,
        "backend": backend,
        **fingerprint,
    }
    if device in GPU_TYPES:
        facts["capability"] = of_torch.capability
        facts["cuda"] = of_torch.cuda
    return facts


def explain_target(made_for: Mapping[str, Any], target_facts: Mapping[str, Any]) -> list[Reason]:
    """Say in words how the target of a graph file differs from this machine's; empty: it fits."""
    differing = {n for n in {*made_for, *target_facts} if made_for.get(n) != target_facts.get(n)}
    ours = OURS if INSTRUCTIONS in made_for else OURS | {INSTRUCTIONS}
    lines = [of("other_version")] if differing & ours else []
    for name in sorted(differing - ours):
        there, here = made_for.get(name), target_facts.get(name)
        if name == INSTRUCTIONS:
            there, here = shortly(str(there), str(here)), shortly(str(here), str(there))
        fact = _WORDS.get(name, name)
        lines.append(of("made_for", fact=fact, there=there, here=here))
    return lines
