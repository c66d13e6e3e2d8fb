"""How backend `inductor` makes a graph; only workers do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..contract import Compiled, Measure, Program
from ..device.gpu import is_gpu, pretended, synchronize
from ..errors import BuildError
from ..host_api.attention import host_order
from ..kernels.rounding import may_bound_overflows, round_all, round_once
from ..kinds.layout import CHANNELS_LAST
from ..reasons import of
from ..target.compiler_options import CHANNELS_LAST_CONFIG, ROUNDING_CONFIG, base_config
from ..torch_api import compiling, packing


def lower(program: Program, measure: Measure) -> Compiled:
    """Compile a program and pack what came out.

    Args:
        program: changed.
        measure: held while kernels measure themselves, on one call at the example sizes.

    Raises:
        BuildError: Inductor failed, or the graph is not a pure function.
    """
    description = program.description
    try:
        last_pass = suited_to_device(program)
        with host_order():
            module, source = compiling.compile_wrapper(
                program.graph_module,
                config_of(program),
                wide=description.wide,
                last_pass=last_pass,
            )
        if pretended() is None:
            _run_once(module, program, measure)
        payload, binary_bytes = packing.pack(module, source)
    except BuildError:
        raise
    except Exception as error:
        sort = type(error).__name__
        words = (str(error).strip() or "no text").splitlines()[0][:300]
        why = of("inductor_failed", label=description.label, sort=sort, error=words)
        raise BuildError(why) from error
    return Compiled(payload, {"binary_bytes": binary_bytes}, source)


def _run_once(module: Any, program: Program, measure: Measure) -> None:
    """Have kernels choose among their configurations."""
    weights, inputs = program.example()
    with torch.no_grad(), measure():
        module.call([*weights, *inputs])
        if is_gpu(program.description.device):
            synchronize(torch.device(program.description.device))


def suited_to_device(program: Program) -> Callable[[torch.fx.Graph], None]:
    """Adapt a program to its device; return the last pass over a graph."""
    if may_bound_overflows(program.graph_module.graph):
        return round_all
    if not is_gpu(program.description.device):
        return round_once
    from ..kernels import norms, products  # not part of any other graph (`own_code`)

    norms.sum_before_terms(program.graph_module)
    return products.finish


def config_of(program: Program) -> dict[str, Any]:
    """Return Inductor's settings for a kind; those beyond the device's follow from its key."""
    description = program.description
    config = base_config(description.device)
    if description.layout == CHANNELS_LAST:
        config.update(CHANNELS_LAST_CONFIG)
    if description.wide:
        config["assume_32bit_indexing"] = False
    if is_gpu(description.device):
        config[compiling.OWN_KERNELS] = True
    if may_bound_overflows(program.graph_module.graph):
        config.update(ROUNDING_CONFIG)
    return config
