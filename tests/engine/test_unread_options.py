"""Options that a sampler's pack puts into a call, and no code of the host's models reads."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from warmgraph_backends.code.mentioned import Mentioned, is_reader
from warmgraph_backends.code.sources import fingerprint
from warmgraph_backends.code.watch import Watch
from warmgraph_backends.host_api import options
from warmgraph_backends.host_api.layers import own_forward
from warmgraph_backends.runtime import scope
from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host
from warmgraph_tools.small_kinds import KINDS

from .lab import Lab
from .subject import Subject

#: What the host's models read, here and there; by what the host puts there, or nodes do.
READ = (
    *("patches", "patches_replace", "optimized_attention_override", "block", "block_index"),
    *("transformer_index", "rope_options", "original_shape", "activations_shape", "ar_state"),
    *("stg_skip_self_attn", "reference_image_num_tokens", "n_heads", "total_blocks", "img_slice"),
)
#: What a sampler's pack leaves there for nodes of its own.
UNREAD = ("ExtraOptions", "x_init", "model_sampling", "regional_floor", "of_this_step")


@pytest.fixture(autouse=True)
def mentioned(monkeypatch: pytest.MonkeyPatch) -> Mentioned:
    """As in a process of its own: other tests' models are in modules without files."""
    fresh = Mentioned()
    monkeypatch.setattr(scope, "MENTIONED", fresh)
    return fresh


def test_all_code_that_models_run_through_is_looked_at(host: Host) -> None:
    roots = [host.load("narrowxl")[0]]
    roots += [transformers.load(kind) for kind in KINDS if transformers.is_here(kind)]
    # They are given tensors alone.
    known = ("comfy_kitchen", "comfy_aimdo", "comfy.quant_ops", "comfy.float")
    for model in roots:
        root, through = model.model.diffusion_model, list[Any]()
        classes = {type(module) for module in root.modules()}
        fingerprint([own_forward(type(root))], classes, Watch(), through)
        modules = {function.__module__ for function in through}
        unknown = {m for m in modules if not is_reader(m) and not m.startswith(known)}
        assert not unknown, (type(root).__name__, unknown)


def test_what_models_read_is_mentioned(host: Host, mentioned: Mentioned) -> None:
    for kind in ("wan", "flux1", "lumina2", "ltx2"):
        if kind in KINDS:
            transformers.load(kind)
    assert mentioned.none_of((*READ, *UNREAD)) == frozenset(UNREAD)
    begun = time.perf_counter()
    for _ in range(100):
        mentioned.none_of(UNREAD)
    assert time.perf_counter() - begun < 0.02, "once a step"


def test_code_that_cannot_be_looked_at_may_read_anything(monkeypatch: Any) -> None:
    import sys
    import types

    monkeypatch.setitem(sys.modules, "comfy.ldm.of_somebody", types.ModuleType("of_somebody"))
    assert Mentioned().none_of(UNREAD) == frozenset()


def test_another_nodes_attention_may_read_all_options() -> None:
    given = {"cond_or_uncond": [0], "ExtraOptions": object()}
    assert options.names_of((torch.ones(1), given)) == frozenset(given)
    assert options.names_of(({**given, options.ATTENTION: print},)) == frozenset()
    assert options.names_of(({"middle": []}, None)) == frozenset()


def test_what_a_samplers_pack_leaves_there_counts_for_nothing(
    host: Host, lab: Lab, monkeypatch: Any
) -> None:
    from comfy.patcher_extension import WrappersMP

    subject, keys = Subject(lab, host, "narrowxl"), list[Any]()
    read = scope.read_call

    def noted(*args: Any) -> Any:
        call = read(*args)
        keys.append(call.key)
        return call

    monkeypatch.setattr(scope, "read_call", noted)

    def left_by_a_pack(model: Any) -> Any:
        clone, rows = model.clone(), list[int]()

        def around(executor: Any, model: Any, conds: Any, x: Any, t: Any, given: Any) -> Any:
            rows.append(len(rows))
            left = {"ExtraOptions": object(), "of_this_step": len(rows), "x_init": x.double()}
            given.setdefault("transformer_options", {}).update(left)
            return executor(model, conds, x, t, given)

        clone.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, "of_a_pack", around)
        return clone

    plain = subject.sample(subject.compiled, steps=3)
    known = set(keys)
    assert torch.equal(subject.sample(left_by_a_pack(subject.compiled), steps=3), plain)
    assert len(keys) >= 6 and set(keys) == known
