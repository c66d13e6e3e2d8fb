"""The nodes as saved workflows know them: ids, inputs in their order, choices and outputs.

`node_ids.json` is that list. A workflow that somebody saved names what is in it, so nothing may
leave it, move or become another type; what is added is appended there by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("node_ids.json")
NODES: dict[str, dict[str, Any]] = json.loads(FILE.read_text("utf-8"))


def published(schema: Any) -> dict[str, Any]:
    """Return what a saved workflow hangs on of a node's schema, in the list's form."""
    return {
        "inputs": [
            {
                "id": entry.id,
                "type": entry.get_io_type(),
                **({"widget": True} if _is_widget(entry) else {}),
                **({"optional": True} if entry.optional else {}),
                **({"options": choices} if (choices := _choices(entry)) else {}),
                **({"range": [entry.min, entry.max]} if hasattr(entry, "min") else {}),
            }
            for entry in schema.inputs
        ],
        "outputs": [entry.get_io_type() for entry in schema.outputs],
    }


def _is_widget(entry: Any) -> bool:
    from comfy_api.latest import io

    return isinstance(entry, io.WidgetInput)


def _choices(entry: Any) -> list[str]:
    """What a choice may be; folders of a machine are none of the node's."""
    return [] if entry.id == "folder" else list(getattr(entry, "options", None) or ())
