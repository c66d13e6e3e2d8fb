"""Images are joined as `torch.cat` joins them: the same bits, sizes and strides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from warmgraph_backends.cuda_graphs.skip_joins import QuickJoins


class _Cats(TorchDispatchMode):
    """Notes the dtype in which tensors are joined."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.cat.default:
            self.dtypes.append(args[0][0].dtype)
        return func(*args, **(kwargs or {}))


def _image(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    image = torch.randn(shape).to(dtype)
    return image.contiguous(memory_format=torch.channels_last)


def _joined(tensors: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, list[torch.dtype]]:
    with _Cats() as cats, QuickJoins():
        return torch.cat(tensors, *args, **kwargs), cats.dtypes


def _is_cat(found: torch.Tensor, tensors: Any, dim: int = 1) -> None:
    expected = torch.cat(tensors, dim)
    assert found.dtype is expected.dtype and found.shape == expected.shape
    assert found.stride() == expected.stride()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_channels_last_images_are_joined_in_wide_elements(dtype: torch.dtype, batch: int) -> None:
    images = [_image(batch, channels, 5, 7, dtype=dtype) for channels in (24, 8, 16)]
    found, dtypes = _joined(images, dim=1)
    _is_cat(found, images)
    assert dtypes == [torch.complex128]
    found.add_(1)
    assert not torch.equal(found[:, :24], images[0]), "the result is a tensor of its own"


@pytest.mark.parametrize(
    "tensors",
    [
        [_image(2, 20, 4, 4), _image(2, 8, 4, 4)],  # 40 bytes of channels
        [torch.randn(2, 8, 4, 4), torch.randn(2, 8, 4, 4)],
        [_image(2, 8, 4, 4), torch.randn(2, 8, 4, 4).half()],
        [_image(2, 8, 4, 4), _image(2, 8, 4, 4, dtype=torch.float32)],
        [_image(2, 9, 4, 4)[:, 1:], _image(2, 8, 4, 4)],
        [_image(2, 8, 1, 1), _image(2, 8, 1, 1)],
        [torch.randn(160).half().as_strided((1, 8, 4, 4), (7, 1, 32, 8)), _image(1, 8, 4, 4)],
        [_image(2, 8, 4, 4)],
        [torch.nn.Parameter(_image(2, 8, 4, 4), False), _image(2, 8, 4, 4)],
    ],
    ids=["odd", "contiguous", "mixed", "dtypes", "slice", "pixel", "stride", "one", "parameter"],
)
def test_anything_else_is_torchs(tensors: list[torch.Tensor]) -> None:
    found, dtypes = _joined(tensors, 1)
    _is_cat(found, tensors)
    assert torch.complex128 not in dtypes


def test_other_dimensions_and_options_are_torchs() -> None:
    images = [_image(2, 8, 4, 4), _image(2, 8, 4, 4)]
    for dim in (0, 2, -3):
        found, dtypes = _joined(images, dim)
        _is_cat(found, images, dim)
        assert dtypes == [torch.float16]
    out = torch.empty(2, 16, 4, 4, dtype=torch.float16)
    _joined(images, 1, out=out)
    assert torch.equal(out, torch.cat(images, 1))


def test_nothing_is_changed_afterwards() -> None:
    images = [_image(2, 8, 4, 4), _image(2, 8, 4, 4)]
    with QuickJoins():
        pass
    with _Cats() as cats:
        torch.cat(images, 1)
    assert cats.dtypes == [torch.float16]
