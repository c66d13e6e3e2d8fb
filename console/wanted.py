"""Turns saved workflows and checkpoints into `prebuild`'s prompts, which end where something is
compiled.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

from warmgraph_backends.contract import CallForm, WhenMissing

from .convert import sources_of, to_prompt
from .own_server import Prompt

#: By a node's class: the input that it compiles.
COMPILE = {
    "WarmgraphCompileModel": "model",
    "WarmgraphCompileVAE": "vae",
    "WarmgraphCompileControlNet": "control_net",
}
_LOADER, _NAME = "CheckpointLoaderSimple", "ckpt_name"
_LOAD = "WarmgraphLoadCompiledGraph"
_REPORT = "WarmgraphGraphReport"
#: So many bytes of a workflow are read; large ones have a few megabytes.
MAX_BYTES = 64 << 20
_NAMED = 5


class WantedError(Exception):
    """Nothing can be built for a workflow or checkpoint; the text says why and what to do."""


class Wanted(NamedTuple):
    """A workflow to build for.

    Attributes:
        name: as given at the console.
        content: a saved workflow, or a prompt in the API format.
    """

    name: str
    content: Mapping[str, Any]


class Part(NamedTuple):
    """A prompt that compiles and does nothing else.

    Attributes:
        prompt: the nodes that compile, all that they need, and a report of each.
        reports: the node of each report, by the report's id.
        idle: nodes that are set to compile nothing.
    """

    prompt: dict[str, dict[str, Any]]
    reports: dict[str, str]
    idle: list[str]


def read(path: Path) -> Wanted:
    """Read a workflow's file.

    Raises:
        WantedError: it cannot be read, or is not a workflow.
    """
    remedy = "save it with Workflow > Save, or with Workflow > Export (API)"
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ValueError(f"it is larger than {MAX_BYTES >> 20} MiB")
        content = json.loads(data)
    except OSError as error:
        raise WantedError(f"it cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise WantedError(f"it is no workflow ({error}); {remedy}") from error
    if isinstance(content, dict) and isinstance(content.get("prompt"), dict):
        content = content["prompt"]  # as it is posted
    if not isinstance(content, dict) or not (_is_saved(content) or _is_prompt(content)):
        raise WantedError(f"it is no workflow; {remedy}")
    return Wanted(str(path), content)


def checkpoint(name: str, *, vae: bool) -> Wanted:
    """Return the prompt that compiles a checkpoint's model, and its VAE if wanted."""
    nodes: dict[str, dict[str, Any]] = {
        "checkpoint": {"class_type": _LOADER, "inputs": {_NAME: name}},
        "model": {"class_type": "WarmgraphCompileModel", "inputs": {"model": ["checkpoint", 0]}},
    }
    if vae:
        inputs = {"vae": ["checkpoint", 2], "parts": "decoder and encoder"}
        nodes["vae"] = {"class_type": "WarmgraphCompileVAE", "inputs": inputs}
    return Wanted(name, nodes)


def part_of(wanted: Wanted, object_info: Mapping[str, Any]) -> Part:
    """Return the part of a workflow that must run to compile its models.

    Args:
        object_info: the server's answer to GET /object_info.

    Raises:
        WantedError: nothing is compiled in it, or the server does not know how.
    """
    content = wanted.content
    if _is_saved(content):
        content = _converted(content, object_info)
    ends = [node for node, entry in content.items() if entry["class_type"] in COMPILE]
    if not ends:
        raise WantedError(_nothing(loads=_LOAD in json.dumps(wanted.content)))
    prompt = _upwards(content, ends)
    unknown = sorted({e["class_type"] for e in prompt.values()} - set(object_info))
    if unknown:
        raise WantedError(_unknown(unknown))
    _check_choices(prompt, object_info)
    reports = {f"report {node}": node for node in ends}
    for report, node in reports.items():
        prompt[report] = {"class_type": _REPORT, "inputs": {"model": [node, 0]}}
    return Part(prompt, reports, [node for node in ends if _is_idle(prompt[node]["inputs"])])


def _is_saved(content: Mapping[str, Any]) -> bool:
    return isinstance(content.get("nodes"), list) and isinstance(content.get("links"), list)


def _is_prompt(content: Mapping[str, Any]) -> bool:
    return bool(content) and all(
        isinstance(entry, dict)
        and isinstance(entry.get("class_type"), str)
        and isinstance(entry.get("inputs"), dict)
        for entry in content.values()
    )


def _converted(workflow: Mapping[str, Any], object_info: Mapping[str, Any]) -> Prompt:
    """A saved workflow as a prompt, as far as it compiles anything."""
    try:
        found = to_prompt(workflow, object_info, ends=COMPILE)
    except ValueError as error:
        raise WantedError(
            f"{error}; install the pack that brings it, or save the workflow with "
            "Workflow > Export (API)"
        ) from error
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise WantedError(
            f"it is saved in a way that is not understood ({error!r}); save it with "
            "Workflow > Export (API)"
        ) from error
    return found


def _nothing(*, loads: bool) -> str:
    if loads:
        return "Load Compiled Graph compiles nothing; use Compile Model in its place, once"
    return (
        "no node in it compiles; put Compile Model before the sampler (Alt+W does), and see that "
        "it is neither bypassed nor muted"
    )


def _unknown(names: Iterable[str]) -> str:
    return f"ComfyUI knows no node class {', '.join(names)}; install the pack that brings it"


def _upwards(content: Prompt, ends: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Those nodes, set to wait, and all that they need."""
    kept: dict[str, dict[str, Any]] = {}
    queue = list(ends)
    for node in queue:  # it grows
        if node in kept or node not in content:
            continue
        kept[node] = entry = deepcopy(dict(content[node]))
        if entry["class_type"] in COMPILE:
            entry["inputs"]["when_missing"] = WhenMissing.WAIT.value
        queue += sources_of(entry)
    return kept


def _check_choices(prompt: Prompt, object_info: Mapping[str, Any]) -> None:
    """Name missing files; the host's message for that is a page long."""
    for node, entry in prompt.items():
        declared = object_info[entry["class_type"]]["input"]
        for group in ("required", "optional"):
            for name, described in declared.get(group, {}).items():
                choices = _choices(described)
                value = entry["inputs"].get(name)
                if choices is None or not isinstance(value, str) or value in choices:
                    continue
                if entry["class_type"] in COMPILE:  # older words are taken, too
                    continue
                there = ", ".join(map(str, choices[:_NAMED])) or "none"
                more = ", ..." if len(choices) > _NAMED else ""
                kind = entry["class_type"]
                raise WantedError(
                    f"there is no {name} {value!r} for node {node} ({kind}); there are: "
                    f"{there}{more}"
                )


def _choices(described: Any) -> list[Any] | None:
    """The choices of an input, None if they are not a list."""
    kind, *rest = described
    if isinstance(kind, list):
        return kind
    options = rest[0] if rest else {}
    if kind != "COMBO" or "remote" in options or not isinstance(options.get("options"), list):
        return None
    return list(options["options"])


def _is_idle(inputs: Mapping[str, Any]) -> bool:
    return inputs.get("form") == CallForm.EXACT.value or inputs.get("backend") == "eager"
