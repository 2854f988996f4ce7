"""L13: an error that a view handles undoes what it would have undone without a key."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from functools import partial
from uuid import uuid4

import pytest
from django.contrib.auth import get_user_model
from django.db import DatabaseError, IntegrityError, connection, transaction
from django.db.models import PROTECT, ProtectedError
from django.db.models.signals import post_delete, pre_delete
from django.http import HttpResponse
from django.test import RequestFactory

from django_idempotency.http.placement import idempotent
from django_idempotency.messages import AlreadyDone, Consumer, Done, Message, Retry
from django_idempotency.models import IdempotencyRecord
from django_idempotency.values.policy import Atomic, Policy
from testproject.models import LedgerEntry
from tests.support.callers import PAYER, entry_point, is_replay, pay, record, references
from tests.support.views import own_dispatch

pytestmark = pytest.mark.usefixtures("payer")

CLAIMS = ["record", pytest.param("lock", marks=pytest.mark.postgresql)]
claims = pytest.mark.parametrize("claim", CLAIMS)


def payer_of_all():
    return get_user_model().objects.get(username=PAYER)


def payment(**changed):
    return LedgerEntry(
        **{"kind": "order", "user": payer_of_all(), "amount": 1, "reference": "failed"}
        | changed
    )


@contextmanager
def refusing(signal):
    def refuse(**_sent):
        raise ValueError("refused")

    signal.connect(refuse, LedgerEntry)
    try:
        yield
    finally:
        signal.disconnect(refuse, LedgerEntry)


def save_without_a_number():
    with suppress(ValueError):
        payment(amount="much").save()


def update_without_a_number():
    with suppress(ValueError):
        LedgerEntry.objects.update(amount="much")


def save_of_a_missing_row():
    with suppress(DatabaseError):
        payment(pk=uuid4()).save(force_update=True)


def delete_of_a_protected_row():
    with pytest.MonkeyPatch.context() as patch, suppress(ProtectedError):
        patch.setattr(
            LedgerEntry._meta.get_field("user").remote_field, "on_delete", PROTECT
        )
        payer_of_all().delete()


def delete_that_a_receiver_refuses():
    entry = pay("undeleted")
    with refusing(pre_delete), suppress(ValueError):
        entry.delete()


def bulk_create_without_a_number():
    failing = [payment(amount="much")]
    with suppress(ValueError):
        LedgerEntry.objects.bulk_create(failing)


def add_of_something_else():
    groups = payer_of_all().groups
    with suppress(TypeError, ValueError):
        groups.add("staff")


def block_that_fails():
    with suppress(IntegrityError), transaction.atomic():
        pay("undone")
        payment(operation="once").save()
        payment(operation="once").save()


def block_that_fails_after_another_error():
    save_without_a_number()
    with suppress(LookupError), transaction.atomic():
        pay("undone")
        raise LookupError


def block_without_savepoint_that_fails_before_its_first_statement():
    failing = payment(amount="much")
    with suppress(ValueError), transaction.atomic(savepoint=False):
        transaction.on_commit(partial(LedgerEntry.objects.update, reference="never"))
        failing.save()


def block_that_ends_with_a_handled_error():
    """It is rolled back, although it raises nothing: Django has marked it."""
    with transaction.atomic():
        pay("undone")
        save_without_a_number()


def block_that_goes_on_after_a_handled_error():
    """Django lets no statement through there, with or without a key."""
    with suppress(transaction.TransactionManagementError), transaction.atomic():
        pay("undone")
        save_without_a_number()
        pay("undone")


def block_that_asks_for_its_rollback_and_another_error():
    with transaction.atomic():
        pay("undone")
        transaction.set_rollback(True)
    save_without_a_number()


def block_without_savepoint_and_another_error():
    with transaction.atomic(savepoint=False):
        pay("in the block")
    save_without_a_number()


HARMLESS = {act.__name__.replace("_", " "): act for act in [
    save_without_a_number,
    update_without_a_number,
    save_of_a_missing_row,
    delete_of_a_protected_row,
    delete_that_a_receiver_refuses,
    bulk_create_without_a_number,
    add_of_something_else,
    block_that_fails,
    block_that_fails_after_another_error,
    block_without_savepoint_that_fails_before_its_first_statement,
    block_that_ends_with_a_handled_error,
    block_that_goes_on_after_a_handled_error,
    block_that_asks_for_its_rollback_and_another_error,
    block_without_savepoint_and_another_error,
]}  # fmt: skip
harmless = pytest.mark.parametrize("act", HARMLESS.values(), ids=HARMLESS)


def handling(act, status=400):
    """A view in which ``act`` handles an error. It writes before that, and afterwards
    if it is to succeed.
    """

    def view(request):
        pay("before")
        act()
        if status < 400:
            pay("after")
        return HttpResponse(status=status)

    return view


def kept():
    return sorted(references())


def without_key(view):
    """Return what a view responds and leaves without a key."""
    status = view(RequestFactory().post("/")).status_code
    references = kept()
    LedgerEntry.objects.all().delete()
    return status, references


@claims
@pytest.mark.parametrize("status", [201, 400])
@harmless
def test_writes_around_a_handled_error_are_kept_as_without_a_key(act, status, claim):
    view = handling(act, status)
    expected = without_key(view)
    send = entry_point(view, mode=Atomic(claim=claim))
    assert (send().status_code, kept()) == expected
    assert expected == (status, kept())
    assert "before" in kept()
    assert is_replay(send()) == (status != 400)


@pytest.mark.parametrize(
    "act",
    [save_without_a_number, block_that_fails, block_that_ends_with_a_handled_error],
)
def test_a_message_whose_handler_handles_an_error_is_done(act):
    def handler(message, context):
        pay("before")
        act()
        pay("after")

    consumer = Consumer("c", handler)
    assert isinstance(consumer.consume(Message("queue", "1", b"")), Done)
    assert {"before", "after"} <= set(kept())
    assert isinstance(consumer.consume(Message("queue", "1", b"")), AlreadyDone)


def test_messages_of_a_batch_are_done_if_one_handles_an_error():
    def handler(message, context):
        pay(message.id)
        if message.id == "2":
            save_without_a_number()

    deliveries = Consumer("c", handler).consume_many(
        [Message("queue", str(number), b"") for number in range(4)]
    )
    assert ([type(delivery) for delivery in deliveries], kept()) == (
        [Done] * 4,
        ["0", "1", "2", "3"],
    )


def duplicate():
    payment(operation="once").save()
    with suppress(IntegrityError):
        payment(operation="once").save()


@claims
@pytest.mark.parametrize("status", [201, 400])
def test_a_database_error_outside_of_an_inner_block_undoes_what_the_database_says(
    status, claim
):
    """PostgreSQL undoes everything, others undo the statement."""
    send = entry_point(handling(duplicate, status), mode=Atomic(claim=claim))
    if connection.vendor != "postgresql":
        assert send().status_code == status
        assert "before" in kept()
    elif status == 400:
        assert (send().status_code, kept()) == (400, [])
    else:
        with pytest.raises(transaction.TransactionManagementError):
            send()
        assert kept() == []


@pytest.mark.postgresql
@claims
def test_a_response_to_a_database_error_that_undid_the_rest_is_not_stored(
    claim, caplog
):
    """An audit row would stand without a key. Nothing can be kept, so that is said, and
    a retry runs once the view is mended.
    """
    acts = [duplicate, duplicate, block_that_fails]

    def view(request):
        return handling(acts.pop(0), status=409 if acts else 201)(request)

    send = entry_point(view, mode=Atomic(claim=claim))
    for _time in range(2):
        assert (send().status_code, record(), kept()) == (409, None, [])
    (said,) = [each for each in caplog.records if each.event == "handled_error"]
    assert said.levelname == "ERROR"
    assert "with transaction.atomic(): …" in said.getMessage()
    assert f"{view.__module__}.{view.__qualname__}" in said.getMessage()
    assert send().status_code == 201
    assert kept() == ["after", "before"]


@pytest.mark.postgresql
@claims
def test_under_atomic_requests_such_a_response_is_stored(claim, monkeypatch, caplog):
    """Without a key, nothing would be kept, either."""
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
    send = entry_point(handling(duplicate, 409), mode=Atomic(claim=claim))
    assert (send().status_code, kept()) == (409, [])
    assert is_replay(send())
    assert not caplog.records


def half_a_block():
    with suppress(ValueError), transaction.atomic(savepoint=False):
        pay("half")
        payment(amount="much").save()


def half_a_block_and_another_error():
    failing = payment(amount="much")
    with suppress(LookupError), transaction.atomic(savepoint=False):
        pay("half")
        raise LookupError
    with suppress(ValueError):
        failing.save()


def half_a_delete():
    entry = pay("deleted")
    with refusing(post_delete), suppress(ValueError):
        entry.delete()


def roll_back_after_an_error():
    save_without_a_number()
    transaction.set_rollback(True)


def error_after_a_rollback():
    transaction.set_rollback(True)
    failing = LedgerEntry(kind="order", user_id=1, amount="much")
    with suppress(ValueError):
        failing.save()


def roll_back_after_an_error_in_a_block():
    with suppress(ValueError), transaction.atomic():
        payment(amount="much").save()
    transaction.set_rollback(True)


def roll_back_in_a_block_without_savepoint():
    with transaction.atomic(savepoint=False):
        pay("half")
        transaction.set_rollback(True)


def mark_by_hand():
    connection.needs_rollback = True


def error_wrapped_after_a_rollback():
    """The error says nothing of the mark that it met."""
    transaction.set_rollback(True)
    failing = LedgerEntry(kind="order", user_id=1, amount=1)
    with suppress(DatabaseError):
        failing.save()


UNDOING = {act.__name__.replace("_", " "): act for act in [
    half_a_block,
    half_a_block_and_another_error,
    half_a_delete,
    roll_back_after_an_error,
    error_after_a_rollback,
    roll_back_after_an_error_in_a_block,
    roll_back_in_a_block_without_savepoint,
    error_wrapped_after_a_rollback,
    mark_by_hand,
]}  # fmt: skip
undoing = pytest.mark.parametrize("act", UNDOING.values(), ids=UNDOING)


@claims
@undoing
def test_a_run_that_code_rolled_back_in_part_keeps_nothing(act, claim):
    send = entry_point(handling(act), mode=Atomic(claim=claim))
    assert (send().status_code, kept(), record()) == (400, [], None)


@undoing
def test_a_success_that_is_rolled_back_is_never_reported(act):
    with pytest.raises(transaction.TransactionManagementError):
        entry_point(handling(act, 201))()
    assert kept() == []


@pytest.mark.parametrize("act", [half_a_block, half_a_delete, mark_by_hand])
def test_a_message_is_not_done_if_its_effects_are_rolled_back(act):
    def handler(message, context):
        pay("before")
        act()

    assert isinstance(Consumer("c", handler).consume(Message("queue", "1", b"")), Retry)
    assert kept() == []


@pytest.mark.postgresql
def test_errors_of_the_next_request_are_its_own():
    """The connection is as it was before."""
    entry_point(handling(save_without_a_number))()
    with transaction.atomic():
        save_without_a_number()
        assert transaction.get_rollback()
        with pytest.raises(transaction.TransactionManagementError):
            pay()
    assert not {"get_rollback", "set_rollback", "validate_no_broken_transaction"} & set(
        vars(connection)
    )


@claims
@pytest.mark.usefixtures("client_sees_500")
@pytest.mark.parametrize("non_atomic", [False, True], ids=["", "non_atomic_requests"])
@harmless
def test_atomic_requests_undo_with_a_key_what_they_undo_without(
    call, atomic_requests, act, claim, non_atomic
):
    view = handling(act)
    view = transaction.non_atomic_requests(view) if non_atomic else view
    expected = of_call(call, view, None)
    assert of_call(call, idempotent(mode=Atomic(claim=claim))(view), "k") == expected


def of_call(call, view, key):
    response = call(view, key=key)
    references = kept()
    LedgerEntry.objects.all().delete()
    return response.status_code, references


def answering_400(error, context):
    from rest_framework.response import Response
    from rest_framework.views import set_rollback

    set_rollback()
    return Response({}, status=400)


@pytest.mark.drf
@claims
@pytest.mark.parametrize("non_atomic", [False, True], ids=["", "non_atomic_requests"])
@pytest.mark.parametrize(
    "raises",
    [False, True],
    ids=["handled in the view", "handled by the exception handler"],
)
def test_rest_framework_undoes_with_a_key_what_it_undoes_without(
    call, settings, atomic_requests, claim, raises, non_atomic
):
    from rest_framework.response import Response
    from rest_framework.views import APIView

    from django_idempotency.rest_framework import IdempotentMixin

    settings.REST_FRAMEWORK = settings.REST_FRAMEWORK | {
        "EXCEPTION_HANDLER": f"{__name__}.answering_400"
    }

    class Charges(IdempotentMixin, APIView):
        authentication_classes = permission_classes = ()
        idempotency_policy = Policy(scope="public", mode=Atomic(claim=claim))

        def post(self, request):
            pay("before")
            if raises:
                payment(amount="much").save()
            save_without_a_number()
            return Response({}, status=400)

    if non_atomic:
        Charges.dispatch = transaction.non_atomic_requests(own_dispatch(Charges))
    view = Charges.as_view()
    expected = of_call(call, view, None)
    assert of_call(call, view, "k") == expected
    assert expected == (400, ["before"] if non_atomic or not atomic_requests else [])
    assert not IdempotencyRecord.objects.exists()
