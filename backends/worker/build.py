"""One build: a description goes in, a checked payload comes out. Runs in a worker process only."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from ..building.messages import REMEMBERED
from ..compilers import registry
from ..compilers.registry import backend_named
from ..contract import Compiler, Measure, RegionSpec
from ..device.gpu import empty_cache, in_use, is_gpu, pretended
from ..errors import BrokenWorkerError, BuildError, RequirementError, WarmgraphError
from ..families.catalogue import code_of
from ..host_api.process import import_host
from ..plans.region_code import RegionCode
from ..reasons import of
from ..torch_api import cuda_pretended, present
from .checks import checked
from .export import export

logger = logging.getLogger(__name__)


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
    started = time.monotonic()
    spec, backend = RegionSpec.from_dict(task["description"]), backend_named(task["backend"])
    on_card = in_use(task.get("card", 0)) if is_gpu(spec.device) else nullcontext()
    with on_card:
        unmet = next((each for each in backend.requirements(spec.device) if not each.met), None)
        if unmet is not None:  # the server has it
            raise BuildError(unmet.reason, remedy=unmet.remedy, final=unmet.is_final)
        code = code_of(spec)
        with code.in_place(), _explained(backend, spec.device):
            code.check(task["key"], backend)
            return _build(code, backend, measure, started, task.get("dump"))


@contextlib.contextmanager
def _explained(backend: Compiler, device: str) -> Iterator[None]:
    """Within this, a failure is told apart after which no build can succeed here."""
    is_here = pretended() is None  # nothing runs on a card that is not
    try:
        yield
    except Exception as error:
        broken = backend.explain_failure(device) if is_here else None
        if broken is None:
            raise
        if broken.final:
            words = of("nothing_compiles", why=broken.reason)
            raise BuildError(words, remedy=broken.remedy, final=True) from error
        said = error.reason if isinstance(error, WarmgraphError) else error
        words = of("broke_here", error=said, why=broken.reason)
        raise BrokenWorkerError(words, remedy=broken.remedy) from error
    finally:
        if is_gpu(device):
            with contextlib.suppress(RuntimeError):  # a broken card has raised already
                empty_cache()


def _build(
    code: RegionCode, backend: Compiler, measure: Measure, started: float, dump: str | None
) -> tuple[bytes, dict[str, Any]]:
    with code.blamed():
        program = export(code)
    code.check_packs(program)
    if dump is not None:
        _write(dump, "exported.txt", partial(program.graph_module.print_readable, False))
    exported = time.monotonic()
    compiled = backend.compile(program, measure=measure)
    if dump is not None:
        _write(dump, "generated.py", lambda: compiled.source)
    built = time.monotonic()
    # For a card that is not here it is compared at its first call in each process, as any graph is.
    checks = checked(program, backend.load(compiled.payload)) if pretended() is None else []
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


def _write(folder: str, name: str, make: Callable[[], str]) -> None:
    """Write down an intermediate result for a developer; on failure the build goes on."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / name).write_text(make(), "utf-8")
    except Exception as error:  # torch may fail at printing its own result
        logger.warning("%s could not be written into %s: %s", name, folder, error)
