"""`cli.py prebuild --scheduler`: the builds of its server are done by other processes, over TLS."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from warmgraph_tools.farm import Farm, make_certificate
from warmgraph_tools.host import Server
from warmgraph_tools.install import prepare_base

from .test_prebuild import CHECKPOINT, PARTS, api_prompt, saved

#: Of the narrow SDXL's parts, those that are to be built.
LEFT = 4


@pytest.mark.slow
def test_a_farm_builds_and_the_machine_that_asks_signs(
    host_tree: Path, built_once: Any, place_model: Callable[..., str], tmp_path: Path
) -> None:
    base = prepare_base(tmp_path / "base", host_tree)
    built_once.lend(base, without=LEFT)
    place_model(Server(host_tree, base), "narrowxl", name=CHECKPOINT)
    certificate, key = map(str, make_certificate(tmp_path))
    tls = ["--tls-ca-file", certificate, "--tls-cert", certificate, "--tls-key", key]
    farm = Farm(tmp_path / "farm", protocol="tls", options=tls)
    pack, out = base / "custom_nodes" / "warmgraph", tmp_path / "out.json"
    workflow = saved(tmp_path, "api.json", api_prompt(CHECKPOINT))
    command = [str(pack / "cli.py"), "prebuild", str(workflow), "--json", str(out)]
    command += ["--comfyui", str(host_tree), "--base-directory", str(base)]

    def prebuild(*options: str) -> dict[str, Any]:
        whole = [sys.executable, *command, *options, "--", "--cpu"]
        done = subprocess.run(whole, capture_output=True, text=True, timeout=1200, env=os.environ)
        assert done.returncode == 0, done.stdout + done.stderr
        return dict(json.loads(out.read_text("utf-8")))

    try:
        for name in ("a", "b"):
            farm.add(name, "--comfyui", host_tree, *tls)
        first = prebuild("--scheduler", farm.address, *tls, "--log", str(tmp_path / "log"))
        assert first["builds"] >= LEFT and first["builds"] + first["loads"] == PARTS
        assert farm.begun("a") + farm.begun("b") == first["builds"]
        assert farm.begun("a") and farm.begun("b")
        assert "Build farm" not in (tmp_path / "log").read_text("utf-8")  # nothing was built here
    finally:
        farm.stop()
    assert farm.left() == []
    again = prebuild()  # with the key that signed what came
    assert (again["builds"], again["loads"]) == (0, PARTS)
