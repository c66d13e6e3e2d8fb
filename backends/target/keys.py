"""Keys: what must be equal for a graph to be the right one, in canonical form.

A key is the sha256 of three parts as canonical JSON: the *structure* of the region (classes, plain
attributes, parameter meta, hashes of the functions it runs through), its *inputs* with their
symbols, and the *target* (device, versions, backend options). Weights, checkpoint names, prompts,
sizes of symbolic dims and object identities are in none of them.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from ..contract import Compiler, RegionSpec
from ..device import gpu
from ..reasons import Reason
from ..storing.canonical_json import canonical_json, sha256_hex
from ..storing.manifest import FORMAT, Manifest
from .target import TorchFacts, compose_target, differing_regions, recorded_inputs


def target(device: str, backend: Compiler, card: int | None = None) -> dict[str, Any]:
    """Return what generated code depends on besides the region, as plain data.

    Args:
        device: its type, as PyTorch names it.
        backend: adds its own name, version and options.
        card: the number of a GPU; None: the one that is in use.
    """
    facts = TorchFacts(
        version=str(torch.__version__),
        git_version=getattr(torch.version, "git_version", None),
        cuda=gpu.toolkit(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        capability=gpu.capability(card) if gpu.is_gpu(device) else None,
    )
    return compose_target(device, backend.name, backend.fingerprint(device), facts)


def structure(description: RegionSpec) -> dict[str, Any]:
    """Return the part of a description that says what is computed."""
    return {
        "family": description.family,
        "form": description.form,
        "module": description.module,
        "sources": description.sources,
        "layout": description.layout,
        "wide": description.wide,
    }


def inputs(description: RegionSpec) -> dict[str, Any]:
    """Return the part of a description that says what a graph takes."""
    return {
        "inputs": [asdict(each) for each in description.inputs],
        "symbols": [asdict(each) for each in description.symbols],
    }


def graph_key(description: RegionSpec, target_facts: dict[str, Any]) -> str:
    """Return the key of a kind on a target: 64 hex digits, the same in every process."""
    parts = {
        "format": FORMAT,
        "structure": structure(description),
        "inputs": inputs(description),
        "target": target_facts,
    }
    return sha256_hex(canonical_json(parts).encode())


def explain_structure(manifest: Manifest, description: RegionSpec) -> list[Reason]:
    """Say in words how a graph file's region differs from a kind of the same form; empty: it
    fits.
    """
    return differing_regions(
        manifest.structure, structure(description), recorded_inputs(manifest), inputs(description)
    )
