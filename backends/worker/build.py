"""One build: a description goes in, a checked payload comes out. Runs in a worker process only."""

from __future__ import annotations

import contextlib
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ..building.messages import REMEMBERED
from ..code.transplant import Guests, transplanted
from ..compilers import registry
from ..compilers.registry import backend_named
from ..contract import Compiler, Measure, Program, RegionSpec
from ..device.gpu import empty_cache, in_use, is_gpu, pretended
from ..errors import BrokenWorkerError, BuildError, RequirementError, WarmgraphError
from ..families.catalogue import form_of
from ..host_api.process import import_host
from ..plans.describe import named_code
from ..plans.plan import region_sources
from ..reasons import of
from ..target import keys
from ..torch_api import cuda_pretended, present
from .checks import checked
from .export import export
from .notebook import Notebook


def prepare(hello: dict[str, Any]) -> None:
    """Import the host under the parent's own arguments, on which attention and dtypes depend.

    Args:
        hello: "argv" (the parent's sys.argv), "host" (folder of the ComfyUI tree), "spool" (the
            builder's own folder) and "pretended" (the card that the parent pretends to have).
    """
    if hello.get("pretended"):
        cuda_pretended.pretend(hello["pretended"])
    import_host(hello["argv"], hello["host"])
    if (missing := present.missing_to_export()) is not None:
        raise RequirementError(missing, final=True)
    for backend in registry.COMPILERS:
        backend.prepare_worker(Path(hello["spool"]), suffix=REMEMBERED)


def run(task: dict[str, Any], *, measure: Measure) -> tuple[bytes, dict[str, Any]]:
    """Build one kind.

    Args:
        task: "description" (`RegionSpec.to_dict`), "backend" (name), "key" (the graph's key),
            "card" (the number of its GPU; 0 without one), and "dump" (a folder for intermediate
            results, if a developer wants them).
        measure: held while kernels are measured on the GPU.

    Returns:
        The payload, and facts for the manifest: "weights", "work", "binary_bytes", "checks",
        "phases".

    Raises:
        BuildError: this process would build another graph than asked for, or lacks what the
            backend needs, the build failed, or the graph differs from eager; a final one where no
            build can succeed with this torch.
    """
    card = task.get("card", 0)
    with in_use(card) if is_gpu(task["description"]["device"]) else nullcontext():
        return _run(task, measure)


def _run(task: dict[str, Any], measure: Measure) -> tuple[bytes, dict[str, Any]]:
    description = RegionSpec.from_dict(task["description"])
    if description.packs:  # as in the server: the host was imported before the packs
        named_code(description.module)
    backend = backend_named(task["backend"])
    _check_requirements(backend, description.device)
    form = form_of(description.family, description.form, description.way)
    started = time.monotonic()
    with transplanted(description.packs) as guests:
        _check_key(task, description, form, guests)
        try:
            notebook = Notebook(task.get("dump"))
            return _build(description, form, backend, guests, measure, started, notebook)
        except Exception as error:
            # Nothing runs on a card that is not here.
            is_here = pretended() is None
            broken = backend.explain_failure(description.device) if is_here else None
            if broken is None:
                raise
            if broken.final:
                words = of("nothing_compiles", why=broken.reason)
                raise BuildError(words, remedy=broken.remedy, final=True) from error
            said = error.reason if isinstance(error, WarmgraphError) else error
            words = of("broke_here", error=said, why=broken.reason)
            raise BrokenWorkerError(words, remedy=broken.remedy) from error
        finally:
            if is_gpu(description.device):
                with contextlib.suppress(RuntimeError):  # a broken card has raised already
                    empty_cache()


def _check_requirements(backend: Compiler, device: str) -> None:
    """What the server has may be missing here."""
    unmet = next((each for each in backend.requirements(device) if not each.met), None)
    if unmet is not None:
        raise BuildError(unmet.reason, remedy=unmet.remedy, final=unmet.is_final)


def _build(
    description: RegionSpec,
    form: Any,
    backend: Compiler,
    guests: Guests,
    measure: Measure,
    started: float,
    notebook: Notebook,
) -> tuple[bytes, dict[str, Any]]:
    program = _export(description, form, guests)
    notebook.write("exported.txt", lambda: program.graph_module.print_readable(print_output=False))
    exported = time.monotonic()
    compiled = backend.compile(program, measure=measure)
    notebook.write("generated.py", lambda: compiled.source)
    built = time.monotonic()
    # For a card that is not here it is compared at its first call in each process, as any graph is.
    is_here = pretended() is None
    checks = checked(program, backend.load(compiled.payload)) if is_here else []
    facts = {
        **compiled.facts,
        "weights": [list(spec) for spec in program.weights],
        "work": program.work,
        "checks": checks,
        "phases": {
            "capture": round(exported - started, 3),
            "compile": round(built - exported, 3),
            "check": round(time.monotonic() - built, 3),
        },
    }
    return compiled.payload, facts


def _export(description: RegionSpec, form: Any, guests: Guests) -> Program:
    """Export a kind, and check that other packs' code in it can be part of a graph."""
    if not guests.any:
        return export(description, form)
    try:
        program = export(description, form)
    except BuildError as error:
        raise BuildError(guests.blame(error.reason)) from error
    smallest = program.example({s.name: s.minimum for s in description.symbols})
    guests.check_options(lambda: program.run(*smallest))
    return program


def _check_key(task: dict[str, Any], description: RegionSpec, form: Any, guests: Guests) -> None:
    """The key must be the same here, or this process sees another host or torch."""
    here = region_sources(form, description.module)
    if here != description.sources:
        changed = [
            n for n in {*here, *description.sources} if here.get(n) != description.sources.get(n)
        ]
        names = ", ".join(sorted(changed)[:3])
        if guests.any:
            raise BuildError(guests.blame(of("leaves_other_code", names=names)))
        raise BuildError(of("other_host_code", label=description.label, names=names))
    target = keys.target(description.device, backend_named(task["backend"]))
    if keys.graph_key(description, target) != task["key"]:
        raise BuildError(of("other_torch", target=target))
