"""Prompts beside packs that patch classes, swap forwards, raise and interrupt, as without us."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from warmgraph_backends.code.packs import origin
from warmgraph_tools.inprocess import Host

from .beside import Prompt, SomebodyError, draw
from .deepcache.cached import cached
from .lab import Lab, relative
from .subject import Subject

#: Relative L2 of an image: a UNet call's bound, through up to four steps and a guidance of 6.
TOLERANCE = 3e-4
#: What the process may grow by, once each kind of prompt has come.
GROWTH_BYTES = 24 << 20


class Desk:
    """A model in three forms, and what became of the prompts that it was given."""

    def __init__(self, lab: Lab, host: Host) -> None:
        self.subject = Subject(lab, host, "narrowxl")
        self.lab, self.host = lab, host
        self.compiled = lab.compiled(self.subject.model)
        image = torch.rand(1, 72, 104, 3, generator=torch.Generator().manual_seed(0))
        name = host.model_file("controlnet", base="narrowxl")
        (net,) = host.node("ControlNetLoader", control_net_name=name)
        self.plain = (self.subject.positive, self.subject.negative)
        self.controlled = [
            host.control(self.plain, each, image)
            for each in (net, lab.controlled(net, when_missing="never"))
        ]
        self._swapped = False
        self.failures: list[str] = []

    def run(self, number: int, prompt: Prompt) -> None:
        """Make one prompt without and with Compile Model, and keep what differs."""
        model = self.subject.model
        expected = self._outcome(prompt, model)
        problem = None
        if prompt.cached:
            problem = _other_end(expected, self._outcome(prompt._replace(cached=False), model))
        if prompt.fresh:
            outcome = self._outcome(prompt, model, anew=True)
        else:
            outcome = self._outcome(prompt, self.compiled)
        problem = problem or _difference(outcome, expected)
        if problem is None and (left := _left_behind(self.subject.unet)):
            problem = f"forwards stay on {left[:3]}"
        if problem is not None:
            self.failures.append(f"{number}: {problem}: {prompt.words}")

    def _outcome(self, prompt: Prompt, model: Any, *, anew: bool = False) -> Any:
        """The image, or the error that the prompt failed with."""
        from comfy.model_management import (
            InterruptProcessingException,
            interrupt_current_processing,
        )

        if prompt.swaps or self._swapped:
            self._let_go()
        self._swapped = prompt.swaps
        conditions = self.plain
        if prompt.controlled:
            conditions = self.controlled[anew or model is self.compiled]
        for patch in prompt.patches:
            model = patch(model)
        with prompt.held() if prompt.held is not None else nullcontext():
            if anew:
                model = self.lab.compiled(model, when_missing="never")
            if prompt.cached:
                model = cached(model, interval=2)
            try:
                return self._sample(prompt, model, conditions)
            except (Exception, InterruptProcessingException) as error:
                return error
            finally:
                interrupt_current_processing(False)

    def _let_go(self) -> None:
        """Load the plain model, and take away what the host leaves of a forward's object patch: the
        method that the module had then, with which an instance of another class cannot run.
        """
        import comfy.model_management as management

        management.load_models_gpu([self.subject.model])
        for part in self.subject.unet.modules():
            if getattr(part.__dict__.get("forward"), "__self__", None) is part:
                del part.__dict__["forward"]

    def _sample(self, prompt: Prompt, model: Any, conditions: Any) -> torch.Tensor:
        import comfy.model_management as management
        import comfy.sample

        given = prompt.sampling
        shape = (given["batch"], 4, given["height"] // 8, given["width"] // 8)
        latent = torch.zeros(shape)
        positive, negative = conditions

        def after_step(step: int, *_: Any) -> None:
            if step == prompt.interrupt:
                if not prompt.asked:
                    raise management.InterruptProcessingException
                management.interrupt_current_processing(True)

        torch.manual_seed(given["seed"])
        image: torch.Tensor = comfy.sample.sample(
            model,
            comfy.sample.prepare_noise(latent, given["seed"]),
            given["steps"],
            given["cfg"],
            "euler",
            "normal",
            positive,
            negative,
            latent,
            callback=after_step,
            disable_pbar=True,
            seed=given["seed"],
        )
        return image


def _left_behind(unet: torch.nn.Module) -> list[str]:
    """Modules with a forward of ours; an object patch of a pack stays until another is loaded."""
    return [
        name
        for name, part in unet.named_modules()
        if origin(part.__dict__.get("forward")).startswith("warmgraph")
    ]


def _other_end(outcome: Any, expected: Any) -> str | None:
    """Say where a prompt under DeepCache, which makes another image, does not end as it would."""
    ends = [None if torch.is_tensor(end) else repr(end) for end in (outcome, expected)]
    return None if ends[0] == ends[1] else f"failed: ended with {ends[0]} and not with {ends[1]}"


def _difference(outcome: Any, expected: Any) -> str | None:
    if isinstance(expected, BaseException):
        if type(outcome) is type(expected) and str(outcome) == str(expected):
            return None
        return f"failed: ended with {outcome!r:.200} and not with {expected!r:.200}"
    if isinstance(outcome, BaseException):
        return f"failed: {outcome!r:.300}"
    error = relative(outcome, expected)
    return None if error < TOLERANCE else f"wrong: differs by {error:.1e}"


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.fixture(scope="module")
def desk(lab: Lab, host: Host) -> Iterator[Desk]:
    import comfy.model_management as management

    yield Desk(lab, host)
    management.unload_all_models()


def test_the_packs_do_what_theirs_do(desk: Desk) -> None:
    """Each that a prompt can have changes its image, or fails it: else nothing would be tested."""
    chance = random.Random(0)
    plain = {}
    seen: set[str] = set()
    for _ in range(60):
        prompt = draw(chance)
        name = prompt.words.partition(",")[0].partition(" of ")[0]
        if len(prompt.patches) != 1 or prompt.cached or prompt.controlled or name in seen:
            continue
        seen.add(name)
        prompt = prompt._replace(interrupt=None, held=None)
        key = tuple(prompt.sampling.values())
        plain[key] = desk._outcome(prompt._replace(patches=()), desk.subject.model)
        outcome = desk._outcome(prompt, desk.subject.model)
        if isinstance(outcome, BaseException):
            assert isinstance(outcome, SomebodyError), (prompt.words, outcome)
        else:
            assert relative(outcome, plain[key]) > 2e-3, prompt.words
    assert len(seen) > 8, seen


@pytest.mark.slow
def test_twenty_prompts_beside_packs_are_right(desk: Desk) -> None:
    chance = random.Random(20)
    for number in range(20):
        desk.run(number, draw(chance))
    assert not desk.failures, "\n".join(desk.failures)


@pytest.mark.slow
def test_150_prompts_beside_packs_are_right_and_memory_stays(desk: Desk) -> None:
    chance = random.Random(150)
    desk.failures.clear()
    resident: list[int] = []
    for number in range(150):
        desk.run(number, draw(chance))
        if number % 25 == 24 and sys.platform == "linux":
            gc.collect()
            resident.append(_resident_bytes())
    assert not desk.failures, "\n".join(desk.failures)
    assert not resident or resident[-1] - resident[2] < GROWTH_BYTES, resident
