"""Train the denoiser in minutes: `python -m dev.tools.denoiser.train --host TREE --out FILE`.

The network is the host's own UNetModel, and its inputs are what the host's sampling gives it: the
noise of SD1.5's schedule, and which of its thousand levels it is. It is asked for the noise.
"""

from __future__ import annotations

import argparse
import math
import time
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import pictures
from .host import import_host

_UNTOLD = 0.1  # share of pictures whose class is not told
_WARM_UP = 200  # steps
_AVERAGED = 0.999
_HIGHEST_SNR = 5.0

Weights = dict[str, torch.Tensor]


class Plan(NamedTuple):
    """How to train.

    Attributes:
        minutes: training ends after them, counted from the end of the first step.
        steps: training ends after as many, if that is sooner.
        batch: pictures a step.
        rate: the highest learning rate; it rises for 200 steps and falls to zero at the end.
        compiled: let torch.compile fuse the network.
    """

    minutes: float = 5.0
    steps: int = 1_000_000
    batch: int = 256
    rate: float = 8e-4
    compiled: bool = False


class Result(NamedTuple):
    """What training gave: averaged weights, steps made, the mean loss of the last ten seconds."""

    weights: Weights
    steps: int
    loss: float


def build() -> Any:
    """Return the host's UNet of `arch.CONFIG`, float32, with fresh weights by torch's generator.

    The host's layers leave their weights as memory was. Each residual branch begins as zero.
    """
    import comfy.ops
    from comfy.ldm.modules.attention import SpatialTransformer
    from comfy.ldm.modules.diffusionmodules.openaimodel import ResBlock, UNetModel

    from .arch import CONFIG

    unet = UNetModel(**CONFIG, operations=comfy.ops.disable_weight_init)
    last = [unet.out[-1]]
    for module in unet.modules():
        for kind in (torch.nn.Linear, torch.nn.Conv2d, torch.nn.GroupNorm, torch.nn.LayerNorm):
            if isinstance(module, kind):
                kind.reset_parameters(module)  # type: ignore[arg-type]
        if isinstance(module, ResBlock):
            last.append(module.out_layers[-1])
        elif isinstance(module, SpatialTransformer):
            last.append(module.proj_out)
    for layer in last:
        torch.nn.init.zeros_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
    return unet


class Loss:
    """The error of the noise that the network sees in pictures drawn at random."""

    def __init__(self, unet: Any, plan: Plan, drawn: torch.Tensor, classes: torch.Tensor) -> None:
        """Args: the network, and all pictures [N, 64, 64, 3] with their classes [N], beside it."""
        from comfy.model_base import ModelType, model_sampling

        from .arch import CONFIG, Denoiser

        self._forward = torch.compile(unet._forward) if plan.compiled else unet._forward
        self._sampling = model_sampling(Denoiser(CONFIG), ModelType.EPS).to(drawn.device)
        self._batch, self._drawn, self._classes = plan.batch, drawn, classes

    def __call__(self) -> torch.Tensor:
        """Return the loss of one batch, weighted by min(SNR, 5) / SNR (arXiv 2303.09556)."""
        from .arch import UNCONDITIONAL, to_latents, tokens

        device, sampling = self._drawn.device, self._sampling
        chosen = torch.randint(len(self._drawn), (self._batch,), device=device)
        untold = torch.rand(self._batch, device=device) < _UNTOLD
        context = tokens(self._classes[chosen].masked_fill(untold, UNCONDITIONAL))
        numbers = torch.randint(sampling.num_timesteps, (self._batch,), device=device)
        sigma = sampling.sigmas[numbers]
        latents = to_latents(self._drawn[chosen])
        noise = torch.randn_like(latents)
        noisy = sampling.calculate_input(sigma, latents + noise * sigma.view(-1, 1, 1, 1))
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            seen = self._forward(noisy, numbers.float(), context, transformer_options={})
        weight = (_HIGHEST_SNR * sigma.square()).clamp(max=1)
        return ((seen.float() - noise).square().mean(dim=(1, 2, 3)) * weight).mean()


class _Learner:
    """The network's optimizer, and the average of its weights over the last thousand steps."""

    def __init__(self, unet: Any, loss: Loss) -> None:
        self.steps = 0
        self._names, self._parameters = zip(*unet.named_parameters(), strict=True)
        self._averaged = [parameter.detach().clone() for parameter in self._parameters]
        self._loss, fused = loss, self._parameters[0].is_cuda
        self._optimizer = torch.optim.AdamW(self._parameters, weight_decay=0.01, fused=fused)

    def step(self, rate: float) -> torch.Tensor:
        """Learn from one batch and return its loss, for which nothing has waited."""
        self._optimizer.param_groups[0]["lr"] = rate
        loss = self._loss()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.steps += 1
        with torch.no_grad():
            share = 1 - min(_AVERAGED, self.steps / (9 + self.steps))
            torch._foreach_lerp_(self._averaged, self._parameters, share)
        return loss.detach()

    def weights(self) -> Weights:
        """Return the average, by name."""
        return dict(zip(self._names, self._averaged, strict=True))


def train(unet: Any, loss: Loss, plan: Plan) -> Result:
    """Train in place; prints the loss every ten seconds."""
    learner = _Learner(unet, loss)
    begin = time.perf_counter()
    first = float(learner.step(0.0))  # compiles, and chooses kernels
    print(
        f"loss {first:.4f} before training, {time.perf_counter() - begin:.1f} s for it", flush=True
    )
    begin = said = time.perf_counter()
    losses: list[torch.Tensor] = []
    mean, share = first, 0.0
    while share < 1:
        rising, falling = min(1.0, learner.steps / _WARM_UP), 0.5 + 0.5 * math.cos(math.pi * share)
        losses.append(learner.step(plan.rate * rising * falling))
        elapsed = time.perf_counter() - begin
        share = max(elapsed / (60 * plan.minutes), learner.steps / plan.steps)
        if share >= 1 or begin + elapsed - said >= 10:
            mean = float(torch.stack(losses).mean())
            now = time.perf_counter()
            speed = len(losses) / (now - said)
            print(
                f"{now - begin:5.0f} s, step {learner.steps}: loss {mean:.4f}, {speed:.1f} steps/s",
                flush=True,
            )
            said = now
            losses.clear()
    return Result(learner.weights(), learner.steps, mean)


def add_arguments(parser: argparse.ArgumentParser, plan: Plan) -> None:
    """Add what a plan is made of, and the seed; the defaults are the plan's."""
    parser.add_argument("--minutes", type=float, default=plan.minutes)
    parser.add_argument("--steps", type=int, default=plan.steps)
    parser.add_argument("--batch", type=int, default=plan.batch)
    parser.add_argument("--rate", type=float, default=plan.rate)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="with torch.compile")


def planned(options: argparse.Namespace) -> Plan:
    """Return the plan that a user asked for."""
    return Plan(options.minutes, options.steps, options.batch, options.rate, options.compile)


def save(result: Result, file: Path, facts: dict[str, str]) -> None:
    """Write the weights in half precision under the names that the host's loader reads, and say so.

    Args:
        facts: kept in the file, beside how training ended and on what.
    """
    from safetensors.torch import save_file

    facts = {
        **facts,
        "parameters": str(sum(value.numel() for value in result.weights.values())),
        "steps": str(result.steps),
        "loss": f"{result.loss:.5f}",
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    halves = {name: value.half().cpu().contiguous() for name, value in result.weights.items()}
    save_file(halves, file, metadata={"format": "pt", **facts})
    print(f"{file}: {file.stat().st_size / 1e6:.1f} MB, {facts}")


def main() -> None:
    """Draw the pictures, train, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", type=Path, required=True, help="the ComfyUI tree")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    parser.add_argument("--pictures", type=int, default=100_000)
    add_arguments(parser, Plan())
    options = parser.parse_args()
    plan = planned(options)

    begin = time.perf_counter()
    drawn, classes = pictures.pictures(options.pictures, seed=options.seed)
    print(f"{len(drawn)} pictures in {time.perf_counter() - begin:.1f} s", flush=True)
    cuda = torch.cuda.is_available()
    import_host(options.host, cpu=not cuda)
    device = torch.device("cuda" if cuda else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(options.seed)
    unet = build().to(device, memory_format=torch.channels_last)
    data = (torch.from_numpy(array).to(device) for array in (drawn, classes))
    result = train(unet, Loss(unet, plan, *data), plan)
    facts = {
        "about": "Warmgraph's denoiser for measurements: 64x64 pictures of ten classes",
        "pictures": str(len(drawn)),
        "plan": str(plan._asdict()),
        "seed": str(options.seed),
    }
    save(result, options.out, facts)


if __name__ == "__main__":
    main()
