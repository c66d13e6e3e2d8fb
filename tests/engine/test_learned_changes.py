"""What changes between two steps of a learned model makes no wrong image: made-up models through a
whole session's scope, beside the host's own code.
"""

# ruff: noqa: E501
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from . import learned_models
from .lab import Lab
from .learned_steps import Steps, exported_here
from .rows import some_rows

#: By name: what the module has, what the block has, what it does to `h`, and what changes.
CHANGES = {
    # what is given: objects' classes
    "class_of_argument": ("class Arg(Bare):\n    factor = 1.0", "", "h = h * arg.factor", "module.Arg.factor = 2.0"),
    "class_of_argument_in_method": ("class Arg(Bare):\n    factor = 1.0\n    def scaled(self): return self.factor", "", "h = h * arg.scaled()", "module.Arg.factor = 2.0"),
    "plain_class": ("class Arg:\n    factor = 1.0\n    def __init__(self, t): self.t = t", "", "h = h * arg.factor", "module.Arg.factor = 2.0"),
    "plain_class_method": ("class Arg:\n    factor = 1.0\n    def __init__(self, t): self.t = t\n    def scaled(self): return self.factor", "", "h = h * arg.scaled()", "module.Arg.factor = 2.0"),
    "plain_class_method_exchanged": ("class Arg:\n    def __init__(self, t): self.t = t\n    def scaled(self): return 1.0", "", "h = h * arg.scaled()", "module.Arg.scaled = lambda self: 2.0"),
    "property_of_argument": ("class Arg:\n    def __init__(self, t): self.t = t\n    @property\n    def gain(self): return STATE[0]", "", "h = h * arg.gain", "module.STATE[0] = 2.0"),
    "property_of_argument_exchanged": ("class Arg:\n    def __init__(self, t): self.t = t\n    @property\n    def gain(self): return 1.0", "", "h = h * arg.gain", "module.Arg.gain = property(lambda self: 2.0)"),
    "class_variable": ("@dataclasses.dataclass\nclass Arg:\n    t: object\n    factor: ClassVar[float] = 1.0", "", "h = h * arg.factor", "module.Arg.factor = 2.0"),
    "class_variable_by_name": ("@dataclasses.dataclass\nclass Arg:\n    t: object\n    factor_1: ClassVar[float] = 1.0", "", "h = h * getattr(arg, f'factor_{self.out.in_features // 64}')", "module.Arg.factor_1 = 2.0"),
    "named_tuple": ("class Arg(NamedTuple):\n    t: object\n    def scaled(self): return NUMBER", "", "h = h * arg.scaled()", "module.NUMBER = 3.0"),
    "named_tuple_class": ("class Tuple(NamedTuple):\n    t: object\nclass Arg(Tuple):\n    factor = 1.0", "", "h = h * arg.factor", "module.Arg.factor = 2.0"),
    "post_init": ("@dataclasses.dataclass\nclass Arg:\n    t: object\n    def __post_init__(self): self.gain = STATE[0]", "", "h = h * arg.gain", "module.STATE[0] = 2.0"),
    # functions
    "code": ("def helper(h): return h * 1.0\ndef other(h): return h * 2.0", "", "h = helper(h)", "module.helper.__code__ = module.other.__code__"),
    "own_code": ("def other(self, x, vec, transformer_options={}): return x * 2.0", "", "h = h", "module.Block.forward.__code__ = module.other.__code__"),
    "method_code": ("def other(self, h): return h * 2.0", "", "h = self.helper(h)", "module.Block.helper.__code__ = module.other.__code__"),
    "defaults": ("def helper(h, k=1.0): return h * k", "", "h = helper(h)", "module.helper.__defaults__ = (2.0,)"),
    "keyword_defaults": ("def helper(h, *, k=1.0): return h * k", "", "h = helper(h)", "module.helper.__kwdefaults__ = {'k': 2.0}"),
    "keyword_defaults_in_place": ("def helper(h, *, k=1.0): return h * k", "", "h = helper(h)", "module.helper.__kwdefaults__['k'] = 2.0"),
    "own_defaults": ("", "", "h = h * gain", "module.Block.forward.__defaults__ = ({}, 2.0)"),
    "mutable_default": ("def helper(h, kept={}): return h * kept.get('k', 1.0)", "", "h = helper(h)", "module.helper.__defaults__[0]['k'] = 2.0"),
    "mutable_default_of_inner": ("", "", "def inner(h, kept=STATE): return h * kept[0]\n        h = inner(h)", "module.STATE[0] = 2.0"),
    "function_attribute": ("def helper(h): return h * helper.gain\nhelper.gain = 1.0", "", "h = helper(h)", "module.helper.gain = 2.0"),
    "partial": ("def base(h, k): return h * k\nhelper = functools.partial(base, k=1.0)", "", "h = helper(h)", "module.helper = module.functools.partial(module.base, k=2.0)"),
    "partial_keywords": ("def base(h, k): return h * k\nhelper = functools.partial(base, k=1.0)", "", "h = helper(h)", "module.helper.keywords['k'] = 2.0"),
    "callable": ("class Helper:\n    gain = 1.0\n    def __call__(self, h): return h * self.gain\nhelper = Helper()", "", "h = helper(h)", "module.helper.gain = 2.0"),
    "closure": ("def make():\n    n = [1.0]\n    def helper(h): return h * n[0]\n    def put(v): n[0] = v\n    return helper, put\nhelper, put = make()", "", "h = helper(h)", "module.put(2.0)"),
    "nonlocal": ("def make():\n    n = 1.0\n    def helper(h): return h * n\n    def put(v):\n        nonlocal n\n        n = v\n    return helper, put\nhelper, put = make()", "", "h = helper(h)", "module.put(2.0)"),
    "decorated": ("def twice(f):\n    @functools.wraps(f)\n    def around(h): return f(h) * STATE[0]\n    return around\n@twice\ndef helper(h): return h", "", "h = helper(h)", "module.STATE[0] = 2.0"),
    "kept_function": ("def one(h): return h\ndef two(h): return h * 2.0", "self.act = one", "h = self.act(h)", "block.act = module.two"),
    "table_of_functions": ("def one(h): return h\ndef two(h): return h * 2.0\nTABLE2 = {'a': one}", "", "h = TABLE2['a'](h)", "module.TABLE2['a'] = module.two"),
    "tuple_of_functions": ("def one(h): return h\ndef two(h): return h * 2.0\nTABLE2 = (one,)", "", "h = TABLE2[0](h)", "module.TABLE2 = (module.two,)"),
    "function_in_tuple_code": ("def one(h): return h\ndef two(h): return h * 2.0\nTABLE2 = (one,)", "", "h = TABLE2[0](h)", "module.one.__code__ = module.two.__code__"),
    "lambda_kept": ("", "self.act = lambda h: h * STATE[0]", "h = self.act(h)", "module.STATE[0] = 2.0"),
    # classes of blocks
    "class_by_text": ("", "", "h = h * getattr(self, f'fac_{self.out.in_features // 64}')", "type(block).fac_1 = 2.0"),
    "class_by_type": ("", "", "h = h * type(self).fac_1", "type(block).fac_1 = 2.0"),
    "class_dict": ("", "", "h = h * vars(type(self))['fac_1']", "type(block).fac_1 = 2.0"),
    "class_tuple": ("", "", "h = h * self.pair[0]", "type(block).pair = (2.0,)"),
    "parents_class": ("", "", "h = h * self.fac_0", "module.Parent.fac_0 = 2.0"),
    "childs_class": ("class Child(torch.nn.Linear):\n    gain = 1.0", "self.mod = Child(64, 64)", "h = h * self.mod.gain", "module.Child.gain = 2.0"),
    "other_class": ("class Conf:\n    gain = 1.0", "", "h = h * Conf.gain", "module.Conf.gain = 2.0"),
    "other_class_nested": ("class Conf:\n    class Inner:\n        gain = 1.0", "", "h = h * Conf.Inner.gain", "module.Conf.Inner.gain = 2.0"),
    "other_class_by_text": ("class Conf:\n    gain_1 = 1.0", "", "h = h * getattr(Conf, f'gain_{self.out.in_features // 64}')", "module.Conf.gain_1 = 2.0"),
    "class_method": ("", "", "h = h * self.told_by_class()", "type(block).fac_1 = 2.0"),
    "meta": ("class Meta(type):\n    @property\n    def gain(cls): return STATE[0]\nclass Conf(metaclass=Meta): pass", "", "h = h * Conf.gain", "module.STATE[0] = 2.0"),
    "conf_kept": ("class Conf:\n    gain = 1.0", "self.conf = Conf", "h = h * self.conf.gain", "module.Conf.gain = 2.0"),
    "object_kept": ("class Conf:\n    def __init__(self): self.gain = 1.0", "self.conf = Conf()", "h = h * self.conf.gain", "block.conf.gain = 2.0"),
    "namespace_kept": ("", "self.conf = types.SimpleNamespace(gain=1.0)", "h = h * self.conf.gain", "block.conf.gain = 2.0"),
    "enum": ("class Kind(enum.Enum):\n    A = 1.0\n    @property\n    def gain(self): return STATE[0]", "self.kind = Kind.A", "h = h * self.kind.gain", "module.STATE[0] = 2.0"),
    "dunder_getattr": ("class Told2:\n    def __getattr__(self, name): return STATE[0]\ntold2 = Told2()", "", "h = h * told2.x", "module.STATE[0] = 2.0"),
    "own_getattr": ("def lookup(self, name):\n    if name == 'gain': return STATE[0]\n    return torch.nn.Module.__getattr__(self, name)", "type(self).__getattr__ = lookup", "h = h * self.gain", "module.STATE[0] = 2.0"),
    # state
    "nested_list": ("", "self.gains = [[1.0]]", "h = h * self.gains[0][0]", "block.gains[0][0] = 2.0"),
    "dict_of_block": ("", "self.gains = {'a': 1.0}", "h = h * self.gains['a']", "block.gains['a'] = 2.0"),
    "set_of_block": ("", "self.names = {'a'}", "h = h * (2 if 'b' in self.names else 1)", "block.names.add('b')"),
    "plain_tensor": ("", "self.gain = torch.ones(1)", "h = h * self.gain", "block.gain.fill_(2.0)"),
    "buffer": ("", "self.register_buffer('gain', torch.ones(1))", "h = h * self.gain", "block.gain.fill_(2.0)"),
    "global_tensor": ("GAIN = torch.ones(1)", "", "h = h * GAIN", "module.GAIN.fill_(2.0)"),
    "private": ("", "self._gain = 1.0", "h = h * self._gain", "block._gain = 2.0"),
    "private_list": ("", "self._gains = [1.0]", "h = h * self._gains[0]", "block._gains[0] = 2.0"),
    "private_object": ("", "self._gains = types.SimpleNamespace(g=1.0)", "h = h * self._gains.g", "block._gains.g = 2.0"),
    "comes_later": ("", "", "h = h * (2.0 if hasattr(self, 'later') else 1.0)", "block.later = True"),
    "private_later": ("", "", "h = h * getattr(self, '_late' + 'r', 1.0)", "block._later = 2.0"),
    "later_in_child": ("", "", "h = h * getattr(self.out, 'la' + 'ter', 1.0)", "block.out.later = 2.0"),
    "training": ("", "", "h = h * (2.0 if self.training else 1.0)", "block.train()"),
    "childs_training": ("", "self.drop = torch.nn.Dropout(0.0)", "h = h * (2.0 if self.drop.training else 1.0)", "block.drop.train()"),
    "modules_counted": ("", "", "h = h * len(list(self.children()))", "block.add_module('more', torch.nn.Linear(64, 64))"),
    "hook": ("", "", "h = h", "block.out.register_forward_hook(lambda m, a, r: r * 2)"),
    "weight_requires_grad": ("", "", "h = h * (2.0 if self.out.weight.requires_grad else 1.0)", "block.out.weight.requires_grad_(True)"),
    "bias_gone": ("", "", "h = h * (2.0 if self.mod.bias is None else 1.0)", "block.mod.bias = None"),
    "environment": ("import os", "", "h = h * float(os.environ.get('WG_GAIN', '1'))", "import os; os.environ['WG_GAIN'] = '2'"),
    "threads": ("", "", "h = h * torch.get_num_threads()", "torch.set_num_threads(3 - torch.get_num_threads())"),
    "backends": ("", "", "h = h * (2.0 if torch.backends.cudnn.benchmark else 1.0)", "torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark"),
    "swapped_class": ("class Conf:\n    gain = 1.0\nclass Conf2:\n    gain = 2.0", "", "h = h * Conf.gain", "module.Conf = module.Conf2"),
    "swapped_module": ("import math as m\nclass Other:\n    pi = 6.0", "", "h = h * m.pi", "module.m = module.Other"),
    "choice": ("class Kind(enum.Enum):\n    A = 1.0\n    @property\n    def gain(self): return STATE[0]\nclass Arg:\n    def __new__(cls, t): return Kind.A", "", "h = h * arg.gain", "module.STATE[0] = 2.0"),
    "shadowed_in_argument": ("class Arg:\n    factor = 1.0\n    def __init__(self, t):\n        self.t = t\n        if STATE[0] > 1: self.factor = 2.0", "", "h = h * arg.factor", "module.STATE[0] = 2.0"),
    "comes_in_argument": ("class Arg:\n    def __init__(self, t):\n        self.t = t\n        if STATE[0] > 1: self.factor = 2.0", "", "h = h * getattr(arg, 'factor', 1.0)", "module.STATE[0] = 2.0"),
    "mark_unseen": ("", "", "h = h * getattr(vec, 'mark', 1.0)", "module.STATE[0] = 2.0"),
    "autocast_asked": ("", "", "h = h * (2.0 if torch.is_autocast_enabled() else 1.0)", ""),
    "deterministic": ("", "", "h = h * (2.0 if torch.are_deterministic_algorithms_enabled() else 1.0)", "torch.use_deterministic_algorithms(True)"),
    "class_by_text_in_class_method": ("", "", "h = h * self.told_by_text()", "type(block).fac_1 = 2.0"),
    "mark_on_tensor": ("", "", "h = h * getattr(vec, 'gain', 1.0)", "options['mark'] = 2.0"),
    "list_argument_shared": ("", "", "h = h * given[0]", "options['given'] = [2.0]"),
    "iterator": ("", "self.it = itertools.count(1)", "h = h * next(self.it)", ""),
    "context": ("import contextvars\nGAIN = contextvars.ContextVar('g', default=1.0)", "", "h = h * GAIN.get()", "module.GAIN.set(2.0)"),
    "thread_local": ("import threading\nLOCAL = threading.local()\nLOCAL.g = 1.0", "", "h = h * LOCAL.g", "module.LOCAL.g = 2.0"),
    "weakref": ("import weakref", "self.ref = weakref.ref(self.out)", "h = h * self.ref().gain if hasattr(self.ref(), 'gain') else h", "block.out.gain = 2.0"),
    "sibling": ("", "", "h = h * OTHERS[0].gain", "module.OTHERS[0].gain = 2.0"),
}  # fmt: skip
#: One of each sort; all others come with `--all`.
QUICK = (
    *("class_of_argument", "property_of_argument_exchanged", "named_tuple", "post_init"),
    *("code", "defaults", "mutable_default", "partial_keywords", "closure", "kept_function"),
    *("class_by_text", "childs_class", "other_class_by_text", "meta", "object_kept"),
    *("nested_list", "plain_tensor", "private_later", "training", "modules_counted", "hook"),
    *("environment", "backends", "swapped_module", "mark_on_tensor", "iterator", "weakref"),
)
SOURCE = """
import copy, dataclasses, enum, functools, itertools, math, types
from typing import Any, ClassVar, NamedTuple
import torch
STATE, TABLE, NUMBER, OTHERS = [1.0], {{"a": 1.0}}, 2.0, [types.SimpleNamespace(gain=1.0)]
class Bare:
    def __init__(self, t): self.t = t
{module}
class Parent(torch.nn.Module):
    {inherited}
class Block(Parent):
    {held}
    @classmethod
    def told_by_class(cls):
        return cls.fac_1
    @classmethod
    def told_by_text(cls):
        return getattr(cls, 'fac_' + str(1))
    def helper(self, h):
        return h * 1.0
    def __init__(self):
        super().__init__()
        self.mod = torch.nn.Linear(64, 64)
        self.out = torch.nn.Linear(64, 64)
        {block}
    def forward(self, x, vec{arg}, transformer_options={{}}, gain=1.0):
        h = self.out(x) + self.mod(vec).unsqueeze(1)
        {code}
        return x + h
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block() for _ in range(2)])
    def forward(self, x, timestep, context, transformer_options={{}}):
        h = x.flatten(2).transpose(1, 2)
        vec = context.mean(1) * timestep[:, None]
        if "mark" in transformer_options:
            vec.gain = transformer_options["mark"]
        if STATE[0] > 1:
            vec.mark = STATE[0]
        for block in self.blocks:
            h = block(h, vec{given}, transformer_options=transformer_options)
        return h.transpose(1, 2).reshape(x.shape)
"""


@pytest.mark.parametrize("name", some_rows(CHANGES, QUICK))
def test_what_changes_between_steps_makes_no_wrong_image(
    own_lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("WG_GAIN", "1")  # as where it is not set, and so again for other tests
    module_code, block_code, code, change = CHANGES[name]
    arg, given = "", ""
    if "class Arg" in module_code:
        arg, given = ", arg", ", Arg(vec)"
    elif name == "list_argument_shared":
        arg, given = ", given", ", transformer_options.get('given', [1.0])"
    module = learned_models.load(
        SOURCE.format(
            module=module_code,
            block=block_code or "pass",
            code=code,
            arg=arg,
            given=given,
            inherited="fac_0 = 1.0" if "Parent" in change else "pass",
            held="fac_1, pair = 1.0, (1.0,)" if "block)" in change else "pass",
        )
    )
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    try:
        with torch.inference_mode():
            made = Steps(own_lab, tmp_path, module.Model, exported_here)
            options: dict[str, Any] = {}
            for _ in range(3):
                assert made.run(**options)[1] < 1e-5
            block = made.root.blocks[1]
            scope = {"module": module, "block": block, "options": options, "torch": torch}
            exec(change, scope)  # noqa: S102
            for _ in range(3):
                assert made.run(**options)[1] < 1e-5
    finally:
        torch.set_num_threads(threads)
        torch.backends.cudnn.benchmark = benchmark
        torch.use_deterministic_algorithms(False)
        learned_models.unload()
