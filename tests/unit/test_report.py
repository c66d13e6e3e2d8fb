"""What people read of a model: a few lines on its node, and all of it in the full report."""

from __future__ import annotations

import re
from typing import Any

import pytest

from warmgraph_backends.reasons import of
from warmgraph_backends.runtime.gains import Figure, Gain, gain_of
from warmgraph_backends.sessions import words
from warmgraph_backends.sessions.lines import ENGLISH, Line, in_english, line, plain

NO_PIECES = {"places": 0, "replayed": 0, "vram_bytes": 0, "cuts": {}, "refused": {}}
REPORT: dict[str, Any] = {
    "id": "model-1",
    "model": "SDXL",
    "backend": "inductor",
    "learned": False,
    "standing": "partly",
    "stage": "faster",
    **words.gain_told(Gain(2.0, "1024x1024")),
    "when_missing": "background",
    "graphs": "",
    "regions": {"total": 203, "compiled": 200, "eager": 3},
    "ready": 0,
    "idle": 0,
    "unused": False,
    "eager": [{"reason": "another node patches attn2_patch", "places": 3, "examples": ["a", "b"]}],
    "kinds": [],
    "cards": [],
    "builds": 2,
    "loads": 21,
    "reused": 4,
    "calls": {"compiled": 4000, "eager": 0},
    "speed": {"form": "compiled", "size": "", "ms": {"compiled": 31.2, "eager": 61.0}},
    "captured": {
        "signatures": 2,
        "captures": 3,
        "replayed": 180,
        "vram_bytes": 416 * 2**20,
        "not_replayed": {"weights moved since the last step": 2},
        "pieces": NO_PIECES,
    },
    "misses": [{"kind": "Upsample 64", "reason": "torch: made for 2.10"}],
    "to_install": [],
    "disk_bytes": 12 * 2**20,
    "vram_bytes": 3 * 2**19,
    "seconds_saved": 41.2,
    "building": {"done": 3, "total": 5, "seconds_left": 7.4, "running": ["x"], "paused": False},
}
BUILT = {"done": 5, "total": 5, "seconds_left": None, "running": [], "paused": False}
NOTHING = {
    **{"signatures": 0, "captures": 0, "replayed": 0, "vram_bytes": 0},
    "not_replayed": {},
    "pieces": NO_PIECES,
}
A_NOTE = [line("note", note="a note")]


def _on_node(notes: list[Line] | None = None, **changes: Any) -> list[str]:
    return [each.text for each in words.node_lines({**REPORT, **changes}, notes or [])]


def _whole(notes: list[Line] | None = None, **changes: Any) -> list[str]:
    return [each.text for each in words.report_lines({**REPORT, **changes}, notes or [])]


def test_each_further_card_has_a_line_and_its_own_reasons() -> None:
    regions = {"total": 203, "compiled": 200, "eager": 3}
    left = [{"reason": "it hooks all modules", "places": 3}]
    card = {"device": "cuda:1", "regions": regions, "eager": left, "ms": 31.2}
    assert "on cuda:1: 200 of 203 parts compiled, 31 ms a step" in _on_node(cards=[card])
    whole = _whole(cards=[card, {**card, "device": "cuda:2", "ms": None, "eager": []}])
    assert "  on cuda:1: 3 parts at normal speed: it hooks all modules" in whole
    assert "on cuda:2: 200 of 203 parts compiled" in whole


def test_all_that_a_user_asks_is_said_once() -> None:
    assert _whole(A_NOTE) == [
        "2.0x faster: 31 ms a step instead of 61 ms",
        "SDXL: 200 of 203 parts compiled (inductor)",
        "3 of 203 parts at normal speed: another node patches attn2_patch",
        "  such as a, b",
        "Compiling SDXL: 3 of 5, about 7 s left",
        "compiled graphs: 2 made, 21 loaded, 4 in use before, 1 missing; 4000 calls compiled",
        "  missing: Upsample 64: torch: made for 2.10",
        "CUDA graphs: 2 sizes captured, 180 steps replayed, 416 MiB",
        "  steps that were not replayed: 2 (weights moved since the last step)",
        "disk 12.0 MiB, VRAM 1.5 MiB (kernels; weights are ComfyUI's own), 41 s of compiling saved",
        "a note",
    ]


def test_the_node_says_how_quick_it_is_how_far_and_what_is_not_compiled() -> None:
    assert _on_node(A_NOTE) == [
        "2.0x faster: 31 ms a step instead of 61 ms",
        "SDXL: 200 of 203 parts compiled",
        "3 of 203 parts at normal speed: another node patches attn2_patch",
        "a note",
    ]


@pytest.mark.parametrize(
    ("speed", "said"),
    [
        (("eager", 61.2, 61.0), "61 ms a step, normal speed"),
        (("compiled", 31.2, None), "2.0x faster at 1024x1024; 31 ms a step here"),
        (("exact", 9.94, 12.0), "1.2x faster: 9.9 ms a step instead of 12 ms"),
        (("compiled", 2899.0, 3875.0), "1.3x faster: 2.90 s a step instead of 3.88 s"),
        (("compiled", 60.0, 61.0), "about as fast: 60 ms a step, 61 ms without"),
        (("compiled", 70.0, 61.0), "0.9x, slower here: 70 ms a step instead of 61 ms"),
    ],
)
def test_a_speed_is_told_as_it_was_measured(
    speed: tuple[str, float, float | None], said: str
) -> None:
    form, ms, eager = speed
    times = ({} if eager is None else {"eager": eager}) | {form: ms}
    gain = Gain(2.0, "1024x1024") if eager is None else gain_of(Figure(ms), Figure(eager), "64x64")
    told = {"speed": {"form": form, "size": "64x64", "ms": times}, **words.gain_told(gain)}
    assert _on_node(**told)[0] == _whole(**told)[0] == said
    assert not any("a step" in each for each in _on_node(speed=None))


def test_nothing_is_said_of_a_factor_that_is_not_known() -> None:
    told = {"form": "compiled", "size": "1024x1024", "ms": {"compiled": 31.2}}
    assert _on_node(speed=told, **words.gain_told(None))[0] == "31 ms a step"
    assert _on_node(speed=told)[0] == "2.0x faster; 31 ms a step"  # of other calls at this size


def test_a_factor_is_the_same_text_everywhere() -> None:
    """A half is rounded up, as people do and pages: Python's own way is to the even digit."""
    told = [words.gain_told(Gain(factor, ""))["times"] for factor in (1.25, 2.65, 0.949, 12.04)]
    assert told == ["1.3", "2.7", "0.9", "12.0"]


def test_what_a_step_takes_before_anything_is_compiled_is_no_news() -> None:
    plain = {"form": "eager", "size": "", "ms": {"eager": 61.0}}
    compiling = {"standing": "building", "stage": "compiling", "speed": plain, "eager": []}
    assert _on_node(**compiling) == ["Compiling SDXL: 3 of 5, about 7 s left"]
    quick = {**compiling, "speed": REPORT["speed"]}
    assert _on_node(**quick)[1] == "2.0x faster: 31 ms a step instead of 61 ms"
    alone = {"form": "compiled", "size": "", "ms": {"compiled": 61.0}}
    assert len(_on_node(**{**compiling, "speed": alone}, **words.gain_told(None))) == 1


def test_who_is_slower_is_told_why_where_that_is_known() -> None:
    slow = {"form": "compiled", "size": "", "ms": {"compiled": 70.0, "eager": 61.0}}
    gain = words.gain_told(Gain(0.87, ""))
    said = _on_node(stage="slower", speed=slow, **gain)
    assert said[-1] == ("likely because steps are not replayed: weights moved since the last step")
    assert not any("likely" in each for each in _on_node(stage="same", speed=slow, **gain))


@pytest.mark.parametrize(
    ("standing", "changes", "said"),
    [
        ("compiled", {}, "SDXL: 200 of 203 parts compiled"),
        ("partly", {}, "SDXL: 200 of 203 parts compiled"),
        ("eager", {}, "SDXL: 200 of 203 parts compiled"),
        ("building", {}, "Compiling SDXL: 3 of 5, about 7 s left"),
        ("building", {"seconds_left": None}, "Compiling SDXL: 3 of 5"),
        ("building", {"seconds_left": 89.0}, "Compiling SDXL: 3 of 5, about 89 s left"),
        ("building", {"seconds_left": 91.0}, "Compiling SDXL: 3 of 5, about 2 min left"),
        ("building", {"paused": True}, "Compiling SDXL: 3 of 5, paused"),
        ("building", {"done": 5}, "SDXL: loading compiled graphs"),
        ("replayed", {}, "SDXL: nothing is compiled; whole steps are replayed from CUDA graphs"),
    ],
)
def test_a_node_says_where_its_model_stands(
    standing: str, changes: dict[str, Any], said: str
) -> None:
    building = {**REPORT["building"], **changes}
    assert _on_node(standing=standing, building=building)[1] == said


def test_what_no_run_has_used_yet_is_not_told_as_what_ran() -> None:
    plain = {"form": "eager", "size": "", "ms": {"eager": 61.0}}
    new = {"standing": "waiting", "stage": "ready", "ready": 200, "speed": plain}
    said = ["Ready. The next image is faster.", "SDXL: 200 of 203 parts compiled"]
    assert _on_node(**{**new, "speed": REPORT["speed"]})[:2] == said
    assert _on_node(**new)[:2] == _on_node(**{**new, "speed": None})[:2] == said
    used = {**new, "standing": "compiled", "ready": 0}
    assert _on_node(**used)[:2] == said  # the last image's steps did not
    assert _on_node(**{**used, "speed": None})[0] == said[1]  # a VAE that ran
    assert "200 of them wait for the next run to use them" in _whole(**new)
    none = {"standing": "waiting", "regions": {"total": 0, "compiled": 0, "eager": 0}, "eager": []}
    assert _on_node(**none)[1] == "SDXL: waits for its first run"


def test_what_nothing_used_says_where_it_belongs() -> None:
    new = {"standing": "waiting", "stage": "waiting", "ready": 200, "speed": None, "unused": True}
    said = _on_node(**new)
    assert "put it right before the node that makes it" in said[0] and said[0] in _whole(**new)
    assert said[1] == "SDXL: 200 of 203 parts compiled"
    building = _on_node(**{**new, "stage": "compiling", "standing": "building"})
    assert building[0].startswith("Compiling SDXL") and building[1] == said[0]


def test_parts_that_the_last_run_had_no_use_for_are_no_failure() -> None:
    idle = {"standing": "compiled", "idle": 12, "eager": []}
    assert not any("called" in each for each in _on_node(**idle))
    assert "12 compiled parts were not called in the last run" in _whole(**idle)
    alone = {"standing": "waiting", "regions": {"total": 0, "compiled": 0, "eager": 0}, "idle": 12}
    assert _on_node(**alone, eager=[])[1] == (
        "SDXL: the last run called none of its 12 compiled parts"
    )


def test_nothing_is_said_of_builds_when_none_run() -> None:
    assert not any("Compiling" in each for each in _whole(building=BUILT))
    begun = {**BUILT, "done": 0}
    assert "Compiling SDXL: 0 of 5" in _whole(building=begun)


def test_what_comes_by_itself_is_not_told_as_what_is_not_compiled() -> None:
    coming = [
        {"reason": of(key), "places": 9, "examples": ["a"]}
        for key in ("being_compiled", "being_loaded", "compiled_elsewhere")
    ]
    lines = _on_node(standing="building", eager=coming)
    assert lines == [
        "2.0x faster: 31 ms a step instead of 61 ms",
        "Compiling SDXL: 3 of 5, about 7 s left",
    ]
    left = [*coming, *REPORT["eager"]]
    assert "3 of 203 parts at normal" in _on_node(standing="building", eager=left)[-1]


def test_many_reasons_are_one_line_on_the_node_and_all_are_in_the_report() -> None:
    reasons = [
        {"places": 1, "reason": f"reason {number}", "examples": ["a"]} for number in range(9)
    ]
    lines = _on_node(eager=reasons)
    assert lines[-1] == "9 of 203 parts at normal speed: reason 0; other reasons: 8"
    assert len(lines) == 3
    whole = "\n".join(_whole(eager=reasons))
    assert all(entry["reason"] in whole for entry in reasons)


def test_a_compilers_long_complaint_is_cut_on_the_node() -> None:
    long = "compiling failed: " + "word " * 200
    said = _on_node(eager=[{"places": 8, "reason": long, "examples": ["a"]}])[-1]
    assert said.startswith("8 of 203 parts at normal speed: compiling failed: word")
    assert said.endswith(" ...") and len(said) < 170
    note = _on_node([line("note", note=long)])[-1]
    assert note.endswith(" ...") and len(note) <= words.MAX_REASON


def test_a_node_has_five_lines_at_most_and_says_how_many_more_there_are() -> None:
    notes = [line("note", note=f"note {number}") for number in range(6)]
    assert _on_node(notes)[3:] == ["note 0", "5 more lines are in the full report"]
    assert _on_node(notes[:2])[3:] == ["note 0", "note 1"]
    assert _whole(notes)[-6:] == [f"note {number}" for number in range(6)]


def test_a_model_without_parts_says_why_and_how_it_runs() -> None:
    none = {"regions": {"total": 0, "compiled": 0, "eager": 0}, "captured": NOTHING, "eager": []}
    faster = "2.0x faster: 31 ms a step instead of 61 ms"
    plain_step = {**none, "standing": "eager", "speed": None}
    assert _whole(A_NOTE, **{**none, "standing": "eager"}) == [faster, "a note"]
    assert _whole(A_NOTE, **plain_step) == _on_node(A_NOTE, **plain_step) == ["a note"]
    assert _on_node(**plain_step) == ["SDXL: running at normal speed"]
    replayed = {**none, "standing": "replayed", "captured": REPORT["captured"]}
    assert _on_node(A_NOTE, **replayed) == [
        faster,
        "SDXL: nothing is compiled; whole steps are replayed from CUDA graphs",
        "a note",
    ]
    assert _whole(**replayed)[2].startswith("CUDA graphs: 2 sizes captured")
    other = {**plain_step, "model": ""}
    assert _on_node(**other) == ["nothing to compile"]
    assert _whole(**other) == ["nothing to report"]


def test_notes_name_what_others_added_what_stays_the_hosts_and_which_steps_were_not_ours() -> None:
    notes = words.notes_of(
        ["of the session"],
        [("a", "Motion of pack"), ("b", "Motion of pack"), ("c", "Adapter of other")],
        {("norms", "Norm of pack"): 3, ("products", "quantised, int8"): 12},
        {"gradients are on": 4},
    )
    assert [note.text for note in notes] == [
        "of the session",
        "2 layers that other packs added run as they are: Motion of pack",
        "a layer that another pack added runs as it is: Adapter of other",
        "3 norms stay as they are (Norm of pack); all around them is compiled",
        "12 linear layers stay as they are (quantised, int8); all around them is compiled",
        "steps at normal speed: 4 (gradients are on)",
    ]


DEEPCACHE: dict[str, Any] = {
    "branch": 2,
    "wanted_branch": 2,
    "costs": [0.12, 0.31, 0.5],
    "ran": True,
    "problem": None,
    "chunks": [
        {"role": "positive", "full": 7, "shallow": 13},
        {"role": "negative", "full": 7, "shallow": 13},
    ],
    "seconds_saved": 0.61,
    "seconds_without": 2.03,
    "vram_bytes": 20 * 2**20,
}


def _cached(**changes: Any) -> list[str]:
    return [each.text for each in words.deepcache_lines({**DEEPCACHE, **changes})]


def test_a_deepcache_says_what_it_did_and_what_its_branches_cost() -> None:
    saved = "about 0.61 of 2.03 s saved, 20 MiB of features"
    ran = f"DeepCache, last run: 7 full + 13 shallow steps; {saved}"
    branch = "a shallow step does about 50% of the work of a full one."
    listed = "By branch: 0: 12%, 1: 31%, 2: 50%."
    costs = f"A larger branch does more, and changes the image less. {listed}"
    assert _cached() == [ran, f"Branch 2: {branch}", costs]
    assert _cached(branch=0, wanted_branch=0)[1] == f"Branch 0: {branch.replace('50', '12')}"
    assert _cached(wanted_branch=11)[1] == f"Branch 2, the last of this model, for 11: {branch}"
    assert _cached(chunks=[])[0] == "DeepCache, last run: no calls of the UNet"
    assert _cached(ran=False)[0].endswith("is shown here once a run has ended")
    assert _cached(problem="it is off")[0] == "DeepCache: it is off"


def test_a_deepcache_tells_conditionings_apart_that_ran_in_other_steps() -> None:
    chunks = [
        {"role": role, "full": number, "shallow": 20 - number}
        for number, role in enumerate(("positive", "negative", "conditioning 2"), start=6)
    ]
    assert _cached(chunks=chunks)[:4] == [
        "DeepCache, last run: about 0.61 of 2.03 s saved, 20 MiB of features",
        "  positive: 6 full + 14 shallow",
        "  negative: 7 full + 13 shallow",
        "  conditioning 2: 8 full + 12 shallow",
    ]


def test_a_line_is_its_key_its_values_as_text_and_its_english() -> None:
    made = line("building", model="{SDXL}", done=3, total=5)
    values = {"model": "{SDXL}", "done": "3", "total": "5"}
    assert made == ("building", values, "Compiling {SDXL}: 3 of 5")
    assert plain([made]) == [{"key": made.key, "values": values, "text": made.text}]
    assert in_english([made, line("nothing")]) == "Compiling {SDXL}: 3 of 5\nnothing to compile"


def test_a_line_whose_value_is_missing_is_an_error_at_once() -> None:
    for key, english in ENGLISH.items():
        if "{" in english:
            with pytest.raises(KeyError):
                line(key)


def test_people_read_no_words_of_the_inside() -> None:
    for key, english in ENGLISH.items():
        said = re.sub(r"\{\w+\}", "", english).lower()
        assert not re.search(r"\b(regions?|kinds?|eager|epoch|scope|plan)\b", said), key


def test_blocks_that_are_replayed_one_by_one_are_told_with_what_cuts_them() -> None:
    reason = of("attention_between", why=of("code_unknown"))
    pieces = {**NO_PIECES, "places": 57, "replayed": 1026, "cuts": {reason: 57}}
    captured = {**NOTHING, "pieces": {**pieces, "vram_bytes": 3 * 2**20}}
    lines = _whole(captured=captured)
    at = lines.index("CUDA graphs: 57 blocks captured one by one, 1026 replayed, 3 MiB")
    assert lines[at + 1] == f"  where one is cut in two: 57 ({reason})"


def test_a_kernel_that_could_be_installed_is_told_with_its_command() -> None:
    wanted = [{"kernel": "FlashAttention 3", "package": "fa3-fwd"}]
    told = [each.text for each in words.report_lines({**REPORT, "to_install": wanted}, [])]
    assert told[-1].startswith("FlashAttention 3 is not installed")
    assert told[-1].endswith("pip install fa3-fwd")
