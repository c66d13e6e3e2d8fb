"""What a transformer's graph does on a GPU, read from the code that is written for one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _summary(host_tree: Path, kind: str, form: str, *more: str) -> list[str]:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton, which torch for CPUs does not bring")
    done = subprocess.run(
        [sys.executable, str(ROOT / "dev" / "tools" / "gpu_code.py"), kind, form, *more],
        env={**os.environ, "WARMGRAPH_HOST": str(host_tree)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [line for line in done.stdout.splitlines() if "(" in line]


#: Our own kernel, where each head is normed by itself.
_ROTATES = "torch.ops.warmgraph.norm_and_rotate.default("


def _launches(lines: list[str]) -> list[str]:
    """Triton's kernels and ours."""
    return [line for line in lines if ".run(" in line or _ROTATES in line]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "form", "streams", "joins"),
    [("qwen", "block", 2, 3), ("flux2", "double", 2, 3), ("flux2", "single", 1, 0)],
)
def test_norm_and_rotation_of_queries_and_keys_are_one_pass(
    host_tree: Path, kind: str, form: str, streams: int, joins: int
) -> None:
    """One kernel for each stream, then what joins the streams; nothing waits in float32."""
    lines = _summary(host_tree, kind, form)
    (attention,) = (n for n, line in enumerate(lines) if "host_attention.default(" in line)
    before = _launches(lines[:attention])
    normed = [line for line in before if "rms_norm" in line or _ROTATES in line]
    assert len(normed) == streams, before
    assert sum("_cat_host_attention" in line for line in before) == joins, before
    tables = ", 2, 2), ("  # which hold a rotation for each pair of elements
    assert not any("float32" in line and tables not in line for line in lines), lines


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("flux1", "double"),
        ("flux1", "single"),
        ("zimage", "layer"),
        ("qwen", "block"),
        ("wan", "block"),
        ("sd3", "joint"),
        ("ltx2", "block"),
        ("ltx23", "block"),
    ],
)
def test_a_learned_block_is_the_kernels_of_the_written_one(
    host_tree: Path, kind: str, form: str
) -> None:
    """Of those that are written; what their records cost is not paid for in passes."""
    written, learned = (
        _counts(_summary(host_tree, kind, form, *more)) for more in ((), ("--learned",))
    )
    assert learned == written


def _counts(lines: list[str]) -> tuple[int, int, int]:
    """How many kernels of Triton's, operators of ours, and tensors in float32 between them."""
    return (
        sum(".run(" in line for line in lines),
        sum("torch.ops.warmgraph" in line for line in lines),
        sum("empty_strided" in line for line in lines),
    )


@pytest.mark.slow
def test_what_goes_into_products_is_not_copied_for_each(host_tree: Path) -> None:
    """Of frames and tokens as two sides it would be, where the host makes one of them."""
    lines = _summary(host_tree, "anima", "block")
    first, _ = (n for n, line in enumerate(lines) if "host_attention.default(" in line)
    before = [line for line in lines[:first] if ".run(" in line]
    assert len(before) == 3, before  # what modulates, the norm of the rows, queries with keys
    assert len([line for line in lines if ".run(" in line]) == 9, lines


@pytest.mark.slow
def test_keys_that_heads_share_are_not_copied_for_each(host_tree: Path) -> None:
    lines = _summary(host_tree, "krea", "single")
    (attention,) = (n for n, line in enumerate(lines) if "host_attention.default(" in line)
    before = [line for line in lines[:attention] if ".run(" in line]
    assert len(before) == 3, before  # the norm of the rows, queries, keys


@pytest.mark.slow
def test_values_reach_attention_as_their_product_gave_them(host_tree: Path) -> None:
    """The host of Z-Image repeats them for each head even where each has its own."""
    lines = _summary(host_tree, "zimage", "layer")
    (attention,) = (n for n, line in enumerate(lines) if "host_attention.default(" in line)
    before = _launches(lines[:attention])
    assert len(before) == 2, before  # the norm of the rows, queries with keys


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "form", "file", "kernels"),
    [
        ("ltx23", "block", (), 28),
        ("h3_curves", "block", (), 5),
        ("h3_curves", "block", ("--file", "int8_convrot"), 4),
        ("qwen21", "block", (), 4),
        ("qwen21", "block", ("--file", "int8_convrot"), 3),
        ("h3_vae", "block", (), 6),
    ],
)
def test_blocks_are_few_passes(
    host_tree: Path, kind: str, form: str, file: tuple[str, ...], kernels: int
) -> None:
    """Norm, modulation and rotation are one with what reads them; int8 products take the activation
    before them along, as the host's do.
    """
    if kind == "qwen21" and not (host_tree / "comfy/ldm/qwen_image21").is_dir():
        pytest.skip("this ComfyUI has no Qwen-Image 2.1")
    lines = _summary(host_tree, kind, form, *file)
    assert len([line for line in lines if ".run(" in line]) == kernels, lines
    assert not any("float32" in line for line in lines), lines
    assert any("swiglu" in line for line in lines) == bool(file)


@pytest.mark.slow
def test_an_int8_product_is_one_kernel(host_tree: Path) -> None:
    """Nothing is copied before it or after it, whatever is known of the sizes."""
    (launch,) = _summary(host_tree, "int8_product", "product")
    assert launch.startswith("_int8_gemm_0.run(")


@pytest.mark.slow
@pytest.mark.parametrize(("form", "kernels"), [("Q5_0", 1), ("Q8_0", 1), ("Q4_K", 2), ("Q6_K", 1)])
def test_a_weight_is_unpacked_in_one_pass(host_tree: Path, form: str, kernels: int) -> None:
    """Where two scales are packed for each 32 numbers, these are computed first."""
    lines = _summary(host_tree, "packed_weight", f"{form} float16 bfloat16")
    assert len([line for line in lines if ".run(" in line]) == kernels, lines
    kept = [line for line in lines if "empty_strided" in line]
    assert all(", 8, 1), (8, 1, 8*" in line for line in kept), kept
