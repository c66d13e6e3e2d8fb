"""What overflows in float16 is bounded on a real GPU as eager bounds it there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from warmgraph_backends.kernels import rounding
from warmgraph_backends.target.compiler_options import ROUNDING_CONFIG
from warmgraph_backends.torch_api import tracing
from warmgraph_tools.overflowing_expressions import EXPRESSIONS, Region, cases

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]
#: How far a call may be from the host's.
TOLERANCE = 1e-2


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_an_overflow_is_bounded_as_eager_bounds_it(name: str, loaded: Any) -> None:
    rows = torch.export.Dim("rows", min=2, max=1024)
    given = cases("cuda")
    region = Region(EXPRESSIONS[name])
    with torch.no_grad(), tracing.size_oblivious():
        program = torch.export.export(
            region, tuple(given["sound"]), dynamic_shapes=3 * ({0: rows},)
        )
    assert rounding.may_bound_overflows(program.graph)
    call, _ = loaded(
        program.graph_module,
        given["sound"],
        settings=ROUNDING_CONFIG,
        last_pass=rounding.round_all,
    )
    for case, inputs in given.items():
        (found,), (wanted,) = call([each.clone() for each in inputs]), region(*inputs)
        torch.testing.assert_close(
            found,
            wanted,
            rtol=2e-3,
            atol=0,
            equal_nan=True,
            msg=lambda text, case=case: f"{case}: {text}",
        )


def test_small_models_that_overflow_are_the_hosts_and_compiled(lab: Any) -> None:
    """At a graph's first calls, and after those of a sound model."""
    kinds = ["zimage", "flux2"]
    result = lab.run(
        "half_overflow",
        limit_s=400,
        bounded=kinds,
        others=["wan"],
        store=lab.store("half-overflow"),
        workers=6,
    )
    for row in result["rows"]:
        assert row["error"] <= TOLERANCE, row
        bounded = row["kind"] in kinds or not row["overflows"]
        assert (row["not_finite"] == 0) is bounded, row
    for kind, regions in result["regions"].items():
        assert regions["eager"] == regions["calls_eager"] == 0, kind
        assert regions["compiled"] > 0, kind
