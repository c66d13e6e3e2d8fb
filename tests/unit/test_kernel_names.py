"""Names of kernels are short and still tell which kernel it is."""

from __future__ import annotations

import re

import pytest

from warmgraph_backends.torch_api.kernel_names import LONGEST, shortened
from warmgraph_tools.by_path import ROOT

RESULTS = ROOT / "dev" / "benchmarks" / "results"


@pytest.mark.parametrize(
    ("operators", "name"),
    [
        ("_fused_rms_norm _to_copy add host_attention mul select view", "add_fused_rms_norm"),
        ("cat host_attention clone permute", "cat_host_attention"),
        (
            "_to_copy add convolution mean mul neg pow rsqrt silu sub var_mean",
            "convolution_var_mean",
        ),
        ("clone permute view", "fused"),  # as Inductor calls what it has no name for
        ("a_single_operator_of_a_very_long_name add", "add"),
        ("a_single_operator_of_a_very_long_name", "fused"),
    ],
)
def test_names_say_what_a_kernel_computes(operators: str, name: str) -> None:
    assert shortened(operators.split()) == name


def test_the_names_of_all_kernels_that_were_timed_would_be_short() -> None:
    """Those in the benchmarks' results have up to 142 characters: Inductor's own names."""
    texts = [path.read_text("utf-8") for path in RESULTS.glob("*.json")]
    found = set(re.findall(r"triton_[a-z]{3}_fused_\w+_\d+", "".join(texts)))
    assert len(found) > 300 and max(map(len, found)) > 140
    for whole in found:
        kind, _, operators = whole.partition("_fused_")
        *words, number = operators.split("_")
        assert len(f"{kind}_{shortened(words)}_{number}") <= LONGEST, whole
