"""The cases of diffusion transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .lab import BUILD_WORKERS, DEFAULT, NATIVE, OFF, Lab
from .memory_cases import SIX_SIZES
from .transformer_kinds import QUANTISED

Result = dict[str, Any]

#: Pixels, and frames of the latent: 33 and 81 frames of a video are 9 and 21 there.
SIZES = {
    "zimage": ((1024, 1024, 1), (512, 512, 1)),
    "flux1": ((1024, 1024, 1), (512, 512, 1)),
    "klein4b": ((1024, 1024, 1), (512, 512, 1)),
    "qwen": ((1328, 1328, 1),),
    "krea2": ((1024, 1024, 1),),
    "wan1_3b": ((832, 480, 9),),
    "wan14b": ((832, 480, 21),),
    "zimage_int8": ((1024, 1024, 1), (512, 512, 1)),
    "flux1_int8": ((1024, 1024, 1),),
    "flux1_fp8": ((1024, 1024, 1),),
    "flux1_mxfp8": ((1024, 1024, 1),),
    "flux1_nvfp4": ((1024, 1024, 1),),
    "flux2_fp8": ((1024, 1024, 1),),
    "qwen_fp8": ((1328, 1328, 1),),
    "wan14b_int8": ((832, 480, 9),),
    "wan14b_fp8": ((832, 480, 21),),
}
#: The same of models whose steps are not replayed as a whole; of those of video and audio, frames
#: of the latent, a batch, and how many of its frames are known.
UNREPLAYED = {
    "ltx23_fp8": ((640, 352, 16, 1, 1), (1280, 704, 16, 1, 1), (1280, 704, 16)),
    "ltx23": ((1280, 704, 16, 1, 1), (1280, 704, 16)),
    "ltx25_int8": ((1280, 704, 16, 1, 1),),
    "h3_int8": ((896, 512, 17), (864, 480, 37)),
    "ltx23_few_fp8": ((640, 352, 16, 1, 1),),
    "ltx23_few": ((640, 352, 16, 1, 1),),
    "h3_few_int8": ((896, 512, 17),),
    "qwen21_int8": ((1024, 1024, 1), (2048, 2048, 1), (512, 512, 1)),
    "qwen21_fp8": ((1024, 1024, 1),),
    "qwen21": ((1024, 1024, 1),),
}


class More(NamedTuple):
    """What else people do with a model: the host's flags, sizes, the node of its LoRA, and that
    one's strength.
    """

    kind: str
    flags: tuple[str, ...]
    sizes: tuple[tuple[int, ...], ...]
    lora: str | None = None
    strength: float = 0.8


#: By the case's name.
MORE = {
    "zimage_large": More("zimage", DEFAULT, ((2048, 2048, 1), (1024, 1024, 1, 4))),
    "zimage_native": More("zimage", NATIVE, ((1024, 1024, 1),)),
    "zimage_off": More("zimage", OFF, ((1024, 1024, 1),)),
    "flux1_gguf": More("flux1_gguf", OFF, ((512, 512, 1), (1024, 1024, 1))),
    "flux1_gguf_lora": More("flux1_gguf", OFF, ((512, 512, 1),), "LoraLoaderModelOnly"),
    "zimage_novram": More("zimage", ("--novram",), ((1024, 1024, 1),)),
    "wan1_3b_720p": More("wan1_3b", DEFAULT, ((1280, 720, 21),)),
    "flux1_int8_lora": More("flux1_int8", DEFAULT, ((1024, 1024, 1),), "LoraLoaderModelOnly"),
    "flux1_fp8_lora": More("flux1_fp8", DEFAULT, ((1024, 1024, 1),), "LoraLoaderModelOnly"),
    "ltx23_fp8_lora": More(
        "ltx23_fp8", DEFAULT, ((1280, 704, 16, 1, 1),), "LoraLoaderModelOnly", 0.5
    ),
    "flux1_int8_bypass": More(
        "flux1_int8", DEFAULT, ((1024, 1024, 1),), "LoraLoaderBypassModelOnly"
    ),
}

#: Of EasyCache's node, its largest: a model of random weights changes much from step to step.
EASYCACHE_THRESHOLD = 3.0

SMALL_KINDS = (
    *("flux1", "flux2", "chroma", "zimage", "qwen"),
    *("krea", "sd3", "wan", "wan_image", "wan_5b"),
    *("hunyuan", "anima", "predict2_video"),
)
#: Of which one call takes seconds.
LONG = ("wan14b", "wan14b_int8", "wan14b_fp8")
#: Whose weights have room beside their own in float32.
LIGHT = ("zimage", "flux1", "klein4b", "wan1_3b", "zimage_int8", "flux1_int8", "flux1_fp8")


def transformer(name: str) -> Callable[[Lab], Result]:
    """A case that times a model at full size: eager and ours; where steps are replayed as a whole,
    the host's own forward, too, and each block by `torch.compile` where there is room for it.
    """
    is_replayed = name in SIZES
    quick = {"rounds": 1, "steps": 3}
    unhurried: dict[str, Any] = {} if is_replayed else {"rounds": 2, "steps": 4}

    def run(lab: Lab) -> Result:
        exact = SIX_SIZES if name in LIGHT else ()
        return _transformer(
            lab,
            name,
            DEFAULT,
            SIZES[name] if is_replayed else UNREPLAYED[name],
            store=lab.store(name, empty=not lab.smoke),
            truth=name in LIGHT or "few" in name,
            exact_sizes=[[*lab.pixels(*sides), 1] for sides in exact],
            rival=is_replayed and name not in LONG and name not in QUANTISED,
            exact=is_replayed and name not in LONG,
            **(quick if lab.smoke or name in LONG else unhurried),
        )

    return run


def more(name: str) -> Callable[[Lab], Result]:
    """A case that times a model in another mode or at sizes that cost more, by the graphs that its
    own case built if that came before.
    """
    kind, flags, sizes, lora, strength = MORE[name]

    def run(lab: Lab) -> Result:
        # The host takes no `--cpu` beside it.
        modes = () if lab.smoke and "--novram" in flags else flags
        quick = {"rounds": 1, "steps": 3} if lab.smoke else {"rounds": 2, "steps": 4}
        options = {"store": lab.store(kind), "rival": False, "exact": False, "lora": lora}
        return _transformer(lab, kind, modes, sizes, strength=strength, **options, **quick)

    return run


def _transformer(
    lab: Lab, name: str, flags: tuple[str, ...], sizes: Sequence[Sequence[int]], **options: Any
) -> Result:
    result = lab.run(
        "transformer",
        flags,
        limit_s=3000 if lab.smoke else 590,
        name=lab.kind(name),
        path=lab.transformer(name),
        sizes=[[*lab.pixels(*size[:2]), *size[2:]] for size in sizes],
        workers=lab.workers(BUILD_WORKERS),
        **options,
    )
    lines = [
        f"ready in {result['ready_seconds']} s, {result['builds']} builds, "
        f"{result['disk_mb']} MB, regions {result['report']['regions']}",
        *(
            f"{size}: eager {row['eager']['step_ms']['median']} ms, ours "
            f"{row['ours']['step_ms']['median']} ms, x{row['speedup']}, per block "
            f"x{row.get('vs_per_block_torch_compile')} of ours, rel L2 "
            f"{max(row['rel_l2']):.1e}"
            for size, row in result["rows"].items()
        ),
        *(f"{form} FAILED: {why[:200]}" for form, why in result.get("failed", {}).items()),
    ]
    return {
        "meaning": "speedup: eager / ours, a sampler's whole step by the GPU's clock, medians "
        "by turns in one process; per block: `torch.compile` of each block by the host's "
        "helper, dynamic VRAM off for it; rel L2: of each call against eager's",
        **result,
        "lines": lines,
    }


def easycache(lab: Lab) -> Result:
    """Z-Image with the host's EasyCache, before Compile Model and behind it."""
    result = lab.run(
        "step_cache",
        limit_s=1200 if lab.smoke else 240,
        kind=lab.kind("zimage"),
        model=lab.transformer("zimage"),
        size=lab.pixels(1024, 1024),
        store=lab.store("zimage"),
        forms=["auto"] if lab.smoke else ["auto", "exact"],
        nodes=["EasyCacheNode"],
        threshold=EASYCACHE_THRESHOLD,
        workers=lab.workers(BUILD_WORKERS),
    )
    rows = result["rows"]
    return {
        "meaning": "share: of the steps that EasyCache computes in a run, those that are replayed",
        **result,
        "easycache_replayed_share": min(row["share"] for row in rows),
        "lines": [
            f"{row['name']}, {row['form']}: {row['computed']} of {row['steps']} steps computed, "
            f"{row['replayed']} replayed, {row['eager_seconds']} -> {row['seconds']} s, differs by "
            f"{row['max_abs_diff']}"
            for row in rows
        ],
    }


def small_transformers(lab: Lab) -> Result:
    """Every family at small width through all that people change, and quantised blocks."""
    given: dict[str, Any] = {
        "limit_s": 3000 if lab.smoke else 400,
        "kinds": list(SMALL_KINDS),
        "formats": ["int8", "int8_convrot", "fp8_e4m3fn"],
        "store": lab.store("small-transformers"),
        "workers": lab.workers(BUILD_WORKERS),
        **({"dtype": "float32"} if lab.smoke else {}),
    }
    result = lab.run("small_transformers", DEFAULT, **given)
    restarted = lab.run("restarted_transformers", DEFAULT, **given)["rows"]
    rows = result["rows"]
    whole = [row for row in rows if " " not in row["kind"]]
    after = {row["kind"]: row["builds"] for row in rows}
    for row in restarted:
        after[row["kind"]] += row["builds"]
    return {
        "meaning": "sizes, batches, lengths of text, a LoRA at three strengths, an overridden "
        "attention, eight steps by compiled blocks and by the host's own forward, captured, and a "
        "second checkpoint, one after the other; then a new process",
        **result,
        "restarted": restarted,
        "builds_after_first": sum(after.values()),
        "quantised_builds_after_first": sum(
            builds for kind, builds in after.items() if " " in kind
        ),
        "exact_max_abs_diff": max(row["exact"]["max_abs_diff"] for row in whole),
        "lines": [
            f"{row['kind']}: rel L2 {max(row['errors']):.1e} over {len(row['errors'])} changes, "
            f"regions {row['regions']}, builds after the first size and a restart "
            f"{after[row['kind']]}, by the LoRA moved {row['moved']:.1e}, "
            f"replayed {row['captured']['replayed']} and "
            f"{row['exact']['replayed']} exact (differs by {row['exact']['max_abs_diff']})"
            for row in rows
        ],
    }
