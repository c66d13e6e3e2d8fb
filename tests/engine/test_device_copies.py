"""What the host's models do in a call that a CUDA graph must not meet: reading from the GPU, which
waits for it, copying to it from memory that is gone when the graph is replayed, and keeping a
tensor beyond the call.

Run on fake tensors of a GPU, so that no GPU is needed; a newer host that adds one fails here.
"""

from __future__ import annotations

import contextlib
import gc
import traceback
import weakref
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from warmgraph_backends.cuda_graphs.constants import Constants
from warmgraph_backends.families.catalogue import empty_inputs, may_be_captured
from warmgraph_backends.runtime.placing import unmarked
from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host

from .rows import some_rows

#: Small transformers, and the functions of the host that copy, read or keep in a call of theirs.
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
    "sd3": [],
    "hunyuan": [],
    "hunyuan_15": [],
    "hunyuan_image": [],
    "cosmos": [],
    "predict2": ["_forward keeps"],  # on the root itself
    "predict2_video": ["_forward keeps"],
    "anima": ["_forward keeps"],
    "aura": ["timestep_embedding copies"],  # a constant
    "kandinsky": [],
    "omnigen": [],
    "ernie": [],
}

#: What a call takes besides its latent where no family says so.
INPUTS: dict[str, dict[str, Any]] = {
    "sd3": {"y": (1, 32)},
    "cosmos": {"fps": None},
    "kandinsky": {"c_concat": (1, 17, 1, 8, 8), "y": (1, 32)},
    "omnigen": {"num_tokens": 13},
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
    "sd3": {"residuals": {"control": {"output": [(1, 16, 256), None]}}},
    "hunyuan": {
        "a mask": {"attention_mask": (1, 256)},
        "a frame that guides": {"guiding_frame_index": (1,)},
        "a reference": {"ref_latent": (1, 16, 1, 8, 8)},
        "residuals": {"control": {"input": [(1, 16, 256)], "output": [(1, 16, 256)]}},
    },
    "hunyuan_15": {
        "words to write": {"txt_byt5": (1, 7, 1472)},
        "an image": {"clip_fea": (1, 729, 1152)},
    },
    "hunyuan_image": {"words to write": {"txt_byt5": (1, 7, 1472)}},
    "cosmos": {"a mask": {"attention_mask": (1, 13)}, "a rate": {"fps": 24.0}},
    "predict2": {"a mask and a rate": {"denoise_mask": (1, 1, 1, 8, 8), "fps": 24.0}},
    "kandinsky": {
        "a mask": {"attention_mask": (1, 13)},
        "a first frame": {"time_dim_replace": (1, 16, 1, 8, 8)},
    },
    "omnigen": {
        "a mask": {"attention_mask": (1, 13)},
        "references": {"ref_latents": [(1, 16, 8, 8), (1, 16, 6, 10)]},
    },
}


class _Crossings(TorchDispatchMode):
    """Notes what goes from one device to the other, and what is made."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._made: list[tuple[weakref.ref[torch.Tensor], str]] = []

    def kept(self) -> list[str]:
        """What made the tensors that are still there."""
        gc.collect()
        makers = {maker for tensor, maker in self._made if tensor() is not None}
        return [f"{maker} keeps" for maker in sorted(makers)]

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
        if isinstance(result, torch.Tensor):
            self._made.append((weakref.ref(result), _host_function()))
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
    if isinstance(value, dict):
        return {name: _made(each) for name, each in value.items()}
    return torch.empty(value, device="cuda") if isinstance(value, tuple) else value


def crossings(kind: str, *, captured: bool = False, **more: Any) -> list[str]:
    """What crosses in one call of a small transformer on empty inputs, and what that leaves behind,
    as it is or as a capture runs it.

    Args:
        more: arguments of its forward, tensors by their shapes.
    """
    serving = _Served(torch.empty(0)) if captured else contextlib.nullcontext()
    small, shape = transformers.KINDS[kind], transformers.latent(kind, 8, 8)["samples"].shape
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        root = _loaded(transformers.make(kind, device="cuda").diffusion_model)
        inputs = empty_inputs(root, small.settings, tuple(shape))
        if inputs is None:
            inputs = {"c_crossattn": (1, 13, small.text), **INPUTS.get(kind, {})}
        x = torch.empty(shape, device="cuda")
        given = {name: _made(value) for name, value in {**inputs, **more}.items()}
        if "c_concat" in given:
            x = torch.cat((x, given.pop("c_concat")), 1)
        context = given.pop("c_crossattn")
        time = torch.empty(1, device="cuda")
        keeping = unmarked(root) if captured else contextlib.nullcontext()
        with keeping, serving, _Crossings() as watch:
            root(x, time, context=context, transformer_options={}, **given)
        return watch.found + watch.kept()


def _loaded(root: Any) -> Any:
    """A model as the host leaves it: what was made on the CPU is on the GPU, too."""
    for module in root.modules():
        for table, make in ((module._parameters, torch.nn.Parameter), (module._buffers, _as_it_is)):
            for name, tensor in table.items():
                if tensor is not None and tensor.device.type == "cpu":
                    there = torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
                    table[name] = make(there)
    if getattr(root, "cond_type_embedding", None) is not None:
        # Brought over in each call: it is there, and fake parameters cannot be moved.
        root.cond_type_embedding.to = lambda device: root.cond_type_embedding
    return root


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@pytest.mark.parametrize("kind", some_rows(FOUND, [kind for kind in FOUND if FOUND[kind]]))
def test_what_crosses_between_devices_in_a_call(host: Host, kind: str) -> None:
    assert crossings(kind) == FOUND[kind]


@pytest.mark.parametrize("kind", FOUND)
def test_nothing_crosses_in_a_captured_call(host: Host, kind: str) -> None:
    with FakeTensorMode():
        assert may_be_captured(transformers.make(kind).diffusion_model)
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
