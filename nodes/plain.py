"""A prompt without our nodes, for a comparison: the images that ComfyUI alone makes, at the same
seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .reading import Origin, Prompt, as_link, class_of

#: Stay where they are, and compile nothing: their steps are timed.
_COMPILE = {"WarmgraphCompileModel", "WarmgraphCompileVAE", "WarmgraphCompileControlNet"}
#: Give on what this input takes; what is linked to them is linked to that.
_PASSED = {
    "WarmgraphLoadCompiledGraph": "model",
    "WarmgraphLoadCompiledGraphVAE": "vae",
    "WarmgraphDeepCache": "model",
    "WarmgraphStepCache": "model",
}
#: Write images into the output folder, by the input that has them: previewed instead.
_SAVE = {"SaveImage": "images", "SaveAnimatedWEBP": "images", "SaveAnimatedPNG": "images"}
_PREVIEW = "PreviewImage"


def plain_prompt(prompt: Prompt) -> tuple[Prompt, int]:
    """Return a prompt without our nodes' work that writes no images to the output folder, and how
    many of its nodes were changed or removed; the given prompt is not changed.

    What else a prompt saves (latents, videos) it saves as always.
    """
    plain: Prompt = {}
    changed = 0
    for node, entry in prompt.items():
        name = class_of(prompt, node)
        inputs = entry.get("inputs") if isinstance(entry, dict) else None
        if name is None or not isinstance(inputs, dict):
            plain[node] = entry
        elif name in _PASSED:
            changed += 1
        elif name in _COMPILE:
            changed += 1
            linked = dict(_relinked(prompt, inputs))
            plain[node] = {**entry, "inputs": {**linked, "backend": "eager"}}
        elif name in _SAVE:
            changed += 1
            linked = dict(_relinked(prompt, inputs))
            shown = {"images": linked[_SAVE[name]]} if _SAVE[name] in linked else {}
            plain[node] = {**entry, "class_type": _PREVIEW, "inputs": shown}
        else:
            plain[node] = {**entry, "inputs": dict(_relinked(prompt, inputs))}
    return plain, changed


def _relinked(prompt: Prompt, inputs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield inputs without the removed nodes; one that would be linked to nothing is left out, and
    the host reports it as missing.
    """
    for name, value in inputs.items():
        origin = as_link(value)
        if origin is None or class_of(prompt, origin[0]) not in _PASSED:
            yield name, value
        elif (above := _above(prompt, origin)) is not None:
            yield name, list(above)


def _above(prompt: Prompt, origin: Origin) -> Origin | None:
    """Return the output that leads to an output of a removed node, None if there is none."""
    seen = set()
    while (name := class_of(prompt, origin[0])) in _PASSED:
        if origin in seen:  # in a cycle, which the host refuses
            return None
        seen.add(origin)
        inputs = prompt[origin[0]].get("inputs")
        above = as_link(inputs.get(_PASSED[name])) if isinstance(inputs, dict) else None
        if above is None:
            return None
        origin = above
    return origin
