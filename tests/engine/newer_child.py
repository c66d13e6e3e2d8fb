"""A process of a newer host: samples small models through Compile Model, beside eager.

`python newer_child.py TREE BASE LAB MODEL...`: prints what it saw as a line of JSON, the last one;
a MODEL is a small transformer, `KIND:FORMAT` for a quantised one, or "unet".
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from processes import import_tests  # a script: its folder is on the path

#: The kinds of these models that are looked at; the others would take longer.
ONLY = ("Wan", "Krea block", "Transformer block")


def main() -> None:
    """Put each model through the same samples."""
    names = sys.argv[4:]
    tree, base, root = map(Path, sys.argv[1:4])
    import_tests()
    from engine_tests.lab import Lab

    from warmgraph_backends.debugging import Debugging
    from warmgraph_tools import inprocess

    host = inprocess.boot(tree, base)
    lab = Lab(root, Debugging(only=ONLY if "unet" in names else ()))
    seen = {name: Seen(lab, host, name).all() for name in names}
    lab.engine.close()
    print(json.dumps(seen))  # noqa: T201


class Seen:
    """What is seen of one model."""

    def __init__(self, lab: Any, host: Any, name: str) -> None:
        from engine_tests.lab import Probe

        from warmgraph_tools import small_transformers as transformers

        self.lab, self.host = lab, host
        self.kind, _, form = name.partition(":")
        self.probe = Probe()
        if name == "unet":
            self.kind, model = "narrow15", host.load("narrow15")[0]
        elif form:
            model = transformers.load_quantised(self.kind, form)
        else:
            model = transformers.load(self.kind)
        self.plain = self.probe.attach(model)
        self.own_calls = 0
        with self.own_attention():
            self.ours = lab.compiled(self.plain)

    def all(self) -> dict[str, Any]:
        """Sample with attentions of the layers' own from the start, without, with them again."""
        with watched_recording() as recorded:
            with self.own_attention():
                came_so = self.step()
            plain = self.step()
            with self.own_attention():
                own = self.step()
            back = self.step()
        return {
            "came so": came_so,
            "plain": plain,
            "own": own,
            "back": back,
            "layers": len(self.layers()),
            "recorded": recorded,
        }

    def step(self) -> dict[str, Any]:
        """One step, and what became of it."""
        import torch

        from warmgraph_tools import small_transformers as transformers

        model = self.ours
        jobs, self.own_calls = self.lab.jobs(), 0
        self.probe.calls.clear()
        if self.kind == "narrow15":
            text = torch.randn(1, 13, 64, generator=torch.Generator().manual_seed(1))
            prompt: Any = [[text, {}]]
            latent: Any = {"samples": torch.zeros(1, 4, 8, 8)}
        else:
            prompt = transformers.conditioning(self.kind, 13)
            latent = transformers.latent(self.kind, 8, 8)
        image = self.host.sample(model, prompt, prompt, latent=latent, steps=1, cfg=1.0)
        report = self.lab.engine.report(model)
        return {
            "error": max(call.error for call in self.probe.calls),
            "jobs": self.lab.jobs() - jobs,
            "attentions": self.own_calls,
            "regions": report["regions"],
            "reasons": sorted({entry["reason"] for entry in report["eager"]}),
            "whole": model.get_attachment("warmgraph").scope._bound.foreign.code,
            "norm": float(image.norm()),
        }

    def layers(self) -> list[Any]:
        from comfy.ldm.modules.attention import ComfyAttention

        unet = self.plain.model.diffusion_model
        return [module for module in unet.modules() if type(module) is ComfyAttention]

    @contextmanager
    def own_attention(self) -> Iterator[None]:
        """As a file, or a node between two runs, names one for each layer."""
        from comfy.ldm.modules.attention import attention_pytorch

        def halved(*args: Any, **kwargs: Any) -> Any:
            self.own_calls += 1
            return 0.5 * attention_pytorch(*args, **kwargs)

        for layer in self.layers():
            layer.function = halved
        yield
        for layer in self.layers():
            layer.function = None


@contextmanager
def watched_recording() -> Iterator[dict[str, int]]:
    """Count what of ours ran while the host recorded allocations, and what while it paused."""
    from comfy.model_prefetch import MALLOC_GRAPHS

    from warmgraph_backends.runtime import region, scope

    seen = {"within": 0, "paused": 0}
    before = region.Region.__call__, scope.Scope._prepare

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            within = MALLOC_GRAPHS[threading.get_ident()].records()
            seen["within" if within else "paused"] += 1
            return function(*args, **kwargs)

        return call

    region.Region.__call__ = watched(before[0])  # type: ignore[method-assign]
    scope.Scope._prepare = watched(before[1])  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        region.Region.__call__, scope.Scope._prepare = before  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
