"""Live weights: the tensors that the host's own forward would use in this very call.

A `WeightSource` fetches weights in one way; a model has an ordered list of them: resident, cast,
streamed, packed, dynamic. Each module is fetched by the last one that takes it, all of a region at
once, and a mixture has the name of the last source that gave any.

Resident and dynamic weights are kept until an *epoch* ends: by a load, a change of patches or
residency, or an evicted page.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ..contract import WeightSpec
from ..host_api.given import multiplies_as_given
from ..host_api.layers import is_operator
from ..host_api.memory import loaded_state
from ..kinds.layout import ALIGNMENT
from .casting import Cast, OneByOne, Resident, fetch_loose
from .dynamic import Dynamic
from .packed import InBlocks
from .source import NoRoomError, Pairs, WeightSource, same_device
from .streamed import Streamed

logger = logging.getLogger(__name__)

#: What the host's functions give of a layer; whatever else belongs to it is a parameter by itself.
_OF_A_LAYER = ("weight", "bias")


class Fetched(NamedTuple):
    """Weights for one call in the graph's order. `release` must be called once what reads them is
    queued: the call, or copies of them; further calls do nothing.

    Attributes:
        given: (weight, bias) of layers that the graph leaves to the host, by their paths: of those
            that are no more than a product.
    """

    tensors: list[torch.Tensor]
    given: Mapping[str, tuple[Any, Any]]
    weight_class: str
    release: Callable[[], None] | None


class _Slot(NamedTuple):
    owner: torch.nn.Module
    attribute: str


class ModelWeights:
    """Where the weights of one loaded model are, step by step.

    One object per model and device; `begin_run` and `begin_step` must be called before regions
    fetch.
    """

    def __init__(
        self,
        model: Any,
        device: torch.device,
        dtype: torch.dtype,
        *,
        together: bool = True,
        room: Callable[[], int] | None = None,
    ) -> None:
        """Set up; nothing is fetched yet.

        Args:
            model: the host's BaseModel.
            device: its load device.
            dtype: its compute dtype.
            together: whether a region's weights may be loaded in one call, kept in dynamic VRAM,
                and multiplied without their layers, which depends on many host internals.
            room: `Lanes`' room for weights that are elsewhere.
        """
        self.together = together
        self.dynamic = Dynamic(model, device, dtype, may_hold=together)
        far: tuple[WeightSource, ...] = (OneByOne(device, dtype),)
        if together:
            streamed = Streamed(device, dtype, room)
            far = streamed, InBlocks(device, dtype, streamed), self.dynamic
        #: Those that lie furthest away come last.
        self.sources: tuple[WeightSource, ...] = (Resident(), Cast(device, dtype), *far)
        self.model = model
        self.device = device
        self.dtype = dtype
        self.epoch = 0
        self._short_epoch = -1
        self._state: tuple[Any, ...] = ()
        self._watched: list[tuple[dict[str, Any], str, torch.Tensor | None]] = []

    def begin_run(self) -> None:
        """Forget all lists: the host may have loaded, moved or patched anything between two
        runs.
        """
        self._new_epoch()
        for source in self.sources:
            source.begin_run()

    def end_run(self) -> None:
        """Keep no weights: the host may load the model again, and needs the room."""
        self._new_epoch()

    def begin_step(self) -> None:
        """Start a new epoch if weights were moved or replaced since the last step."""
        for source in self.sources:
            source.begin_step()
        state = loaded_state(self.model)
        if state != self._state:
            self._state = state
            self._new_epoch()
            return
        for parameters, name, tensor in self._watched:
            if parameters.get(name) is not tensor:
                self._new_epoch()
                return

    def note_no_room(self) -> None:
        """Until the epoch ends, layers that graphs leave to the host fetch their own weights,
        because there was no room for a region's at once.
        """
        self._short_epoch = self.epoch

    def make_room(self, size: int) -> None:
        """Have the sources free so many bytes of the device's memory."""
        for source in self.sources:
            source.make_room(size)

    @property
    def gives_to_layers(self) -> bool:
        """Whether such layers get their weights, if they are only a product."""
        return self.together and self._short_epoch != self.epoch

    def watch(self, slots: Sequence[_Slot]) -> None:
        """Start a new epoch when one of these parameters is replaced."""
        for owner, name in slots:
            table: dict[str, Any] = owner._buffers if name in owner._buffers else owner._parameters
            self._watched.append((table, name, table.get(name)))

    def by_source(self, modules: Sequence[Any]) -> dict[WeightSource, list[Any]]:
        """Return which source fetches which of these modules now, in the order of the sources."""
        found: dict[WeightSource, list[Any]] = {source: [] for source in self.sources}
        for module in modules:
            found[next(s for s in reversed(self.sources) if s.takes(module))].append(module)
        return {source: taken for source, taken in found.items() if taken}

    def _new_epoch(self) -> None:
        self.epoch += 1
        self._watched.clear()
        for source in self.sources:
            source.begin_epoch()


class RegionWeights:
    """The live weights of one region of a loaded model."""

    def __init__(
        self,
        module: torch.nn.Module,
        specs: Sequence[WeightSpec],
        source: ModelWeights,
        left: Mapping[str, bool] = MappingProxyType({}),
    ) -> None:
        """Set up; nothing is fetched yet.

        Args:
            module: the region's module.
            specs: the graph's weights in call order.
            source: of the model's weights.
            left: the paths of the layers that the graph leaves to the host, with whether it rounds
                their inputs.
        """
        self._source = source
        self._left = [(path, module.get_submodule(path), how) for path, how in left.items()]
        self._specs = [(s.shape, getattr(torch, s.dtype)) for s in specs]
        self._slots = []
        for spec in specs:
            path, _, attribute = spec.name.rpartition(".")
            self._slots.append(_Slot(module.get_submodule(path), attribute))
        layers = (slot.owner for slot in self._slots if slot.attribute in _OF_A_LAYER)
        self._owners = list(dict.fromkeys(layers))
        self._fetched: Fetched | None = None
        self._epoch = -1
        #: Of what `_fetched` is of, and what that was called by.
        self._kept_by: WeightSource = source.sources[0]
        self._signature: bytes | None = None

    def let_go(self) -> None:
        """Keep no weights: the host may load the model again, and needs the room."""
        self._fetched = None

    @property
    def are_kept(self) -> bool:
        """Whether those of the last call are kept for the next one."""
        return self._fetched is not None and self._epoch == self._source.epoch

    def fetch(self) -> Fetched:
        """Get the weights for one call.

        Raises:
            ValueError: the host's weights do not have the shapes, dtypes or layout the graph takes.
        """
        if self._fetched is not None and self._epoch == self._source.epoch:
            signature = self._kept_by.hold()
            if signature is not None:
                if signature == self._signature:
                    return self._fetched
                self._kept_by.release()
        return self._fetch_anew()

    def _fetch_anew(self) -> Fetched:
        self._fetched = None
        left = self._multiplied_as_given()
        if left:
            try:
                return self._fetch_together(left)
            except NoRoomError as error:  # layers that fetch their own need less at a time
                self._source.note_no_room()
                logger.debug("layers fetch their own weights from now on: %s", error)
        return self._fetch_together({})

    def _fetch_together(self, left: dict[str, Any]) -> Fetched:
        releases: list[Callable[[], None]] = []
        try:
            return self._gather(left, releases)
        except torch.OutOfMemoryError as error:  # all of a region's weights at once
            _all(releases)
            raise NoRoomError("they could not be brought over together: out of memory") from error
        except BaseException:  # pages that stay held would never be freed
            _all(releases)
            raise

    def _gather(self, left: dict[str, Any], releases: list[Callable[[], None]]) -> Fetched:
        """Fetch all weights of the graph, and of these layers that it leaves to the host; what must
        be released is put into `releases` in any case.
        """
        source = self._source
        owners = [m for m in (*self._owners, *left.values()) if is_operator(m)]
        found: Pairs = {}
        names, held, may_be_kept = {Resident.name}, set[int](), True
        for each, modules in source.by_source(owners).items():
            brought = each.fetch(modules)
            found.update(brought.pairs)
            names.add(brought.name)
            may_be_kept &= brought.may_be_kept
            if brought.release is not None:
                releases.append(brought.release)
            if each.holds:
                held.update(brought.pairs)
        tensors = []
        for slot, (_, dtype) in zip(self._slots, self._specs, strict=True):
            both = found.get(id(slot.owner))
            if both is None or slot.attribute not in _OF_A_LAYER:
                name, tensor = fetch_loose(
                    getattr(slot.owner, slot.attribute), source.device, dtype
                )
                tensors.append(tensor)
                names.add(name)
                may_be_kept &= name == Resident.name
            else:
                tensors.append(both[0 if slot.attribute == "weight" else 1])
        self._check(tensors)
        given = {path: found[id(layer)] for path, layer in left.items()}
        last = next(each for each in reversed(source.sources) if each.name in names)
        if may_be_kept:
            slots = [*self._slots, *(_Slot(m, a) for m in left.values() for a in _OF_A_LAYER)]
            source.watch([slot for slot in slots if id(slot.owner) not in held])
            self._keep(Fetched(tensors, given, last.name, None), last, releases)
        return Fetched(tensors, given, last.name, partial(_all, releases) if releases else None)

    def _multiplied_as_given(self) -> dict[str, Any]:
        """The layers that the graph leaves to the host and whose fetched weights may be multiplied
        directly at this moment, by path.
        """
        if not self._source.gives_to_layers:
            return {}
        dtype = self._source.dtype
        return {
            path: layer
            for path, layer, is_rounded in self._left
            if multiplies_as_given(layer, dtype, rounded=is_rounded)
        }

    def _keep(self, fetched: Fetched, by: WeightSource, releases: list[Callable[[], None]]) -> None:
        """Keep weights for the next calls, if they can be held, as they are in this one."""
        signature = by.hold()
        if signature is None:
            return
        if by.holds:
            releases.append(by.release)
            fetched = fetched._replace(release=by.release)
        self._fetched, self._kept_by = fetched, by
        self._signature, self._epoch = signature, self._source.epoch

    def _check(self, tensors: Sequence[torch.Tensor]) -> None:
        device = self._source.device
        for tensor, (shape, dtype), slot in zip(tensors, self._specs, self._slots, strict=True):
            if (
                type(tensor) not in (torch.Tensor, torch.nn.Parameter)
                or tensor.dtype != dtype
                or tuple(tensor.shape) != shape
                or not same_device(tensor.device, device)
                or not tensor.is_contiguous()
                or tensor.data_ptr() % ALIGNMENT
            ):
                kind = type(tensor).__name__
                facts = "" if tensor is None else f" {tensor.dtype} {tuple(tensor.shape)}"
                raise ValueError(
                    f"{slot.attribute} must be a contiguous {dtype} {shape} on {device}, "
                    f"got a {kind}{facts}"
                )


def _all(releases: list[Callable[[], None]]) -> None:
    while releases:
        releases.pop(0)()
