"""Whether this host has the private names that we use.

A host without one runs without the features that need it, and never fails by it.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import sys
import types
from collections.abc import Collection, Iterator, Mapping
from functools import reduce
from typing import Any

from ..reasons import Reason, of
from .needs import NEEDS, Feature, Need

logger = logging.getLogger(__name__)


def missing(needs: Collection[Need] = NEEDS) -> dict[Feature, Reason]:
    """Return the features this host lacks a name for, with that name. Imports and calls nothing."""
    found: dict[Feature, list[Reason]] = {}
    for need in needs:
        if (problem := _problem(need)) is not None:
            for feature in need.features:
                found.setdefault(feature, []).append(problem)
    return {feature: _words(problems) for feature, problems in found.items()}


def why_off(off: Mapping[Feature, Reason], feature: Feature) -> Reason | None:
    """Return why a feature is off by `missing`, or None."""
    reason = off.get(Feature.EVERYTHING) or off.get(feature)
    return None if reason is None else of("feature_off", feature=feature.value, why=reason)


def look() -> dict[Feature, Reason]:
    """Return what `missing` does, and log it once; if everything is off, only that."""
    off = missing()
    for feature in [Feature.EVERYTHING] if Feature.EVERYTHING in off else off:
        logger.warning("%s", why_off(off, feature))
    return off


def _words(problems: list[Reason]) -> Reason:
    first, *more = problems
    return of("and_more", one=first, count=len(more)) if more else first


def _problem(need: Need) -> Reason | None:
    """How a name is not as needed, or None."""
    module_name, _, path = need.name.partition(":")
    dotted = f"{module_name}.{path}"
    module = sys.modules.get(module_name)
    if module is None:  # the host has it for later, or not at all
        return None if _exists(module_name) else of("name_gone", name=module_name)
    try:
        found: Any = reduce(getattr, path.split("."), module)
    except AttributeError:
        return of("name_gone", name=dotted)
    if need.call is not None and not _takes(found, need.call):
        return of("takes_others", name=dotted, arguments=need.call.replace("=", ""))
    if need.names:
        known = _names(found, module_name)
        lost = [] if known is None else [name for name in need.names if name not in known]
        if lost:
            return of("knows_no", name=dotted, part=lost[0])
    return None


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _takes(function: Any, call: str) -> bool:
    """Tell whether a function takes the arguments of a call."""
    parts = [part.strip() for part in call.split(",") if part.strip()]
    named = [part[:-1] for part in parts if part.endswith("=")]
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # it does not say
        return True
    try:
        signature.bind(*parts[: len(parts) - len(named)], **dict.fromkeys(named))
    except TypeError:
        return False
    return True


def _names(found: Any, home: str) -> frozenset[str] | None:
    """Every name and text in a function's or an `__init__`'s code; None if it is another's."""
    function = inspect.unwrap(vars(found)["__init__"] if isinstance(found, type) else found)
    code = getattr(function, "__code__", None)
    if code is None or getattr(function, "__module__", home) != home:
        return None
    return frozenset(names_in(code))


def names_in(code: types.CodeType) -> Iterator[str]:
    """Yield every name and text in code, inner functions included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple):  # the keys of a dict that is written out
            yield from (key for key in constant if isinstance(key, str))
        elif isinstance(constant, types.CodeType):
            yield from names_in(constant)
