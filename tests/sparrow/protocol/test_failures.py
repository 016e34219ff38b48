"""The list of failures: its form on the wire, its sentences, and the failure of each error."""

from __future__ import annotations

import copy
import errno
import json
import re

import pytest

from edge_sdk.engines.training import GRADIENTS, LOSS, TrainingDiverged, UnsoundModel
from edge_sdk.errors import BadArgument, SdkError, failure_of
from sparrow.protocol.errors import BundleError
from sparrow.protocol.failures import FAILURES, LAST, PATTERN, Failure, explain, in_words, nothing_trained
from sparrow.protocol.messages import PauseReason
from sparrow.reading.errors import NoData

SECRET = "/home/ann/secret.csv"


class OwnError(ValueError):
    pass


class Outside(SdkError):
    failure = SECRET


@pytest.mark.parametrize("failure", FAILURES)
def test_each_failure_has_a_sentence_and_a_form_that_is_no_other_reason(failure):
    assert re.fullmatch(PATTERN, failure)
    assert failure.partition("/")[0] in FAILURES
    assert failure not in {reason.value for reason in PauseReason}
    cause, advice = FAILURES[failure]
    assert cause
    assert cause[0].islower()
    assert not (cause + advice).endswith(".")
    assert in_words(failure).startswith(cause)
    assert advice in in_words(failure)


def test_no_two_failures_have_one_code_of_nothing_trained():
    assert len(LAST) == len(FAILURES)
    assert all(re.fullmatch(PATTERN, nothing_trained(Failure(failure))) for failure in FAILURES)
    assert nothing_trained(None) == "nothing-trained"
    words = in_words(nothing_trained(LOSS))
    assert FAILURES["nothing-trained"].cause in words
    assert str(FAILURES[LOSS]) in words


@pytest.mark.parametrize("text", [SECRET, "", "battery", "other/x", "program-error/OwnError", "program-error/open"])
def test_no_other_text_is_a_failure(text):
    with pytest.raises(ValueError, match=r"failures\.py") as refused:
        Failure(text)
    assert not text or text not in str(refused.value)


def test_a_reason_that_is_not_in_the_list_is_shown_as_it_is():
    for reason in ("too hot", SECRET, "battery", "program-error/<b>", "unheard-of/x", "other/" + "x" * 41):
        assert explain(reason) is None
        assert in_words(reason) == reason
    assert explain("bad-payload/unheard-of") == FAILURES["bad-payload"]
    assert "(TypeError)" in in_words("program-error/TypeError")


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (ValueError(SECRET), "program-error/ValueError"),
        (KeyError(SECRET), "program-error/KeyError"),
        (FileNotFoundError(errno.ENOENT, "No such file", SECRET), "program-error/FileNotFoundError"),
        (OSError(errno.ENOSPC, "No space left on device", SECRET), "no-space"),
        (MemoryError(SECRET), "no-memory"),
        (type("OutOfMemoryError", (RuntimeError,), {})(SECRET), "no-memory"),
        (KeyboardInterrupt(SECRET), "interrupted/user"),
        (OwnError(SECRET), "program-error/other"),
        (type("ValueError", (Exception,), {})(SECRET), "program-error/other"),
        (json.JSONDecodeError(SECRET, "x", 0), "program-error/other"),
        (Outside(SECRET), "other"),
        (BadArgument(SECRET), "other"),
        (NoData(SECRET), "data-unusable"),
        (BundleError(SECRET), "bad-payload"),
        (BundleError(SECRET, failure=Failure("bad-payload/size")), "bad-payload/size"),
        (TrainingDiverged(SECRET), "training-diverged"),
        (TrainingDiverged(SECRET, failure=GRADIENTS), "training-diverged/gradients"),
        (UnsoundModel(SECRET), "unsound-model"),
    ],
)
def test_an_error_is_reported_without_its_text(error, failure):
    assert failure_of(error) == failure
    assert isinstance(failure_of(error), Failure)


def test_an_errors_failure_survives_the_way_between_processes():
    # By __reduce__, as pickle does.
    again = copy.copy(BundleError("x", failure=Failure("bad-payload/size")))
    assert (str(again), again.failure) == ("x", "bad-payload/size")
