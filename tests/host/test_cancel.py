"""Cancel in the middle of a long compiled step, on a real server."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from warmgraph_tools.host import Graph, Server

from .test_nodes import _graph

#: What a user waits at most in a step of so many seconds: one region, of which the longest here
#: takes an eighth of the step. The host alone looks at its flag before each layer.
PATIENCE_S, STEP_S = 1.2, 6.0
#: Pixels and images at once.
SIDE, BATCH = 512, 16


def _prompt(checkpoint: str, *, seed: int, steps: int = 1) -> Graph:
    graph = _graph(checkpoint, seed=seed, when_missing="wait")
    graph["4"]["inputs"] = {"width": SIDE, "height": SIDE, "batch_size": BATCH}
    graph["5"]["inputs"].update(steps=steps, cfg=1.0)
    return graph


@pytest.mark.slow
def test_a_long_compiled_step_is_cancelled_at_once(
    start_server: Callable[..., Server], place_model: Callable[..., str]
) -> None:
    server = start_server(lend=0)
    checkpoint = place_model(server, "narrowxl")
    server.run(_prompt(checkpoint, seed=1))  # what is built is built, and compared
    whole = server.run(_prompt(checkpoint, seed=2)).seconds
    waited = []
    for share in (0.2, 0.5, 0.8):
        prompt = server.submit(_prompt(checkpoint, seed=3, steps=2))
        time.sleep(share * whole)
        begun = time.monotonic()
        server.post("/interrupt", {})
        entry = server.wait(prompt, 120)
        waited.append(time.monotonic() - begun)
        assert [event for event, _ in entry["status"]["messages"]][-1] == "execution_interrupted"
    assert max(waited) < PATIENCE_S * max(1.0, whole / STEP_S), (whole, waited)
    run = server.run(_prompt(checkpoint, seed=2))  # nothing is left of it
    [report] = server.model_reports(run)
    assert report["regions"]["eager"] == 0 and report["calls"]["eager"] == 0
    server.stop()
