"""The words that all parts share: what a region is, and what a backend must offer.

A *kind* is one region of a model, written down as plain data (`Description`): everything that
decides its graph and nothing else. A `Backend` turns a description's exported program into a
payload of bytes and such bytes back into a callable. Graphs are pure functions of (weights,
activations).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple, Protocol

from .errors import RequirementError

#: Names of backends; `AUTO` leaves the choice to what works here.
AUTO, INDUCTOR, EAGER = "auto", "inductor", "eager"

#: How the activations of a region lie in memory (`layout` lays them out).
CONTIGUOUS = "contiguous"
CHANNELS_LAST = "channels_last"

Measure = Callable[[], AbstractContextManager[None]]
"""Opens the gate around kernel measurements: a running prompt meets one of them at a time."""


class WhenMissing(str, Enum):
    """What Compile Model does about a graph that is not there yet."""

    BACKGROUND = "background"
    WAIT = "wait"
    NEVER = "never"


class CallForm(str, Enum):
    """How a hot call of a model may run: up to which form it climbs."""

    AUTO = "auto"
    EXACT = "exact"
    ANY_SHAPE = "any shape"
    SPECIALISED = "specialised"


@dataclass(frozen=True)
class InputSpec:
    """One activation of a region.

    `dims` holds fixed sizes as integers and symbolic ones as symbol names; the description's
    `layout` says how tensors lie in memory.
    `dtype` is a torch dtype's name, or "int" for a Python integer, whose single dim is its symbol.
    """

    name: str
    dtype: str
    dims: tuple[int | str, ...]


@dataclass(frozen=True)
class Symbol:
    """A size that may change from call to call, with its declared range and the size it is tuned
    for.
    """

    name: str
    minimum: int
    maximum: int
    example: int

    @property
    def is_fixed(self) -> bool:
        """Whether it has one value only."""
        return self.minimum == self.maximum


class PackFile(NamedTuple):
    """A file of another pack whose import replaces functions of the host that a region runs
    through.

    Attributes:
        pack: its name for people.
        replaces: what it replaces, for people, for example "BasicTransformerBlock.forward".
        module: the module's name in the server's process.
        path: of the file; workers run `text`, and show this.
        folder: the pack's own; "" where it is a single file.
        parents: (name, folder) of each package that the module lies in, outermost first.
        text: the source text.
        sha256: of the text.
    """

    pack: str
    replaces: str
    module: str
    path: str
    folder: str
    parents: tuple[tuple[str, str], ...]
    text: str
    sha256: str


@dataclass(frozen=True)
class Description:
    """One kind of region as plain data: all that a worker needs, and all that the key covers.

    Attributes:
        family: the set of forms that `form` is one of, for example "unet".
        form: the name of this sort of region, for example "residual".
        label: for people, for example "ResBlock 320->640"; not part of the key.
        module: the module tree (`describe.describe_module`): classes, plain attributes, parameter
            meta.
        inputs: the activations, in call order.
        symbols: every symbolic size that `inputs` names.
        sources: hashes of the functions that the region runs through (`sources.fingerprint`).
        device: "cuda" or "cpu".
        layout: how four-dimensional inputs and the output lie in memory (`layout`).
        wide: whether elements are counted with 64 bits, for calls of 2**31 of them and more.
        packs: files that a worker runs first, in this order; not part of the key, which `sources`
            ties to the functions that they put in place.
    """

    family: str
    form: str
    label: str
    module: dict[str, Any]
    inputs: tuple[InputSpec, ...]
    symbols: tuple[Symbol, ...]
    sources: dict[str, str] = field(default_factory=dict)
    device: str = "cuda"
    layout: str = CONTIGUOUS
    wide: bool = False
    packs: tuple[PackFile, ...] = field(default=(), compare=False)

    def at(self, sizes: Mapping[str, int]) -> Description:
        """Return the same kind for one value of each symbol."""
        symbols = tuple(
            replace(s, minimum=sizes[s.name], maximum=sizes[s.name], example=sizes[s.name])
            for s in self.symbols
        )
        return replace(self, symbols=symbols, label=f"{self.label} at {_words(sizes)}")

    @property
    def is_special(self) -> bool:
        """Whether it is for one value of each symbol."""
        return bool(self.symbols) and all(s.is_fixed for s in self.symbols)

    def to_dict(self) -> dict[str, Any]:
        """Return the description as JSON-plain data."""
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Description:
        """Rebuild a description from `to_dict` after a trip through JSON."""
        rest = {k: v for k, v in data.items() if k not in ("inputs", "symbols", "packs")}
        inputs = tuple(InputSpec(i["name"], i["dtype"], tuple(i["dims"])) for i in data["inputs"])
        return Description(
            inputs=inputs,
            symbols=tuple(Symbol(**s) for s in data["symbols"]),
            packs=tuple(PackFile(*p) for p in data["packs"]),
            **rest,
        )


def _words(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sorted(sizes.items()))


class WeightSpec(NamedTuple):
    """One weight that a graph takes, in call order: its name below the region's module, shape and
    dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


class Compiled(NamedTuple):
    """What a backend made of an exported program; `source` is for developers to read."""

    payload: bytes
    facts: dict[str, Any]
    source: str = ""


class Requirement(NamedTuple):
    """One thing a backend needs: whether it is there, and in words what is missing and what to
    do.
    """

    name: str
    met: bool
    reason: str = ""
    remedy: str = ""


class Backend(Protocol):
    """A way to turn a region into a graph. One module per backend; they never import one
    another.
    """

    name: str

    def requirements(self, device: str) -> Sequence[Requirement]:
        """Say what this backend needs on this machine for `device`; never raises."""

    def fingerprint(self, device: str) -> dict[str, Any]:
        """Return every fact that changes generated code, as plain data; part of each key."""

    def compile(self, program: Any, *, measure: Measure) -> Compiled:
        """Compile a `export.Program`; worker side only. Raises BuildError."""

    def explain_failure(self, device: str) -> RequirementError | None:
        """Say why a build failed if no other one can succeed here either; worker side only."""

    def load(self, payload: bytes) -> Callable[[list[Any]], Any]:
        """Rebuild the callable of a verified payload; it takes the list [*weights, *inputs] and
        empties it.
        """
