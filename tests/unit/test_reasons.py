"""A reason is data: a key and values, attributes that the code asks, the same in each process."""

from __future__ import annotations

import copy
import json
import pickle
import re
import string

import pytest

from warmgraph_backends.building.answers import Failure, read_answer
from warmgraph_backends.errors import BuildError, RequirementError
from warmgraph_backends.reasons import ENGLISH, NOTHING, Reason, joined, of, with_remedy
from warmgraph_backends.sessions.lines import line
from warmgraph_backends.sessions.report import strict_problem

#: Words of the inside, which no user has to know: they read *compiled graph* and *normal speed*.
INSIDE = {"graph", "graphs", "eager"}
#: What people type or choose has the words that it has.
NAMES = {"bad_name", "eager_compiles_nothing", "foreign_capture"}


def _nested() -> Reason:
    whole = of("nothing_compiles", why=of("no_cpp_compiler", name="g++"))
    return of("compiling_failed", why=[whole, of("do_install_one")])


def test_a_reason_is_its_english_words() -> None:
    reason = of("wrong_size", name="x", wanted=3, dim=1, got=4)
    assert reason == "x must have size 3 in dim 1, got 4" and isinstance(reason, str)
    assert (reason.key, reason.values["wanted"]) == ("wrong_size", "3")
    assert {reason: 1}["x must have size 3 in dim 1, got 4"] == 1
    assert json.loads(json.dumps(reason)) == reason
    for again in (copy.deepcopy(reason), pickle.loads(pickle.dumps(reason))):
        assert (again, again.key, again.values) == (reason, reason.key, reason.values)


def test_a_reason_may_stand_within_another_and_several_are_joined() -> None:
    assert _nested() == (
        "compiling failed: nothing compiles here: no C++ compiler (g++) on the path; install one"
    )
    assert joined([of("moved")]) == of("moved")
    assert with_remedy(of("unsigned"), NOTHING) == "is not signed"
    assert with_remedy(of("unsigned"), of("do_rename")).key == "both"


def test_what_the_code_asks_is_given_by_the_key_alone() -> None:
    assert of("being_loaded").passes and of("being_loaded").expected
    assert of("no_file").expected and not of("no_file").passes
    assert of("no_room").retry and not of("over_budget", needed=2, budget=1).retry
    assert of("moved").fleeting and not of("does_not_fit").fleeting
    same_words = Reason.plain("it is being loaded")
    assert same_words == of("being_loaded") and not same_words.passes
    assert Reason.plain(of("no_room")).retry


def test_what_becomes_of_a_model_is_told_apart_from_why() -> None:
    why = of("no_plan", model="Linear")
    said = of("at_normal_speed", why=why)
    assert said == "no region plan for Linear yet: runs at normal speed" and said.cause == why
    report = {"regions": {"total": 0}, "notes": [said]}
    assert strict_problem(report) == "no region plan for Linear yet"


def test_an_error_tells_its_reason_and_what_to_do_as_data() -> None:
    error = RequirementError(of("no_triton"), remedy=of("do_install_triton"))
    assert str(error) == error.told == f"{error.reason}; {error.remedy}"
    assert (error.reason.key, error.remedy.key) == ("no_triton", "do_install_triton")
    assert BuildError("words alone").reason.key == ""  # type: ignore[arg-type]
    assert line("failed", error=error).values["error"] == error.told


def test_a_sentence_carries_the_reasons_that_stand_in_it() -> None:
    told = line("not_compiled", places=1, total=2, reason=_nested()).to_plain()
    assert told["values"]["reason"] == told["reasons"]["reason"]["text"] == _nested()
    assert json.loads(json.dumps(told)) == told
    inner = told["reasons"]["reason"]["values"]["why"]
    assert (inner["key"], inner["values"]["other"]["key"]) == ("both", "do_install_one")
    assert "reasons" not in line("note", note="words").to_plain()


def _failure(error: object) -> BuildError:
    message = {"job": 1, "ok": False, "error": error, "remedy": "", "trace": "", "clean": True}
    answer = read_answer(message, 1)
    assert isinstance(answer, Failure)
    return answer.error


def test_a_reason_of_a_worker_is_one_in_the_server() -> None:
    found = _failure(json.loads(json.dumps(_nested().to_plain()))).reason
    assert found == _nested() and found.to_plain() == _nested().to_plain()


@pytest.mark.parametrize(
    "said",
    [
        "words of another version",
        {"key": "not_known_here", "values": {}, "text": "words of another version"},
        {"key": "no_cpp_compiler", "values": {"other": "g++"}, "text": "words of another version"},
        {"key": "no_cpp_compiler", "values": {"name": 3}, "text": "words of another version"},
    ],
)
def test_what_a_worker_of_another_version_says_is_read_as_words(said: object) -> None:
    found = _failure(said).reason
    assert (found, found.key) == ("words of another version", "")


def test_every_row_names_what_stands_in_it() -> None:
    for key in ENGLISH:
        fields = [field for _, field, _, _ in string.Formatter().parse(ENGLISH[key]) if field]
        assert all(field.isidentifier() for field in fields), key
        assert of(key, **dict.fromkeys(fields, "x")).key == key


def _unnamed(text: str) -> str:
    """A text without the users' own word for a saved graph."""
    return re.sub(r"\bcompiled graphs?\b", "", text, flags=re.IGNORECASE)


def test_people_read_no_words_of_the_inside() -> None:
    told = {
        key: {word.strip("().,;:'s").lower() for word in _unnamed(ENGLISH[key]).split()}
        for key in ENGLISH
        if key not in NAMES
    }
    assert {key: words & INSIDE for key, words in told.items() if words & INSIDE} == {}
