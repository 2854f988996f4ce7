"""``once``: a function runs once for each key, and each call gets the first result."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections import Counter
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction

from django_idempotency import (
    NotRun,
    Policy,
    Rejected,
    StoreUnavailable,
    current,
    once,
    run_once,
)
from django_idempotency.maintenance import fail
from django_idempotency.messages import NOT_KEPT, RejectMessage
from django_idempotency.models import IdempotencyRecord
from django_idempotency.stores.database import ahead
from django_idempotency.values.exceptions import ClaimInsideTransaction, Hold
from tests.support.callers import all_effects, effects, pay
from tests.support.databases import environment
from tests.support.loops import run
from tests.support.threads import in_threads
from tests.support.waiting import wait_for_row_locks

pytestmark = pytest.mark.usefixtures("payer", "transactional_db")
MODES = pytest.mark.parametrize("mode", ["atomic", "lease"])


def billing(**options):
    @once(**{"key": "invoice-{invoice_id}", "retention": None} | options)
    def bill(invoice_id, *, amount=5):
        assert current()
        return {"entry": str(pay(f"{invoice_id}").pk), "amount": amount}

    return bill


@MODES
def test_each_later_call_gets_the_first_result(mode):
    bill = billing(mode=mode)
    first = bill(7)
    assert bill(invoice_id=7) == first
    assert bill(8) != first
    assert (effects("7"), effects("8")) == (1, 1)
    record = IdempotencyRecord.objects.get(key="invoice-7")
    assert record.scope == f"function:{__name__}.billing.<locals>.bill"
    assert IdempotencyRecord.objects.kept_for_good().count() == 2


def test_another_name_is_another_scope():
    assert billing(name="a")(7) != billing(name="b")(7)
    assert billing(name="a")(7) == billing(name="a")(7)


def test_the_same_number_is_another_key_for_another_tenant(enter_tenant):
    bill, results = billing(), []
    for schema in ("acme", "other", "acme"):
        enter_tenant(schema)
        results.append(bill(7))
    assert results[0] == results[2] != results[1]
    scope = f"function:acme/{__name__}.billing.<locals>.bill"
    assert IdempotencyRecord.objects.filter(scope=scope).count() == 1


@MODES
def test_an_exception_of_the_function_is_raised_and_the_next_call_runs_again(mode):
    attempts = []

    @once(key="{reference}", retention=60, mode=mode)
    def flaky(reference):
        attempts.append(current().attempt)
        pay(reference)
        if len(attempts) < 12:  # more often than a message is tried
            raise LookupError(reference)
        return "done"

    for _time in range(11):
        with pytest.raises(LookupError, match="r"):
            flaky("r")
    assert [flaky("r"), flaky("r")] == ["done"] * 2
    assert attempts == [*range(1, 13)]
    assert effects() == (1 if mode == "atomic" else 12)


def test_a_call_while_the_function_runs_is_not_run_or_waits_for_the_result():
    entered, go_on = threading.Event(), threading.Event()

    def slow(reference):
        entered.set()
        assert go_on.wait(60)
        return str(pay(reference).pk)

    decorate = partial(once, key="{reference}", retention=60, name="slow")

    def call(number):
        if number == 0:
            return decorate()(slow)("r")
        assert entered.wait(60)
        if number == 1:
            with pytest.raises(NotRun) as refused:
                decorate()(slow)("r")
            go_on.set()
            return refused.value.delay, refused.value.reason
        return decorate(wait=60)(slow)("r")

    first, (delay, reason), waited = in_threads(3, call)
    assert waited == first
    assert delay >= 1
    assert reason
    assert effects() == 1


def test_a_key_on_hold_is_not_run_until_an_operator_decides():
    @once(key="{reference}", retention=60)
    def unsure(reference):
        raise Hold("ask the bank")

    for _time in range(2):
        with pytest.raises(NotRun, match="ask the bank"):
            unsure("r")
    fail(IdempotencyRecord.objects.get().pk, detail="it was not paid")
    with pytest.raises(Rejected, match="it was not paid"):
        unsure("r")


def test_other_arguments_under_the_same_key_are_rejected():
    bill = billing()
    bill(7)
    with pytest.raises(Rejected, match="first used with other arguments"):
        bill(7, amount=6)
    assert effects("7") == 1


def test_a_function_may_reject_its_arguments_for_good():
    @once(key="{reference}", retention=60)
    def refusing(reference):
        pay(reference)
        raise RejectMessage("closed")

    for _time in range(2):
        with pytest.raises(Rejected, match="closed"):
            refusing("r")
    assert effects() == 0


@pytest.mark.parametrize("argument", [None, "", 1.5, object()])
def test_an_argument_unfit_for_a_key_claims_nothing(argument):
    with pytest.raises(ValueError, match="invoice_id"):
        billing()(argument)
    assert (IdempotencyRecord.objects.count(), all_effects()) == (0, 0)


@MODES
def test_a_call_inside_a_transaction_is_refused(mode):
    with pytest.raises(ClaimInsideTransaction), transaction.atomic():
        billing(mode=mode)(7)
    assert all_effects() == 0


def test_a_result_that_is_too_large_to_keep_is_named_in_later_calls():
    @once(key="{reference}", retention=60)
    def large(reference):
        return "x" * 2_000_000

    assert (len(large("r")), large("r")) == (2_000_000, NOT_KEPT)


@pytest.mark.redis
def test_a_store_that_is_away_is_an_error_of_its_own(settings):
    settings.IDEMPOTENCY = {
        "STORES": {
            "redis": {
                "BACKEND": "django_idempotency.contrib.redis.RedisStore",
                "OPTIONS": {"url": "redis://127.0.0.1:1"},
            }
        }
    }
    with pytest.raises(StoreUnavailable):
        billing(mode="lease", store="redis")(7)
    assert all_effects() == 0


def of_a_script():
    return None


of_a_script.__module__ = "__main__"  # two scripts would share its keys


@pytest.mark.parametrize(
    "function",
    [lambda: None, partial(pay, "r"), of_a_script],
    ids=["lambda", "partial", "script"],
)
def test_a_function_without_a_name_needs_one(function):
    decorate = partial(once, key=lambda: "k", retention=60)
    with pytest.raises(ImproperlyConfigured, match="set name="):
        decorate()(function)
    decorate(name="named")(function)


def test_a_generator_is_refused():
    """Calling it runs nothing, so nothing would ever happen."""

    def rows():
        yield 1

    async def arows():
        yield 1

    for function in (rows, arows):
        with pytest.raises(ImproperlyConfigured, match="runs nothing"):
            once(key=lambda: "k", retention=60, mode="lease")(function)


def test_once_without_a_key_is_an_error():
    for wrong in (once, once(retention=60), once(policy=Policy(retention=60))):
        with pytest.raises(TypeError, match="needs a key"):
            wrong(pay)


def test_run_once_calls_a_function_once():
    week = timedelta(days=7)

    def rebuild(reference="r"):
        return str(pay(reference).pk)

    first = run_once("nightly-2026-11-28", rebuild, retention=week)
    assert run_once("nightly-2026-11-28", rebuild, retention=week) == first
    assert run_once("nightly-2026-11-29", rebuild, retention=week) != first
    with pytest.raises(Rejected):
        run_once("nightly-2026-11-28", partial(rebuild, "other"), retention=week)
    with pytest.raises(ImproperlyConfigured, match="retention"):
        run_once("nightly", rebuild)
    with pytest.raises(ValueError, match="it is None"):
        run_once(None, rebuild, retention=week)
    assert effects() == 2


# --- Event loops


def test_coroutine_functions_run_once_and_wait_without_blocking_each_other():
    @once(key="{reference}", retention=60, mode="lease", wait=60)
    async def bill(reference):
        await asyncio.sleep(0.05)
        return str((await sync_to_async(pay)(reference)).pk)

    async def main():
        together = await asyncio.gather(*(bill("r") for _call in range(4)))
        return [*together, await run_once("k", partial(bill, "r"), **AGAIN)]

    assert len(set(run(main))) == 1
    assert effects() == 1


AGAIN = {"retention": 60, "mode": "lease", "name": "again"}


def test_a_coroutine_function_in_atomic_mode_is_an_error():
    @once(key="{reference}", retention=60)
    async def bill(reference):
        raise AssertionError("it ran")

    with pytest.raises(ImproperlyConfigured, match=r'bill is async .* mode="lease"'):
        run(lambda: bill("r"))


# --- Processes


CALLER = """
import sys, json, threading, django
django.setup()
from django_idempotency import NotRun, StoreUnavailable
from tests.messages.jobs import bill
from tests.support.waiting import eventually
start, results = threading.Barrier(10), []
def ask(number):
    try:
        return bill(f"job-{number}")
    except (NotRun, StoreUnavailable):  # it is busy
        return None
def call(number):
    start.wait(120)
    results.append([number, eventually(lambda: ask(number), within=180)])
threads = [threading.Thread(target=call, args=[number]) for number in range(10)]
print("ready", flush=True)
sys.stdin.readline()
for thread in threads: thread.start()
for thread in threads: thread.join()
print(json.dumps(results))
"""


def processes(count, program):
    root = Path(__file__).parents[2]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=root,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _process in range(count)
    ]
    for process in started:
        assert process.stdout.readline() == "ready\n"
    for process in started:
        process.stdin.write("\n")
        process.stdin.flush()
    return [json.loads(process.communicate(timeout=300)[0]) for process in started]


@pytest.mark.row_locks
def test_of_forty_callers_at_once_on_ten_keys_each_key_has_one_effect_and_one_result():
    results = [pair for found in processes(4, CALLER) for pair in found]
    assert Counter(number for number, _result in results) == dict.fromkeys(range(10), 4)
    assert len({(number, result["entry"]) for number, result in results}) == 10
    assert [effects(f"job-{number}") for number in range(10)] == [1] * 10


@pytest.mark.row_locks
@MODES
def test_a_call_whose_process_is_killed_runs_again(mode):
    program = (
        "import django; django.setup(); from tests.messages import jobs;"
        f" jobs.dies(mode={mode!r})"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        env=environment(),
        check=False,
    )
    assert ended.returncode == -9
    wait_for_row_locks()
    from tests.messages import jobs

    if mode == "lease":
        with pytest.raises(NotRun):
            jobs.dies(mode=mode, dies=False)
        IdempotencyRecord.objects.update(locked_at=ahead(-60), locked_until=ahead(-60))
    assert jobs.dies(mode=mode, dies=False) == "lived"
    assert effects() == (1 if mode == "atomic" else 2)
