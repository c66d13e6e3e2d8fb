"""`cli.py doctor` on machines that lack something: what to do is said in a line each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from warmgraph_backends.compilers.preflight import install_command
from warmgraph_backends.contract import Requirement
from warmgraph_backends.storing.canonical_json import sha256_hex
from warmgraph_backends.storing.graph_file import compress_payload
from warmgraph_backends.storing.signing import Signer
from warmgraph_backends.storing.store import Store
from warmgraph_console import asked, nameless
from warmgraph_console import doctor as report
from warmgraph_console.embedded import headers

from . import saved

CLI = Path(__file__).resolve().parents[2] / "cli.py"
CPP = Requirement("C++ compiler", False)


def doctor(
    base: Path, *arguments: str, **environment: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, tuple[bool, str]]]:
    """Run it; returns also {name: (ok, text)}."""
    (base / "user").mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(CLI), "doctor", "--base-directory", str(base), *arguments]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "TMPDIR": str(base), **environment},
    )
    assert "Traceback" not in done.stdout + done.stderr
    found = {}
    for line in done.stdout.splitlines()[:-1]:
        name, _, text = line[7:].partition(": ")
        assert line[:7] in ("ok     ", "TO DO  "), line
        found[name] = (line.startswith("ok"), text)
    return done, found


def python_without(folder: Path, text: str) -> dict[str, str]:
    """The environment of a Python that runs this text at its start."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(text, "utf-8")
    return {"PYTHONPATH": str(folder)}


def embedded(folder: Path, *files: str) -> Path:
    """A tree as ComfyUI's portable version for Windows has it. Made up: nothing of this was tried
    on Windows.
    """
    for name in ("python.exe", "python312._pth", "Lib/site-packages/torch.py", *files):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


@pytest.mark.parametrize(
    ("files", "lacking"),
    [
        ((), "Include and libs"),
        (("include/Python.h",), "libs"),
        (("libs/python312.lib",), "Include"),
        (("Include/Python.h", "libs/python311.lib"), "libs"),  # another Python's
        (("Include/cpython/pystate.h", "libs/python312.lib"), "Include"),
    ],
)
def test_an_embedded_python_without_headers_is_told_what_to_copy_where(
    tmp_path: Path, files: tuple[str, ...], lacking: str
) -> None:
    folder = embedded(tmp_path / "python_embeded", *files)
    (line,) = headers(folder, "3.12.7")
    assert (line.name, line.ok) == ("Python's headers", False)
    assert line.text.startswith(f"{folder} has no {lacking} (this is an embedded Python), ")
    assert "copy the folders include and libs of an installed Python 3.12 there" in line.text


def test_an_embedded_python_with_headers_is_well_and_an_installed_one_is_not_asked(
    tmp_path: Path,
) -> None:
    whole = ("include/Python.h", "Libs/python312.lib")  # Windows does not tell them apart
    (line,) = headers(embedded(tmp_path / "python_embeded", *whole), "3.12.7")
    assert line.ok
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "python.exe").touch()
    assert list(headers(tmp_path / "installed", "3.12.7")) == []
    assert list(headers(tmp_path / "not there", "3.12.7")) == []


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tmp_path / "base"


def test_no_compiler_foreign_files_and_half_a_host_are_named_with_what_to_do(
    base: Path, tmp_path: Path
) -> None:
    private = tmp_path / "other"
    other = Store(
        base / "models" / "compiled_graphs",
        Signer(private),
        cap_bytes=lambda: 1 << 30,
        private=private,
    )
    other.put(saved.manifest(sha256_hex("a graph")), compress_payload(b"a graph"))
    (base / "user").mkdir()
    assert Signer(base / "user" / "__warmgraph").fingerprint
    (base / "comfy").mkdir()
    (base / "comfy" / "options.py").write_text("raise RuntimeError('half an update')\n", "utf-8")
    (tmp_path / "empty").mkdir()
    without = python_without(tmp_path / "site", "import sys\nsys.modules['triton'] = None\n")
    without["PATH"] = str(tmp_path / "empty")
    done, found = doctor(base, "--device", "cpu", "--comfyui", str(base), **without)
    assert done.returncode == 1
    compiler = "cl" if sys.platform == "win32" else "g++"
    ok, text = found["C++ compiler"]
    assert not ok and text.startswith(f"no C++ compiler ({compiler}) on the path; install ")
    assert text.endswith(install_command(CPP))
    assert "a small compiled graph" not in found
    ok, text = found["files of the store"]
    assert not ok
    assert text.startswith("this machine did not sign 1 of them, and never loads those; ")
    assert text.endswith(str(base / "models" / "compiled_graphs"))
    ok, text = found["ComfyUI"]
    assert not ok
    assert "RuntimeError: half an update (exit status 1); start ComfyUI itself" in text
    assert found["Triton"] == (True, "none; only GPUs need it")
    assert found["signing key"][0]
    assert done.stdout.splitlines()[-1] == "3 things to do"


def test_a_gpu_without_triton_is_told_what_to_install(base: Path, tmp_path: Path) -> None:
    without = python_without(tmp_path / "site", "import sys\nsys.modules['triton'] = None\n")
    done, found = doctor(base, "--device", "cuda", **without)
    assert done.returncode == 1
    assert found["Triton"] == (
        False,
        "Triton is not installed; on Windows install triton-windows, on Linux reinstall torch: "
        + install_command(Requirement("Triton", False)),
    )
    assert found["torch"][0]


def test_a_triton_that_cannot_be_imported_is_not_taken_for_a_good_one(
    base: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "site" / "triton"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('libtriton.so: \\x1b[2J')\n", "utf-8")
    done, found = doctor(base, "--device", "cuda", PYTHONPATH=str(broken.parent))
    ok, text = found["Triton"]
    assert not ok
    assert text.startswith(
        r"Triton is installed but cannot be imported (ImportError: libtriton.so: \x1b[2J); "
    )
    assert "\x1b" not in done.stdout


def test_a_python_without_torch_is_told_which_one_to_use(base: Path, tmp_path: Path) -> None:
    without = python_without(tmp_path / "site", "import sys\nsys.modules['torch'] = None\n")
    done, found = doctor(base, **without)
    assert done.returncode == 1
    ok, text = found["PyTorch"]
    assert not ok
    assert text.endswith("run this with the Python that runs ComfyUI")
    assert found["signing key"][0]  # the rest is looked at all the same


def test_a_torch_that_ends_the_process_is_told_with_its_last_words(
    base: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "site" / "torch"
    folder.mkdir(parents=True)
    dies = "import os, sys\nprint('bad driver', file=sys.stderr, flush=True)\nos._exit(7)\n"
    (folder / "__init__.py").write_text(dies, "utf-8")
    done, found = doctor(base, PYTHONPATH=str(folder.parent))
    assert done.returncode == 1
    assert "bad driver (exit status 7)" in found["PyTorch"][1]


def test_each_card_of_a_machine_has_its_lines(tmp_path: Path) -> None:
    def facts(*cards: tuple[str, int, int]) -> dict[str, Any]:
        rows = [
            {"name": n, "total": t << 30, "free": f << 30, "capability": "c", "attention": []}
            for n, t, f in cards
        ]
        met = {"requirements": [], "doubts": [], "built": ("", 1.0)}
        return {"torch": "2", "device": "cuda", "driver": True, "gpus": rows, **met}

    def lines(*cards: tuple[str, int, int]) -> list[tuple[str, bool, str]]:
        told = facts(*cards)
        found = [*report._torch(told, None), *report._vram(tmp_path, told["gpus"])]
        return [
            (each.name, each.ok, each.text)
            for each in found
            if each.name != "a small compiled graph"
        ]

    (one, vram) = lines(("RTX 4090", 24, 20))
    assert one == ("GPU", True, "RTX 4090, 24.0 GiB, c")
    assert vram[:2] == ("VRAM", True) and vram[2].endswith("20.0 GiB are free now")
    names = [line[:2] for line in lines(("RTX 4090", 24, 20), ("RTX 3060", 12, 0))]
    assert names == [("GPU 0", True), ("GPU 1", True), ("VRAM 0", True), ("VRAM 1", True)]
    (*_, full, _) = lines(("RTX 3060", 12, 0), ("RTX 4090", 24, 20))
    assert full[:2] == ("VRAM 0", False) and "end what else uses the card" in full[2]
    told = facts(("RTX 4090", 24, 20), ("RTX 3060", 12, 0))
    told["gpus"][1] = {"name": "RTX 3060", "problem": "CUDA error: out of memory"}
    _, broken, _ = report._torch(told, None)
    assert broken.name == "GPU 1" and broken.ok and "out of memory" in broken.text
    assert [line.name for line in report._vram(tmp_path, told["gpus"])] == ["VRAM 0"]
    told = facts(("RTX 4090", 24, 20))
    told["gpus"][0]["attention"] = ["cuDNN", "FlashAttention 3 is not installed"]
    found = [line.text for line in report._torch(told, None) if line.name == "attention"]
    assert found == ["cuDNN", "FlashAttention 3 is not installed"]
    assert lines()[0][:2] == ("GPU", False), "a driver, and a PyTorch that cannot use it"


def test_a_graph_is_built_in_one_process_and_run_in_another_and_what_is_said_is_saved(
    base: Path, tmp_path: Path
) -> None:
    """With the same commands as on a card, whose part is a CUDA graph."""
    saved_text = tmp_path / "said.txt"
    done, found = doctor(base, "--device", "cpu", "--save", str(saved_text))
    assert found["a small compiled graph"][0], done.stdout
    ok, text = found["the same one in a new process"]
    assert ok and text.endswith("with the right results; no card was tried"), text
    said = saved_text.read_text("utf-8").splitlines()
    assert [line[7:].partition(": ")[0] for line in said][:2] == ["Warmgraph", "Python"]
    assert {"a small compiled graph", "GPU"} <= {line[7:].partition(": ")[0] for line in said}
    for name in ("store", "signing key", "leftovers"):  # of a user, and not of the machine
        assert name in found and not any(name in line for line in said)
    for name in (str(CLI.parent), str(Path.home()), str(tmp_path), sys.prefix):
        assert name not in saved_text.read_text("utf-8")


def test_a_graph_that_is_damaged_on_its_way_is_not_well(tmp_path: Path) -> None:
    graph = tmp_path / "graph"
    graph.write_bytes(b"not a graph")
    facts, died = asked.ask("graph", "cpu", str(graph), limit_s=300.0)
    line = report._replayed({"device": "cpu"}, facts, died)
    assert not line.ok and "loading failed with torch" in line.text
    line = report._replayed({"device": "cuda"}, {}, "bad driver (exit status 7)")
    assert not line.ok and "it ended the process: bad driver (exit status 7)" in line.text


def test_a_triton_of_another_version_is_told_and_tried_all_the_same() -> None:
    doubt = ("Triton", "Triton 3.8 is installed, and this PyTorch was made with 3.6", "install it")
    facts = {"torch": "2", "device": "cuda", "driver": True, "gpus": [], "requirements": []}
    lines = [*report._torch({**facts, "doubts": [doubt], "built": ("", 2.0)}, None)]
    told = {line.name: line for line in lines}
    assert not told["Triton"].ok and told["Triton"].text == f"{doubt[1]}; {doubt[2]}"
    assert told["a small compiled graph"].ok
    assert "C++ compiler" not in told
    cpp = {**facts, "doubts": [], "built": ("", 2.0), "cpp": "no C++ compiler (cl) on the path"}
    (line,) = (each for each in report._torch(cpp, None) if each.name == "C++ compiler")
    assert line.ok and line.text == f"{cpp['cpp']}; only processors need it"


NAMES = {
    r"C:\Users\Zoë Müller": "<home>",
    r"C:\Users\ZOMLLE~1\AppData\Local\Temp": "<temporary>",
    "/home/zoe": "<home>",
    "Zoë Müller": "<user>",
    "zoe": "<user>",
    "ATTIC-PC": "<computer>",
}


@pytest.mark.parametrize(
    ("said", "sent"),
    [
        (r"found in C:\Users\Zoë Müller\comfy; copy", r"found in <home>\comfy; copy"),
        (r"c:/users/zoë müller/comfy", "<home>/comfy"),
        (r"'C:\\Users\\Zoë Müller\\x.py'", r"'<home>\\x.py'"),
        (r"C:\Users\ZOMLLE~1\AppData\Local\Temp\a.c: no", r"<temporary>\a.c: no"),
        (r"D:\Secret Project\deep\python.exe -m pip", "<a folder>/python.exe -m pip"),
        (r"a share: \\attic-pc\films\x.bin", "a share: <a folder>/x.bin"),
        ("/home/zoe/.cache/x and /srv/private/models/a.b", "<home>/.cache/x and <a folder>/a.b"),
        ("/usr/bin/gcc", "<a folder>/gcc"),
        ("ask zoe on attic-pc, zoeology", "ask <user> on <computer>, zoeology"),
        ("see https://github.com/woct0rdho/triton-windows", None),
        ("compiled, packed and/or run in 3.2 s; 1/2", None),
        ("NVIDIA GeForce RTX 4090, 24.0 GiB, compute capability 8.9", None),
    ],
)
def test_names_of_people_computers_and_folders_are_not_sent(said: str, sent: str | None) -> None:
    assert nameless.text(said, NAMES) == (said if sent is None else sent)
