"""Which card the code computes on that Inductor writes."""

from __future__ import annotations

import re

import pytest

from warmgraph_backends.several_cards.generated import on_card

#: As PyTorch 2.11 writes it, less what `lean_source` takes away.
SOURCE = """
import torch
from torch import device
from torch._C import _cuda_getCurrentRawStream as get_raw_stream
empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda

class Runner:

    def call(self, args):
        arg0_1, = args
        args.clear()
        s0 = arg0_1.size()[0]
        with torch.cuda._DeviceGuard(0):
            torch.cuda.set_device(0)
            buf0 = empty_strided_cuda((s0, 0, 256), (256, 256, 0), torch.bfloat16)
            stream0 = get_raw_stream(0)
            kernel_0.run(arg0_1, buf0, 0, stream=stream0)
            buf1 = torch.ops.aten.full.default([s0], 0, device=device(type='cuda', index=0))
            buf2 = torch.ops.aten.full.default([s0], 0, device='cuda:0')
        return (buf0, buf1, buf2)
runner = Runner()
call = runner.call
"""
_NUMBERS = re.compile(r"_DeviceGuard\((\d)|set_device\((\d)|raw_stream\((\d)|index=(\d)|cuda:(\d)")


@pytest.mark.parametrize("card", [1, 3])
def test_all_that_names_a_card_names_another_one_and_nothing_else_changes(card: int) -> None:
    found = on_card(SOURCE, card)
    numbers = {"".join(groups) for groups in _NUMBERS.findall(found)}
    assert numbers == {str(card)} and len(_NUMBERS.findall(found)) == 5
    assert "(s0, 0, 256), (256, 256, 0)" in found and "buf0, 0, stream=stream0" in found
    assert "full.default([s0], 0" in found
    assert on_card(found, card) == found
    plain = [line for line in on_card(found, 0).splitlines() if line]
    assert plain == [line for line in SOURCE.splitlines() if line]


def test_what_is_for_this_card_is_not_touched() -> None:
    assert on_card(SOURCE, 0) is SOURCE
    processor = "def call(args):\n    return args[0] + 1"
    assert on_card(processor, 1) is processor
