"""What a trace's guards do not tell: made-up blocks that read it. What changes then between two
steps makes no wrong image.
"""

# ruff: noqa: E501
from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from . import learned_models
from .lab import Lab
from .learned import CALLS, arguments, error
from .learned_steps import Steps, exported_here
from .rows import some_rows
from .test_learned_changes import SOURCE


class Case(NamedTuple):
    """What a block does to `h`, and what changes: as code. What the module and the block have, the
    step's options, and what the root gives as `arg`.
    """

    code: str
    change: str
    module: str = ""
    block: str = "pass"
    options: dict[str, Any] = {}  # noqa: RUF012
    given: str = ""


_CONF, _STATE = "class Conf:\n    gain = 1.0", "module.STATE[0] = 2.0"
_TEXT = "h * getattr(Conf, 'ga' + 'in')"
_OPTION = {"k": 1.0}
CASES = {
    # a branch that a trace does not take, and code that it does not look into
    "compiling": Case(f'h = h if torch.compiler.is_compiling() else {_TEXT}', "module.Conf.gain = 2.0", _CONF),
    "compiling_under_another_name": Case(f'h = h if asks() else {_TEXT}', "module.Conf.gain = 2.0", f'from torch._dynamo import is_compiling as asks\n{_CONF}'),
    "assumed_constant": Case("h = h * helper()", "module.Conf.gain = 2.0", f"{_CONF}\n@torch.compiler.assume_constant_result\ndef helper(): return getattr(Conf, 'ga' + 'in')"),
    "allowed_in_graph": Case("h = helper(h)", "module.Conf.gain = 2.0", f'{_CONF}\ndef helper(h): return {_TEXT}\ntorch._dynamo.allow_in_graph(helper)'),
    # values in values
    "list_in_tuple": Case("h = h * self.b[0][0]", "block.b[0][0] = 2.0", "", "self.b = ([1.0],)"),
    "default_of_kept_function": Case("h = self.b(h)", "module.one.__defaults__[0][0] = 2.0", "def one(h, k=[1.0]): return h * k[0]", "self.b = one"),
    "mark_on_parameter": Case("h = h * getattr(self.out.weight, 'gain', 1.0)", "block.out.weight.gain = 2.0"),
    "mark_on_parameter_by_text": Case("h = h * getattr(self.out.weight, 'ga' + 'in', 1.0)", "block.out.weight.gain = 2.0"),
    # what torch keeps of a layer
    "hooks": Case("h = h * (1 + len(self._state_dict_hooks))", "block._register_state_dict_hook(lambda *a: None)"),
    "backward_hooks": Case("h = h * (1 + len(self._backward_hooks))", "block._backward_hooks[1] = print"),
    "childs_hooks": Case("h = h * (1 + len(self.out._state_dict_hooks))", "block.out._register_state_dict_hook(lambda *a: None)"),
    "buffers": Case("h = h * (1 + len(list(self.buffers())))", "block.out.register_buffer('late', torch.ones(1))"),
    "parameters": Case("h = h * len(list(self.parameters()))", "block.out.register_parameter('late', torch.nn.Parameter(torch.ones(1), False))"),
    "order_of_children": Case("for c in self.children(): h = torch.sin(c(h))", "block._modules['mod'] = block._modules.pop('mod')"),
    # classes
    "name_of_class": Case("h = h * len(type(self).__name__)", "type(block).__name__ = 'LongBlock'"),
    "name_of_function": Case("h = h * len(helper.__name__)", "module.helper.__name__ = 'x'", "def helper(h): return h"),
    "class_of_child": Case("h = h", "block.out.__class__ = module.Other", "class Other(torch.nn.Linear):\n    def forward(self, h): return super().forward(h) * 2.0"),
    "registered": Case("h = h * (2.0 if isinstance(vec, Conf) else 1.0)", "module.Conf.register(torch.Tensor)", "import abc\nclass Conf(abc.ABC): pass"),
    "registered_subclass": Case("h = h * (2.0 if issubclass(type(self), Conf) else 1.0)", "module.Conf.register(type(block))", "import abc\nclass Conf(abc.ABC): pass"),
    "own_isinstance": Case("h = h * (2.0 if isinstance(vec, Conf) else 1.0)", _STATE, "class Meta(type):\n    def __instancecheck__(cls, x): return STATE[0] > 1\nclass Conf(metaclass=Meta): pass"),
    "dataclass": Case("h = h * Conf().k", "module.Conf.__init__.__defaults__ = (2.0,)", "@dataclasses.dataclass\nclass Conf:\n    k: float = 1.0"),
    "dataclass_exchanged": Case("o = Out(h, h + 1); h = o.a * 2 + o.b", "module.Out = module.Other", "@dataclasses.dataclass\nclass Out:\n    a: object\n    b: object\n@dataclasses.dataclass\nclass Other:\n    b: object\n    a: object"),
    "dataclass_inherited": Case("h = h * Conf().k", "module.C0.__init__.__defaults__ = (2.0,)", "@dataclasses.dataclass\nclass C0:\n    k: float = 1.0\nclass Conf(C0): pass"),
    "named_tuple": Case("h = h * Conf().k", "module.Conf.__new__.__defaults__ = (2.0,)", "class Conf(NamedTuple):\n    k: float = 1.0"),
    # Python's own state
    "environment": Case("h = h * float(torch.os.getenv('WG_GAIN', '1'))", "WG_GAIN"),
    "environment_by_name": Case("h = h * float(getenv('WG_GAIN', '1'))", "WG_GAIN", "from os import getenv"),
    # the step's options
    "options_compared": Case("h = h * (1.0 if transformer_options == {'k': 3.0} else 2.0)", "options['k'] = 3.0", options=_OPTION),
    "options_in_a_list": Case("h = h * (2.0 if transformer_options in [{'k': 2.0}] else 1.0)", "options['k'] = 2.0", options=_OPTION),
    "options_past_their_class": Case("h = h * dict.get(transformer_options, 'k', 1.0)", "options['k'] = 2.0", options=_OPTION),
    "options_compared_past_their_class": Case("h = h * (1.0 if dict.__eq__(transformer_options, {'k': 3.0}) else 2.0)", "options['k'] = 3.0", options=_OPTION),
    "empty_patches": Case("h = h * (2.0 if 'patches' in transformer_options else 1.0)", "options['patches'] = {}"),
    "empty_replacements": Case("h = h * (1.0 if transformer_options.get('patches_replace', {}) == {} else 2.0)", "options['patches_replace'] = {'dit': {}}"),
    "no_attention": Case("h = h * (2.0 if 'optimized_attention_override' in transformer_options else 1.0)", "options['optimized_attention_override'] = None"),
    # arguments
    "named_tuple_for_a_tuple": Case("h = h * getattr(arg, 'gain', 1.0)", _STATE, "class Named(NamedTuple):\n    a: float\n    gain = 2.0", given="(Named(1.0) if STATE[0] > 1 else (1.0,))"),
    "own_list_for_a_list": Case("h = h * (2.0 if isinstance(arg, Sub) else 1.0)", _STATE, "class Sub(list): pass", given="(Sub([1.0]) if STATE[0] > 1 else [1.0])"),
    "size_for_a_tuple": Case("h = h * (2.0 if hasattr(arg, 'numel') else 1.0)", _STATE, given="(torch.Size((1,)) if STATE[0] > 1 else (1,))"),
}  # fmt: skip


#: One of each sort; all others come with `--all`.
QUICK = (
    *("compiling", "assumed_constant", "list_in_tuple", "mark_on_parameter", "hooks"),
    *("order_of_children", "class_of_child", "registered", "dataclass", "environment_by_name"),
    *("options_compared", "empty_patches", "no_attention", "size_for_a_tuple"),
)


def _run(made: Steps, options: dict[str, Any]) -> torch.Tensor:
    """Make a step, which is the host's; marks do not go along with a copy of the model."""
    root = made.root
    reference = type(root).forward(root, *arguments(*CALLS[0]), transformer_options=dict(options))
    assert error(made.make(**options), reference) < 1e-5
    assert isinstance(reference, torch.Tensor)
    return reference


@pytest.mark.parametrize("name", some_rows(CASES, QUICK))
def test_what_no_guard_tells_makes_no_wrong_image(
    own_lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    case = CASES[name]
    arg, given = (", arg", f", {case.given}") if case.given else ("", "")
    made_of = {"module": case.module, "block": case.block, "code": case.code}
    text = SOURCE.format(**made_of, arg=arg, given=given, inherited="pass", held="pass")
    module = learned_models.load(text)
    options = dict(case.options)
    try:
        with torch.inference_mode():
            made = Steps(own_lab, tmp_path, module.Model, exported_here)
            for _ in range(3):
                before = _run(made, options)
            block = made.root.blocks[1]
            scope = {"module": module, "block": block, "options": options, "torch": torch}
            if case.change in ("WG_GAIN",):
                monkeypatch.setitem(os.environ, case.change, "2")
            else:
                exec(case.change, scope)  # noqa: S102
            for _ in range(3):
                after = _run(made, options)
            assert error(after, before) > 0.01
    finally:
        learned_models.unload()


@pytest.mark.parametrize("name", ["dataclass", "dataclass_exchanged", "named_tuple"])
def test_objects_of_declared_fields_are_made_within_what_is_compiled(
    own_lab: Lab, tmp_path: Path, name: str
) -> None:
    """As Flux's blocks do."""
    case = CASES[name]
    made_of = {"module": case.module, "block": case.block, "code": case.code}
    text = SOURCE.format(**made_of, arg="", given="", inherited="pass", held="pass")
    module = learned_models.load(text)
    try:
        with torch.inference_mode():
            made = Steps(own_lab, tmp_path, module.Model, exported_here)
            for _ in range(3):
                _run(made, {})
            assert made.scope.compiled_calls == 2 and made.reasons() == set()
    finally:
        learned_models.unload()
