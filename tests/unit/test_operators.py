"""Operators of ours are there once, whoever else has a copy of this pack in the process."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from warmgraph_backends.operators import host_attention, host_layer
from warmgraph_backends.operators.call_context import using
from warmgraph_tools.by_path import load
from warmgraph_tools.inprocess import Host

BACKENDS = Path(__file__).resolve().parents[2] / "backends"
COPY = "another_copy_of_warmgraph"


@pytest.fixture
def copy() -> Iterator[str]:
    """The pack's packages under a name of another copy."""
    load(COPY, BACKENDS)
    yield COPY
    for name in [name for name in sys.modules if name.partition(".")[0] == COPY]:
        del sys.modules[name]


def test_a_second_copy_serves_by_the_first_ones_operators(copy: str) -> None:
    layers = importlib.import_module(f"{copy}.operators.host_layer")
    attention = importlib.import_module(f"{copy}.operators.host_attention")
    context = importlib.import_module(f"{copy}.operators.call_context")
    assert context.using is not using
    assert layers.OPERATOR is host_layer.OPERATOR
    assert attention.OPERATOR is host_attention.OPERATOR
    block = torch.nn.Sequential(torch.nn.Linear(4, 6))
    x = torch.randn(2, 4)
    for each, using_of in ((layers, context.using), (host_layer, using)):
        with using_of(module=block), torch.no_grad():
            assert torch.equal(each.OPERATOR(x, "0", 6, ""), block(x))
            with pytest.raises(ValueError, match="0 must give"):
                each.OPERATOR(x, "0", 5, "")
    stand_in = host_layer.OPERATOR(x, "0", 6, "")
    assert torch.equal(stand_in, layers.OPERATOR(x, "0", 6, "")), (
        "where there is no layer, in a worker"
    )
    assert not torch.equal(stand_in, host_layer.OPERATOR(x, "1", 6, ""))


def test_a_result_that_is_an_input_is_copied() -> None:
    block = torch.nn.Sequential(torch.nn.Identity())
    x = torch.ones(2, 4)
    with using(module=block):
        result = host_layer.OPERATOR(x, "0", 4, "")
    assert torch.equal(result, x) and result.data_ptr() != x.data_ptr()


_IMPORT = """
import sys
tools, folder, tree = sys.argv[1:]
sys.path.insert(0, tools)
from by_path import load
sys.path.pop(0)
sys.argv = ["main.py", "--cpu"]
sys.path.insert(0, tree)
import comfy.options
comfy.options.enable_args_parsing()
load("pack", folder)
import pack.engine, pack.operators.host_attention
print(ascii(pack.operators.host_attention.OPERATOR))
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has paths of characters")
def test_they_are_made_where_the_path_of_the_pack_is_not_utf_8_for_python(
    host: Host, tmp_path: Path
) -> None:
    """As any letter beyond ASCII in it is without a locale and UTF-8 mode."""
    pack = tmp_path / "gr\u00fcn" / "backends"
    shutil.copytree(BACKENDS, pack, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(BACKENDS.parent / "locales", pack.parent / "locales")
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            _IMPORT,
            BACKENDS.parent / "dev" / "tools",
            os.fsencode(pack),
            host.tree,
        ],
        env={**os.environ, **plain},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert "warmgraph" in run.stdout
