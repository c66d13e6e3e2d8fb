"""A described region with the code that computes it: what a worker traces, and compares with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..code.transplant import PackCode, transplanted
from ..contract import Compiler, Program, RegionSpec
from ..errors import BuildError
from ..operators import host_layer
from ..reasons import of
from ..target import keys
from .describe import make_twin, named_code
from .plan import Form
from .specs import region_sources


class RegionCode:
    """The host's code for a description in this process, with packs' files where it has some.

    Attributes:
        spec: the description.
        form: its form.
    """

    def __init__(self, spec: RegionSpec, form: Form) -> None:
        self.spec, self.form = spec, form
        self._guests = PackCode(())

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Within this, the host is as other packs' files change it.

        Raises:
            BuildError: a file does not run by itself.
        """
        if self.spec.packs:  # as in the server: the host was imported before the packs
            named_code(self.spec.module)
        with transplanted(self.spec.packs) as self._guests:
            yield

    def check(self, key: str, backend: Compiler) -> None:
        """Refuse to build another graph than was asked for: of other code, or for another target.

        Raises:
            BuildError: it would be another one.
        """
        spec, here = self.spec, region_sources(self.form, self.spec.module)
        changed = {*here.items()} ^ {*spec.sources.items()}
        if changed:
            names = ", ".join(sorted({name for name, _ in changed})[:3])
            if self._guests.any:
                raise BuildError(self._guests.blame(of("leaves_other_code", names=names)))
            raise BuildError(of("other_host_code", label=spec.label, names=names))
        target = keys.target(spec.device, backend)
        if keys.graph_key(spec, target) != key:
            raise BuildError(of("other_torch", target=target))

    @contextlib.contextmanager
    def blamed(self) -> Iterator[None]:
        """Within this, what goes wrong is told with the names of packs that take part."""
        try:
            yield
        except BuildError as error:
            if not self._guests.any:
                raise
            raise BuildError(self._guests.blame(error.reason)) from error

    def check_packs(self, program: Program) -> None:
        """Refuse packs' code that cannot be part of a graph.

        Raises:
            BuildError: there is some.
        """
        if self._guests.any:
            smallest = program.example({s.name: s.minimum for s in self.spec.symbols})
            self._guests.check_options(lambda: program.run(*smallest))

    def twin(
        self, parameter: Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
    ) -> torch.nn.Module:
        """Rebuild the region's module; see `make_twin`."""
        return make_twin(self.spec.module, parameter)

    def run(
        self, weights: list[torch.Tensor], inputs: list[Any], *, in_full: bool = False
    ) -> tuple[torch.Tensor, ...]:
        """Compute the region eagerly.

        Args:
            in_full: round no layer's input.
        """
        pending = iter(weights)
        twin = self.twin(lambda _shape, _dtype: next(pending))
        if in_full:
            host_layer.round_none(twin)
        with torch.no_grad():
            return self.form.computed(twin, inputs)
