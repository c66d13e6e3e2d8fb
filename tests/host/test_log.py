"""What a real server's log says of us: a prompt's story in at most ten lines, and no noise.

The host's log does not name loggers, so a small pack beside ours writes down who said what.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from warmgraph_console.convert import to_prompt
from warmgraph_tools import templates
from warmgraph_tools.host import Server

ROOT = Path(__file__).parents[2]
CHECKPOINT = "sd_xl_base_1.0.safetensors"
NAME = "text_to_image"
MOST_LINES = 10

NAMING_PACK = """
import json
import logging
from pathlib import Path

NODE_CLASS_MAPPINGS = {}

class Named(logging.FileHandler):
    def format(self, record):
        return json.dumps([record.levelname, record.name, record.getMessage()])

logging.getLogger().addHandler(Named(Path(__file__).with_name("named.log"), encoding="utf-8"))
"""


class Said(NamedTuple):
    """A line of ours."""

    level: str
    text: str


class Listener:
    """A server whose log is read by who said what, and one workflow on it."""

    def __init__(self, server: Server, log: Path) -> None:
        self.server = server
        self._log = log
        self._workflow = templates.read(NAME)
        self._info = server.object_info()
        self._workflow["extra"]["warmgraph"] = {
            "path": server.save_workflow(NAME, self._workflow),
            "user": "default",
        }

    def run(self, seed: int, side: int, *, later: Sequence[str] = ()) -> list[Said]:
        """Run the workflow until nothing is built any more; returns what we said meanwhile.

        Args:
            later: parts of lines that a thread of its own may say after the prompt.
        """
        before = len(self._lines())
        for node in self._workflow["nodes"]:
            if node["type"] == "EmptyLatentImage":
                node["widgets_values"][:2] = [side, side]
            if node["type"] == "KSampler":
                node["widgets_values"][0] = seed
                node["widgets_values"][2] = 2
        self.server.run(to_prompt(self._workflow, self._info), workflow=self._workflow)
        self.server.wait_until_built()
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline:
            text = "".join(self._lines()[before:])
            if all(part in text for part in later):
                break
            time.sleep(0.1)
        said = [json.loads(line) for line in self._lines()[before:]]
        return [Said(level, text) for level, name, text in said if "warmgraph" in name]

    def _lines(self) -> list[str]:
        return self._log.read_text("utf-8").splitlines()


@pytest.fixture(scope="module")
def listener(
    start_server: Callable[..., Server],
    place_model: Callable[..., str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Listener:
    base = tmp_path_factory.mktemp("log")
    pack = base / "custom_nodes" / "names_loggers"
    pack.mkdir(parents=True)
    (pack / "__init__.py").write_text(NAMING_PACK, "utf-8")
    own = start_server(base, lend=1)  # the last one it builds
    place_model(own, "narrowxl", name=CHECKPOINT)
    return Listener(own, pack / "named.log")


def told(lines: list[Said]) -> list[str]:
    """What a user reads, once it is short and no warning."""
    shown = [line for line in lines if line.level != "DEBUG"]
    assert {line.level for line in shown} <= {"INFO"}, shown
    assert len(shown) <= MOST_LINES, shown
    assert all(line.text.startswith("Warmgraph: ") for line in shown), shown
    return [line.text for line in shown]


def test_each_prompt_tells_its_story_in_ten_lines(listener: Listener) -> None:
    ready, filed = "8 of 8 compiled graphs are ready", "8 compiled graphs are filed beside"
    first = told(listener.run(seed=1, side=128, later=(ready, filed)))
    attached = r"Warmgraph: SDXL has 38 regions of 8 kinds; \d of 8 compiled graphs are ready"
    assert re.match(attached, first[0])
    assert sum("ran with" in text for text in first) == 1
    assert sum("8 of 8 compiled graphs are ready: " in text for text in first) == 1
    beside = "8 compiled graphs are filed beside workflows/text_to_image.json"
    assert sum(beside in text for text in first) == 1
    again = told(listener.run(seed=2, side=128))
    whole = "Warmgraph: SDXL ran with 38 of 38 regions compiled"
    assert again in ([whole], [])  # nothing new where all graphs came within the first run
    assert told(listener.run(seed=3, side=192)) == []
    listener.server.restart()
    restarted = told(listener.run(seed=4, side=128, later=[ready]))
    assert "Warmgraph: SDXL: 8 of 8 compiled graphs are ready: 8 loaded (inductor)" in restarted
    assert len(restarted) == 3 and sum("ran with" in text for text in restarted) == 1
    if whole not in restarted:  # some graphs came while it ran
        assert told(listener.run(seed=5, side=128)) == [whole]


def test_the_console_reports_of_the_running_server(listener: Listener) -> None:
    command = [sys.executable, str(ROOT / "cli.py"), "report", "--url", listener.server.url]
    words = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert words.returncode == 0, words.stderr
    assert "SDXL: 38 of 38 parts compiled (inductor)" in words.stdout
    plain = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=300)
    answer = json.loads(plain.stdout)
    assert answer["models"][0]["regions"] == {"total": 38, "compiled": 38, "eager": 0}


def test_a_server_that_starts_again_says_what_it_does_not_understand(listener: Listener) -> None:
    """It stops as with Ctrl-C."""
    own = listener.server
    first, stops = own.pid, own.log.count("Stopped server")
    own.environment["WARMGRAPH_DEBUG"] = "verify,dmp"
    own.restart()
    assert own.pid != first
    assert "WARMGRAPH_DEBUG=verify is set on this server; no calls are captured" in own.log
    assert "WARMGRAPH_DEBUG: 'dmp' is not known and does nothing; known are verify, dump" in own.log
    own.stop()
    assert own.log.count("Stopped server") == stops + 2
    assert "IMPORT FAILED" not in own.log
