"""The archive that the Comfy Registry hands to users: what is in it, that it follows the published
rules, and that a real server needs nothing else.

https://docs.comfy.org/registry/specifications
"""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from warmgraph_tools.host import Server
from warmgraph_tools.inprocess import Host
from warmgraph_tools.install import PACK_NAME, prepare_base

from .published import NODES

ROOT = Path(__file__).resolve().parents[2]
MAX_ARCHIVE_BYTES = 1_300_000
MAX_FILE_BYTES = 200_000
#: Folders whose every file a user needs.
WHOLE = ("backends", "console", "locales", "nodes", "web", "workflows")
#: Top-level names that are only for those who work on the pack.
NOT_SHIPPED = {"tests", "dev", ".ci", ".gitignore", ".comfyignore"}


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", "ls-files", "-z", *arguments], cwd=ROOT, capture_output=True)
    if done.returncode != 0:
        pytest.skip("the archive is made of what git tracks, and this is no checkout")
    return [name for name in done.stdout.decode().split("\0") if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def names() -> list[str]:
    """The files of the archive: what is tracked, less what `.comfyignore` leaves out as a
    `.gitignore` would."""
    ignored = set(_git("--cached", "--ignored", "--exclude-from=.comfyignore"))
    return [name for name in _git() if name not in ignored]


@pytest.fixture(scope="module")
def archive(names: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("archive") / "node.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name in names:
            file.write(ROOT / name, name)
    return path


@pytest.fixture(scope="module")
def unpacked(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "custom_nodes" / PACK_NAME
    with zipfile.ZipFile(archive) as file:
        file.extractall(folder)
    return folder


def test_only_what_users_need_is_in_it(names: list[str]) -> None:
    assert {PurePosixPath(name).parts[0] for name in names}.isdisjoint(NOT_SHIPPED)
    assert not [name for name in names if PurePosixPath(name).name.startswith("test_")]
    for needed in ("__init__.py", "pyproject.toml", "README.md", "LICENSE", "cli.py"):
        assert needed in names


def test_whole_folders_are_in_it(names: list[str]) -> None:
    tracked = _git(*WHOLE)
    assert {name.partition("/")[0] for name in tracked} >= set(WHOLE) - {"locales"}
    assert set(tracked) <= set(names)


def test_it_is_small(names: list[str], archive: Path) -> None:
    large = {
        name: size for name in names if (size := (ROOT / name).stat().st_size) > MAX_FILE_BYTES
    }
    assert not large
    assert archive.stat().st_size < MAX_ARCHIVE_BYTES


def test_the_registrys_security_check_finds_nothing(unpacked: Path) -> None:
    """The rules that `comfy node validate` runs: no exec, no eval, one statement a line."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "S102,S307,E702"]
    done = subprocess.run([*command, str(unpacked)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def config(host: Host, unpacked: Path) -> Any:
    """`pyproject.toml` as the host itself reads it."""
    from comfy_config.config_parser import extract_node_configuration

    return extract_node_configuration(str(unpacked))


def test_the_name_is_one_that_the_registry_takes(config: Any) -> None:
    name = config.project.name
    assert name == PACK_NAME and len(name) < 100
    assert re.fullmatch(r"[a-z](?:[._-]?[a-z0-9])*", name, re.IGNORECASE)
    assert "comfyui" not in name.lower()


def test_the_project_follows_the_published_rules(config: Any, unpacked: Path) -> None:
    project = config.project
    assert re.fullmatch(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)", project.version)
    assert 20 < len(project.description) < 200
    assert (unpacked / project.license.file).read_text("utf-8").lstrip().startswith("GNU GENERAL")
    assert SpecifierSet(project.requires_python).contains("3.10")
    assert project.dependencies == [], "nothing else is installed"
    # One that is not on the registry's lists empties the host's list.
    assert project.supported_os == ["OS Independent"]
    assert project.supported_accelerators == ["GPU :: NVIDIA CUDA"]
    assert SpecifierSet(project.supported_comfyui_version).contains("0.30.0")


def test_what_the_owner_fills_in_is_empty_or_right(config: Any) -> None:
    comfy, url = config.tool_comfy, config.project.urls.repository
    assert comfy.display_name == "Warmgraph"
    assert comfy.includes == [], "what is ignored stays out"
    assert re.fullmatch(r"([a-z0-9][a-z0-9-]*)?", comfy.publisher_id)
    assert re.fullmatch(r"(https://\S+\.(svg|png|jpg|gif))?", comfy.icon)
    assert re.fullmatch(r"(https://github\.com/[^/\s]+/[^/\s]+)?", url)


@pytest.fixture(scope="module")
def server(
    start_server: Callable[..., Server], host_tree: Path, unpacked: Path
) -> Iterator[Server]:
    """A real server that has the archive and nothing else of this checkout."""
    base = prepare_base(unpacked.parents[1], host_tree, pack=False, narrow=False)
    server = start_server(base, pack=False, narrow=False)
    yield server
    server.stop()


def test_a_server_loads_the_pack_from_the_archive_alone(server: Server, names: list[str]) -> None:
    found = server.object_info()
    ours = {name for name, node in found.items() if node["category"] == "Warmgraph"}
    assert ours == set(NODES)
    assert "Traceback" not in server.log
    assert set(server.get("/warmgraph/report")) >= {"models", "building", "settings"}


def test_a_server_serves_all_scripts_workflows_and_languages(
    server: Server, names: list[str]
) -> None:
    served = set(server.get("/extensions"))
    scripts = {n.removeprefix("web/") for n in names if re.fullmatch(r"web/.*\.js", n)}
    assert {f"/extensions/{PACK_NAME}/{script}" for script in scripts} <= served
    workflows = {Path(n).stem for n in names if re.fullmatch(r"workflows/[^/]+\.json", n)}
    assert set(server.get("/workflow_templates")[PACK_NAME]) == workflows
    languages = {n.split("/")[1] for n in names if n.startswith("locales/")}
    assert languages <= set(server.get("/i18n"))
