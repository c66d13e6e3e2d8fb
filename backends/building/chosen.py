"""Which builder a server has: workers of its own, or a build farm's before them.

Only `cli.py prebuild` starts a server that uses a farm; it names the scheduler in the environment.
A scheduler's address is no setting: whoever chooses it runs programs here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from ..events import Events
from ..host_api.process import portable_arguments
from .builder import Builder
from .contract import AnyBuilder

logger = logging.getLogger(__name__)

#: The scheduler's address, such as tls://HOST:8786; dask's own variables name certificates.
VARIABLE = "WARMGRAPH_SCHEDULER"


def make_builder(
    *, hello: dict[str, Any], time_limit_s: Callable[[], float], events: Events, **local: Any
) -> AnyBuilder:
    """Make the builder of this process.

    Args:
        See `Builder`.
    """
    builder = Builder(hello=hello, time_limit_s=time_limit_s, events=events, **local)
    scheduler = os.environ.get(VARIABLE, "")
    if not scheduler or not hello:  # nothing is built without the host
        return builder
    try:
        from .farm import FarmBuilder, connect

        return FarmBuilder(
            connect(scheduler),
            builder,
            hello=portable_arguments(hello),
            time_limit_s=time_limit_s,
            events=events,
        )
    except ImportError as error:
        why = f"{error}; pip install distributed"
    except (OSError, ValueError) as error:
        why = str(error) or type(error).__name__
    logger.warning("Build farm %s is not reached, so all is built here: %s", scheduler, why)
    return builder
