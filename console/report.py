"""`report` asks a running server what it has compiled, over its own GET route."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any

from .output import say_lines, stop

ROUTE = "/warmgraph/report"
#: Of an answer, in bytes; a server's is a few hundred thousand.
MAX_ANSWER = 64 << 20
_PATIENCE_S = 20.0


def report(url: str, *, as_json: bool) -> int:
    """Print what a server reports: in words, or as it sent it.

    Args:
        url: of the server, for example "http://127.0.0.1:8188".
        as_json: for machines: the answer itself, indented.
    """
    try:
        answer = _ask(url)
        if as_json:
            say_lines(json.dumps(answer, indent=2, sort_keys=True))
            return 0
        lines = _lines(answer)
    except _NoReportError as error:
        return stop(str(error))
    for line in lines:
        say_lines(line)
    return 0


class _NoReportError(Exception):
    """A server gave no report; the text says why and what to do."""


def _ask(url: str) -> dict[str, Any]:
    address = url.rstrip("/") + ROUTE
    remedy = "start ComfyUI, or name its address: cli.py report --url http://HOST:PORT"
    try:
        request = urllib.request.Request(address, headers={"Accept": "application/json"})
        if request.type not in ("http", "https"):
            raise ValueError(f"it must begin with http:// or https://, got {request.type}")
        # A local server is not asked through a proxy.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=_PATIENCE_S) as response:
            data = response.read(MAX_ANSWER + 1)
    except urllib.error.HTTPError as error:
        if error.code == 404:
            why = "has no Warmgraph; look for IMPORT FAILED in its log, at its start"
        else:
            why = f"answers {error.code}: {error.reason}; its log says more"
        raise _NoReportError(f"the server at {url} {why}") from error
    except urllib.error.URLError as error:
        raise _NoReportError(f"no server answers at {url} ({error.reason}); {remedy}") from error
    except (OSError, HTTPException) as error:
        raise _NoReportError(f"no server answers at {url} ({error}); {remedy}") from error
    except ValueError as error:
        raise _NoReportError(f"{url} is no server's address: {error}; {remedy}") from error
    try:
        if len(data) > MAX_ANSWER:
            raise ValueError(f"it is larger than {MAX_ANSWER >> 20} MiB")
        answer = json.loads(data)
        if not isinstance(answer, dict) or not isinstance(answer.get("models"), list):
            raise ValueError("it is no report")
    except (ValueError, RecursionError) as error:
        words = f"what answers at {url} is no server with Warmgraph ({error}); {remedy}"
        raise _NoReportError(words) from error
    return answer


def _lines(answer: dict[str, Any]) -> list[str]:
    """A report in words; each entry may have several lines."""
    try:
        models, caches = answer["models"], answer["deepcaches"]
        building, store = answer["building"], answer["store"]
        lines = [str(each["text"]) for each in (*models, *caches)]
        if not lines:
            lines.append("no model has come through a node of Warmgraph yet")
        if building["done"] < building["total"]:
            lines.append(f"building {building['done']} of {building['total']} graphs")
        lines.append(
            f"this server: {answer['builds']} graphs built, {answer['loads']} loaded; "
            f"store: {store['files']} files, {store['bytes'] / 2**20:.1f} MiB"
        )
        settings = ", ".join(f"{name} {value}" for name, value in answer["settings"].items())
        lines.append(f"settings: {settings}")
    except (KeyError, TypeError, AttributeError) as error:
        words = f"the server's report is another version's ({error!r}); use its own cli.py"
        raise _NoReportError(f"{words}, or --json") from error
    return lines
