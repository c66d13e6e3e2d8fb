"""Live weights: the tensors that the host's own forward would use in this very call.

A module's weights are in one of four *classes*:

- resident: the parameter itself, on the device in the compute dtype;
- cast: on the device in another dtype or with functions on top (fp8, weight wrappers): made anew a
  call;
- streamed: elsewhere, brought over for one call (partly loaded model, VRAM full);
- dynamic: in the host's dynamic VRAM, at a virtual address that is fixed for the model's life.

Whatever is not resident comes from the host's own functions, all modules of a region at once. Lists
of resident and dynamic weights are kept until an *epoch* ends: a load, a change of patches or
residency, an evicted page.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ..contract import WeightSpec
from ..host_api import dynamic_vram
from ..host_api.given import multiplies_as_given
from ..host_api.layers import is_operator
from ..host_api.memory import loaded_state
from .casting import (
    ALIGNMENT,
    NoRoomError,
    fetch_away,
    fetch_dynamic,
    fetch_loose,
    fetch_plain,
    is_dynamic,
    lies_elsewhere,
    same_device,
)
from .lanes import Lanes
from .small import SmallTensors

logger = logging.getLogger(__name__)

CLASSES = ("resident", "cast", "streamed", "dynamic")
#: What the host's functions give of a layer; whatever else belongs to it is a parameter by itself.
_OF_A_LAYER = ("weight", "bias")


class Fetched(NamedTuple):
    """Weights for one call in the graph's order; `release` must be called once the call is
    queued.

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
        """Args: the host's BaseModel, its load device and its compute dtype; whether the weights of
        a region may come in one call where they do not lie ready, be kept in dynamic VRAM, and be
        multiplied by without their layers, which hangs on much of the host's inside; and `Lanes`'
        room for weights that lie elsewhere.
        """
        self.together = together
        self.lanes = Lanes(device, room)
        self.small = SmallTensors(device)
        self.model = model
        self.device = device
        self.dtype = dtype
        self.epoch = 0
        self._short_epoch = -1
        self._state: tuple[Any, ...] = ()
        self._watched: list[tuple[dict[str, Any], str, torch.Tensor | None]] = []
        self._range_fits = True
        self._pages: Any = None  # while they are held
        self._held = 0
        self._holders = 0
        self._signature = b""

    def begin_run(self) -> None:
        """Forget all lists: the host may have loaded, moved or patched anything between two
        runs.
        """
        self._new_epoch()
        self._range_fits = True
        if self._holders:  # an exception came between
            self._holders = 1
            self.let_range_go()

    def end_run(self) -> None:
        """Keep no weights: the host may load the model anew, and needs the room."""
        self._new_epoch()

    def begin_step(self) -> None:
        """Start a new epoch if weights were moved or replaced since the last step."""
        self.lanes.begin_step()
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
        """Until the epoch ends, let layers that graphs leave to the host fetch their own weights:
        there was no room for those of a region at once.
        """
        self._short_epoch = self.epoch

    @property
    def gives_to_layers(self) -> bool:
        """Whether such layers are given their weights, where they are no more than a product."""
        return self.together and self._short_epoch != self.epoch

    def watch(self, slots: Sequence[_Slot]) -> None:
        """Start a new epoch when one of these parameters is replaced."""
        for owner, name in slots:
            self._watched.append((owner._parameters, name, owner._parameters.get(name)))

    def hold_range(self) -> bytes | None:
        """Bring the model's whole range of dynamic VRAM in and keep its pages there.

        `let_range_go` must follow once the work that uses them is queued. The pages may not stay
        for longer: the host makes room for a step's activations by taking pages that nobody holds.

        Returns:
            The signature of the pages, None when they do not all fit or there is no such range.
        """
        if self._holders:  # the pages cannot have changed since
            self._holders += 1
            return self._signature
        if not self._range_fits or not self.together:
            return None
        pages, size = dynamic_vram.page_range(self.model, self.device)
        if not size:
            return None
        signature = dynamic_vram.hold(pages, size)
        if signature is None:
            self._range_fits = False  # until the next run; weights come one region at a time
            return None
        self._pages, self._held, self._holders, self._signature = pages, size, 1, signature
        return signature

    def let_range_go(self) -> None:
        """Undo one `hold_range` that gave a signature; the last one lets the pages go.

        Pages are held once, however many hold them: the host counts, and a page whose count does
        not come back to zero is never freed.
        """
        self._holders = max(0, self._holders - 1)
        if self._holders == 0 and self._held:
            dynamic_vram.let_go(self._pages, self._held)
            self._pages, self._held = None, 0

    def _new_epoch(self) -> None:
        self.epoch += 1
        self._watched.clear()
        self.small.forget()


class RegionWeights:
    """The live weights of one region of a loaded model."""

    def __init__(
        self,
        module: torch.nn.Module,
        specs: Sequence[WeightSpec],
        source: ModelWeights,
        left: Mapping[str, bool] = MappingProxyType({}),
    ) -> None:
        """Args: the region's module, the graph's weights in call order, where the model's are, and
        the paths of the layers that the graph leaves to the host, with whether it rounds their
        inputs.
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
        self._signature: bytes | None = None  # of the pages that `_fetched` lies in

    def let_go(self) -> None:
        """Keep no weights: the host may load the model anew, and needs the room."""
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
        source = self._source
        if self._fetched is not None and self._epoch == source.epoch:
            if self._fetched.weight_class != "dynamic":
                return self._fetched
            signature = source.hold_range()
            if signature is not None:
                if signature == self._signature:
                    return self._fetched
                source.let_range_go()
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
        be let go of is put into `releases`, whatever happens.
        """
        source = self._source
        found: dict[int, tuple[Any, Any]] = {}
        classes = set()
        owners = [*self._owners, *left.values()]
        dynamic = [m for m in owners if is_dynamic(m, source.device)] if source.together else []
        away = []
        for owner in owners:
            if owner in dynamic or not is_operator(owner):
                continue
            if source.together and lies_elsewhere(owner, source.device):
                away.append(owner)
                continue
            weight_class, found[id(owner)] = fetch_plain(owner, source.device, source.dtype)
            classes.add(weight_class)
        if away:
            pairs, done = fetch_away(away, source.device, source.dtype, source.lanes, source.small)
            found.update(pairs)
            if done is not None:
                releases.append(done)
            classes.add("streamed")
        keepable = True
        if dynamic:
            pairs, resident, release = fetch_dynamic(dynamic, source.device, source.dtype)
            found.update(pairs)
            releases.append(release)
            keepable = resident
            classes.add("dynamic" if resident else "streamed")
        tensors = []
        for slot, (_, dtype) in zip(self._slots, self._specs, strict=True):
            both = found.get(id(slot.owner))
            if both is None or slot.attribute not in _OF_A_LAYER:
                parameter = getattr(slot.owner, slot.attribute)
                weight_class, tensor = fetch_loose(parameter, source.device, dtype)
                tensors.append(tensor)
                classes.add(weight_class)
            else:
                tensors.append(both[0 if slot.attribute == "weight" else 1])
        weight_class = max(classes or {"resident"}, key=CLASSES.index)
        self._check(tensors)
        given = {path: found[id(layer)] for path, layer in left.items()}
        if keepable and not classes & {"cast", "streamed"}:
            slots = [*self._slots, *(_Slot(m, a) for m in left.values() for a in _OF_A_LAYER)]
            source.watch([slot for slot in slots if slot.owner not in dynamic])
            if not dynamic:
                self._keep(Fetched(tensors, given, weight_class, None))
            elif (signature := source.hold_range()) is not None:
                self._keep(Fetched(tensors, given, weight_class, source.let_range_go), signature)
                releases.append(source.let_range_go)
        return Fetched(tensors, given, weight_class, partial(_all, releases) if releases else None)

    def _multiplied_as_given(self) -> dict[str, Any]:
        """The layers that the graph leaves to the host and that may be multiplied by what is
        fetched for them, at this moment, by their paths.
        """
        if not self._source.gives_to_layers:
            return {}
        dtype = self._source.dtype
        return {
            path: layer
            for path, layer, is_rounded in self._left
            if multiplies_as_given(layer, dtype, rounded=is_rounded)
        }

    def _keep(self, fetched: Fetched, signature: bytes | None = None) -> None:
        self._fetched, self._signature, self._epoch = fetched, signature, self._source.epoch

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
    for release in releases:
        release()
