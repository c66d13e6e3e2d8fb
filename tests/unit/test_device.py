"""The seam to devices: what each sort can do is one row, and all that asks goes by it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from warmgraph_backends.choices import attention_choice, int8_products
from warmgraph_backends.compilers.registry import resolve_backend
from warmgraph_backends.device import gpu, kinds
from warmgraph_backends.errors import RequirementError
from warmgraph_backends.operators import head_rotation

PROPERTIES = {
    kinds.QUEUE: "has_queue",
    kinds.PACKED_KERNELS: "has_packed_kernels",
    kinds.CUDA_GRAPHS: "has_cuda_graphs",
    kinds.NVRTC: "has_nvrtc",
    kinds.CUDNN_ATTENTION: "has_cudnn_attention",
}
BuiltFor = Callable[..., None]


@pytest.fixture
def built_for(monkeypatch: pytest.MonkeyPatch) -> Iterator[BuiltFor]:
    """`built_for(cuda=None, hip=None)`: a PyTorch that was built for that, on a card of its own."""

    def built(*, cuda: str | None = None, hip: str | None = None) -> None:
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(cuda or hip))

    yield built
    gpu._kind.cache_clear()


def test_each_row_says_why_what_is_off_is_off() -> None:
    assert set(PROPERTIES) == set(kinds.ABILITIES)
    assert len({(kind.type, kind.vendor) for kind in kinds.KINDS}) == len(kinds.KINDS)
    for kind in (*kinds.KINDS, kinds.other("mps")):
        assert set(kind.off) <= set(kinds.ABILITIES)
        for ability, name in PROPERTIES.items():
            assert getattr(kind, name) is (ability not in kind.off)
            assert ability not in kind.off or len(kind.off[ability].split()) > 2
    assert not any(getattr(gpu.kind_of("cpu"), name) for name in PROPERTIES.values())


@pytest.mark.parametrize(
    ("versions", "vendor", "toolkit"),
    [({"cuda": "13.0"}, "NVIDIA", "13.0"), ({"hip": "6.4.4"}, "AMD", "6.4.4"), ({}, "", None)],
)
def test_a_card_is_what_pytorch_was_built_for(
    built_for: BuiltFor, versions: dict[str, str], vendor: str, toolkit: str | None
) -> None:
    built_for(**versions)
    for device in ("cuda", torch.device("cuda"), torch.device("cuda", 1)):
        assert gpu.kind_of(device).vendor == vendor and gpu.is_gpu(device)
    assert gpu.toolkit() == toolkit
    assert gpu.is_there() is bool(versions) and gpu.is_there("cpu")
    assert gpu.compiled_for() == ("cuda" if vendor == "NVIDIA" else "cpu")


def test_an_amd_card_gets_what_its_row_has_and_no_more(
    built_for: BuiltFor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything that is asked before something of CUDA's is used says no."""
    with FakeTensorMode():  # before it is asked whether there is a card
        rows = torch.empty(1, 4096, 24, 128, dtype=torch.bfloat16, device="cuda")
        table = torch.empty(1, 4096, 1, 64, 2, 2, device="cuda")
        joint = rows.view(1, 4096, -1)
    built_for(cuda="13.0")
    assert head_rotation.is_for(rows, rows, table) and int8_products._is_open(joint)
    built_for(hip="6.4.4")
    assert not head_rotation.is_for(rows, rows, table) and not int8_products._is_open(joint)
    assert not attention_choice._is_open(rows)
    resolution = resolve_backend("auto", "cuda")
    assert resolution.backend.name == "eager" and "runs on NVIDIA GPUs so far" in str(resolution)

    def row(kind: kinds.DeviceKind) -> kinds.DeviceKind:
        off = {name: why for name, why in kind.off.items() if name != kinds.PACKED_KERNELS}
        return dataclasses.replace(kind, off=off) if kind.vendor == "AMD" else kind

    monkeypatch.setattr(gpu, "KINDS", tuple(map(row, kinds.KINDS)))
    gpu._kind.cache_clear()
    assert gpu.compiled_for() == "cuda"
    assert resolve_backend("auto", "cuda").backend.name == "inductor"


def test_nothing_of_a_card_without_a_known_queue_is_asked() -> None:
    """Another's streams, events and random numbers are left alone."""
    for device in (torch.device("xpu"), torch.device("cpu"), torch.device("mps")):
        assert not gpu.is_gpu(device) and not gpu.is_capturing(device)
        assert gpu.mark(device) is None and gpu.is_passed(None)
        assert gpu.seconds_between(None, None) == 0.0
        assert len(gpu.random_states(device)) == 1
    assert gpu.kind_of("xpu").vendor == "Intel" and not gpu.is_there("xpu")
    with pytest.raises(RequirementError, match="does not run on xpu"):
        resolve_backend("inductor", "xpu")
