"""Notes what a block reads of its step's options."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any

from ..errors import LearnError
from ..host_api.options import ATTENTION, PATCHES, REPLACEMENTS
from ..reasons import of

#: Stands for what is not there.
ABSENT = "<absent>"
_OF_NODES = (PATCHES, REPLACEMENTS)
#: Known by what is in them, or called: not by their values.
_NO_VALUES = frozenset((*_OF_NODES, ATTENTION))
_PLAIN = (bool, int, float, str, type(None))


class ReadOptions(dict[str, Any]):
    """A step's options; only copies may be written into."""

    def __init__(self, values: Mapping[str, Any], reads: Reads, part: str = "") -> None:
        super().__init__(values)
        self._reads, self._part = reads, part
        #: Of a copy: what was written into it.
        self._own: set[Any] | None = None

    def _note(self, key: Any) -> None:
        if self._own is None or key not in self._own:
            self._reads.note(self._part, key, dict.get(self, key, ABSENT))

    def _inner(self, key: Any, value: Any) -> Any:
        if key in _OF_NODES and not self._part:
            return ReadOptions(value or {}, self._reads, key)
        return value

    def get(self, key: Any, default: Any = None) -> Any:
        self._note(key)
        return self._inner(key, dict.get(self, key, default))

    def __getitem__(self, key: Any) -> Any:
        self._note(key)
        return self._inner(key, dict.__getitem__(self, key))

    def __contains__(self, key: Any) -> bool:
        if key in _NO_VALUES:
            self._reads.note_whether(self._part, key, dict.get(self, key, ABSENT))
        self._note(key)
        return dict.__contains__(self, key)

    def copy(self) -> Any:
        made = ReadOptions(dict(dict.items(self)), self._reads, self._part)
        made._own = set(self._own or ())
        return made

    __copy__ = copy

    def _all(self, what: str) -> Any:
        self._reads.whole.add(self._part)
        return partial(getattr(dict, what), self)

    def items(self) -> Any:
        return self._all("items")()

    def keys(self) -> Any:
        return self._all("keys")()

    def values(self) -> Any:
        return self._all("values")()

    def __iter__(self) -> Any:
        return self._all("__iter__")()

    def __reversed__(self) -> Any:
        return self._all("__reversed__")()

    def __len__(self) -> int:
        return int(self._all("__len__")())

    def __repr__(self) -> str:
        return str(self._all("__repr__")())

    def __eq__(self, other: object) -> bool:
        return bool(self._all("__eq__")(other))

    def __ne__(self, other: object) -> bool:
        return bool(self._all("__ne__")(other))

    def __or__(self, other: Any) -> Any:
        return self._all("__or__")(other)

    def __ror__(self, other: Any) -> Any:
        return self._all("__ror__")(other)

    def __setitem__(self, key: Any, value: Any) -> None:
        if self._own is None:
            raise LearnError(of("learned_writes_options"))
        self._own.add(key)
        dict.__setitem__(self, key, value)

    def _write(self, *_: Any, **__: Any) -> Any:
        raise LearnError(of("learned_writes_options"))

    __delitem__ = update = pop = popitem = setdefault = clear = __ior__ = _write


class Reads:
    """What was read in one call.

    Attributes:
        values: of the options, by name.
        patches: names that were looked for among patches and replacements of other nodes.
        whole: which of them were iterated over; "" stands for the options themselves.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.patches: set[str] = set()
        self.whole: set[str] = set()

    def note(self, part: str, key: str, value: Any) -> None:
        """Note one read."""
        if part:
            self.patches.add(key)
        elif key not in _NO_VALUES:
            self.values.setdefault(key, value)

    def note_whether(self, part: str, key: str, value: Any) -> None:
        """Note a test for an option that is otherwise handled by its contents."""
        if not part:
            self.values.setdefault(key, value)

    def unseen(self, counting: Collection[str]) -> set[str]:
        """Return the names of options that change what is computed but whose reads were not seen,
        as by `dict.get(options, name)`.
        """
        return set(counting) - {*self.values, *_NO_VALUES}

    def facts(self, counting: Collection[str], attributes: Iterable[str]) -> dict[str, Any]:
        """Return it as JSON-plain data: "options" (name and value of each that counts), "idle"
        (names of the others present), "patches", "whole", and "attributes".

        Args:
            counting: names of options that change what is computed.
            attributes: names of attributes that are read besides those that code names.

        Raises:
            LearnError: it is more than can be compared at each call.
        """
        if "" in self.whole:
            raise LearnError(of("learned_all_options"))
        absent = {name for name, value in self.values.items() if value is ABSENT}
        idle = sorted(self.values.keys() - absent - {*counting, *_NO_VALUES})
        options = [(n, self.values[n]) for n in sorted(self.values.keys() - set(idle))]
        for name, value in options:
            if type(value) not in _PLAIN or (name in _NO_VALUES and value is not ABSENT):
                raise LearnError(of("learned_option_sort", name=name, sort=type(value).__name__))
        return {
            "options": [[name, value] for name, value in options],
            "idle": idle,
            "attributes": sorted(attributes),
            "patches": sorted(self.patches),
            "whole": sorted(self.whole),
        }
