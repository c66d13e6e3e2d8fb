"""One compiled MODEL: its plan, its graphs, and what happens around each step of its sampling.

A session hangs on a clone of the host's ModelPatcher as a wrapper of the diffusion model and two
callbacks under our key, and goes with it. While a step runs, the modules of ready places carry our
`forward`; after it they are the host's again, so another branch of the same checkpoint never meets
a graph.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ..contract import Backend, Description, WhenMissing
from ..errors import DescriptionError
from ..host import pause_host_compiler
from ..keys import target
from ..regions.plan import Place, Plan, describe_place, quick_signature
from ..regions.registry import plan_model
from ..sources import Watch
from .graphs import Graph, Graphs, State
from .region import Region
from .verified import Verified
from .weights import ModelWeights
from .wiring import Wiring, patched_places

logger = logging.getLogger(__name__)


@dataclass
class Options:
    """What the user chose on the node."""

    when_missing: WhenMissing
    graphs: str
    folder_only: bool = False


@dataclass
class Kind:
    """Equal places of one model, and the graph that serves them; without one, `reason` says why."""

    label: str
    places: list[Place] = field(default_factory=list)
    graph: Graph | None = None
    reason: str | None = None


class Session:
    """What one Compile Model or Load Compiled Graph node attached to its MODEL."""

    def __init__(
        self,
        number: int,
        model: Any,
        plan: Plan,
        backend: Backend,
        options: Options,
        graphs: Graphs,
        verified: Verified,
    ) -> None:
        """Args: a number for reports; the host's BaseModel; the rest as the engine chose it."""
        self.id = f"model-{number}"
        self.plan = plan
        self.backend = backend
        self.options = options
        self.kinds: list[Kind] = []
        self.notes: list[str] = []
        self.steps: Counter[str] = Counter()
        self.warned: set[str] = set()
        #: Keys of graphs that were ready in this process before this session came.
        self.reused: set[str] = set()
        self.model_name = type(model).__name__
        #: The saved workflow of the last run, and whether its graph folder holds all there is.
        self.workflow: Any = None
        self.filed = True
        #: Whether the log has said that all requested graphs have come.
        self.told = True
        self._model = model
        self._diffusion = model.diffusion_model
        self._graphs = graphs
        self._verified = verified
        self._weights: ModelWeights | None = None
        self._regions: dict[str, Region] = {}
        self._installed: list[tuple[torch.nn.Module, Callable[..., Any]]] = []
        self._wiring = Wiring(self._diffusion)
        self._marks: Any = None
        self._object_patches: dict[str, Any] = {}
        self._of_place: dict[str, Kind] = {}
        self._foreign: dict[str, str] = {}
        self._watch = Watch()
        self._version = -1
        self._dtype: torch.dtype | None = None
        self._lock = threading.RLock()
        self._inside = False
        self._run_open = False

    @property
    def graphs(self) -> list[Graph]:
        """The graphs of all kinds that have one."""
        return [kind.graph for kind in self.kinds if kind.graph is not None]

    # --- what the model consists of -------------------------------------------------------------

    def describe(self, device: torch.device, dtype: torch.dtype) -> list[Graph]:
        """Write the model's kinds down for a device and compute dtype; returns their graphs."""
        facts = target(device.type, self.backend)
        plan = plan_model(self._diffusion)
        if isinstance(plan, Plan):
            self.plan = plan
        self._wiring = Wiring(self._diffusion)
        kinds: dict[str, Kind] = {}
        quick: dict[Any, Kind] = {}
        self._watch = Watch()
        self._of_place = {}
        for place in self.plan.places:
            signature = quick_signature(place)
            kind = quick.get(signature)
            if kind is None:
                kind = self._describe_kind(place, device, dtype, facts, kinds)
                quick[signature] = kind
            kind.places.append(place)
            self._of_place[place.name] = kind
        self.kinds = list({id(kind): kind for kind in quick.values()}.values())
        self.reused = {k.graph.key for k in self.kinds if k.graph and k.graph.state is State.READY}
        self._dtype = dtype
        self._weights = ModelWeights(self._model, device, dtype)
        self._regions.clear()
        self._version = -1
        return self.graphs

    def _describe_kind(
        self,
        place: Place,
        device: torch.device,
        dtype: torch.dtype,
        facts: dict[str, Any],
        known: dict[str, Kind],
    ) -> Kind:
        label = type(place.module).__name__
        try:
            label = place.form.label(place.module)
            description: Description = describe_place(
                place, self.plan, dtype=dtype, device=device.type, watch=self._watch
            )
        except DescriptionError as error:
            return Kind(label, reason=error.reason)
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            return Kind(label, reason=f"its {label} is not built as the host's: {error}")
        graph = self._graphs.graph(description, self.backend, facts)
        return known.setdefault(graph.key, Kind(label, graph=graph))

    def is_stale(self, dtype: torch.dtype) -> bool:
        """Tell whether the host's code, the modules or the compute dtype changed since `describe`.

        Must be asked once, at the start of a run: object patches count as a change only once.
        """
        patcher = getattr(self._model, "current_patcher", None)
        patches = dict(getattr(patcher, "object_patches", {}))
        before, self._object_patches = self._object_patches, patches
        repatched = patches.keys() != before.keys() or any(
            patches[name] is not before[name] for name in patches
        )
        return (
            repatched or dtype is not self._dtype or self._watch.changed() or self._wiring.changed()
        )

    # --- a run ------------------------------------------------------------------------------------

    def begin_run(self) -> None:
        """Look at the model anew: what other nodes patched, and where its weights are now."""
        with self._lock:
            self._run_open = True
            if self._weights is not None:
                self._weights.begin_run()
            self._look()
            for region in self._regions.values():
                region.declined = None

    def _look(self) -> None:
        """Find the places that other nodes patched."""
        self._marks = self._wiring.marks()
        self._foreign = dict(patched_places(self.plan))
        self._version = -1

    def end_run(self) -> None:
        """Forget what only the run needed."""
        with self._lock:
            self._run_open = False

    def step(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Run one forward of the diffusion model (a wrapper of the host's DIFFUSION_MODEL kind)."""
        reason = self._why_not(executor, args)
        if reason is not None:
            self.steps[reason] += 1
            self._warn(reason)
            return executor(*args, **kwargs)
        with self._lock:
            if not self._run_open:
                self.begin_run()
            assert self._weights is not None
            self._look_again()
            self._weights.begin_step()
            if self._version != self._graphs.version:
                self._install_ready()
            self._inside = True
            placed = []
            try:
                for module, forward in self._installed:
                    placed.append((module, module.__dict__.get("forward")))
                    module.__dict__["forward"] = forward
                with pause_host_compiler():
                    return executor(*args, **kwargs)
            finally:
                for module, before in placed:
                    if before is None:
                        module.__dict__.pop("forward", None)
                    else:
                        module.__dict__["forward"] = before
                self._inside = False

    def _look_again(self) -> None:
        """Notice what another node's wrapper changed around this very step."""
        assert self._weights is not None and self._dtype is not None
        if self._wiring.changed():
            self.describe(self._weights.device, self._dtype)
            self._look()
        elif self._wiring.marks() != self._marks:
            self._look()

    def _why_not(self, executor: Any, args: tuple[Any, ...]) -> str | None:
        """Why a whole forward is the host's, or None."""
        if executor.class_obj is not self._diffusion:
            return "another copy of the model runs (hooks or several GPUs)"
        if self._weights is None:
            return "no graphs are asked for"
        if self._inside:
            return "the model calls itself"
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            return "gradients are on (training)"
        x = args[0] if args else None
        if not isinstance(x, torch.Tensor) or x.device.type != self._weights.device.type:
            return f"it runs on {getattr(x, 'device', 'an unknown device')}"
        return None

    def _install_ready(self) -> None:
        """Make the forwards of all modules whose graphs are ready."""
        self._version = self._graphs.version
        self._installed = []
        for dispatch in self.plan.dispatches:
            names = [place.name for place in dispatch.regions]
            if any(name in self._foreign for name in names):
                continue
            regions = [self._region(place) for place in dispatch.regions]
            if all(regions):
                host = partial(type(dispatch.module).forward, dispatch.module)
                forward = dispatch.make([r for r in regions if r is not None], host)
                self._installed.append((dispatch.module, forward))

    def _region(self, place: Place) -> Region | None:
        graph = self._of_place[place.name].graph
        if graph is None or graph.state is not State.READY:
            return None
        region = self._regions.get(place.name)
        if region is None:
            assert self._weights is not None
            region = Region(place, graph, self._weights, self._is_verified, self._verify)
            self._regions[place.name] = region
        return region

    def _is_verified(self, graph: Graph, weight_class: str) -> bool:
        return self._verified.has(graph.key, graph.payload_sha256, weight_class)

    def _verify(self, graph: Graph, weight_class: str) -> None:
        self._verified.add(graph.key, graph.payload_sha256, weight_class)

    # --- what to say ------------------------------------------------------------------------------

    def eager_places(self) -> list[tuple[str, str]]:
        """Return (place, reason) of everything that runs the host's code now."""
        found = list(self.plan.outside)
        for dispatch in self.plan.dispatches:
            reasons = [self._reason(place) for place in dispatch.regions]
            shared = next((r for r in reasons if r is not None), None)
            if shared is not None:
                found += [(place.name, shared) for place in dispatch.regions]
        return found

    def finished_line(self) -> str | None:
        """Return a line for the log once all requested graphs have come or failed, else None."""
        graphs = self.graphs
        ready = sum(g.state is State.READY for g in graphs)
        if self.told or not ready or any(g.is_pending for g in graphs):
            return None
        self.told = True
        new = [g for g in graphs if g.state is State.READY and g.key not in self.reused]
        built = [g for g in new if g.source == "built"]
        seconds = sum(g.build_seconds or 0.0 for g in built)
        return (
            f"{self.model_name}: {ready} of {len(graphs)} graphs ready: {len(built)} built in "
            f"{seconds:.0f} s of work, {len(new) - len(built)} loaded ({self.backend.name})"
        )

    def note(self, text: str) -> None:
        """Keep a line for the report, once."""
        if text not in self.notes:
            self.notes.append(text)

    def warn_once(self) -> None:
        """Log each new reason for running eager, once in a session."""
        for _, reason in self.eager_places():
            self._warn(reason)

    def _reason(self, place: Place) -> str | None:
        if place.name in self._foreign:
            return self._foreign[place.name]
        kind = self._of_place.get(place.name)
        if kind is None or kind.graph is None:
            return kind.reason if kind is not None and kind.reason else "it was not described"
        graph = kind.graph
        if graph.state is State.READY:
            region = self._regions.get(place.name)
            return region.declined if region is not None else None
        if graph.state is State.BUILDING:
            return "its graph is being built"
        if graph.state is State.LOADING:
            return "its graph is being loaded"
        text = graph.reason or "no saved graph"
        return f"{text}; {graph.remedy}" if graph.remedy else text

    def _warn(self, reason: str) -> None:
        if reason in self.warned:
            return
        self.warned.add(reason)
        expected = reason.startswith(("its graph is being", "no saved graph"))
        logger.log(logging.INFO if expected else logging.WARNING, "Parts run eager: %s", reason)
