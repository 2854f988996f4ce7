"""What steps promise in one process: effects and result are kept together, a later
attempt gets the result without running the step again, and misuse is refused.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading

import pytest
from django.db import ProgrammingError, connection, transaction
from django.http import HttpResponse

from django_idempotency import (
    Body,
    ClaimLost,
    Message,
    Policy,
    StoreUnavailable,
    consume,
    current,
    run_once,
)
from django_idempotency.contrib import steps
from django_idempotency.contrib.steps.memos import Memos
from django_idempotency.contrib.steps.models import Step
from django_idempotency.contrib.steps.values import MOST
from django_idempotency.maintenance import reap
from django_idempotency.maintenance.decisions import allow_retry
from django_idempotency.messages import Done
from django_idempotency.models import IdempotencyRecord
from django_idempotency.stores.database import ahead
from django_idempotency.values.rules import LONGEST
from tests.contrib.steps.conftest import LEASE, arun, run
from tests.support.aliases import another_alias
from tests.support.callers import effects, entry_point, pay, record, shift
from tests.support.proxy import Cut
from tests.support.statements import sent_statements
from tests.support.threads import in_threads, just_after
from tests.support.views_of_laws import HOUR

KEYS = ["eJ2oqS2Q6Xk1m3yQ9vN0n1c4b7a8d5f6g7h8i9j0k1E="]


class Crash(BaseException):
    """What ends a process, as far as one process can play that."""


pytestmark = pytest.mark.postgresql


class Work:
    """Steps by name that count their runs; ``break_after`` fails once behind a step."""

    def __init__(self, *names, break_after=None, error=ArithmeticError):
        self.names, self.break_after, self.error = names, break_after, error
        self.ran = []

    def __call__(self):
        return [self.step(name) for name in self.names]

    def step(self, name, **how):
        def effect():
            self.ran.append(name)
            return pay(name).reference

        done = steps.atomic(name, effect, **how)
        if name == self.break_after:
            self.break_after = None
            raise self.error("asked for")
        return done


def failing(work, error=ArithmeticError, **policy):
    with pytest.raises(error):
        run(work, **policy)


def on_hold(work):
    assert run(work)["code"] == "idempotency_key_on_hold"
    return record().reason


@pytest.mark.parametrize("encrypt", [False, True])
def test_a_step_that_is_done_is_not_run_again(settings, encrypt):
    settings.IDEMPOTENCY = {**settings.IDEMPOTENCY, "ENCRYPTION_KEYS": KEYS}
    keys = []

    def work():
        first = steps.atomic("reserve", lambda: {"at": pay("reserve").pk and (1, 2)})
        bank = steps.call("bank", lambda key: keys.append(key) or key)
        if len(keys) == 1:
            keys.append("retry")
            raise ArithmeticError
        second = steps.atomic("book", lambda: pay("book").reference)
        return [first, bank == current().child_key("bank"), second]

    body = {"body": Body(encrypt=encrypt)}
    failing(work, **body)
    assert run(work, **body) == [{"at": [1, 2]}, True, "book"]
    assert (len(keys), effects("reserve"), effects("book")) == (2, 1, 1)
    in_clear = bytes(Step.objects.get(name="book").result) == b'"book"'
    assert in_clear == (not encrypt)


def test_order_and_names_are_free_in_threads_and_in_tasks():
    """dbos-transact-py #688: order under ``gather`` differed, and retried for ever."""
    names = [f"line:{number}" for number in range(5)]

    def in_threads(order, fails):
        def work():
            results = dict.fromkeys(names)

            def step(name):
                results[name] = steps.atomic(name, lambda: pay(name).reference)
                connection.close()

            threads = [
                threading.Thread(target=contextvars.copy_context().run, args=(step, n))
                for n in order
            ]
            for thread in threads:
                thread.start()
                thread.join()
            if fails:
                raise ArithmeticError
            return [results[name] for name in names]

        return work

    failing(in_threads(names[:3], fails=True))
    assert run(in_threads(names[::-1], fails=False)) == names

    async def together(order, fails):
        done = await asyncio.gather(
            *(steps.acall(name, lambda key, name=name: tell(name)) for name in order),
            steps.aatomic("book", lambda: pay("book").reference),
        )
        if fails:
            raise ArithmeticError
        return sorted(done)

    told = []

    async def tell(name):
        await asyncio.sleep(0)
        told.append(name)
        return name

    with pytest.raises(ArithmeticError):
        arun(lambda: together(names[:3], fails=True), "async")
    assert arun(lambda: together(names[::-1], fails=False), "async") == ["book", *names]
    assert sorted(told) == names
    assert [effects(name) for name in [*names, "book"]] == [1] * 6


@pytest.mark.parametrize("error", [ArithmeticError, OSError, TimeoutError])
def test_an_error_is_not_remembered(error):
    """dbos-transact-py #679 and #812: retryable errors were kept as final."""
    tries = []

    def bank(key):
        tries.append(key)
        if len(tries) < 3:
            raise error("try again")
        return "paid"

    def work():
        return steps.call("bank", bank)

    failing(work, error)
    failing(work, error)
    assert run(work) == "paid"
    assert len(set(tries)) == 1


def test_a_retry_gets_what_the_first_run_got_whatever_its_types():
    """rails #58045: types drift on resume. And ts #1205: two recoveries disagreed."""
    seen = []

    def work():
        seen.append(steps.call("bank", lambda key: {1: (2.5, None, "ü"), "b": [True]}))
        if len(seen) < 3:
            raise ArithmeticError
        return seen[-1]

    failing(work)
    failing(work)
    assert (
        seen[:1] * 3 == [*seen, run(work)] == [{"1": [2.5, None, "ü"], "b": [True]}] * 3
    )


# --- What is refused ------------------------------------------------------------------


def inside():
    return steps.atomic("outer", lambda: steps.call("inner", lambda key: key))


def in_transaction():
    with transaction.atomic():
        return steps.call("bank", lambda key: key)


def twice():
    steps.atomic("reserve", lambda: None)
    return steps.atomic("reserve", lambda: None)


async def in_a_loop():
    return steps.call("bank", lambda key: key)


async def of_a_coroutine():
    async def reserve():
        return pay("x").reference

    return await steps.aatomic("reserve", reserve)


REFUSED = {
    "a step in a step": (inside, "is inside the step 'outer'"),
    "in somebody else's transaction": (in_transaction, "outside transaction.atomic"),
    "twice by one name": (twice, "has a step 'reserve' already"),
    "no JSON": (lambda: steps.atomic("a", lambda: pay("x").created_at), "JSON"),
    "no number": (lambda: steps.call("a", lambda key: float("nan")), "JSON"),
    "too large": (lambda: steps.atomic("a", lambda: pay("x") and "x" * MOST), "bytes"),
    "no name": (lambda: steps.atomic("", lambda: None), "1 to 100 printable"),
    "a NUL": (lambda: steps.call("a\0", lambda key: pay("x").reference), "printable"),
    "async code without the twin": (in_a_loop, "await steps.acall"),
    "a coroutine in a transaction": (of_a_coroutine, "sync function"),
}


@pytest.mark.parametrize(("work", "why"), REFUSED.values(), ids=REFUSED)
def test_misuse_is_refused_before_anything_is_committed(work, why):
    runs = arun if asyncio.iscoroutinefunction(work) else run
    with pytest.raises(steps.StepError, match=why):
        runs(work)
    assert effects("x") == 0
    assert Step.objects.filter(name__in=["a", "bank", "outer", "inner"]).count() == 0


def test_a_call_may_run_another_operation_with_steps_of_its_own():
    def inner():
        return steps.atomic("bank", lambda: pay("inner").reference)

    def work():
        of = {"name": "inner", "retention": 60, "mode": "lease"}
        return steps.call("bank", lambda key: run_once(key, inner, **of))

    assert run(work) == "inner"
    assert Step.objects.filter(name="bank").count() == 2


def test_the_same_function_serves_every_caller():
    """In lease mode, in atomic mode, in a message, and without a claim."""
    keys = []

    def service():
        done = steps.atomic("reserve", lambda: (pay("served").reference,))
        keys.append(steps.call("bank", lambda key: key))
        return done

    expected = ["served"]
    assert run(service, "lease") == run(service, "atomic", mode="atomic") == expected
    for mode in ("lease", "atomic"):
        message = Message("q", mode)
        handle = lambda message, context: service()  # noqa: E731
        assert consume(message, handle, policy=Policy(mode=mode)) == Done(expected)
    for mode in ("lease", "atomic"):
        once = {"name": f"job-{mode}", "retention": 60, "mode": mode}
        assert [run_once("k", service, **once) for _call in range(2)] == [expected] * 2
    assert service() == service() == expected
    assert len(set(keys)) == 8
    assert effects("served") == 8


def test_at_most_once_is_refused_in_atomic_mode_and_runs_without_a_claim():
    def work():
        return steps.call("fax", lambda: "sent", at_most_once=True)

    assert work() == "sent"
    with pytest.raises(steps.StepError, match="lease"):
        run(work, mode="atomic")


# --- Half done ------------------------------------------------------------------------


def test_a_half_done_operation_does_not_expire():
    """However often it fails or is taken over. It did its steps again, once."""
    work = Work("reserve", "book", break_after="reserve")
    policy = {"retention": 60}
    failing(work, **policy)
    for _attempt in range(2):
        work.break_after = "reserve"
        failing(work, **policy)
        left = record().expires_at - record().created_at
        assert left.total_seconds() > LONGEST
    assert run(work, **policy) == ["reserve", "book"]
    assert (effects("reserve"), effects("book")) == (1, 1)
    left = record().expires_at - record().updated_at
    assert left.total_seconds() == pytest.approx(60, abs=1)


def test_a_half_done_operation_that_was_taken_over_or_reaped_does_not_expire():
    work = Work("reserve", "book", break_after="reserve", error=Crash)
    failing(work, Crash)
    for claim_again in (True, False):
        IdempotencyRecord.objects.update(
            status="processing",
            token="0" * 32,
            locked_at=ahead(-HOUR),
            locked_until=ahead(-HOUR),
        )
        if claim_again:
            work.break_after = "reserve"
            failing(work, Crash)
        else:
            assert reap().done["failed"] == 1
        assert (record().purge_at - record().created_at).total_seconds() > LONGEST
    assert run(work) == ["reserve", "book"]
    assert effects("reserve") == 1


def test_a_half_done_operation_is_not_released():
    """Its next life would do its steps again. The second attempt asks for none."""
    statuses = [422, 422, 201]

    def view(request):
        status = statuses.pop(0)
        if len(statuses) != 1:
            steps.atomic("reserve", lambda: pay("reserve").reference)
        return HttpResponse(status=status)

    protected = entry_point(view, mode=LEASE)
    assert [protected().status_code for _attempt in range(3)] == [422, 422, 201]
    assert (effects("reserve"), record().attempts) == (1, 3)


@pytest.mark.parametrize("error", [StoreUnavailable, ClaimLost, ProgrammingError])
def test_an_operation_whose_steps_cannot_be_read_is_not_released(monkeypatch, error):
    """Nobody can tell whether it is half done."""
    statuses = [422, 422, 201]

    def view(request):
        status = statuses.pop(0)
        if len(statuses) != 1:
            steps.atomic("reserve", lambda: pay("reserve").reference)
        return HttpResponse(status=status)

    def fails(memos):
        raise error("unreadable")

    protected = entry_point(view, mode=LEASE)
    protected()
    with monkeypatch.context() as patch:
        patch.setattr(Memos, "load", fails)
        protected()
    assert (record().status, record().attempts) == ("failed", 2)
    assert (protected().status_code, effects("reserve")) == (201, 1)


def test_a_later_attempt_that_did_no_step_is_released():
    statuses = [500, 422]
    view = entry_point(lambda request: HttpResponse(status=statuses.pop(0)), mode=LEASE)
    assert [view().status_code for _attempt in range(2)] == [500, 422]
    assert not IdempotencyRecord.objects.exists()


def test_a_new_life_of_the_key_does_not_see_earlier_memos():
    """dbos-transact-py #769: memos of a reused id answered for a new operation."""
    assert run(lambda: steps.atomic("reserve", lambda: "first")) == "first"
    shift(expires_at=-HOUR)
    crashes = [ArithmeticError()]

    def work():
        if crashes:
            raise crashes.pop()
        return steps.atomic("reserve", lambda: "second")

    failing(work)
    assert run(work) == "second"


# --- Code that has changed ------------------------------------------------------------


def test_code_that_has_changed_is_held_before_the_new_step_runs():
    """Absurd: a renamed payment step charges again."""
    old, new = Work("pay", "book", break_after="pay"), Work("charge", "book")
    failing(old)
    reason = on_hold(new)
    assert "charge" in reason
    assert "pay" in reason
    assert (new.ran, effects("charge")) == ([], 0)


def test_an_operator_lets_new_code_run_on():
    failing(Work("pay", "book", break_after="pay"))
    on_hold(new := Work("charge", "book"))
    assert isinstance(allow_retry(record().pk), IdempotencyRecord)
    assert run(new) == ["charge", "book"]


def test_a_later_attempt_that_asks_for_no_step_is_warned_of(caplog):
    async def done():
        return "done"

    for how, work in ((run, lambda: "done"), (arun, done)):
        caplog.clear()
        failing(Work("pay", "book", break_after="pay"), key=how.__name__)
        assert how(work, how.__name__) == "done"
        assert "without asking for these steps, which are done: pay" in caplog.text


@pytest.mark.parametrize("encrypt", [False, True])
def test_an_operator_maps_an_old_name_to_the_new_one(settings, encrypt):
    settings.IDEMPOTENCY = {**settings.IDEMPOTENCY, "ENCRYPTION_KEYS": KEYS}
    body = {"body": Body(encrypt=encrypt)}
    failing(Work("pay", "book", break_after="pay"), **body)
    new = Work("charge", "book")
    assert run(new, **body)["code"] == "idempotency_key_on_hold"
    steps.rename(record().pk, "pay", "charge")
    assert run(new, **body) == ["pay", "book"]
    assert new.ran == ["book"]


def test_a_call_that_states_its_former_name_is_not_repeated():
    keys = []

    def call(name, **how):
        def work():
            done = steps.call(name, lambda key: keys.append(key) or key, **how)
            if len(keys) < len(wanted):
                raise ArithmeticError
            return done

        return work

    wanted = [1, 2]
    failing(call("bank"))
    wanted = [1]
    assert run(call("transfer", key="bank")) == keys[0]
    # and without a memo, the provider gets the key that it knows
    wanted = []
    assert run(call("transfer", key="bank"), "k") == keys[0]


def test_new_steps_run_on_where_the_code_says_so_and_in_async_code(caplog):
    failing(Work("pay", break_after="pay"))
    new = Work("charge")
    assert run(lambda: new.step("charge", on_drift="run")) == "charge"
    assert "without asking for these steps, which are done: pay" in caplog.text

    async def work():
        done = await steps.aatomic(name, lambda: pay(name).reference)
        if name == "a":
            raise ArithmeticError
        return done

    name = "a"
    with pytest.raises(ArithmeticError):
        arun(work, "async")
    name = "b"
    assert arun(work, "async") == "b"
    assert "which are done: a" in caplog.text


# --- At most once ---------------------------------------------------------------------


@pytest.mark.parametrize("error", [ArithmeticError, Crash])
def test_a_call_that_may_run_at_most_once_is_left_to_an_operator(error):
    sent = []

    def fax():
        sent.append(1)
        raise error("maybe")

    def work():
        return [steps.call("fax", fax, at_most_once=True), steps.atomic("b", lambda: 1)]

    if error is Crash:
        failing(work, Crash)
    for _retry in range(2):
        assert "fax" in on_hold(work)
    assert sent == [1]

    steps.resolve(record().pk, "fax", {"page": 1}, by="ops")
    assert run(work) == [{"page": 1}, 1]
    assert sent == [1]


def test_an_operator_says_that_it_was_not_done():
    sent = []

    def fax():
        sent.append(1)
        if len(sent) == 1:
            raise ArithmeticError
        return "sent"

    def work():
        return steps.call("fax", fax, at_most_once=True)

    on_hold(work)
    allow_retry(record().pk)
    assert (run(work), len(sent)) == ("sent", 2)


def test_a_retry_that_was_allowed_for_another_reason_says_nothing_about_a_step():
    def fax():
        raise Crash

    def work():
        return steps.call("fax", fax, at_most_once=True)

    failing(work, Crash)
    IdempotencyRecord.objects.update(on_hold=True, reason="the bank says maybe")
    allow_retry(record().pk)
    assert "fax" in on_hold(work)


# --- COMMIT, and the database ---------------------------------------------------------


@pytest.mark.parametrize("cut", [Cut.BEFORE_COMMIT, Cut.AFTER_COMMIT])
def test_a_lost_reply_to_commit(proxy, cut):
    """Told from a failure: the memo of this attempt is there, or not."""
    hooks = []

    def reserve():
        transaction.on_commit(lambda: hooks.append("ran"))
        done = pay("reserve").reference
        proxy.cut = None if proxy.cuts else cut
        return done

    def work():
        return steps.atomic("reserve", reserve)

    first = run(work)
    if cut is Cut.BEFORE_COMMIT:
        assert first["code"] == "idempotency_store_unavailable"
        assert effects("reserve") == 0
        first = run(work)
    assert (first, effects("reserve"), hooks) == ("reserve", 1, ["ran"])


@pytest.mark.parametrize("is_written", [False, True])
def test_a_call_outlives_the_connection_that_was_idle_meanwhile(proxy, is_written):
    calls = []

    def bank(key):
        calls.append(key)
        if is_written:
            proxy.cut = Cut.AFTER_MEMO
        else:
            for wire in proxy.wires:
                wire.close()
        return "paid"

    assert run(lambda: steps.call("bank", bank)) == "paid"
    assert (len(calls), proxy.cuts) == (1, int(is_written))


def test_an_attempt_that_was_taken_over_commits_nothing_more():
    def steal():
        done = pay("stolen").reference
        IdempotencyRecord.objects.using("other").update(token="1" * 32)
        return done

    with another_alias("other"):
        answer = run(lambda: steps.atomic("reserve", steal))
    assert answer["code"] == "idempotency_key_in_use"
    assert (effects("stolen"), Step.objects.count()) == (0, 0)


def test_nobody_takes_over_between_a_memo_and_its_commit():
    rivals, work = [], Work("reserve", "book")

    def take_over(_number):
        with (
            connection.cursor() as cursor
        ):  # rather than wait for what is not committed
            cursor.execute("SET lock_timeout = '2s'")
        return run(work)

    def rival():
        rivals.append(in_threads(1, take_over)[0]["code"])

    def lapsing(name):
        if name == "book":
            in_threads(1, lambda _: shift(locked_until=-HOUR))
        return pay(name).reference

    def attempt():
        steps.atomic("reserve", lambda: lapsing("reserve"))
        with just_after(r"\s*WITH own", rival):
            return steps.atomic("book", lambda: lapsing("book"))

    assert run(attempt) == "book"
    assert (rivals, effects("book")) == (["idempotency_key_in_use"], 1)


@pytest.mark.parametrize(
    ("decide", "expected"),
    [
        (lambda: steps.resolve(record().pk, "reserve", "early"), 1),
        (lambda: steps.resolve(record().pk, "reserve", steps.NOT_DONE), 2),
        (lambda: allow_retry(record().pk), 2),
    ],
    ids=["done", "not done", "retry"],
)
def test_a_transaction_that_was_committed_behind_its_back_is_held(decide, expected):
    """The operator finds out whether its effects are there, and says so."""

    def reserve():
        done = pay("early").reference
        if effects("early") == 1:
            with connection.cursor() as cursor:
                cursor.execute("COMMIT")
        return done

    def work():
        return steps.atomic("reserve", reserve)

    assert "Django's back" in on_hold(work)
    assert effects("early") == 1
    assert isinstance(decide(), IdempotencyRecord)
    assert run(work) == "early"
    assert effects("early") == expected


def test_a_step_is_done_despite_an_error_in_a_hook(caplog):
    def reserve():
        transaction.on_commit(lambda: 1 / 0)
        return pay("hooked").reference

    assert run(lambda: steps.atomic("reserve", reserve)) == "hooked"
    assert "its step reserve is committed, but" in caplog.text


# --- What steps cost ------------------------------------------------------------------


def test_the_budget_of_steps():
    """By libpq's trace: an atomic step sends no message beyond those of its
    transaction, a call one, and one that may run at most once two. Only a transaction,
    and the note that a call begins, wait for the disk.
    """
    sent = {}

    def measured(name, work):
        with sent_statements() as statements:
            work()
        sent[name] = statements

    def plain():
        with transaction.atomic():
            pay("plain")

    def warm(number):
        steps.atomic(f"warm:{number}", lambda: pay("warm").reference)
        steps.call(f"warm:c{number}", lambda key: None)
        steps.call(f"warm:o{number}", lambda: None, at_most_once=True)

    def work():
        for number in range(4):
            warm(number)
        measured("plain", plain)
        measured("atomic", lambda: steps.atomic("a", lambda: pay("a").reference))
        measured("call", lambda: steps.call("b", lambda key: None))
        measured("once", lambda: steps.call("c", lambda: None, at_most_once=True))

    run(work)
    trips = {name: len(each.round_trips) for name, each in sent.items()}
    assert trips["atomic"] <= trips["plain"]
    assert (trips["call"], trips["once"]) == (1, 2)
    later = [
        ["synchronous_commit" in each for each in sent[name].data]
        for name in ("call", "once")
    ]
    assert later == [[True], [False, True]]
    assert sent["atomic"].on("synchronous_commit") == []
    assert len(sent["atomic"].transaction) == len(sent["plain"].transaction) == 2


def test_memos_are_loaded_once_and_only_by_a_later_attempt():
    work, seen = Work("a", "b", "c", break_after="b"), []

    def traced():
        with sent_statements() as statements:
            try:
                return work()
            finally:
                seen.append(statements)

    failing(traced)
    assert run(traced) == ["a", "b", "c"]
    reads = [len(each.on("LEFT JOIN django_idempotency_step")) for each in seen]
    assert reads == [0, 1]
