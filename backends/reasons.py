"""Why something runs at normal speed, is not captured, is refused or was not built: as data.

Each reason is a key, and what stands in its words. The code asks for attributes of a reason, never
for its words; a page shows another language by the key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Row(NamedTuple):
    """What is known of all reasons of one key.

    Attributes:
        english: its words, with {names} for what stands in them.
        expected: it is nothing to log loudly.
        passes: it goes by itself, for what it waits for is on its way.
        retry: what it stopped may be tried again in the next run.
        fleeting: the same in the next step.
        outcome: it says what becomes of a model, and `why`.
    """

    english: str
    expected: bool = False
    passes: bool = False
    retry: bool = False
    fleeting: bool = False
    outcome: bool = False


#: Every reason. Other languages have the same keys and names in `locales/*/main.json`, and
#: docs/troubleshooting.md explains each; what begins with "do_" is what to do.
TABLE: dict[str, str | Row] = {
    # Several at once, and what becomes of it.
    "both": "{one}; {other}",
    "at_normal_speed": Row("{why}: runs at normal speed", outcome=True),
    "unless_captured": Row(
        "{why}; where its whole steps cannot be captured, it runs at normal speed", outcome=True
    ),
    # It is not finished yet.
    "being_compiled": Row("it is being compiled", expected=True, passes=True),
    "being_loaded": Row("it is being loaded", expected=True, passes=True),
    "compiled_elsewhere": Row("it is being compiled by another server", expected=True, passes=True),
    "no_file": Row("no compiled file", expected=True),
    "no_file_fits": Row("no compiled file fits: {why}", expected=True),
    "on_their_way": "compiled files are on their way, and until then the GPU is what its calls "
    "wait for",
    "cancelled": "compiling it was cancelled",
    "compiling_ended": "Warmgraph was closed before this was compiled",
    "closed": "Warmgraph was closed",
    "nothing_asked": "it was not asked to be compiled",
    "not_described": "it was not described",
    "moved": Row("weights moved since the last step", fleeting=True),
    "warmed_up": "Warm Up made its compiled files ready; it knows no empty step for this model",
    "not_ours": "this model did not come out of Warmgraph",
    # This computer.
    "no_cpp_compiler": "no C++ compiler ({name}) on the path",
    "no_triton": "Triton is not installed",
    "no_c_compiler": "Triton needs one (gcc or clang) for its first kernel, and there is none",
    "no_cuda": "this backend runs on NVIDIA GPUs so far, and this torch has none",
    "no_such_device": "this backend does not run on {device}",
    "first_gpu_only": "models run compiled on the first GPU only, not on {device}",
    "torch_lacks": "torch {version} lacks {name}",
    "torch_differs": "torch {version} is another one: {sort}: {error}",
    "torch_without_aot": "torch {version} has no standalone_compile(aot=True), which came with "
    "2.10",
    "torch_without_setting": "torch {version} has no backed_size_oblivious setting",
    "torch_without_launcher": "torch {version} has no static Triton launcher ({name})",
    "torch_without_wide": "torch {version} cannot be told to index with 64 bits",
    "nothing_compiles": "nothing compiles here: {why}",
    "broke_here": "{error} (nothing compiles here: {why})",
    "until_restart": "Nothing is compiled until the server starts anew: {why}",
    "slower_kernel": "{what} takes longer than it could: {error}",
    "step_failed": "{step} failed with torch {version}: {sort}: {error}",
    "computed_wrong": "a compiled file computed something else with torch {version}",
    "feature_off": "{feature}: off with this ComfyUI, for {why}",
    "and_more": "{one}, and {count} more",
    "name_gone": "{name} is not there",
    "takes_others": "{name} takes other arguments than ({arguments})",
    "knows_no": "{name} knows no {part}",
    # What was chosen.
    "compiler_off": "the compiler is off, to compare",
    "eager_compiles_nothing": "backend eager compiles nothing",
    "unknown_backend": "backend must be one of {names}, got {got}",
    "backend_unfit": "backend {name}: {why}",
    "identical": "identical pixels: nothing is compiled",
    "identical_needs": "that needs an NVIDIA GPU, a model whose steps may be captured, and VRAM "
    "for them in the settings",
    "replayed_as_is": "{why}; its calls are replayed as the host makes them",
    "strict": "strict loading of {folder}: {why}",
    "nothing_compiled": "nothing of this model is compiled",
    "places": "{count} places: {why}",
    "would_run_normally": "parts would run at normal speed: {why}",
    "name_no_text": "it is not text",
    "name_too_long": "at most {most} characters fit",
    "no_such_name": "folder must be a name from the list, got {got}",
    "no_such_folder": "there is no folder {name} in {root}",
    "bad_name": "compiled files (graphs) must be one plain folder name, got {got}: {why}",
    "name_empty": "it is empty",
    "name_characters": "it is {count} characters long, at most {most} fit",
    "name_bytes": "it takes {count} bytes, at most {most} fit",
    "name_contains": "it contains {characters}",
    "name_invisible": "it contains the invisible character U+{code}",
    "name_dot": "it starts or ends with a dot",
    "name_device": "{name} is a device name on Windows",
    "name_no_path": "it cannot be a path",
    "leads_out": "{name} leads out of {root}",
    "bad_workflow_path": "workflow path must be {root}/.../NAME.json, got {got}",
    "debugging": "{variable}={asked} is set on this server",
    "debugging_uncaptured": "{variable}={asked} is set on this server; no calls are captured",
    "debugging_only": "{variable} compiles {parts} only",
    "verified_unlike": "its compiled result differs from ComfyUI's, which is used; the log has the "
    "first difference",
    # This model.
    "no_plan": "no region plan for {model} yet",
    "part_not_compiled": "nothing of this {model}'s {part} is compiled yet",
    "no_known_block": "no known block",
    "no_regions": "this {model} has no regions, so nothing of it is compiled",
    "nothing_can": "nothing of this {model} can be compiled ({why})",
    "other_rotation": "rotates another part of each head",
    "no_region_for": "no region for {layer} of {module}",
    "built_unlike": "this {model} is not built as the host's that is known here ({sort}: {error})",
    "part_built_unlike": "its {part} is not built as the host's: {error}",
    "transformer_does_more": "this host's SpatialTransformer does more than Warmgraph knows",
    "own_class": "{name} is another node's own class ({owner})",
    "vae_3d": "3-D convolutions (video VAEs) have no region yet",
    "vae_time": "VAE blocks with a time embedding have no region yet",
    "vae_norms": "VAE blocks with other norms than by pixels have no region yet",
    "vae_convolutions": "VAE blocks with other convolutions than LTX's have no region yet",
    "vae_noise": "VAE blocks that add noise have no region yet",
    "vae_last_norm": "a last norm that a timestep modulates has no region yet",
    "vae_no_weights": "this VAE has no weights",
    "no_network": "this ControlNet has no network",
    "not_hosts": "{name} of {owner} is not the host's",
    "took_over": "{name} of {owner} took this ControlNet over",
    "controlnet_replaced": "another node replaces {name} of this ControlNet",
    "network_per_run": "its network is made from the model at every run, and compiled there",
    "quantised": "quantised, {format}: {product}",
    "unpacked_here": "this device unpacks it at each call",
    "unpacked_by_us": "unpacked by Warmgraph at each call",
    "unpacked_fully": "unpacked at each call, for its file asks for full precision",
    "fp8_weights": "weights in fp8",
    "better_files": "{files} files are multiplied as they are",
    "patched_per_call": "the weights of {path} are patched at each call, so its product is not in "
    "{format}",
    "multiplied": "multiplied as it is",
    "multiplied_rounded": "multiplied as it is, by what is rounded within the compiled part",
    "fp8_multiplied": "weights in fp8, multiplied as they are",
    "weight_is": "the weight is a {sort}",
    "plain_weights": "plain weights in a quantised file",
    "class_at_run_time": "class {name} is made at run time, so no worker can import it",
    "attribute_not_plain": "attribute {name} of {where} is a {sort}, not plain data",
    "tensor_not_plain": "{where}.{name} is a {sort}, not a plain tensor",
    "has_buffers": "{where} has buffers, which no region takes yet",
    "not_importable": "{name} cannot be imported: {error}",
    # Another node takes part.
    "own_attention": "a layer of it has an attention of its own",
    "patches": "another node patches {name}",
    "replaces": "another node replaces {name}",
    "replaces_of_this": "another node replaces {name} of this {model}",
    "replaces_forward": "another node replaces the forward of a {layer}",
    "replaces_of_a": "another node replaces {name} of a {layer}",
    "whose_replaces": "another node ({owner}) replaces {name}",
    "hooks_a": "another node hooks a {layer}",
    "replaces_code": "another node replaces the code of {layer}",
    "function_in_place": "another node puts its own function in place of the model's",
    "forward_in_place": "{owner} puts its own forward in place of the model's",
    "pack_replaces": "{owner} replaces {name}",
    "neighbours": "other layers of their blocks are another node's",
    "gives_otherwise": "another node's code in {path} gives something else than the host's",
    "unlike_with_others": "with another node's code in it, its result differs from ComfyUI's by "
    "{error}",
    "replaces_uncalled": "another node replaces {name}, which is not called here",
    "guest_is_given": "{path} is another node's, and is given a {sort}",
    "guest_no_tensor": "{path} is another node's, and is given no tensor",
    "blame": "{pack} replaces {what}, and its code cannot be built apart from it: {why}",
    "it_does": "it {what}",
    "default_may_change": "has a default that may change",
    "imports": "imports while it runs",
    "reads_options": "reads the step's options",
    "code_unknown": "calls code that is not known",
    "keeps": "keeps {name} from call to call",
    "sets": "sets {name} of an object",
    "reads_changing": "reads {name}, which may change",
    "reads_dict": "reads an object's __dict__",
    "calls": "calls {name}",
    "reads_missing": "reads {name}, which is not there",
    "reads_of_a": "reads {name} of a {layer}",
    "takes_part": "a {name} of {pack} takes part in it",
    "changed_since": "{file} changed since it was imported",
    "too_large": "{file} is too large",
    "file_unreadable": "{file} cannot be read ({error})",
    "leaves_other_code": "run by itself, its file leaves other code ({names})",
    "uses_options": "it reads or writes the step's options",
    "text_not_whole": "its text did not arrive whole",
    "code_takes_part": "code of {owner} takes part: {what}",
    "package_takes_part": "code of another package takes part ({name})",
    "wraps_call": "another node wraps the model's own call",
    "patches_may_differ": "another node's patches may do something else at each step",
    "attention_may_differ": "another node's attention may do something else at each step",
    "override_may_differ": "another node's attention may do something else at each step; if it "
    "does not, switch on Play back other nodes' attention",
    "override_keeps": "another node's attention keeps tensors of a step, so it is not played back, "
    "whatever the settings say",
    "override_anew": "another node makes its attention anew at each step, so it is not played "
    "back, whatever the settings say",
    "puts_in_place": "{owner} puts a {name} in place of the model",
    "runs_own_way": "{owner} runs the model in a way of its own, past this node",
    "torch_compile": "torch.compile runs the whole model (TorchCompileModel, or another node that "
    "compiles): use one of the two",
    "another_model": "another model runs with this one's options (Dual Model CFG Guider, or a "
    "sampler that swaps models), and no Compile Model is on it",
    "no_step": "no step of the last run came to this node: the sampler made none, or ran this "
    "model by itself or with another model's options (Dual Model CFG Guider: Compile Model "
    "belongs on both)",
    "copy_on_card": "its copy on {device} runs at normal speed (MultiGPU CFG Split): models run "
    "compiled on one card so far",
    "copy_of_model": "another copy of the model runs (hooks or several GPUs)",
    "copy_of_vae": "another copy of the VAE runs (several GPUs, or another node's)",
    "copy_of_network": "another copy of the network runs (several GPUs, or another node's)",
    "foreign_capture": "another node, or ComfyUI, captures it into a CUDA graph of its own",
    "hooks_all": "another node hooks all modules",
    "sees_operations": "{name} of {owner} sees each operation and may change it",
    "autocast": "autocast is on: operations compute in other dtypes than the model's",
    "sets_of_a": "another node sets {name} of a {layer}",
    "calls_itself": "the model calls itself",
    "gradients": "gradients are on (training)",
    # This step or size.
    "out_of_range": "{name} must be {minimum} to {maximum} for its compiled file, got {got}",
    "unknown_arguments": "called with other arguments than Warmgraph knows: {names}",
    "no_plain_tensor": "{name} must be a plain tensor, got a {sort}",
    "wrong_dtype": "{name} must be {wanted}, got {got}",
    "wrong_place": "{name} is on {device} with {count} dims",
    "wrong_size": "{name} must have size {wanted} in dim {dim}, got {got}",
    "sizes_differ": "{symbol} is {one} in {name} and {other} in {another}",
    "runs_on": "it runs on {device}",
    "too_many_elements": "more elements than a compiled file with 32-bit indices can address",
    "masked": "called with an attention mask",
    "not_rotated": "called without a rotation table",
    "positions": "called with positions for each block",
    "no_context": "called without a context",
    "no_image": "called without an image's tokens",
    "time_embedding": "called with a time embedding",
    "frames": "called with a timestep for each frame",
    "uneven": "called with timesteps whose shares of the tokens are not equal",
    "unheard": "called with no sound for each frame",
    "references": "called with reference images that have a timestep of their own",
    "streams": "called without one of its streams, or what joins them",
    "perturbed": "called with its self-attention left out",
    # Steps that are not replayed.
    "no_gain": "one call takes {seconds} s, of which replaying it would save nothing",
    "not_in_vram": "a part of the model is not in VRAM",
    "does_not_fit": "the model does not fit into VRAM as a whole",
    "computed_anew": "weights are computed anew at each call",
    "attention_between": "another attention runs between what is replayed ({why})",
    "override_between": "another attention runs between what is replayed ({why}); see Play back "
    "other nodes' attention in the settings",
    "attention_of_call": "a function of the call attends between what is replayed",
    "layer_between": "a layer that fetches its own weights runs between what is replayed",
    "code_between": "another node's code runs between what is replayed",
    "format_not_replayed": "products of {format} weights cannot be replayed",
    "special_weights": "weights are of a special kind ({sort})",
    "no_room": Row("too little VRAM is free to capture it", retry=True),
    "no_memory": Row("out of memory for captured calls", retry=True),
    "no_memory_capturing": Row("out of memory while it was captured", retry=True),
    "over_budget": "its memory ({needed} MiB) is over the budget of {budget} MiB",
    "cannot_capture": "it cannot be captured: {error}",
    "no_plain_tensors": "{name} must be plain tensors, got a {sort}",
    "on_cpu": "{name} is on the CPU, where a captured call could not read it",
    "unknown_effect": "{name} has a {sort}, whose effect is not known",
    "returns_no_tensor": "the model returns no tensor, but a {sort}",
    # Out of memory, and what failed.
    "oom": "out of memory in compiled code; ComfyUI's own ran this call",
    "oom_comparing": "out of memory while comparing with the host, which ran this call",
    "once_more": "{why}; the next run compares it once more",
    "other_dtypes": "called otherwise: ComfyUI's code gives {theirs}, the compiled one {ours}",
    "differs": "differs from ComfyUI's result by {error} (relative L2) with {weights} weights",
    "dropped": "its compiled file was dropped",
    "failed_running": "failed at run time: {sort}: {error}",
    "failed": "{what} failed ({sort}: {error})",
    "until_loaded_anew": "the host's own code runs until the model is loaded anew",
    "report_may_lack": "the report may lack it",
    "ran_at_normal_speed": "ran at normal speed: {error}",
    "weights_unfit": "its weights are not what its compiled file takes: {error}",
    # Building failed.
    "compiling_failed": "compiling failed: {why}",
    "gave_up": "loading or building it failed: {error}",
    "unusable": "what was built cannot be used: {error}",
    "inductor_failed": "Inductor failed on {label}: {sort}: {error}",
    "no_build": '"{label}" could not be built ({error})',
    "too_slow": 'building "{label}" took longer than {limit} s and was stopped',
    "worker_died": 'the worker that built "{label}" died ({error})',
    "killed": "killed (signal 9, often the system's answer to a lack of memory)",
    "signal": "signal {number}, {name}",
    "exit_code": "exit code {code}",
    "last_words": "{how}, last words: {words}",
    "does_not_end": "it does not end",
    "no_workers": "build workers cannot start here ({error})",
    "worker_no_start": "a build worker could not be started ({error})",
    "worker_died_early": "a build worker died at its start ({error})",
    "worker_not_ready": "a build worker was not ready after {limit} s and was stopped",
    "worker_thread_failed": "a build worker's thread failed ({error})",
    "other_host_code": "the worker sees other host code for {label}: {names}",
    "other_torch": "the worker's torch or options differ from the server's, or Warmgraph was "
    "updated since the server started: {target}",
    "built_wrong": "{label} differs from ComfyUI's result by {error} at {sizes}",
    "not_its_own": "{label} must return {layout} tensors of its own",
    "export_failed": "export of {label} failed: {error}",
    "export_fixed": "export of {label} fixed {dim} of {name} to {size}",
    "export_narrowed": "export of {label} narrowed {symbol} to {bounds}",
    "export_inputs": "a region takes weights and inputs only, got {sort} {name}",
    "not_pure": "a region must be a pure function of its inputs",
    "no_module": "Inductor's generated module was not found",
    "not_chosen": "kernel {name} has not chosen among {count} forms",
    "needs_triton": "kernel {name} cannot be launched without Triton's compiler",
    "no_library": "the library of C++ kernel {name} was not found",
    "asks_unknown": "this ComfyUI's code asks for {what}, which compiled code does not know",
    "attention_given": "attention is called with {arguments}, which compiled code does not pass on",
    "attention_unknown": "attention is called in a way that is not known: {error}",
    "attention_unnamed": "attention is called by another way than its name",
    "no_answer": 'what the worker said of "{label}" is no answer ({error})',
    "no_message": 'what the worker said of "{label}" is no message ({error})',
    "not_sent": 'the description of "{label}" cannot be sent ({error})',
    "bad_result": "a worker's result is not as it must be: {error}",
    "bad_payload": "a worker's result does not unpack: {error}",
    # Saved compiled files.
    "file_of_folder": "a compiled file in {folder} {what}",
    "file": "compiled file {path} {what}",
    "not_loaded": "{why}, so it is not loaded",
    "other_key": "was signed with another key ({key})",
    "unsigned": "is not signed",
    "untrusted": "signed with another key than this server's, or not at all",
    "made_for": "{fact}: made for {there}, this machine has {here}",
    "made_for_device": "made for the device {device}, which is not here",
    "gpu_capability": "GPU compute capability",
    "instructions": "processor's instructions",
    "basic_instructions": "basic ones",
    "level_with": "{level} with {more}",
    "torch_build": "torch build",
    "other_version": "made by another version of Warmgraph",
    "other_format": "has format {found}, this version reads {format}",
    "code_changed": "the host's code changed: {names}",
    "region_differs": "the region's layers, sizes or dtypes differ",
    "inputs_differ": "its inputs differ",
    "tampered": "was changed after it was signed",
    "unreadable": "cannot be read: {error}",
    "damaged": "is damaged: {what}",
    "in_manifest": "in its manifest, {error}",
    "header_length": "its header cannot be {count} bytes long",
    "bad_header": "its header is not a compiled file's",
    "bad_header_for": "its header is not a compiled file's: {error}",
    "more_metadata": "its metadata has parts that no compiled file has",
    "wrong_length": "it is {count} bytes long, which its header denies",
    "payload_length": "its payload cannot be {count} bytes long",
    "payload_short": "its payload is not as long as it says",
    "payload_hash": "its payload does not match its hash",
    "payload_wrong": "its payload is wrong: {error}",
    "payload_unloadable": "its payload does not load with torch {version}: {sort}: {error}",
    "payload_names": "its payload names {module}.{name}, which no compiled file needs",
    "operator_gone": "it calls the operator {name}, which is not there",
    "operator_differs": "it calls the operator {name}, which is another one here",
    "file_unlike_part": "compiled file {path} does not fit its part: {error}",
    "loading_failed": "loading failed: {error}",
    "misnamed": "holds {key}, which is not what its name says",
    "file_unwritable": "compiled file {path} cannot be written: {error}",
    "unwritable": "{path} cannot be written: {error}",
    "not_put": "the compiled files could not be put into {folder}: {error}",
    "payload_damaged": "the payload of compiled file {key} was damaged on its way to the store",
    "key_unusable": "the signing key {path} cannot be used: {error}",
    "key_bad": "the signing key {path} must be {wanted} hex digits, got {count} bytes",
    # DeepCache.
    "deepcache_needs_unet": "DeepCache needs a UNet, and this model is a {model}: it runs "
    "unchanged. ComfyUI's own EasyCache is for such models.",
    "deepcache_easycache": "ComfyUI's EasyCache or LazyCache is on this model, too, and it decides "
    "which steps run: DeepCache steps aside, for a step that is skipped leaves no feature. Use "
    "one of them",
    "deepcache_cards": "steps aside: this model is spread over several cards (MultiGPU CFG Split), "
    "and only what runs on the first one could be cached. Use one of the two",
    "deepcache_failed": "steps aside for the rest of this run, for it failed ({error}); the log "
    "has the trace",
    "deepcache_replaced": "steps aside: another node replaces the UNet's own forward, which it "
    "would cut in two",
    "deepcache_swapped": "steps aside: another node runs the UNet by a class of its own ({name} of "
    "{owner})",
    "deepcache_unlike": "steps aside: with these patches the outer blocks do not give what the "
    "whole model gives",
    # What to do.
    "do_update_torch": "update torch to 2.10 or newer",
    "do_use_nvidia_torch": "use an NVIDIA GPU, with a PyTorch that has CUDA",
    "do_use_nvidia": "use an NVIDIA GPU",
    "do_install_triton": "on Windows install triton-windows, on Linux reinstall torch",
    "do_install_one": "install one",
    "do_install_gcc": "install gcc, or name another with CC",
    "do_pick": "pick one from the list (press R to read it anew)",
    "do_name_plainly": "use letters, digits, spaces, - and _, or nothing for the workflow's own "
    "folder",
    "do_keep_inside": "keep workflows and their compiled files inside the user's folder",
    "do_save_plainly": "save the workflow under a plain name",
    "do_not_strict": "switch strict off, or use Compile Model to compile what is missing",
    "do_make_writable": "make that folder writable, or the compiled files are not found after a "
    "rename",
    "do_free_space": "free some space or make that folder writable",
    "do_make_readable": "make that file readable for the user who runs ComfyUI",
    "do_let_write": "make that folder writable for the user who runs ComfyUI",
    "do_restore_key": "restore it, or delete it: a new one is made, and older compiled files need "
    "`python cli.py trust FOLDER` or are built again",
    "do_trust": "if you trust where it came from, run at the server's console: {command}",
    "do_nothing_anew": "it is built anew",
    "do_nothing_again": "it is built again",
    "do_nothing_damaged": "it is not loaded and is built again",
    "do_rename": "rename it back, or delete it",
    "do_other_version": "it is built again, or use the version of Warmgraph that made it",
}
_PLAIN = Row("{text}")


class Reason(str):
    """A reason: its English words, which may be used as any text; `of` makes one.

    Attributes:
        key: of it in `TABLE`; empty where it is words alone (`plain`).
        values: what stands in it by name, other reasons among them.
        expected, passes, retry, fleeting, outcome: see `Row`.
    """

    key: str
    values: Mapping[str, str]
    expected: bool
    passes: bool
    retry: bool
    fleeting: bool
    outcome: bool

    def __new__(cls, words: str, key: str = "", values: Mapping[str, str] | None = None) -> Reason:
        made = super().__new__(cls, words)
        made.key, made.values = key, values or {}
        _, made.expected, made.passes, made.retry, made.fleeting, made.outcome = _row(key)
        return made

    @classmethod
    def plain(cls, words: str) -> Reason:
        """Return words that have no key here as a reason; one that is a reason as it is."""
        return words if isinstance(words, Reason) else cls(words)

    @property
    def cause(self) -> Reason:
        """It without what becomes of a model."""
        return Reason.plain(self.values["why"]) if self.outcome else self

    def to_plain(self) -> dict[str, Any]:
        """Return it as JSON-plain data, for another process or a page."""
        values = {
            name: value.to_plain() if isinstance(value, Reason) and value.key else str(value)
            for name, value in self.values.items()
        }
        return {"key": self.key, "values": values, "text": str.__str__(self)}


def _row(key: str) -> Row:
    row = TABLE[key] if key else _PLAIN
    return Row(row) if isinstance(row, str) else row


def english_of(key: str) -> str:
    """Return the English of a key, with {names} in it."""
    return _row(key).english


#: Where there is nothing to do, or nothing to say.
NOTHING = Reason("")


def of(key: str, /, **values: object) -> Reason:
    """Make the reason of this key with these values; several reasons for one name are joined."""
    texts = {name: _text(value) for name, value in values.items()}
    return Reason(english_of(key).format(**texts), key, texts)


def joined(reasons: Iterable[str]) -> Reason:
    """Put reasons, at least one, after one another."""
    first, *others = map(Reason.plain, reasons)
    return of("both", one=first, other=joined(others)) if others else first


def with_remedy(reason: Reason, remedy: Reason) -> Reason:
    """Return a reason followed by what to do about it, if anything."""
    return joined([reason, remedy]) if remedy else reason


def _text(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return joined(value)
    return value if isinstance(value, Reason) else str(value)
