"""`build-worker`: builds for servers that ask a scheduler, until it is gone."""

from __future__ import annotations

import importlib.util
import ipaddress
import logging
import shutil
import sys
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from .output import say, stop

EXTRA = "distributed"
#: Dask's own variables for certificates, by what they are for.
_CLIENT = {
    "ca_file": "DASK_DISTRIBUTED__COMM__TLS__CA_FILE",
    "certificate": "DASK_DISTRIBUTED__COMM__TLS__CLIENT__CERT",
    "key": "DASK_DISTRIBUTED__COMM__TLS__CLIENT__KEY",
}
_SCHEDULER = "WARMGRAPH_SCHEDULER"


class Certificates(NamedTuple):
    """Files of TLS, as `dask worker` takes them; None: as dask's configuration says."""

    ca_file: Path | None = None
    certificate: Path | None = None
    key: Path | None = None


def scheduler_environment(scheduler: str, certificates: Certificates) -> dict[str, str]:
    """Return what a server's environment needs to have its builds done by a scheduler's workers."""
    named = certificates._asdict().items()
    files = {_CLIENT[name]: str(path.resolve()) for name, path in named if path is not None}
    return {_SCHEDULER: scheduler, **files}


def farm_problem(scheduler: str) -> str | None:
    """Say why nobody here can speak with a scheduler, or None."""
    if importlib.util.find_spec(EXTRA) is None:
        return f"a build farm needs the package {EXTRA}: {sys.executable} -m pip install {EXTRA}"
    if urlsplit(scheduler).scheme not in ("tcp", "tls") or not urlsplit(scheduler).hostname:
        return f"SCHEDULER must be tls://HOST:PORT or tcp://HOST:PORT, got {scheduler!r}"
    return None


def warn_of_plain(scheduler: str) -> None:
    """Say what an address without TLS means, unless it is this machine's."""
    address = urlsplit(scheduler)
    if address.scheme == "tls" or _is_local(address.hostname or ""):
        return
    say(
        f"{scheduler} is without TLS: whoever reaches it runs programs on every machine of this "
        "farm; use a private network, or tls:// with certificates",
        sys.stderr,
    )


def build_worker(
    scheduler: str, comfyui: Path, certificates: Certificates, *, name: str | None, port: int
) -> int:
    """Build for a scheduler.

    Returns:
        0 when it was told to end, 1 when the scheduler was not reached or is gone.
    """
    if (problem := farm_problem(scheduler)) is not None:
        return stop(problem)
    if shutil.which("c++") is None and shutil.which("g++") is None and sys.platform != "win32":
        say("there is no C++ compiler here (c++, g++): graphs for a processor are refused")
    warn_of_plain(scheduler)
    from distributed import Security

    from warmgraph_backends.building.farm_worker import serve

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger(EXTRA).setLevel(logging.WARNING)  # it has said otherwise at its import
    security = None
    if certificates != Certificates():
        security = Security(
            tls_ca_file=_text(certificates.ca_file),
            tls_worker_cert=_text(certificates.certificate),
            tls_worker_key=_text(certificates.key),
            require_encryption=True,
        )
    try:
        told = serve(scheduler, comfyui, name=name, port=port, security=security, say=say)
    except (OSError, ValueError) as error:
        say(f"{scheduler} is not reached: {error}", sys.stderr)
        return 1
    if not told:
        say(f"{scheduler} is gone", sys.stderr)
    return 0 if told else 1


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _is_local(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
