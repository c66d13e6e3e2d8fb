"""In a worker: other packs' files run as the server ran them, for one job, and undone after it."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ..contract import PackFile
from ..errors import BuildError
from ..reasons import Reason, of
from .packs import origin
from .replaced import blame

_HOMES = ("comfy", "torch.nn", "torch.functional")
_NOTHING = object()
#: What a dictionary can be asked and told.
_LOOKS = (
    *("__getitem__", "__setitem__", "__delitem__", "__contains__", "__iter__", "__len__"),
    *("__eq__", "__or__", "__ior__", "get", "keys", "values", "items"),
    *("pop", "popitem", "setdefault", "update", "copy", "clear"),
)


class _Change(NamedTuple):
    """A name in a module or class that a pack's file changed."""

    owner: Any
    name: str
    before: Any
    after: Any


class PackCode:
    """What other packs' files put in place of the host's code while a job runs."""

    def __init__(self, files: Sequence[PackFile], changes: Sequence[_Change] = ()) -> None:
        self._files = files
        self._changes = changes

    @property
    def any(self) -> bool:
        """Whether there are such files at all."""
        return bool(self._files)

    def blame(self, problem: Reason) -> Reason:
        """Describe a problem with the packs' names."""
        packs = ", ".join(dict.fromkeys(file.pack for file in self._files))
        return blame(packs, ", ".join(dict.fromkeys(f.replaces for f in self._files)), problem)

    def check_options(self, run: Callable[[], Any]) -> None:
        """Run a region once, and refuse it if a pack's code reads the step's options.

        A graph is made with empty options, as in the host without patches.

        Raises:
            BuildError: it does.
        """
        readers: list[str] = []
        modules = {file.module for file in self._files}
        paths = {file.path for file in self._files}
        replaced = [c for c in self._changes if origin(c.after) in modules]
        for change in replaced:
            setattr(change.owner, change.name, _telling(change.after, paths, readers))
        try:
            run()
        finally:
            for change in replaced:
                setattr(change.owner, change.name, change.after)
        if readers:
            raise BuildError(self.blame(of("uses_options")))


@contextlib.contextmanager
def transplanted(files: Sequence[PackFile]) -> Iterator[PackCode]:
    """Within this, the host is as other packs' files change it.

    Args:
        files: in import order; each is run from its text, as the module of its name, with its
            pack's folder on `sys.path`. Nothing else of a pack is run unless the file imports it.

    Raises:
        BuildError: a file does not run by itself.
    """
    if not files:
        yield PackCode(())
        return
    before, modules, path = _snapshot(), dict(sys.modules), list(sys.path)
    changes: list[_Change] = []
    try:
        try:
            for file in files:
                _execute(file)
        finally:
            # Now: what a build changes later in torch's classes is not to be undone.
            changes = _changes(before)
        yield PackCode(files, changes)
    finally:
        for change in changes:
            if change.before is _NOTHING:
                delattr(change.owner, change.name)
            else:
                setattr(change.owner, change.name, change.before)
        sys.path[:] = path
        roots = {f.parents[0][0] if f.parents else f.module for f in files}
        for name in [n for n in sys.modules if any(_is_within(n, root) for root in roots)]:
            if name in modules:
                sys.modules[name] = modules[name]
            else:
                del sys.modules[name]


def _execute(file: PackFile) -> None:
    def refuse(problem: Reason, cause: BaseException | None = None) -> BuildError:
        error = BuildError(blame(file.pack, file.replaces, problem))
        error.__cause__ = cause
        return error

    if hashlib.sha256(file.text.encode()).hexdigest() != file.sha256:
        raise refuse(of("text_not_whole"))
    if file.folder and file.folder not in sys.path:
        sys.path.append(file.folder)
    for name, folder in file.parents:
        if name not in sys.modules:
            parent = types.ModuleType(name)
            parent.__path__ = [folder]
            sys.modules[name] = parent
    module = types.ModuleType(file.module)
    module.__file__ = file.path
    module.__package__ = file.module.rpartition(".")[0]
    loader = _Text(file)
    module.__spec__ = importlib.machinery.ModuleSpec(file.module, loader, origin=file.path)
    sys.modules[file.module] = module
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise refuse(Reason.plain(f"{type(error).__name__}: {error}"), error) from error


class _Text(importlib.abc.InspectLoader):
    """An importer of a module's text, which came with the job."""

    def __init__(self, file: PackFile) -> None:
        self._file = file

    def get_source(self, fullname: str) -> str:
        return self._file.text

    def get_code(self, fullname: str) -> types.CodeType:
        return self.source_to_code(self._file.text, self._file.path)


def _snapshot() -> list[tuple[Any, dict[str, Any]]]:
    """The namespaces of the host's modules and classes, and of torch's on which layers depend."""
    owners: dict[int, tuple[Any, dict[str, Any]]] = {}
    for name, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType) and (name == "torch" or name.startswith(_HOMES)):
            owners[id(module)] = (module, dict(vars(module)))
    pending = [value for _, names in list(owners.values()) for value in names.values()]
    while pending:
        value = pending.pop()
        if isinstance(value, type) and id(value) not in owners:
            home = value.__module__
            if isinstance(home, str) and home.startswith(("comfy", "torch")):
                owners[id(value)] = (value, dict(vars(value)))
                pending += owners[id(value)][1].values()
    return list(owners.values())


def _changes(before: Sequence[tuple[Any, dict[str, Any]]]) -> list[_Change]:
    found = []
    for owner, names in before:
        now = vars(owner)
        for name, value in names.items():
            after = now.get(name, _NOTHING)
            if after is not value and _counts(owner, value, after):
                found.append(_Change(owner, name, value, after))
        if isinstance(owner, type):
            new = now.keys() - names.keys()
            found += [
                _Change(owner, n, _NOTHING, now[n]) for n in new if not n.startswith("__abstract")
            ]
    return found


def _counts(owner: Any, before: Any, after: Any) -> bool:
    """Torch's own counters and caches do not come from a pack."""
    of_torch = isinstance(owner, types.ModuleType) and owner.__name__.startswith("torch")
    return not of_torch or callable(before) or callable(after)


def _is_within(name: str, root: str) -> bool:
    return name == root or name.startswith(f"{root}.")


def _noting(name: str) -> Callable[..., Any]:
    plain = getattr(dict, name)

    def method(self: Any, *args: Any, **named: Any) -> Any:
        file = sys._getframe(1).f_code.co_filename
        if file in self.paths:
            self.readers.append(file)
        return plain(self, *args, **named)

    return method


class _Options(dict[str, Any]):
    """A step's options that note which files' code reads them."""

    def __init__(self, values: dict[str, Any], paths: set[str], readers: list[str]) -> None:
        super().__init__(values)
        self.paths, self.readers = paths, readers


for _look in _LOOKS:
    setattr(_Options, _look, _noting(_look))


def _telling(function: Any, paths: set[str], readers: list[str]) -> Callable[..., Any]:
    def noted(value: Any) -> Any:
        return _Options(value, paths, readers) if type(value) is dict else value

    def told(*args: Any, **named: Any) -> Any:
        return function(*map(noted, args), **{key: noted(value) for key, value in named.items()})

    return told
