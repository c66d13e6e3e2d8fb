"""Tells the host's exceptions, which pass through, from ours, which switch DeepCache off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class OwnError(Exception):
    """DeepCache's own code failed where the host or another node called it; the cause is chained.
    The call is to be made as the host makes it.
    """


@contextmanager
def own_part() -> Iterator[None]:
    """Mark what is raised within as DeepCache's own: no code of the host's runs there."""
    try:
        yield
    except Exception as error:
        raise OwnError(f"{type(error).__name__}: {error}") from error
