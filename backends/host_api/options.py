"""What the host, and nodes by its leave, put into a call's `transformer_options`.

Relies on the host's `comfy/samplers.py`, `comfy/model_base.py` (`_apply_model`) and
`comfy/ldm/modules/diffusionmodules/openaimodel.py`, which read them.
"""

from __future__ import annotations

#: What no diffusion model reads in its own forward.
UNREAD = frozenset({"callbacks", "prefetch_dynamic_vbars", "uuids", "wrappers"})
#: Where nodes put functions of their own.
PATCHES, REPLACEMENTS = "patches", "patches_replace"
ATTENTION = "optimized_attention_override"
#: The sigmas of all steps of the sampler's run, and of its end.
SAMPLE_SIGMAS = "sample_sigmas"
#: What the host's EasyCache and LazyCache leave there.
EASY_CACHE = "easycache"
