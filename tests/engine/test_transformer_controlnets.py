"""ControlNets of diffusion transformers, compiled within their models."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch

from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host

from .controlled import error, recorded
from .lab import TOLERANCE, Lab, relative
from .test_vae import make_vae
from .test_video_vae import make_wan21
from .transformer_runs import EXPECTED

IMAGE = torch.rand(1, 64, 96, 3, generator=torch.Generator().manual_seed(0))


def _control(network: Any, cls: str = "ControlNet", latents: str | None = None, **more: Any) -> Any:
    """A CONTROL_NET of this class of the host, over a network with weights.

    Args:
        latents: the host's name for the latents that it looks at; None where it gets pixels.
    """
    import comfy.controlnet
    import comfy.latent_formats

    transformers.fill(network)
    if latents is not None:
        more |= {"compression_ratio": 1, "latent_format": getattr(comfy.latent_formats, latents)()}
    return getattr(comfy.controlnet, cls)(network, load_device=torch.device("cpu"), **more)


def flux_network(made: dict[str, Any]) -> Any:
    """As the host's loader makes one of XLabs' files."""
    from comfy.ldm.flux.controlnet import ControlNetFlux

    network = ControlNetFlux(**transformers.KINDS["flux1"].settings, **made)
    return _control(network, extra_conds=["y", "guidance"])


def flux_union_network(made: dict[str, Any]) -> Any:
    """As the host's loader makes one of InstantX' files, here the union, told what it is given."""
    from comfy.ldm.flux.controlnet import ControlNetFlux

    settings = transformers.KINDS["flux1"].settings
    network = ControlNetFlux(latent_input=True, num_union_modes=6, **settings, **made)
    control = _control(network, latents="Flux", extra_conds=["y", "guidance"])
    control.set_extra_arg("control_type", [4])
    return control


def qwen_network(made: dict[str, Any]) -> Any:
    """As the host's loader makes one of InstantX' files, the union among them."""
    from comfy.ldm.qwen_image.controlnet import QwenImageControlNetModel

    settings = {**transformers.KINDS["qwen"].settings}
    del settings["default_ref_method"]
    network = QwenImageControlNetModel(**settings, **made)
    return _control(network, latents="Wan21", extra_conds=[])


def qwen_fun_network(made: dict[str, Any]) -> Any:
    """As the host's loader makes one of the Fun union's files, which has no embeddings of its own:
    its residuals go to the model's first block alone, for a small one has no others.
    """
    from comfy.ldm.qwen_image.controlnet import QwenImageFunControlNetModel

    network = QwenImageFunControlNetModel(
        inner_dim=256, num_attention_heads=2, num_control_blocks=2, **made
    )
    return _control(network, "QwenFunControlNet", "Wan21", extra_conds=[])


def sd3_network(made: dict[str, Any]) -> Any:
    """As the host's loader makes one of SD3's files."""
    import comfy.cldm.mmdit

    settings = {**transformers.KINDS["sd3"].settings, "num_blocks": 2}
    network = comfy.cldm.mmdit.ControlNet(control_latent_channels=16, **settings, **made)
    return _control(network, latents="SD3")


def sd35_network(made: dict[str, Any]) -> Any:
    """As the host's loader makes one of SD3.5's files, which looks at no text."""
    from comfy.cldm.dit_embedder import ControlNetEmbedder

    network = ControlNetEmbedder(
        img_size=None,
        patch_size=2,
        in_chans=16,
        num_layers=2,
        main_model_double=4,
        double_y_emb=False,
        attention_head_dim=64,
        num_attention_heads=4,
        adm_in_channels=32,
        **made,
    )
    return _control(network, "ControlNetSD35", "SD3")


def _forget_models_that_are_gone() -> None:
    """Take those of earlier tests off the host's list of loaded models: it loads all that stand
    there once more for a network with a VAE, and raises where one's patcher is gone.
    """
    import comfy.model_management as management

    gc.collect()
    listed = management.current_loaded_models
    listed[:] = [loaded for loaded in listed if loaded.model is not None]


#: Of models whose networks look at latents.
VAES = {
    "flux1": partial(make_vae, channels=16, widths=(1, 1, 1, 2)),
    "qwen": make_wan21,
    "sd3": partial(make_vae, channels=16, widths=(1, 1, 1, 2)),
}


class Nets:
    """A network for a small transformer, plain and compiled."""

    def __init__(self, host: Host, lab: Lab, kind: str, make: Any) -> None:
        import comfy.ops

        operations = comfy.ops.disable_weight_init
        self.host, self.lab, self.kind = host, lab, kind
        self.plain = make({"operations": operations, "device": "cpu", "dtype": torch.float32})
        self.ours = lab.controlled(self.plain)
        self.model = transformers.load(kind)
        looks = self.plain.latent_format is not None
        self.options = {"vae": VAES[kind]()} if looks else {}

    def sample(
        self, control: Any, height: int, width: int, tokens: int, model: Any = None
    ) -> torch.Tensor:
        """One step under a control, if there is one."""
        _forget_models_that_are_gone()
        positive, negative = (
            transformers.conditioning(self.kind, tokens, seed=seed) for seed in (1, 2)
        )
        if control is not None:
            positive, negative = self.host.control(
                (positive, negative), control, image=IMAGE, **self.options
            )
        result: torch.Tensor = self.host.sample(
            self.model if model is None else model,
            positive,
            negative,
            latent=transformers.latent(self.kind, height, width),
            steps=1,
            cfg=3.0,
            scheduler="simple",
        )
        return result

    def check(self, *size: int, places: int) -> None:
        """Ours gives what the plain one gives, all compiled."""
        with recorded() as theirs:
            eager = self.sample(self.plain, *size)
        before = self.lab.engine.report(self.ours)["calls"]
        with recorded() as found:
            image = self.sample(self.ours, *size)
        assert relative(image, eager) < TOLERANCE
        assert len(found) == len(theirs) > 0 and error(found[0], theirs[0]) < TOLERANCE
        report = self.lab.engine.report(self.ours)
        assert report["regions"] == {"total": places, "compiled": places, "eager": 0}
        assert report["calls"]["eager"] == before["eager"]
        assert report["calls"]["compiled"] == before["compiled"] + places * len(found)


@pytest.mark.parametrize(
    ("kind", "make", "places"),
    [
        ("flux1", flux_network, 4),
        ("flux1", flux_union_network, 4),
        ("qwen", qwen_network, 2),
        pytest.param("qwen", qwen_fun_network, 2, marks=pytest.mark.slow),
        pytest.param("sd3", sd3_network, 2, marks=pytest.mark.slow),
        pytest.param("sd3", sd35_network, 2, marks=pytest.mark.slow),
    ],
)
def test_a_controlnet_of_a_transformer_runs_compiled_within_its_model(
    host: Host, shared: Lab, kind: str, make: Any, places: int
) -> None:
    nets = Nets(host, shared, kind, make)
    jobs = None
    for size in ((8, 12, 13), (16, 8, 40), (12, 12, 1)):
        nets.check(*size, places=places)
        jobs = shared.jobs() if jobs is None else jobs
    assert shared.jobs() == jobs
    model = shared.compiled(nets.model, when_missing="never")
    shared.settle()
    ours = {graph["key"]: graph["state"] for graph in shared.engine.report(model)["kinds"]}
    if make not in (qwen_fun_network, sd35_network):  # whose blocks are others
        for graph in shared.engine.report(nets.ours)["kinds"]:
            assert ours[graph["key"]] == "ready"
    if kind != "flux1":  # of Qwen-Image both ways to call a block must be there
        model = shared.compiled(nets.model)
    jobs = shared.jobs()
    # The residuals, which the host adds between the model's blocks, of a compiled network.
    eager, found = nets.sample(nets.plain, 8, 12, 13), nets.sample(nets.ours, 8, 12, 13, model)
    assert relative(found, eager) < TOLERANCE
    assert not torch.equal(found, nets.sample(None, 8, 12, 13))
    report = shared.engine.report(model)
    left = [graph["places"] for graph in report["kinds"] if graph["state"] != "ready"]
    missing = sum(left)  # Flux's last layer, where no model before it had the same
    assert left == [1] * (missing if kind == "flux1" else 0) and missing <= 1
    total = 5 - EXPECTED[kind].others
    assert report["regions"] == {"total": total, "compiled": total - missing, "eager": missing}
    assert report["calls"]["compiled"] > 0 and shared.jobs() == jobs
