"""Two real servers that share a bucket and nothing else."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from warmgraph_tools.host import Server

from .test_nodes import _graph

CLI = Path(__file__).resolve().parents[2] / "cli.py"
PRIVATE = Path("user", "__warmgraph")
USER, SECRET = "AKIAWARMGRAPHTEST", "hunter2-hunter2-hunter2"


@pytest.mark.slow
def test_a_second_server_with_an_empty_store_builds_nothing(
    start_server: Callable[..., Server],
    place_model: Callable[..., str],
    s3_endpoint: str,
    tmp_path: Path,
) -> None:
    import s3fs

    options = {"key": USER, "secret": SECRET, "endpoint_url": s3_endpoint}
    fs = s3fs.S3FileSystem(skip_instance_cache=True, **options)
    fs.mkdir("two-servers")
    url = "s3://two-servers/graphs"

    first = start_server(lend=0)
    checkpoint = place_model(first, "narrowxl")
    prompt = _graph(checkpoint)
    prompt["2"]["inputs"]["when_missing"] = "wait"
    first.run(prompt)
    kinds = len(first.report()["models"][0]["kinds"])
    told = json.dumps({"remote": url, "options": options, "mode": "write"})
    (first.base / PRIVATE / "fleet.json").write_text(told, "utf-8")
    command = [sys.executable, str(CLI), "push", "--base-directory", str(first.base)]
    pushed = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert pushed.returncode == 0 and " 0 not sent" in pushed.stdout, pushed.stderr
    first.stop()

    base = tmp_path / "second"
    (base / PRIVATE).mkdir(parents=True)
    shutil.copy2(first.base / PRIVATE / "signing.key", base / PRIVATE)
    (base / PRIVATE / "fleet.json").write_text(told, "utf-8")
    second = start_server(base)
    place_model(second, "narrowxl")
    second.run(prompt)
    report = second.report()
    (model,) = report["models"]
    assert (model["builds"], model["loads"], model["regions"]["eager"]) == (0, kinds, 0)
    assert report["fleet"]["remote"]["counts"] == {"found": kinds}
    said = json.dumps(report) + second.log
    for secret in (USER, SECRET, url, s3_endpoint):
        assert secret not in said
