"""L2, L7 to L9, L11 to L13 with claims that are locks: what the tests of those laws ask of atomic mode."""

from __future__ import annotations

import pytest
from django.contrib.auth.decorators import user_passes_test

from django_idempotency.decorators import idempotent
from tests.laws import test_l02_replay as l2
from tests.laws import test_l07_callers as l7
from tests.laws import test_l08_committed_effects as l8
from tests.laws import test_l09_database_clock as l9
from tests.laws import test_l11_maintenance as l11
from tests.laws import test_l12_store_away as l12
from tests.laws import test_neutral_release as l13
from tests.laws.test_l07_callers import doorkeeper  # noqa: F401  # a fixture
from tests.laws.test_l09_database_clock import clock  # noqa: F401  # a fixture
from tests.laws.test_neutral_release import client  # noqa: F401  # a fixture
from tests.support.callers import effects, is_replay, paying, post, record

pytestmark = [pytest.mark.postgresql, pytest.mark.usefixtures("payer")]
MODE = "atomic"


@pytest.fixture(autouse=True)
def claims_are_locks(settings):
    settings.IDEMPOTENCY = {**settings.IDEMPOTENCY, "CLAIM": "lock"}


def test_these_claims_are_locks():
    def view(request):
        assert record() is None
        return paying(request)

    assert idempotent(scope="public")(view)(post()).status_code == 201


@pytest.mark.parametrize("answer", l2.RESPONSES.values(), ids=l2.RESPONSES)
def test_l2_a_replay_is_the_first_response(answer):
    l2.test_l2_a_replay_is_the_first_response(MODE, answer)


def test_l7_who_is_turned_away_now_gets_no_stored_response(doorkeeper):  # noqa: F811
    view = user_passes_test(lambda user: doorkeeper.lets_in)(idempotent(scope="public")(paying))
    assert view(l7.by_nobody(post())).status_code == 201
    doorkeeper.lets_in = False
    assert view(l7.by_nobody(post())).status_code == 302
    doorkeeper.lets_in = True
    assert (is_replay(view(l7.by_nobody(post()))), effects()) == (True, 1)


def test_l7_the_same_key_in_another_scope_is_another_operation():
    l7.test_l7_the_same_key_in_another_scope_is_another_operation()


def test_l8_a_failing_commit_hook_keeps_the_response():
    l8.test_l8_a_failing_commit_hook_keeps_the_response()


@pytest.mark.parametrize("answer", l8.UNSTORED.values(), ids=l8.UNSTORED)
def test_l8_a_response_that_cannot_be_kept_is_not_made_twice(answer):
    l8.test_l8_a_response_that_cannot_be_kept_is_not_made_twice(MODE, answer)


@pytest.mark.usefixtures("clock")
def test_l9_an_application_clock_that_jumped_changes_nothing():
    l9.test_l9_an_application_clock_that_jumped_changes_nothing(MODE)


@pytest.mark.parametrize("cleans", [False, True], ids=["reused", "deleted"])
def test_l11_two_retries_as_the_key_expires_or_is_deleted_run_once(cleans):
    l11.test_l11_two_retries_as_the_key_expires_or_is_deleted_run_once(MODE, cleans)


def test_l12_when_the_store_cannot_be_reached_the_request_is_refused(proxy):
    l12.test_l12_when_the_store_cannot_be_reached_the_request_is_refused(MODE, proxy)


def test_l12_fail_open_runs_unprotected(proxy):
    l12.test_l12_fail_open_runs_unprotected(MODE, proxy)


@pytest.mark.usefixtures("atomic_requests")
@pytest.mark.parametrize("act", (l13.RELEASED | l13.STORED).values(), ids=l13.RELEASED | l13.STORED)
def test_l13_a_plain_views_writes_stand_or_fall_as_without_a_key(call, act):
    l13.assert_neutral(call, idempotent(l13.function(act)))
