"""Operators in the form in which they are traced equal torch's own."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from warmgraph_backends.compilers.replacements import gelu, group_norm
from warmgraph_backends.compilers.rewrites import takes, tracing
from warmgraph_backends.errors import BuildError
from warmgraph_backends.kinds.layout import CHANNELS_LAST, CONTIGUOUS
from warmgraph_backends.operators import host_attention
from warmgraph_backends.operators.call_context import using
from warmgraph_tools.inprocess import Host

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 2e-6}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(1, 32, 1, 2), (2, 64, 5, 7), (3, 320, 16, 9), (1, 96, 45, 1)])
@pytest.mark.parametrize("affine", [True, False])
def test_group_norm_is_as_near_to_the_truth_as_torchs(
    dtype: torch.dtype, shape: tuple[int, ...], affine: bool
) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=draw).mul(3).add(5).to(dtype)
    x = x.contiguous(memory_format=torch.channels_last)
    weight = torch.randn(shape[1], generator=draw).to(dtype) if affine else None
    bias = torch.randn(shape[1], generator=draw).to(dtype) if affine else None

    def norm(x: torch.Tensor, *parameters: torch.Tensor | None) -> torch.Tensor:
        return torch.nn.functional.group_norm(x, 32, *parameters, eps=1e-6)

    truth = norm(x.double(), *[p if p is None else p.double() for p in (weight, bias)])
    found = group_norm(x, 32, weight, bias, eps=1e-6)
    assert found.dtype is dtype and found.is_contiguous(memory_format=torch.channels_last)
    error = (found.double() - truth).norm() / truth.norm()
    assert error <= TOLERANCE[dtype]
    eager = (norm(x, weight, bias).double() - truth).norm() / truth.norm()
    assert error <= max(2 * eager, TOLERANCE[dtype] / 10)


def test_only_channels_last_images_are_traced_otherwise() -> None:
    def names(layout: str, x: torch.Tensor) -> set[str]:
        with tracing(layout), torch.no_grad():
            module = torch.nn.GroupNorm(4, 8)
            with torch.profiler.profile() as seen:
                module(x)
        return {event.name for event in seen.events()}

    image, sequence = torch.randn(1, 8, 3, 3), torch.randn(1, 8, 5)
    assert "aten::group_norm" not in names(CHANNELS_LAST, image)
    assert "aten::group_norm" in names(CHANNELS_LAST, sequence)
    assert "aten::group_norm" in names(CONTIGUOUS, image)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_gelu_by_tanh_is_as_near_to_the_truth_as_torchs(dtype: torch.dtype) -> None:
    """From where nothing is left of a number to where all is, in steps that the dtype has."""
    x = torch.linspace(-12, 12, 100_001).to(dtype)
    torchs = torch.nn.GELU(approximate="tanh")
    with tracing(CONTIGUOUS):
        found = torchs(x)
    assert torch.equal(found, gelu(x)) and found.dtype is dtype
    truth = torchs(x.double())
    error, eager = ((each.double() - truth).abs().max() for each in (found, torchs(x)))
    assert error <= 1.5 * eager


def test_gelu_by_erf_stays_torchs() -> None:
    x = torch.linspace(-3, 3, 101)
    with tracing(CONTIGUOUS):
        found = torch.nn.functional.gelu(x), torch.nn.functional.gelu(x, approximate="none")
    assert all(torch.equal(each, torch.nn.functional.gelu(x)) for each in found)


def test_what_replaces_an_operator_of_the_hosts_library_takes_all_that_it_takes(host: Host) -> None:
    import comfy_kitchen  # noqa: F401

    found = 0
    for name, ours in tracing(CONTIGUOUS).of_the_library.items():  # type: ignore[attr-defined]
        package, _, operator = name.partition(".")
        known = getattr(getattr(torch.ops, package), operator, None)
        if known is not None:  # an older library lacks some
            arguments = [each.name for each in known.default._schema.arguments]
            assert takes(ours, arguments, {}), (name, arguments)
            found += 1
    assert found >= 8


def test_an_operator_that_takes_more_is_called_as_it_is() -> None:
    with torch.library._scoped_library("warmgraph_test", "DEF") as library:
        library.define("grown(Tensor x, Tensor table, int more) -> Tensor")
        library.impl("grown", lambda x, table, more: x + more, "CPU")
        mode: Any = tracing(CONTIGUOUS)
        mode.of_the_library["warmgraph_test.grown"] = lambda x, table: x
        x = torch.zeros(2)
        with mode:
            assert torch.equal(torch.ops.warmgraph_test.grown(x, x, 3), torch.full((2,), 3.0))


def test_what_is_repeated_once_is_not_copied() -> None:
    x = torch.randn(2, 3, 4)
    with tracing(CONTIGUOUS):
        same = x.repeat(1, 1, 1), x.repeat((1, 1, 1))
        more = x.repeat(1, 2, 1), x.repeat(1, 1, 1, 1)
    assert all(each is x for each in same)
    assert [tuple(each.shape) for each in more] == [(2, 6, 4), (1, 2, 3, 4)]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("order", ["heads first", "rows first"])
def test_rotations_equal_the_hosts_library(host: Host, dtype: torch.dtype, order: str) -> None:
    kitchen = pytest.importorskip("comfy_kitchen")
    draw = torch.Generator().manual_seed(0)
    shape, places = (
        ((2, 3, 7, 16), (1, 1, 7)) if order == "heads first" else ((2, 7, 3, 16), (1, 7, 1))
    )
    query, key = (torch.randn(shape, generator=draw).to(dtype) for _ in range(2))
    table = torch.randn(*places, 8, 2, 2, generator=draw)
    scales = [torch.rand(16, generator=draw).to(dtype) for _ in range(2)]

    def results() -> list[torch.Tensor]:
        return [
            kitchen.apply_rope1(query, table),
            *kitchen.apply_rope(query, key, table),
            kitchen.rms_rope1(query, table, scales[0], 1e-5),
            *kitchen.rms_rope(query, key, table, *scales, 1e-5),
            *kitchen.rms_rope(query, key, table, scales[0]),
            *halves(),
        ]

    def halves() -> list[torch.Tensor]:
        if not hasattr(kitchen, "rms_rope_split_half"):
            return []
        found = [
            kitchen.rms_rope_split_half1(query, table, scales[0], 1e-5),
            *kitchen.rms_rope_split_half(query, key, table, *scales, 1e-5),
        ]
        if "rot_dim" in inspect.signature(kitchen.rms_rope_split_half).parameters:
            four = table[..., :4, :, :]
            found += kitchen.rms_rope_split_half(query, key, four, scales[0], rot_dim=8)
        return found

    with torch.profiler.profile() as seen:
        expected = results()
    assert any("rope" in event.name for event in seen.events())
    with tracing(CONTIGUOUS), torch.profiler.profile() as seen:
        found = results()
    assert not any("rope" in event.name for event in seen.events())
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype is dtype and mine.shape == theirs.shape
        assert (mine - theirs).float().norm() <= TOLERANCE[dtype] * theirs.float().norm()


def test_rows_that_the_host_joins_are_rotated_as_joined(host: Host) -> None:
    kitchen = pytest.importorskip("comfy_kitchen")
    draw = torch.Generator().manual_seed(0)
    parts = [torch.randn(2, 3, rows, 16, generator=draw) for rows in (4, 7)]
    table = torch.randn(2, 1, 11, 8, 2, 2, generator=draw)

    def results() -> list[torch.Tensor]:
        query, key = torch.cat(parts, dim=2), torch.cat(parts[::-1], 2)
        one_for_all = table[:, :, :1]
        rotated = kitchen.apply_rope(query, key, table)
        return [*rotated, kitchen.apply_rope1(query, one_for_all), key]

    expected = results()
    with tracing(CONTIGUOUS):
        found = results()
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
    assert found[0].transpose(1, 2).is_contiguous()


def test_keys_that_heads_share_reach_attention_as_they_are(host: Host) -> None:
    """The host repeats them for each head; a kernel that takes groups need not read copies."""
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(2, 6, 5, 16, generator=draw)
    key, value = (torch.randn(2, 2, 5, 16, generator=draw) for _ in range(2))
    seen: list[tuple[torch.Size, ...]] = []

    class Sees:
        def attend(
            self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **named: Any
        ) -> torch.Tensor:
            seen.append((query.shape, key.shape, value.shape))
            result: torch.Tensor = named["host"]()
            return result

    def attend() -> torch.Tensor:
        keys, values = (t.repeat_interleave(3, dim=1) for t in (key, value))
        return host_attention.opaque(None, query, keys, values, 6, skip_reshape=True)

    expected = attend()
    with tracing(CONTIGUOUS), using(choice=Sees()):
        found = attend()
    assert seen == [(query.shape, key.shape, value.shape)]
    torch.testing.assert_close(found, expected)


#: What blocks of the host's pass to attention beside queries, keys and values, and in what order
#: these come: SD2's precision, heads that share keys, a result with its heads first.
PASSED: list[dict[str, Any]] = [
    {"attn_precision": torch.float32},
    {"enable_gqa": True},
    {"enable_gqa": True, "skip_reshape": True},
    {"skip_reshape": True, "skip_output_reshape": True},
]


@pytest.mark.parametrize("passed", PASSED, ids=lambda passed: "-".join(passed))
def test_what_a_block_asks_of_attention_reaches_what_the_options_name(
    host: Host, passed: dict[str, Any]
) -> None:
    from comfy.ldm.modules import attention

    draw = torch.Generator().manual_seed(0)
    groups = 2 if passed.get("enable_gqa") else 6
    sizes = ((2, heads, 5, 16) for heads in (6, groups, groups))
    tensors = [torch.randn(size, generator=draw) for size in sizes]
    if not passed.get("skip_reshape"):
        tensors = [each.transpose(1, 2).flatten(2) for each in tensors]
    seen: list[dict[str, Any]] = []

    def override(function: Any, *args: Any, **named: Any) -> Any:
        seen.append({name: named[name] for name in named.keys() & passed.keys()})
        return 2 * function(*args, **named)

    expected = 2 * attention.attention_pytorch(*tensors, 6, **passed)
    with using(options={"optimized_attention_override": override}, arguments={}):
        found = host_attention.opaque(None, *tensors, 6, **passed)
    assert seen == [passed]
    torch.testing.assert_close(found, expected)


def test_an_attention_that_no_graph_knows_is_named(host: Host) -> None:
    rows = torch.zeros(1, 4, 32)
    with pytest.raises(BuildError, match="attention is called with scale, which"):
        host_attention.opaque(None, rows, rows, rows, 2, scale=3.0)
