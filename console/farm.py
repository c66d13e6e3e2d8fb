"""The console's side of a build farm: `build-worker`, and what `prebuild` asks of a scheduler."""

from __future__ import annotations

import importlib.util
import ipaddress
import logging
import sys
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from .output import say, stop

_PACKAGE = "distributed"
#: Of `building.farm`.
_SCHEDULER = "WARMGRAPH_SCHEDULER"
_PATIENCE_S = 10.0


class Certificates(NamedTuple):
    """Files of TLS, as dask's own commands take them; None: as dask's configuration says."""

    ca_file: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def settings(self, role: str) -> dict[str, str]:
        """Return dask's settings for a "client" or "worker" that has them."""
        names = ("ca-file", f"{role}.cert", f"{role}.key")
        named = zip(names, self, strict=True)
        return {f"distributed.comm.tls.{name}": str(p.resolve()) for name, p in named if p}


def scheduler_environment(scheduler: str, certificates: Certificates) -> dict[str, str]:
    """Return what a server's environment needs to have its builds done by a farm."""
    settings = certificates.settings("client").items()
    named = {name.upper().replace(".", "__").replace("-", "_"): path for name, path in settings}
    return {_SCHEDULER: scheduler, **{f"DASK_{name}": path for name, path in named.items()}}


def look_at(scheduler: str, certificates: Certificates) -> str | None:
    """Say who works for a scheduler.

    Returns:
        Why it cannot be asked; None where it can.
    """
    if (problem := _prepare(scheduler, "client", certificates)) is not None:
        return problem
    from distributed import Client

    try:
        with Client(scheduler, timeout=_PATIENCE_S, set_as_default=False) as client:
            say(f"{scheduler} has {len(client.nthreads())} workers")
    except (OSError, ValueError) as error:
        return f"{scheduler} is not reached: {error}"
    return None


def build_worker(
    scheduler: str, comfyui: Path, certificates: Certificates, *, name: str | None, port: int
) -> int:
    """Build for a scheduler.

    Returns:
        0 when it was told to end; 1 when the scheduler was not reached or is gone, or nothing can
        be built here.
    """
    if (problem := _prepare(scheduler, "worker", certificates)) is not None:
        return stop(problem)
    from warmgraph_backends.building.farm_worker import serve

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger(_PACKAGE).setLevel(logging.ERROR)  # what a build says, we say
    try:
        ended = serve(scheduler, comfyui, name=name, port=port, say=say)
    except (OSError, ValueError) as error:
        ended = f"{scheduler} is not reached: {error}"
    if ended is not None:
        say(ended, sys.stderr)
    return 0 if ended is None else 1


def _prepare(scheduler: str, role: str, certificates: Certificates) -> str | None:
    """Have dask use the certificates; returns why nobody here can speak with the scheduler."""
    address = urlsplit(scheduler)
    if address.scheme not in ("tcp", "tls") or not address.hostname:
        return f"a scheduler's address must be tls://HOST:PORT or tcp://HOST:PORT, got {scheduler}"
    if importlib.util.find_spec(_PACKAGE) is None:
        return f"a build farm needs {_PACKAGE}: {sys.executable} -m pip install {_PACKAGE}"
    import dask
    from distributed import Security

    dask.config.set(certificates.settings(role))
    if address.scheme == "tls":
        try:
            if Security().get_connection_args(role)["ssl_context"] is None:
                return f"{scheduler} needs --tls-ca-file, --tls-cert and --tls-key"
        except OSError as error:
            return f"the certificates cannot be read: {error}"
    warn_of_plain(scheduler)
    return None


def warn_of_plain(scheduler: str) -> None:
    """Say what an address without TLS means, unless it is this machine's own."""
    address = urlsplit(scheduler)
    with_tls, host = address.scheme == "tls", address.hostname or ""
    try:
        is_local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = False
    if not with_tls and not is_local:
        say(
            f"{scheduler} is without TLS: whoever reaches it runs programs on every machine of "
            "the farm; it must be on a network of its own",
            sys.stderr,
        )
