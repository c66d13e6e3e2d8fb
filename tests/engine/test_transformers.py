"""Diffusion transformers run compiled: the host's own blocks, any size, batch and text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from warmgraph_tools.inprocess import Host

from . import small_transformers as transformers
from .lab import TOLERANCE, Lab, Probe

SIZES = ((8, 8, 1, 13), (17, 31, 1, 300), (12, 10, 2, 1), (16, 16, 4, 77))


class Run:
    """A small transformer under a probe, with Compile Model inside the probe."""

    def __init__(self, host: Host, lab: Lab, kind: str) -> None:
        self.host, self.lab, self.kind = host, lab, kind
        self.probe = Probe()
        self.plain = self.probe.attach(transformers.load(kind))
        self.model = lab.compiled(self.plain)

    def sample(
        self,
        height: int = 8,
        width: int = 8,
        batch: int = 1,
        tokens: int = 13,
        *,
        model: Any = None,
        negative_tokens: int | None = None,
        cfg: float = 3.0,
    ) -> torch.Tensor:
        self.probe.calls.clear()
        result: torch.Tensor = self.host.sample(
            self.model if model is None else model,
            transformers.conditioning(self.kind, tokens),
            transformers.conditioning(self.kind, negative_tokens or tokens, seed=2),
            latent=transformers.latent(self.kind, height, width, batch=batch),
            steps=1,
            cfg=cfg,
            scheduler="simple",
        )
        assert result.isfinite().all()
        return result

    def check(self, *size: int, **options: Any) -> None:
        """Sample; every call was all compiled and the host's within tolerance, at no build."""
        engine = self.lab.engine
        jobs, before = self.lab.jobs(), engine.report(self.model)["calls"]
        self.sample(*size, **options)
        report = engine.report(self.model)
        assert self.lab.jobs() == jobs
        assert report["regions"]["eager"] == 0, report["eager"]
        assert report["calls"]["eager"] == before["eager"]
        compiled = report["calls"]["compiled"] - before["compiled"]
        assert compiled == len(self.probe.calls) * report["regions"]["total"] > 0
        assert max(call.error for call in self.probe.calls) <= TOLERANCE


# Flux 1 takes what Flux 2 takes but for its modulation; three builds more are for `--all`.
FAMILIES = ("flux2", "zimage", pytest.param("flux1", marks=pytest.mark.slow))


@pytest.fixture(scope="module", params=FAMILIES)
def run(host: Host, tmp_path_factory: pytest.TempPathFactory, request: Any) -> Any:
    lab = Lab(tmp_path_factory.mktemp("lab"))
    run = Run(host, lab, request.param)
    run.sample()
    yield run
    lab.engine.close()


def test_all_blocks_have_regions_of_few_kinds(run: Run) -> None:
    report = run.lab.engine.report(run.model)
    small = transformers.KINDS[run.kind]
    assert report["regions"] == {"total": small.places, "compiled": small.places, "eager": 0}
    assert len(report["kinds"]) == small.kinds == run.lab.jobs()


@pytest.mark.parametrize("size", SIZES)
def test_any_size_batch_and_text_runs_compiled_and_builds_nothing(
    run: Run, size: tuple[int, int, int, int]
) -> None:
    run.check(*size)


def test_two_prompts_of_two_lengths_run_compiled(run: Run) -> None:
    run.check(tokens=21, negative_tokens=5)


def test_what_acts_within_attention_leaves_the_blocks_to_the_host(run: Run) -> None:
    from comfy.ldm.modules.attention import attention_pytorch

    calls = []

    def override(func: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(func)
        return attention_pytorch(*args, **kwargs)

    clone = run.model.clone()
    clone.model_options["transformer_options"]["optimized_attention_override"] = override
    run.sample(model=clone)
    # Once for each block's attention; in eager's calls, which the probe holds beside them, as well.
    blocks = len(calls) // len(run.probe.calls)
    assert blocks == 2 * (transformers.KINDS[run.kind].places - 1)  # the last layer has none
    assert max(call.error for call in run.probe.calls) <= TOLERANCE
    reasons = {entry["reason"] for entry in run.lab.engine.report(clone)["eager"]}
    assert "another node overrides the attention function" in reasons
    run.check()


def test_a_fresh_engine_loads_what_was_built(run: Run, tmp_path: Path) -> None:
    lab = run.lab.copy_to(tmp_path)
    try:
        again = Run(run.host, lab, run.kind)
        again.check(10, 14, 2, 9)
        assert lab.jobs() == 0
    finally:
        lab.engine.close()
