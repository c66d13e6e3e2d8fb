"""Print what Inductor writes for a GPU, on a machine without one: which kernels a graph has, and
what lies in memory between them. Nothing is compiled and nothing runs.

    WARMGRAPH_HOST=TREE python dev/tools/gpu_code.py KIND FORM [--file FORMAT] [--learned] [--half]
        [--source]

KIND is of `small_transformers`, `h3_vae`, or at no place of a model: `int8_product` or
`packed_weight`. FORM is one of its family's forms, FORMAT of `quantised`. `--learned` takes
the same block as it is learned from a step. The process pretends to have one H100; it is of no
other use.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_CARD = "sm_90"

#: A transformer, too.
H3_VAE = "h3_vae"
#: In no model.
INT8_PRODUCT, PACKED_WEIGHT = "int8_product", "packed_weight"


class _WrittenError(BaseException):
    """Ends the compilation once the code is written."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the code, or the lines of its launches and of the buffers in float32."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind")
    parser.add_argument("form")
    parser.add_argument("--file", metavar="FORMAT", help="of a quantised file")
    parser.add_argument("--learned", action="store_true", help="as it is learned from a step")
    parser.add_argument("--half", action="store_true", help="in float16")
    parser.add_argument("--source", action="store_true", help="all of the code")
    options = parser.parse_args(argv)
    from by_path import load_ours  # this folder is a script's

    load_ours("backends", "tools")
    source = gpu_code(
        options.kind, options.form, options.file, learned=options.learned, half=options.half
    )
    print(source if options.source else "\n".join(summary(source)))
    return 0


def summary(source: str) -> list[str]:
    """The launches of kernels, calls of our operators, and what is kept in float32, in order."""
    lines = (line.strip() for line in source[source.index("def call(") :].splitlines())
    return [
        line
        for line in lines
        if ".run(" in line
        or "torch.ops.warmgraph" in line
        or ("empty_strided" in line and "float32" in line)
    ]


def gpu_code(
    kind: str,
    form: str,
    file: str | None = None,
    *,
    learned: bool = False,
    half: bool = False,
) -> str:
    """Return what Inductor writes for one form of a small model in bfloat16, or float16.

    Args:
        file: the format of its file, None where its weights are plain.
        learned: take the block of that form as it is learned from a step.

    Raises:
        ValueError: the family has no such form, or nothing is learned of its block.
    """
    from warmgraph_tools import inprocess

    tree = Path(os.environ.get("WARMGRAPH_HOST") or ROOT / ".host" / "0.30.0")
    host = inprocess.boot(tree, Path(tempfile.mkdtemp(prefix="warmgraph-code-")))
    import torch

    from warmgraph_backends.compilers.lowering import config_of, suited_to_device
    from warmgraph_backends.families import int8_product, packed_weight
    from warmgraph_backends.families.catalogue import code_of, plan_model
    from warmgraph_backends.learning.family import family_of
    from warmgraph_backends.plans.specs import describe_place
    from warmgraph_backends.torch_api import compiling
    from warmgraph_backends.worker.export import export

    found: list[str] = []
    dtype = torch.float16 if half else torch.bfloat16
    record = _record(host, kind, dtype) if learned else None  # by a step on the processor
    _pretend(found)
    if kind == INT8_PRODUCT:
        description = int8_product.describe(dtype, "cuda")
    elif kind == PACKED_WEIGHT:
        name, *dtypes = form.split()
        steps, dtype = (getattr(torch, each) for each in dtypes)
        description = packed_weight.describe(name, steps, dtype, "cuda")
    else:
        root = _root(kind, file, dtype)
        plan = plan_model(root)
        places = {place.form.name: place for place in plan.places}
        if form not in places:
            raise ValueError(f"form must be one of {', '.join(places)}, got {form}")
        if record is not None:
            plan, name = family_of(record).roots[record["root"]](root), places[form].name
            found_places = [place for place in plan.places if place.name == name]
            if not found_places:
                raise ValueError(f"{name} must be learned, got {record['outside']}")
            places[form] = found_places[0]
        description = describe_place(places[form], plan, dtype=dtype, device="cuda")
    program = export(code_of(description))
    try:
        compiling.compile_wrapper(
            program.graph_module, config_of(program), last_pass=suited_to_device(program)
        )
    except BaseException as error:
        if not found:
            raise RuntimeError(f"Inductor wrote nothing: {error}") from error
    return found[0]


def _record(host: Any, kind: str, dtype: Any) -> Any:
    """What is learned of a model that computes in this dtype."""
    from warmgraph_backends.learning.record import learn
    from warmgraph_tools.watched import lesson

    return learn(lesson(host, kind, dtype=dtype))


def _root(kind: str, file: str | None, dtype: Any) -> Any:
    """The module that is cut into regions."""
    from comfy import model_management

    from warmgraph_tools import small_transformers, small_vaes
    from warmgraph_tools.quantised import quantised

    if file is not None:
        model_management.SUPPORT_FP8_OPS = True  # as on an H200
    if kind == H3_VAE:
        weights = small_vaes.h3_weights()
        weights = weights if file is None else quantised(weights, file)
        return small_vaes.load_h3(weights, dtype=dtype).first_stage_model
    if file is None:
        return small_transformers.make(kind, dtype=dtype).diffusion_model
    return small_transformers.load_quantised(kind, file).model.diffusion_model


def _pretend(found: list[str]) -> None:
    """Have torch and Triton believe in a GPU as far as writing code asks for one.

    Args:
        found: takes the code.
    """
    from torch._inductor.codecache import PyCodeCache

    from warmgraph_backends.torch_api import cuda_pretended

    def write(code: Any, *_: Any, **__: Any) -> None:
        found.append(str(code))
        raise _WrittenError

    cuda_pretended.pretend(_CARD)
    PyCodeCache.write = write


if __name__ == "__main__":
    raise SystemExit(main())
