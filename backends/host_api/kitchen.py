"""The host's library of kernels, whose operators stay whole in a graph.

Relies on `comfy_kitchen`: `list_backends`, the choice of a backend per call (`registry.py`),
`int8_linear` and its kernel (`backends/cuda`), int8 weights (`tensor/int8.py`); and on the host's
fp8 layout (`comfy/quant_ops.py`).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils import dlpack

PACKAGE = "comfy_kitchen"

#: Its layouts whose parts are known here.
INT8_LAYOUT, FP8_LAYOUT = "TensorWiseINT8Layout", "TensorCoreFP8E4M3Layout"
#: By which its operators know a dtype.
_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class Int8Weight(NamedTuple):
    """An int8 weight of the library.

    Attributes:
        values: int8 [out, in].
        scale: float32, one per row or one for all.
        group: how many neighbours of a row were rotated together before quantising (ConvRot), or
            None.
    """

    values: torch.Tensor
    scale: torch.Tensor
    group: int | None


def int8_weight(weight: Any) -> Int8Weight | None:
    """Return the parts of such a weight, None for any other."""
    if getattr(weight, "_layout_cls", None) != INT8_LAYOUT:
        return None
    known = weight._params
    if getattr(known, "transposed", False):
        return None
    group = known.convrot_groupsize if getattr(known, "convrot", False) else None
    return Int8Weight(weight._qdata, known.scale, group)


#: `product(x, weight, bias)`, the input `[..., in]` and what it is multiplied by.
Int8Product = Callable[..., torch.Tensor]


def int8_product(
    x: torch.Tensor, weight: Int8Weight, bias: torch.Tensor | None, act: str = ""
) -> Int8Product:
    """Return what the library computes such a product with, for any such sizes and dtypes, without
    its dispatch at each call.

    Raises:
        RuntimeError: another version of the library, or nothing for these.
    """
    try:
        library: Any = importlib.import_module(f"{PACKAGE}.registry")
        given = _of_int8_linear(x, weight, bias, act)
        chosen = library.registry.get_implementation("int8_linear", kwargs=given)
        inspect.signature(chosen).bind(**given)
    except (ImportError, AttributeError, TypeError, LookupError, ValueError) as error:
        raise RuntimeError(f"{PACKAGE}'s int8 product is not the known one: {error}") from error

    def product(
        x: torch.Tensor, weight: Int8Weight, bias: torch.Tensor | None, act: str = ""
    ) -> torch.Tensor:
        result: torch.Tensor = chosen(**_of_int8_linear(x, weight, bias, act))
        return result

    return product


def _of_int8_linear(
    x: torch.Tensor, weight: Int8Weight, bias: torch.Tensor | None, act: str
) -> dict[str, Any]:
    given: dict[str, Any] = {
        "x": x.contiguous(),
        "weight": weight.values.contiguous(),
        "weight_scale": weight.scale,
        "bias": bias,
        "out_dtype": x.dtype,
    }
    if weight.group is not None:
        given.update(convrot=True, convrot_groupsize=weight.group)
    if act:
        given["input_act"] = act
    return given


@cache
def rounds_as_known(dtype: torch.dtype) -> bool:
    """Tell whether the host's fp8 layers round elementwise, by no scale if a file has none."""
    from comfy import quant_ops

    most = torch.finfo(dtype).max
    row = torch.tensor([[-2 * most, -0.3, 0.0, 1.0, 2 * most]])
    expected = row.clamp(-most, most).to(dtype)
    try:
        values, known = quant_ops.TensorCoreFP8E4M3Layout.quantize(row, scale=None)
        same = torch.equal(values.float(), expected.float())
        return same and rounded_input(values, known.scale, row.dtype)._params == known
    except (AttributeError, TypeError):
        return False


def rounded_input(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Any:
    """Return an fp8 layer's input as it is multiplied.

    Args:
        values: float8_e4m3fn [rows, in], the input by `scale`, rounded.
        scale: float32 [].
        dtype: of the input, and of the layer's result.
    """
    from comfy.quant_ops import QuantizedTensor, TensorCoreFP8E4M3Layout

    known = TensorCoreFP8E4M3Layout.Params(
        scale=scale, orig_dtype=dtype, orig_shape=tuple(values.shape)
    )
    return QuantizedTensor(values, TensorCoreFP8E4M3Layout.__name__, known)


def int8_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise `[rows, width]` as the library's products do: int8 rows, float32 scales `[rows, 1]`.

    Raises:
        RuntimeError: this version of the library has no such function, or not for these.
    """
    try:
        library: Any = importlib.import_module(f"{PACKAGE}.registry")
        given = {"x": rows, "stochastic_rounding": 0}
        chosen = library.registry.get_implementation("quantize_int8_rowwise", kwargs=given)
        values, scales = chosen(**given)
    except (ImportError, AttributeError, TypeError, LookupError, ValueError) as error:
        raise RuntimeError(f"{PACKAGE} quantises rows in another way: {error}") from error
    return values, scales


def multiply_int8_rows(
    rows: torch.Tensor,
    scales: torch.Tensor,
    values: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    stream: int,
) -> torch.Tensor:
    """Multiply int8 rows by an int8 weight, as the library's own product does.

    Args:
        rows: int8 [rows, in]; scales: float32 [rows, 1].
        values: int8 [out, in]; scale: float32, one per row or one for all.
        stream: the current one, as CUDA knows it.

    Returns:
        [rows, out] in `dtype`.

    Raises:
        RuntimeError: this version of the library has no such kernel, or not for these.
    """
    # Not by the tensor's own method, which first sees that nobody waits for another stream.
    export: Any = dlpack.to_dlpack  # type: ignore[attr-defined]
    product, as_added = _int8_rows_product()
    count = values.shape[0]
    result = rows.new_empty(rows.shape[0], count, dtype=dtype)
    if scale.numel() != count:
        scale = scale.reshape(-1).expand(count)
    of_rows = scale.to(torch.float32).contiguous()
    added = rows.new_empty(0, dtype=dtype) if bias is None else as_added(bias, rows.device, dtype)
    tensors = map(export, (rows, values.contiguous(), scales, of_rows, added, result))
    try:
        taken = product(*tensors, _CODES[dtype], stream)
    except TypeError as error:
        raise RuntimeError(f"{PACKAGE}'s int8 product is not the known one: {error}") from error
    if not taken:
        raise RuntimeError(f"{PACKAGE} does not multiply {list(rows.shape)} here")
    return result


@cache
def _int8_rows_product() -> tuple[Any, Callable[..., torch.Tensor]]:
    """The library's own int8 product, and what makes a bias as it reads it."""
    try:
        library: Any = importlib.import_module(f"{PACKAGE}.backends.cuda")
        product = library._C.cutlass_int8_dequant
    except (ImportError, AttributeError) as error:
        raise RuntimeError(f"{PACKAGE} has no int8 product of its own: {error}") from error
    # 0.2.40 reads it in the result's dtype, 0.2.31 in float32.
    return product, getattr(library, "_gemm_vector_arg", _float32_vector)


def _float32_vector(bias: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return bias.to(device=device, dtype=torch.float32).contiguous()


def multiply_rounded(
    values: torch.Tensor,
    scale: torch.Tensor,
    weight: Any,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Multiply an fp8 layer's rounded input by its weight, without the library's dispatch at each
    call.

    Args:
        values, scale, dtype: as of `rounded_input`.
        weight: [out, in], a tensor of the library's.

    Returns:
        [rows, out] in `dtype`.
    """
    product = _scaled_product()
    if product is not None and weight._layout_cls == FP8_LAYOUT and values.is_contiguous():
        try:
            of_weight = weight._params.scale
            result: torch.Tensor = product(
                values, weight._qdata.t(), scale, of_weight, bias=bias, out_dtype=dtype
            )
        except (RuntimeError, TypeError):  # the library then multiplies in full
            pass
        else:
            return result
    return torch.nn.functional.linear(rounded_input(values, scale, dtype), weight, bias)


@cache
def _scaled_product() -> Callable[..., torch.Tensor] | None:
    """The product of the library's fp8 layers; None if this version is unknown."""
    try:
        library: Any = importlib.import_module(f"{PACKAGE}.tensor.fp8")
        product: Callable[..., torch.Tensor] = library.scaled_mm_v2
        inspect.signature(product).bind(0, 0, 0, 0, bias=None, out_dtype=None)
    except (ImportError, AttributeError, TypeError):
        return None
    return product


def facts() -> str:
    """Return the library's version and available backends."""
    library = sys.modules.get(PACKAGE)
    if library is None:
        return "not there"
    backends = library.list_backends()
    enabled = sorted(n for n, b in backends.items() if b.get("available") and not b.get("disabled"))
    return f"{version()}: {', '.join(enabled)}"


def version() -> str:
    try:
        return importlib.metadata.version(PACKAGE.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return "of an unknown version"
