"""The shipped workflows, from simple to special: the one table of their titles and pictures.

The host's Templates page knows nothing of a pack's workflow but its file name, which it shows as
the title, searches and sorts by. Code and tests name a workflow by its key.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parents[2] / "workflows"


class Template(NamedTuple):
    """A shipped workflow.

    Attributes:
        title: what its file name says after "warmgraph NN".
        model: the family's name, large on its picture.
        detail: what sets it apart from others of the family.
        makes: "image", "edit" or "video".
        figure: of `dev/benchmarks/results/headline.json`, measured with this model, this sort of
            file and this use; None where there is none.
    """

    title: str
    model: str
    detail: str
    makes: str
    figure: str | None = None


#: The host's search puts names of fewer words first, so that it keeps this order but for equals.
TEMPLATES: dict[str, Template] = {
    "text_to_image": Template(
        "SDXL", "SDXL", "text to image", "image", "sdxl_1024_default_host_speedup"
    ),
    "z_image_turbo": Template("Z-Image Turbo", "Z-Image", "Turbo", "image", "zimage_1024_speedup"),
    "flux2_klein": Template("Flux.2 klein", "Flux.2", "klein", "image", "klein4b_1024_speedup"),
    "qwen_image_edit": Template("Qwen-Image Edit", "Qwen", "Image Edit", "edit"),
    "lora": Template("SDXL LoRA", "SDXL", "LoRA", "image"),
    "controlnet": Template(
        "SDXL ControlNet",
        "SDXL",
        "ControlNet",
        "image",
        "controlnet_unet_1024_default_host_speedup",
    ),
    "deepcache": Template(
        "SDXL DeepCache", "SDXL", "DeepCache", "image", "deepcache_compiled_sdxl_1024_speedup"
    ),
    "compare": Template(
        "SDXL compare", "SDXL", "compare", "image", "sdxl_1024_default_host_speedup"
    ),
    "vae_tiled_decode": Template("SDXL tiled VAE", "SDXL", "tiled VAE", "image"),
    "z_image_int8": Template(
        "Z-Image Turbo int8", "Z-Image", "int8 file", "image", "zimage_int8_1024_speedup"
    ),
    "flux1_dev_lora": Template("Flux.1 dev LoRA", "Flux.1", "LoRA", "image"),
    "flux1_int8": Template(
        "Flux.1 dev int8", "Flux.1", "int8 file", "image", "flux1_int8_1024_speedup"
    ),
    "flux1_fp8_scaled": Template(
        "Flux.1 Krea dev fp8", "Flux.1", "fp8 file", "image", "flux1_fp8_1024_speedup"
    ),
    "img2img_hires": Template("SDXL image to image", "SDXL", "image to image", "edit"),
    "ltx23_image_to_video": Template(
        "LTX-2.3 image to video",
        "LTX-2.3",
        "image to video",
        "video",
        "ltx23_fp8_i2v_14080_speedup",
    ),
    "wan22_two_models": Template("Wan 2.2 text to video", "Wan 2.2", "text to video", "video"),
    "wan22_fp8_scaled": Template("Wan 2.2 image to video", "Wan 2.2", "image to video", "video"),
    "minimax_h3_image_to_video": Template(
        "MiniMax H3 image to video", "H3", "image to video", "video", "h3_int8_15700_speedup"
    ),
    "load_compiled_graph": Template("SDXL load compiled graph only", "SDXL", "only load", "image"),
    "step_cache_compare": Template(
        "Flux.1 dev Step Cache compare", "Flux.1", "Step Cache compare", "image"
    ),
}


def title(key: str) -> str:
    """Return a workflow's file name without its ending: its place in the order, and its title."""
    place = list(TEMPLATES).index(key) + 1
    return f"warmgraph {place:02} {TEMPLATES[key].title}"


def path(key: str) -> Path:
    """Return a workflow's file."""
    return FOLDER / f"{title(key)}.json"


def read(key: str) -> dict[str, Any]:
    """Return a workflow as it is shipped."""
    return dict(json.loads(path(key).read_text("utf-8")))


def all_nodes(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the nodes of a workflow and of its subgraphs."""
    graphs = [workflow, *workflow.get("definitions", {}).get("subgraphs", ())]
    return [node for graph in graphs for node in graph["nodes"]]
