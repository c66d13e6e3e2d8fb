"""The console's side of a build farm: certificates, and words for what is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from warmgraph_backends.building.farm import VARIABLE
from warmgraph_console.farm import Certificates, look_at, scheduler_environment, warn_of_plain
from warmgraph_tools.farm import BUILD_WORKER, Farm, make_certificate

_CLIENT = """
import sys
from distributed import Client
with Client(sys.argv[1], timeout=10) as client:
    print(len(client.nthreads()))
"""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    certificate, key = make_certificate(tmp_path_factory.mktemp("tls"))
    return Certificates(certificate, certificate, key)


@pytest.fixture(scope="module")
def farm(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farm]:
    """A scheduler that speaks TLS alone."""
    ca_file, certificate, key = certificates
    options = ("--tls-ca-file", ca_file, "--tls-cert", certificate, "--tls-key", key)
    farm = Farm(tmp_path_factory.mktemp("tls") / "farm", protocol="tls", options=options)
    yield farm
    farm.stop()


def test_who_has_a_certificate_is_let_in(
    farm: Farm, certificates: Certificates, capsys: pytest.CaptureFixture[str]
) -> None:
    assert look_at(farm.address, certificates) is None
    assert capsys.readouterr().out == f"{farm.address} has 0 workers\n"


@pytest.mark.parametrize("case", ["another's", "none", "no TLS"])
def test_who_has_none_is_not(
    case: str, farm: Farm, certificates: Certificates, tmp_path: Path, host_tree: Path
) -> None:
    """Each in a process of its own, as at a console."""
    address, options = farm.address, []
    if case == "another's":
        other, key = map(str, make_certificate(tmp_path))
        ca_file = str(certificates.ca_file)
        options = ["--tls-ca-file", ca_file, "--tls-cert", other, "--tls-key", key]
    elif case == "no TLS":
        address = address.replace("tls", "tcp")
    command = [sys.executable, str(BUILD_WORKER[0]), "prebuild", "none.json"]
    command += ["--comfyui", str(host_tree), "--scheduler", address, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    needs = "needs --tls-ca-file, --tls-cert and --tls-key"
    assert f"{address} {needs if case == 'none' else 'is not reached: '}" in done.stderr


def test_a_servers_environment_is_all_it_needs(farm: Farm, certificates: Certificates) -> None:
    environment = scheduler_environment(farm.address, certificates)
    assert environment[VARIABLE] == farm.address
    command = [sys.executable, "-c", _CLIENT, farm.address]
    whole = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=whole)
    assert done.stdout == "0\n", done.stderr


@pytest.mark.parametrize("address", ["nonsense", "http://host:1", "tcp://"])
def test_what_is_no_schedulers_address_is_said_to_be_none(address: str, host_tree: Path) -> None:
    command = [sys.executable, *map(str, BUILD_WORKER), address, "--comfyui", str(host_tree)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == (
        f"a scheduler's address must be tls://HOST:PORT or tcp://HOST:PORT, got {address}\n"
    )
    assert look_at(address, Certificates()) == done.stderr.strip()


@pytest.mark.parametrize(
    ("address", "is_warned"),
    [("tcp://127.0.0.1:1", False), ("tcp://localhost:1", False), ("tcp://192.0.2.1:1", True)],
)
def test_an_address_without_tls_is_warned_of_but_on_this_machine(
    address: str, is_warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    warn_of_plain(address)
    said = capsys.readouterr().err
    assert ("without TLS: whoever reaches it runs programs" in said) is is_warned
