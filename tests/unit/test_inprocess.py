"""The fixtures that every other host-class test stands on."""

from __future__ import annotations

import torch

from warmgraph_tools import checkpoints
from warmgraph_tools.inprocess import Host


def test_the_demos_checkpoint_is_small_and_is_an_sd15_to_the_host(host: Host) -> None:
    path = checkpoints.ensure(host.base / "models", "sd15", name="demo.ckpt")
    assert path.stat().st_size < 20e6
    model, clip, _ = host.node("CheckpointLoaderSimple", ckpt_name=path.name)
    assert type(model.model.model_config).__name__ == "SD15"
    prompt = host.encode(clip, "a cat")
    assert host.sample(model, prompt, prompt).isfinite().all()


def test_sampling_twice_is_bit_identical_and_another_seed_is_another_checkpoint(host: Host) -> None:
    results = []
    for seed in (0, 0, 1):
        model, clip, _ = host.load("narrowxl", seed=seed)
        prompt = host.encode(clip, "a cat")
        results.append(host.sample(model, prompt, prompt))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
