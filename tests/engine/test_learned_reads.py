"""What a block's code reads is compared, in the key, or the block is refused: made-up blocks that
read something which changes between two steps.
"""

# ruff: noqa: E501
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from warmgraph_backends.cuda_graphs.constants import Constants
from warmgraph_backends.cuda_graphs.skip_joins import QuickJoins
from warmgraph_tools.inprocess import Host

from . import learned_models
from .learned import CALLS, Regions, arguments, error, learned_of
from .rows import some_rows

#: By name: what the module has, what the block has, what it does to `h`, and what changes.
READS = {
    "option_beyond": ("", "", "h = h * 3 if o.get('step', 0) > 50 else h", "options['step'] = 60"),
    "option_word": ("", "", "h = h * 3 if 'b' in o.get('word', '') else h", "options['word'] = 'b'"),
    "option_float": ("", "", "h = h * o.get('gain', 1.0)", "options['gain'] = 2.0"),
    "option_zero": ("", "", "h = h * math.copysign(1, o.get('gain', 0.0))", "options['gain'] = -0.0"),
    "option_sort": ("", "", "h = h * (2 + isinstance(o.get('on'), bool))", "options['on'] = True"),
    "option_list": ("", "", "h = h * o['list'][0]", "options['list'] = [2.0]"),
    "default": ("def scaled(h, sizes=(1, 2)): return h * STATE[0]", "", "h = scaled(h)", "module.STATE[0] = 2.0"),
    "list_of_child": ("", "self.out.gains = [1.0]", "h = h * self.out.gains[0]", "out.gains[0] = 2.0"),
    "list": ("", "self.gains = [1.0]", "h = h * self.gains[0]", "block.gains[0] = 2.0"),
    "class_list": ("", "", "h = h * self.many[0]", "type(block).many[0] = 2.0"),
    "named_by_text": ("", "", "h = h * getattr(self, f'gain_{self.out.in_features}', 1.0)", "block.gain_16 = 2.0"),
    "cached": ("@functools.lru_cache\ndef helper(i): return i * NUMBER", "", "h = h * helper(2)", "module.NUMBER = 3.0; module.helper.cache_clear()"),
    "global_in_loop": ("", "", "h = h * sum(TABLE.values())", "module.TABLE['a'] = 2.0"),
    "descriptor": ("", "", "h = h * self.told", "module.STATE[0] = 2.0"),
    "zero": ("", "self.zero = 0.0", "h = h * math.copysign(1, self.zero)", "block.zero = -0.0"),
    "default_dtype": ("", "", "h = h.to(torch.get_default_dtype()).to(x.dtype) * 1.0", ""),
    "grad_mode": ("", "", "h = h * (2 if torch.is_grad_enabled() else 1)", ""),
    "layout": ("", "", "h = h * (2 if vec.is_contiguous() else 1)", ""),
    "strided": ("", "", "h = h.as_strided(h.shape, (h.shape[1] * 16, 16, 1))", ""),
    "writes": ("", "", "self.out.bias.add_(1.0)", ""),
    "identity": ("", "", "h = h * (2 if h is x else 1)", ""),
}  # fmt: skip
SOURCE = """
import functools, math
import torch
STATE, TABLE, NUMBER = [1.0], {{"a": 1.0}}, 2.0
{module}
class Told:
    def __get__(self, one, cls=None):
        return STATE[0]
class Block(torch.nn.Module):
    many, told = [1.0], Told()
    def __init__(self):
        super().__init__()
        self.mod = torch.nn.Linear(16, 16)
        self.out = torch.nn.Linear(16, 16)
        {block}
    def forward(self, x, vec, transformer_options={{}}):
        o = transformer_options
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
        for block in self.blocks:
            h = block(h, vec, transformer_options=transformer_options)
        return h.transpose(1, 2).reshape(x.shape)
"""
#: Those of which nothing may be learned.
NEVER = ("default_dtype", "grad_mode", "identity", "descriptor", "class_list", "default")
NEVER += ("layout", "strided", "writes")
#: What changes in a session's steps is in test_learned_changes.py, too.
QUICK = ("option_zero", "option_sort", "option_list", "list", "cached", "zero", *NEVER[2:])


@pytest.fixture(autouse=True)
def _unloaded(host: Host) -> Iterator[None]:
    yield
    learned_models.unload()


@pytest.mark.parametrize("name", some_rows(READS, QUICK))
def test_what_is_read_and_changes_makes_no_wrong_step(name: str) -> None:
    module_code, block_code, code, change = READS[name]
    made = SOURCE.format(module=module_code, block=block_code or "pass", code=code)
    module = learned_models.load(made)
    options: dict[str, Any] = {"step": 1, "word": "a", "gain": 0.0, "on": 1, "list": [1.0]}
    x, time, context = arguments(*CALLS[0])
    given = x[:, :16].contiguous(), time, context[:, :, :16].contiguous()
    with torch.no_grad():
        record = learned_of(module.Model, *given, transformer_options=dict(options))
        if name in NEVER:
            assert record["blocks"] == [], record
            return
        torch.manual_seed(1)
        model = module.Model().eval()
        regions = Regions(model, record)
        before = None
        for _ in range(2):
            reference = model(*given, transformer_options=dict(options))
            result = regions.run(lambda: model(*given, transformer_options=dict(options)))
            assert error(result, reference) < 1e-5
            if before is not None and change:  # what the change tells apart is the host's
                assert not torch.equal(before, reference) and regions.served < 2
            before = reference
            block = model.blocks[1]
            scope = {"module": module, "block": block, "out": block.out, "options": options}
            exec(change, scope)  # noqa: S102


def test_our_own_modes_around_a_step_are_no_other_settings() -> None:
    """As whole steps are captured on a GPU."""
    module = learned_models.load(SOURCE.format(module="", block="pass", code=""))
    x, time, context = arguments(*CALLS[0])
    given = x[:, :16].contiguous(), time, context[:, :, :16].contiguous()
    with torch.no_grad():
        model = module.Model().eval()
        regions = Regions(model, learned_of(module.Model, *given))
        with Constants(torch.empty(64, dtype=torch.uint8)), QuickJoins():
            regions.run(lambda: model(*given))
        assert regions.served == 2, regions.declined
