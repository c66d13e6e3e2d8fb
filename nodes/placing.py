"""Where Compile nodes belong in a prompt: before nodes that use a MODEL and return none, and before
those that decode and encode with a VAE. One rule for the page's command and the server's setting.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..backends.contract import WhenMissing
from ..backends.sessions.lines import Line, line
from .classes import Classes, may_be, types_in
from .reading import Origin, Prompt, class_of, linked, steps_of

_PREFIX = "Warmgraph"
#: Of nodes that one prompt's walks may pass, all together; more than any workflow has.
MAX_STEPS = 100_000

#: What a node works out from a MODEL without making an image with it: none of these alone makes it
#: worth compiling. What other packs call their own counts: pipes, guiders and settings of samplers.
_NO_IMAGE = {
    *("SIGMAS", "SAMPLER", "FLOAT", "INT", "STRING", "BOOLEAN", "COMBO"),  # schedules and figures
    *("LORA_MODEL", "LOSS_MAP", "CONTROL_NET", "CONDITIONING", "IC_LORA_PARAMETERS"),  # of weights
    *("MASK", "BOUNDING_BOX", "POSE_KEYPOINT", "SAM3_TRACK_DATA"),  # what is found in an image
}
#: Gives a latent, and only asks the model how noise is scaled.
_NO_SAMPLERS = {"AddNoise"}

#: Compile nodes of the host and other packs, and loaders of what was compiled elsewhere, by the
#: names of their classes. One rule for all, for a model that one of them took is left to it.
_OTHERS = re.compile(
    r"torch_?compile|compile_?(?:model|vae)|one_?diff|(?:model|vae|unet)_?speedup|tensor_?rt|"
    r"\btrt\b|stable_?fast",
    re.IGNORECASE,
)


#: The same of caches over steps, of which a model takes one.
_CACHES = re.compile(
    r"(?:easy|lazy|tea|mag|block|step|fb)_?cache|cache_?dit|wave_?speed", re.IGNORECASE
)


class Kind(NamedTuple):
    """What one of our nodes does to what is linked through it.

    Attributes:
        name: in answers and ids; of a Compile node's input, too.
        type: the host's.
        node: the node's class.
        title: that node's name for people.
        instead: the class of our node in whose place it would be.
        others: finds nodes of others that do the same.
        left_to: the line that says so.
        steps: of how many steps on a sampler gains by it.
    """

    name: str
    type: str
    node: str
    title: str
    instead: str = ""
    others: re.Pattern[str] = _OTHERS
    left_to: str = "left_alone_others"
    steps: int = 0


MODEL = Kind(
    "model", "MODEL", "WarmgraphCompileModel", "Compile Model", "WarmgraphLoadCompiledGraph"
)
VAE = Kind("vae", "VAE", "WarmgraphCompileVAE", "Compile VAE", "WarmgraphLoadCompiledGraphVAE")
CONTROL_NET = Kind("control_net", "CONTROL_NET", "WarmgraphCompileControlNet", "Compile ControlNet")
STEP_CACHE = Kind(
    "step_cache",
    "MODEL",
    "WarmgraphStepCache",
    "Step Cache",
    "WarmgraphDeepCache",
    others=_CACHES,
    left_to="left_alone_cache",
    steps=10,
)


#: By name.
KINDS = {kind.name: kind for kind in (MODEL, VAE, CONTROL_NET, STEP_CACHE)}


class Place(NamedTuple):
    """An input that wants a Compile node before it."""

    node: str
    class_type: str
    input: str
    kind: Kind
    origin: Origin

    def plain(self) -> dict[str, Any]:
        """Return it as JSON-plain data."""
        return {
            "node": self.node,
            "class": self.class_type,
            "input": self.input,
            "kind": self.kind.name,
            "origin": list(self.origin),
        }


class Left(NamedTuple):
    """A node that would need one, and why it gets none."""

    node: str
    class_type: str
    line: Line
    kind: Kind

    def plain(self) -> dict[str, Any]:
        """Return it as JSON-plain data."""
        told = {"node": self.node, "class": self.class_type, "line": self.line.to_plain()}
        return {**told, "kind": self.kind.name}


class Found(NamedTuple):
    """The places and left nodes of a prompt."""

    places: list[Place]
    left: list[Left]

    def plain(self) -> dict[str, Any]:
        """Return it as JSON-plain data."""
        return {
            "places": [place.plain() for place in self.places],
            "left": [left.plain() for left in self.left],
        }


#: Whether a bypassed Compile node lies on the way to a node's input: (node, input, kind).
IsBypassed = Callable[[str, str, Kind], bool]


def find_places(
    prompt: Mapping[str, Any],
    classes: Classes,
    kinds: Sequence[Kind],
    is_bypassed: IsBypassed = lambda _node, _input, _kind: False,
) -> Found:
    """Return where a prompt wants Compile nodes, in its order.

    Parts of the prompt with an unexpected shape are skipped: the host refuses them.
    """
    found = Found([], [])
    for kind in kinds:
        _Search(prompt, classes, kind, is_bypassed).run(found)
    return found


def find_consumers(prompt: Mapping[str, Any], classes: Classes, kind: Kind) -> list[Place]:
    """Return the inputs of a prompt through which a kind is used, whatever lies above them."""
    return list(_Search(prompt, classes, kind, lambda _node, _input, _kind: False).consumers())


def place_nodes(
    prompt: Prompt, places: Sequence[Place], **widgets: str
) -> tuple[Prompt, dict[str, list[str]]]:
    """Return a prompt with Compile nodes at these places, one for each compiled output, and what
    each of them stands before; the given prompt is not changed.

    The same prompt gets the same ids, so the host's cache recognises the nodes.

    Args:
        widgets: of the nodes, if not the default ones.
    """
    placed = dict(prompt)
    names: dict[tuple[Origin, Kind], str] = {}
    before: dict[str, list[str]] = {}
    for place in places:
        key = (place.origin, place.kind)
        if key not in names:
            names[key] = name = _free_name(placed, place)
            placed[name] = _entry(place, widgets)
            before[name] = []
        if place.node not in before[names[key]]:
            before[names[key]].append(place.node)
        node = placed[place.node]
        inputs = {**node["inputs"], place.input: [names[key], 0]}
        placed[place.node] = {**node, "inputs": inputs}
    return placed, before


class _Search:
    """One kind's consumers in a prompt, and what lies above each."""

    def __init__(
        self, prompt: Mapping[str, Any], classes: Classes, kind: Kind, is_bypassed: IsBypassed
    ) -> None:
        self._prompt = prompt
        self._classes = classes
        self._kind = kind
        self._is_bypassed = is_bypassed
        self._steps = MAX_STEPS
        #: By output: what the walk up from it met.
        self._met: dict[Origin, Line | str | None] = {}

    def run(self, found: Found) -> None:
        """Add what the prompt has of this kind."""
        consumers = list(self.consumers())
        self._takers = {place.node for place in consumers}
        for place in consumers:
            met = self._look_up(place.origin)
            if met is None and self._is_bypassed(place.node, place.input, self._kind):
                met = line("left_alone_bypassed")
            if met is None and steps_of(self._prompt, place.node) < self._kind.steps:
                met = line("left_alone_few_steps", steps=self._kind.steps)
            if met is None:
                found.places.append(place)
            elif isinstance(met, Line):
                found.left.append(Left(place.node, place.class_type, met, self._kind))

    def consumers(self) -> Iterator[Place]:
        """Yield the inputs through which it is used."""
        for node, entry in self._prompt.items():
            name = class_of(self._prompt, node)
            if name is None or not isinstance(node, str) or not self._uses(name):
                continue
            for input_name, origin in linked(entry.get("inputs")):
                if self._takes(name, input_name, origin):
                    yield Place(node, name, input_name, self._kind, origin)

    def _uses(self, name: str) -> bool:
        """Whether nodes of a class use their input, and do not only pass it on."""
        gives = self._classes.gives(name)
        if not gives or name.startswith(_PREFIX) or name in _NO_SAMPLERS:
            return False  # without outputs: it saves the model
        if self._kind is VAE and ("audio" in name.lower() or not _has_image(gives)):
            return False
        if self._kind is CONTROL_NET:
            return any("CONDITIONING" in types_in(given) for given in gives)
        if any(may_be(given, self._kind.type) for given in gives):
            return "sampler" in name.lower() and _has_image(gives)
        return not set().union(*map(types_in, gives)) <= _NO_IMAGE

    def _takes(self, name: str, input_name: str, origin: Origin) -> bool:
        """Whether an input of a class is linked to one of this kind."""
        given = self._given(origin)
        if given is None or not may_be(given, self._kind.type):
            return False
        if self._kind is VAE and "audio" in input_name.lower():
            return False
        taken = self._classes.takes(name, input_name)
        if taken is None:  # an input that the page or the node adds
            return self._kind.type in types_in(given)
        return self._kind.type in types_in(taken)

    def _given(self, origin: Origin) -> str | None:
        """The type of an output, None if the prompt or the class does not have it."""
        name = class_of(self._prompt, origin[0])
        gives = None if name is None else self._classes.gives(name)
        return gives[origin[1]] if gives is not None and origin[1] < len(gives) else None

    def _look_up(self, origin: Origin) -> Line | str | None:
        """Return why an output's model is left alone: a line, or the id of a node above that has a
        Compile node before it; None: it is not.
        """
        if origin not in self._met:
            self._met[origin] = self._walk(origin)
        return self._met[origin]

    def _walk(self, origin: Origin) -> Line | str | None:
        seen, waiting = {origin[0]}, deque([origin[0]])
        taker = None
        while waiting:
            self._steps -= 1
            if self._steps < 0:
                return line("left_alone_large")
            node = waiting.popleft()
            name = class_of(self._prompt, node) or ""
            if name in (self._kind.node, self._kind.instead or self._kind.node):
                return line("left_alone_ours", id=node)
            if self._kind.others.search(name) and self._gives_kind(name):
                return line(self._kind.left_to, node=name, id=node)
            if node in self._takers:
                taker = taker or node
            for above in self._followed(node, name):
                given = self._given(above)
                if above[0] not in seen and given is not None and may_carry(given, self._kind):
                    seen.add(above[0])
                    waiting.append(above[0])
        return taker

    def _followed(self, node: str, name: str) -> list[Origin]:
        """What a node's outputs may be made of, by its links: of a merge only its first model,
        because it passes on a clone of that one, and only the weights of the others.
        """
        found = dict(linked(self._prompt[node].get("inputs")))
        listed = {each: self._classes.takes(name, each) for each in found} if len(found) > 1 else {}
        merged = [each for each, type_ in listed.items() if type_ == self._kind.type]
        if len(merged) > 1 and self._gives_kind(name):
            first = min(merged, key=self._classes.inputs(name).index)
            return [origin for each, origin in found.items() if each == first or each not in merged]
        return list(found.values())

    def _gives_kind(self, name: str) -> bool:
        gives = self._classes.gives(name) or ()
        return any(self._kind.type in types_in(given) for given in gives)


#: Types of the host that hold no model: a walk up does not follow them. What other packs call their
#: own may be a pipe or a context.
_PLAIN = {
    *("MODEL", "VAE", "CLIP", "CONDITIONING", "LATENT", "IMAGE", "MASK", "AUDIO", "VIDEO", "NOISE"),
    *("SIGMAS", "SAMPLER", "GUIDER", "CONTROL_NET", "CLIP_VISION", "CLIP_VISION_OUTPUT"),
    *("STYLE_MODEL", "UPSCALE_MODEL", "FLOAT", "INT", "STRING", "BOOLEAN", "COMBO", "HOOKS"),
}


def may_carry(given: str, kind: Kind) -> bool:
    """Whether an output of this type may be, or hold, one of a kind."""
    return may_be(given, kind.type) or not types_in(given) <= _PLAIN


def _has_image(gives: Sequence[str]) -> bool:
    return any(types_in(given) & {"LATENT", "IMAGE"} for given in gives)


def _entry(place: Place, widgets: Mapping[str, str]) -> dict[str, Any]:
    inputs = {
        place.kind.name: list(place.origin),
        "when_missing": WhenMissing.BACKGROUND.value,
        **widgets,
    }
    return {
        "class_type": place.kind.node,
        "inputs": inputs,
        "_meta": {"title": place.kind.title},
    }


def _free_name(prompt: Mapping[str, Any], place: Place) -> str:
    """Return an id that the prompt has not: of the output, for it stays when others join; without
    ":", by which pages find nodes in subgraphs.
    """
    node = re.sub(r"[^0-9A-Za-z]+", "_", place.origin[0])
    name = f"warmgraph_{node}_{place.origin[1]}_{place.kind.name}"
    number = 1
    while name in prompt:
        number += 1
        name = f"warmgraph_{node}_{place.origin[1]}_{place.kind.name}_{number}"
    return name
