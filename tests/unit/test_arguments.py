"""What forms say of their blocks' arguments is said of arguments that this host's blocks have."""

from __future__ import annotations

import inspect

import pytest

from warmgraph_backends.families import catalogue as registry
from warmgraph_backends.plans.plan import Plan
from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host

#: What blocks of some hosts only have.
NOT_EVERYWHERE = {
    *("attention", "timestep_zero_index", "modulation_dims"),
    *("conv_carry_in", "conv_carry_out"),
}


@pytest.mark.parametrize("kind", transformers.KINDS)
def test_every_argument_that_a_form_names_is_the_hosts(host: Host, kind: str) -> None:
    if not transformers.is_here(kind):
        pytest.skip("this host is older")
    plan = registry.plan_model(transformers.make(kind).diffusion_model)
    if not isinstance(plan, Plan):
        pytest.skip("has no regions")
    assert plan.dispatches
    for dispatch in plan.dispatches:
        for name, (arguments, _) in dispatch.methods.items():
            where = f"{type(dispatch.module).__name__}.{name}"
            hosts = inspect.signature(getattr(type(dispatch.module), name)).parameters
            if any(each.kind is each.VAR_KEYWORD for each in hosts.values()):
                continue
            assert arguments.named.keys() - NOT_EVERYWHERE <= hosts.keys(), where
            by_place = list(hosts)[: 1 + len(arguments.first)]
            assert hosts.keys() <= {*arguments.uses, *by_place}, where
