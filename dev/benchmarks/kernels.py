"""Where the GPU's time goes: kernels by class, as the profiler sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: A kernel belongs to the first class of which its name has a part.
CLASSES = {
    "attention": ("flash", "fmha", "attention", "sdpa"),
    "ours": ("triton_",),
    "quantisation": ("quantize", "quantise", "convrot"),
    "layout": ("nchwtonhwc", "nhwctonchw", "converttensor", "transpose"),
    "convolution": ("fprop", "conv", "vol2col", "cudnn"),
    "linear": ("gemm", "nvjet", "cutlass", "xmma", "splitk"),
    "copy": ("copy", "memcpy", "memset", "catarray", "aten::cat", "fill"),
    "reduction": ("reduce", "norm", "softmax"),
    "element-wise": ("elementwise", "upsample", "silu", "mul", "add", "div", "clamp"),
}
NAMED_KERNELS = 32


def kernel_times(run: Callable[[], Any]) -> dict[str, Any]:
    """Milliseconds of each class of kernel in one `run` after another one, and the longest kernels.

    On a CPU, where there are no kernels, operators stand for them.
    """
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    cuda = torch.cuda.is_available()
    activity = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    run()
    with profile(activities=[activity], acc_events=True) as profiler:
        run()
        if cuda:
            torch.cuda.synchronize()
    spent: dict[str, float] = {}
    counts: dict[str, int] = {}
    for event in profiler.events():
        if cuda and event.device_type != DeviceType.CUDA:
            continue
        microseconds = event.time_range.elapsed_us() if cuda else event.self_cpu_time_total
        spent[event.name] = spent.get(event.name, 0.0) + microseconds / 1000.0
        counts[event.name] = counts.get(event.name, 0) + 1
    total = sum(spent.values()) or float("nan")
    shares = dict.fromkeys((*CLASSES, "other"), 0.0)
    for name, ms in spent.items():
        shares[kernel_class(name)] += ms / total
    longest = sorted(spent, key=lambda name: -spent[name])[:NAMED_KERNELS]
    return {
        "kernel_ms": round(total, 2),
        "shares": {name: round(share, 4) for name, share in shares.items()},
        "longest": [
            [name[:160], round(spent[name], 3), counts[name], kernel_class(name)]
            for name in longest
        ],
    }


def kernel_class(name: str) -> str:
    """The class of a kernel by its name."""
    lower = name.lower()
    return next((c for c, parts in CLASSES.items() if any(p in lower for p in parts)), "other")
