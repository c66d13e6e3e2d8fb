"""Settings: defaults, words for what is refused, and a file that survives."""

from __future__ import annotations

import json
import logging
import math
import sys
import threading
from pathlib import Path

import pytest

from warmgraph_backends.sessions.settings import SETTINGS, Settings

NESTED: list[object] = []
for _ in range(500_000 if sys.version_info >= (3, 12) else 20_000):
    NESTED = [NESTED]


def test_defaults_are_in_force_without_a_file(tmp_path: Path) -> None:
    settings = Settings(tmp_path / "none")
    assert settings.workers == 0
    assert settings.store_cap_bytes == 4 * 1024**3
    assert settings.job_limit_s == 600
    assert settings.idle_s == 30
    assert not (tmp_path / "none").exists(), "reading must not make the directory"


def test_every_default_passes_its_own_check() -> None:
    for setting in SETTINGS.values():
        assert setting.validate_value(setting.default) == setting.default


def test_every_setting_says_what_it_is_and_what_it_costs() -> None:
    for setting in SETTINGS.values():
        assert setting.title and setting.help.endswith("."), setting.name
        assert bool(setting.unit) == (setting.control != "toggle"), setting.name
        assert setting.minimum < setting.maximum and setting.step > 0, setting.name
    assert len({setting.place for setting in SETTINGS.values()}) == len(SETTINGS)


@pytest.mark.parametrize("value", [False, 0])
def test_a_toggle_is_true_or_false_and_takes_what_older_files_have(
    tmp_path: Path, value: object
) -> None:
    assert Settings(tmp_path).as_dict()["keep_captured"] is True
    (tmp_path / "settings.json").write_text(json.dumps({"keep_captured": value}))
    settings = Settings(tmp_path)
    assert settings.as_dict()["keep_captured"] is False and settings.keeps_captured is False


def test_a_change_is_seen_by_the_next_process(tmp_path: Path) -> None:
    Settings(tmp_path).update({"workers": 3, "store_cap_gib": 0.5})
    again = Settings(tmp_path)
    assert again.workers == 3
    assert again.store_cap_bytes == 512 * 1024**2
    assert [file.name for file in tmp_path.iterdir()] == ["settings.json"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"worker": 3}, "setting must be one of compile_all, "),
        ({"workers": -1}, "workers must be a whole number from 0 to 64"),
        ({"workers": 2.5}, "got 2.5"),
        ({"workers": True}, "got True"),
        ({"workers": "4"}, "got '4'"),
        ({"workers": None}, "got None"),
        ({"workers": 10**400}, "workers must be"),
        ({"workers": "4" * 1000}, "got '4444"),
        ({"w" * 1000: 1}, "got 'wwww"),
        ({"workers": NESTED}, "got a list"),
        ({"workers": {"a": NESTED}}, "got a dict"),
        ({"keep_captured": 2}, "keep_captured must be true or false, got 2"),
        ({"keep_captured": 0.5}, "keep_captured must be true or false, got 0.5"),
        ({"keep_captured": "true"}, "keep_captured must be true or false, got 'true'"),
        ({"store_cap_gib": math.nan}, "store_cap_gib must be a number"),
        ({"store_cap_gib": math.inf}, "store_cap_gib must be a number"),
        ({"workers": 2, "idle_s": 0}, "idle_s must be"),
        ([("workers", 1)], "settings must be a JSON object, got list"),
        (None, "settings must be a JSON object"),
    ],
)
def test_a_bad_change_is_refused_in_words_and_changes_nothing(
    tmp_path: Path, changes: object, words: str
) -> None:
    settings = Settings(tmp_path)
    before = settings.as_dict()
    with pytest.raises(ValueError, match="must be") as caught:
        settings.update(changes)
    assert words in str(caught.value)
    assert settings.as_dict() == before
    assert not (tmp_path / "settings.json").exists()


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "\x00\xff"])
def test_a_damaged_file_costs_a_warning_and_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    file = tmp_path / "settings.json"
    file.write_text(text, encoding="latin-1")
    with caplog.at_level(logging.WARNING):
        settings = Settings(tmp_path)
    assert settings.workers == 0
    assert str(file) in caplog.text
    assert file.read_text(encoding="latin-1") == text


def test_one_bad_value_in_the_file_does_not_cost_the_good_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "settings.json").write_text('{"workers": 5, "idle_s": "x", "old": 1}')
    settings = Settings(tmp_path)
    assert settings.workers == 5
    assert settings.idle_s == 30
    assert "idle_s" in caplog.text
    assert "'old'" in caplog.text


def test_two_servers_of_one_directory_keep_each_others_changes(tmp_path: Path) -> None:
    first, second = Settings(tmp_path), Settings(tmp_path)
    first.update({"workers": 2})
    second.update({"idle_s": 60})
    assert json.loads((tmp_path / "settings.json").read_text()) == {"idle_s": 60, "workers": 2}
    assert second.workers == 2


def test_changes_from_many_threads_are_all_kept(tmp_path: Path) -> None:
    settings = Settings(tmp_path)
    changes = [{"workers": 7}, {"idle_s": 61}, {"job_limit_s": 90}, {"store_cap_gib": 2.0}]
    threads = [threading.Thread(target=settings.update, args=(change,)) for change in changes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert json.loads((tmp_path / "settings.json").read_text()) == {
        "workers": 7,
        "idle_s": 61,
        "job_limit_s": 90,
        "store_cap_gib": 2.0,
    }
