"""Whatever is wrong with a graph or its file: the image is right and a line says why."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from warmgraph_backends.engine import WorkflowRef
from warmgraph_backends.storing.canonical_json import canonical_json, sha256_hex
from warmgraph_backends.storing.graph_file import compress_payload, encode
from warmgraph_backends.storing.manifest import FORMAT
from warmgraph_backends.storing.signing import Signer
from warmgraph_tools.inprocess import Host

from .lab import TOLERANCE, Lab
from .mishaps import KINDS, QUICK, MakeLab, file_of, parts_of, restarted, right, said, state_of
from .probed import Probed
from .rows import some_rows

pytestmark = pytest.mark.usefixtures("log")


# --- graph files ----------------------------------------------------------------------------------


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
    manifest, payload = parts_of(lab, path)
    data = encode(manifest, compress_payload(payload), lab.signer)
    header = data.replace(b'"signature":"', b'"signature":"', 1)
    start = header.index(b'"signature":"') + len(b'"signature":"')
    anonymous = bytearray(header)
    anonymous[start : start + 64] = b"0" * 64
    fingerprint = lab.signer.fingerprint.encode()
    path.write_bytes(bytes(anonymous).replace(fingerprint, b"00000000"))


def _sign_elsewhere(lab: Lab, path: Path) -> None:
    manifest, payload = parts_of(lab, path)
    signer = Signer(lab.root / "another machine")
    path.write_bytes(encode(manifest, compress_payload(payload), signer))


def _older_format(lab: Lab, path: Path) -> None:
    """A file that an older version of this pack signed here."""
    manifest, payload = parts_of(lab, path)
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
        manifest, payload = parts_of(lab, path)
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
    "a bit of the manifest flipped": (_flip(400), "compiled graph ", False),
    "empty": (_empty, "is damaged", False),
    "something else": (_text, "is damaged", False),
    "a folder": (_folder, "cannot be read", True),
    "unsigned": (_unsign, "cli.py trust ", True),
    "signed with another key": (_sign_elsewhere, "cli.py trust ", True),
    "from an older version": (_older_format, "has format 0, this version reads 1", True),
    "under another's name": (_rename, "is not what its name says", True),
    "half-written": (_half_written, "no compiled graph", False),
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
    manifest, _ = parts_of(lab, path)
    evil = encode(manifest, compress_payload(_command(mark)), Signer(lab.root / "elsewhere"))
    with linked.open("r+b") as file:  # as the route does it: the same inode
        file.truncate()
        file.write(evil)
    assert path.read_bytes() == evil

    lab = restarted(lab)
    model = Probed(lab, host, when_missing="wait")
    right(model)
    lab.settle()
    assert lab.counts(model.model) == (1, KINDS - 1, 0)
    assert said(log, "was signed with another key") == 1 and said(log, "cli.py trust") == 1
    assert not mark.exists()
    assert path.read_bytes() == linked.read_bytes() == evil  # may be trusted later

    lab = restarted(lab)
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
    manifest, _ = parts_of(lab, file_of(lab))
    lab.engine._store.put(manifest, compress_payload(_command(mark)))
    model = Probed(lab, host, when_missing="never")
    lab.settle()
    right(model)
    assert "which no compiled graph needs" in state_of(model)["reason"]
    assert not mark.exists()


# --- graphs that are wrong ------------------------------------------------------------------------


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
    "an error": ("raise RuntimeError('no such kernel')", "failed at run time: RuntimeError: no"),
}


def _spoil(lab: Lab, body: str) -> None:
    """Sign a graph file of the quick kind whose `call(args)` has this body, and `_right`."""
    manifest, payload = parts_of(lab, file_of(lab))
    parts = pickle.loads(payload)
    parts["source"] += f"\n_right = call\ndef call(args):\n{body}"
    lab.engine._store.put(manifest, compress_payload(pickle.dumps(parts, protocol=4)))


@pytest.mark.parametrize("wrong", some_rows(_WRONG, ("other values", "another dtype", "an error")))
def test_a_graph_that_is_wrong_is_not_used(
    host: Host, make_lab: MakeLab, log: pytest.LogCaptureFixture, wrong: str
) -> None:
    """A graph file as this machine's own worker might have made it, signed with its key.

    One that differs is compared once more in the next run; what fails is dropped at once.
    """
    lab = make_lab()
    line, words = _WRONG[wrong]
    _spoil(lab, f"    out = _right(args)\n    {line}\n")
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
    if "failed" in words:
        assert kind["state"] == "failed" and words in kind["reason"]
    else:  # of these weights, not of the graph
        assert kind["state"] == "ready"
        [reason] = [each["reason"] for each in model.report()["eager"]]
        assert reason.startswith(words) and "once more" not in reason
    right(model, steps=2)
    assert said(log, f"{QUICK} runs at normal speed") == 1 + ("differs" in words)
    assert lab.counts(model.model)[1] == KINDS - ("failed" in words)


#: A graph that is wrong for weights which overflow: those that are above this bound.
_LARGE = 50.0
_WRONG_WHEN_LARGE = f"""    large = any(each.abs().max() > {_LARGE} for each in args)
    out = _right(args)
    return (out[0] * 1.5,) if large else out
"""


def _with_large_weights(lab: Lab, host: Host, seed: int = 1) -> Probed:
    """A model whose weights in all places of the quick kind are beyond what the graph bears."""
    model = Probed(lab, host, seed=seed, when_missing="never")
    for name, part in model.unet.named_modules():
        if name.endswith(".proj_in"):
            part.bias.data[0] = 2 * _LARGE
    lab.settle()
    return model


def _reasons(model: Probed) -> list[str]:
    return [each["reason"] for each in model.report()["eager"]]


def test_a_bad_model_leaves_the_graph_to_sound_ones(
    host: Host, make_lab: MakeLab, log: pytest.LogCaptureFixture
) -> None:
    lab = make_lab()
    _spoil(lab, _WRONG_WHEN_LARGE)
    bad = _with_large_weights(lab, host)
    for _ in range(3):
        right(bad, steps=2)
    [reason] = _reasons(bad)
    assert reason.startswith("differs from ComfyUI's result") and "once more" not in reason
    sound = Probed(lab, host, seed=0, when_missing="never")
    sound.check(steps=2)
    again = _with_large_weights(lab, host, seed=2)
    for _ in range(2):
        right(again, steps=2)
    assert _reasons(again) == [reason]
    sound.check(steps=2)
    assert state_of(sound)["state"] == "ready"  # others failed, but one was right


def test_a_bad_model_after_a_sound_one_is_found_out(
    host: Host, make_lab: MakeLab, log: pytest.LogCaptureFixture
) -> None:
    lab = make_lab()
    _spoil(lab, _WRONG_WHEN_LARGE)
    sound = Probed(lab, host, seed=0, when_missing="never")
    lab.settle()
    sound.check(steps=2)
    bad = _with_large_weights(lab, host)
    for _ in range(2):
        right(bad, steps=2)
    assert len(_reasons(bad)) == 1
    sound.check(steps=2)


def test_a_graph_that_is_wrong_with_several_models_is_dropped(
    host: Host, make_lab: MakeLab, log: pytest.LogCaptureFixture
) -> None:
    lab = make_lab()
    _spoil(lab, "    return (_right(args)[0] * 1.5,)\n")
    for seed in (0, 0, 1):  # the same weights once more, loaded anew, are no other ones
        model = Probed(lab, host, seed=seed, when_missing="never")
        lab.settle()
        assert state_of(model)["state"] == "ready"
        for _ in range(2):
            right(model, steps=2)
    assert state_of(model)["state"] == "failed"


def test_other_patches_are_other_weights(
    host: Host, make_lab: MakeLab, log: pytest.LogCaptureFixture
) -> None:
    lab = make_lab()
    _spoil(lab, _WRONG_WHEN_LARGE)
    model = Probed(lab, host, seed=0, when_missing="never")
    lab.settle()
    name = next(n for n, _ in model.unet.named_parameters() if n.endswith(".proj_in.bias"))
    change = torch.full_like(model.unet.get_parameter(name), 2 * _LARGE)
    patched = model.model.clone()
    patched.add_patches({f"diffusion_model.{name}": ("diff", (change,))})
    for _ in range(2):
        model.sample(patched, steps=2)
        assert max(call.error for call in model.probe.calls) <= TOLERANCE
    assert len(lab.engine.report(patched)["eager"]) == 1
    model.check(steps=2)
