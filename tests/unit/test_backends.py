"""The resolver of backends: the first that can, an explicit one never falls back, reasons kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from warmgraph_backends.compilers.registry import CHOICES, COMPILERS, backend_named, resolve_backend
from warmgraph_backends.errors import BuildError, GraphFileError, RequirementError


def test_auto_takes_inductor_where_it_can_and_eager_is_last() -> None:
    resolution = resolve_backend("auto", "cpu")
    assert resolution.backend.name == "inductor" and resolution.refused == ()
    assert COMPILERS[-1].name == "eager" and CHOICES == ("auto", "inductor", "eager")


@pytest.mark.parametrize("device", ["mps", "xpu", "privateuseone"])
def test_another_device_gets_eager_with_the_reason(device: str) -> None:
    resolution = resolve_backend("auto", device)
    assert resolution.backend.name == "eager"
    assert resolution.refused == (
        f"backend inductor: this backend does not run on {device}; use an NVIDIA GPU",
    )
    with pytest.raises(RequirementError, match=f"does not run on {device}"):
        resolve_backend("inductor", device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu_gets_eager_with_the_reason() -> None:
    resolution = resolve_backend("auto", "cuda")
    assert resolution.backend.name == "eager"
    assert "NVIDIA" in resolution.refused[0]


def test_a_missing_compiler_is_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    inductor = backend_named("inductor")
    unmet = [r for r in inductor.needs_to_build("cpu") if not r.met]
    assert [r.name for r in unmet] == ["C++ compiler"]
    assert "g++" in unmet[0].reason or "cl" in unmet[0].reason
    assert resolve_backend("inductor", "cpu").backend is inductor, "what is built can be loaded"


def test_an_unknown_backend_lists_the_names() -> None:
    with pytest.raises(RequirementError, match="one of inductor, eager, got 'tensorrt'"):
        resolve_backend("tensorrt", "cpu")


def test_every_unmet_requirement_says_what_to_do() -> None:
    for backend in COMPILERS:
        for device in ("cpu", "cuda", "mps"):
            for requirement in backend.requirements(device):
                assert requirement.met or (requirement.reason and requirement.remedy)


def test_eager_is_always_there_and_has_no_graphs() -> None:
    eager = backend_named("eager")
    assert eager.requirements("anything") == () and eager.fingerprint("cpu") == {}
    with pytest.raises(BuildError, match="compiles nothing"):
        eager.compile(None, measure=lambda: pytest.fail("never measured"))
    with pytest.raises(GraphFileError, match="compiles nothing"):
        eager.load(b"")
