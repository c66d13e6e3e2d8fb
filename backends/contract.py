"""The terms that all parts share: what a region is, and what a compiler must offer.

A *kind* is one region of a model as plain data (`RegionSpec`): everything that decides its graph
and nothing else. A `Compiler` turns a description's exported `Program` into a payload of bytes and
such bytes back into a callable. Graphs are pure functions of (weights, activations). Importing this
imports no PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from .device.kinds import CUDA
from .errors import RequirementError
from .reasons import NOTHING, Reason

if TYPE_CHECKING:
    import torch

#: Names of backends; `AUTO` leaves the choice to what works here.
AUTO, INDUCTOR, EAGER = "auto", "inductor", "eager"

#: How the activations of a region lie in memory (`layout` lays them out).
CONTIGUOUS = "contiguous"
CHANNELS_LAST = "channels_last"

Measure = Callable[[], AbstractContextManager[None]]
"""Opens the gate around kernel measurements: a running prompt meets one of them at a time."""


class WhenMissing(str, Enum):
    """What Compile Model does about a missing graph."""

    BACKGROUND = "background"
    WAIT = "wait"
    NEVER = "never"


class CallForm(str, Enum):
    """How the calls of a model may run."""

    AUTO = "auto"
    EXACT = "exact"

    @classmethod
    def _missing_(cls, value: object) -> CallForm | None:
        """Values in older workflows that now mean `AUTO`."""
        return cls.AUTO if value in OLDER_FORMS else None


#: Forms of versions in which a size could have graphs of its own.
OLDER_FORMS = ("any shape", "specialised")


@dataclass(frozen=True)
class InputSpec:
    """One activation of a region.

    `dims` holds fixed sizes as integers and symbolic ones as symbol names; the description's
    `layout` is the tensors' memory layout. `dtype` is a torch dtype's name, or "int" for a Python
    integer, whose single dim is its symbol.
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


class PackFile(NamedTuple):
    """A file of another pack whose import replaces functions of the host that a region runs
    through.

    Attributes:
        pack: its name for people.
        replaces: what it replaces, for people, for example "BasicTransformerBlock.forward".
        module: the module's name in the server's process.
        path: of the file; workers run `text`, and show this.
        folder: the pack's own; "" for a single file.
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
class RegionSpec:
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
        device: its type, as PyTorch names it.
        layout: of four-dimensional inputs and the output (`layout`).
        wide: whether elements are counted with 64 bits, for calls of 2**31 of them and more.
        packs: files that a worker runs first, in this order; not part of the key, because `sources`
            covers the functions that they define.
        way: how the block is called, if that was learned (`learning.ways`); not part of the key,
            because `form` is its digest.
    """

    family: str
    form: str
    label: str
    module: dict[str, Any]
    inputs: tuple[InputSpec, ...]
    symbols: tuple[Symbol, ...]
    sources: dict[str, str] = field(default_factory=dict)
    device: str = CUDA
    layout: str = CONTIGUOUS
    wide: bool = False
    packs: tuple[PackFile, ...] = field(default=(), compare=False)
    way: dict[str, Any] = field(default_factory=dict, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the description as JSON-plain data."""
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> RegionSpec:
        """Rebuild a description from `to_dict` after a trip through JSON."""
        rest = {k: v for k, v in data.items() if k not in ("inputs", "symbols", "packs")}
        inputs = tuple(InputSpec(i["name"], i["dtype"], tuple(i["dims"])) for i in data["inputs"])
        return RegionSpec(
            inputs=inputs,
            symbols=tuple(Symbol(**s) for s in data["symbols"]),
            packs=tuple(PackFile(*p) for p in data["packs"]),
            **rest,
        )


class WeightSpec(NamedTuple):
    """One weight that a graph takes, in call order: its name below the region's module, shape and
    dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


#: `(weights, inputs) -> results`.
Eager = Callable[[list["torch.Tensor"], list[Any]], tuple["torch.Tensor", ...]]


class Example(Protocol):
    """Makes arguments of a program."""

    def __call__(
        self, sizes: Mapping[str, int] | None = None
    ) -> tuple[list[torch.Tensor], list[Any]]:
        """Return random weights and inputs on the run device.

        Args:
            sizes: by symbol; others have their example's.
        """


@dataclass(frozen=True)
class Program:
    """An exported region, ready for a compiler.

    Attributes:
        description: the kind it was made from.
        graph_module: `(*weights, *inputs) -> results`, a tuple, of PyTorch's operators and ours
            (`warmgraph::`), which call what is left to the host when a graph runs; placeholders
            carry fakes on the run device in `meta["val"]`, symbolic sizes in their shapes. The
            compiler's to change.
        weights: the weights in call order, named below the region's module.
        run: computes the region eagerly with real tensors, for checks.
        run_in_full: as `run`, where no layer's input is rounded.
        example: makes weights and inputs.
        work: elements of the largest tensor anywhere in the region, per element of its first input.
        attends: whether the region has an attention, whose cost grows with the square of its rows.
    """

    description: RegionSpec
    graph_module: torch.fx.GraphModule
    weights: Sequence[WeightSpec]
    run: Eager
    run_in_full: Eager
    example: Example
    work: float
    attends: bool


class Compiled(NamedTuple):
    """What a compiler made of an exported program.

    Attributes:
        payload: all that `Compiler.load` needs; the same for any weights and any size in the ranges
            of the description's symbols. It is stored, signed and may be loaded on another machine
            of the same target.
        facts: plain data for the file's manifest: "binary_bytes", the device memory of a loaded
            graph.
        source: the generated code, for developers.
    """

    payload: bytes
    facts: dict[str, Any]
    source: str = ""


class KernelFacts(NamedTuple):
    """One kernel of a graph.

    Attributes:
        name: in the source.
        sort: for example "Triton" or "C++".
        bytes: of its binary.
        choices: the configuration chosen by measurement: block sizes, warps, stages.
    """

    name: str
    sort: str
    bytes: int
    choices: dict[str, int | str | bool]

    @property
    def words(self) -> str:
        """The kernel in a line."""
        chosen = ", ".join(f"{name} {value}" for name, value in self.choices.items())
        return f"{self.name}: {self.sort}, {self.bytes} bytes{f', {chosen}' if chosen else ''}"


class PayloadFacts(NamedTuple):
    """A payload for people: its generated source, and its kernels."""

    source: str
    kernels: list[KernelFacts]


class Requirement(NamedTuple):
    """One thing a compiler needs.

    Attributes:
        name: what it is, for people.
        met: whether it is there.
        reason: in words, what is missing.
        remedy: in words, what to do.
        is_final: whether it cannot change while this process lives, so that nothing is tried again.
    """

    name: str
    met: bool
    reason: Reason = NOTHING
    remedy: Reason = NOTHING
    is_final: bool = False


class Compiler(Protocol):
    """A way to turn a region into a graph: one module of `compilers/`, listed in its `registry`.

    Compilers never import one another. Making one, and the methods marked *anywhere*, import no
    PyTorch: the console's commands do without.
    """

    name: str
    """Anywhere. How users choose it, and part of every key; it never changes."""

    def requirements(self, device: str) -> Sequence[Requirement]:
        """Say what this compiler needs on this machine: to load its graphs, and to build them.

        In the server, before a session starts, and in a worker, before its first job by this
        compiler. All that is needed is listed, met or not; empty: it works anywhere. Never raises.

        Args:
            device: its type, as PyTorch names it; any.
        """

    def needs_to_build(self, device: str) -> Sequence[Requirement]:
        """Say what builds need besides: without it nothing is built, the user is told, and existing
        graphs are still loaded.

        Anywhere; never raises.
        """

    def fingerprint(self, device: str) -> dict[str, Any]:
        """Return every fact besides device and PyTorch that changes generated code, as plain data.

        In the server and in workers, where its requirements are met; part of each key. A graph is
        used wherever all facts are equal, so a missing fact leads to wrong graphs.
        """

    def installed_fingerprint(self, device: str) -> dict[str, Any]:
        """Return the same from the installed files. Anywhere."""

    def prepare_worker(self, folder: Path, *, suffix: str) -> None:
        """Make a worker's process ready for `compile`; once, before its first job.

        Called for each compiler of the registry, whatever the jobs. Does nothing if its
        requirements are not met; never raises.

        Args:
            folder: shared by the workers of a server; it may keep files there for the next one.
            suffix: of their names.
        """

    def compile(self, program: Program, *, measure: Measure) -> Compiled:
        """Compile a program; in workers only, where its requirements are met.

        The result is loaded at once and compared with `program.run` at the ends of every range:
        results are new tensors in the description's layout, and no input is written into.

        Args:
            program: its graph module may be changed.
            measure: to be entered while anything is timed on the device.

        Raises:
            BuildError: it cannot be compiled; the host runs the region, with this reason.
        """

    def explain_failure(self, device: str) -> RequirementError | None:
        """Say why no other build can succeed here either, after one failed.

        In workers only, after any failure of a build. None: the cause was the region's own, or is
        not known. A final error ends all building while the server lives. Never raises.
        """

    def load(self, payload: bytes, card: int | None = None) -> Callable[[list[Any]], Any]:
        """Rebuild the callable of a verified payload.

        In the server, in a thread of its own, and in the worker that built it. A payload is loaded
        once for each GPU on which it is called, whichever it was built on.

        Args:
            card: the number of that GPU; None: the current one. Ignored without GPUs.

        Returns:
            What takes the list [*weights, *inputs], empties it, and returns the results in order,
            as a tuple or list. Sizes are in the declared ranges; no gradient is wanted.

        Raises:
            Any error: it cannot be loaded here; the host runs the region, with this reason.
        """

    def describe_payload(self, payload: bytes) -> PayloadFacts:
        """Say what is in a payload, for people, without running it. Anywhere.

        Raises:
            ValueError: it was not made by this compiler.
        """
