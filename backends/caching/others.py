"""Other packs' caches over steps, which decide what of a step is computed.

They hook in at various places (a function around the model's call, a host wrapper, a forward in
place of the model's own), and what they skip shows only once they do. But all of them have a cache
in their names, by which they are recognised.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from typing import Any

from ..code.bytecode import codes
from ..code.packs import OWN, origin, owner_of, unbound
from ..host_api import models
from ..host_api.options import EASY_CACHE, TRANSFORMER
from ..host_api.patcher import named_wrappers
from ..reasons import Reason, of

#: In names that code has, and asks options for: but for giving memory back, and for caches of
#: Python and of compilers.
_CACHE = re.compile(r"(?<!empty_)(?<!lru_)cach(?!e_(?:size|info|clear)|ed_property)", re.IGNORECASE)
#: What anything may be called, a dict of sizes too.
_ANY = "cache"
_HOSTS = "EasyCache / LazyCache"


def other_cache(patcher: Any, options: Any) -> Reason | None:
    """Say whose cache decides about a run's steps, None if none does.

    Args:
        patcher: the MODEL that runs; None if the host does not say.
        options: of the sampler's run.
    """
    if EASY_CACHE in options.get(TRANSFORMER, {}):
        return of("other_cache", owner=_HOSTS)
    for name, function in _around(patcher, options):
        code = _code_of(function)
        if origin(code).startswith(OWN) or str(code.__module__ or "").startswith(OWN):
            continue
        names = {name, *_names(code)} - {_ANY}
        if any(map(_CACHE.search, names)):
            return of("other_cache", owner=owner_of(code))
    return None


def _around(patcher: Any, options: Any) -> Iterator[tuple[str, Any]]:
    """Yield what is put around a model's call or in place of it, and its name."""
    yield from named_wrappers(options.get(TRANSFORMER, {}))
    if patcher is None:
        return
    for function in models.calls_replaced(patcher):
        yield "", function
    root = models.diffusion_model(patcher)
    own = ((n, v) for n, v in vars(root).items() if callable(v) and not isinstance(v, type))
    yield from ((name, value) for name, value in own if callable(getattr(type(root), name, None)))


def _code_of(function: Any) -> Any:
    """The function that is called in the end, or the class of what is called."""
    function = unbound(function)
    is_plain = isinstance(function, (types.FunctionType, types.BuiltinFunctionType, type))
    return function if is_plain else type(function)


def _names(code: Any) -> Iterator[str]:
    """The names of a function or class, in its code, and of the options that it reads."""
    yield str(code.__name__)
    methods = vars(code).values() if isinstance(code, type) else [code]
    for method in methods:
        if not isinstance(method, types.FunctionType):
            continue
        for each in codes(method.__code__):
            yield from (*each.co_freevars, *each.co_varnames)
            yield from (text for text in each.co_consts[1:] if isinstance(text, str))
