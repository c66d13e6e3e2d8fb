"""A place to run cases in: host tree, work folder with files and stores, children with limits."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from filelock import FileLock  # torch needs it, too

from .models import KINDS
from .pack import graph_files
from .transformer_kinds import SECOND, SMALL, TRANSFORMERS, suffix

CHILD = Path(__file__).resolve().parent / "child.py"
SMOKE_KINDS = {"sdxl": "narrowxl", "sd15": "narrow15", "vae": "narrowvae"}
SMOKE_FLAGS = ("--cpu", "--use-pytorch-cross-attention")
SMOKE_SCALE = 8
BUILD_WORKERS = 14
POLL_S = 0.5
#: In bytes, with some to spare: Qwen-Image in bfloat16.
LARGEST_FILE = 45 * 2**30
DEFAULT: tuple[str, ...] = ()
OFF = ("--disable-dynamic-vram",)
NATIVE = ("--disable-cuda-malloc",)


class ChildError(RuntimeError):
    """A child failed or was stopped at its limit; `partial` is what it had found by then."""

    def __init__(self, reason: str, partial: dict[str, Any], *, stopped: bool) -> None:
        super().__init__(reason)
        self.partial = partial
        self.stopped = stopped


class Lab:
    """Starts children one after another and keeps what they share.

    Labs of several processes may have one work folder: what is made there, one of them makes.
    """

    def __init__(
        self, tree: Path, work: Path, *, smoke: bool = False, seconds: float | None = None
    ) -> None:
        self.tree, self.work, self.smoke = tree.resolve(), work.resolve(), smoke
        self._end = None if seconds is None else time.monotonic() + seconds
        self.facts: dict[str, Any] = {}
        self._base = self.work / "base" / str(os.getpid())
        for folder in ("models", "stores", "logs", self._base):
            (self.work / folder).mkdir(parents=True, exist_ok=True)

    def kind(self, name: str) -> str:
        """The kind to use for a real one; narrow in a smoke run."""
        if not self.smoke:
            return name
        return SMALL + name if name in TRANSFORMERS else SMOKE_KINDS[name]

    def pixels(self, *sides: int) -> list[int]:
        """A size in pixels; scaled down in a smoke run."""
        return [side // SMOKE_SCALE // 8 * 8 if self.smoke else side for side in sides]

    def left(self) -> float:
        """Seconds until this lab's time is up."""
        return float("inf") if self._end is None else self._end - time.monotonic()

    def model(self, kind: str, *, dtype: str = "float16", seed: int = 0) -> str:
        """Path of a model file, made now if it is not there."""
        return self._file(f"{self.kind(kind)}-{dtype}-{seed}", kind, {"dtype": dtype, "seed": seed})

    def transformer(self, name: str, *, second: bool = False) -> str:
        """Path of a transformer's file, which the first child that loads it writes; others are
        deleted where the disk may not have room for it, too. `second` is another checkpoint of it.
        """
        folder = self.work / "models"
        mine = folder / f"{name}-{TRANSFORMERS[name].dtype}{SECOND * second}{suffix(name)}"
        for other in (f for n in TRANSFORMERS if n != name for f in folder.glob(f"{n}-*")):
            if mine.exists() or shutil.disk_usage(self.work).free > LARGEST_FILE:
                break
            other.unlink()
        return str(mine)

    def file(self, kind: str) -> str:
        """Path of the file of a UNet or a transformer."""
        return self.transformer(kind) if kind in TRANSFORMERS else self.model(kind)

    def lora(self, kind: str, form: str) -> str:
        """Path of a LoRA file, `linear` or `conv`, made now if it is not there."""
        return self._file(f"{self.kind(kind)}-lora-{form}", kind, {"lora": form, "seed": 7})

    def controlnet(self, kind: str) -> str:
        """Path of the file of a ControlNet for a kind's UNet, made now if it is not there."""
        return self._file(f"{self.kind(kind)}-controlnet", kind, {"controlnet": True, "seed": 0})

    def controllora(self, kind: str) -> str:
        """Path of the file of a ControlLoRA for a kind's UNet, made now if it is not there."""
        return self._file(f"{self.kind(kind)}-controllora", kind, {"controllora": True, "seed": 0})

    def store(self, name: str, *, empty: bool = False) -> str:
        """Folder of a graph store; `empty` forgets what was in it, key and settings too."""
        path = self.work / "stores" / (self.kind(name) if name in KINDS else name)
        if empty:
            shutil.rmtree(path, ignore_errors=True)
            shutil.rmtree(path.with_name(path.name + "-private"), ignore_errors=True)
        return str(path)

    def folder(self, name: str) -> str:
        """A folder that children share, emptied now."""
        path = self.work / "shared" / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return str(path)

    def workers(self, count: int) -> int:
        """Worker processes to build with; two in a smoke run."""
        return 2 if self.smoke else count

    def fill(self, kind: str, *, workers: int = 0) -> None:
        """Make sure that the kind's store is full, for what must find every graph in it."""
        store, file = self.store(kind), self.file(kind)
        with FileLock(self.work / f"{Path(store).name}.lock"):
            if graph_files(Path(store)):
                return
            self.run(
                "cold_build",
                limit_s=400,
                model=file,
                kind=self.kind(kind),
                store=store,
                size=self.pixels(1024, 1024),
                workers=self.workers(workers),
            )

    def run_in_modes(self, task: str, *, limit_s: float, **params: Any) -> dict[str, Any]:
        """Run one task (`run`) with dynamic VRAM, the host's "default", and with it "off"."""
        modes = {"default": DEFAULT, "off": OFF}
        return {
            name: self.run(task, flags, limit_s=limit_s, **params) for name, flags in modes.items()
        }

    def run(
        self,
        task: str,
        flags: tuple[str, ...] = DEFAULT,
        *,
        limit_s: float,
        hash_seed: str = "0",
        silence_s: float | None = None,
        caches: str | None = None,
        pretended: str | None = None,
        **params: Any,
    ) -> dict[str, Any]:
        """Run one task in a fresh process under these host flags and return its result.

        Args:
            silence_s: stop it too when it has reported nothing partial for so long.
            caches: folder of the caches of Inductor and Triton; None are new and empty ones, so
                that nothing is quick because of an earlier child.
            pretended: the child sees no GPU, and is told of this one.

        Raises:
            ChildError: it failed, printed no result or ran past its limit.
        """
        limit = min(limit_s, self.left())
        if limit < 5:
            raise ChildError("no time left (--minutes)", {}, stopped=True)
        request = {
            "task": task,
            "tree": str(self.tree),
            "base": str(self._base),
            "argv": [*(SMOKE_FLAGS if self.smoke else ()), *flags],
            "narrow": self.smoke,
            "pretended": pretended,
            "params": params,
        }
        logs = self.work / "logs"
        log = logs / f"{len(list(logs.iterdir())):03d}-{os.getpid()}-{task}.log"
        with tempfile.TemporaryDirectory(prefix="caches-", dir=self.work) as fresh:
            kept = caches or fresh
            environment = {
                **os.environ,
                "PYTHONHASHSEED": hash_seed,
                "PYTHONUNBUFFERED": "1",
                "TORCHINDUCTOR_CACHE_DIR": os.path.join(kept, "inductor"),
                "TRITON_CACHE_DIR": os.path.join(kept, "triton"),
            }
            environment.pop("PYTORCH_CUDA_ALLOC_CONF", None)
            if pretended is not None:
                environment["CUDA_VISIBLE_DEVICES"] = ""
            output, code = _run(
                [sys.executable, str(CHILD), json.dumps(request)],
                environment,
                log,
                limit,
                silence_s,
            )
        answer, partial, facts = _parse(output)
        self.facts = facts or self.facts
        if code is None:
            part = "" if silence_s is None else f", or {silence_s:.0f} s of one part,"
            raise ChildError(f"stopped at its limit of {limit:.0f} s{part}", partial, stopped=True)
        if answer is None:
            tail = log.read_text(encoding="utf-8", errors="replace")[-600:]
            raise ChildError(
                f"ended with code {code} and no result: {tail}", partial, stopped=False
            )
        if not answer["ok"]:
            raise ChildError(answer["reason"], partial, stopped=False)
        process = {**facts, "boot_s": answer["boot_seconds"], "task_s": answer["task_seconds"]}
        return {**answer["result"], "process": process}

    def _file(self, stem: str, kind: str, fields: dict[str, Any]) -> str:
        path = self.work / "models" / f"{stem}.safetensors"
        with FileLock(path.with_suffix(".lock")):
            if not path.exists():
                file = {"path": str(path), "kind": self.kind(kind), **fields}
                self.run("make_files", limit_s=180, files=[file])
        return str(path)


def _run(
    command: list[str],
    environment: dict[str, str],
    log: Path,
    limit: float,
    silence: float | None = None,
) -> tuple[str, int | None]:
    """Run a command with its stderr in the log; returns stdout, exit code or None if stopped."""
    output = log.with_suffix(".out")
    with output.open("wb") as out, log.open("wb") as err:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=environment,
            start_new_session=True,
        )
        try:
            code = _wait(child, output, limit, silence)
        finally:
            _kill_group(child)
    return output.read_text(encoding="utf-8", errors="replace"), code


def _wait(
    child: subprocess.Popen[bytes], output: Path, limit: float, silence: float | None
) -> int | None:
    """The child's exit code, or None when its time or the time of one of its parts was up."""
    heard = time.monotonic()
    end, reports = heard + limit, 0
    while True:
        now = time.monotonic()
        if silence is not None and (count := output.read_bytes().count(b'{"partial"')) > reports:
            reports, heard = count, now
        left = (end if silence is None else min(end, heard + silence)) - now
        if left <= 0:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(timeout=left if silence is None else min(left, POLL_S))


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    """End the child and what it left running; its group is its own session."""
    if os.name == "nt":
        child.kill()
    else:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _parse(output: str) -> tuple[dict[str, Any] | None, dict[str, Any], dict[str, Any]]:
    """A child's answer if it came to one, its last partial result, and the host it ran on."""
    answer: dict[str, Any] | None = None
    partial: dict[str, Any] = {}
    facts: dict[str, Any] = {}
    for line in output.splitlines():
        if not line.startswith("{"):
            continue
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if "partial" in value:
            partial = value["partial"]
        elif "ok" in value:
            answer = value
        elif "host" in value:
            facts = value["host"]
    return answer, partial, facts
