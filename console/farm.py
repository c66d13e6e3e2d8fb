"""The console's side of a build farm: `build-worker`, and what `prebuild` asks of a scheduler."""

from __future__ import annotations

import importlib.util
import ipaddress
import logging
import sys
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from .output import say, stop

_PACKAGE = "distributed"
#: Of `building.chosen`; and dask's own, for a client's certificates.
_SCHEDULER = "WARMGRAPH_SCHEDULER"
_CLIENT = {
    "ca_file": "DASK_DISTRIBUTED__COMM__TLS__CA_FILE",
    "certificate": "DASK_DISTRIBUTED__COMM__TLS__CLIENT__CERT",
    "key": "DASK_DISTRIBUTED__COMM__TLS__CLIENT__KEY",
}
_PATIENCE_S = 10.0


class Certificates(NamedTuple):
    """Files of TLS, as dask's own commands take them; None: as dask's configuration says."""

    ca_file: Path | None = None
    certificate: Path | None = None
    key: Path | None = None


def scheduler_environment(scheduler: str, certificates: Certificates) -> dict[str, str]:
    """Return what a server's environment needs to have its builds done by a farm."""
    named = certificates._asdict().items()
    files = {_CLIENT[name]: str(path.resolve()) for name, path in named if path is not None}
    return {_SCHEDULER: scheduler, **files}


def look_at(scheduler: str, certificates: Certificates) -> str | None:
    """Say who works for a scheduler.

    Returns:
        Why it cannot be asked; None where it can.
    """
    if (problem := _problem(scheduler, "client", certificates)) is not None:
        return problem
    warn_of_plain(scheduler)
    from distributed import Client

    security = _security("client", certificates)
    try:
        with Client(
            scheduler, timeout=_PATIENCE_S, security=security, set_as_default=False
        ) as client:
            count = len(client.nthreads())
    except (OSError, ValueError) as error:
        return f"{scheduler} is not reached: {error}"
    say(f"{scheduler} has {count} workers")
    return None


def build_worker(
    scheduler: str, comfyui: Path, certificates: Certificates, *, name: str | None, port: int
) -> int:
    """Build for a scheduler.

    Returns:
        0 when it was told to end, 1 when the scheduler was not reached or is gone.
    """
    if (problem := _problem(scheduler, "worker", certificates)) is not None:
        return stop(problem)
    warn_of_plain(scheduler)
    from warmgraph_backends.building.farm_worker import serve

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger(_PACKAGE).setLevel(logging.WARNING)  # it has said otherwise at its import
    security = _security("worker", certificates)
    try:
        told = serve(scheduler, comfyui, name=name, port=port, security=security, say=say)
    except (OSError, ValueError) as error:
        say(f"{scheduler} is not reached: {error}", sys.stderr)
        return 1
    if not told:
        say(f"{scheduler} is gone", sys.stderr)
    return 0 if told else 1


def _problem(scheduler: str, role: str, certificates: Certificates) -> str | None:
    """Say why nobody here can speak with a scheduler, or None."""
    address = urlsplit(scheduler)
    if address.scheme not in ("tcp", "tls") or not address.hostname:
        return f"a scheduler's address must be tls://HOST:PORT or tcp://HOST:PORT, got {scheduler}"
    if importlib.util.find_spec(_PACKAGE) is None:
        return f"a build farm needs {_PACKAGE}: {sys.executable} -m pip install {_PACKAGE}"
    if address.scheme == "tls":
        try:
            arguments = _security(role, certificates).get_connection_args(role)
            if arguments["ssl_context"] is None:
                return f"{scheduler} needs --tls-ca-file, --tls-cert and --tls-key"
        except OSError as error:
            return f"the certificates cannot be read: {error}"
    return None


def warn_of_plain(scheduler: str) -> None:
    """Say what an address without TLS means, unless it is this machine's own."""
    address = urlsplit(scheduler)
    if address.scheme != "tls" and not _is_local(address.hostname or ""):
        say(
            f"{scheduler} is without TLS: whoever reaches it runs programs on every machine of "
            "the farm; it must be on a network of its own",
            sys.stderr,
        )


def _is_local(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _security(role: str, certificates: Certificates) -> Any:
    """Dask's words for certificates; what is not named is as dask's configuration says."""
    from distributed import Security

    names = ("tls_ca_file", f"tls_{role}_cert", f"tls_{role}_key")
    pairs = zip(names, certificates, strict=True)
    return Security(**{name: str(path) for name, path in pairs if path is not None})
