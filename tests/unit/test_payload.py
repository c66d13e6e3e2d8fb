"""What is in a packed graph is read for people, and never run."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from torch._inductor.runtime import triton_heuristics
from torch._inductor.runtime.hints import HeuristicType

from warmgraph_backends.torch_api.payload import read_payload


def result(**config: Any) -> Any:
    """What `pack` keeps of a Triton kernel, of torch's own classes."""
    autotuner = pytest.importorskip("triton.runtime.autotuner")
    made = object.__new__(triton_heuristics.StaticTritonCompileResult)
    made.__dict__.update(
        config=autotuner.Config(config, num_warps=4, num_stages=2),
        compile_meta={"device": 0},
        inductor_meta=OrderedDict(kind=HeuristicType.POINTWISE),
    )
    return made


def test_a_payload_is_read_with_its_kernels_and_their_choices() -> None:
    parts = {
        "source": "def call(args):\n    return 1",
        "triton": {"triton_poi_0": (result(XBLOCK=1024), b"binary")},
        "cpp": {"cpp_fused_1": b"library!"},
    }
    facts = read_payload(pickle.dumps(parts, protocol=4))
    assert facts.source == parts["source"]
    assert [kernel.words for kernel in facts.kernels] == [
        "triton_poi_0: Triton, 6 bytes, XBLOCK 1024, num_warps 4, num_stages 2",
        "cpp_fused_1: C++, 8 bytes",
    ]


class _Harmful:
    """Leaves a file behind where it is unpickled as any class would be."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_nothing_of_a_payload_is_run(tmp_path: Path, protocol: int) -> None:
    mark = tmp_path / "run"
    parts = {"source": "", "triton": {}, "cpp": {"x": _Harmful(mark)}}
    with pytest.raises(ValueError, match=r"it names \S+, which no compiled graph needs"):
        read_payload(pickle.dumps(parts, protocol=protocol))
    assert not mark.exists()


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"no pickle",
        pickle.dumps(3),
        pickle.dumps({"source": "x"}),
        pickle.dumps({"source": 3, "triton": {}, "cpp": {}}),
        pickle.dumps({"source": "x", "triton": {"k": (1, b"")}, "cpp": {}}),
        pickle.dumps({"source": "x", "triton": {"k": 1}, "cpp": {}}),
        pickle.dumps({"source": "x", "triton": {}, "cpp": {7: b""}}),
        pickle.dumps({"source": "x", "triton": {}, "cpp": {"k": None}}),
    ],
)
def test_what_is_no_payload_is_said_to_be_none(payload: bytes) -> None:
    with pytest.raises(ValueError, match=r"^it(s| is no packed graph)"):
        read_payload(payload)
