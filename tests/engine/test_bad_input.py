"""Whatever is wrong with files, folders, names or workers: the image is right and a line says
why.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from warmgraph_backends.engine import WorkflowRef
from warmgraph_backends.errors import GraphsNameError
from warmgraph_backends.storing.canonical_json import canonical_json, sha256_hex
from warmgraph_backends.storing.folders import list_folders
from warmgraph_backends.storing.graph_file import compress_payload, encode, read_graph
from warmgraph_backends.storing.manifest import FORMAT
from warmgraph_backends.storing.signing import Signer
from warmgraph_tools.inprocess import Host

from .lab import TOLERANCE, Lab, relative
from .probed import Probed
from .rows import some_rows

QUICK = "Transformer entry 64"  # its build takes least
KINDS = 8
MakeLab = Callable[..., Lab]


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING)
    return caplog


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Warnings of ours so far."""
    return [r.getMessage() for r in caplog.records if r.name.startswith("warmgraph_backends")]


def said(caplog: pytest.LogCaptureFixture, words: str) -> int:
    """How many lines of the log say so."""
    return sum(words in line for line in warnings(caplog))


def file_of(lab: Lab, kind: str = QUICK) -> Path:
    """A kind's file in the shared store."""
    for path in sorted(lab.store.glob("*.safetensors"), key=lambda p: -p.stat().st_mtime_ns):
        if lab.engine._store.read_manifest(path).kind == kind:
            return path
    raise AssertionError(f"the store has no {kind}")


def state_of(model: Probed, kind: str = QUICK) -> dict[str, Any]:
    return next(k for k in model.report()["kinds"] if k["kind"] == kind)


def right(model: Probed, **options: Any) -> torch.Tensor:
    """Sample, and assert that every UNet call is eager's within tolerance."""
    image = model.sample(**options)
    assert model.probe.calls
    assert max(call.error for call in model.probe.calls) <= TOLERANCE
    return image


# --- graph files -----------------------------------------------------------------------------


def _parts(lab: Lab, path: Path) -> tuple[dict[str, Any], bytes]:
    graph = read_graph(path, lab.signer)
    return dict(graph.manifest.data), graph.payload


def _truncate(lab: Lab, path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _flip(offset: int) -> Callable[[Lab, Path], None]:
    def flip(lab: Lab, path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[offset] ^= 1
        path.write_bytes(data)

    return flip


def _empty(lab: Lab, path: Path) -> None:
    path.write_bytes(b"")


def _text(lab: Lab, path: Path) -> None:
    path.write_text("import os; os.system('true')\n" * 50)


def _folder(lab: Lab, path: Path) -> None:
    path.unlink()
    path.mkdir()


def _unsign(lab: Lab, path: Path) -> None:
    manifest, payload = _parts(lab, path)
    data = encode(manifest, compress_payload(payload), lab.signer)
    header = data.replace(b'"signature":"', b'"signature":"', 1)
    start = header.index(b'"signature":"') + len(b'"signature":"')
    anonymous = bytearray(header)
    anonymous[start : start + 64] = b"0" * 64
    fingerprint = lab.signer.fingerprint.encode()
    path.write_bytes(bytes(anonymous).replace(fingerprint, b"00000000"))


def _sign_elsewhere(lab: Lab, path: Path) -> None:
    manifest, payload = _parts(lab, path)
    signer = Signer(lab.root / "another machine")
    path.write_bytes(encode(manifest, compress_payload(payload), signer))


def _older_format(lab: Lab, path: Path) -> None:
    """A file that an older version of this pack signed here."""
    manifest, payload = _parts(lab, path)
    signer = lab.signer
    data = encode(manifest, compress_payload(payload), signer)
    text = canonical_json(read_manifest_text(data))
    older = text.replace(f'"format":{FORMAT},', '"format":0,')
    assert older != text
    from safetensors.numpy import load, save

    from warmgraph_backends.storing import graph_file

    signature = signer.sign(graph_file._PURPOSE + older)
    path.write_bytes(save(load(data), {"manifest": older, "signature": signature}))


def read_manifest_text(data: bytes) -> dict[str, Any]:
    import json

    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    manifest: dict[str, Any] = json.loads(header["__metadata__"]["manifest"])
    return manifest


def _rename(lab: Lab, path: Path) -> None:
    """Another kind's good file under this one's name."""
    path.write_bytes(file_of(lab, "Upsample 64").read_bytes())


def _half_written(lab: Lab, path: Path) -> None:
    """What a process that was killed while writing leaves."""
    data = path.read_bytes()
    path.unlink()
    path.with_name(f".{path.name}.123.abcd.tmp").write_bytes(data[: len(data) // 2])


def _for_another_target(**facts: str) -> Callable[[Lab, Path], None]:
    def change(lab: Lab, path: Path) -> None:
        manifest, payload = _parts(lab, path)
        path.unlink()
        target = {**manifest["target"], **facts}
        key = sha256_hex(canonical_json(target))
        changed = {**manifest, "target": target, "key": key}
        lab.engine._store.put(changed, compress_payload(payload))

    return change


DAMAGE: dict[str, tuple[Callable[[Lab, Path], None], str, bool]] = {
    # what happens to the file, what is said, whether the file keeps its place
    "truncated": (_truncate, "is damaged", False),
    "a bit of the payload flipped": (_flip(-200), "does not match its hash", False),
    "a bit of the length flipped": (_flip(1), "is damaged", False),
    "a bit of the manifest flipped": (_flip(400), "raph file", False),
    "empty": (_empty, "is damaged", False),
    "something else": (_text, "is damaged", False),
    "a folder": (_folder, "cannot be read", True),
    "unsigned": (_unsign, "cli.py trust ", True),
    "signed with another key": (_sign_elsewhere, "cli.py trust ", True),
    "from an older version": (_older_format, "has format 0, this version reads 1", True),
    "under another's name": (_rename, "is not what its name says", True),
    "half-written": (_half_written, "no compiled file", False),
    "for another GPU": (
        _for_another_target(capability="8.9"),
        "GPU compute capability: made for 8.9",
        False,
    ),
    "for an older torch": (_for_another_target(torch="2.10.0"), "torch: made for 2.10.0", False),
}


#: tests/unit/test_graph_file.py reads files with each damage.
QUICK_DAMAGE = (
    "truncated",
    "a bit of the payload flipped",
    "unsigned",
    "from an older version",
    "for an older torch",
)


@pytest.mark.parametrize("damage", some_rows(DAMAGE, QUICK_DAMAGE))
def test_a_bad_file_in_the_store_is_named_and_its_places_run_eager(
    host: Host, make_lab: MakeLab, log: pytest.LogCaptureFixture, damage: str
) -> None:
    lab = make_lab()
    change, words, stays = DAMAGE[damage]
    path = file_of(lab)
    for stale in lab.store.glob("*.safetensors"):  # of a lab that was kept over a change of code
        if stale != path and lab.engine._store.read_manifest(stale).kind == QUICK:
            stale.unlink()
    others = {p.name: p.read_bytes() for p in lab.store.iterdir() if p != path}
    change(lab, path)
    after = path.read_bytes() if path.is_file() else None
    model = Probed(lab, host, when_missing="never")
    lab.settle()
    right(model)
    kind = state_of(model)
    report = model.report()
    assert kind["state"] == "missing" and words in str(kind["reason"]) + str(report["eager"])
    assert len(report["eager"]) == 1 and report["loads"] == KINDS - 1
    for name, data in others.items():  # no good file is lost
        assert (lab.store / name).read_bytes() == data
    if stays:
        assert path.is_dir() if after is None else path.read_bytes() == after
    elif after is not None:
        assert not path.exists()
        assert path.with_name(path.name + ".broken").read_bytes() == after


def test_bad_files_are_built_anew_where_that_is_allowed_and_no_foreign_file_is_lost(
    host: Host, make_lab: MakeLab, log: pytest.LogCaptureFixture
) -> None:
    """Somebody overwrites a workflow's graph over the host's /userdata route: in place, with code
    that would run as it is unpickled, and through the hard link the store's own file with it."""
    lab = make_lab()
    (lab.workflows / "portrait.json").write_text("{}")
    lab.workflow = WorkflowRef("workflows/portrait.json", "default", "id-1")
    first = Probed(lab, host, when_missing="never")
    right(first)
    lab.settle()
    path = file_of(lab)
    linked = lab.workflows / "portrait.graphs" / f".{path.name}"
    assert linked.samefile(path)
    mark = lab.root / "it ran"
    manifest, _ = _parts(lab, path)
    evil = encode(manifest, compress_payload(_command(mark)), Signer(lab.root / "elsewhere"))
    with linked.open("r+b") as file:  # as the route does it: the same inode
        file.truncate()
        file.write(evil)
    assert path.read_bytes() == evil

    lab = _restarted(lab)
    model = Probed(lab, host, when_missing="wait")
    right(model)
    lab.settle()
    assert lab.counts(model.model) == (1, KINDS - 1, 0)
    assert said(log, "was signed with another key") == 1 and said(log, "cli.py trust") == 1
    assert not mark.exists()
    assert path.read_bytes() == linked.read_bytes() == evil  # may be trusted later

    lab = _restarted(lab)
    again = Probed(lab, host, when_missing="never")
    lab.settle()
    again.check()
    assert not mark.exists()


class _Runs:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def _command(mark: Path) -> bytes:
    data = pickle.dumps(_Runs(mark))
    assert b"touch" in data
    return data


def test_even_a_signed_payload_may_not_name_other_functions(
    host: Host, make_lab: MakeLab, log: pytest.LogCaptureFixture
) -> None:
    lab = make_lab()
    mark = lab.root / "it ran"
    manifest, _ = _parts(lab, file_of(lab))
    lab.engine._store.put(manifest, compress_payload(_command(mark)))
    model = Probed(lab, host, when_missing="never")
    lab.settle()
    right(model)
    assert "which no compiled file needs" in state_of(model)["reason"]
    assert not mark.exists()


def _restarted(lab: Lab) -> Lab:
    """A new server process over the same folders."""
    lab.engine.close()
    again = Lab(lab.root)
    again.workflow = lab.workflow
    return again


# --- graphs that are wrong -------------------------------------------------------------------

_WRONG = {
    "other values": ("return (out[0] * 1.01,)", "differs from ComfyUI's result by 1.0e-02"),
    "not a number": ("return (out[0] * float('nan'),)", "differs from ComfyUI's result by inf"),
    "another shape": ("return (out[0][:1],)", "differs from ComfyUI's result by inf"),
    "another dtype": (
        "return (out[0].double(),)",
        "called otherwise: ComfyUI's code gives torch.float32, the compiled one torch.float64",
    ),
    "no tensor": ("return (None,)", "failed at run time: TypeError: a graph must return"),
    "nothing": ("return ()", "failed at run time: IndexError"),
    "an error": (
        "raise RuntimeError('no such kernel')",
        "failed at run time: RuntimeError: no",
    ),
}


@pytest.mark.parametrize("wrong", some_rows(_WRONG, ("other values", "another dtype", "an error")))
def test_a_graph_that_is_wrong_is_not_used(
    host: Host, make_lab: MakeLab, log: pytest.LogCaptureFixture, wrong: str
) -> None:
    """A graph file as this machine's own worker might have made it, signed with its key.

    One that differs is compared once more in the next run; what fails is dropped at once.
    """
    lab = make_lab()
    line, words = _WRONG[wrong]
    manifest, payload = _parts(lab, file_of(lab))
    parts = pickle.loads(payload)
    parts["source"] += f"\n_right = call\ndef call(args):\n    out = _right(args)\n    {line}\n"
    lab.engine._store.put(manifest, compress_payload(pickle.dumps(parts, protocol=4)))
    model = Probed(lab, host, when_missing="never")
    lab.settle()
    right(model, steps=2)
    if "failed" not in words:
        assert state_of(model)["state"] == "ready"
        [reason] = [each["reason"] for each in model.report()["eager"]]
        assert words in reason
        assert ("; the next run compares it once more" in reason) == ("differs" in words)
        right(model, steps=2)
    assert said(log, words) >= 1
    if "otherwise" in words:  # of a call, not of the graph
        assert state_of(model)["state"] == "ready"
        return
    kind = state_of(model)
    assert kind["state"] == "failed" and words in kind["reason"]
    right(model, steps=2)
    assert said(log, f"{QUICK} runs at normal speed") == 1 + ("differs" in words)
    assert lab.counts(model.model)[1] == KINDS - 1


# --- names and folders -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["../../x", "C:\\x", "/etc/x", "a/b", "x" * 300, "..", "nul", "a\x00b", " "]
)
def test_a_graphs_name_that_is_no_plain_name_is_refused_in_words(
    host: Host, make_lab: MakeLab, name: str
) -> None:
    lab = make_lab(empty=True)
    model = host.load("narrowxl")[0]

    def tree() -> list[Path]:
        private = lab.root / "user" / "__warmgraph"
        return sorted(p for p in lab.root.rglob("*") if private not in p.parents)

    before = tree()
    with pytest.raises(GraphsNameError) as refusal:
        lab.engine.compile_model(model, graphs=name, when_missing="never")
    assert len(str(refusal.value)) < 400 and refusal.value.remedy
    loaded = lab.engine.load_graphs(model, name, strict=False)
    assert lab.engine.report(loaded)["regions"]["compiled"] == 0
    assert lab.engine.report(loaded)["notes"]
    assert tree() == before


def test_a_unicode_name_is_a_folder_like_any_other(host: Host, make_lab: MakeLab) -> None:
    lab = make_lab()
    model = Probed(lab, host, when_missing="never", graphs="Größe 図")
    right(model)
    lab.settle()
    folder = lab.workflows / "Größe 図.graphs"
    assert len(list(folder.glob(".*.safetensors"))) == KINDS
    assert list_folders(lab.workflows) == ["Größe 図"]


@pytest.mark.slow  # tests/unit/test_store_faults.py has what the store says
def test_a_store_that_cannot_be_written_keeps_new_graphs_in_memory(
    host: Host, make_lab: MakeLab, log: pytest.LogCaptureFixture
) -> None:
    """A file stands where the store's folder should be; all but one graph lie with the workflow."""
    lab = make_lab()
    (lab.workflows / "portrait.json").write_text("{}")
    lab.workflow = WorkflowRef("workflows/portrait.json", "default", "id-1")
    right(Probed(lab, host, when_missing="never"))
    lab.settle()
    folder = lab.workflows / "portrait.graphs"
    (folder / f".{file_of(lab).name}").unlink()
    lab.store.rename(lab.root / "elsewhere")
    lab.store.write_text("not a folder")
    lab = _restarted(lab)
    model = Probed(lab, host, when_missing="wait")
    right(model)
    lab.settle()
    assert lab.counts(model.model) == (1, KINDS - 1, 0)
    assert state_of(model)["bytes"] is None and state_of(model)["state"] == "ready"
    assert said(log, "is not kept on disk") == 1 and said(log, "make that folder writable") == 1
    assert lab.store.read_text() == "not a folder"
    assert len(list(folder.glob(".*.safetensors"))) == KINDS - 1


def test_a_private_folder_that_cannot_be_written_leaves_all_eager(
    host: Host, make_lab: MakeLab, log: pytest.LogCaptureFixture
) -> None:
    """Without a signing key no file can be trusted."""
    lab = make_lab()
    lab.settle()  # it has been tried whether the store can be written
    before = sorted(lab.store.iterdir())
    key = lab.root / "user" / "__warmgraph" / "signing.key"
    key.unlink()
    key.mkdir()
    lab = _restarted(lab)
    model = Probed(lab, host, when_missing="never")
    lab.settle()
    right(model)
    reasons = model.report()["eager"]
    assert len(reasons) == 1 and "the signing key" in reasons[0]["reason"]
    assert sorted(lab.store.iterdir()) == before


# --- builds that fail ------------------------------------------------------------------------


def test_without_a_compiler_the_model_is_eagers_and_says_what_is_missing(
    host: Host,
    make_lab: MakeLab,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    log: pytest.LogCaptureFixture,
) -> None:
    lab = make_lab()
    monkeypatch.setenv("PATH", str(tmp_path))
    model = Probed(lab, host)
    assert torch.equal(model.sample(), model.sample(model.plain))
    assert "no C++ compiler" in model.report()["notes"][0]
    assert said(log, "no C++ compiler") == 1


def test_a_build_that_fails_is_named_tried_once_more_and_then_left(
    host: Host,
    make_lab: MakeLab,
    monkeypatch: pytest.MonkeyPatch,
    log: pytest.LogCaptureFixture,
) -> None:
    """The worker's compiler breaks (CXX), so Inductor itself raises."""
    monkeypatch.setenv("CXX", "/no/such/compiler")
    lab = make_lab(without=(QUICK,))
    model = Probed(lab, host, when_missing="wait")
    right(model)
    reason = state_of(model)["reason"]
    assert state_of(model)["state"] == "failed"
    assert reason.startswith(f"compiling failed: Inductor failed on {QUICK}")
    assert lab.counts(model.model) == (0, KINDS - 1, model.report()["eager"][0]["places"])
    monkeypatch.setenv("CXX", "/no/such/compiler either")
    for _ in range(2):
        lab.compiled(model.plain)
        right(model)
    assert said(log, f"{QUICK} runs at normal speed: Inductor failed") == 2


def test_a_class_that_no_worker_can_import_is_named_and_the_rest_is_compiled(
    host: Host, make_lab: MakeLab, log: pytest.LogCaptureFixture
) -> None:
    class Local(torch.nn.Dropout):
        pass

    lab = make_lab()
    model = Probed(lab, host, when_missing="never")
    blocks = [m for m in model.unet.modules() if type(m).__name__ == "ResBlock"]
    blocks[0].out_layers[2] = Local(0.0)
    blocks[1].out_layers[2] = Importable(0.0)
    model.model = lab.compiled(model.probe.attach(model.plain))
    right(model)
    reasons = {entry["reason"]: entry["places"] for entry in model.report()["eager"]}
    assert any("Local is made at run time, so no worker can import it" in r for r in reasons)
    assert any("Importable cannot be imported" in r for r in reasons)
    assert sum(reasons.values()) == 2


class Importable(torch.nn.Dropout):
    """Importable here, but not where the worker runs: this folder is no package there."""


def test_a_worker_that_sees_other_host_code_refuses_and_names_it(
    host: Host, make_lab: MakeLab, log: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """One of a ComfyUI whose files were updated meanwhile would build another graph."""
    block = "Transformer block 64"
    lab = make_lab(without=(block,))
    hello = lab.hello
    tree = Path(hello["host"])
    shutil.copytree(tree / "comfy", tmp_path / "comfy", ignore=shutil.ignore_patterns("*.pyc"))
    for part in tree.iterdir():
        if part.name != "comfy":
            (tmp_path / part.name).symlink_to(part, target_is_directory=part.is_dir())
    module = tmp_path / "comfy" / "ldm" / "modules" / "attention.py"
    code, gate = module.read_text("utf-8"), "return x * F.gelu(gate)"
    assert gate in code
    module.write_text(code.replace(gate, "return F.gelu(gate) * x"), "utf-8")
    hello["host"] = str(tmp_path)
    model = Probed(lab, host, when_missing="wait")
    right(model)
    reason = state_of(model, block)["reason"]
    assert "the worker sees other host code for Transformer block 64" in reason
    assert "comfy.ldm.modules.attention:GEGLU" in reason


def _running_worker(lab: Lab) -> int:
    """The process of the worker that builds now."""
    builder = lab.engine._builder
    lab.wait_until(lambda: bool(builder.progress().running))
    process = next(thread._process for thread in builder._threads)
    assert process is not None
    return process.pid


@pytest.mark.slow  # tests/unit/builder kills workers that build nothing
def test_a_worker_killed_in_the_middle_costs_one_build_and_the_next_prompt_tries_again(
    host: Host, make_lab: MakeLab, log: pytest.LogCaptureFixture
) -> None:
    lab = make_lab(without=(QUICK,))
    model = Probed(lab, host, when_missing="background")
    os.kill(_running_worker(lab), getattr(signal, "SIGKILL", signal.SIGTERM))
    lab.wait_until(lambda: lab.is_settled(model.model))
    right(model)
    assert said(log, f'the worker that built "{QUICK}" died') >= 1
    model.model = lab.compiled(model.probe.attach(model.plain))
    model.check()
    assert lab.builds() == 1


# --- people ----------------------------------------------------------------------------------


class _InterruptError(Exception):
    pass


@pytest.mark.slow  # test_background.py cancels a wait, too
def test_cancel_stops_the_wait_at_once_and_the_builds_go_on_without_the_model(
    host: Host, make_lab: MakeLab, log: pytest.LogCaptureFixture
) -> None:
    lab = make_lab(without=(QUICK,))
    pressed = threading.Event()
    told: list[float] = []

    def cancelled() -> None:
        if pressed.is_set():
            told.append(time.monotonic())
            raise _InterruptError

    lab.cancelled = cancelled
    model: Any = host.load("narrowxl")[0]
    timer = threading.Timer(0.0, lambda: (_running_worker(lab), pressed.set()))
    timer.start()
    with pytest.raises(_InterruptError):
        lab.compiled(model)
    assert time.monotonic() - told[0] < 1.0
    del model  # the user loads another model while the worker is at it
    host.unload()
    gc.collect()
    assert lab.engine.overview.snapshot()["models"] == []
    lab.cancelled = lambda: None
    lab.wait_until(lambda: lab.builds() == 1)
    lab.settle()
    assert file_of(lab).is_file()
    after = Probed(lab, host)
    after.check()
    assert lab.jobs() == 1
    assert warnings(log) == []


@pytest.mark.slow  # tests/unit/test_store.py lets two processes put the same graph at once
def test_two_servers_that_share_a_user_directory_build_the_same_at_once(
    host: Host, make_lab: MakeLab, log: pytest.LogCaptureFixture
) -> None:
    lab = make_lab(without=(QUICK,))
    other = Lab(lab.root)
    try:
        both = [Probed(each, host, when_missing="background") for each in (lab, other)]
        for each in both:
            right(each)
        for each in both:
            each.lab.wait_until(lambda each=each: each.lab.is_settled(each.model))
            each.check()
        assert (lab.builds(), other.builds()) in [(1, 1), (1, 0), (0, 1)]
        _parts(lab, file_of(lab))  # whole and signed
    finally:
        other.engine.close()
    assert not [line for line in warnings(log) if "normal speed: it is being" not in line]


def test_a_model_unloaded_between_runs_needs_no_new_graph(host: Host, make_lab: MakeLab) -> None:
    lab = make_lab()
    model = Probed(lab, host, when_missing="never")
    lab.settle()
    image = right(model)
    host.unload()
    assert relative(right(model), image) <= TOLERANCE
    model.check()
