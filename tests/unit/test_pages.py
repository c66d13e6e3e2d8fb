"""The pages say what the code says: every reason is explained, every link leads somewhere, and the
words of the inside stay there.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from .reasons import texts

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TROUBLESHOOTING = DOCS / "troubleshooting.md"
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


EXPLAINED = [text for found, _, _ in _rows() for text in found]
#: Modules whose texts are no reasons, or parts of one that is explained as a whole.
NO_REASONS_IN = {
    "building/messages.py": "parts of `is no message (...)`",
    "events.py": "names of events",
    "host_api/models.py": "names of models",
    "host_api/needs.py": "how the host's functions are called, and names of features",
    "sessions/lines.py": "what stands around reasons on a node",
    "sessions/prompts.py": "how far builds are",
    "sessions/report.py": "what stands around reasons",
    "sessions/settings.py": "the settings' own words",
    "sessions/words.py": "what stands around reasons on a node",
    "sessions/story.py": "what stands around reasons in the log",
    "storing/canonical_json.py": "parts of `is damaged: ...`",
    "storing/manifest.py": "parts of `is damaged: in its manifest, ...`",
}
#: The same for single texts.
NO_REASONS = {
    "parts of `is no answer (...)`": (
        "job must be …, got …",
        "ok must be true or false, got …",
        "… is no answer to a job",
        "sha256 must be 64 lower-case hex digits, got …",
        "facts must be a table, got …",
        "clean must be true or false, got …",
        "… must be text, got …",
    ),
    "what fills a hole of a text that is explained": (
        "no reason",
        "no text",
        "finding the private APIs",
        "making fakes",
        "exporting with symbolic sizes",
        "its arguments",
        "full steps",
        "…... (… characters)",
        "a number with too many digits",
        "not there",
        "of an unknown version",
        "the host's layer",
        "an unknown module",
        "another node",
        "another node (…)",
        "captured calls",
        "it is built anew",
        "… (64-bit)",
        "… at …",
        "the model",
        "an unknown device",
        "timing a step",
        "step at …x…, batch …",
        "of type …",
    ),
    "a choice or a title": ("any shape", "decoder and encoder", "Other files", "conditioning …"),
    "how a run with every call compared went, and a developer's typing error": (
        "verified … calls of regions with eager",
        "… differ",
        "none differs",
        "nearest to its tolerance (… of it) is …",
        "only= without a kind",
    ),
    "lines of the log about what went well": (
        "… built in … s of work",
        "… loaded",
        "… in use before",
        "…: … of … graphs are ready",
        "beside …",
        "in their folder",
    ),
    "data": (
        "import os, shutil, sys, time for _ in range(20): time.sleep(0.2) "
        "shutil.rmtree(sys.argv[1], ignore_errors=True) if not os.path.exists(sys.argv[1]): break",
        "…/torch …",
        "sha256 …",
        "warmgraph graph file",
        "…: …, … bytes…",
    ),
}
SET_ASIDE = {text for found in NO_REASONS.values() for text in found}
#: Every other text that may reach a user, and where it is.
REASONS = {
    text.words: text.place
    for text in texts()
    if text.place.partition("/")[2].partition(":")[0] not in NO_REASONS_IN
}


def test_every_reason_of_the_code_is_explained() -> None:
    """A new one belongs into a row of docs/troubleshooting.md, or above if it is no reason."""
    known = {*EXPLAINED, *SET_ASIDE}
    assert [f"{words} ({place})" for words, place in REASONS.items() if words not in known] == []


def test_every_explained_text_is_in_the_code_and_once_on_the_page() -> None:
    assert sorted({*EXPLAINED} - {*REASONS}) == []
    assert [text for text, count in Counter(EXPLAINED).items() if count > 1] == []


def test_what_is_set_aside_is_there_and_is_not_explained() -> None:
    assert sorted(SET_ASIDE - {*REASONS}) == []
    assert sorted(SET_ASIDE & {*EXPLAINED}) == []
    assert all((ROOT / "backends" / module).is_file() for module in NO_REASONS_IN)


def test_every_reason_says_what_to_do() -> None:
    rows = _rows()
    assert len(rows) > 60
    for found, meaning, remedy in rows:
        assert found and len(meaning.split()) > 3 and remedy, found


def test_texts_of_the_code_are_found_where_a_report_has_them(tmp_path: Path) -> None:
    """What the reader takes for a text: whatever a user may read, and nothing that says nothing."""
    source = '''
"""A module with a docstring."""
import logging
logger = logging.getLogger(__name__)
_WHY = "a constant with {} holes"
_REMEDY = "what is to be done"
def told(self, value):
    """A function of two words."""
    logger.info("this is for the log")
    if value == "no such thing":
        raise ValueError("a part of another text")
    if value.startswith("some words here"):
        raise BuildError(f"it {value} broke", remedy="mend it yourself")
    self.reason = f"reads {value.name!r}, and more" if value else "two words"
    return self.decline("left to the host") or {"a key in words": "and its value"}
'''
    (tmp_path / "module.py").write_text(source, "utf-8")
    assert [text.words for text in texts(tmp_path)] == [
        "a constant with … holes",
        "it … broke",
        "reads …, and more",
        "two words",
        "left to the host",
        "and its value",
    ]
