"""A made-up compiler by the contract alone: it keeps an exported graph's own code, one operator
after the other. In a worker it is loaded from this file.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from warmgraph_backends.compilers import registry
from warmgraph_backends.contract import Compiled, KernelFacts, PayloadFacts, Requirement
from warmgraph_backends.reasons import Reason

#: In a worker's environment: what to say of a requirement that is not met there.
UNMET = "WARMGRAPH_TEST_UNMET"


class Traced:
    """Needs PyTorch alone."""

    name = "traced"

    def requirements(self, device: str) -> Sequence[Requirement]:
        import os

        why = os.environ.get(UNMET)
        reason, remedy = Reason.plain(why or ""), Reason.plain("install it")
        return [Requirement("itself", why is None, reason, remedy, is_final=True)]

    def needs_to_build(self, device: str) -> Sequence[Requirement]:
        return ()

    def fingerprint(self, device: str) -> dict[str, Any]:
        return {"traced": 1}

    def installed_fingerprint(self, device: str) -> dict[str, Any]:
        return {"traced": 1}

    def prepare_worker(self, folder: Path, *, suffix: str) -> None:
        pass

    def compile(self, program: Any, *, measure: Any) -> Compiled:
        code: str = program.graph_module.code
        return Compiled(code.encode(), {"binary_bytes": 0}, code)

    def explain_failure(self, device: str) -> None:
        return None

    def load(self, payload: bytes, card: int | None = None) -> Callable[[list[Any]], Any]:
        from torch import device, inf, nan

        names: dict[str, Any] = {
            **{"torch": torch, "operator": operator, "device": device, "inf": inf, "nan": nan}
        }
        exec(payload.decode(), names)  # noqa: S102 - what was verified

        def call(arguments: list[Any]) -> Any:
            given = tuple(arguments)
            arguments.clear()
            with torch.no_grad():
                return names["forward"](None, *given)

        return call

    def describe_payload(self, payload: bytes) -> PayloadFacts:
        return PayloadFacts(payload.decode(), [KernelFacts("forward", "Python", len(payload), {})])


def add() -> None:
    """Have the registry of this process know it, before eager."""
    registry.COMPILERS = (*registry.COMPILERS[:-1], Traced(), registry.COMPILERS[-1])
