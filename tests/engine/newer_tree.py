"""A copy of the host's tree that is as newer ComfyUIs are, in words of ours: what their blocks pass
to attention and ask of layers, written into the files of the pinned one.

Each attention gets a part that may name another function for it (`ComfyAttention`), passed on with
its tensors in containers; feed-forwards go through helpers that look at a layer before they call
it, and do more in one kernel where its weight is quantised; blocks take one argument more, which
they are given, and some are called by a helper; the model's own call, wrappers and all, is recorded
by something that counts what others allocate. H3's VAE folds its norms and residuals into its
products, and attends in fewer bits where its weights have eight.
"""

from __future__ import annotations

import ast
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

#: The host's version whose files are written into.
OF = "0.30.0"
#: Calls of attention, by the names that models import.
_ATTENTION = ("optimized_attention", "optimized_attention_masked")
_MODELS = (
    "flux/layers.py",
    "flux/math.py",
    "hunyuan_video/model.py",
    "krea2/model.py",
    "lumina/model.py",
    "modules/attention.py",
    "qwen_image/model.py",
    "wan/model.py",
)
#: Of the tree's own folders.
_NOT_NEEDED = {".git", "input", "models", "output", "temp", "tests", "tests-unit", "user"}
#: Of this one, attention gets an argument that nobody knows yet.
_UNHEARD_OF = "krea2/model.py"

_WRAPPER = '''
class ComfyAttention(torch.nn.Module):
    """By what a layer attends, where it says so."""

    def __init__(self):
        super().__init__()
        self.config = None
        self.function = None

    def extra_repr(self):
        return str(self.function or self.config)


class AttentionTensorContainer:
    """Gives its tensor away once."""

    def __init__(self, tensor):
        self.tensor = tensor

    def take(self):
        tensor, self.tensor = self.tensor, None
        if tensor is None:
            raise RuntimeError("its tensor was taken before")
        return tensor


def wrap_attn(func):
    @functools.wraps(func)
    def chosen(*args, **kwargs):
        preferred = kwargs.pop("preferred_attention", None)
        kwargs.pop("attention_span", None)
        if isinstance(args[0], AttentionTensorContainer):
            args = (*(each.take() for each in args[:3]), *args[3:])
        if "_inside_attn_wrapper" in kwargs:
            return func(*args, **kwargs)
        kwargs["_inside_attn_wrapper"] = True
        options = kwargs.get("transformer_options") or {}
        if "optimized_attention_override" in options:
            return options["optimized_attention_override"](func, *args, **kwargs)
        if preferred is not None and preferred.function is not None:
            return preferred.function(*args, **kwargs)
        return func(*args, **kwargs)

    return chosen

'''

_HELPERS = '''

def may_be_fused(linear):
    return (
        isinstance(linear.weight, QuantizedTensor)
        and linear.weight._layout_cls == "TensorWiseINT8Layout"
        and linear.quant_format is not None
        and not linear._full_precision_mm
        and not getattr(linear, "comfy_force_cast_weights", False)
        and len(linear.weight_function) == 0
        and len(linear.bias_function) == 0
    )


def gated_together(linear, gate, x):
    """`linear(silu(gate) * x)`, in one kernel where the weight is quantised."""
    if may_be_fused(linear):
        return linear_input_act(linear, torch.cat((gate, x), -1), "swiglu")
    return linear(torch.nn.functional.silu(gate) * x)
'''

_RECORDING = '''

MALLOC_GRAPHS = {}


class _Graph:
    """What one thread records, as the host's compiler of allocations does."""

    def __init__(self):
        self._comfy_active, self.paused = False, False

    def records(self):
        return self._comfy_active and not self.paused


class _Recorded:
    def __enter__(self):
        MALLOC_GRAPHS.setdefault(threading.get_ident(), _Graph())._comfy_active = True

    def __exit__(self, *args):
        MALLOC_GRAPHS[threading.get_ident()]._comfy_active = False


class _Paused:
    def __enter__(self):
        MALLOC_GRAPHS[threading.get_ident()].paused = True

    def __exit__(self, *args):
        MALLOC_GRAPHS[threading.get_ident()].paused = False


def malloc_graph_scope(device):
    return _Recorded()


def pause_malloc_graph():
    return _Paused()


def run_block(block, *args, **kwargs):
    return block(*args, **kwargs)
'''

#: Rounds to so few steps that its result is not taken for that of another attention.
_FEW_BITS = """

def _in_few_bits(query, key, value):
    steps = query.abs().amax() / 4
    query = (query / steps).round() * steps
    return torch.nn.functional.scaled_dot_product_attention(query, key, value)


ck.int8_attention = _in_few_bits
"""

_FOLDED_MORE = '''

_act_alone = linear_input_act


def linear_input_act(
    linear, x, input_act, act_weight=None, act_eps=0.0, residual=None, residual_scale=None
):
    """More of what surrounds a product."""
    if input_act == "rms_norm":
        x, input_act = comfy.rmsnorm.rms_norm(x, act_weight, act_eps), None
    result = linear(x) if input_act is None else _act_alone(linear, x, input_act)
    return result if residual is None else torch.addcmul(residual, result, residual_scale)
'''

#: Of H3's VAE: classes' methods, by their class's name.
_OF_THE_VAE = {
    "FeedForward": """
def forward(self, x, pre_norm, residual, residual_scale):
    norm = pre_norm.weight, pre_norm.eps
    both = comfy.ops.linear_input_act(self.w1, x, "rms_norm", *norm)
    added = {"residual": residual, "residual_scale": residual_scale}
    return comfy.ops.linear_input_act(self.w2, both, "swiglu", **added)
""",
    "Attention": """
def forward(self, x, table, pre_norm, residual, residual_scale):
    norm = pre_norm.weight, pre_norm.eps
    all_three = comfy.ops.linear_input_act(self.to_qkv, x, "rms_norm", *norm)
    parts = all_three.view(*x.shape[:2], -1, 3 * self.dim_head).chunk(3, -1)
    scale, rotated = self.qk_norm_scale.to(x.device), 2 * table.shape[-3]
    query, key = comfy.quant_ops.ck.rms_rope_split_half_(
        *parts[:2], table, scale, epsilon=self.norm_q.eps, rot_dim=rotated
    )
    query, key, value = (part.transpose(1, 2) for part in (query, key, parts[2]))
    if FEW_BITS and isinstance(self.to_qkv.weight, comfy.ops.QuantizedTensor):
        result = comfy.quant_ops.ck.int8_attention(query, key, value)
        result = result.transpose(1, 2).reshape(x.shape)
    else:
        result = optimized_attention(query, key, value, self.heads, skip_reshape=True)
    added = {"residual": residual, "residual_scale": residual_scale}
    return comfy.ops.linear_input_act(self.to_out, torch.nan_to_num(result), None, **added)
""",
    "TransformerBlock": """
def forward(self, x, rotary_pos_emb=None):
    x = self.attn(x, rotary_pos_emb, self.norm1, residual=x, residual_scale=self.scale1)
    return self.ff(x, self.norm2, residual=x, residual_scale=self.scale2)
""",
}

_VAE_OF_A_FILE = '''

def of_a_file(weights, dtype):
    """Make one whose decoder has the format of its file."""
    global ops
    plain, found = ops, comfy.utils.detect_layer_quantization(weights, "")
    if found is not None:
        ops = comfy.ops.mixed_precision_ops(found, dtype or torch.float16)
    try:
        return MiniMaxH3VideoVAE()
    finally:
        ops = plain
'''


def make(tree: Path, target: Path) -> Path:
    """Make such a copy of the host's tree; what is not changed is shared with it."""

    def ignored(folder: str, names: list[str]) -> set[str]:
        return set(names) & _NOT_NEEDED if Path(folder) == tree else set()

    shutil.copytree(tree, target, copy_function=_link, ignore=ignored)
    host = target / "comfy"
    for name in _MODELS:
        _rewrite(host / "ldm" / name, _attending)
    _rewrite(host / "ldm/modules/attention.py", _replaced_wrapper, _few_bits_are_there)
    _rewrite(host / "ldm" / _UNHEARD_OF, _unheard_of)
    _rewrite(host / "ops.py", lambda text: f"import comfy.rmsnorm\n{text}{_FOLDED_MORE}{_HELPERS}")
    _rewrite(host / "quant_ops.py", lambda text: text + _FEW_BITS)
    _rewrite(host / "ldm/minimax/vae.py", _folded_around)
    _rewrite(host / "sd.py", _vae_of_its_file)
    _rewrite(host / "model_prefetch.py", lambda text: f"import threading\n{text}{_RECORDING}")
    _rewrite(host / "ldm/lumina/model.py", _gated_together)
    _rewrite(host / "ldm/wan/model.py", _folded, _called_by_a_helper)
    _rewrite(host / "model_base.py", _recorded)
    for name in ("flux/model.py", *(n for n in _MODELS if n != "flux/math.py")):
        _rewrite(host / "ldm" / name, _one_more_argument)
    _rewrite(host / "ldm/minimax/model.py", _attending, _one_more_argument, _given_attention)
    return target


def make_or_skip(tree: Path, folder: Path) -> Path:
    """Make such a copy in a folder for a test; on a host of another version the test is skipped."""
    import pytest

    if f'"{OF}"' not in (tree / "comfyui_version.py").read_text("utf-8"):
        pytest.skip(f"what is imitated is written into the files of ComfyUI {OF}")
    return make(tree, folder / "ComfyUI")


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _rewrite(path: Path, *changes: Callable[[str], str]) -> None:
    text = before = path.read_text("utf-8")
    for change in changes:
        text = change(text)
    assert text != before
    path.unlink()  # the tree's own stays as it is
    path.write_text(text, "utf-8")


def _replace(text: str, old: str, new: str) -> str:
    assert old in text, old
    return text.replace(old, new)


# --- attention ------------------------------------------------------------------------------------


def _attending(text: str) -> str:
    """Have each class that attends own such a part, and pass it on."""
    tree = ast.parse(text)
    for scope in tree.body:
        if isinstance(scope, ast.ClassDef):
            calls, passed = _calls(scope, (*_ATTENTION, "attention")), "self.comfy_attention"
            if calls:
                _own(scope)
        elif isinstance(scope, ast.FunctionDef) and scope.name == "attention":
            calls, passed = _calls(scope, _ATTENTION), "preferred_attention"
            scope.args.args.append(ast.arg(passed))
            scope.args.defaults.append(ast.Constant(None))
        else:
            continue
        for call in calls:
            call.keywords.append(ast.keyword("preferred_attention", _expression(passed)))
            if ast.unparse(call.func) in _ATTENTION:
                given = [f"AttentionTensorContainer({ast.unparse(each)})" for each in call.args[:3]]
                call.args[:3] = map(_expression, given)
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    if "wrap_attn" not in names:
        imported = (
            "from comfy.ldm.modules.attention import AttentionTensorContainer, ComfyAttention"
        )
        later = ast.unparse(tree.body[0]).startswith("from __future__")
        tree.body[later:later] = ast.parse(imported).body
    return ast.unparse(ast.fix_missing_locations(tree))


def _calls(scope: ast.AST, names: tuple[str, ...]) -> list[ast.Call]:
    calls = [node for node in ast.walk(scope) if isinstance(node, ast.Call)]
    return [call for call in calls if ast.unparse(call.func) in names]


def _own(scope: ast.ClassDef) -> None:
    """Make the part where the class makes its others; one without a constructor inherits it."""
    for method in scope.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            texts = map(ast.unparse, method.body)
            after = next(n for n, text in enumerate(texts, 1) if text.startswith("super("))
            method.body[after:after] = ast.parse("self.comfy_attention = ComfyAttention()").body


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _replaced_wrapper(text: str) -> str:
    [function] = [
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and node.name == "wrap_attn"
    ]
    lines = text.splitlines(keepends=True)
    lines[function.lineno - 1 : function.end_lineno] = [_WRAPPER]
    return "".join(lines)


def _unheard_of(text: str) -> str:
    passed = "preferred_attention=self.comfy_attention"
    return _replace(text, passed, f"{passed}, attention_span=None")


# --- layers, blocks and the model's call ----------------------------------------------------------


def _gated_together(text: str) -> str:
    old = "return self.w2(self._forward_silu_gating(self.w1(x), self.w3(x)))"
    return _replace(text, old, "return comfy.ops.gated_together(self.w2, self.w1(x), self.w3(x))")


def _folded(text: str) -> str:
    text = _replace(text, "self.ffn = nn.Sequential(", "self.ffn = FoldedFeedForward(")
    return _replace(
        text,
        "class WanAttentionBlock(nn.Module):",
        "class FoldedFeedForward(nn.Sequential):\n"
        "    def forward(self, x):\n"
        '        return comfy.ops.linear_input_act(self[2], self[0](x), "gelu_tanh")\n\n\n'
        "class WanAttentionBlock(nn.Module):",
    )


def _called_by_a_helper(text: str) -> str:
    text = _replace(
        text, "x = block(x, e=e0,", "x = comfy.model_prefetch.run_block(block, x, e=e0,"
    )
    return "import comfy.model_prefetch\nimport comfy.ops\n" + text


def _one_more_argument(text: str) -> str:
    """Have each block that takes the options of a call take one argument more, and get it."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name.endswith("Block"):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "forward":
                    arguments = method.args
                    if any(each.arg == "transformer_options" for each in arguments.args):
                        arguments.kwonlyargs.append(ast.arg("pace"))
                        arguments.kw_defaults.append(ast.Constant(None))
        elif isinstance(node, ast.Call) and any(
            k.arg == "transformer_options" for k in node.keywords
        ):
            called = ast.unparse(node.func)
            if called in ("block", "layer") or called.endswith(".run_block"):
                node.keywords.append(ast.keyword("pace", ast.Constant(None)))
    return ast.unparse(ast.fix_missing_locations(tree))


def _recorded(text: str) -> str:
    """Open a recording before anything is put around the model's own call."""
    old = "model_output = self.diffusion_model("
    new = "model_output = _in_a_recording(self.diffusion_model, "
    helper = (
        "\n\ndef _in_a_recording(model, *args, **kwargs):\n"
        "    with comfy.model_prefetch.malloc_graph_scope(args[1].device):\n"
        "        return model(*args, **kwargs)\n"
    )
    return "import comfy.model_prefetch\n" + _replace(text, old, new) + helper


# --- H3's VAE -------------------------------------------------------------------------------------


def _few_bits_are_there(text: str) -> str:
    return text + "\n\nCOMFY_KITCHEN_INT8_ATTENTION_IS_AVAILABLE = True\n"


def _folded_around(text: str) -> str:
    tree = ast.parse(text)
    for scope in tree.body:
        new = _OF_THE_VAE.get(scope.name) if isinstance(scope, ast.ClassDef) else None
        if new is not None:
            [method] = (each for each in scope.body if getattr(each, "name", "") == "forward")
            scope.body[scope.body.index(method)] = ast.parse(new).body[0]
            if scope.name == "Attention":
                scale = (
                    'self.register_buffer("qk_norm_scale", torch.ones(dim_head), persistent=False)'
                )
                [made] = (each for each in scope.body if getattr(each, "name", "") == "__init__")
                made.body += ast.parse(scale).body
    imported = "import comfy.ldm.modules.attention as attending\nimport comfy.utils\n"
    few = "\nFEW_BITS = attending.COMFY_KITCHEN_INT8_ATTENTION_IS_AVAILABLE\n"
    return f"{imported}{ast.unparse(tree)}{few}{_VAE_OF_A_FILE}"


def _vae_of_its_file(text: str) -> str:
    made = "comfy.ldm.minimax.vae.MiniMaxH3VideoVAE()"
    return _replace(text, made, "comfy.ldm.minimax.vae.of_a_file(sd, dtype)")


# --- blocks that are given an attention -----------------------------------------------------------


def _given_attention(text: str) -> str:
    """Have MiniMax H3's blocks attend by a function, where a call of them has one."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == "DiTBlock":
            [forward] = (each for each in node.body if getattr(each, "name", "") == "forward")
            assert isinstance(forward, ast.FunctionDef)
            [call] = _calls(forward, ("self.attn",))
            call.func = _expression("(self.attn if attention is None else attention)")
            forward.args.args.append(ast.arg("attention"))
            forward.args.defaults.append(ast.Constant(None))
        elif isinstance(node, ast.FunctionDef) and node.name == "block_wrap":
            [call] = _calls(node, ("block",))
            given = _expression("args.get('attention')")
            call.keywords.append(ast.keyword("attention", given))
    return ast.unparse(ast.fix_missing_locations(tree))


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]))
