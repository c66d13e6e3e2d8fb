"""Whether a layer's call is code known here: another version may do more."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import CodeType
from typing import Any

from .layers import FORWARDS
from .present import names_in

logger = logging.getLogger(__name__)


class KnownCalls:
    """The known code of some classes' calls."""

    def __init__(self, whose: str, named: Mapping[str, frozenset[str]]) -> None:
        """Set up.

        Args:
            whose: layers, for the log.
            named: by method, all known names in its code.
        """
        self._whose, self._named = whose, named
        self._own = frozenset((*named, *FORWARDS))
        #: By ids of code objects, whether no name in them is unknown: classes are made for
        #: each file that is loaded, all of the same code. They are kept, so that an id stays its
        #: own.
        self._answers: dict[tuple[int, ...], tuple[list[CodeType], bool]] = {}

    def are_of(self, cls: Any) -> bool:
        """Tell whether a class has all these methods, naming nothing else."""
        found = [getattr(getattr(cls, name, None), "__code__", None) for name in self._named]
        codes = [code for code in found if isinstance(code, CodeType)]
        if len(codes) < len(found):
            return False
        asked = tuple(map(id, codes))
        if asked not in self._answers:
            self._answers[asked] = codes, self._are_known(codes)
        return self._answers[asked][1]

    def is_untouched(self, layer: Any) -> bool:
        """Tell whether such a layer has no hooks and no methods of its own (another node's)."""
        return layer.__dict__.keys().isdisjoint(self._own) and not (
            layer._forward_hooks or layer._forward_pre_hooks
        )

    def _are_known(self, codes: list[CodeType]) -> bool:
        for code, known in zip(codes, self._named.values(), strict=True):
            unknown = set(names_in(code)) - known
            if unknown:
                logger.info(
                    "%s are called as they are: %s names %s",
                    self._whose,
                    code.co_name,
                    min(unknown),
                )
                return False
        return True
