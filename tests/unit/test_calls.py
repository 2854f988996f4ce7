"""Keys of calls, by templates over their arguments, and what of a call is compared."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import StrEnum
from types import SimpleNamespace
from uuid import UUID

import pytest
from django import forms
from django.contrib.auth.models import User
from django.core.exceptions import ImproperlyConfigured

from django_idempotency import Policy, once
from django_idempotency.messages.django_tasks import idempotent_task
from django_idempotency.values.calls import Keying, arguments_of

STATED = Policy(retention=None)


def bill(invoice_id, *, amount=5):
    raise AssertionError("it ran")


def saved(pk):
    user = User(pk=pk)
    user._state.adding = False
    return user


class Word(StrEnum):
    LATE = "late"


class Form(forms.ModelForm):
    class Meta:
        model = User
        fields = ("username",)


def key_of(*args, by="invoice-{invoice_id}", **kwargs):
    return Keying(by, bill, STATED).of(args, kwargs)


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ("é 7/a", "é 7/a"),
        (Word.LATE, "late"),
        (7, "7"),
        (UUID(int=7), "00000000-0000-0000-0000-000000000007"),
        (date(2026, 11, 28), "2026-11-28"),
        (
            datetime(2026, 11, 28, 5, tzinfo=timezone(timedelta(hours=2))),
            "2026-11-28T03:00:00+00:00",
        ),
        (saved(7), "7"),
    ],
)
def test_a_part_of_a_key(part, text):
    assert key_of(part) == key_of(invoice_id=part) == f"invoice-{text}"
    assert key_of(part, by=lambda invoice_id, **_named: invoice_id) == text


@pytest.mark.parametrize(
    "part",
    [
        *(None, "", 1.0, True, Decimal(1), [7], object()),
        *(User(pk=7), saved(None), User, Form()),
    ],
)
def test_a_wrong_part_is_an_error_that_names_the_argument(part):
    with pytest.raises(ValueError, match=r"test_calls\.bill: invoice_id is .* a key"):
        key_of(part)
    with pytest.raises(ValueError, match=r"test_calls\.bill: it is .* a key is made"):
        key_of(7, by=lambda *_args: part)


def test_a_template_takes_defaults_and_several_arguments():
    assert key_of(7, by="{{{invoice_id}/{amount}}}") == "{7/5}"


@pytest.mark.parametrize("decorator", [once, idempotent_task])
@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("invoice-{invoiceid}", "no argument 'invoiceid'; did you mean 'invoice_id'?"),
        ("invoice", "'invoice', names no argument: all calls would share one key"),
        ("", "names no argument"),
        ("{}", "{} must be the plain name of an argument"),
        ("{0}", "{0} must be the plain name"),
        ("{invoice_id.pk}", "{invoice_id.pk} must be the plain name"),
        ("{invoice_id!r}", "{invoice_id} must be the plain name"),
        ("{invoice_id:>5}", "{invoice_id} must be the plain name"),
        ("{invoice_id", "expected '}' before end of string"),
        (7, "is 7; it must be a template"),
    ],
)
def test_a_wrong_template_is_an_error_at_import(decorator, key, says):
    with pytest.raises(ImproperlyConfigured) as refused:
        decorator(key=key, retention=None)(bill)
    assert says in str(refused.value)
    assert "test_calls.bill" in str(refused.value)


@pytest.mark.parametrize("decorator", [once, idempotent_task])
def test_a_key_without_a_stated_retention_is_an_error(decorator):
    for options in ({}, {"policy": Policy(mode="lease")}, {"mode": "lease"}):
        with pytest.raises(ImproperlyConfigured, match="needs a retention"):
            decorator(key="{invoice_id}", **options)(bill)
    decorator(key="{invoice_id}", policy=Policy(retention=60))(bill)


def test_arguments_are_compared_by_name_and_meaning():
    def compared(*args, **kwargs):
        return arguments_of(bill, args, kwargs)

    assert compared(7, amount=1) == compared(amount=1, invoice_id=7)
    assert compared(7) != compared(7, amount=1)
    assert compared({"b", "a"}) == compared({"a", "b"})
    assert compared(saved(7)) != compared(saved(8))
    renamed = saved(7)
    renamed.username = "another"  # which its text shows
    assert compared(saved(7)) == compared(renamed)
    assert compared(User) != compared(Form)
    instant, east = datetime(2026, 1, 1, tzinfo=UTC), timezone(timedelta(hours=2))
    assert compared(instant) == compared(instant.astimezone(east))
    assert compared(instant) != compared(instant.replace(tzinfo=east))
    assert compared(Decimal(10)) == compared(Decimal("10.00"))
    assert compared(Decimal(10)) != compared(Decimal("10.01"))
    assert compared(Decimal("sNaN")) == compared(Decimal("sNaN"))


@pytest.mark.parametrize(
    "value",
    [
        *(object(), [object()], {object()}, {("a", 1): object()}),
        *(bill, SimpleNamespace(a=bill)),
    ],
)
def test_an_argument_that_is_another_in_each_process_is_an_error(value):
    with pytest.raises(
        ValueError, match=r"bill: the argument amount contains .* at 0x"
    ):
        arguments_of(bill, [7], {"amount": value})
