"""Finds the saved workflow of the running prompt.

The host never tells a node the workflow's file name, so our page script adds it to each prompt as
`workflow.extra.warmgraph`. When the prompt arrives that entry is moved out of the workflow into the
prompt's `extra_data`, so that no image made from it carries a path or a user.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import folder_paths
from comfy.cli_args import args
from server import PromptServer

from ..backends.engine import WorkflowRef
from ..backends.errors import MAX_TEXT
from ..backends.host_api.server import Ended, ended_prompts, known_users, running_prompt

ENTRY = "warmgraph"
#: In the entry of `extra_data`: a program's wish, and what the server put into the prompt.
PLAIN = "plain"
PLACED = "placed"
SINGLE_USER = "default"
#: Halves of a character, which JSON may name and no file system takes.
_SURROGATES = re.compile("[\ud800-\udfff]")


def take_workflow_entry(json_data: dict[str, Any]) -> dict[str, Any]:
    """Move our entry of a posted prompt from its workflow to its `extra_data` (a prompt handler).

    A program that posts prompts may put the entry into `extra_data` itself.
    """
    extra_data = json_data.get("extra_data")
    extra = posted_workflow(extra_data).get("extra")
    if isinstance(extra, dict) and ENTRY in extra:
        entry = extra.pop(ENTRY)
        if _is_entry(entry):
            named = {n: entry[n] for n in ("path", "user") if _is_text(entry.get(n))}
            extra_data[ENTRY] = {**_entry(extra_data), **named}  # type: ignore[index]
    _entry(extra_data).pop(PLACED, None)  # only the server may say that
    return json_data


def posted_workflow(extra_data: object) -> dict[str, Any]:
    """Return the workflow sent with a prompt, {} if none or not of the expected shape."""
    for name in ("extra_pnginfo", "workflow"):
        extra_data = extra_data.get(name) if isinstance(extra_data, dict) else None
    return extra_data if isinstance(extra_data, dict) else {}


def current_workflow() -> WorkflowRef | None:
    """Return the saved workflow of the prompt that runs now, as the page named it, unchecked.

    None when no prompt runs, the prompt has no saved workflow (API, unsaved tab), or its user is
    not known (multi-user mode without our page script).
    """
    return workflow_of(running()[1])


def running() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the running prompt and its `extra_data`, both {} while none runs."""
    instance = getattr(PromptServer, "instance", None)
    return ({}, {}) if instance is None else running_prompt(instance)


def ended(count: int) -> list[Ended]:
    """Return the last prompts, the newest first."""
    instance = getattr(PromptServer, "instance", None)
    return [] if instance is None else ended_prompts(instance, count)


def workflow_id(extra_data: object) -> str | None:
    """Return the id of a prompt's workflow, None if it has none."""
    identity = posted_workflow(extra_data).get("id")
    return identity if _is_text(identity) else None


def workflow_of(extra_data: Any) -> WorkflowRef | None:
    """Return the saved workflow that a prompt's `extra_data` names, unchecked, if any."""
    entry = extra_data.get(ENTRY) if isinstance(extra_data, dict) else None
    if not _is_entry(entry):
        return None
    user = entry.get("user") if args.multi_user else SINGLE_USER
    if not _is_text(user):
        return None
    return WorkflowRef(path=entry["path"], user=user, id=workflow_id(extra_data))


def note_placed(extra_data: dict[str, Any], placed: dict[str, list[str]]) -> dict[str, Any]:
    """Return a prompt's `extra_data` with a note of which of its nodes the server put there, and
    before which.
    """
    return {**extra_data, ENTRY: {**_entry(extra_data), PLACED: placed}} if placed else extra_data


def placed_before(extra_data: object, node: str) -> tuple[str, ...] | None:
    """Return the node before which the server put a node of a prompt, None for any other node."""
    placed = _entry(extra_data).get(PLACED)
    return tuple(placed[node]) if isinstance(placed, dict) and node in placed else None


def is_plain(extra_data: object) -> bool:
    """Whether a prompt is to run as it is, for a comparison."""
    return _entry(extra_data).get(PLAIN) is True


def workflows_root(user: str | None) -> Path | None:
    """Return the workflows folder of a user that the host knows, else None.

    Without a user it is the only one's, or None in multi-user mode.
    """
    if user is None and not args.multi_user:
        user = SINGLE_USER
    if user is None or user not in _known_users():
        return None
    directory = folder_paths.get_public_user_directory(user)
    return None if directory is None else Path(directory, "workflows")


def _entry(extra_data: object) -> dict[str, Any]:
    """Return our entry of a prompt's `extra_data`, {} if none or not of the expected shape."""
    entry = extra_data.get(ENTRY) if isinstance(extra_data, dict) else None
    return entry if isinstance(entry, dict) else {}


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and _is_text(entry.get("path"))


def _is_text(value: Any) -> bool:
    """Whether it is a text that may come from a file system."""
    return isinstance(value, str) and len(value) <= MAX_TEXT and not _SURROGATES.search(value)


def _known_users() -> set[str]:
    instance = getattr(PromptServer, "instance", None)
    if instance is None or not args.multi_user:
        return {SINGLE_USER}
    return known_users(instance)
