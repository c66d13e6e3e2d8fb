"""The sentences that people read, as data: a key, its values, and its English.

A page shows another language by the key, with the reasons that stand in a sentence, which are data
likewise (`reasons.TABLE`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from ..errors import WarmgraphError
from ..reasons import Reason

#: Each sentence with {names} for what stands in it. Other languages have the same keys and names in
#: `locales/*/main.json`.
ENGLISH = {
    # What a step takes.
    "speed_faster": "{factor}x faster: {now} a step instead of {eager}",
    "speed_nearest": "{factor}x faster at {size}; {now} a step here",
    "speed_same": "{now} a step, about normal speed",
    "speed_slower": "slower here: {now} a step, without this node {eager}",
    "speed_eager": "{now} a step, normal speed",
    "speed_alone": "{now} a step",
    "slower_why": "likely because steps are not replayed: {reason}",
    # How far a model is.
    "ready": "Ready. The next image is faster.",
    "unused": "Nothing in the last prompt used this node's output. If an image was made, put it "
    "right before the node that makes it: after merges.",
    "parts": "{model}: {compiled} of {total} parts compiled",
    "parts_by": "{model}: {compiled} of {total} parts compiled ({backend})",
    "parts_learned": "{model}: learned; {compiled} of {total} parts compiled",
    "parts_learned_by": "{model}: learned; {compiled} of {total} parts compiled ({backend})",
    "on_card": "on {device}: {compiled} of {total} parts compiled",
    "on_card_timed": "on {device}: {compiled} of {total} parts compiled, {now} a step",
    "on_card_not": "  on {device}: {places} parts at normal speed: {reason}",
    "parts_idle": "{model}: the last run called none of its {idle} compiled parts",
    "loading": "{model}: loading compiled graphs",
    "building": "Compiling {model}: {done} of {total}",
    "building_left": "Compiling {model}: {done} of {total}, about {seconds} s left",
    "building_left_minutes": "Compiling {model}: {done} of {total}, about {minutes} min left",
    "building_paused": "Compiling {model}: {done} of {total}, paused",
    "building_elsewhere": "{model}: waiting for another server, which compiles for it: {count}",
    "replayed": "{model}: nothing is compiled; whole steps are replayed from CUDA graphs",
    "waiting": "{model}: waits for its first run",
    "eager": "{model}: running at normal speed",
    "nothing": "nothing to compile",
    # What is not compiled.
    "not_compiled": "{places} of {total} parts at normal speed: {reason}",
    "not_compiled_more": "{places} of {total} parts at normal speed: {reason}; "
    "other reasons: {more}",
    # Whatever else there is to say.
    "note": "{note}",
    "added": "{count} layers that other packs added run as they are: {whose}",
    "added_one": "a layer that another pack added runs as it is: {whose}",
    "left_norms": "{count} norms stay as they are ({why}); all around them is compiled",
    "left_products": "{count} linear layers stay as they are ({why}); all around them is compiled",
    "left_convolutions": "{count} convolutions stay as they are ({why}); all around them is "
    "compiled",
    "left_parts": "{count} attentions and feed-forwards stay as they are ({why}); all around "
    "them is compiled",
    "left_unpacked": "{count} linear layers unpack their weights at each call ({why})",
    "layers_norms": "  {kind}: {count} norms ({why})",
    "layers_products": "  {kind}: {count} linear layers ({why})",
    "layers_convolutions": "  {kind}: {count} convolutions ({why})",
    "layers_parts": "  {kind}: {count} attentions and feed-forwards ({why})",
    "layers_unpacked": "  {kind}: {count} linear layers that unpack their weights ({why})",
    "steps_eager": "steps at normal speed: {count} ({reason})",
    "parts_new": "{count} of them wait for the next run to use them",
    "idle": "{count} compiled parts were not called in the last run",
    "more_notes": "{count} more lines are in the full report",
    "failed": "running at normal speed: {error}",
    "no_report": "no report: {error}",
    # What goes on while a prompt waits at a node.
    "waits_step": "step at {size}, batch {batch}",
    "cancelled": "Cancelled.",
    "cancelled_building": "Cancelled. Compiling goes on in the background.",
    "cancelled_paused": "Cancelled. Compiling is paused; Resume is in the tab Warmgraph.",
    # The rest of the full report.
    "examples": "  such as {examples}",
    "graphs": "compiled graphs: {builds} made, {loads} loaded, {reused} in use before, "
    "{misses} missing; {calls} calls compiled",
    "missing": "  missing: {kind}: {reason}",
    "captured": "CUDA graphs: {sizes} sizes captured, {replayed} steps replayed, {memory}",
    "pieces": "CUDA graphs: {places} blocks captured one by one, {replayed} replayed, {memory}",
    "cut": "  where one is cut in two: {count} ({reason})",
    "not_captured": "  steps that were not replayed: {count} ({reason})",
    "costs": "disk {disk}, VRAM {vram} (kernels; weights are ComfyUI's own), {seconds} s of "
    "compiling saved",
    "nothing_to_report": "nothing to report",
    # DeepCache.
    "deepcache_off": "DeepCache: {problem}",
    "deepcache_waiting": "DeepCache: what it did is shown here once a run has ended",
    "deepcache_none": "DeepCache, last run: no calls of the UNet",
    "deepcache_ran": "DeepCache, last run: {full} full + {shallow} shallow steps; about {seconds} "
    "of {whole} s saved, {memory} of features",
    "deepcache_saved": "DeepCache, last run: about {seconds} of {whole} s saved, {memory} of "
    "features",
    "deepcache_positive": "  positive: {full} full + {shallow} shallow",
    "deepcache_negative": "  negative: {full} full + {shallow} shallow",
    "deepcache_other": "  {role}: {full} full + {shallow} shallow",
    "deepcache_branch": "branch {branch} of 0 to {last}",
    "deepcache_branch_cut": "branch {branch} of 0 to {last} ({wanted} is beyond this model)",
    "deepcache_costs": "work of a shallow step at {size}, by branch: {costs}",
    # Step Cache.
    "stepcache_off": "Step Cache: {problem}",
    "stepcache_all": "Step Cache: every step is computed, as without it",
    "stepcache_waiting": "Step Cache: what it did is shown here once a run has ended",
    "stepcache_none": "Step Cache, last run: another node computes the steps itself, so none was "
    "left out",
    "stepcache_ran": "Step Cache, last run: {computed} of {steps} steps computed, {speed}x; about "
    "{seconds} of {whole} s saved, {memory} kept",
    # Two latents, compared by the report.
    "latents_same": "latents: the same, bit for bit",
    "latents_like": "latents: PSNR {psnr} dB, SSIM {ssim}",
    "latents_like_several": "latents: PSNR {psnr} dB, SSIM {ssim} in the mean of {count}; "
    "{least_psnr} dB and {least_ssim} at worst",
    "latents_part": "part {part} of {parts} (video and sound are apart):",
    "latents_missing": "latents: not compared; latent and compared_with both have to be linked",
    "latents_shapes": "latents: not compared, for their sizes differ: {shape} and {other}",
    "latents_range": "latents: not compared; some values are not finite, or all of one are the "
    "same",
    "latents_failed": "latents: not compared: {error}",
    # What a user can mend: in a few words, then why.
    "mend_torch": "PyTorch does not fit",
    "mend_torch_why": "Nothing can be compiled: {reason}; update torch to 2.10 or newer.",
    "mend_triton": "Triton is missing",
    "mend_triton_why": "Nothing can be compiled: Triton is not installed; on Windows install "
    "triton-windows, on Linux reinstall torch.",
    "mend_c_compiler": "C compiler is missing",
    "mend_c_compiler_why": "Nothing can be compiled: Triton needs one (gcc or clang) for its first "
    "kernel, and there is none; install gcc, or name another with CC.",
    "mend_cpp_compiler": "C++ compiler is missing",
    "mend_cpp_compiler_why": "Nothing can be compiled: no C++ compiler on the path; install one.",
    "mend_other": "{name} is missing",
    "mend_other_why": "Nothing can be compiled: {reason}; {remedy}.",
    "mend_builds": "Nothing can be compiled",
    "mend_builds_why": "{reason}. Nothing is compiled until the server starts anew.",
    "mend_store": "Compiled graphs cannot be kept",
    "mend_store_why": "{reason}. They work until the server ends, and are compiled again then.",
    "mend_untrusted": "Compiled graphs from another machine are not used",
    "mend_untrusted_why": "The files in {folder} were not made here. They are programs: trust them "
    "only if you know where they come from.",
    "mend_everywhere": "Models are not compiled without a node",
    "mend_everywhere_why": "{reason}. Put Compile Model before the sampler.",
    # Why the server does not do what a page asked for.
    "refused_choice": "{name} must be one of {choices}, got {got}",
    "refused_whole": "{name} must be a whole number from {minimum} to {maximum}, got {got}",
    "refused_number": "{name} must be a number from {minimum} to {maximum}, got {got}",
    "refused_toggle": "{name} must be true or false, got {got}",
    "refused_settings": "settings must be a JSON object, got {got}",
    "refused_unkept": "settings are in force but cannot be saved: {error}",
    "refused_type": "content type must be application/json, got {got}",
    "refused_size": "body must be JSON of at most {limit} KiB, got a larger one",
    "refused_json": "body must be JSON: {error}",
    "refused_nested": "body must be JSON, got one that is nested too deeply",
    "refused_table": "{name} must be a JSON object, got {got}",
    # Why a model gets no Compile node of its own from the setting or the command.
    "left_alone_ours": "node {id} of Warmgraph is there already",
    "left_alone_bypassed": "a node of Warmgraph is bypassed there",
    "left_alone_others": "{node} ({id}) compiles it",
    "left_alone_failed": "the setting failed: {error}",
    "left_alone_large": "the workflow is too large to look through",
}


class Line(NamedTuple):
    """One sentence.

    Attributes:
        key: of it in ENGLISH, and in the pages' languages.
        values: its values, by name.
        text: the sentence in English.
    """

    key: str
    values: dict[str, str]
    text: str

    def to_plain(self) -> dict[str, Any]:
        """Return it as JSON-plain data; those of its values that are reasons once more as such."""
        items = self.values.items()
        reasons = {n: v.to_plain() for n, v in items if isinstance(v, Reason) and v.key}
        return {**self._asdict(), **({"reasons": reasons} if reasons else {})}


def line(key: str, **values: object) -> Line:
    """Make the sentence of this key with these values; one of our errors stands as its `told`."""
    texts = {name: _text(value) for name, value in values.items()}
    return Line(key, texts, ENGLISH[key].format(**texts))


def _text(value: object) -> str:
    if isinstance(value, WarmgraphError):
        return value.told
    return value if isinstance(value, Reason) else str(value)


class RefusedError(ValueError):
    """A page's request is refused; `line` says why, in words that the page can translate."""

    def __init__(self, key: str, **values: object) -> None:
        self.line = line(key, **values)
        super().__init__(self.line.text)


def told(reason: str | None) -> dict[str, Any]:
    """Return a reason as JSON-plain data: in English, and as pages translate it, if they can."""
    plain = Reason.plain(reason or "")
    return {"reason": reason, "reason_line": plain.to_plain() if plain.key else None}


def plain(lines: Iterable[Line]) -> list[dict[str, Any]]:
    """Return lines as JSON-plain data."""
    return [each.to_plain() for each in lines]


def in_english(lines: Iterable[Line]) -> str:
    """Put lines below one another."""
    return "\n".join(each.text for each in lines)
