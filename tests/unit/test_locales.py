"""Other languages than English: each has every word, and none that English lacks.

English lives where it is made: schemas, the table of settings, and `locales/en/main.json`. Where a
language lacks a key the host shows those.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from warmgraph_backends.reasons import ENGLISH as REASONS
from warmgraph_backends.sessions.lines import ENGLISH
from warmgraph_backends.sessions.settings import SETTINGS

ROOT = Path(__file__).resolve().parents[2]
LOCALES = ROOT / "locales"
DOCS = ROOT / "web" / "docs"
#: As the host's page calls them.
LANGUAGES = sorted(
    folder.name for folder in LOCALES.iterdir() if folder.is_dir() and folder.name != "en"
)
#: Names that are the same in all languages, as the host's own Chinese has them.
NAMES = {"DeepCache", "ControlNet", "vae"}

_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_CODE = re.compile(r"`([^`]+)`")
#: In texts that the host's page shows by itself these stand for something.
_SYNTAX = re.compile(r"[@{}|]")


@pytest.fixture(scope="module")
def schemas(pack: ModuleType) -> dict[str, Any]:
    """The nodes' schemas by id."""

    async def load() -> list[Any]:
        extension = await pack.comfy_entrypoint()
        return list(await extension.get_node_list())

    return {schema.node_id: schema for schema in (c.GET_SCHEMA() for c in asyncio.run(load()))}


def _read(language: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((LOCALES / language / name).read_text(encoding="utf-8"))
    return found


def _texts(of: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield each text of a file by its path in it."""
    if isinstance(of, dict):
        for key, value in of.items():
            yield from _texts(value, f"{path}.{key}" if path else key)
    else:
        yield path, of


def _fields(texts: dict[str, str]) -> dict[str, set[str]]:
    return {key: set(_PLACEHOLDER.findall(text)) for key, text in texts.items()}


def test_simplified_chinese_is_there() -> None:
    assert "zh" in LANGUAGES


def test_english_is_written_nowhere_twice() -> None:
    """The host takes what is not here from the schemas and from the page's settings."""
    assert [file.name for file in (LOCALES / "en").iterdir()] == ["main.json"]
    english = _read("en", "main.json")
    assert list(english) == ["settingsCategories", "warmgraph"]
    assert list(english["warmgraph"]) == ["page", "lines", "reasons"]


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_node_input_and_output_has_its_name_and_its_tooltip(
    language: str, schemas: dict[str, Any]
) -> None:
    words = {"name", "tooltip"}
    wanted = {
        node_id: {
            "inputs": {entry.id: words for entry in schema.inputs},
            "outputs": {str(number): words for number, _ in enumerate(schema.outputs)},
        }
        for node_id, schema in schemas.items()
    }
    nodes = _read(language, "nodeDefs.json")
    found = {
        node_id: {
            side: {name: set(entry) for name, entry in node[side].items()}
            for side in ("inputs", "outputs")
        }
        for node_id, node in nodes.items()
    }
    assert found == wanted
    assert {*map(frozenset, nodes.values())} == {
        frozenset({"display_name", "description", "inputs", "outputs"})
    }


@pytest.mark.parametrize("language", LANGUAGES)
def test_tooltips_name_the_choices_that_the_widget_has(
    language: str, schemas: dict[str, Any]
) -> None:
    """A widget's values are the same in all languages, and the page shows names of some in theirs:
    its tooltip explains them by what the page shows.
    """
    nodes = _read(language, "nodeDefs.json")
    english, named = (_read(each, "main.json")["warmgraph"]["page"] for each in ("en", language))
    for node_id, schema in schemas.items():
        for entry in schema.inputs:
            told = nodes[node_id]["inputs"][entry.id]["tooltip"]
            for value in map(str, getattr(entry, "options", None) or ()):
                key = f"option_{entry.id}_{value.replace(' ', '_')}"
                if key in english:
                    assert english[key] in entry.tooltip, (node_id, entry.id, value)
                    assert named[key] in told, (node_id, entry.id, value)
                elif value in entry.tooltip:
                    assert value in told, (node_id, entry.id)
            for number in re.findall(r"\d+(?:\.\d+)?", entry.tooltip):
                assert number in told, (node_id, entry.id, number)


def test_load_nodes_name_what_must_be_the_same_on_another_machine(schemas: dict[str, Any]) -> None:
    """All that the page for who hosts a server names, but for the model's code."""
    hosting = (ROOT / "docs" / "hosting.md").read_text(encoding="utf-8")
    versions = ("PyTorch", "CUDA", "Triton", "Python", "Warmgraph")
    for text in ("same sort of card", "the same system", *versions):
        assert text in hosting
        for node_id in ("WarmgraphLoadCompiledGraph", "WarmgraphLoadCompiledGraphVAE"):
            assert text in schemas[node_id].description, (node_id, text)
    for node in ("WarmgraphLoadCompiledGraph", "WarmgraphLoadCompiledGraphVAE"):
        for language in LANGUAGES:
            told = _read(language, "nodeDefs.json")[node]["description"]
            assert all(text in told for text in versions), (language, node)


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_setting_has_its_name_its_unit_and_its_tooltip(language: str) -> None:
    of_id = {f"Warmgraph_{s.place.replace('.', '_')}": s for s in SETTINGS.values()}
    words = _read(language, "settings.json")
    assert {key: set(entry) for key, entry in words.items()} == {
        key: {"name", "tooltip"} for key in of_id
    }
    for key, setting in of_id.items():
        for number in re.findall(r"\d+", setting.unit):
            assert number in words[key]["name"], key
        assert all(n in words[key]["tooltip"] for n in re.findall(r"\d+", setting.help)), key


@pytest.mark.parametrize("language", ["en", *LANGUAGES])
def test_groups_of_settings_share_no_name_with_the_host_or_other_packs(language: str) -> None:
    """The host has one table of these for itself and all packs, "Server" in it, and takes a name
    with underscores in place of dots for the key.
    """
    groups = {f"Warmgraph_{setting.group}" for setting in SETTINGS.values()}
    assert set(_read(language, "main.json")["settingsCategories"]) == groups


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_sentence_of_the_server_has_one_with_the_same_values(language: str) -> None:
    lines = _read(language, "main.json")["warmgraph"]["lines"]
    assert _fields(lines) == _fields(ENGLISH)
    for key, english in ENGLISH.items():
        indents = [re.match(" *", text)[0] for text in (english, lines[key])]  # type: ignore[index]
        assert indents[0] == indents[1], key


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_reason_has_one_with_the_same_values(language: str) -> None:
    assert _fields(_read(language, "main.json")["warmgraph"]["reasons"]) == _fields(REASONS)


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_sentence_of_the_page_has_one_with_the_same_values(language: str) -> None:
    page, english = (_read(each, "main.json")["warmgraph"]["page"] for each in (language, "en"))
    assert set(page) == set(english)
    for key, text in english.items():
        *few, many = page[key].split(" | ")
        wanted = set(_PLACEHOLDER.findall(text.split(" | ")[-1]))
        assert set(_PLACEHOLDER.findall(many)) == wanted, key
        for one in few:  # may be said without its number
            assert set(_PLACEHOLDER.findall(one)) | {"count"} == wanted | {"count"}, key


@pytest.mark.parametrize("language", LANGUAGES)
def test_nothing_else_is_translated(language: str) -> None:
    assert {file.name for file in (LOCALES / language).iterdir()} == {
        "main.json",
        "nodeDefs.json",
        "settings.json",
    }
    words = _read(language, "main.json")
    assert set(words) == {"settingsCategories", "warmgraph"}
    assert set(words["warmgraph"]) == {"page", "lines", "reasons"}


def test_no_chinese_text_was_left_in_english() -> None:
    for name in ("main.json", "nodeDefs.json", "settings.json"):
        for path, text in _texts(_read("zh", name)):
            said = _PLACEHOLDER.sub("", text)
            has_words = re.search(r"\w", said) is not None
            assert not has_words or text in NAMES or re.search("[\u4e00-\u9fff]", said), (
                path,
                text,
            )


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", ["nodeDefs.json", "settings.json"])
def test_what_the_host_shows_itself_holds_nothing_that_it_would_read_as_syntax(
    language: str, name: str
) -> None:
    assert {
        path: text for path, text in _texts(_read(language, name)) if _SYNTAX.search(text)
    } == {}


def test_every_reason_is_given_somewhere() -> None:
    code = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "backends").rglob("*.py"))
    assert [key for key in REASONS if f'"{key}"' not in code and key != "both"] == []


def test_every_sentence_of_the_server_is_said_somewhere() -> None:
    """Keys are written out, or made of what they are about."""
    code = "".join(
        file.read_text(encoding="utf-8")
        for folder in ("backends/sessions", "backends/several_cards", "nodes")
        for file in (ROOT / folder).glob("*.py")
        if file.name != "lines.py"
    )
    made = re.findall(r'line\(f"(\w+_)\{', code)
    assert made, "none is made any more: ask for all of them as they are"
    left = [key for key in ENGLISH if f'"{key}"' not in code and not key.startswith(tuple(made))]
    assert left == []


def test_help_pages_are_those_of_the_nodes(schemas: dict[str, Any]) -> None:
    """The host asks for NODE/LANGUAGE.md, then for NODE.md."""
    found = {str(file.relative_to(DOCS).as_posix()) for file in DOCS.rglob("*") if file.is_file()}
    translated = {f"{node}/{language}.md" for node in schemas for language in LANGUAGES}
    assert found == {f"{node}.md" for node in schemas} | translated


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_help_page_says_the_same_in_every_language(
    language: str, schemas: dict[str, Any]
) -> None:
    nodes = _read(language, "nodeDefs.json")
    for node_id, schema in schemas.items():
        english = (DOCS / f"{node_id}.md").read_text(encoding="utf-8")
        page = (DOCS / node_id / f"{language}.md").read_text(encoding="utf-8")
        assert english.startswith(f"# {schema.display_name}\n")
        assert page.startswith(f"# {nodes[node_id]['display_name']}\n")
        for form in (r"^#+", r"^\|", r"^- ", r"^    \S"):
            counts = [len(re.findall(form, each, re.MULTILINE)) for each in (english, page)]
            assert counts[0] == counts[1], (node_id, form)
        names = [sorted(set(_CODE.findall(each))) for each in (english, page)]
        assert names[0] == names[1], node_id


def test_help_pages_explain_every_input_and_each_of_its_choices(schemas: dict[str, Any]) -> None:
    for node_id, schema in schemas.items():
        named = set(_CODE.findall((DOCS / f"{node_id}.md").read_text(encoding="utf-8")))
        for entry in schema.inputs:
            values = getattr(entry, "options", None) or ()
            if entry.id != "folder":  # its values are the folders of this server
                assert {entry.id, *map(str, values)} <= named, (node_id, entry.id)
            assert entry.id in named, (node_id, entry.id)


def test_help_pages_are_in_plain_words() -> None:
    for file in DOCS.glob("*.md"):
        text = _CODE.sub("", file.read_text(encoding="utf-8"))
        inside = re.findall(r"\b(regions?|kinds? of region|epochs?|captur\w+|eager)\b", text, re.I)
        assert inside == [], file.name
