"""What a URL may begin with, what that needs installed, and how a URL and an error are told."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from ..reasons import Reason, of
from ..storing.public_keys import install


class Scheme(NamedTuple):
    """A way to a store.

    Attributes:
        module: what Python imports for it; empty where nothing is.
        package: what pip calls that.
        writes: whether files can be sent there.
        lists: whether it surely tells what is there; else all is asked for by its name.
    """

    module: str = ""
    package: str = ""
    writes: bool = True
    lists: bool = True


_S3, _GCS = Scheme("s3fs", "s3fs"), Scheme("gcsfs", "gcsfs")
_AZURE = Scheme("adlfs", "adlfs")
_HTTP = Scheme("aiohttp", "aiohttp", writes=False, lists=False)
SCHEMES = {
    "file": Scheme(),
    "memory": Scheme("fsspec", "fsspec"),
    "s3": _S3,
    "gs": _GCS,
    "gcs": _GCS,
    "az": _AZURE,
    "abfs": _AZURE,
    "http": _HTTP,
    "https": _HTTP,
    "hf": Scheme("huggingface_hub", "huggingface_hub", writes=False),
}
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]*")
_SHOWN = 200


def scheme_of(url: str) -> str:
    """Return what a URL begins with, without the colon."""
    return url.partition("://")[0].lower()


def why_not(url: str) -> str | None:
    """Say why a URL leads to no store, without repeating it; None if it may."""
    scheme = scheme_of(url)
    if "://" not in url or scheme not in SCHEMES or "::" in url:
        return f"must begin with one of {', '.join(f'{name}://' for name in SCHEMES)}"
    try:
        parts = urlsplit(url)
    except ValueError:
        return "is no URL"
    if parts.query or parts.fragment:
        return "must have neither ? nor #: give tokens and endpoints in options"
    return None


def missing_package(url: str) -> Reason | None:
    """Say what to install for a URL; nothing is imported."""
    scheme = SCHEMES[scheme_of(url)]
    if not scheme.module or importlib.util.find_spec(scheme.module) is not None:
        return None
    what = f"a store at {scheme_of(url)}://"
    return of("package_missing", what=what, package=scheme.package, command=install(scheme.package))


def redacted(url: str) -> str:
    """Return a URL without a user's name and password."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def told(error: BaseException, secrets: frozenset[str] = frozenset()) -> str:
    """Return an error of a library in a line that holds no URL and none of the secrets."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    text = _URL.sub("its address", text)
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    name = type(error).__name__
    return f"{name}: {text[:_SHOWN]}" if text else name


def secrets_of(url: str, options: Mapping[str, Any]) -> frozenset[str]:
    """Return what of a URL and its options nobody is to read: user info, and every text."""
    user = urlsplit(url).netloc.rpartition("@")[0]
    words = {user, *user.split(":"), *map(unquote, user.split(":"))}
    pending: list[Any] = [dict(options)]
    while pending:
        value = pending.pop()
        if isinstance(value, Mapping):
            pending += value.values()
        elif isinstance(value, (list, tuple)):
            pending += value
        elif isinstance(value, str):
            words.add(value)
    return frozenset(word for word in words if len(word) > 3)
