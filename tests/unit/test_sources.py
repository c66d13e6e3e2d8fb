"""What a region runs through is in its fingerprint: all of it that counts, and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from warmgraph_backends.code.sources import attributes_read, fingerprint
from warmgraph_backends.code.watch import Watch
from warmgraph_backends.families import spatial
from warmgraph_tools import by_path
from warmgraph_tools.inprocess import Host

Load = Callable[..., ModuleType]

#: A little host: one class, reached helpers of every sort, and some that nothing reaches.
CODE = '''
import functools

import torch

SCALE = 2.0
UNREAD = 1
SHAPES = (1, 2)

class Helper:
    BIAS = 0.5

    @staticmethod
    def shift(x, *, by=1.0):
        return x + by * Helper.BIAS

def wrap(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)
    return wrapper

def deep(x):
    """Words about deep."""
    return x * SCALE

@wrap
def chosen(x):
    return deep(x)

def other(x):
    return deep(x) - 1

def unreached(x):
    return x

class Base(torch.nn.Module):
    def forward(self, x):
        return x + len(SHAPES)

class Child(Base):
    factor = 3

    def step(self, x):
        try:
            return Helper.shift(x) * self.factor
        except ValueError:
            return x

    @property
    def twice(self):
        return 2

    def forward(self, x):
        return chosen(self.step(super().forward(x))) * self.twice
'''


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Import CODE with some text replaced, from a file of its own, as module "sample"."""
    count = 0

    def load(old: str = "", new: str = "", *, code: str = CODE) -> ModuleType:
        nonlocal count
        count += 1
        assert old in code
        path = tmp_path / str(count) / "sample.py"
        path.parent.mkdir()
        path.write_text(code.replace(old, new) if old else code, "utf-8")
        monkeypatch.setitem(sys.modules, "sample", ModuleType("sample"))  # gone afterwards
        return by_path.load("sample", path)

    return load


def prints(module: Any) -> dict[str, str]:
    return fingerprint([], [module.Child])


CHANGES = {
    "the forward itself": ("* self.twice", "+ self.twice"),
    "a method that it names": ("return Helper.shift(x) *", "return Helper.shift(x) +"),
    "the parent's forward behind super()": ("x + len(SHAPES)", "x - len(SHAPES)"),
    "a property": ("return 2\n", "return 3\n"),
    "a plain class attribute": ("factor = 3", "factor = 4"),
    "a function behind two others": ("return x * SCALE", "return x / SCALE"),
    "a decorator around a function": ("return function(*args)", "return function(*args) + 0"),
    "the function inside a decorator": ("return deep(x)\n", "return deep(x) + 1\n"),
    "a global number": ("SCALE = 2.0", "SCALE = 2.5"),
    "a global tuple": ("SHAPES = (1, 2)", "SHAPES = (1, 2, 3)"),
    "a method of another class": ("x + by * Helper.BIAS", "x - by * Helper.BIAS"),
    "a constant of another class": ("BIAS = 0.5", "BIAS = 0.25"),
    "a keyword's default": ("by=1.0", "by=2.0"),
    "what an exception handler does": ("except ValueError", "except TypeError"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_code_changes_the_fingerprint(load: Load, change: str) -> None:
    assert prints(load()) != prints(load(*CHANGES[change]))


def test_a_layer_of_ours_that_a_form_puts_into_a_block_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reference = spatial.Exit.reference
    before = fingerprint([reference], [])
    assert {f"warmgraph.families.spatial:_Give.{name}" for name in ("__init__", "forward")} <= {
        *before
    }
    with monkeypatch.context() as patch:
        patch.setattr(spatial._Give, "forward", lambda self, x, **_: self.tokens * 2)
        assert fingerprint([reference], []) != before
    assert fingerprint([reference], []) == before


SAME = {
    "nothing": ("", ""),
    "a comment and line numbers": ("SCALE = 2.0", "# words\n\n\nSCALE = 2.0"),
    "a docstring": ("Words about deep.", "Better words about deep."),
    "a function that nothing reaches": (
        "def unreached(x):\n    return x",
        "def unreached():\n    1",
    ),
    "a global that nothing reads": ("UNREAD = 1", "UNREAD = 2"),
    "the order of definitions": ("SCALE = 2.0\nUNREAD = 1", "UNREAD = 1\nSCALE = 2.0"),
}


@pytest.mark.parametrize("change", SAME)
def test_other_changes_do_not(load: Load, change: str) -> None:
    assert prints(load()) == prints(load(*SAME[change]))


def test_what_a_global_name_leads_to_counts(load: Load) -> None:
    before, module = prints(load()), load()
    module.chosen = module.other  # as `optimized_attention` is chosen at start
    assert "sample:other" in prints(module) and prints(module) != before


def test_two_functions_from_one_decorator_both_count(load: Load) -> None:
    """They share the code of the wrapper, not what it wraps."""
    code = CODE.replace("return chosen(", "return second(chosen(").replace(
        "* self.twice", ") * self.twice"
    )
    code += "\n\n@wrap\ndef second(x):\n    return deep(x) * 5\n"
    assert prints(load(code=code)) != prints(load("* 5", "* 6", code=code))


def test_each_closed_over_value_counts(load: Load) -> None:
    code = (
        "import torch\ndef make(a, b):\n    def inner(x):\n        return x * a + b\n"
        "    return inner\nhelper = make(1, 2)\nclass Child(torch.nn.Module):\n"
        "    def forward(self, x):\n        return helper(x)\n"
    )
    plain = prints(load(code=code))
    for values in ("make(3, 2)", "make(1, 3)"):
        assert prints(load("make(1, 2)", values, code=code)) != plain


def test_a_watch_notices_a_replaced_function_a_constant_and_a_method(load: Load) -> None:
    for name, value in [("chosen", print), ("SCALE", 9.0)]:
        module, watch = load(), Watch()
        fingerprint([], [module.Child], watch)
        assert not watch.changed()
        setattr(module, name, value)
        assert watch.changed(), name
    for owner, name in [("Child", "step"), ("Base", "forward"), ("Child", "factor")]:
        module, watch = load(), Watch()
        fingerprint([], [module.Child], watch)
        setattr(getattr(module, owner), name, lambda self, x: x)
        assert watch.changed(), name
    module, watch = load(), Watch()
    fingerprint([], [module.Child], watch)
    module.UNREAD = 5
    assert not watch.changed()


def test_a_long_value_counts_by_its_hash(load: Load) -> None:
    long = load("SCALE = 2.0", "SCALE = 'a' * 5000")
    text = prints(long)["sample:SCALE"]
    assert len(text) < 100
    assert prints(load("SCALE = 2.0", "SCALE = 'b' * 5000"))["sample:SCALE"] != text


def test_functions_outside_the_host_are_not_hashed(load: Load) -> None:
    assert {name.partition(":")[0] for name in prints(load())} == {"sample"}


def test_attributes_that_a_class_reads_are_found_through_its_parents(load: Load) -> None:
    names = attributes_read(load().Child)
    assert {"factor", "step", "twice"} <= names and "unreached" not in names


def test_the_hosts_chosen_attention_and_its_helpers_count(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    import comfy.ldm.modules.attention as attention
    import comfy.ops
    import comfyui_version

    classes = [attention.BasicTransformerBlock, attention.CrossAttention]
    plain = fingerprint([], classes)
    assert "comfy.ldm.modules.attention:attention_pytorch" in plain
    assert "comfy.ops:scaled_dot_product_attention" in plain  # two functions further on
    for owner, name, value in [
        (attention, "optimized_attention", attention.attention_sub_quad),
        (attention, "optimized_attention_masked", attention.attention_split),
        (attention, "SDP_BATCH_LIMIT", 2**14),
        (comfy.ops, "scaled_dot_product_attention", lambda q, k, v, *a, **k2: q),
        (comfy.ops, "repeat_kv_for_gqa", lambda k, v, heads, dim: (k, v)),
    ]:
        if name == "repeat_kv_for_gqa" and comfyui_version.__version__ == "0.27.0":
            continue  # which has no such step yet
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            assert fingerprint([], classes) != plain, name
    assert fingerprint([], classes) == plain


def test_the_order_of_attention_backends_counts(load: Load) -> None:
    """On GPUs the host keeps a list of torch's enum, which is no Python Enum."""
    code = (
        "import torch\nfrom torch.nn.attention import SDPBackend\n"
        "PRIORITY = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]\n"
        "class Child(torch.nn.Module):\n    def forward(self, x):\n        return f(x, PRIORITY)\n"
    )
    plain = prints(load(code=code))
    assert "MATH" in plain["sample:PRIORITY"]
    swapped = load(
        "FLASH_ATTENTION, SDPBackend.MATH", "MATH, SDPBackend.FLASH_ATTENTION", code=code
    )
    assert prints(swapped) != plain


def test_weight_casting_is_left_out(host: Host) -> None:
    """Graphs get final weights, so how the host fetches them must not cost a rebuild."""
    import comfy.ops

    names = fingerprint([], [comfy.ops.manual_cast.Linear, torch.nn.Linear])
    assert list(names) == ["comfy.ops:disable_weight_init.Linear.forward"]
