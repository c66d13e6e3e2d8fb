"""A store that machines share, under real models: the second machine builds nothing, and no remote
that hangs keeps anybody from an image.
"""

from __future__ import annotations

import json
import logging
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from warmgraph_backends.fleet.remote import Remote
from warmgraph_backends.storing.graph_file import file_name, read_header
from warmgraph_backends.target.target import target_name
from warmgraph_tools.inprocess import Host

from .lab import Lab
from .probed import Probed
from .test_background import QUICK

PRIVATE = Path("user", "__warmgraph")
KINDS = 8
USER, SECRET = "AKIAWARMGRAPHTEST", "hunter2-hunter2-hunter2"
Elsewhere = Callable[..., Lab]


@pytest.fixture
def elsewhere(lab: Lab, tmp_path: Path) -> Iterator[Elsewhere]:
    """Other machines with the shared lab's key, what their owners say, and an empty store."""
    made: list[Lab] = []

    def machine(content: Mapping[str, Any], *, graphs: Mapping[str, Path] | None = None) -> Lab:
        root = tmp_path / f"machine{len(made)}"
        (root / PRIVATE).mkdir(parents=True)
        shutil.copy2(lab.root / PRIVATE / "signing.key", root / PRIVATE)
        (root / PRIVATE / "fleet.json").write_text(json.dumps(content), "utf-8")
        for path in (graphs or {}).values():
            (root / "models" / "compiled_graphs").mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, root / "models" / "compiled_graphs")
        made.append(Lab(root))
        return made[-1]

    yield machine
    for each in made:
        each.engine.close()


@pytest.fixture
def graphs(lab: Lab, probed: Probed) -> dict[str, Path]:
    """The files of a narrow SDXL by their kinds' labels."""
    kinds = probed.report()["kinds"]
    assert len(kinds) == KINDS
    return {kind["kind"]: lab.store / file_name(kind["key"]) for kind in kinds}


def remote_of(machine: Lab) -> Remote:
    remote = machine.engine._graphs._remote
    assert remote is not None
    return remote


@pytest.fixture
def bucket(s3_endpoint: str, lab: Lab, graphs: dict[str, Path], tmp_path: Path) -> dict[str, Any]:
    """What an owner says of a bucket that has all of them."""
    import s3fs

    options = {"key": USER, "secret": SECRET, "endpoint_url": s3_endpoint}
    fs = s3fs.S3FileSystem(skip_instance_cache=True, **options)
    name = f"b{abs(hash(tmp_path))}"
    fs.mkdir(name)
    for path in graphs.values():
        target = target_name(read_header(path).data["target"])
        below = f"{name}/graphs/{lab.signer.fingerprint}/{target}"
        fs.pipe_file(f"{below}/{path.name}", path.read_bytes())
    return {"remote": f"s3://{name}/graphs", "options": options}


def test_a_server_that_starts_has_what_the_bucket_has_before_a_model_asks(
    bucket: dict[str, Any], graphs: dict[str, Path], elsewhere: Elsewhere
) -> None:
    second = elsewhere(bucket)
    second.wait_until(lambda: all((second.store / each.name).exists() for each in graphs.values()))


def test_a_machine_with_an_empty_store_loads_everything_from_a_bucket_and_builds_nothing(
    host: Host, bucket: dict[str, Any], elsewhere: Elsewhere, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    second = elsewhere(bucket)
    begun = time.perf_counter()
    model = Probed(second, host, when_missing="never")
    second.engine._graphs.settle()
    took = time.perf_counter() - begun
    logging.getLogger(__name__).info("%d graphs from a bucket: %.2f s", KINDS, took)
    assert took < 30
    model.check()
    assert second.counts(model.model) == (0, KINDS, 0) and second.jobs() == 0
    report = second.engine.overview.snapshot()
    assert report["fleet"]["remote"]["counts"] == {"found": KINDS}
    told = caplog.text + json.dumps(report, default=str)
    for secret in (USER, SECRET, bucket["remote"], bucket["options"]["endpoint_url"]):
        assert secret not in told


@pytest.mark.slow
def test_of_two_machines_one_builds_what_the_bucket_lacks_and_the_other_loads_it(
    host: Host, graphs: dict[str, Path], elsewhere: Elsewhere, tmp_path: Path
) -> None:
    lacking = {label: path for label, path in graphs.items() if label != QUICK}
    content = {"remote": (tmp_path / "bucket").as_uri(), "mode": "write"}
    machines = [elsewhere(content, graphs=lacking) for _ in range(2)]
    models = [Probed(machine, host, when_missing="background") for machine in machines]
    for machine, model in zip(machines, models, strict=True):
        machine.wait_until(lambda machine=machine, model=model: machine.is_settled(model.model))
    assert sum(machine.builds() for machine in machines) == 1
    for machine, model in zip(machines, models, strict=True):
        assert machine.counts(model.model)[2] == 0
    for model in models:
        model.check()
    for machine in machines:
        assert remote_of(machine).finish()
    time.sleep(0.5)  # its claim goes after the file has come
    files = [path for path in (tmp_path / "bucket").rglob("*") if path.is_file()]
    assert [path.suffix for path in files] == [".safetensors"]


def test_a_remote_that_hangs_keeps_nobody_from_an_image(
    host: Host, graphs: dict[str, Path], elsewhere: Elsewhere
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/graphs"
        machine = elsewhere({"remote": address, "patience_s": 20})
        begun = time.monotonic()
        model = Probed(machine, host, when_missing="never")
        model.sample()
        assert time.monotonic() - begun < 15
        assert remote_of(machine).report()["looking"]
        machine.engine.close()
        assert time.monotonic() - begun < 15


def test_load_compiled_files_waits_for_a_remote_as_long_as_its_patience(
    host: Host, graphs: dict[str, Path], elsewhere: Elsewhere
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/graphs"
        machine = elsewhere({"remote": address, "patience_s": 2})
        plain, *_ = host.load("narrowxl")
        begun = time.monotonic()
        loaded = machine.engine.load_graphs(plain, "none", strict=False)
        assert 1.5 < time.monotonic() - begun < 15
        machine.engine._graphs.settle()
        reasons = {str(miss["reason"]) for miss in machine.engine.report(loaded)["misses"]}
        assert reasons == {"no compiled graph"}
        assert machine.jobs() == 0
