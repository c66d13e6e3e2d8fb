"""Made-up models by number: loops over blocks with features drawn at random, some of which no graph
could stand for.
"""

# ruff: noqa: E501
from __future__ import annotations

import random
from typing import Any, NamedTuple

#: What a block may do that is refused: how it does, in its code.
HAZARDS = {
    "random": "h = h + 0.0 * torch.rand_like(h)",
    "reads": "h = h * 2 if float(vec.sum()) > 0 else h",
    "lists": "h = h + len(vec[0].tolist())",
    "global": "h = h * STATE[0]",
    "counts": "super().__setattr__('scale', self.scale + 1.0)",
    "options": "transformer_options['seen'] = 1",
    "cache": "self.__dict__.setdefault('kept', {})[x.shape[1]] = h",
    "shapes": "h = h + vec[vec > 0].shape[0]",
}
#: What a block may read that changes between two steps: what its module has, what it has, what it
#: does, and what changes, in the model's module or its options. By the kinds of what was once wrong.
CHANGES = {
    # the root's own state moves once a step, by itself
    "root_namespace": ("", "self.s = SimpleNamespace(k=0)", "", "", "self.s.k += 1; k = self.s.k"),
    "root_dict": ("", "self.s = {'a': {'k': 0}}", "", "", "self.s['a']['k'] += 1; k = self.s['a']['k']"),
    "root_tensor": ("", "self.t = torch.zeros(1)", "", "", "self.t += 1; k = self.t"),
    "root_cache": ("", "self.c = {'last': torch.zeros(())}", "", "", "self.c['last'].mul_(0.5).add_(x.mean()); k = self.c['last']"),
    "root_random": ("", "self.g = torch.Generator().manual_seed(5)", "", "", "k = torch.rand(1, generator=self.g)"),
    # options that count
    "option_past": ("", "", "h = h * 3 if transformer_options.get('step', 0) > 50 else h", "options['step'] = 60", ""),
    "option_word": ("", "", "h = h * 3 if 'b' in transformer_options.get('word', '') else h", "options['word'] = 'b'", ""),
    "option_float": ("", "", "h = h * transformer_options.get('gain', 1.0)", "options['gain'] = 2.0", ""),
    "option_there": ("", "", "h = h * (3 if 'there' in transformer_options else 1)", "options['there'] = 1", ""),
    # defaults and functions
    "default": ("def scaled(h, sizes=(1, 2)): return h * STATE[0]", "", "h = scaled(h)", "module.STATE[0] = 2.0", ""),
    "mutable_default": ("def scaled(h, kept={}): return h * kept.get('k', 1.0)", "", "h = scaled(h)", "module.scaled.__defaults__[0]['k'] = 2.0", ""),
    "code": ("def one(h): return h\ndef two(h): return h * 2.0", "", "h = one(h)", "module.one.__code__ = module.two.__code__", ""),
    "cached": ("@functools.lru_cache\ndef helper(i): return i * NUMBER", "", "h = h * helper(2)", "module.NUMBER = 3.0; module.helper.cache_clear()", ""),
    # classes
    "class_attribute": ("class Conf:\n    gain = 1.0", "", "h = h * Conf.gain", "module.Conf.gain = 2.0", ""),
    "declared": ("@dataclasses.dataclass\nclass Conf:\n    k: float = 1.0", "", "h = h * Conf().k", "module.Conf.__init__.__defaults__ = (2.0,)", ""),
    "registered": ("import abc\nclass Conf(abc.ABC): pass", "", "h = h * (2.0 if isinstance(h, Conf) else 1.0)", "module.Conf.register(torch.Tensor)", ""),
    # attributes
    "list": ("", "self.gains = [1.0]", "h = h * self.gains[0]", "block.gains[0] = 2.0", ""),
    "list_in_tuple": ("", "self.gains = ([1.0],)", "h = h * self.gains[0][0]", "block.gains[0][0] = 2.0", ""),
    "list_of_child": ("", "self.out.gains = [1.0]", "h = h * self.out.gains[0]", "block.out.gains[0] = 2.0", ""),
    "named_by_text": ("", "", "h = h * getattr(self, f'gain_{self.out.in_features}', 1.0)", "block.gain_16 = 2.0", ""),
    "zero": ("", "self.zero = 0.0", "h = h * (2 + math.copysign(1, self.zero))", "block.zero = -0.0", ""),
    "mark": ("", "", "h = h * getattr(self.out.weight, 'gain', 1.0)", "block.out.weight.gain = 2.0", ""),
    # what a trace cannot see
    "identity": ("", "", "h = h * (2 if h is x else 1)", "", ""),
    "layout": ("", "", "h = h * (2 if h.is_contiguous() else 1)", "", ""),
    "grad_mode": ("", "", "h = h * (2 if torch.is_grad_enabled() else 1)", "", ""),
    "compiling": ("class Conf:\n    gain = 1.0", "", "h = h if torch.compiler.is_compiling() else h * getattr(Conf, 'ga' + 'in')", "module.Conf.gain = 2.0", ""),
}  # fmt: skip


class MadeUp(NamedTuple):
    """A model's source, which defines `Model`; its hazard, of `HAZARDS` or none, and all else that
    was drawn.
    """

    text: str
    hazard: str
    drawn: dict[str, Any]

    @property
    def change(self) -> str:
        """What changes after some steps, as code over `module`, `block` and `options`."""
        name = self.drawn["change"]
        return CHANGES[name][3] if name else ""


def changing(seed: int) -> MadeUp:
    """Draw a model that reads something which changes, or whose root keeps something."""
    drawn = _drawn(random.Random(f"changing {seed}"))
    drawn["change"] = random.Random(seed).choice(sorted(CHANGES))
    return MadeUp("\n".join(_source(drawn, "")), "", drawn)


def made_up(seed: int) -> MadeUp:
    """Draw a model."""
    draw = random.Random(seed)
    drawn = _drawn(draw)
    hazard = draw.choice(sorted(HAZARDS)) if draw.random() < 0.3 else ""
    return MadeUp("\n".join(_source(drawn, hazard)), hazard, drawn)


def _drawn(draw: random.Random) -> dict[str, Any]:
    drawn: dict[str, Any] = {
        "two": draw.random() < 0.5,
        "table": draw.choice(("", "joint", "own")),
        "vec": draw.choice(("tensor", "list", "tuple", "dict")),
        "attends": draw.choice(("live", "bare", "own", "none")),
        "in_place": draw.random() < 0.4,
        "index": draw.choice(("", "idle", "counts")),
        "option": draw.random() < 0.3,
        "branch": draw.choice((0, 0, 0, 30, 200)),
        "gives": draw.choice(("plain", "tuple", "dict")),
        "by_name": draw.random() < 0.5,
        "flag": draw.random() < 0.5,
        "blocks": draw.choice((2, 3)),
        "change": "",
    }
    return drawn


def _source(drawn: dict[str, Any], hazard: str) -> list[str]:
    two, table = drawn["two"], drawn["table"]
    names = ["x", *(["y"] if two else []), "vec", *(["table"] if table else [])]
    names += ["index"] if drawn["index"] else []
    names += ["double"] if drawn["flag"] else []
    rest = ["transformer_options={}"]
    of_module, of_block, _, _, of_root = CHANGES.get(drawn["change"], ("",) * 5)
    root_has, block_has = (of_block, "pass") if of_root else ("pass", of_block or "pass")
    return [
        "import dataclasses, functools, math, torch",
        "from types import SimpleNamespace",
        "from comfy.ldm.modules.attention import optimized_attention",
        "STATE, NUMBER = [0.5], 2.0",
        of_module,
        "class Block(torch.nn.Module):",
        "    def __init__(self, width=16):",
        "        super().__init__()",
        "        self.qkv = torch.nn.Linear(width, 3 * width)",
        "        self.out = torch.nn.Linear(width, width)",
        "        self.mod = torch.nn.Linear(width, width)",
        "        self.scale = 1.0",
        f"        {block_has}",
        f"    def forward(self, {', '.join(names + rest)}):",
        *(f"        {line}" for line in _block(drawn, hazard)),
        "class Model(torch.nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        f"        self.blocks = torch.nn.ModuleList([Block() for _ in range({drawn['blocks']})])",
        f"        {root_has}",
        "    def forward(self, x, timestep, context, transformer_options={}):",
        *(f"        {line}" for line in _model(drawn, names)),
    ]


def _block(drawn: dict[str, Any], hazard: str) -> list[str]:
    vec = {"tensor": "vec", "list": "vec[0]", "tuple": "vec[1]", "dict": 'vec["a"]'}[drawn["vec"]]
    lines = [f"vec = {vec}", "h = torch.cat((y, x), 1)" if drawn["two"] else "h = x"]
    if drawn["table"]:
        lines.append("h = h * table")
    lines.append("h = h + self.mod(vec).unsqueeze(1)")
    if hazard:
        lines.append(HAZARDS[hazard])
    if drawn["change"]:
        lines.append(CHANGES[drawn["change"]][2] or "h = h")
    lines.append("q, k, v = self.qkv(h).chunk(3, -1)")
    lines += {
        "live": ["h = optimized_attention(q, k, v, 2, transformer_options=transformer_options)"],
        "bare": ["h = optimized_attention(q, k, v, 2)"],
        "own": ["h = torch.softmax(q @ k.transpose(1, 2), -1) @ v"],
        "none": ["h = torch.tanh(q * k) * v"],
    }[drawn["attends"]]
    lines.append("h = self.out(h) * self.scale")
    if drawn["index"] == "counts":
        lines.append("h = h * (1 + 0.25 * index)")
    if drawn["option"]:
        lines.append('h = h * transformer_options.get("strength", 1.0)')
    if drawn["flag"]:
        lines.append("h = h + h if double else h")
    if drawn["branch"]:
        lines.append(f"h = h.sin() if x.shape[1] > {drawn['branch']} else h.cos()")
    own = "h[:, y.shape[1]:]" if drawn["two"] else "h"
    lines.append(f"x += {own}" if drawn["in_place"] else f"x = x + {own}")
    if drawn["two"]:
        lines.append("y = y + h[:, :y.shape[1]]")
    given = ["x", "y"] if drawn["two"] else ["x"]
    if drawn["gives"] == "dict":
        return [*lines, f"return {{{', '.join(f'{name!r}: {name}' for name in given)}}}"]
    as_tuple = drawn["two"] or drawn["gives"] == "tuple"
    return [*lines, f"return {', '.join(given)}{',' if as_tuple and not drawn['two'] else ''}"]


def _model(drawn: dict[str, Any], names: list[str]) -> list[str]:
    two = drawn["two"]
    lines = [
        (CHANGES[drawn["change"]][4] if drawn["change"] else "") or "k = 0.0",
        "shape = x.shape",
        "one = context.mean(1) * timestep[:, None].to(context.dtype)",
        "h = x.flatten(2).transpose(1, 2)",
        "x = h * 1.0" if two else "x = torch.cat((context, h), 1)",
        "y = context * 1.0",
        {
            "tensor": "vec = one",
            "list": "vec = [one, one * 2]",
            "tuple": "vec = (one * 2, one)",
            "dict": 'vec = {"a": one, "b": None}',
        }[drawn["vec"]],
        "count = context.shape[1] + h.shape[1]",
        "table = torch.linspace(0.5, 1.5, count, dtype=torch.float32)[None, :, None].to(x.dtype)",
    ]
    if drawn["table"] == "own":
        lines.append("table = table.expand(shape[0], -1, 16) * 1.0")
    values = {"index": "i", "double": "True"}
    given = [values.get(name, name) for name in names]
    if drawn["by_name"]:
        given = [f"{name}={value}" for name, value in zip(names, given, strict=True)]
    call = f"block({', '.join(given)}, transformer_options=transformer_options)"
    lines += ["for i, block in enumerate(self.blocks):", f"    made = {call}"]
    if drawn["gives"] == "dict":
        lines += ['    x = made["x"]', *(['    y = made["y"]'] if two else [])]
    elif two:
        lines += ["    x, y = made"]
    else:
        lines += ["    (x,) = made" if drawn["gives"] == "tuple" else "    x = made"]
    lines += [
        "h = x + y.mean(1, keepdim=True)" if two else "h = x[:, context.shape[1]:]",
        "return h.transpose(1, 2).reshape(shape) * (1 + 0.1 * k)",
    ]
    return lines
