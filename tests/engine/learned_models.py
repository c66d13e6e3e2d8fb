"""Made-up models whose blocks are called in ways that are learned, or must not be."""

from __future__ import annotations

import sys
import types
from typing import Any

from torch._dynamo.symbolic_convert import _import_module

#: As if they were of the host.
MODULE = "comfy.ldm.unheard_of"
SOURCE = """
import torch
from comfy.ldm.modules.attention import optimized_attention

STATE = [0.5]


class Block(torch.nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.mod = torch.nn.Linear(width, 2 * width)
        self.scale = 1.0

    def mix(self, x, vec, transformer_options):
        shift, gate = self.mod(vec).unsqueeze(1).chunk(2, -1)
        q, k, v = self.qkv(x * (1 + shift)).chunk(3, -1)
        mixed = optimized_attention(q, k, v, 2, transformer_options=transformer_options)
        return self.out(mixed) * gate

    def forward(self, x, vec, transformer_options={}):
        return x + self.mix(x, vec, transformer_options)


class Model(torch.nn.Module):
    block = Block

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([self.block() for _ in range(2)])

    def forward(self, x, timestep, context, transformer_options={}):
        vec = context.mean(1) * timestep[:, None].to(context.dtype)
        h = torch.cat((context, x.flatten(2).transpose(1, 2)), 1)
        h = self.run(h, vec, transformer_options)
        return h[:, context.shape[1]:].transpose(1, 2).reshape(x.shape)

    def run(self, h, vec, options):
        for block in self.blocks:
            h = block(h, vec, transformer_options=options)
        return h


class InPlaceBlock(Block):
    def forward(self, x, vec, transformer_options={}):
        x += self.mix(x, vec, transformer_options)
        return x


class InPlace(Model):
    block = InPlaceBlock


class ReliesBlock(Block):
    def forward(self, x, vec, transformer_options={}):
        x += self.mix(x, vec, transformer_options)


class Relies(Model):
    block = ReliesBlock

    def run(self, h, vec, options):
        for block in self.blocks:
            block(h, vec, transformer_options=options)
        return h


class Keeps(Model):
    block = InPlaceBlock

    def run(self, h, vec, options):
        kept = h
        for block in self.blocks:
            h = block(h, vec, transformer_options=options)
        return h + 0.5 * kept


class Moves(Model):
    def __init__(self):
        super().__init__()
        self.kinds = torch.nn.Embedding(2, 64)

    def run(self, h, vec, options):
        self.kinds.to(h.device)
        return super().run(h, vec + self.kinds(torch.zeros_like(vec[:, :1]).long())[:, 0], options)


class SetsBlock(Block):
    def forward(self, x, vec, transformer_options={}):
        return x + self.scale * self.mix(x, vec, transformer_options)


class Sets(Model):
    block = SetsBlock

    def forward(self, x, timestep, context, transformer_options={}):
        for block in self.blocks:
            block.scale = float(x.shape[-1])
        return super().forward(x, timestep, context, transformer_options)


class Scaled(Model):
    block = SetsBlock


class RandomBlock(Block):
    def forward(self, x, vec, transformer_options={}):
        return x + 0.0 * torch.randn_like(x) + self.mix(x, vec, transformer_options)


class Random(Model):
    block = RandomBlock


class ReadsBlock(Block):
    def forward(self, x, vec, transformer_options={}):
        if vec.max().item() > 0.0:
            x = x * 2
        return x + self.mix(x, vec, transformer_options)


class Reads(Model):
    block = ReadsBlock


class NumberBlock(Block):
    def forward(self, x, vec, strength, transformer_options={}):
        return x + strength * self.mix(x, vec, transformer_options)


class Number(Model):
    block = NumberBlock

    def run(self, h, vec, options):
        for block in self.blocks:
            h = block(h, vec, STATE[0], transformer_options=options)
        return h


class OptionBlock(Block):
    def forward(self, x, vec, transformer_options={}):
        return x + transformer_options.get("strength", 1.0) * self.mix(x, vec, transformer_options)


class Option(Model):
    block = OptionBlock


class SizesBlock(Block):
    def forward(self, x, vec, transformer_options={}):
        mixed = self.mix(x, vec, transformer_options)
        return x + mixed if x.shape[1] <= 100 else x - mixed.sin()


class Sizes(Model):
    block = SizesBlock


class GlobalBlock(Block):
    def forward(self, x, vec, transformer_options={}):
        return x + STATE[0] * self.mix(x, vec, transformer_options)


class Global(Model):
    block = GlobalBlock


class SharedBlock(Block):
    def forward(self, x, y, vec, transformer_options={}):
        x += self.mix(y, vec, transformer_options)
        x += y
        return x


class Shared(Model):
    block = SharedBlock

    def run(self, h, vec, options):
        for block in self.blocks:
            h = block(h, h[:, :], vec, transformer_options=options)
        return h


class IndexedBlock(Block):
    def forward(self, x, vec, index, transformer_options={}):
        transformer_options.get("block_index")
        return x + self.mix(x, vec, transformer_options)


class Indexed(Model):
    block = IndexedBlock

    def run(self, h, vec, options):
        for i, block in enumerate(self.blocks):
            options["block_index"] = i
            h = block(h, vec, i, transformer_options=options)
        return h


class CountsBlock(Block):
    def forward(self, x, vec, transformer_options={}):
        super().__setattr__("scale", self.scale + 1.0)
        return x + self.mix(x, vec, transformer_options)


class Counts(Model):
    block = CountsBlock


class ListsBlock(Block):
    def forward(self, x, vec, transformer_options={}):
        return x + self.mix(x, vec, transformer_options) * len(vec.tolist())


class Lists(Model):
    block = ListsBlock


class ViewsBlock(Block):
    def forward(self, x, vec, transformer_options={}):
        return (x + self.mix(x, vec, transformer_options), x[:, 1:])


class Views(Model):
    block = ViewsBlock

    def run(self, h, vec, options):
        for block in self.blocks:
            h, _ = block(h, vec, transformer_options=options)
        return h


class CountBlock(Block):
    def forward(self, x, vec, transformer_options={}):
        return x + self.mix(x, vec, transformer_options), x.shape[1]


class Count(Views):
    block = CountBlock


class NotesBlock(Block):
    def forward(self, x, vec, transformer_options={}):
        transformer_options["seen"] = True
        return x + self.mix(x, vec, transformer_options)


class Notes(Model):
    block = NotesBlock


class ManyBlock(Block):
    def forward(self, x, vec, strength=1.0, transformer_options={}):
        return x + strength * self.mix(x, vec, transformer_options)


class Many(Model):
    block = ManyBlock

    def run(self, h, vec, options):
        for strength in (0.1, 0.2, 0.3, 0.4):
            for block in self.blocks:
                h = block(h, vec, strength, transformer_options=options)
        return h


class OneSize(Model):
    def run(self, h, vec, options):
        return super().run(h, vec, options) + torch.zeros(h.shape[0], 29, h.shape[2]).to(h)


class Bare(Model):
    class block(Block):
        def forward(self, x, vec):
            return x + self.mix(x, vec, {})

    def run(self, h, vec, options):
        for block in self.blocks:
            h = block(h, vec)
        return h


class OneFrame(Model):
    def forward(self, x, timestep, context, transformer_options={}):
        assert x.shape[2] == 1
        return super().forward(x[:, :, 0], timestep, context, transformer_options).unsqueeze(2)


class GroupedBlock(Block):
    def mix(self, x, vec, transformer_options):
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k, v = (t.view(*t.shape[:2], 4, -1).transpose(1, 2) for t in (q, k, v))
        mixed = optimized_attention(
            q, k[:, :2], v[:, :2], 4, skip_reshape=True, enable_gqa=True,
            skip_output_reshape=True, transformer_options=transformer_options,
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


class TextsBlock(Block):
    def forward(self, x, y, vec, transformer_options={}):
        return x + self.mix(x, vec, transformer_options) + y.mean(1, keepdim=True)


class Texts(Model):
    block = TextsBlock

    def forward(self, x, timestep, context, other, transformer_options={}):
        self.other = other
        return super().forward(x, timestep, context, transformer_options)

    def run(self, h, vec, options):
        for block in self.blocks:
            h = block(h, self.other, vec, transformer_options=options)
        return h


class Grouped(Model):
    block = GroupedBlock


def local():
    class Block_(Block):
        pass

    class Local(Model):
        block = Block_

    return Local()
"""


def load(source: str = SOURCE) -> Any:
    """Return the module; as if it were the host's own until it is unloaded."""
    _import_module.cache_clear()  # PyTorch's tracer takes the last one of that name for this one
    module = types.ModuleType(MODULE)
    sys.modules[MODULE] = module
    exec(compile(source, MODULE, "exec"), vars(module))  # noqa: S102
    return module


def unload() -> None:
    """Let it be gone."""
    sys.modules.pop(MODULE, None)
