"""Products of int8 rows: exact sums, scales and biases, in tiles of every form."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
product = importlib.import_module("warmgraph_backends.kernels.int8_product")

_INTERPRETED = """
class Once:
    def __init__(self, kernel):
        (self.config,), self.kernel = kernel.configs, kernel.fn

    def __getitem__(self, grid):
        chosen = self.config.kwargs
        return lambda *args, **named: self.kernel[grid(chosen)](*args, **named, **chosen)

module.wrap_triton = Once  # takes compiled kernels alone
module.shared_memory_bytes = lambda device: 0
# The interpreter's own does not suit all of NumPy's versions.
module.range = lambda *ends: range(
    *(int(n.handle.data.item()) if hasattr(n, "handle") else n for n in ends)
)
draw = torch.Generator().manual_seed(0)

def whole(*shape):
    return torch.randint(-127, 128, shape, dtype=torch.int8, generator=draw)

for number, count, columns, width in shapes:
    module.tiles_for = lambda _: module.TILES[number:][:1]
    rows, weight = whole(count, width), whole(columns, width)
    rows[0], weight[0], weight[-1] = 127, -127, 127
    sums = rows.long() @ weight.long().T
    assert int(sums.min()) == -127 * 127 * width
    of_rows, of_columns = torch.rand(count, 1), torch.rand(columns)

    def multiply(rows_scales, columns_scales, bias):
        found = module.int8_product(
            rows.view(count, -1, 16),
            rows_scales,
            weight.view(-1, 16, width // 16, 16),
            columns_scales.view(-1, 16),
            bias.view(-1, 16),
        )
        assert found.dtype is bias.dtype and found.shape == (count, columns // 16, 16)
        return found.view(count, columns)

    name = f"{number} {count} {columns} {width}"
    plain = multiply(torch.ones(count, 1), torch.ones(columns), torch.zeros(columns))
    assert torch.equal(plain, sums.float()), name
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for bias in (torch.zeros(columns), 5000 * torch.randn(columns, generator=draw)):
            scale = 1e-2 if dtype is torch.float16 else 1.0
            bias = (scale * bias).to(dtype)
            exact = sums.double() * (scale / 127 * of_rows).double() * of_columns.double()
            exact = (exact + bias.double()).to(dtype)
            found = multiply(scale / 127 * of_rows, of_columns, bias)
            note(str(dtype), found, exact.double())
"""
#: Of which tile, rows, columns, depth: less than a tile of each, whole tiles, and a bit more; a
#: depth with the largest sums that people's models have.
_SHAPES = [
    (0, 1, 16, 16),
    (1, 17, 272, 144),
    (2, 257, 48, 80),
    (3, 100, 528, 64),
    (1, 16, 32, 28672),
    (0, 129, 256, 208),
]
#: By dtypes: the interpreter cuts bfloat16 off where a GPU rounds.
_BOUNDS = {"torch.float32": 1e-6, "torch.float16": 1e-4, "torch.bfloat16": 2**-7}


def test_any_sizes_give_exact_sums(interpreted: Any) -> None:
    errors = interpreted("int8_product", _INTERPRETED, _SHAPES)
    assert errors.keys() == _BOUNDS.keys()
    for dtype, found in errors.items():
        assert len(found) == 2 * len(_SHAPES) and max(found) <= _BOUNDS[dtype], (dtype, found)


#: Compute capabilities, and how much shared memory a block may have there.
_CARDS = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10, 120: 99 << 10}


@pytest.mark.parametrize(
    "card", [pytest.param(c, marks=pytest.mark.slow if c in (80, 90) else []) for c in _CARDS]
)
def test_each_card_reads_sixteen_bytes_at_once_in_tiles_that_fit(card: int) -> None:
    """As Triton compiles it for a card that need not be there."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    tiles = product.tiles_for(_CARDS[card])
    assert len(tiles) == 3
    for tile in tiles:
        chosen = {"tile_rows": tile.rows, "tile_columns": tile.columns, "tile_depth": tile.depth}
        pointers = {"rows": "*i8", "weight": "*i8", "bias": "*bf16", "result": "*bf16"}
        pointers |= dict.fromkeys(("scales", "weight_scales"), "*fp32")
        sizes = dict.fromkeys(("count", "columns16", "width16"), "i32")
        signature = {**pointers, **sizes, **dict.fromkeys((*chosen, "band"), "constexpr")}
        aligned = {
            (place,): [["tt.divisibility", 16]]
            for place, name in enumerate(product._int8_gemm.arg_names)
            if name in pointers
        }
        made = triton.compile(
            ASTSource(product._int8_gemm, signature, {**chosen, "band": 8}, aligned),
            target=GPUTarget("cuda", card, 32),
            options={"num_warps": tile.warps, "num_stages": tile.stages},
        )
        code = made.asm["ptx"]
        copies = re.findall(r"cp\.async\.\w+\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", code)
        assert copies and set(copies) == {"0x10"}
        assert "s32.s8.s8" in code  # by tensor cores
        assert set(re.findall(r"st\.global\S*", code)) == {"st.global.v4.b32"}
        assert made.metadata.shared <= tile.shared_bytes <= _CARDS[card]
        assert made.metadata.global_scratch_size == 0  # which no launcher of ours has


def test_a_card_with_little_memory_takes_the_smallest_tile() -> None:
    assert product.tiles_for(32 << 10) == (product.TILES[1],)


@pytest.mark.slow
def test_a_graph_is_packed_with_the_tile_that_was_quickest(host_tree: Path, tmp_path: Path) -> None:
    """All are compiled and timed when it is built; one is loaded, and launched over all tiles."""
    script = Path(__file__).with_name("packed_product.py")
    done = subprocess.run(
        [sys.executable, str(script), str(host_tree), str(tmp_path / "base")],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")},  # it is timed
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    tiles = product.tiles_for(_CARDS[90])
    best = tiles[1]
    assert seen["tried"] == [*(tile.shared_bytes for tile in tiles), best.shared_bytes]
    assert seen["shapes"] == 2 * [[300, 40, 16]]
    across, down = -(-640 // best.columns), -(-300 // best.rows)
    assert seen["grid"] == [across * down, 1, 1]
    assert (seen["warps"], seen["shared"]) == (best.warps, best.shared_bytes)
    assert (seen["sizes"], seen["stream"]) == ([300, 40, 5], 7)
    assert seen["chosen"]["tile_rows"] == best.rows
