"""Which `NAME.graphs` belongs to a run; every name is checked before it becomes a path.

    USER/workflows/sub/NAME.json             a saved workflow
    USER/workflows/sub/NAME.graphs/          its graphs (dot names, which the host does not list)
    USER/workflows/sub/NAME.graphs/.folder.json    whose they are: found again after a rename
    USER/workflows/sub/NAME.graphs/READ ME ...     says to people what the folder is

Everything below `workflows/` can be overwritten over HTTP, so `.folder.json` is never more than a
hint: no path is built from what it says.
"""

from __future__ import annotations

import logging
import os
import threading
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import MAX_TEXT, GraphFileError, GraphsNameError, shown
from ..reasons import Reason, of
from .canonical_json import canonical_json, read_json
from .files import open_regular, write_whole
from .graph_file import file_name, key_of
from .manifest import is_key

logger = logging.getLogger(__name__)

SUFFIX = ".graphs"
RECORD = ".folder.json"
#: A folder with nothing in it: the host's page lists every plain file that is not hidden as a
#: workflow, and file managers show a folder of hidden files as an empty one.
NOTICE = "READ ME - compiled graphs, may be deleted, are made again when needed"
WORKFLOWS = "workflows"
MAX_NAME = 120
MAX_NAME_BYTES = 240  # file systems take 255, suffix included

_FORMAT = 1
_MAX_RECORD_BYTES = 1 << 20
_MAX_FOLDERS = 2000  # looked through at most, for a list or a moved workflow
_FORBIDDEN = set('<>:"/\\|?*')
_INVISIBLE = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}  # Unicode categories
_JOINERS = (
    "\u200c\u200d"  # format characters that Persian, Indic scripts and emoji cannot do without
)
_RESERVED = {"CON", "PRN", "AUX", "NUL", "CONIN$", "CONOUT$"} | {
    device + digit for device in ("COM", "LPT") for digit in "0123456789¹²³"
}
_FROM_THE_LIST = of("do_pick")
_remembering = threading.Lock()


class FolderRecord(NamedTuple):
    """What `.folder.json` says: the workflow's path below the user's folder, its id, its graphs."""

    workflow: str
    id: str | None
    graphs: tuple[str, ...]


def validate_graphs_name(name: str) -> str:
    """Return a graphs name as it is used for a folder on every system.

    Blanks around it and a final `.graphs` are dropped; accents are composed (NFC), so that a name
    typed on one system is found on another.

    Raises:
        GraphsNameError: it is not one plain folder name.
    """
    if not isinstance(name, str):
        raise _bad_name(name, of("name_no_text"))
    if len(name) > MAX_TEXT:
        raise _bad_name(name, of("name_too_long", most=MAX_NAME))
    plain = unicodedata.normalize("NFC", name).strip()
    plain = plain.removesuffix(SUFFIX).rstrip()
    problem = _name_problem(plain)
    if problem:
        raise _bad_name(name, problem)
    return plain


def named_folder(workflows_root: Path, name: str) -> Path:
    """Return the folder that a name stands for: `NAME.graphs` in the user's workflows folder.

    Raises:
        GraphsNameError: the name is no plain one, or a link of that name leads elsewhere.
    """
    plain = validate_graphs_name(name)
    root = Path(os.path.realpath(workflows_root))
    return _inside(root, root / f"{plain}{SUFFIX}", name)


def listed_folder(workflows_root: Path, name: str) -> Path:
    """Return the existing folder that `list_folders` listed under this name, or with `.graphs` on
    it.

    Raises:
        GraphsNameError: there is no such folder inside the user's workflows folder.
    """
    root = Path(os.path.realpath(workflows_root))
    parts = _parts(name) if isinstance(name, str) else None
    if parts is None:
        raise GraphsNameError(of("no_such_name", got=shown(name)), remedy=_FROM_THE_LIST)
    folder = _inside(
        root, root.joinpath(*parts[:-1], f"{parts[-1].removesuffix(SUFFIX)}{SUFFIX}"), name
    )
    if not os.path.isdir(folder):  # unlike Path.is_dir, no error for a name too long
        raise GraphsNameError(
            of("no_such_folder", name=shown(name + SUFFIX), root=root),
            remedy=_FROM_THE_LIST,
        )
    return folder


def list_folders(workflows_root: Path) -> list[str]:
    """Return the names of all folders that hold graphs, without `.graphs`, as `sub/NAME`."""
    root = Path(os.path.realpath(workflows_root))
    found = (folder for folder in _graphs_folders(root) if folder_keys(folder))
    return sorted(folder.relative_to(root).as_posix().removesuffix(SUFFIX) for folder in found)


def folder_keys(folder: Path) -> list[str]:
    """Return the keys of the graph files in a folder, sorted; none when it cannot be read."""
    with suppress(OSError):
        return sorted(key for name in os.listdir(folder) if (key := _hidden_key(name)))
    return []


def workflow_folder(user_root: Path, relative_path: str, workflow_id: str | None) -> Path | None:
    """Return the folder beside a saved workflow; when that was renamed, the folder is as well.

    A folder is taken over when its own workflow is gone and it was last used by the workflow with
    this id; the same folder of the disk is looked at first, then everything below `workflows/`.

    Args:
        user_root: The user's data folder, the parent of `workflows/`.
        relative_path: What the page says: `workflows/sub/NAME.json`. Checked, never trusted.
        workflow_id: The workflow's own id, which a rename keeps; None when it has none.

    Returns:
        `NAME.graphs` beside the workflow, which need not exist; None when it is not saved.

    Raises:
        GraphsNameError: the path is not one of a workflow inside the user's folder.
    """
    root = Path(os.path.realpath(user_root))
    workflow = _workflow_file(root, relative_path)
    if workflow is None:
        return None
    folder = workflow.with_name(workflow.name.removesuffix(".json") + SUFFIX)
    if workflow_id and not os.path.lexists(folder):
        left_behind = _left_behind(root / WORKFLOWS, workflow.parent, workflow_id)
        if left_behind is not None:
            _bring_along(left_behind, folder, relative_path)
    return _inside(root, folder, relative_path)


def remember(folder: Path, workflow: str, workflow_id: str | None, keys: Iterable[str]) -> None:
    """Write down whose graphs a folder holds, unless that is known or there is no folder; and say
    to people who look into it what it is.

    Graphs that were written down before stay, as long as their files are there: a run need not use
    all graphs of its workflow.

    Args:
        folder: A checked `NAME.graphs`.
        workflow: The workflow's path below the user's folder; only a folder that has its own
            workflow's name is found again after a rename.
        workflow_id: The workflow's id, None when it has none.
        keys: The graphs that the run used.

    Raises:
        GraphFileError: the folder cannot be written.
    """
    if not folder.is_dir():
        return
    with suppress(OSError):  # it is there, or the folder is read-only
        os.mkdir(folder / NOTICE)
    with _remembering:
        old = read_record(folder)
        present = set(folder_keys(folder))
        kept = present.intersection(old.graphs) if old else set()
        record = FolderRecord(workflow, workflow_id, tuple(sorted(kept.union(keys))))
        if record != old:
            try:
                _write_record(folder, record)
            except OSError as error:
                raise GraphFileError(
                    of("unwritable", path=folder / RECORD, error=error.strerror or error),
                    remedy=of("do_make_writable"),
                ) from error


def read_record(folder: Path) -> FolderRecord | None:
    """Read a folder's `.folder.json`; None when there is none or we did not write it."""
    try:
        with open_regular(folder / RECORD) as file:
            data: Any = read_json(file.read(_MAX_RECORD_BYTES))
    except (OSError, ValueError):
        return None
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        return None
    workflow, identifier, graphs = data.get("workflow"), data.get("id"), data.get("graphs")
    if not isinstance(workflow, str) or not isinstance(identifier, (str, type(None))):
        return None
    if not isinstance(graphs, list):
        return None
    keys = (key for key in graphs if isinstance(key, str) and is_key(key))
    return FolderRecord(workflow, identifier, tuple(keys))


def _name_problem(name: str) -> Reason | None:
    """Say why a normalised name cannot be a folder on every system; None when it can."""
    if not name:
        return of("name_empty")
    if len(name) > MAX_NAME:
        return of("name_characters", count=len(name), most=MAX_NAME)
    size = len(name.encode("utf-8", "replace"))
    if size > MAX_NAME_BYTES:
        return of("name_bytes", count=size, most=MAX_NAME_BYTES)
    forbidden = sorted(_FORBIDDEN.intersection(name))
    if forbidden:
        return of("name_contains", characters=" ".join(forbidden))
    for character in name:
        if unicodedata.category(character) in _INVISIBLE and character not in _JOINERS:
            return of("name_invisible", code=f"{ord(character):04X}")
    if name.startswith(".") or name.endswith("."):
        return of("name_dot")
    if name.split(".")[0].rstrip().upper() in _RESERVED:
        return of("name_device", name=name.split(".")[0].rstrip())
    return None


def _bad_name(name: object, problem: Reason) -> GraphsNameError:
    return GraphsNameError(
        of("bad_name", got=shown(name), why=problem), remedy=of("do_name_plainly")
    )


def _parts(path: str) -> list[str] | None:
    """Split a relative path at its slashes, None when it could lead anywhere but down."""
    if len(path) > MAX_TEXT:
        return None
    parts = path.split("/")
    unsafe = "\\:" if os.name == "nt" else "\\"
    if any(part in {"", ".", ".."} for part in parts):
        return None
    if any(character in unsafe or ord(character) < 32 for character in path):
        return None
    return parts


def _inside(root: Path, path: Path, name: str) -> Path:
    """Return `path` with its links resolved if that is still inside `root` (itself resolved)."""
    try:
        real = Path(os.path.realpath(path))
    except (OSError, ValueError) as error:
        raise _bad_name(name, of("name_no_path")) from error
    if root not in real.parents:
        raise GraphsNameError(
            of("leads_out", name=shown(name), root=root), remedy=of("do_keep_inside")
        )
    return real


def _workflow_file(root: Path, relative_path: str) -> Path | None:
    parts = _parts(relative_path) if isinstance(relative_path, str) else None
    if parts is None or len(parts) < 2 or parts[0] != WORKFLOWS or not parts[-1].endswith(".json"):
        raise GraphsNameError(
            of("bad_workflow_path", root=WORKFLOWS, got=shown(relative_path)),
            remedy=of("do_save_plainly"),
        )
    file = _inside(root, root.joinpath(*parts), relative_path)
    return file if os.path.isfile(file) and file.name.endswith(".json") else None


def _left_behind(root: Path, beside: Path, workflow_id: str) -> Path | None:
    """Find the folder of a workflow that was renamed or moved away from it."""
    for folders in (_subfolders(beside), _graphs_folders(root)):
        orphans = [folder for folder in folders if _is_orphan_of(folder, workflow_id)]
        if orphans:
            return max(orphans, key=_last_used)
    return None


def _last_used(folder: Path) -> int:
    with suppress(OSError):
        return os.stat(folder / RECORD).st_mtime_ns
    return 0


def _is_orphan_of(folder: Path, workflow_id: str) -> bool:
    if not folder.name.endswith(SUFFIX):
        return False
    own = folder.name.removesuffix(SUFFIX) + ".json"
    if os.path.exists(folder.parent / own):
        return False
    record = read_record(folder)
    return (
        record is not None
        and record.id == workflow_id
        and record.workflow.rpartition("/")[2] == own  # else a folder with a name of its own
    )


def _bring_along(old: Path, new: Path, workflow: str) -> None:
    try:
        os.rename(old, new)
    except OSError as error:  # another run was quicker, or read-only: a new folder will do
        logger.info("Warmgraph: could not rename %s to %s: %s", old, new, error)
        return
    logger.info("Warmgraph: the workflow was renamed: its folder moved from %s to %s", old, new)
    record = read_record(new)
    if record is not None:
        with suppress(OSError):
            _write_record(new, record._replace(workflow=workflow))


def _write_record(folder: Path, record: FolderRecord) -> None:
    text = canonical_json({"format": _FORMAT, **record._asdict()})
    write_whole(folder / RECORD, text.encode())


def _graphs_folders(root: Path) -> Iterator[Path]:
    """Yield every `*.graphs` below `root`, nearest first, looking through a bounded number."""
    waiting = [root]
    for _ in range(_MAX_FOLDERS):
        if not waiting:
            return
        for folder in _subfolders(waiting.pop(0)):
            if folder.name.endswith(SUFFIX):
                yield folder
            else:
                waiting.append(folder)
    logger.info(
        "Warmgraph: looked through %d folders below %s and stopped there", _MAX_FOLDERS, root
    )


def _subfolders(folder: Path) -> list[Path]:
    """Return the folders in a folder, by name; links and hidden ones are left out."""
    with suppress(OSError), os.scandir(folder) as entries:
        return sorted(
            Path(entry.path)
            for entry in entries
            if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
        )
    return []


def _hidden_key(name: str) -> str | None:
    key = key_of(Path(name))
    return key if key and name == file_name(key, hidden=True) else None
