"""A small transformer of the host's under Step Cache."""

from __future__ import annotations

from typing import Any

import torch

from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host

from ..deepcache.cached import Patch


class Small:
    """A small transformer and two prompts."""

    def __init__(self, host: Host, kind: str) -> None:
        self.host, self.kind = host, kind
        self.model = transformers.load(kind)
        self.prompt = transformers.conditioning(kind, 16)
        self.negative = transformers.conditioning(kind, 16, seed=2)

    def patch(self, class_type: str, **widgets: Any) -> Patch:
        """The patch that a core node with a MODEL input and output makes."""
        return lambda model: self.host.node(class_type, model=model, **widgets)[0]

    def sample(self, model: Any, **options: Any) -> torch.Tensor:
        """Sample; of several streams the latents in one row."""
        given = {"cfg": 1.0, "latent": transformers.latent(self.kind, 8, 8), **options}
        image: Any = self.host.sample(model, self.prompt, self.negative, **given)
        if getattr(image, "is_nested", False):
            image = torch.cat([part.flatten() for part in image.unbind()])
        tensor: torch.Tensor = image
        assert tensor.isfinite().all()
        return tensor
