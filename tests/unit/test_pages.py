"""The pages say what the code says: every reason is explained, every link leads somewhere, and the
words of the inside stay there.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from warmgraph_backends import reasons
from warmgraph_backends.compilers import preflight
from warmgraph_backends.compilers.registry import resolve_backend
from warmgraph_backends.contract import Requirement
from warmgraph_backends.cuda_graphs.signatures import CaptureError, read_call
from warmgraph_backends.errors import WarmgraphError
from warmgraph_backends.families.catalogue import plan_model
from warmgraph_backends.sessions.lines import ENGLISH
from warmgraph_backends.sessions.settings import SETTINGS
from warmgraph_backends.storing.folders import validate_graphs_name
from warmgraph_backends.storing.graph_file import read_graph
from warmgraph_backends.storing.signing import Signer

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TROUBLESHOOTING = DOCS / "troubleshooting.md"
#: What stands for a part of a text that differs from case to case.
HOLE = "…"
HEAD = "| texts | what it means | what to do |"


def _rows() -> list[tuple[list[str], str, str]]:
    """The rows of the tables of reasons: the texts of each, what they mean, what to do."""
    rows, within = [], False
    for line in TROUBLESHOOTING.read_text("utf-8").splitlines():
        within = line == HEAD or (within and line.startswith("|"))
        if within and line != HEAD and not line.startswith("|---"):
            first, meaning, remedy = line.strip("|").split(" | ")
            rows.append((re.findall(r"`([^`]+)`", first), meaning.strip(), remedy.strip()))
    return rows


def holed(text: str) -> str:
    """Return the words of a template with holes."""
    return re.sub(r"\{\w+\}", HOLE, text.replace("`", "")).strip()


EXPLAINED = [text for found, _, _ in _rows() for text in found]
#: What stands around other reasons, which are explained, or is a part of one.
AROUND = {"both", "and_more", "places", "would_run_normally", "nothing_compiled"}
AROUND |= {"it_does"}
#: What users can mend, and what a setting leaves alone, is told in sentences, and explained as
#: reasons are.
TOLD = ("mend_", "left_alone_")
#: Every text that the page explains, with holes, and its key. What is to be done stands beside.
REASONS = {
    holed(text): key
    for key, text in reasons.ENGLISH.items()
    if key not in AROUND and not key.startswith("do_")
} | {holed(text): key for key, text in ENGLISH.items() if key.startswith(TOLD)}


def test_every_reason_is_explained() -> None:
    """A new one belongs into a row of docs/troubleshooting.md."""
    assert sorted(words for words in REASONS if words not in EXPLAINED) == []


def test_every_explained_text_is_a_reason_and_once_on_the_page() -> None:
    assert sorted({*EXPLAINED} - {*REASONS}) == []
    assert [text for text, count in Counter(EXPLAINED).items() if count > 1] == []


def test_every_reason_says_what_to_do() -> None:
    rows = _rows()
    assert len(rows) > 60
    for found, meaning, remedy in rows:
        assert found and len(meaning.split()) > 3 and remedy, found


def _find(reason: str) -> list[str]:
    """What a reader finds on the page who searches it for a reason."""
    patterns = {text: ".+".join(map(re.escape, text.split(HOLE))) for text in EXPLAINED}
    return [text for text, pattern in patterns.items() if re.search(pattern, reason)]


def test_what_the_code_says_is_found_by_its_words(tmp_path: Path) -> None:
    found = {}
    for text, cause in {
        "no region plan for … yet": lambda: plan_model(torch.nn.Linear(1, 1)),
        "this backend does not run on …": lambda: resolve_backend("inductor", "mps"),
        "backend must be one of …, got …": lambda: resolve_backend("tensorrt", "cpu"),
        "… has a …, whose effect is not known": lambda: read_call((object(),), {}),
        "compiled graphs (graphs) must be one plain folder name, got …: …": lambda: (
            validate_graphs_name("a/b")
        ),
        "cannot be read: …": lambda: read_graph(tmp_path / "none", Signer(tmp_path)),
    }.items():
        try:
            said = str(cause())
        except (WarmgraphError, CaptureError) as error:
            said = str(error)
        found[text] = said
    assert {text for text, said in found.items() if text in _find(said)} == {*found}


# --- all pages ----------------------------------------------------------------------------------

README = ROOT / "README.md"
#: What artists and hosts read.
PAGES = [README, *(DOCS / f"{n}.md" for n in ("get-started", "which-node", "troubleshooting"))]
PAGES.append(DOCS / "hosting.md")
OTHERS = [DOCS / f"{n}.md" for n in ("measured", "deepcache", "step-cache", "developers")]
OTHERS += [ROOT / "docs" / "architecture.md", ROOT / "dev" / "benchmarks" / "README.md"]
#: Names of nodes and of things, in which a word of the inside may stand.
NAMES = r"CUDA graphs?|[Cc]ompiled [Gg]raphs?"
INSIDE = re.compile(r"\b(regions?|kinds?|captur\w+|epochs?|graphs?)\b", re.IGNORECASE)


def _id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_pages_for_artists_do_without_the_words_of_the_inside(page: Path) -> None:
    """Code and what the page shows of the program (in italics) may have them."""
    text = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", "", page.read_text("utf-8"), flags=re.DOTALL)
    text = re.sub(r"\*\*(.*?)\*\*", r"\1", text)
    text = re.sub(rf"\*[^*\n]*\*|{NAMES}", "", text)
    assert INSIDE.findall(text) == []


def _anchors(page: Path) -> set[str]:
    """The names by which a page's headings are linked to."""
    heads = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=_id)
def test_links_lead_to_what_is_there(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", text):
        if "://" in target:
            continue
        file = page.parent / target if target else page
        assert file.exists(), target
        assert not anchor or anchor in _anchors(file), f"{target}#{anchor}"


def test_every_page_is_found_from_the_readme() -> None:
    linked = {
        (README.parent / t).resolve() for t in re.findall(r"\]\(([^)#]+\.md)", README.read_text())
    }
    assert {page.resolve() for page in DOCS.glob("*.md")} <= linked


def test_the_readme_is_short() -> None:
    lines = README.read_text("utf-8").splitlines()
    assert len(lines) < 100
    heads = [line for line in lines[:45] if line.startswith("## ")]
    assert heads == ["## What you get", "## Install", "## Your first faster image"]


def test_what_the_page_shows_of_node_and_tab_is_what_they_say() -> None:
    text = (DOCS / "get-started.md").read_text("utf-8")
    table = text.partition("| the node says |")[2].partition("\n\n")[0]
    patterns = [re.sub(r"\\{\w+\\}", ".+", re.escape(words)) for words in ENGLISH.values()]
    shown = re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)
    assert len(shown) > 4
    for words in shown:
        assert any(re.fullmatch(pattern, words) for pattern in patterns if pattern != ".+"), words
    page = json.loads((ROOT / "locales" / "en" / "main.json").read_text("utf-8"))["warmgraph"][
        "page"
    ]
    tab = text.partition("## The tab")[2].partition("\n## ")[0]
    names = re.findall(r"(?<!\*)\*([^*\n]+)\*(?!\*)", tab)
    assert len(names) > 9 and set(names) - {"Warmgraph"} <= set(page.values())


def test_commands_that_the_server_tells_are_those_of_the_page() -> None:
    text = (DOCS / "get-started.md").read_text("utf-8")
    compiler, elsewhere = Requirement("C compiler", met=False), {"CONDA_PREFIX": "/there"}
    commands = {*preflight.PACKAGES.values()}
    commands.add(preflight.install_command(compiler, environment=elsewhere))
    commands.add(preflight.install_command(compiler, platform="win32", environment={}))
    assert len(commands) > 5 and [each for each in commands if f"`{each}`" not in text] == []


def test_commands_of_the_console_are_there() -> None:
    parser = (ROOT / "cli.py").read_text("utf-8")
    there = set(re.findall(r'add_parser\(\s*"([\w-]+)"', parser))
    options = set(re.findall(r'add_argument\(\s*"(--[\w-]+)"', parser))
    for page in PAGES:
        for command, rest in re.findall(r"cli\.py ([a-z-]+)([^`\n]*)", page.read_text("utf-8")):
            assert command in there
            ours = rest.partition(" -- ")[0]  # what stands behind it is ComfyUI's
            assert set(re.findall(r"--[\w-]+", ours)) <= options


def test_each_template_is_named() -> None:
    text = (DOCS / "get-started.md").read_text("utf-8")
    assert [w.stem for w in (ROOT / "workflows").glob("*.json") if f"*{w.stem}*" not in text] == []


def test_the_settings_and_their_defaults_are_those_of_the_code() -> None:
    text = (DOCS / "hosting.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \| .+ \| (\S+) \|$", text, re.MULTILINE)
    assert {name: json.loads(default) for name, default in rows} == {
        name: setting.default for name, setting in SETTINGS.items()
    }


def test_routes_and_metrics_of_the_page_are_those_of_the_code() -> None:
    text = (DOCS / "hosting.md").read_text("utf-8")
    code = "".join(path.read_text("utf-8") for path in (ROOT / "nodes").glob("*.py"))
    metrics = {name.removesuffix("_total") for name in re.findall(r"`(warmgraph_\w+)`", text)}
    assert metrics == set(re.findall(r'"(warmgraph_\w+)"', code)) and len(metrics) > 8
    assert set(re.findall(r"(?<!nodes)/warmgraph/\w+", text)) == set(
        re.findall(r"/warmgraph/\w+", code)
    )


# --- figures ------------------------------------------------------------------------------------

HEADLINE = json.loads(
    (ROOT / "dev" / "benchmarks" / "results" / "headline.json").read_text("utf-8")
)


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_every_factor_is_one_that_was_measured(page: Path) -> None:
    """`2.99x`: within its last digit one of the headline's ratios."""
    ratios = [
        e["value"]
        for e in HEADLINE.values()
        if "/" in e["unit"] and not isinstance(e["value"], str)
    ]
    for shown in re.findall(r"\b(\d+\.\d+)x\b", page.read_text("utf-8")):
        digits = len(shown.partition(".")[2])
        assert any(abs(r - float(shown)) <= 0.5001 * 10**-digits for r in ratios), f"{shown}x"


MEASURED = DOCS / "measured.md"
TIMES = re.compile(r"(\d+(?:\.\d+)?)(?=(?:; \d+(?:\.\d+)?)* (?:ms|s)\b)")


def _cells(page: Path, head: str) -> list[list[str]]:
    """The cells of the rows of a table that begins with a head."""
    table = page.read_text("utf-8").partition(head)[2].partition("\n\n")[0]
    return [
        [cell.strip(" *") for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]
    ]


def test_every_time_of_the_first_table_is_said_again_where_it_is_explained() -> None:
    first, _, rest = MEASURED.read_text("utf-8").partition("| you have |")[2].partition("\n\n")
    assert len(TIMES.findall(first)) > 30
    assert sorted(set(TIMES.findall(first)) - set(TIMES.findall(rest))) == []


def test_factors_of_the_first_table_are_the_quotients_of_their_times() -> None:
    compared = 0
    for _, ours, eager, factors in _cells(MEASURED, "| you have |"):
        cells = [re.findall(r"\d+(?:\.\d+)?", cell) for cell in (ours, eager, factors)]
        if not factors.endswith("x"):
            continue
        for mine, theirs, factor in zip(*cells, strict=True):
            assert float(theirs) / float(mine) == pytest.approx(float(factor), rel=0.01), factors
            compared += 1
    assert compared > 14


def test_the_readmes_figures_are_those_of_the_page_of_figures() -> None:
    rows = _cells(README, "| one step of |")
    assert len(rows) == 9
    for _, *cells in rows:
        mine, theirs, factor = (re.findall(r"\d+(?:\.\d+)?", cell) for cell in cells)
        known = [
            [re.findall(r"\d+(?:\.\d+)?", cell) for cell in row[1:]]
            for row in _cells(MEASURED, "| you have |")
        ]
        assert any(
            pair == (*mine, *theirs, *factor) for row in known for pair in zip(*row, strict=False)
        ), cells
