"""A card that is not there: PyTorch and Triton are told of one, enough to describe a model and
compile its graphs. Nothing can be computed on it.

Only a process started for that is affected. Sources: torch/cuda/__init__.py,
torch/_dynamo/device_interface.py, torch/_inductor of torch 2.10-2.15; triton/runtime/driver.py of
Triton 3.6.
"""

from __future__ import annotations

import contextlib
import importlib
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from ..device.cards import CARDS, Card
from ..device.gpu import PRETENDED, pretended


def never_called(_arguments: list[Any]) -> NoReturn:
    """Replace a graph that was compiled for a card that is not there."""
    raise RuntimeError(f"nothing can be computed for {pretended()}, which is not in this machine")


def pretend(name: str) -> None:
    """Have this process believe in a card, for good. Call it before anything asks about cards.

    Args:
        name: of `device.cards.CARDS`.
    """
    if pretended() is not None:
        return
    importlib.import_module("torch._dynamo")  # first: it tells torch's functions apart
    card = CARDS[name]
    _tell_torch(card)
    _tell_inductor(card)


def _properties(card: Card) -> Any:
    major, minor = card.capability
    return SimpleNamespace(
        name=card.name,
        major=major,
        minor=minor,
        multi_processor_count=card.processors,
        total_memory=card.memory,
        max_threads_per_multi_processor=card.threads,
        regs_per_multiprocessor=1 << 16,
        warp_size=32,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=card.shared - 1024,  # which the system keeps
        shared_memory_per_multiprocessor=card.shared,
        gcnArchName="",
        L2_cache_size=card.cache,
    )


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _zero(*_: Any, **__: Any) -> int:
    return 0


class _NoGuard(contextlib.nullcontext[None]):
    def __init__(self, *_: Any) -> None:
        super().__init__()


def _set(owner: Any, **answers: Any) -> None:
    for name, answer in answers.items():
        setattr(owner, name, answer)


def _tell_torch(card: Card) -> None:
    properties = _properties(card)

    def card_of(*_: Any, **__: Any) -> Any:
        return properties

    setattr(card_of, PRETENDED, card.target)
    cuda: Any = torch.cuda
    _set(
        cuda,
        **dict.fromkeys(("get_device_properties", "_get_device_properties"), card_of),
        **dict.fromkeys(("current_device", "_exchange_device", "_maybe_exchange_device"), _zero),
        **dict.fromkeys(
            ("synchronize", "set_device", "_lazy_init", "empty_cache", "ipc_collect"), _nothing
        ),
        **dict.fromkeys(("device", "_DeviceGuard"), _NoGuard),
        is_available=lambda: True,
        device_count=lambda: 1,
        get_device_capability=lambda *_: card.capability,
        get_device_name=lambda *_: card.name,
        # Nothing is free: so weights stay in the machine's own memory.
        mem_get_info=lambda *_: (0, card.memory),
        memory_stats=lambda *_: dict.fromkeys(
            ("reserved_bytes.all.current", "active_bytes.all.current"), 0
        ),
        get_rng_state=lambda *_: torch.zeros(1),
        set_rng_state=_nothing,
    )
    _set(cuda.random, get_rng_state=cuda.get_rng_state, set_rng_state=_nothing)
    private: Any = torch._C
    private._ensureCUDADeviceGuardSet()  # else a fake tensor's device is looked for
    _set(private, _cuda_init=_nothing, _cuda_getCurrentRawStream=_zero)
    _set(private, _conv_determine_backend_memory_format=_kept_layout)


def _kept_layout(*given: Any) -> Any:
    """cuDNN's choice: channels-last stays so."""
    for tensor in given[:2]:
        layout = torch.channels_last_3d if tensor.dim() == 5 else torch.channels_last
        if tensor.is_contiguous(memory_format=layout) and not tensor.is_contiguous():
            return layout
    return torch.contiguous_format


def _tell_inductor(card: Card) -> None:
    """Tell Inductor and Triton."""
    import triton.runtime.driver as driver
    from torch._dynamo import device_interface
    from torch._inductor.fx_passes import joint_graph, post_grad
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder
    from torch._inductor.runtime import triton_helpers, triton_heuristics
    from torch._subclasses import fake_tensor
    from triton.backends.compiler import GPUTarget

    major, minor = card.capability
    number = 10 * major + minor
    interface: Any = device_interface.get_interface_for_device("cuda")
    properties = staticmethod(torch.cuda.get_device_properties)
    _set(
        interface,
        get_device_properties=properties,
        get_compute_capability=staticmethod(lambda *_: number),
        current_device=staticmethod(_zero),
        is_available=staticmethod(lambda: True),
        is_triton_capable=staticmethod(lambda *_: True),
        raise_if_triton_unavailable=staticmethod(_nothing),
        synchronize=staticmethod(_nothing),
    )
    _set(interface.Worker, get_device_properties=properties)
    _set(fake_tensor, init_gpu_context=_nothing)
    _set(fake_tensor.FakeTensorMode, avoid_device_init=True)
    # Their patterns are traced on the GPU; none of them is in a block that calls our attention.
    for module in (joint_graph, post_grad):
        _set(module, lazy_init=_nothing)
    # A constant would be made there, to look at it.
    _set(joint_graph, constant_fold_uniform_value=_nothing)
    folder: Any = UniformValueConstantFolder
    deduce = folder._deduce_value

    def deduced(self: Any, node: Any) -> Any:
        """A constant's value, unknown on the GPU."""
        try:
            return deduce(self, node)
        except RuntimeError:
            return self.unknown_value

    _set(folder, _deduce_value=deduced)
    _set(triton_helpers, set_driver_to_gpu=_nothing)
    tuner: Any = triton_heuristics.CachingAutotuner
    _set(tuner, _make_launchers=_first_configuration)
    active: Any = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", number, 32),
        get_current_device=_zero,
        get_active_torch_device=lambda: torch.device("cuda", 0),
        get_current_stream=_zero,
    )
    driver.set_active(active)


def _first_configuration(self: Any) -> None:
    """Choose a kernel's first configuration instead of timing them."""
    if not self.launchers:
        self.launchers = [SimpleNamespace(config=self.compile_results[0].config)]
