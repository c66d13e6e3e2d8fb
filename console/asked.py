"""Asks PyTorch and ComfyUI about themselves in a separate process, because importing them may fail,
print, hang or end the process.

Such a process is `cli.py doctor --ask torch DEVICE FILE`, `--ask graph DEVICE FILE` or `--ask host
FOLDER DEVICE`; it prints lines of JSON after a mark. If it dies, its last output is reported.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_MARK = "\x00warmgraph doctor\x00"
_CLI = Path(__file__).resolve().parents[1] / "cli.py"


def ask(*question: str, limit_s: float) -> tuple[dict[str, Any], str | None]:
    """Ask in a separate process.

    Args:
        question: "torch", a device and the file that gets a small graph; "graph", a device and
            that file, to run it; or "host", a folder and a device.
        limit_s: seconds until it is given up.

    Returns:
        Its answers, and how it ended if not well.
    """
    with tempfile.TemporaryDirectory(prefix="warmgraph-doctor-") as folder:
        environment = {
            **os.environ,
            # Nothing that was compiled before may stand for the compiler's work, nothing is left.
            "TORCHINDUCTOR_CACHE_DIR": str(Path(folder, "inductor")),
            "TRITON_CACHE_DIR": str(Path(folder, "triton")),
            **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), folder),
        }
        # Of an isolated Python, as in the portable version for Windows, the environment is unheard.
        command = [sys.executable, "-X", "utf8", str(_CLI), "doctor", "--ask", *question]
        try:
            done = subprocess.run(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=limit_s,
            )
        except subprocess.TimeoutExpired as error:
            return _said(error.stdout or b""), f"it took longer than {limit_s:g} s"
    died = None if done.returncode == 0 else _last_words(done.stderr, done.returncode)
    return _said(done.stdout), died


def answer(question: list[str]) -> int:
    """Answer one question, in the separate process."""
    if question[0] == "torch":
        _answer_of_torch(question[1], Path(question[2]), _tell)
    elif question[0] == "graph":
        _answer_of_graph(question[1], Path(question[2]), _tell)
    else:
        _answer_of_host(Path(question[1]), question[2], _tell)
    return 0


def _tell(**facts: Any) -> None:
    print(f"{_MARK}{json.dumps(facts)}", flush=True)


def _said(output: bytes) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for line in output.decode("utf-8", "replace").splitlines():
        _, found, text = line.partition(_MARK)
        if found:
            facts.update(json.loads(text))
    return facts


def _last_words(output: bytes, code: int) -> str:
    lines = [line.strip() for line in output.decode("utf-8", "replace").splitlines()]
    said = next((line for line in reversed(lines) if line), "it said nothing")
    how = f"signal {-code}" if code < 0 else f"exit status {code}"
    return f"{said[:300]} ({how})"


def _answer_of_torch(device: str, graph: Path, tell: Callable[..., None]) -> None:
    try:
        import torch
    except Exception as error:  # a broken installation raises anything
        tell(**{"no torch": f"{type(error).__name__}: {error}"})
        return
    from warmgraph_backends.compilers.preflight import doubts, install_command, needs
    from warmgraph_backends.compilers.toolchain import cpp_compiler
    from warmgraph_backends.device import gpu, libcuda

    on_gpu, cpp = gpu.is_gpu(gpu.compiled_for()), cpp_compiler()
    device = device if device != "auto" else gpu.compiled_for()
    triton, broken = _triton()
    found = []
    for need in needs(device):
        name, met, reason, remedy, _ = need
        if name == "Triton" and met and broken:
            met, reason = False, f"Triton is installed but cannot be imported ({broken})"
        command = "" if met else install_command(need)
        remedy = f"{remedy}: {command}" if command else remedy
        found.append((name, met, reason, remedy, _detail(name, triton)))
    doubtful = [(d.name, d.reason, f"{d.remedy}: {install_command(d)}") for d in doubts(device)]
    tell(
        torch=torch.__version__,
        device=device,
        gpus=_gpus() if on_gpu else [],
        driver=libcuda.capability() is not None,
        triton=triton,
        cpp=(cpp.reason or _detail(cpp.name, triton)) if sys.platform == "win32" else "",
        requirements=found,
        doubts=doubtful,
    )
    if not all(met for _, met, *_ in found):
        return
    from warmgraph_backends.compilers.self_test import build, check

    def make() -> None:
        payload = build(device)
        check(device, payload)
        graph.write_bytes(payload)

    tell(built=_outcome(make))


def _answer_of_graph(device: str, graph: Path, tell: Callable[..., None]) -> None:
    """Run the graph that another process has built."""
    from warmgraph_backends.compilers.self_test import check
    from warmgraph_backends.cuda_graphs import driver
    from warmgraph_backends.device import gpu

    payload, record = graph.read_bytes(), driver.record if gpu.is_gpu(device) else None
    tell(replayed=_outcome(lambda: check(device, payload, record=record)))


def _outcome(do: Callable[[], None]) -> tuple[str, float]:
    """Do it; return why it failed, "" if it did not, and how many seconds it took."""
    from warmgraph_backends.errors import RequirementError

    started, problem = time.monotonic(), ""
    try:
        do()
    except RequirementError as error:
        problem = str(error).splitlines()[0]
    return problem, round(time.monotonic() - started, 1)


def _triton() -> tuple[str | None, str]:
    """Triton's version, or why it cannot be imported although installed."""
    try:
        if importlib.util.find_spec("triton") is None:
            return None, ""
        return str(importlib.import_module("triton").__version__), ""
    except Exception as error:  # a broken installation raises anything
        return None, f"{type(error).__name__}: {error}"


def _detail(name: str, triton: str | None) -> str:
    """Details of something that a backend requires."""
    import torch

    from warmgraph_backends.compilers import toolchain
    from warmgraph_backends.device import gpu

    if name == "torch":
        return f"{torch.__version__}, with all private names that compiling needs"
    if name == "Triton":
        return f"{triton}"
    if name == "NVIDIA CUDA":
        return f"{gpu.toolkit()}"
    names: tuple[str, ...] = (toolchain.cpp_compiler_name(),)
    if name == "C compiler":
        names = (os.environ.get("CC", "gcc"), "gcc", "clang")
    paths = [path for name in names if (path := shutil.which(name))]
    return paths[0] if paths else "found"


def _gpus() -> list[dict[str, Any]]:
    """Each card, in the order of their numbers."""
    import torch

    from warmgraph_backends.device import gpu

    found = []
    for card in range(gpu.count(gpu.CUDA)):
        device = torch.device(gpu.CUDA, card)
        facts: dict[str, Any] = {"name": gpu.name(device)}
        found.append(facts)
        try:
            facts["free"], facts["total"] = gpu.free_and_total_bytes(device)
            facts["capability"] = f"compute capability {gpu.capability(card)}"
            facts["attention"] = list(_attention(int(gpu.capability(card).partition(".")[0])))
        except RuntimeError as error:  # it is full, or exclusive to another process
            facts["problem"] = str(error).splitlines()[0]
    return found


def _attention(major: int) -> Iterator[str]:
    """What attends exactly on cards of this capability, and what could, in sentences."""
    from warmgraph_backends.choices import exact_attention as exact

    there, broken = exact.found(exact.KERNELS, major)
    yield ", ".join(f"{each.kernel.title} {each.version}".strip() for each in there)
    yield from (f"{kernel.title} cannot be imported ({error})" for kernel, error in broken)
    for kernel in exact.missing(exact.KERNELS, major):
        why = f"over {kernel.worth_rows} tokens and more it may be faster"
        yield f"{kernel.title} is not installed; {why}: pip install {kernel.package}"


def _answer_of_host(folder: Path, device: str, tell: Callable[..., None]) -> None:
    """Import the host as a worker does, and look at the names that we ask it for."""
    sys.path.insert(0, str(folder))
    sys.argv = ["main.py", *(["--cpu"] if device == "cpu" else [])]
    import comfy.options

    comfy.options.enable_args_parsing()
    for name in ("comfy.sd", "comfy.controlnet", "comfy.samplers"):
        importlib.import_module(name)
    try:
        version = importlib.import_module("comfyui_version").__version__
    except (ImportError, AttributeError):
        version = "of unknown version"
    from warmgraph_backends.host_api.present import missing

    lacking = {feature.value: reason for feature, reason in missing().items()}
    tell(version=str(version), missing=lacking)
