"""What a region plan consists of: forms, places and the plan itself.

A *form* is one sort of region (for a UNet: residual block, transformer block, ...). It names the
region's activations, runs the host's own maths for it, and says how a place's `forward` is
dispatched. A *place* is one occurrence of a form in a model; places with equal descriptions are one
*kind* and share one graph.

To support a new model family: write its forms, walk the model to find the places, say in a `Family`
what else the rest must know of it, and name that in `families.catalogue`. Nothing else in the
package knows about model families.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from ..code.packs import foreign_class
from ..code.sources import attributes_read
from ..contract import InputSpec, Symbol
from ..kinds.layout import CONTIGUOUS
from ..reasons import Reason, of
from ..torch_api.tracing import compiled_from
from .binding import Arguments, Forward, bound

#: What a module is called by, but for some of the host's.
FORWARD = "forward"
#: A module, which of its methods is replaced, and by what.
Placed = tuple[torch.nn.Module, str, Callable[..., Any]]


class RegionCall(Protocol):
    """Runs one region on live activations: returns what its `Form.reference` would, or None if the
    host must, or a `Beside` for a form that is compared so. `brought`: `options` and `live` of a
    block that attends (`call_context`); `form` of the inputs, where known.
    """

    def __call__(self, *inputs: Any, **brought: Any) -> Any: ...

    def decline(self, reason: Reason) -> Any:
        """Note why the host makes this call; returns None."""


class Form:
    """One sort of region. Instances are stateless and known by their family and name.

    A family is a set of forms, not a kind of model: a ControlNet's blocks are the UNet's.
    """

    family: str
    name: str
    #: What becomes of the arguments that the host calls the block with.
    arguments = Arguments("x")
    #: Names of the module's direct children that belong to the region; None: all of them.
    children: tuple[str, ...] | None = None
    #: Attributes of the module that the region does not hang on.
    hidden: tuple[str, ...] = ()
    #: How activations lie in memory (`layout`).
    layout: str = CONTIGUOUS
    #: Positions of the inputs that the host's code writes into: `computed` gives it copies, and a
    #: region leaves there the result of the same position.
    writes: tuple[int, ...] = ()
    #: Whether its graph calls the host's attention when it runs: which one is no part of it then.
    live_attention: bool = False
    #: Paths of attentions and feed-forwards that `reference` calls, and that give one tensor of
    #: their first one's shape: where others replace one, a graph calls it when it runs.
    parts: tuple[str, ...] = ()
    #: Those of them in whose place a call may bring a function of its own (`live`, by path).
    given: tuple[str, ...] = ()
    #: Whether the host makes each call that is compared, its graph beside it: nothing is known of
    #: what its model does with a result.
    beside: bool = False
    #: How its block is called, as data, where that was learned.
    way: Mapping[str, Any] = types.MappingProxyType({})
    #: Sizes that a comparison on a part of a call leaves whole, where its inputs may be cut though
    #: one of them holds indices; None where such a call is compared as it is.
    whole: tuple[str, ...] | None = None

    def label(self, module: Any) -> str:
        """Return a name for people, for example "ResBlock 320->640"."""
        raise NotImplementedError

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        """Return the activations that the region takes in a model that computes in `dtype`."""
        raise NotImplementedError

    def serving(self, call: RegionCall, module: Any) -> Forward:
        """Return the function that computes a place from what is taken of a call, or returns None
        to leave it to the host: the region itself, if it takes the same.
        """
        return call

    def reads(self, module: Any) -> Callable[[type], Collection[str]]:
        """Return a function that lists, for a class in the module's tree, the attributes that are
        read: they are part of the region.
        """
        return attributes_read

    def handed_on(self, module: Any) -> Mapping[str, tuple[str, ...]]:
        """Return the inputs that `reference` only passes on to some of `parts`, each with the paths
        of these: their replacements may take other rows.
        """
        return {}

    def code(self) -> tuple[Callable[..., Any], ...]:
        """Return the host's code that neither `reference` nor the module names: methods of an
        object that one of them makes.
        """
        return ()

    def reference(self, module: Any, *inputs: Any) -> Any:
        """Compute the region by the host's own code: the oracle, and what is traced.

        Returns:
            A tensor, or a tuple if the host's block returns several.
        """
        return host_forward(module, *inputs)

    def gives_back(self, position: int, dtype: torch.dtype) -> bool:
        """Tell whether the host's code returns an input that it writes into, and not an equal
        tensor.
        """
        return True

    def computed(self, module: Any, inputs: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """Return all results of `reference`, as a tuple; the inputs are not written into."""
        given = [value.clone() if i in self.writes else value for i, value in enumerate(inputs)]
        result = self.reference(module, *given)
        return result if isinstance(result, tuple) else (result,)


@dataclass(frozen=True)
class Place:
    """One occurrence of a region: its dotted name in the model, its module and its form.

    `widens` says that images may have 2**31 elements here: a kind gets a second graph on a GPU
    before any call needs it.
    """

    name: str
    module: torch.nn.Module
    form: Form
    widens: bool = False


class Follower(NamedTuple):
    """The next module in a chain, whose work the region before it has already done (the SiLU after
    a norm): `make` builds its forward from the host's own, whatever its arguments.
    """

    module: torch.nn.Module
    make: Callable[[Forward], Forward]


class Method(NamedTuple):
    """A method of a module that the host calls: `make` builds, from one `RegionCall` per region,
    the function that computes it from what is taken of its arguments (`Form.serving`). In a
    dispatch whose regions serve apart, the `RegionCall` of a region without a graph is None.
    """

    arguments: Arguments
    make: Callable[[Sequence[Any]], Forward]


@dataclass(frozen=True)
class Dispatch:
    """How one module's `forward`, and that of what follows it, is replaced while a step runs.

    `regions` are the places that must all have graphs before the replacement is installed, or one
    of them if they serve `apart`, each for one way to call the module. Calls that are not served
    run the host's own code with the module's arguments. A module may be called by `methods` of
    other names.
    """

    module: torch.nn.Module
    regions: tuple[Place, ...]
    methods: Mapping[str, Method]
    follower: Follower | None = None
    apart: bool = False

    def forwards(self, calls: Sequence[RegionCall | None]) -> list[Placed]:
        """Make the forwards of all modules that get one."""

        def decline(reason: Reason) -> None:
            first_of(calls).decline(reason)

        made: list[Placed] = []
        for name, (arguments, make) in self.methods.items():
            own = _own_method(self.module, name)
            forward = bound(arguments, make(calls), own, decline)
            made.append((self.module, name, forward))
        if self.follower is not None:
            module, follow = self.follower
            made.append((module, FORWARD, follow(_own_method(module, FORWARD))))
        return made


@dataclass
class Plan:
    """A model cut into regions.

    Attributes:
        dispatches: every module whose forward can be replaced.
        outside: (place, reason) of what stays the host's.
        symbols: the declared sizes, by name.
        guests: (place, owner) of layers that other packs added; they are not places of the model.
    """

    dispatches: list[Dispatch] = field(default_factory=list)
    outside: list[tuple[str, Reason]] = field(default_factory=list)
    symbols: dict[str, Symbol] = field(default_factory=dict)
    guests: list[tuple[str, str]] = field(default_factory=list)

    @property
    def places(self) -> list[Place]:
        """Every region of the model, in walking order."""
        return [place for dispatch in self.dispatches for place in dispatch.regions]

    def over(self, module: torch.nn.Module) -> Plan:
        """Return the same places with another module in each, for reports."""
        told = [
            Dispatch(
                module,
                tuple(replace(p, module=module) for p in each.regions),
                {},
                apart=each.apart,
            )
            for each in self.dispatches
        ]
        return replace(self, dispatches=told)


def first_of(calls: Sequence[RegionCall | None]) -> RegionCall:
    """The first call whose region has a graph; one has."""
    return next(call for call in calls if call is not None)


def dispatch_one(place: Place, serve: Forward | None = None) -> Dispatch:
    """Return the dispatch of a module that is one region.

    Args:
        serve: computes it from the region's call and what is taken, if its form does not say how.
    """

    def make(calls: Sequence[RegionCall]) -> Forward:
        if serve is not None:
            return partial(serve, calls[0])
        return place.form.serving(calls[0], place.module)

    return Dispatch(place.module, (place,), {FORWARD: Method(place.form.arguments, make)})


def dispatch_several(
    places: Sequence[Place],
    serve: Forward,
    arguments: Arguments | None = None,
    *,
    apart: bool = False,
) -> Dispatch:
    """Return the dispatch of a module that is several regions, or that is called in several ways.

    Args:
        serve: computes it from the regions' calls and what is taken.
        arguments: by default those of the first place's form.
        apart: whether each serves without the others' graphs.
    """
    first = places[0]
    method = Method(arguments or first.form.arguments, lambda calls: partial(serve, calls))
    return Dispatch(first.module, tuple(places), {FORWARD: method}, apart=apart)


def unknown_layer(layer: Any) -> Reason:
    """Say that a family has no form for a module."""
    if (owner := foreign_class(type(layer))) is not None:
        return owner
    if compiled_from(layer) is not None:
        return of("torch_compile_blocks")
    cls = type(layer)
    return of("no_region_for", layer=cls.__qualname__, module=cls.__module__)


def _own_method(module: torch.nn.Module, name: str) -> partial[Any]:
    return partial(getattr(type(module), name), module)


def host_forward(module: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Run the forward of a module's class, whatever replaced it in the instance."""
    result: torch.Tensor = type(module).forward(module, *args, **kwargs)
    return result


def host_results(module: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """As `host_forward`, for a block that returns several tensors."""
    return tuple(type(module).forward(module, *args, **kwargs))


class Passage(torch.nn.Module):
    """Our own layer within a copy of a model's block: it computes nothing of the model, so plans
    pass over it.
    """


def shallow_copy(module: torch.nn.Module, **children: torch.nn.Module) -> torch.nn.Module:
    """Return a module of the same class over the same weights, with some direct children replaced.

    The original is not touched; an instance's own `forward` (a dispatcher, a patch) is left out.
    """
    twin = copy.copy(module)
    for name in ("forward", "_forward"):  # another node's, which would run the original
        twin.__dict__.pop(name, None)
    twin._modules = {**module._modules, **children}
    return twin


def with_parts(module: torch.nn.Module, parts: Mapping[str, torch.nn.Module]) -> torch.nn.Module:
    """As `shallow_copy`, with parts at any depth replaced, by their paths."""
    children: dict[str, torch.nn.Module] = {}
    below: dict[str, dict[str, torch.nn.Module]] = {}
    for path, part in parts.items():
        name, _, rest = path.partition(".")
        if rest:
            below.setdefault(name, {})[rest] = part
        else:
            children[name] = part
    inner = {name: with_parts(module.get_submodule(name), each) for name, each in below.items()}
    return shallow_copy(module, **children, **inner)
