"""Which functions of packs a CUDA graph may hold: those that keep nothing and read no step."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from warmgraph_backends.code.steady import Steady, steady
from warmgraph_tools.inprocess import Host

#: A pack's module, as packs write it.
PACK = """
import torch
import comfy.ldm.modules.attention as host

def kernel_by(mode):
    def kernel(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=mode)
    return kernel

def override_by(mode):
    kernel = kernel_by(mode)
    @host.wrap_attn
    def attention(q, k, v, heads, mask=None, **kwargs):
        if mask is not None:
            return host.attention_pytorch(q, k, v, heads, mask=mask, **kwargs)
        return kernel(q, k, v)
    def override(func, *args, **kwargs):
        return attention.__wrapped__(*args, **kwargs)
    return override

def of_the_hosts(func, *args, **kwargs):
    return host.attention_sub_quad(*args, **kwargs)

def warning_once():
    warned = {}
    def override(func, *args, **kwargs):
        if "mask" not in warned:
            warned["mask"] = True
        return func(*args, **kwargs)
    return override

def counting():
    count = 0
    def override(func, *args, **kwargs):
        nonlocal count
        count += 1
        return func(*args, **kwargs)
    return override

def reading(func, *args, **kwargs):
    if kwargs["transformer_options"]["sigmas"][0] > 5:
        return func(*args, **kwargs)
    return host.attention_sub_quad(*args, **kwargs)

def keeping_inside():
    kept = counting()
    def override(func, *args, **kwargs):
        return kept(func, *args, **kwargs)
    return override

class Attends:
    def __call__(self, func, *args, **kwargs):
        return func(*args, **kwargs)
"""


@pytest.fixture
def pack(host: Host) -> Any:
    module = types.ModuleType("a_pack")
    exec(compile(PACK, "/packs/a_pack.py", "exec"), vars(module))  # noqa: S102
    return module


@pytest.mark.parametrize(
    "make", [lambda p: p.override_by(0.5), lambda p: p.of_the_hosts], ids=["kernel", "the host's"]
)
def test_what_only_calls_kernels_is_steady(pack: Any, make: Callable[[Any], Any]) -> None:
    assert steady(make(pack)).why_not is None


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda p: p.warning_once(), "reads warned, which may change"),
        (lambda p: p.counting(), "keeps count from call to call"),
        (lambda p: p.keeping_inside(), "keeps count from call to call"),
        (lambda p: p.reading, "reads the step's options"),
        (lambda p: p.Attends(), "calls code that is not known"),
        (lambda p: 5, "calls code that is not known"),
    ],
    ids=["a closure's table", "a counter", "one that it calls", "options", "an object", "a number"],
)
def test_what_keeps_or_reads_anything_is_not(
    pack: Any, make: Callable[[Any], Any], why: str
) -> None:
    assert steady(make(pack)).why_not == why


def test_functions_are_told_apart_by_what_they_hold(pack: Any) -> None:
    def name(function: Any) -> Any:
        found = steady(function)
        assert isinstance(found, Steady) and found.why_not is None
        return found.name

    assert name(pack.override_by(0.5)) == name(pack.override_by(0.5)), "made anew by a node"
    assert name(pack.override_by(0.5)) != name(pack.override_by(0.25))
    assert name(pack.override_by(0.5)) != name(pack.of_the_hosts)


def test_one_whose_cell_was_changed_is_looked_at_anew(pack: Any) -> None:
    function = pack.override_by(0.5)
    before = steady(function).name
    attention = function.__closure__[0].cell_contents.__wrapped__
    cell = next(c for c in attention.__closure__ if c.cell_contents.__name__ == "kernel")
    cell.cell_contents = pack.kernel_by(0.25)
    assert steady(function).name not in (before, ()) and steady(function).why_not is None


def test_the_hosts_own_attention_is_steady(host: Host) -> None:
    from comfy.ldm.modules import attention

    for name in ("attention_pytorch", "attention_sub_quad", "attention_basic", "attention_split"):
        assert steady(getattr(attention, name)).why_not is None
    assert steady(torch.nn.functional.scaled_dot_product_attention).why_not is None
