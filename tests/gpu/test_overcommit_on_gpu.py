"""What does not fit into the VRAM is right and compiled: UNet with a control, ControlLoRA, VAE.

Full-size models with random weights, each case in a fresh process of the real host, while another
process holds the VRAM. Run with `python dev test --gpu --all`.
"""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

FP16_REL_L2 = 5e-3  # of a UNet call or a control's tensor: another order of fp16 sums
BF16_REL_L2 = 2e-2
BUILD_WORKERS = 6
DEFAULT: tuple[str, ...] = ()
OFF = ("--disable-dynamic-vram",)
NATIVE = ("--disable-cuda-malloc",)
# UNet 4.9 GB, ControlNet 2.4 GB: beside the activations neither fits whole.
FULL_MIB = 3072
# Flags; controls; how much is left in each phase.
MODES: dict[str, tuple[tuple[str, ...], tuple[str, ...], dict[str, int | None]]] = {
    "dynamic-cudaMallocAsync": (
        DEFAULT,
        ("controlnet", "controllora"),
        {"roomy": None, "full": FULL_MIB},
    ),
    "dynamic-native": (NATIVE, ("controlnet",), {"full": FULL_MIB}),
    "legacy-cudaMallocAsync": (OFF, ("controllora",), {"roomy": None, "full": FULL_MIB}),
}
VAE_PHASES: dict[str, dict[str, Any]] = {
    "little": {
        "leave_mib": 3072,
        "works": [["decode", 1024, 1024], ["encode", 1024, 1024]],
    },
    "out": {"leave_mib": 2048, "works": [["decode", 2048, 2048]]},
}


@pytest.fixture(scope="module", params=MODES, ids=str)
def steered(request: pytest.FixtureRequest, lab: Any, sdxl: dict[str, Any]) -> dict[str, Any]:
    """One process: each control over the UNet, with all the VRAM or little of it."""
    flags, controls, leave_mib = MODES[request.param]
    files = {"controlnet": lab.controlnet, "controllora": lab.controllora}
    result = lab.run(
        "controls_overcommitted",
        flags,
        limit_s=300,
        **sdxl,
        controls={name: files[name]("sdxl") for name in controls},
        size=[1024, 1024, 2],
        leave_mib=leave_mib,
        workers=BUILD_WORKERS,
    )
    process = result.pop("process")
    assert process["dynamic_vram"] == request.param.startswith("dynamic")
    assert process["allocator"] == request.param.split("-")[1]
    return dict(result)


def test_a_control_and_its_unet_equal_eager_wherever_their_weights_are(
    steered: dict[str, Any],
) -> None:
    for phase, controls in steered.items():
        for name, row in controls.items():
            assert row["unet_rel_l2"] <= FP16_REL_L2, (phase, name, row)
            assert row["control_rel_l2"] <= FP16_REL_L2, (phase, name, row)


def test_all_their_regions_are_compiled(steered: dict[str, Any]) -> None:
    for phase, controls in steered.items():
        for name, row in controls.items():
            assert min(row["calls"].values()) > 0, (phase, name, row)
            assert set(row["eager_calls"].values()) == {0}, (phase, name, row)


def test_little_vram_holds_neither_whole(steered: dict[str, Any]) -> None:
    for name, row in steered["full"].items():
        for part, loaded in row["loaded_mib"].items():
            assert loaded < row["model_mib"][part], (name, row)


def test_a_vae_equals_eager_with_little_vram_and_in_the_tiles_when_it_runs_out(lab: Any) -> None:
    result = lab.run(
        "vae_overcommitted",
        ("--bf16-vae",),
        limit_s=300,
        model=lab.model("vae"),
        kind="vae",
        store=lab.store("vae-wide"),
        phases=VAE_PHASES,
        workers=BUILD_WORKERS,
    )
    assert result["process"]["dynamic_vram"]
    for phase, tiled in (("little", 0), ("out", 1)):
        for work, row in result[phase].items():
            assert row["tiled"] == {"eager": tiled, "ours": tiled}, (phase, work, row)
            assert row["rel_l2"] <= BF16_REL_L2, (phase, work, row)
            assert row["calls"] > 0 and row["eager_calls"] == 0, (phase, work, row, result)
