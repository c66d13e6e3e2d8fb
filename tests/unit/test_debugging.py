"""WARMGRAPH_DEBUG is read in full, or said to be wrong."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from warmgraph_backends.debugging import OFF, Debugging, read_debugging

PRIVATE = Path("private")


def read(text: str) -> Debugging:
    return read_debugging(text, PRIVATE)


def test_without_the_variable_a_server_does_nothing_more(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    assert read("") == read(" , ") == OFF
    assert OFF.words == ""
    assert OFF.why_not("anything") is None
    assert caplog.records == []


def test_each_word_is_understood_alone_and_with_others() -> None:
    assert read("no-capture") == Debugging(captures=False)
    assert read("dump") == Debugging(dump=PRIVATE / "debug")
    assert read("only=ResBlock") == Debugging(only=("ResBlock",))
    everything = read(" dump , verify,only=ResBlock, only = attention ,no-capture")
    assert everything == Debugging(True, PRIVATE / "debug", False, ("ResBlock", "attention"))


def test_calls_that_are_to_be_verified_are_not_captured() -> None:
    assert not read("verify").captures


def test_what_is_asked_for_is_logged_once_with_the_folder(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    read("verify,dump")
    assert [record.getMessage() for record in caplog.records] == [
        "WARMGRAPH_DEBUG=verify,dump is set on this server; no calls are captured",
        f"Each graph is written down in {PRIVATE / 'debug'}",
    ]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("verfy", "'verfy'"),
        ("verify=1", "'verify=1'"),
        ("verify dump", "'verify dump'"),
        ("only", "only= without a kind"),
        ("only=", "only= without a kind"),
        ("\x1b[2J", r"'\x1b[2J'"),
        ("a,b", "'a', 'b'"),
    ],
)
def test_an_unknown_word_is_named_with_those_that_are_known(
    caplog: pytest.LogCaptureFixture, text: str, named: str
) -> None:
    assert read(f"no-capture,{text}") == Debugging(captures=False)
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    known = "known are verify, dump, no-capture, only=KIND, separated by commas"
    assert warning == f"WARMGRAPH_DEBUG: {named} is not known and does nothing; {known}"


def test_only_compiles_labels_that_hold_one_of_its_parts_in_any_case() -> None:
    only = read("only=resblock,only=->64")
    assert only.why_not("ResBlock 320->640") is None
    assert only.why_not("Downsample 32->64") is None
    assert only.why_not("transformer entry 64") == (
        "WARMGRAPH_DEBUG compiles resblock and ->64 only"
    )
