"""`report` asks a running server what it has compiled, by its GET route."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from datetime import datetime
from http.client import HTTPException
from typing import Any

from .output import say_lines, stop

ROUTE = "/warmgraph/report"
#: Of an answer, in bytes; a server's is a few hundred thousand.
MAX_ANSWER = 64 << 20
#: Of the last runs, how many are printed; `--json` has all.
SHOWN_RUNS = 10
_PATIENCE_S = 20.0


def report(url: str, *, as_json: bool) -> int:
    """Print a server's report: in words, or as sent.

    Args:
        url: of the server, for example "http://127.0.0.1:8188".
        as_json: whether to print the answer itself, indented.
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
            paused = " (paused)" if building["paused"] else ""
            lines.append(f"compiling {building['done']} of {building['total']}{paused}")
        lines.append(
            f"this server: {answer['builds']} graphs compiled, {answer['loads']} loaded; "
            f"store: {store['files']} files, {store['bytes'] / 2**20:.1f} MiB"
        )
        lines += [f"  {_stored(family)}" for family in answer["stored"]]
        for each in answer["warnings"]:
            lines.append(f"{each['title']}: {each['text']} {each['command']}".rstrip())
        if runs := answer["runs"][-SHOWN_RUNS:]:
            lines.append("last runs:")
            lines += [f"  {_run(run)}" for run in runs]
        settings = ", ".join(f"{name} {value}" for name, value in answer["settings"].items())
        lines.append(f"settings: {settings}")
    except (KeyError, TypeError, AttributeError) as error:
        words = f"the server's report is another version's ({error!r}); use its own cli.py"
        raise _NoReportError(f"{words}, or --json") from error
    return lines


def _stored(family: dict[str, Any]) -> str:
    """The store's graphs of one family."""
    used = datetime.fromtimestamp(family["last_used"]).date()
    size = f"{family['files']} files, {family['bytes'] / 2**20:.1f} MiB"
    unfit = "".join(
        f"; {each['files']} do not fit here: {each['reason']}" for each in family["unfit"]
    )
    return f"{family['title']}: {size}, last used {used}{unfit}"


def _run(run: dict[str, Any]) -> str:
    """One run of the sampler."""
    when = datetime.fromtimestamp(run["at"]).isoformat(" ", "seconds")
    what = f"{run['model']} {run['size']}, batch {run['batch']}, {run['steps']} steps"
    if run["ms"] is None:
        return f"{when}  {what}, {run['form']}"
    eager = "" if run["eager_ms"] is None else f" (eager {run['eager_ms']:.1f})"
    return f"{when}  {what}, {run['form']}: {run['ms']:.1f} ms a step{eager}"
