"""What the host's models do in a call that a CUDA graph must not meet: reading from the GPU, which
waits for it, and copying to it from memory that is gone when the graph is replayed.

Run on fake tensors of a GPU, so that no GPU is needed; a newer host that adds one fails here.
"""

from __future__ import annotations

import contextlib
import traceback
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from warmgraph_backends.cuda_graphs.constants import Constants
from warmgraph_backends.families.catalogue import empty_inputs, may_be_captured
from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host

#: Small transformers, and the lines of the host that copy or read in a call of theirs.
FOUND = {
    "flux1": [],
    "flux2": [],
    "chroma": [],
    "zimage": [],
    "qwen": [],
    "krea": [],
    "wan": ["sinusoidal_embedding_1d copies"],  # a constant
    "wan_image": ["sinusoidal_embedding_1d copies"],
    "wan_5b": ["sinusoidal_embedding_1d copies"],
}

#: What else people's graphs put into a call, by the names of the forward's arguments: shapes of
#: tensors, lists of them, and plain values.
WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "flux1": {
        "references": {"ref_latents": [(1, 16, 8, 8), (1, 16, 6, 10)]},
        "references by index": {"ref_latents": [(1, 16, 8, 8)], "ref_latents_method": "index"},
        "references side by side": {"ref_latents": [(1, 16, 8, 8)], "ref_latents_method": "uxo"},
        "a mask": {"attention_mask": (1, 1, 272, 272)},
    },
    "flux2": {
        "references": {"ref_latents": [(1, 128, 4, 4), (1, 128, 6, 4)]},
        "references at no noise": {
            "ref_latents": [(1, 128, 4, 4)],
            "ref_latents_method": "index_timestep_zero",
        },
    },
    "chroma": {"a mask": {"attention_mask": (1, 1, 272, 272)}},
    "zimage": {
        "a mask": {"attention_mask": (1, 64)},
        "references": {"ref_latents": [(1, 16, 8, 8)], "ref_contexts": [(1, 32, 64)]},
    },
    "qwen": {
        "references": {"ref_latents": [(1, 16, 1, 8, 8), (1, 16, 1, 6, 10)]},
        "references by index": {"ref_latents": [(1, 16, 1, 8, 8)], "ref_latents_method": "index"},
        "layers": {"ref_latents": [(1, 16, 1, 8, 8)], "ref_latents_method": "negative_index"},
        "references at no noise": {
            "ref_latents": [(1, 16, 1, 8, 8)],
            "ref_latents_method": "index_timestep_zero",
        },
        "a mask": {"attention_mask": (1, 64)},
    },
    "krea": {
        "references": {"ref_latents": [(1, 16, 1, 8, 8)]},
        "a mask": {"attention_mask": (1, 64)},
    },
    "wan": {
        "frames beside": {"time_dim_concat": (1, 16, 1, 8, 8)},
        "context": {"context_latents": [(1, 16, 1, 8, 8), (1, 16, 1, 4, 4)]},
    },
}


class _Crossings(TorchDispatchMode):
    """Notes what goes from one device to the other."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            result = func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            self.found.append(f"{_host_function()} reads")
            raise
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        if tensors and isinstance(result, torch.Tensor):
            # A copy in place comes from what is copied, its second argument.
            source = tensors[-1] if func is torch.ops.aten.copy_.default else tensors[0]
            ways = (source.device.type, result.device.type)
            if func in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default):
                if ways == ("cpu", "cuda"):
                    self.found.append(f"{_host_function()} copies")
                elif ways == ("cuda", "cpu"):
                    self.found.append(f"{_host_function()} reads")
        if func is torch.ops.aten.nonzero.default:
            self.found.append(f"{_host_function()} reads")
        return result


class _Served(Constants):
    """Takes what a captured call copies from memory of its own for granted."""

    def kept(self, source: torch.Tensor, device: torch.device) -> torch.Tensor:
        return torch.empty(source.shape, dtype=source.dtype, device=device)


def _host_function() -> str:
    frames = [f for f in traceback.extract_stack() if "/comfy/" in f.filename.replace("\\", "/")]
    return frames[-1].name if frames else "torch"


def _made(value: Any) -> Any:
    """Empty tensors of a GPU in the place of shapes."""
    if isinstance(value, list):
        return [_made(each) for each in value]
    return torch.empty(value, device="cuda") if isinstance(value, tuple) else value


def crossings(kind: str, *, captured: bool = False, **more: Any) -> list[str]:
    """What crosses in one call of a small transformer on empty inputs, as it is or as a capture
    runs it.

    Args:
        more: arguments of its forward, tensors by their shapes.
    """
    serving = _Served(torch.empty(0)) if captured else contextlib.nullcontext()
    patcher = transformers.load(kind)
    settings, latent = transformers.KINDS[kind].settings, transformers.latent(kind, 8, 8)
    inputs = empty_inputs(patcher.model.diffusion_model, settings, tuple(latent["samples"].shape))
    assert inputs is not None
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        root = transformers.make(kind, device="cuda").diffusion_model
        x = torch.empty(latent["samples"].shape, device="cuda")
        given = {name: _made(value) for name, value in {**inputs, **more}.items()}
        if "c_concat" in given:
            x = torch.cat((x, given.pop("c_concat")), 1)
        context = given.pop("c_crossattn")
        with serving, _Crossings() as watch:
            root(x, torch.empty(1, device="cuda"), context=context, transformer_options={}, **given)
    return watch.found


@pytest.mark.parametrize("kind", FOUND)
def test_what_crosses_between_devices_in_a_call(host: Host, kind: str) -> None:
    assert crossings(kind) == FOUND[kind]


@pytest.mark.parametrize("kind", FOUND)
def test_nothing_crosses_in_a_captured_call(host: Host, kind: str) -> None:
    assert may_be_captured(transformers.load(kind).model.diffusion_model)
    assert crossings(kind, captured=True) == []


@pytest.mark.parametrize(
    ("kind", "way"), [(kind, way) for kind, ways in WAYS.items() for way in ways]
)
def test_nothing_crosses_in_what_people_add_to_a_captured_call(
    host: Host, kind: str, way: str
) -> None:
    assert crossings(kind, captured=True, **WAYS[kind][way]) == []


def test_a_read_is_seen(host: Host) -> None:
    with FakeTensorMode(), _Crossings() as watch:
        value = torch.zeros(2, device="cuda")
        value.cpu()
        torch.ones(2).to("cuda")
        with pytest.raises(DataDependentOutputException):
            value[0].item()
    assert watch.found == ["torch reads", "torch copies", "torch reads"]
