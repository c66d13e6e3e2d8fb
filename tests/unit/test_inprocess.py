"""The fixtures that every other host-class test stands on."""

from __future__ import annotations

import pytest
import torch

from warmgraph_tools import checkpoints
from warmgraph_tools.inprocess import Host

KINDS = {
    "narrow15": "NarrowSD15",
    "narrow15inpaint": "NarrowSD15",
    "narrow20": "NarrowSD20",
    "narrowxl": "NarrowSDXL",
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_narrow_checkpoint_samples_finite_images_through_the_real_loader(
    host: Host, kind: str
) -> None:
    model, clip, vae = host.load(kind)
    assert type(model.model.model_config).__name__ == KINDS[kind]
    positive, negative = host.encode(clip, "a cat"), host.encode(clip, "blurry")
    latent = host.sample(model, positive, negative)
    (image,) = host.node("VAEDecode", vae=vae, samples={"samples": latent})
    assert latent.isfinite().all() and 0.2 < latent.std() < 30
    assert 0.02 < image.std() < 0.6
    other = host.sample(model, host.encode(clip, "a dog on a hill"), negative)
    assert (other - latent).norm() / latent.norm() > 0.02  # the prompt matters


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


@pytest.mark.parametrize("kind", ["lora", "locon"])
def test_a_lora_changes_the_latent_and_leaves_the_model_as_it_was(host: Host, kind: str) -> None:
    model, clip, _ = host.load("narrowxl")
    prompt = host.encode(clip, "a cat")
    before = host.sample(model, prompt, prompt)
    name = host.model_file(kind, base="narrowxl")
    patched, _ = host.node(
        "LoraLoader", model=model, clip=clip, lora_name=name, strength_model=1.0, strength_clip=0.0
    )
    assert not torch.allclose(host.sample(patched, prompt, prompt), before, rtol=1e-2)
    assert torch.equal(host.sample(model, prompt, prompt), before)


def test_a_controlnet_changes_the_latent(host: Host) -> None:
    model, clip, _ = host.load("narrowxl")
    prompt = host.encode(clip, "a cat")
    (net,) = host.node(
        "ControlNetLoader", control_net_name=host.model_file("controlnet", base="narrowxl")
    )
    image = torch.rand(1, 64, 64, 3, generator=torch.Generator().manual_seed(0))
    positive, negative = host.control((prompt, prompt), net, image, strength=1.0)
    plain = host.sample(model, prompt, prompt)
    assert (host.sample(model, positive, negative) - plain).norm() / plain.norm() > 0.005


def test_a_diffusion_model_that_is_no_unet_loads(host: Host) -> None:
    (model,) = host.node("UNETLoader", unet_name=host.model_file("flux"), weight_dtype="default")
    assert type(model.model.diffusion_model).__name__ == "Flux"
