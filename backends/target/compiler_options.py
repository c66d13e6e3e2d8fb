"""The options of backend `inductor`, as plain data, without importing PyTorch."""

from __future__ import annotations

from typing import Any

from ..device.kinds import CPU
from .instructions import instructions
from .own_code import own_fingerprint

#: Inductor's settings for a region: one graph for any size, weights as inputs, no search, no CUDA
#: graphs of its own; sizes are checked by our own dispatch (`runtime.region`).
CONFIG: dict[str, Any] = {
    "assume_32bit_indexing": True,
    "size_asserts": False,
    "alignment_asserts": False,
    "scalar_asserts": False,
    "comment_origin": False,
    "triton.autotune_at_compile_time": False,
    "triton.cudagraphs": False,
}
#: What graphs for processors are compiled with besides.
CPU_CONFIG: dict[str, Any] = {
    # Else each loop runs on as many threads as the process had that compiled it.
    "cpp.dynamic_threads": True,
    # How finely loops are cut; each runs on as many threads as the process has that calls it.
    "cpp.threads": 16,
}
#: What graphs over channels-last tensors are compiled with besides `CONFIG`.
CHANNELS_LAST_CONFIG: dict[str, Any] = {
    # Inductor's own choice is never to lay out a convolution whose sizes are symbols.
    "force_layout_optimization": True,
    # A norm summed by channel reads its input often enough that Inductor would write the input
    # out once more, in float32: a fifth of the decoder's peak.
    "realize_acc_reads_threshold": 32,
    # Of frames and borders that a region picks, the index is made here and right.
    "assert_indirect_indexing": False,
}
#: What graphs are compiled with besides in which an overflow of float16 may become finite again:
#: every operator rounds what it gives, as eager does, and none is merged with another one.
ROUNDING_CONFIG: dict[str, Any] = {
    "emulate_precision_casts": True,
    # Its patterns drop conversions to float16 and back, and add to products that are not rounded.
    "pattern_matcher": False,
}
#: Rows of up to this many elements are read once and reduced in registers, not in a loop that reads
#: them twice; Inductor's own limit, 1024, leaves a norm over 1280 channels at half the speed, and a
#: modulated one over the 3072 of Flux at 39 us instead of 18 (H200).
PERSISTENT_ROW = 8192
#: The same where what follows does not read the row in its order: rotations over the 5120 of Wan
#: 14B take 0.44 ms that way and 0.25 in a loop.
PERSISTENT_ANY = 2048
#: The fact that names our own code that makes graphs, by its fingerprint.
OWN_CODE = "warmgraph"
#: Facts that only another version of Warmgraph says differently; `payload`, a number, was the
#: fingerprint in older graph files.
OURS = frozenset(
    (
        OWN_CODE,
        "options",
        "channels_last",
        "rounding",
        "persistent_row",
        "persistent_any",
        "payload",
    )
)
#: The fact that names a processor's instructions; older files of graphs for processors lack it.
INSTRUCTIONS = "instructions"


def base_config(device: str) -> dict[str, Any]:
    """Return the settings of every graph for a device's type."""
    return {**CONFIG, **CPU_CONFIG} if device == CPU else dict(CONFIG)


def inductor_fingerprint(device: str, triton: str | None) -> dict[str, Any]:
    """Return the versions, options, instructions and our own code that change what `inductor`
    generates.

    Args:
        device: its type, as PyTorch names it.
        triton: Triton's version, which counts on GPUs.
    """
    facts: dict[str, Any] = {
        OWN_CODE: own_fingerprint(device),
        "options": dict(sorted(base_config(device).items())),
        "channels_last": CHANNELS_LAST_CONFIG,
        "rounding": ROUNDING_CONFIG,
        "persistent_row": PERSISTENT_ROW,
        "persistent_any": PERSISTENT_ANY,
    }
    if device == CPU:
        facts[INSTRUCTIONS] = instructions()
    else:
        facts["triton"] = triton
    return facts
