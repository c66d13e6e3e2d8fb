"""The sorts of devices as data: what of Warmgraph works on each, and why the rest is off.

Another sort of card is a row here, and, for each ability that it has, what `gpu` must ask of
PyTorch for it. Importing this imports no PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

#: Types of devices as PyTorch names them; it calls AMD's cards "cuda", too, and is built for one of
#: the two.
CUDA, XPU, CPU = "cuda", "xpu", "cpu"
NVIDIA, AMD, INTEL = "NVIDIA", "AMD", "Intel"

QUEUE = "queue"
PACKED_KERNELS = "packed kernels"
CUDA_GRAPHS = "CUDA graphs"
NVRTC = "NVRTC"
CUDNN_ATTENTION = "cuDNN attention"
ABILITIES = (QUEUE, PACKED_KERNELS, CUDA_GRAPHS, NVRTC, CUDNN_ATTENTION)


@dataclass(frozen=True)
class DeviceKind:
    """A sort of device.

    Attributes:
        type: as PyTorch names it.
        vendor: who makes it; "" of a processor.
        off: why it lacks an ability, by the ability's name.
    """

    type: str
    vendor: str
    off: Mapping[str, str] = field(repr=False)

    @cached_property
    def has_queue(self) -> bool:
        """It has streams, events and its own memory: for us it is a GPU."""
        return QUEUE not in self.off

    @cached_property
    def has_packed_kernels(self) -> bool:
        """Triton's kernels are packed as its binaries, and launched without Triton."""
        return PACKED_KERNELS not in self.off

    @cached_property
    def has_cuda_graphs(self) -> bool:
        """Whole calls can be captured and replayed, and their memory freed."""
        return CUDA_GRAPHS not in self.off

    @cached_property
    def has_nvrtc(self) -> bool:
        """CUDA source is compiled at first use, and launched through its driver."""
        return NVRTC not in self.off

    @cached_property
    def has_cudnn_attention(self) -> bool:
        """PyTorch has cuDNN's attention for it."""
        return CUDNN_ATTENTION not in self.off


KINDS = (
    DeviceKind(CUDA, NVIDIA, {}),
    DeviceKind(
        CUDA,
        AMD,
        {
            PACKED_KERNELS: "torch_api.packing and loading know cubins, no code objects of AMD's",
            CUDA_GRAPHS: "cuda_graphs.driver asks libcuda for streams and a graph's memory",
            NVRTC: "torch_api.cuda_source compiles by NVRTC for sm_*, launches by cuLaunchKernel",
            CUDNN_ATTENTION: "cuDNN is NVIDIA's",
        },
    ),
    DeviceKind(
        XPU,
        INTEL,
        {
            QUEUE: "torch.xpu's streams, events and memory were never asked",
            PACKED_KERNELS: "torch_api.packing and loading know cubins, no SPIR-V",
            CUDA_GRAPHS: "cuda_graphs knows torch.cuda.CUDAGraph and libcuda alone",
            NVRTC: "torch_api.cuda_source compiles by NVRTC for sm_*, launches by cuLaunchKernel",
            CUDNN_ATTENTION: "cuDNN is NVIDIA's",
        },
    ),
)
#: Types of devices that are GPUs for us.
GPU_TYPES = frozenset(kind.type for kind in KINDS if kind.has_queue)


def other(type: str) -> DeviceKind:
    """Return the `DeviceKind` of an unknown device, such as the processor."""
    return DeviceKind(type, "", dict.fromkeys(ABILITIES, "it is no GPU that is known here"))
