"""Workflow folders: only checked names become paths, and a renamed workflow finds its graphs."""

from __future__ import annotations

import glob
import json
import os
import sys
import unicodedata
from contextlib import suppress
from pathlib import Path

import pytest

from warmgraph_backends.errors import GraphFileError, GraphsNameError
from warmgraph_backends.storing.canonical_json import sha256_hex
from warmgraph_backends.storing.folders import (
    MAX_NAME,
    NOTICE,
    RECORD,
    FolderRecord,
    folder_keys,
    list_folders,
    listed_folder,
    named_folder,
    read_record,
    remember,
    validate_graphs_name,
    workflow_folder,
)
from warmgraph_backends.storing.graph_file import file_name

KEY = sha256_hex("a graph")
ID = "7c0e4f5a-1111-4222-8333-444455556666"


@pytest.fixture
def user(tmp_path: Path) -> Path:
    root = tmp_path / "user" / "default"
    (root / "workflows").mkdir(parents=True)
    return root


def save(user: Path, relative: str) -> Path:
    """Save a workflow as the host does."""
    path = user / relative
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")
    return path


def run(user: Path, relative: str, workflow_id: str | None = ID, key: str = KEY) -> Path:
    """Do what a run of a saved workflow does to its folder."""
    folder = workflow_folder(user, relative, workflow_id)
    assert folder is not None
    folder.mkdir(exist_ok=True)
    (folder / file_name(key, hidden=True)).write_bytes(b"")
    remember(folder, relative, workflow_id, [key])
    return folder


# Names


@pytest.mark.parametrize(
    "name",
    ["portrait", "My Flow (2)", "a.b", "Übung", "高解像度", "поток", "x" * MAX_NAME, "50% & more!"],
)
def test_plain_names_are_taken_as_they_are(user: Path, name: str) -> None:
    assert validate_graphs_name(name) == name
    folder = named_folder(user / "workflows", name)
    assert folder == user / "workflows" / f"{name}.graphs"
    folder.mkdir()


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("  portrait ", "portrait"),
        ("portrait.graphs", "portrait"),
        (unicodedata.normalize("NFD", "Übung"), "Übung"),
        ("क्\u200dष", "क्\u200dष"),
    ],
)
def test_names_are_normalised(name: str, plain: str) -> None:
    assert validate_graphs_name(name) == plain


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("", "it is empty"),
        ("   ", "it is empty"),
        (".graphs", "it is empty"),
        ("../../x", "it contains /"),
        ("..", "dot"),
        (".", "dot"),
        ("a/b", "it contains /"),
        ("a\\b", "it contains \\"),
        ("C:\\x", "it contains : \\"),
        ("C:x", "it contains :"),
        ("/etc/passwd", "it contains /"),
        ("\\\\server\\share", "it contains \\"),
        ("stream:hidden", "it contains :"),
        ("what?", "it contains ?"),
        ("x" * 300, "it is 300 characters long, at most 120 fit"),
        ("高" * 100, "it takes 300 bytes, at most 240 fit"),
        (".hidden", "starts or ends with a dot"),
        ("trailing.", "starts or ends with a dot"),
        ("trailing. .", "starts or ends with a dot"),
        ("CON", "CON is a device name"),
        ("con", "con is a device name"),
        ("nul.txt", "nul is a device name"),
        ("COM1", "COM1 is a device name"),
        ("LPT¹", "LPT¹ is a device name"),
        ("aux .x", "aux is a device name"),
        ("a\0b", "U+0000"),
        ("a\nb", "U+000A"),
        ("a\u202egnp", "U+202E"),
        ("a\u2028b", "U+2028"),
        ("a\ud800b", "U+D800"),
        (None, "it is not text"),
        (7, "it is not text"),
    ],
)
def test_other_names_are_refused_with_what_is_wrong(name: str, problem: str, user: Path) -> None:
    with pytest.raises(GraphsNameError) as caught:
        validate_graphs_name(name)
    assert problem in caught.value.reason
    assert caught.value.remedy
    assert len(caught.value.reason) < 250
    str(caught.value).encode()  # can be logged and sent
    with pytest.raises(GraphsNameError):
        named_folder(user / "workflows", name)
    assert os.listdir(user / "workflows") == []


@pytest.mark.skipif(sys.platform == "win32", reason="making a link needs rights on Windows")
def test_a_link_that_leads_out_is_refused(user: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (user / "workflows" / "x.graphs").symlink_to(tmp_path / "outside")
    with pytest.raises(GraphsNameError, match="leads out of"):
        named_folder(user / "workflows", "x")
    with pytest.raises(GraphsNameError, match="leads out of"):
        listed_folder(user / "workflows", "x")
    save(user, "workflows/x.json")
    with pytest.raises(GraphsNameError, match="leads out of"):
        workflow_folder(user, "workflows/x.json", ID)


# The list


def test_folders_with_graphs_are_listed_and_found_by_their_listed_name(user: Path) -> None:
    for relative in ("workflows/b.json", "workflows/sub dir/ü.json", "workflows/a.json"):
        save(user, relative)
        run(user, relative)
    (user / "workflows" / "empty.graphs").mkdir()
    (user / "workflows" / ".hidden" / "h.graphs").mkdir(parents=True)
    (user / "workflows" / "file.graphs").write_text("")
    names = list_folders(user / "workflows")
    assert names == ["a", "b", "sub dir/ü"]
    for name in names:
        assert folder_keys(listed_folder(user / "workflows", name)) == [KEY]


def test_list_of_a_missing_folder_is_empty(tmp_path: Path) -> None:
    assert list_folders(tmp_path / "none") == []


@pytest.mark.parametrize(
    "name", ["", "missing", "../x", "/etc", "a//b", "sub/../../x", "a\0b", "x\\y", "z" * 300, None]
)
def test_name_that_is_not_in_the_list_is_refused(user: Path, name: str) -> None:
    (user / "x.graphs").mkdir()
    with pytest.raises(
        GraphsNameError, match=r"^(folder must be|there is no folder|.* leads out of)"
    ):
        listed_folder(user / "workflows", name)


def test_only_hidden_graph_files_count_as_graphs(tmp_path: Path) -> None:
    for name in (
        f"{KEY}.safetensors",
        f".{KEY}.safetensors.broken",
        f"..{KEY}.safetensors",
        RECORD,
    ):
        (tmp_path / name).write_text("")
    assert folder_keys(tmp_path) == []
    (tmp_path / f".{KEY}.safetensors").write_text("")
    assert folder_keys(tmp_path) == [KEY]


# The folder of a saved workflow


def test_folder_lies_beside_the_saved_workflow(user: Path) -> None:
    save(user, "workflows/sub dir/My Flow.json")
    folder = workflow_folder(user, "workflows/sub dir/My Flow.json", ID)
    assert folder == user / "workflows" / "sub dir" / "My Flow.graphs"
    assert not folder.exists()


def test_workflow_that_is_not_saved_has_no_folder(user: Path) -> None:
    assert workflow_folder(user, "workflows/Unsaved Workflow (2).json", ID) is None
    (user / "workflows" / "folder.json").mkdir()
    assert workflow_folder(user, "workflows/folder.json", ID) is None


@pytest.mark.parametrize(
    "path",
    [
        "",
        "x.json",
        "workflows",
        "workflows/x",
        "workflows/x.JSON.txt",
        "/workflows/x.json",
        "workflows/../x.json",
        "workflows/../../other/workflows/x.json",
        "workflows/./x.json",
        "workflows//x.json",
        "../default/workflows/x.json",
        "workflows\\x.json",
        "workflows/..\\..\\x.json",
        "C:\\workflows\\x.json",
        "workflows/a\0.json",
        "workflows/a\n.json",
        None,
        {"path": "x"},
    ],
)
def test_path_that_is_no_workflow_of_this_user_is_refused(user: Path, path: str) -> None:
    (user / "x.json").write_text("{}")
    with pytest.raises(GraphsNameError, match=r"workflow path must be workflows/\.\.\./NAME\.json"):
        workflow_folder(user, path, ID)


@pytest.mark.parametrize("path", [f"workflows/{'x' * 5000}.json", "workflows/a\ud800.json"])
def test_path_that_cannot_exist_does_no_harm(user: Path, path: str) -> None:
    with suppress(GraphsNameError):
        assert workflow_folder(user, path, ID) is None


@pytest.mark.skipif(sys.platform == "win32", reason="making a link needs rights on Windows")
def test_links_are_followed_inside_the_users_folder_only(user: Path, tmp_path: Path) -> None:
    save(user, "workflows/real/x.json")
    (user / "workflows" / "inside").symlink_to(user / "workflows" / "real")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x.json").write_text("{}")
    (user / "workflows" / "outside").symlink_to(tmp_path / "elsewhere")
    real = user / "workflows" / "real" / "x.graphs"
    assert workflow_folder(user, "workflows/inside/x.json", ID) == real
    with pytest.raises(GraphsNameError, match="leads out of"):
        workflow_folder(user, "workflows/outside/x.json", ID)


# Renames


def test_renamed_workflow_finds_its_graphs_again_and_again(user: Path) -> None:
    path = save(user, "workflows/old.json")
    old = run(user, "workflows/old.json")
    path = path.rename(user / "workflows" / "new.json")
    new = workflow_folder(user, "workflows/new.json", ID)
    assert new == user / "workflows" / "new.graphs"
    assert folder_keys(new) == [KEY]
    assert not old.exists()
    path.rename(user / "workflows" / "newer.json")  # with no run in between
    newer = workflow_folder(user, "workflows/newer.json", ID)
    assert newer is not None
    assert folder_keys(newer) == [KEY]


def test_workflow_moved_to_another_folder_finds_its_graphs(user: Path) -> None:
    path = save(user, "workflows/deep/er/old.json")
    old = run(user, "workflows/deep/er/old.json")
    (user / "workflows" / "other").mkdir()
    path.rename(user / "workflows" / "other" / "new.json")
    new = workflow_folder(user, "workflows/other/new.json", ID)
    assert new is not None
    assert folder_keys(new) == [KEY]
    assert not old.exists()


def test_copy_of_a_workflow_does_not_take_the_originals_graphs(user: Path) -> None:
    save(user, "workflows/original.json")
    original = run(user, "workflows/original.json")
    save(user, "workflows/copy.json")  # Save As keeps the id
    copy = workflow_folder(user, "workflows/copy.json", ID)
    assert copy is not None
    assert not copy.exists()
    assert folder_keys(original) == [KEY]


@pytest.mark.parametrize("other", ["another id", None, ""])
def test_workflow_with_another_id_takes_nothing(user: Path, other: str | None) -> None:
    path = save(user, "workflows/old.json")
    old = run(user, "workflows/old.json")
    path.rename(user / "workflows" / "new.json")
    new = workflow_folder(user, "workflows/new.json", other)
    assert new is not None
    assert not new.exists()
    assert old.exists()


def test_folder_with_a_name_of_its_own_is_never_taken(user: Path) -> None:
    save(user, "workflows/flow.json")
    named = named_folder(user / "workflows", "shared")
    named.mkdir()
    remember(named, "workflows/flow.json", ID, [])
    workflow_folder(user, "workflows/flow.json", ID)
    assert named.exists()


def test_existing_folder_is_not_replaced_by_an_orphan(user: Path) -> None:
    path = save(user, "workflows/old.json")
    old = run(user, "workflows/old.json")
    path.rename(user / "workflows" / "new.json")
    (user / "workflows" / "new.graphs").mkdir()
    new = workflow_folder(user, "workflows/new.json", ID)
    assert new is not None
    assert folder_keys(new) == []
    assert folder_keys(old) == [KEY]


def test_newest_of_two_orphans_is_taken(user: Path) -> None:
    paths = [save(user, f"workflows/{name}.json") for name in "ab"]
    for name, age in (("a", 2000), ("b", 1000)):
        folder = run(user, f"workflows/{name}.json", key=sha256_hex(name))
        os.utime(folder / RECORD, (age, age))
    for path in paths:
        path.unlink()
    save(user, "workflows/c.json")
    new = workflow_folder(user, "workflows/c.json", ID)
    assert new is not None
    assert folder_keys(new) == [sha256_hex("a")]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"[" * 100_000,
        b'{"format": 2, "workflow": "workflows/old.json", "id": "x", "graphs": []}',
        b'{"format": 1, "workflow": 7, "id": "x", "graphs": []}',
        b'{"format": 1, "workflow": "workflows/old.json", "id": ["x"], "graphs": []}',
        b'{"format": 1, "workflow": "workflows/old.json", "id": "x", "graphs": {}}',
    ],
)
def test_damaged_record_is_no_record(user: Path, content: bytes) -> None:
    save(user, "workflows/new.json")
    old = user / "workflows" / "old.graphs"
    old.mkdir()
    (old / RECORD).write_bytes(content)
    assert read_record(old) is None
    new = workflow_folder(user, "workflows/new.json", "x")
    assert new is not None
    assert not new.exists()


def test_planted_record_leads_nowhere_else(user: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.graphs"
    secret.mkdir()
    save(user, "workflows/new.json")
    planted = user / "workflows" / "old.graphs"
    planted.mkdir()
    (planted / RECORD).write_text(
        json.dumps({"format": 1, "workflow": str(secret), "id": ID, "graphs": ["../../x", 7]})
    )
    workflow_folder(user, "workflows/new.json", ID)
    assert secret.exists()
    record = read_record(planted)
    assert record is not None
    assert record.graphs == ()


# The record


def test_record_is_written_once_and_merged(user: Path) -> None:
    save(user, "workflows/x.json")
    folder = run(user, "workflows/x.json")
    assert read_record(folder) == FolderRecord("workflows/x.json", ID, (KEY,))
    before = (folder / RECORD).stat().st_ino
    remember(folder, "workflows/x.json", ID, [KEY])
    assert (folder / RECORD).stat().st_ino == before
    other = sha256_hex("other")
    remember(folder, "workflows/x.json", ID, [other])
    record = read_record(folder)
    assert record is not None
    assert set(record.graphs) == {KEY, other}
    (folder / file_name(KEY, hidden=True)).unlink()
    remember(folder, "workflows/x.json", ID, [other])
    record = read_record(folder)
    assert record is not None
    assert record.graphs == (other,)


def test_nothing_is_remembered_of_a_folder_that_is_not_there(user: Path) -> None:
    remember(user / "workflows" / "x.graphs", "workflows/x.json", ID, [KEY])
    assert os.listdir(user / "workflows") == []


def test_record_that_cannot_be_written_is_an_error_in_words(user: Path) -> None:
    folder = user / "workflows" / "x.graphs"
    (folder / RECORD).mkdir(parents=True)
    with pytest.raises(GraphFileError, match="cannot be written"):
        remember(folder, "workflows/x.json", ID, [KEY])


def test_a_file_manager_shows_what_the_folder_is_and_the_hosts_page_lists_nothing_of_it(
    user: Path,
) -> None:
    workflow = save(user, "workflows/x.json")
    folder = run(user, "workflows/x.json")
    shown = [name for name in os.listdir(folder) if not name.startswith(".")]
    assert shown == [NOTICE] and "compiled graphs, may be deleted" in NOTICE
    assert validate_graphs_name(NOTICE) == NOTICE  # fit for a folder on every system
    pattern = os.path.join(user / "workflows", "**", "*")  # as the host looks for workflows
    assert list(filter(os.path.isfile, glob.glob(pattern, recursive=True))) == [str(workflow)]
    assert folder_keys(folder) == [KEY] and list_folders(user / "workflows") == ["x"]
    workflow.rename(user / "workflows" / "y.json")
    moved = run(user, "workflows/y.json")
    assert not folder.exists() and (moved / NOTICE).is_dir()
    (moved / NOTICE).rmdir()
    run(user, "workflows/y.json")
    assert (moved / NOTICE).is_dir()
