"""Where Compile nodes belong in a prompt, with the host's own classes and some that packs have."""

from __future__ import annotations

import re
import sys
from types import ModuleType
from typing import Any, ClassVar

import pytest

from warmgraph_tools.inprocess import Host


class Wild(str):
    """A type that equals any other, as packs have it."""

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = str.__hash__


def _class(takes: dict[str, Any], gives: tuple[Any, ...], *, output: bool = False) -> type:
    class Node:
        RETURN_TYPES: ClassVar[tuple[Any, ...]] = gives
        OUTPUT_NODE = output

        @classmethod
        def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
            return {"required": {name: (kind,) for name, kind in takes.items()}}

    return Node


class Broken:
    """Its folder cannot be listed."""

    RETURN_TYPES = ("LATENT",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        raise OSError("no such folder")


#: As packs have them: their inputs and outputs, not their code.
OTHERS: dict[str, Any] = {
    "ToBasicPipe": _class({"model": "MODEL", "vae": "VAE"}, ("BASIC_PIPE",)),
    "FromBasicPipe": _class({"basic_pipe": "BASIC_PIPE"}, ("MODEL", "CLIP", "VAE")),
    "FaceDetailer": _class({"model": "MODEL", "image": "IMAGE"}, ("IMAGE", "MASK")),
    "KSampler (Efficient)": _class(
        {"model": "MODEL", "latent_image": "LATENT"}, ("MODEL", "LATENT", "VAE", "IMAGE")
    ),
    "Context Big": _class({"model": "MODEL", "latent": "LATENT"}, ("MODEL", "LATENT", "IMAGE")),
    "Any Switch": _class({"any_01": Wild("*"), "any_02": Wild("*")}, (Wild("*"),)),
    "Show Any": _class({"anything": Wild("*")}, ("STRING",), output=True),
    "Dynamic Sampler": _class({}, ("LATENT",)),
    "TorchCompileModelFluxAdvancedV2": _class({"model": "MODEL"}, ("MODEL",)),
    "OneDiffModelBooster": _class({"model": "MODEL"}, ("MODEL",)),
    "TensorRTLoader": _class({"unet_name": "COMBO"}, ("MODEL",)),
    "ApplyStableFastUnet": _class({"model": "MODEL"}, ("MODEL",)),
    "TorchCompileVAE": _class({"vae": "VAE"}, ("VAE",)),
    "Broken": Broken,
}


@pytest.fixture(scope="module")
def placing(pack: ModuleType) -> Any:
    return sys.modules[f"{pack.__name__}.nodes.placing"]


@pytest.fixture(scope="module")
def classes(pack: ModuleType, host: Host) -> Any:
    module = sys.modules[f"{pack.__name__}.nodes.classes"]
    ours = {
        name: vars(sys.modules[f"{pack.__name__}.nodes"])[name]
        for name in vars(sys.modules[f"{pack.__name__}.nodes"])
        if name.startswith("Warmgraph") and name != "WarmgraphExtension"
    }
    return module.Classes({**host.nodes.NODE_CLASS_MAPPINGS, **OTHERS, **ours})


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    """An entry of a prompt; a text such as "1.2" of an input stands for a link."""
    links = {
        name: re.fullmatch(r"(.+)\.(\d+)", value) if isinstance(value, str) else None
        for name, value in inputs.items()
    }
    return {
        "class_type": class_type,
        "inputs": {
            name: [link[1], int(link[2])] if (link := links[name]) else value
            for name, value in inputs.items()
        },
    }


LOADER = node("CheckpointLoaderSimple", ckpt_name="x")


class Asked:
    """The rule, asked about prompts."""

    def __init__(self, placing: Any, classes: Any) -> None:
        self.placing, self.classes = placing, classes

    def __call__(self, prompt: Any, *, vae: bool = False) -> tuple[list[str], dict[str, str]]:
        """Places as "node.input < origin", and what is left and why."""
        return self.of(prompt, *(["model", "vae"] if vae else ["model"]))

    def of(self, prompt: Any, *kinds: str) -> tuple[list[str], dict[str, str]]:
        """The same of these kinds."""
        wanted = [self.placing.KINDS[kind] for kind in kinds]
        found = self.placing.find_places(prompt, self.classes, wanted)
        places = [f"{p.node}.{p.input} < {p.origin[0]}.{p.origin[1]}" for p in found.places]
        return places, {left.node: left.line.text for left in found.left}


@pytest.fixture(scope="module")
def ask(placing: Any, classes: Any) -> Asked:
    return Asked(placing, classes)


def test_a_sampler_gets_one_behind_all_that_gives_models(ask: Asked) -> None:
    prompt = {
        "1": LOADER,
        "2": node("LoraLoader", model="1.0", clip="1.1"),
        "3": node("LoraLoaderModelOnly", model="2.0"),
        "4": node("ModelSamplingAuraFlow", model="3.0"),
        "57:62": node("KSampler", model="4.0"),
        "5": node("BasicScheduler", model="4.0"),
        "6": node("ModelSave", model="4.0"),
        "7": node("CheckpointSave", model="4.0", vae="1.2"),
        "8": node("WarmgraphGraphReport", model="4.0"),
        "9": node("WarmgraphWarmUp", model="4.0"),
        "10": node("PreviewAny", source="4.0"),
        "11": node("Show Any", anything="4.0"),
        "12": node("AddNoise", model="4.0"),
        "13": node("SamplerSASolver", model="4.0"),
        "14": node("TrainLoraNode", model="4.0"),
    }
    assert ask(prompt, vae=True) == (["57:62.model < 4.0"], {})


def test_two_models_two_samplers_and_merges(ask: Asked) -> None:
    prompt = {
        "1": LOADER,
        "2": LOADER,
        "3": node("KSamplerAdvanced", model="1.0"),
        "4": node("KSamplerAdvanced", model="2.0", latent_image="3.0"),
        "5": node("KSampler", model="1.0"),
        "6": node("ModelMergeSimple", model1="1.0", model2="2.0"),
        "7": node("SamplerCustom", model="6.0"),
    }
    places, left = ask(prompt)
    assert places == ["3.model < 1.0", "4.model < 2.0", "5.model < 1.0", "7.model < 6.0"]
    assert left == {}


def test_guiders_get_them_and_not_the_samplers_behind(ask: Asked) -> None:
    prompt = {
        "1": LOADER,
        "2": LOADER,
        "3": node("CFGGuider", model="1.0"),
        "4": node("SamplerCustomAdvanced", guider="3.0"),
        "5": node("DualModelGuider", model="1.0", model_negative="2.0"),
        "6": node("BasicGuider", model="2.0"),
    }
    places, _ = ask(prompt)
    assert places == ["3.model < 1.0", "5.model < 1.0", "5.model_negative < 2.0", "6.model < 2.0"]


def test_a_switch_is_followed_and_its_taker_decides(ask: Asked) -> None:
    prompt = {
        "1": LOADER,
        "2": node("ComfySwitchNode", on_false="1.0", on_true="1.0"),
        "3": node("KSampler", model="2.0"),
        "4": node("Any Switch", any_01="2.0"),
        "5": node("KSampler", model="4.0"),
        "6": node("KSampler", latent_image="4.0"),  # a switch of latents, perhaps
        "7": node("Show Any", anything="4.0"),
        "8": node("Any Switch", any_01="9.0"),
        "9": node("WarmgraphCompileModel", model="1.0"),
        "10": node("KSampler", model="8.0"),
    }
    places, left = ask(prompt)
    assert places == ["3.model < 2.0", "5.model < 4.0"]
    assert left == {"10": "node 9 of Warmgraph is there already"}


def test_samplers_of_other_packs(ask: Asked) -> None:
    prompt = {
        "1": LOADER,
        "2": node("FaceDetailer", model="1.0"),
        "3": node("KSampler (Efficient)", model="1.0"),
        "4": node("KSampler (Efficient)", model="3.0"),  # gets the model that 3 had
        "5": node("Context Big", model="1.0"),
        "6": node("KSampler", model="5.0"),
        "7": node("Dynamic Sampler", model_3="1.0"),  # an input that the page adds
        "8": node("Broken", model="1.0"),
    }
    places, left = ask(prompt)
    assert places == [
        "2.model < 1.0",
        "3.model < 1.0",
        "6.model < 5.0",
        "7.model_3 < 1.0",
        "8.model < 1.0",
    ]
    assert left == {}


def test_a_pipe_is_filled_with_a_compiled_model_once(ask: Asked) -> None:
    prompt = {
        "1": LOADER,
        "2": node("ToBasicPipe", model="1.0", vae="1.2"),
        "3": node("FromBasicPipe", basic_pipe="2.0"),
        "4": node("KSampler", model="3.0"),
        "5": node("VAEDecode", samples="4.0", vae="3.2"),
    }
    assert ask(prompt, vae=True) == (["2.model < 1.0", "5.vae < 3.2"], {})


@pytest.mark.parametrize(
    "other",
    [
        "TorchCompileModel",
        "TorchCompileModelFluxAdvancedV2",
        "OneDiffModelBooster",
        "TensorRTLoader",
        "ApplyStableFastUnet",
    ],
)
def test_a_model_that_another_pack_compiles_is_left_to_it(ask: Asked, other: str) -> None:
    prompt = {
        "1": LOADER,
        "2": node(other, model="1.0"),
        "3": node("LoraLoaderModelOnly", model="2.0"),
        "4": node("KSampler", model="3.0"),
        "5": node("KSampler", model="1.0"),
    }
    assert ask(prompt) == (["5.model < 1.0"], {"4": f"{other} (2) compiles it"})


@pytest.mark.parametrize("ours", ["WarmgraphCompileModel", "WarmgraphLoadCompiledGraph"])
def test_a_model_of_ours_is_left_alone_wherever_on_the_way_the_node_is(
    ask: Asked, ours: str
) -> None:
    prompt = {
        "1": LOADER,
        "2": node(ours, model="1.0"),
        "3": node("ModelMergeSimple", model1="2.0", model2="1.0"),
        "4": node("WarmgraphDeepCache", model="3.0"),
        "5": node("KSampler", model="4.0"),
        "6": node("WarmgraphDeepCache", model="1.0"),
        "7": node("KSampler", model="6.0"),
    }
    places, left = ask(prompt)
    assert places == ["7.model < 6.0"]
    assert left == {"5": "node 2 of Warmgraph is there already"}


@pytest.mark.parametrize(
    "merge",
    [
        "ModelMergeSimple",
        "ModelMergeBlocks",
        "ModelMergeAdd",
        "ModelMergeSubtract",
        "ModelMergeSDXL",
    ],
)
@pytest.mark.parametrize("other", ["WarmgraphCompileModel", "TorchCompileModel"])
def test_a_merge_keeps_what_hangs_on_its_first_model_alone(
    ask: Asked, merge: str, other: str
) -> None:
    prompt = {
        "1": LOADER,
        "2": node(other, model="1.0"),
        "3": node(merge, model2="2.0", model1="1.0"),
        "4": node("KSampler", model="3.0"),
        "5": node(merge, model2="1.0", model1="2.0"),
        "6": node("KSampler", model="5.0"),
    }
    places, left = ask(prompt)
    assert places == ["4.model < 3.0"]
    assert list(left) == ["6"]


def test_vaes_that_decode_and_encode_images(ask: Asked) -> None:
    prompt = {
        "1": LOADER,
        "2": node("VAEDecode", vae="1.2"),
        "3": node("VAEEncode", vae="1.2"),
        "4": node("VAEDecodeTiled", vae="1.2"),
        "5": node("VAEEncodeForInpaint", vae="1.2"),
        "6": node("VAEDecodeAudio", vae="1.2"),
        "7": node("VAEEncodeAudio", vae="1.2"),
        "8": node("LTXVEmptyLatentAudio", audio_vae="1.2"),
        "9": node("VAESave", vae="1.2"),
        "10": node("ControlNetApplyAdvanced", vae="1.2"),
        "11": node("TorchCompileVAE", vae="1.2"),
        "12": node("VAEDecode", vae="11.0"),
        "13": node("WarmgraphCompileVAE", vae="1.2"),
        "14": node("VAEDecode", vae="13.0"),
        "15": node("WanImageToVideo", vae="1.2"),
    }
    places, left = ask(prompt, vae=True)
    assert places == [f"{number}.vae < 1.2" for number in (2, 3, 4, 5, 15)]
    assert left == {
        "12": "TorchCompileVAE (11) compiles it",
        "14": "node 13 of Warmgraph is there already",
    }
    assert ask(prompt) == ([], {})  # where VAEs are not asked for


def test_controlnets_before_they_are_applied(ask: Asked) -> None:
    prompt = {
        "1": LOADER,
        "2": node("ControlNetLoader", control_net_name="x"),
        "3": node("SetUnionControlNetType", control_net="2.0", type="auto"),
        "4": node("ControlNetApplyAdvanced", control_net="3.0", vae="1.2"),
        "5": node("ControlNetApply", control_net="2.0"),
        "6": node("WarmgraphCompileControlNet", control_net="2.0"),
        "7": node("ControlNetApplySD3", control_net="6.0"),
        "8": node("No such class", control_net="2.0"),
    }
    places, left = ask.of(prompt, "control_net")
    assert places == ["4.control_net < 3.0", "5.control_net < 2.0"]
    assert left == {"7": "node 6 of Warmgraph is there already"}


def test_step_caches_where_a_sampler_takes_ten_steps_and_nothing_else_leaves_out_some(
    ask: Asked,
) -> None:
    prompt = {
        "1": LOADER,
        "2": node("WarmgraphCompileModel", model="1.0"),
        "3": node("KSampler", model="2.0", steps=20),
        "4": node("KSampler", model="2.0", steps=9),
        "5": node("KSampler", model="2.0", steps="10.0"),
        "6": node("EasyCache", model="1.0"),
        "7": node("KSampler", model="6.0", steps=20),
        "8": node("WarmgraphDeepCache", model="2.0"),
        "9": node("KSamplerAdvanced", model="8.0", steps=20),
        "10": node("PrimitiveInt", value=30),
        "11": node("BasicScheduler", model="2.0", steps=12),
        "12": node("SplitSigmas", sigmas="11.0"),
        "13": node("CFGGuider", model="2.0"),
        "14": node("SamplerCustomAdvanced", guider="13.0", sigmas="12.0"),
        "15": node("BasicScheduler", model="2.0", steps=4),
        "16": node("SamplerCustom", model="2.0", sigmas="15.0"),
        "17": node("TorchCompileModelFluxAdvancedV2", model="1.0"),
        "18": node("KSampler", model="17.0", steps=10),
    }
    places, left = ask.of(prompt, "step_cache")
    assert places == ["3.model < 2.0", "13.model < 2.0", "18.model < 17.0"]
    few = "it takes fewer than 10 steps, or a link gives their number"
    assert left == {
        **dict.fromkeys(("4", "5", "16"), few),
        "7": "EasyCache (6) leaves out steps already",
        "9": "node 8 of Warmgraph is there already",
    }


def test_what_the_host_refuses_is_passed_over(ask: Asked) -> None:
    prompt = {
        "1": LOADER,
        "2": node("KSampler", model="7.0"),  # no such node
        "3": node("KSampler", model="1.9"),  # no such output
        "4": node("KSampler", model="1.1"),  # a CLIP
        "5": node("No such class", model="1.0"),
        "6": node("KSampler", model=["5", 0]),
        "8": None,
        "9": {"class_type": ["KSampler"], "inputs": 3},
        "10": node("KSampler", model=["1", -1]),
        "11": node("KSampler", model=["1", True]),
        "12": node("KSampler", model=[["1"], 0]),
    }
    assert ask(prompt) == ([], {})


def test_circles_end(ask: Asked) -> None:
    prompt = {
        "1": node("LoraLoaderModelOnly", model="2.0"),
        "2": node("LoraLoaderModelOnly", model="1.0"),
        "3": node("KSampler", model="2.0"),
        "4": node("KSampler (Efficient)", model="4.0"),
    }
    assert ask(prompt) == (["3.model < 2.0"], {})


def test_a_workflow_without_end_is_left_alone(ask: Asked, placing: Any) -> None:
    """A ladder of loaders with a sampler at each rung would be walked down from each."""
    prompt = {"0": LOADER}
    for number in range(1, 2000):
        prompt[f"{number}"] = node("LoraLoaderModelOnly", model=f"{number - 1}.0")
        prompt[f"s{number}"] = node("KSampler", model=f"{number}.0")
    places, left = ask(prompt)
    assert len(places) + len(left) == 1999
    assert set(left.values()) == {"the workflow is too large to look through"}


def test_nodes_that_are_put_in_are_shared_and_have_the_same_ids_each_time(
    placing: Any, classes: Any
) -> None:
    prompt = {
        "57:60": LOADER,
        "57:62": node("KSampler", model="57:60.0", seed=1),
        "3": node("KSampler", model="57:60.0"),
        "4": node("VAEDecode", vae="57:60.2"),
        "warmgraph_57_60_2_vae": node("PreviewAny", source="1"),
    }
    before = repr(prompt)
    found = placing.find_places(prompt, classes, [placing.MODEL, placing.VAE])
    placed, names = placing.place_nodes(prompt, found.places)
    assert repr(prompt) == before
    assert names == {"warmgraph_57_60_0_model": ["57:62", "3"], "warmgraph_57_60_2_vae_2": ["4"]}
    assert placed["57:62"]["inputs"] == {"model": ["warmgraph_57_60_0_model", 0], "seed": 1}
    assert placed["3"]["inputs"]["model"] == ["warmgraph_57_60_0_model", 0]
    added = placed["warmgraph_57_60_0_model"]
    assert added["class_type"] == "WarmgraphCompileModel"
    assert added["inputs"] == {"model": ["57:60", 0], "when_missing": "background"}
    assert placing.place_nodes(prompt, found.places) == (placed, names)
    again = placing.find_places(placed, classes, [placing.MODEL, placing.VAE])
    assert again.places == [] and len(again.left) == 3
    assert not any(":" in name for name in names)


def test_answers_are_plain(placing: Any, classes: Any) -> None:
    prompt = {
        "57:60": LOADER,
        "57:62": node("KSampler", model="57:60.0"),
        "9": node("WarmgraphCompileModel", model="57:60.0"),
        "10": node("KSampler", model="9.0"),
    }
    assert placing.find_places(prompt, classes, [placing.MODEL]).plain() == {
        "places": [
            {
                "node": "57:62",
                "class": "KSampler",
                "input": "model",
                "kind": "model",
                "origin": ["57:60", 0],
            }
        ],
        "left": [
            {
                "node": "10",
                "class": "KSampler",
                "line": {
                    "key": "left_alone_ours",
                    "values": {"id": "9"},
                    "text": "node 9 of Warmgraph is there already",
                },
                "kind": "model",
            }
        ],
    }
