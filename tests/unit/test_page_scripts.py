"""The page's scripts as files: their tests run by Node, their size, and what they must not do."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "web" / "js").glob("*.js"))
NODE_PACK = ROOT / "web" / "js" / "node_pack.js"
TESTS = sorted((ROOT / "tests" / "page").glob("*.test.mjs"))
ENGLISH = json.loads((ROOT / "locales" / "en" / "main.json").read_text("utf-8"))["warmgraph"]

#: Of all scripts, comments left out.
MAX_BYTES = 90_000
MAX_LINES = 200
NODE_FROM = 18  # its first with a test runner

_COMMENTS = re.compile(r"/\*.*?\*/|(?<![:\"'`])//[^\n]*", re.DOTALL)
_NAMED = re.compile(r"""words\(\s*["'](page\.\w+)["']""")


def _code(script: Path) -> str:
    return _COMMENTS.sub("", script.read_text("utf-8"))


def _node() -> str:
    program = shutil.which("node")
    if program is None:
        pytest.skip("no Node: the tests of the page's scripts need one")
    asked = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    if int(asked.stdout.removeprefix("v").split(".")[0]) < NODE_FROM:
        pytest.skip(f"Node must be {NODE_FROM} or newer, got {asked.stdout.strip()}")
    return program


def test_the_scripts_own_tests_pass(tmp_path: Path) -> None:
    """They run on a copy with a package file, or Node takes the scripts for CommonJS."""
    node = _node()
    (tmp_path / "package.json").write_text('{"type": "module"}', "utf-8")
    shutil.copytree(ROOT / "web" / "js", tmp_path / "web" / "js")
    shutil.copytree(ROOT / "tests" / "page", tmp_path / "tests" / "page")
    files = [str(tmp_path / file.relative_to(ROOT)) for file in TESTS]
    done = subprocess.run([node, "--test", *files], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    counted = re.search(r"^# pass (\d+)", done.stdout, re.MULTILINE) or re.search(
        r"pass (\d+)", done.stdout
    )
    written = sum(len(re.findall(r"^test\(", file.read_text("utf-8"), re.M)) for file in TESTS)
    assert counted is not None and int(counted[1]) >= written > 0, done.stdout[-2000:]


def test_scripts_are_small_together_and_each_by_itself() -> None:
    assert sum(len(_code(script).encode()) for script in SCRIPTS) < MAX_BYTES
    lines = {script.name: script.read_text("utf-8").count("\n") for script in SCRIPTS}
    assert {name: count for name, count in lines.items() if count >= MAX_LINES} == {}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_makes_no_markup_of_texts_and_fetches_from_this_server_alone(script: Path) -> None:
    code = _code(script)
    for what in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", ".prototype"):
        assert what not in code, what
    for what in ("eval(", "new Function", "https:", "setInterval"):
        assert what not in code, what


def test_every_name_that_scripts_share_is_there_and_used() -> None:
    """A browser loads no script that imports what is not exported, and says so in its console."""
    given = re.compile(r"^export (?:async )?(?:function|const|let|class) (\w+)", re.MULTILINE)
    taken = re.compile(r'import \{([^}]*)\} from "\./([\w.]+)"')
    exports = {(s.name, name) for s in SCRIPTS for name in given.findall(s.read_text("utf-8"))}
    browser = (ROOT / "tests" / "browser").glob("*.py")
    tests = [file.read_text("utf-8") for file in (*TESTS, *browser)]
    imports = {
        (source, name.strip())
        for script in SCRIPTS
        for names, source in taken.findall(script.read_text("utf-8"))
        for name in names.split(",")
        if name.strip()
    }
    assert imports <= exports
    unused = {name for source, name in exports - imports}
    assert {n for n in unused if not any(re.search(rf"\b{n}\b", text) for text in tests)} == set()


def test_each_extension_has_a_name_of_its_own() -> None:
    names = [
        name
        for script in SCRIPTS
        for name in re.findall(r'registerExtension\(\{\s*name: "([^"]+)"', _code(script))
    ]
    assert len(names) == sum(_code(script).count("registerExtension(") for script in SCRIPTS)
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"Warmgraph\.[A-Z]\w+\.[A-Z]\w+", name) for name in names), names


def test_every_word_that_a_script_names_is_there_in_english() -> None:
    named = {key for script in SCRIPTS for key in _NAMED.findall(_code(script))}
    assert len(named) > 20
    assert {key for key in named if key.removeprefix("page.") not in ENGLISH["page"]} == set()


def test_every_english_word_of_the_page_is_used() -> None:
    """Also those whose key is put together: the part before the last underscore is in a script."""
    code = "\n".join(_code(script) for script in SCRIPTS)
    for key in ENGLISH["page"]:
        whole = re.search(rf"\b{key}\b", code)
        made = any(
            f"page.{key[:cut]}${{" in code or f"page.{key[:cut]}_${{" in code
            for cut in range(1, len(key))
        )
        assert whole or made, key


def test_no_script_holds_english_of_its_own() -> None:
    """Texts of two words and more are names, paths or words of the host's, never a sentence."""
    for script in SCRIPTS:
        for text in re.findall(r'"([A-Za-z][^"\n]*[a-z] [a-z][^"\n]*)"', _code(script)):
            assert re.fullmatch(r"[a-z0-9-]+( [a-z0-9-]+)*", text), f"{script.name}: {text!r}"


def test_nodes_name_the_version_that_the_pack_has() -> None:
    pack = re.search(r'PACK = \{ cnr_id: "(\w+)", ver: "([^"]+)" \}', _code(NODE_PACK))
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    assert pack is not None
    for key, value in zip(("name", "version"), pack.groups(), strict=True):
        assert f'{key} = "{value}"' in project


def test_what_is_taken_of_the_hosts_page_is_named_in_one_script() -> None:
    """Classes and attributes that are not ours: in the stylesheet, and in scripts' queries."""
    foreign = re.compile(r"\.(?!warmgraph-)[a-z][\w-]*[a-z]|\[(?:data-testid|data-node-id)[^\]]*\]")
    frontend = (ROOT / "web" / "js" / "frontend.js").read_text("utf-8")
    style = _COMMENTS.sub("", (ROOT / "web" / "warmgraph.css").read_text("utf-8"))
    selectors = re.findall(r"[^{};]+(?=\{)", style)
    queries = [
        query
        for script in SCRIPTS
        if script.name != "frontend.js"
        for query in re.findall(r"(?:querySelector(?:All)?|closest)\(\s*([^)]*)\)", _code(script))
    ]
    named = {name for text in (*selectors, *queries) for name in foreign.findall(text)}
    assert '[data-testid="error-overlay"]' in named  # it finds some
    assert {name for name in named if name not in frontend} == set()
