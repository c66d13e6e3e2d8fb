"""The private names of the host that we use: one table.

A line names a thing of the host, what of its signature or code is needed, and the features that
depend on it. `present` checks them.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Feature(str, Enum):
    """What is off if the host lacks a name; the value is the display name."""

    EVERYTHING = "everything"
    CAPTURED_CALLS = "captured calls"
    WEIGHTS_TOGETHER = "weights that come for a whole block at once"
    WEIGHTS_AHEAD = "weights that come while other blocks compute"
    DEEPCACHE = "DeepCache"
    STEP_CACHE = "Step Cache"
    CONTROLNETS = "ControlNets"
    VAES = "VAEs"
    WARM_UP = "Warm Up"
    WORKFLOWS = "compiled graphs beside workflows"
    EVERYWHERE = "compiling every model without a node"


class Need(NamedTuple):
    """One name of the host, and what of it is needed.

    Attributes:
        name: "module:Class.name".
        features: off without it.
        call: our call of it, "self, layer, dtype=": so many positional arguments, and those with
            "=" by name; None if we do not call it.
        names: attributes that its code must write or read, which cannot be looked up anywhere.
    """

    name: str
    features: tuple[Feature, ...]
    call: str | None = None
    names: tuple[str, ...] = ()


_ALL = (Feature.EVERYTHING,)
_CAPTURED = (Feature.CAPTURED_CALLS,)
_TOGETHER = (Feature.WEIGHTS_TOGETHER, Feature.CAPTURED_CALLS)
_AHEAD = (Feature.WEIGHTS_AHEAD,)
_CACHE = (Feature.DEEPCACHE,)
_CACHES = (Feature.DEEPCACHE, Feature.STEP_CACHE)
_STEPS = (Feature.STEP_CACHE,)
_CONTROL = (Feature.CONTROLNETS,)
_VAE = (Feature.VAES,)
_WARM = (Feature.WARM_UP,)
_FILES = (Feature.WORKFLOWS,)
_POSTED = (Feature.WORKFLOWS, Feature.EVERYWHERE)

_PATCHER = "comfy.model_patcher:ModelPatcher"
_EXTENSION = "comfy.patcher_extension"
_MANAGEMENT = "comfy.model_management"
_VBAR = "comfy_aimdo.model_vbar"
_UNET = "comfy.ldm.modules.diffusionmodules.openaimodel"
_ATTENTION = "comfy.ldm.modules.attention"
_CONTROLNET = "comfy.controlnet"
_FIRST_STAGE = "comfy.ldm.modules.diffusionmodules.model"

NEEDS = (
    # process.py
    Need("comfy.options:args_parsing", _ALL),
    Need("comfy.options:enable_args_parsing", _ALL, ""),
    Need("comfy.cli_args:args", _ALL),
    # execution.py
    Need(f"{_MANAGEMENT}:InterruptProcessingException", _ALL),
    Need(f"{_MANAGEMENT}:throw_exception_if_processing_interrupted", _ALL, ""),
    # server.py
    Need("execution:PromptQueue.get_current_queue_volatile", _FILES, "self"),
    # For all, and what our part of the server hears of prompts by.
    Need("server:PromptServer.add_on_prompt_handler", _POSTED, "self, handler"),
    # layers.py
    Need("comfy.ops:CastWeightBiasOp.comfy_cast_weights", _ALL),
    Need("comfy.ops:CastWeightBiasOp.weight_function", _ALL),
    Need("comfy.ops:CastWeightBiasOp.bias_function", _ALL),
    # casting.py
    Need(
        "comfy.ops:cast_bias_weight",
        _ALL,
        "layer, dtype=, device=, bias_dtype=, offloadable=",
    ),
    Need(f"{_MANAGEMENT}:cast_to", _ALL, "weight, dtype, device, non_blocking="),
    Need(f"{_MANAGEMENT}:device_supports_non_blocking", _ALL, "device"),
    Need("comfy.ops:uncast_bias_weight", _ALL, "layer, weight, bias, token"),
    # memory.py
    Need(f"{_MANAGEMENT}:get_total_memory", _ALL, "device"),
    Need(f"{_MANAGEMENT}:get_torch_device", _CONTROL, ""),
    Need(f"{_PATCHER}.model_size", _ALL, "self"),
    Need(f"{_PATCHER}.loaded_size", _ALL, "self"),
    Need(
        f"{_PATCHER}.load",
        _ALL,
        names=(
            "device",
            "model_loaded_weight_memory",
            "current_weight_patches_uuid",
            "model_lowvram",
        ),
    ),
    Need(f"{_MANAGEMENT}:NUM_STREAMS", _AHEAD),
    Need(f"{_MANAGEMENT}:get_free_memory", _AHEAD, "device"),
    Need(f"{_MANAGEMENT}:minimum_inference_memory", _AHEAD, ""),
    Need(f"{_MANAGEMENT}:soft_empty_cache", _CAPTURED, ""),
    Need(f"{_MANAGEMENT}:current_loaded_models", _CAPTURED),
    Need(f"{_MANAGEMENT}:LoadedModel", _CAPTURED, "patcher", ("currently_used", "real_model")),
    Need(f"{_MANAGEMENT}:LoadedModel.model_load", _CAPTURED, "self"),
    Need(f"{_PATCHER}.current_loaded_device", _CAPTURED, "self"),
    Need(f"{_PATCHER}.partially_load", _CAPTURED, "self, device, extra"),
    Need(f"{_PATCHER}.partially_unload", _CAPTURED, "self, device, wanted"),
    Need(f"{_PATCHER}.detach", _CAPTURED, "self, unpatch_all="),
    # models.py
    Need(_PATCHER, _ALL, "model, load_device, offload_device"),
    Need(
        f"{_PATCHER}.__init__",
        _ALL,
        names=("model", "load_device", "object_patches", "object_patches_backup", "wrappers"),
    ),
    Need(f"{_PATCHER}.get_model_object", _ALL, "self, name"),
    Need(
        "comfy.model_base:BaseModel.__init__",
        _ALL,
        names=("diffusion_model", "manual_cast_dtype", "current_patcher"),
    ),
    Need("comfy.model_base:BaseModel.get_dtype", _ALL, "self"),
    Need(
        "comfy.model_base:BaseModel.apply_model",
        _WARM,
        "self, x, t, c_crossattn=, transformer_options=",
    ),
    Need(f"{_MANAGEMENT}:load_models_gpu", _WARM, "models"),
    Need(f"{_PATCHER}.pre_run", _WARM, "self"),
    Need(f"{_PATCHER}.cleanup", _WARM, "self"),
    Need(f"{_EXTENSION}:merge_nested_dicts", _WARM, "one, other"),
    # patcher.py
    Need(f"{_PATCHER}.clone", _ALL, "self"),
    Need(f"{_PATCHER}.set_attachments", _ALL, "self, key, thing"),
    Need(f"{_PATCHER}.get_attachment", _ALL, "self, key"),
    Need(f"{_PATCHER}.add_wrapper_with_key", _ALL, "self, kind, key, wrapper"),
    Need(f"{_PATCHER}.remove_wrappers_with_key", _ALL, "self, kind, key"),
    Need(f"{_PATCHER}.add_callback_with_key", _ALL, "self, kind, key, callback"),
    Need(f"{_PATCHER}.remove_callbacks_with_key", _ALL, "self, kind, key"),
    Need(f"{_EXTENSION}:WrappersMP.DIFFUSION_MODEL", _ALL),
    Need(f"{_EXTENSION}:WrappersMP.APPLY_MODEL", _ALL),
    Need(f"{_EXTENSION}:WrappersMP.CALC_COND_BATCH", _ALL),
    Need(f"{_EXTENSION}:WrappersMP.SAMPLER_SAMPLE", _CACHE),
    Need(f"{_EXTENSION}:WrappersMP.PREDICT_NOISE", _CACHE),
    Need(f"{_EXTENSION}:CallbacksMP.ON_PRE_RUN", _ALL),
    Need(f"{_EXTENSION}:CallbacksMP.ON_CLEANUP", _ALL),
    Need(f"{_EXTENSION}:CallbacksMP.ON_DETACH", _ALL),
    Need(
        f"{_EXTENSION}:WrapperExecutor.__init__",
        _ALL,
        names=("original", "class_obj", "wrappers", "idx"),
    ),
    Need(
        f"{_EXTENSION}:WrapperExecutor.new_class_executor", _ALL, "function, whose, wrappers, idx"
    ),
    Need(f"{_EXTENSION}:WrapperExecutor.execute", _ALL, "self"),
    # families/
    Need(f"{_UNET}:ResBlock", _ALL),
    Need(f"{_UNET}:Downsample", _ALL),
    Need(f"{_UNET}:Upsample", _ALL),
    Need(f"{_ATTENTION}:SpatialTransformer", _ALL),
    Need(f"{_ATTENTION}:BasicTransformerBlock", _ALL),
    Need("comfy.ops:disable_weight_init", _ALL),
    Need(f"{_FIRST_STAGE}:ResnetBlock", _VAE),
    Need(f"{_FIRST_STAGE}:AttnBlock", _VAE),
    Need(f"{_FIRST_STAGE}:Downsample", _VAE),
    Need(f"{_FIRST_STAGE}:Upsample", _VAE),
    Need("comfy.taesd.taesd:Block", _VAE),
    # vaes.py
    Need(
        "comfy.sd:VAE.__init__",
        _VAE,
        names=("first_stage_model", "patcher", "vae_dtype"),
    ),
    Need("comfy.sd:VAE.decode", _VAE, "self, samples"),
    Need("comfy.sd:VAE.encode", _VAE, "self, pixels"),
    # controlnets.py
    Need(f"{_CONTROLNET}:ControlBase.copy_to", _CONTROL, "self, other"),
    Need(f"{_CONTROLNET}:ControlBase.pre_run", _CONTROL, "self, model, percent_to_timestep"),
    Need(f"{_CONTROLNET}:ControlBase.cleanup", _CONTROL, "self"),
    Need(
        f"{_CONTROLNET}:ControlNet.get_control",
        _CONTROL,
        "self, x, t, cond, batched_number, transformer_options",
        ("control_model", "manual_cast_dtype"),
    ),
    Need(
        f"{_CONTROLNET}:ControlNet.copy",
        _CONTROL,
        "self",
        ("control_model", "control_model_wrapped", "load_device"),
    ),
    # unets.py
    Need(f"{_UNET}:UNetModel.forward", _ALL, names=("_forward",)),  # wrappers lie around that
    Need(
        f"{_UNET}:UNetModel._forward",
        _CACHE,
        "self, x, timesteps, context, y, control, transformer_options",
        ("input_blocks", "middle_block", "output_blocks"),
    ),
    Need(f"{_UNET}:TimestepEmbedSequential", _CACHE, "layer"),
    Need(f"{_PATCHER}.patch_hooks", _CACHE, names=("current_hooks",)),
    # sampling.py
    Need("comfy.samplers:CFGGuider.outer_sample", _CACHES, names=("inner_model",)),
    Need("comfy.samplers:calc_cond_batch", _STEPS, "model, conds, x_in, timestep, model_options"),
    Need("comfy.samplers:calculate_start_end_timesteps", _STEPS, names=("timestep_start",)),
    Need("comfy.model_sampling:CONST", _STEPS),
    # dynamic_vram.py
    Need(
        "comfy.ops:cast_modules_with_vbar",
        _TOGETHER,
        "layers, dtype, device, bias_dtype, non_blocking",
        ("_v", "_v_signature", "_prefetch", "signature", "resident", "_lowvram_function"),
    ),
    Need(
        "comfy.ops:resolve_cast_module_with_vbar",
        _TOGETHER,
        "layer, dtype, device, bias_dtype, compute_dtype, want_requant",
        ("_v_weight", "_v_bias", "_v_signature", "_prefetch", "signature", "resident"),
    ),
    Need(f"{_MANAGEMENT}:sync_stream", _TOGETHER, "device, stream"),
    Need(f"{_MANAGEMENT}:current_stream", _TOGETHER, "device"),
    Need("comfy.model_patcher:LowVramPatch.clear_prepared", _TOGETHER, "self"),
    Need("comfy.model_patcher:ModelPatcherDynamic.__init__", _TOGETHER, names=("dynamic_vbars",)),
    Need(f"{_VBAR}:vbar_fault", _TOGETHER, "place"),
    Need(f"{_VBAR}:vbar_unpin", _TOGETHER, "place"),
    Need(f"{_VBAR}:vbar_signature_compare", _TOGETHER, "one, other"),
    Need(f"{_VBAR}:ModelVBAR.__init__", _TOGETHER, names=("offset", "base_addr", "max_size")),
    Need(f"{_VBAR}:ModelVBAR.fault", _TOGETHER, "self, address, size"),
    Need(f"{_VBAR}:ModelVBAR.unpin", _TOGETHER, "self, address, size"),
    Need(f"{_VBAR}:ModelVBAR.set_watermark_limit", _TOGETHER, "self, size"),
    Need(f"{_VBAR}:ModelVBAR.free_memory", _TOGETHER, "self, size"),
)

_NOT_FOR_OTHERS = frozenset(
    (
        "base_addr",
        "bias_function",
        "bias_lowvram_function",
        "cast_bias_weight",
        "cast_modules_with_vbar",
        "class_obj",
        "comfy_cast_weights",
        "control_model_wrapped",
        "current_hooks",
        "current_loaded_models",
        "current_patcher",
        "current_weight_patches_uuid",
        "currently_used",
        "dynamic_vbars",
        "free_memory",
        "get_current_queue_volatile",
        "inner_model",
        "model_load",
        "model_loaded_weight_memory",
        "model_lowvram",
        "new_class_executor",
        "object_patches_backup",
        "real_model",
        "resolve_cast_module_with_vbar",
        "set_watermark_limit",
        "uncast_bias_weight",
        "vbar_fault",
        "vbar_signature_compare",
        "vbar_unpin",
        "weight_function",
        "weight_lowvram_function",
    )
)
#: Attributes that no other room may name: those above, and the table's underscored ones.
PRIVATE = _NOT_FOR_OTHERS | {
    part
    for need in NEEDS
    for part in (need.name.rpartition(":")[2].rpartition(".")[2], *need.names)
    if part.startswith("_") and not part.endswith("__")
}
