"""Train one of the two: `python -m dev.tools.flow_denoiser.train digits --package FILE ...`.

The network is the host's own NextDiT, and its inputs are what the host's sampling gives it. It is
asked for the velocity from the picture to the noise.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from ..denoiser.host import import_host
from ..denoiser.train import Plan, add_arguments, planned, save, train
from .data import SORTS, Sort, read

_UNTOLD = 0.1  # share of pictures whose class is not told
_GATE = 0.3  # how far blocks are open at first


def build(sort: Sort) -> Any:
    """Return the host's NextDiT for a sort of pictures, float32, with fresh weights by torch's
    generator. The host's layers leave their weights as memory was.
    """
    import comfy.model_management
    import comfy.ops

    from .arch import CLASSES

    chosen = CLASSES[sort](CLASSES[sort].whole())
    chosen.set_inference_dtype(torch.float32, None)

    class Learning(comfy.ops.disable_weight_init):  # type: ignore[misc]
        """The host's own linear layer copies its weights out of the graph of gradients."""

        Linear = torch.nn.Linear

    chosen.custom_operations = Learning
    net = chosen.get_model({}, "", device=torch.device("cpu")).diffusion_model
    comfy.model_management.in_training = True
    for module in net.modules():
        if isinstance(module, (torch.nn.Linear, torch.nn.LayerNorm)):
            type(module).reset_parameters(module)
        if type(module).__name__ == "RMSNorm" and module.weight is not None:
            torch.nn.init.ones_(module.weight)
    dim = chosen.unet_config["dim"]
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(True)
        if "adaLN" in name or name.startswith("final_layer.linear"):
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.02)
            else:
                torch.nn.init.zeros_(parameter)
        if name.endswith("adaLN_modulation.1.bias") and "final" not in name:
            parameter.data[dim : 2 * dim] = parameter.data[3 * dim :] = _GATE
    return net


class Loss:
    """The error of the velocity that the network sees in pictures drawn at random."""

    def __init__(
        self, sort: Sort, net: Any, plan: Plan, drawn: torch.Tensor, classes: torch.Tensor
    ) -> None:
        """Args: the network, and all pictures with their classes, beside it."""
        self._forward = torch.compile(net._forward) if plan.compiled else net._forward
        self._batch, self._drawn, self._classes, self._none = plan.batch, drawn, classes, sort.none

    def __call__(self) -> torch.Tensor:
        """Return the loss of one batch, its shares of noise as of a logit-normal."""
        from .arch import tokens

        device = self._drawn.device
        chosen = torch.randint(len(self._drawn), (self._batch,), device=device)
        untold = torch.rand(self._batch, device=device) < _UNTOLD
        context = tokens(self._classes[chosen].masked_fill(untold, self._none))
        sigma = torch.randn(self._batch, device=device).sigmoid()
        pictures, share = self._drawn[chosen], sigma.view(-1, 1, 1, 1)
        noise = torch.randn_like(pictures)
        noisy = share * noise + (1 - share) * pictures
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            seen = self._forward(noisy, sigma, context, context.shape[1], transformer_options={})
        return (seen.float() - (noise - pictures)).square().mean()


def main() -> None:
    """Read the pictures, train, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sort", choices=list(SORTS))
    parser.add_argument("--host", type=Path, required=True, help="the ComfyUI tree")
    parser.add_argument("--package", type=Path, required=True, help="where the pictures are")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    add_arguments(parser, Plan(rate=1.5e-3))
    options = parser.parse_args()
    plan = planned(options)

    sort = SORTS[options.sort]
    cuda = torch.cuda.is_available()
    import_host(options.host.resolve(), cpu=not cuda)
    device = torch.device("cuda" if cuda else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(options.seed)
    net = build(sort).to(device)
    data = [part.to(device) for part in read(sort, options.package)]
    print(f"{len(data[0])} pictures", flush=True)
    result = train(net, Loss(sort, net, plan, *data), plan)
    facts = {
        "about": f"Warmgraph's small transformer for measurements: {sort.name}",
        "pictures": str(len(data[0])),
        "from": options.package.name,
        "plan": str(plan._asdict()),
        "seed": str(options.seed),
    }
    save(result, options.out, facts)


if __name__ == "__main__":
    main()
