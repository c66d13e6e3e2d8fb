"""A process of a newer host: MiniMax H3 whose blocks are given an attention in some of their calls.

`python given_child.py TREE BASE LAB FORM [more]`: prints what it saw as a line of JSON, the last
one; FORM is of a quantised file, or "plain".
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from processes import import_tests  # a script: its folder is on the path

KIND = "h3_curves"
#: Of each run: height, width, frames, sounds, and tokens of the text.
SIZES = ((6, 4, 3, 8, 13), (5, 7, 7, 41, 30), (8, 8, 7, 9, 57))
STEPS = 4
#: Calls of the two larger sizes, but for the first step.
SOME = {"least": 100, "sigma": 0.95}


def main() -> None:
    """Sample with Compile Model and without."""
    form, *more = sys.argv[4:]
    tree, base, root = map(Path, sys.argv[1:4])
    import_tests()
    from engine_tests.lab import Lab

    from warmgraph_tools import inprocess

    host = inprocess.boot(tree, base)
    lab = Lab(root)
    seen = Seen(lab, host, form)
    found = seen.more() if more else seen.all()
    lab.engine.close()
    print(json.dumps(found))  # noqa: T201


class Seen:
    """What is seen of one file."""

    def __init__(self, lab: Any, host: Any, form: str) -> None:
        from warmgraph_tools import small_transformers as transformers

        self.lab, self.host = lab, host
        self.plain = transformers.load(KIND)
        if form == "plain":
            self._add_gates()
        else:
            self.plain = transformers.load_quantised(KIND, form)
        self.ours = lab.compiled(self.plain)
        self._settle()

    def _add_gates(self) -> None:
        """As files have them whose attention is to be sparse: the block's own reads none."""
        import comfy.ops
        import torch

        for block in self.plain.model.diffusion_model.blocks:
            attn, weight = block.attn, block.attn.qkv_proj.weight
            width = attn.heads * attn.head_dim
            like = {"dtype": weight.dtype, "device": weight.device}
            gate = comfy.ops.manual_cast.Linear(weight.shape[1], width, bias=False, **like)
            gate.weight = torch.nn.Parameter(weight[:width].clone(), requires_grad=False)
            attn.to_gate_compress = gate

    def all(self) -> dict[str, Any]:
        """Dense, with a sparse attention in some calls, in all, and dense again."""
        names = {"dense": None, **dict.fromkeys(("first", "second", "third"), SOME)}
        names |= {"all": {}, "back": None, "again": SOME}
        return {name: self.run(told) for name, told in names.items()}

    def more(self) -> dict[str, Any]:
        """Beside others' code in a part, of more elements than 32 bits count, and raising."""
        from warmgraph_backends.runtime import input_guard

        seen = {name: self.run({}, doubled=True) for name in ("noted", "beside", "beside again")}
        before, input_guard.MAX_ELEMENTS = input_guard.MAX_ELEMENTS, 30_000
        try:
            for name in ("large noted", "large built", "large", "large again"):
                seen[name] = self.run(SOME)
        finally:
            input_guard.MAX_ELEMENTS = before
        self.run(SOME)
        seen["fails"] = self.run({**SOME, "fails": 6})
        seen["after"] = self.run(SOME)
        return seen

    def run(self, told: dict[str, Any] | None, *, doubled: bool = False) -> dict[str, Any]:
        """Sample all sizes by both, and what became of it.

        Args:
            told: of the sparse attention; None without one.
            doubled: whether another node has feed-forwards count and give twice as much.
        """
        from engine_tests.lab import relative

        from warmgraph_tools.sparse_attention import SparseAttention

        jobs, before = self.lab.jobs(), self._compiled()
        nodes, counts = [], ([], [])
        images: list[list[Any]] = [[], []]
        for found, count, model in zip(images, counts, (self.plain, self.ours), strict=True):
            nodes.append(SparseAttention(**(told or {})))
            if told is not None:
                model = nodes[-1].patched(model)
            if doubled:
                model = self._doubled(model, count)
            for size in SIZES:
                try:
                    found.append(self._sample(model, *size))
                except ZeroDivisionError:
                    found.append([])
        report = self.lab.engine.report(self.ours)
        pairs = zip(*images, strict=True)
        errors = [[relative(a, b) for a, b in zip(*pair, strict=True)] for pair in pairs]
        seen = {
            "errors": errors,
            "compiled": self._compiled() - before,
            "calls": [node.attended for node in nodes],
            "others": [len(count) for count in counts],
            "reasons": sorted({entry["reason"] for entry in report["eager"]}),
            "norms": [float(part.norm()) for image in images[1] for part in image],
        }
        self._settle()
        return {**seen, "jobs": self.lab.jobs() - jobs}

    def _doubled(self, model: Any, count: list[int]) -> Any:
        clone = model.clone()
        for i, block in enumerate(self.plain.model.diffusion_model.blocks):

            def forward(x: Any, part: Any = block.mlp) -> Any:
                count.append(x.shape[0])
                return 2 * type(part).forward(part, x)

            clone.add_object_patch(f"diffusion_model.blocks.{i}.mlp.forward", forward)
        return clone

    def _sample(self, model: Any, *size: int) -> list[Any]:
        from warmgraph_tools import small_transformers as transformers

        height, width, frames, sounds, tokens = size
        latent = transformers.latent(KIND, height, width, frames=frames, sounds=sounds)
        prompt = transformers.conditioning(KIND, tokens)
        result = self.host.sample(
            model, prompt, prompt, latent=latent, steps=STEPS, cfg=1.0, scheduler="simple"
        )
        return list(result.unbind())

    def _compiled(self) -> int:
        calls: int = self.lab.engine.report(self.ours)["calls"]["compiled"]
        return calls

    def _settle(self) -> None:
        session = self.ours.get_attachment("warmgraph")
        self.lab.wait_until(lambda: not any(graph.is_pending for graph in session.all_graphs))
        self.lab.settle()


if __name__ == "__main__":
    main()
