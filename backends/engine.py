"""The engine: everything a server process needs to compile models, behind a few calls for the
nodes.

It owns the store, the builder and the graphs, makes a session for each compiled MODEL, VAE or
CONTROL_NET, and keeps each saved workflow's graph folder filled.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from .attaching import vae as attach_vae
from .attaching.attached import Attached, LeftAlone, Note
from .attaching.caches import Caches
from .attaching.objects import Objects
from .building.farm import make_builder
from .building.pacing import room_for_workers
from .choices.choices import Choices
from .contract import CallForm, WhenMissing
from .cuda_graphs.memory import CapturedMemory
from .debugging import OFF, Debugging
from .device import gpu
from .errors import RequirementError, StrictError
from .events import Event, Events
from .fleet.fleet import Fleet
from .graphs.compiled_graph import CompiledGraph, State
from .graphs.learned_models import LearnedModels
from .graphs.library import Graphs
from .host_api import present
from .host_api.execution import executing_prompt
from .host_api.memory import total_vram
from .host_api.needs import Feature
from .host_api.process import host_arguments
from .live import Live
from .reasons import joined, of
from .runtime.session import AttachedBy, Session, SessionOptions, Whose
from .runtime.shared import Shared
from .runtime.verification import Verification
from .sessions import warm_up
from .sessions.cache_reports import cache_reports
from .sessions.eager_times import EagerTimes
from .sessions.history import History
from .sessions.overview import Overview
from .sessions.prompts import Progress, Prompts
from .sessions.report import model_report, strict_problem
from .sessions.requests import Requests, mirror
from .sessions.runs import SessionRuns
from .sessions.settings import Settings
from .sessions.start import Starter
from .sessions.story import Story
from .sessions.workflow_links import WorkflowLinks, WorkflowRef
from .storing import folders
from .storing.paths import Paths
from .storing.records import Records

logger = logging.getLogger(__name__)

__all__ = ["AttachedBy", "Engine", "Hooks", "Paths", "Progress", "WorkflowRef"]


@dataclass(frozen=True)
class Hooks:
    """What the engine asks its server.

    Attributes:
        current_workflow: the saved workflow of the prompt that runs now, if any.
        on_change: called, from any thread, when a report has changed.
        check_cancelled: raises the host's interrupt when the user pressed Cancel.
        attached_by: which node a session belongs to.
    """

    current_workflow: Callable[[], WorkflowRef | None]
    on_change: Callable[[], None]
    check_cancelled: Callable[[], None]
    attached_by: Whose = lambda _before: None


class Engine:
    """Compiles models for one server process."""

    def __init__(
        self, *, paths: Paths, settings: Settings, hooks: Hooks, debugging: Debugging = OFF
    ) -> None:
        """Set up; no worker starts and nothing is read before the first model."""
        self._settings = settings
        off = present.look()
        if Feature.WORKFLOWS in off:
            hooks = replace(hooks, current_workflow=lambda: None, attached_by=lambda _: None)
        self._hooks = hooks
        self._objects = Objects(off)
        self._numbers = itertools.count(1)
        self._sessions: Live[Session] = Live()
        self._prompts = Prompts(hooks.check_cancelled)
        self._events = Events()
        #: What MODELs carry besides sessions.
        self.caches = Caches(self._objects, self._events, self._numbers)
        self._events.listen(self._graphs_changed, Event.GRAPH_CHANGED)
        self._events.listen(hooks.on_change, *Event)
        fleet = Fleet(paths.private)
        self._store = fleet.store(paths.store, lambda: settings.store_cap_bytes)
        self._builder = make_builder(
            hello={} if Feature.EVERYTHING in off else host_arguments(),
            spool=self._store.spool,
            workers=lambda: room_for_workers(settings.workers, self._requests.spare_vram),
            time_limit_s=lambda: settings.job_limit_s,
            idle_s=settings.idle_s,
            is_busy=self._prompts.is_busy,
            events=self._events,
        )
        remote = fleet.remote(self._store)
        claims = fleet.claims(self._store, lambda: settings.job_limit_s)
        self._graphs = Graphs(
            self._store, self._builder, claims, self._events, dump=debugging.dump, remote=remote
        )
        self._graphs.when_loaded(claims.sweep)
        if remote is not None:
            self._graphs.when_loaded(partial(mirror, remote))
        self._captured = CapturedMemory(
            lambda device: int(total_vram(device) * settings.captured_vram_share)
        )
        machine = gpu.machine()
        self._shared = Shared(
            self._graphs,
            self._captured,
            debugging,
            Verification() if debugging.verify else None,
            Choices.kept(paths.private, f"{machine}/torch {torch.__version__}"),
            off,
            LearnedModels(Records(paths.records, fleet.signer), self._builder, self._events),
        )
        self._eager_times = EagerTimes(paths.private, machine)
        self._starter = Starter(
            self._shared, settings, self._eager_times, self._builder.is_building, hooks.attached_by
        )
        self._workflow_links = WorkflowLinks(self._store, paths.workflows, self._shared.lessons)
        links, current = self._workflow_links, hooks.current_workflow
        self._requests: Requests = Requests(
            self._sessions, self._prompts, self._builder, self._graphs, links, current
        )
        self._runs = SessionRuns(
            self._requests, self._prompts, self._captured, settings, self._tell
        )
        self._events.listen(self._requests.learned, Event.LEARNED)
        self._story = Story()
        self._history = History(paths.private)
        #: What pages and commands look at, and what users may do there.
        self.overview = Overview(
            sessions=self._sessions,
            caches=self.caches,
            builder=self._builder,
            graphs=self._graphs,
            store=self._store,
            fleet=fleet,
            captured=self._captured,
            prompts=self._prompts,
            history=self._history,
            settings=settings,
            events=self._events,
            off=off,
        )

    # --- the nodes' calls -------------------------------------------------------------------------

    def compile_model(
        self,
        model: Any,
        *,
        when_missing: WhenMissing | str = WhenMissing.BACKGROUND,
        graphs: str = "",
        backend: str = "auto",
        form: CallForm | str = CallForm.AUTO,
        on_progress: Progress | None = None,
    ) -> Any:
        """Return a clone of a ModelPatcher that runs through compiled graphs.

        Args:
            when_missing: what to do about missing graphs; only "wait" blocks.
            graphs: a graph folder's name; empty is beside the prompt's saved workflow.
            backend: "auto" or a backend's name.
            form: "exact" compiles nothing and replays the host's own forward, bit for bit.
            on_progress: (done, total, text), called while "wait" waits.

        Raises:
            GraphsNameError: `graphs` is not a plain name.
            Whatever `hooks.check_cancelled` raises, at once when the user cancels.
        """
        attached = self._objects.take_model(model)
        return self._compile(attached, when_missing, graphs, backend, on_progress, form)

    def compile_vae(
        self,
        vae: Any,
        *,
        parts: str = attach_vae.BOTH,
        when_missing: WhenMissing | str = WhenMissing.BACKGROUND,
        graphs: str = "",
        backend: str = "auto",
        form: CallForm | str = CallForm.AUTO,
        on_progress: Progress | None = None,
    ) -> Any:
        """Return a copy of a VAE that runs through compiled graphs; `vae` is not changed.

        Args:
            parts: "decoder and encoder", "decoder" or "encoder".
            Others: see `compile_model`; a VAE is not captured.
        """
        attached = self._objects.take_vae(vae, parts)
        return self._compile(attached, when_missing, graphs, backend, on_progress, form)

    def compile_controlnet(
        self,
        control: Any,
        *,
        when_missing: WhenMissing | str = WhenMissing.BACKGROUND,
        graphs: str = "",
        backend: str = "auto",
        on_progress: Progress | None = None,
    ) -> Any:
        """Return a copy of a CONTROL_NET that runs through compiled graphs, or one that cannot be
        compiled itself; `report` says why. Arguments are those of `compile_model`.

        Raises:
            TypeError: `control` is no ControlNet.
        """
        attached = self._objects.take_controlnet(control)
        return self._compile(attached, when_missing, graphs, backend, on_progress)

    def load_graphs(self, model: Any, folder: str, *, strict: bool) -> Any:
        """Return a clone of a ModelPatcher that runs through a folder's graphs; never builds.

        Raises:
            StrictError: with `strict`, if anything would run eager; the text lists what and why.
        """
        return self._load(self._objects.take_model(model), folder, strict)

    def load_vae_graphs(
        self, vae: Any, folder: str, *, parts: str = attach_vae.BOTH, strict: bool
    ) -> Any:
        """Return a copy of a VAE that runs through a folder's graphs; see `load_graphs`.

        Args:
            parts: as of `compile_vae`; `strict` asks for no others.
        """
        return self._load(self._objects.take_vae(vae, parts), folder, strict)

    def warm_up(
        self,
        model: Any,
        sizes: Sequence[tuple[int, int]],
        batches: Sequence[int],
        *,
        on_progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Load or build all that a compiled model needs, then run one empty step at each size.

        Args:
            sizes: (width, height) in pixels.
            batches: images at once; each runs doubled where guidance does that.

        Returns:
            The model's report.
        """
        session = self._objects.carried(model)
        if (why := present.why_off(self._shared.off, Feature.WARM_UP)) is not None:
            if isinstance(session, Session):
                session.note(why)
        elif isinstance(session, Session) and session.scope.kinds:
            wanted = session.graphs
            self._requests.ask(session, session.all_graphs)
            self._requests.wait(session, wanted, on_progress)
            warm_up.run_empty_steps(
                session, model, sizes, batches, self._hooks.check_cancelled, on_progress
            )
        return self.report(model)

    def report(self, model: Any) -> dict[str, Any]:
        """Return the report of a MODEL, VAE or CONTROL_NET as JSON-plain data.

        Says so if it did not come from us.
        """
        carried, caches = self._objects.carried(model), self.caches.of(model)
        note = None if any(caches) else of("not_ours")
        if isinstance(carried, Note):
            note = carried.text
        session = carried if isinstance(carried, Session) else None
        report = model_report(session, self._builder, None if session else note)
        return {**report, **cache_reports(*caches)}

    def close(self) -> None:
        """Stop the workers."""
        self._builder.close()
        self._graphs.close()

    # --- attaching --------------------------------------------------------------------------------

    def _compile(
        self,
        attached: Attached,
        when_missing: WhenMissing | str,
        graphs: str,
        backend: str,
        on_progress: Progress | None,
        form: CallForm | str = CallForm.AUTO,
    ) -> Any:
        name = folders.validate_graphs_name(graphs) if graphs else ""
        options = SessionOptions(WhenMissing(when_missing), name, form=CallForm(form))
        session = self._attach(attached, options, backend)
        if session is None:
            return attached.value
        wanted = self._describe(session, attached, on_progress)
        self._requests.ask(session, session.all_graphs)
        self._story.attached(session, session.graphs)
        if options.when_missing is WhenMissing.WAIT:
            self._requests.wait(session, wanted, on_progress)
            session.does_without = any(graph.state is State.MISSING for graph in wanted)
        else:
            self._prompts.stay_busy()
        return attached.value

    def _load(self, attached: Attached, folder: str, strict: bool) -> Any:
        options = SessionOptions(WhenMissing.NEVER, folder, folder_only=True)
        session = self._attach(attached, options, "auto")
        if session is not None:
            self._describe(session, attached)
            self._requests.ask(session, session.all_graphs)
            self._graphs.settle()
            self._story.attached(session, session.graphs)
            session.warn_once()
        problem = strict_problem(self.report(attached.value)) if strict else None
        if problem is not None:
            missing = self._workflow_links.why_none(options, self._hooks.current_workflow())
            why = joined(filter(None, (missing, problem)))
            raise StrictError(
                of("strict", folder=repr(folder), why=why), remedy=of("do_not_strict")
            )
        return attached.value

    def _attach(self, attached: Attached, options: SessionOptions, backend: str) -> Session | None:
        """Put a session on a copy of a host object, or the reason why there is none."""
        try:
            identifier = f"{attached.sort}-{next(self._numbers)}"
            session = self._starter.start(attached, options, backend, identifier=identifier)
        except RequirementError as error:
            attached.note(error.told)
            was_told = isinstance(attached, LeftAlone)
            level = logging.INFO if was_told else logging.WARNING
            logger.log(level, "Runs as without Warmgraph: %s", error)
            return None
        attached.attach(session, self._runs)
        self._sessions.add(session.id, session)
        return session

    def _describe(
        self, session: Session, attached: Attached, on_progress: Progress | None = None
    ) -> list[CompiledGraph]:
        if attached.patcher is not None:
            self._requests.patchers.add(attached.patcher)
        self._requests.look(session, session.scope, on_progress)
        placement = attached.placement()
        return session.describe(placement.device, placement.dtype)

    # --- what happens ----------------------------------------------------------------------------

    def _tell(self, session: Session) -> None:
        session.warn_once()
        self._story.ran(session)
        if self._history.note(session, executing_prompt()):
            self._eager_times.keep(session.scope.root)
        verification = self._shared.verification
        if verification is not None and (line := verification.take()):
            logger.info("Warmgraph: %s", line)
        self._workflow_links.expect(session, self._hooks.current_workflow())
        self._graphs.when_loaded(self._workflow_links.file)
        self._events.publish(Event.RUN_ENDED)

    def prompt_posted(self, workflow: WorkflowRef) -> None:
        """A saved workflow was queued, perhaps under a new file name."""
        self._workflow_links.moved(workflow)
        self._graphs.when_loaded(self._workflow_links.file)

    def _graphs_changed(self) -> None:
        """A graph changed its state; called in the loader's thread."""
        self._workflow_links.file()
        for session in self._sessions.values():
            if (finished := session.finished_line()) is not None:
                logger.info("Warmgraph: %s", finished)
