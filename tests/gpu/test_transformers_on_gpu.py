"""Every family of transformers on a GPU: small ones of the host's own classes, in each mode."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.gpu
MODES = {"dynamic": (), "legacy": ("--disable-dynamic-vram",), "streamed": ("--novram",)}
#: Each test takes a part of all models, in a process of its own: several share the card.
PARTS = 4
#: Of each process: several build at once.
BUILD_WORKERS = 6
#: They have no regions.
WHOLE = ("cosmos", "aura", "kandinsky", "omnigen", "ernie")
KINDS = (
    *("flux1", "flux2", "chroma", "zimage", "qwen"),
    *("krea", "sd3", "wan", "wan_image", "wan_5b"),
    *("hunyuan", "anima", "predict2_video"),
)
AUDIO_VIDEO = (
    *("ltxv", "ltx2", "ltx23", "h3", "h3_curves"),
    *("ltx23_wide int8_convrot", "ltx23_wide fp8_e4m3fn"),
    *("h3_curves int8_convrot", "h3_curves fp8_e4m3fn"),
)
#: Not of fp8_e5m2, whose products PyTorch refuses on a GPU with or without this pack.
FORMATS = (
    *("int8", "int8_convrot", "fp8_e4m3fn", "fp8_e4m3fn_inputs"),
    *("convrot_w4a4", "mxfp8", "nvfp4", "fp8_fast"),
)
#: Of which steps are replayed; "" is plain weights.
REPLAYED = ("", "int8", "int8_convrot", "fp8_e4m3fn", "fp8_e4m3fn_inputs", "fp8_fast")
#: Of latents after one step in bfloat16, whose own error is as large.
TOLERANCE = 2e-2
#: After eight steps.
LONG_TOLERANCE = 5e-2
#: Where a format rounds inputs, or a model is sensitive, the host's own latent moves further than
#: that when the last bit of its text does, which is measured beside it: so many times as far.
OF_ITS_OWN = 2
#: What none may pass: four bits are the coarsest.
COARSEST = 1e-1


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("mode", MODES)
def test_every_family_and_format_runs_compiled_and_as_the_host(
    lab: Any, mode: str, part: int
) -> None:
    kinds, formats = KINDS[part::PARTS], FORMATS[part::PARTS]
    result = lab.run(
        "small_transformers",
        MODES[mode],
        limit_s=400,
        kinds=list(kinds),
        formats=list(formats),
        store=lab.store("small-transformers"),
        workers=BUILD_WORKERS,
        lora=mode != "streamed",  # patched at each call there: a second graph of fp8 is built
    )
    assert len(result["rows"]) == len(kinds) + len(formats)
    for row in result["rows"]:
        form = row["kind"].partition(" ")[2]
        tolerance = min(COARSEST, max(TOLERANCE, OF_ITS_OWN * row["own"]))
        long_tolerance = min(COARSEST, max(LONG_TOLERANCE, OF_ITS_OWN * row["long_own"]))
        assert max(row["errors"]) <= tolerance, row
        assert row["regions"]["eager"] == 0 and row["calls"]["eager"] == 0, row
        assert row["calls"]["compiled"] > 0 and row["builds"] == 0, row
        if mode != "streamed":
            assert row["moved"] > tolerance, row
        assert row["overridden"] > 0 and row["override_error"] <= tolerance, row
        if mode == "streamed":
            continue
        if form not in REPLAYED:
            refused = row["captured"]["not_replayed"]
            assert any("weights cannot be replayed" in reason for reason in refused), row
            continue
        assert row["captured"]["replayed"] >= 9 and row["captured"]["error"] <= long_tolerance, row
        assert row["exact"]["replayed"] >= 9 and row["exact"]["max_abs_diff"] == 0, row


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("mode", MODES)
def test_models_of_video_and_audio_run_compiled_and_as_the_host(
    lab: Any, mode: str, part: int
) -> None:
    kinds = AUDIO_VIDEO[part::PARTS]
    result = lab.run(
        "small_audio_video",
        MODES[mode],
        limit_s=400,
        kinds=list(kinds),
        store=lab.store("small-audio-video"),
        workers=BUILD_WORKERS,
        lora=mode != "streamed",
    )
    assert [row["kind"] for row in result["rows"]] == list(kinds)
    for row in result["rows"]:
        tolerance = min(COARSEST, max(TOLERANCE, OF_ITS_OWN * row["own"]))
        assert max(row["errors"]) <= tolerance, row
        assert row["regions"]["eager"] == 0 and row["calls"]["eager"] == 0, row
        assert row["calls"]["compiled"] > 0 and row["builds"] == 0, row
        assert mode == "streamed" or row["moved"] > tolerance / 2, row


@pytest.mark.parametrize("mode", MODES)
def test_whole_steps_of_models_without_regions_are_captured_bit_for_bit(
    lab: Any, mode: str
) -> None:
    result = lab.run(
        "small_transformers",
        MODES[mode],
        limit_s=580,
        kinds=[],
        formats=[],
        whole=list(WHOLE),
        store=lab.store("whole-steps"),
    )
    assert [row["kind"] for row in result["whole"]] == list(WHOLE)
    for row in result["whole"]:
        assert row["regions"]["total"] == 0 and row["calls"]["eager"] == 0, row
        assert any("its calls are replayed as the host makes them" in n for n in row["notes"]), row
        for run in (*row["auto"], *row["exact"]):
            assert run["max_abs_diff"] == 0, row
        if mode != "streamed":
            for form in ("auto", "exact"):
                first, second = (run["replayed"] for run in row[form])
                assert first >= 3 and second - first >= 3, row
