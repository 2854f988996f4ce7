"""The acts of an operator: a form for each, which the admin shows, and whose fields are
options of the command.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, ClassVar

from django import forms
from django.core.validators import RegexValidator
from django.db.models import TextChoices
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_idempotency.conf import conf
from django_idempotency.maintenance.decisions import (
    Act,
    allow_retry,
    extend,
    fail,
    may_be_given,
    objection_to,
    resolve,
)
from django_idempotency.maintenance.stats import WEEK
from django_idempotency.models import IdempotencyRecord
from django_idempotency.values.outcomes import StoredResponse
from django_idempotency.values.response_headers import WITHOUT_BODY

CONTENT_TYPE = RegexValidator(
    re.compile(r"^[\w.+-]+/[\w.+-]+(?: *; *[\w.+-]+=[\w.+-]+)*\Z", re.ASCII),
    gettext_lazy("Enter a valid content type."),
)
TEXT = forms.TextInput(attrs={"class": "vTextField"})  # as the admin has it


class Decision(forms.Form):
    """What an operator can decide, and the form for it. ``asks`` is what the page asks
    of an operator.
    """

    act: ClassVar[Any]
    title: ClassVar[Any]
    asks: ClassVar[Any]
    button: ClassVar[Any]

    note = forms.CharField(
        label=gettext_lazy("Note"),
        required=False,
        max_length=200,
        widget=TEXT,
        help_text=gettext_lazy("The reason, for the history of the record."),
    )

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        note = self.fields["note"] = self.fields.pop("note")  # last
        note.required = "note" in conf().decisions


class Intervention(Decision):
    """A decision about a record. ``is_of_one``: each record needs its own."""

    do: ClassVar[Callable[..., IdempotencyRecord | TextChoices]]
    is_of_one = False

    def __init__(self, data: Any = None, *, record: Any = None) -> None:
        super().__init__(data)
        self.record = record

    @classmethod
    def objection(cls, record: Any, by: Any = None) -> TextChoices | None:
        """Return why ``by`` can't decide this about ``record``."""
        return objection_to(cls.act, record, by)

    def terms(self) -> dict[str, Any]:
        """Return the arguments of ``do`` that were entered."""
        return self.cleaned_data


class AllowRetry(Intervention):
    act = Act.ALLOW_RETRY
    title = gettext_lazy("Allow a retry")
    asks = gettext_lazy(
        "The next request with the key runs again. Make sure that the operation did not"
        " take place."
    )
    button = gettext_lazy("Allow retry")
    do = staticmethod(allow_retry)


class MarkFailed(Intervention):
    act = Act.FAIL
    title = gettext_lazy("Mark as failed")
    asks = gettext_lazy(
        "The key never runs again: every retry gets this failure as its response."
    )
    button = gettext_lazy("Mark as failed")
    do = staticmethod(fail)

    status = forms.IntegerField(
        label=gettext_lazy("Status"),
        min_value=400,
        max_value=599,
        initial=410,
        help_text=gettext_lazy(
            "The status of the response that every retry gets from now on: an error,"
            " 400 to 599."
        ),
    )
    detail = forms.CharField(
        label=gettext_lazy("Detail"),
        required=False,
        max_length=1000,
        widget=TEXT,
        help_text=gettext_lazy("For the client: part of the problem response."),
    )


class Resolve(Intervention):
    act = Act.RESOLVE
    title = gettext_lazy("Resolve with a response")
    asks = gettext_lazy(
        "The operation took place: every retry gets the response that you enter here."
    )
    button = gettext_lazy("Resolve")
    do = staticmethod(resolve)
    is_of_one = True

    status = forms.IntegerField(
        label=gettext_lazy("Status"),
        min_value=200,
        max_value=599,
        help_text=gettext_lazy(
            "The status of the response that every retry gets from now on."
        ),
    )
    content_type = forms.CharField(
        label=gettext_lazy("Content type"),
        max_length=200,
        initial="application/json",
        validators=[CONTENT_TYPE],
        widget=TEXT,
    )
    body = forms.CharField(
        label=gettext_lazy("Body"),
        required=False,
        strip=False,
        max_length=100_000,
        widget=forms.Textarea(attrs={"class": "vLargeTextField"}),
    )

    def clean(self) -> dict[str, Any] | None:
        cleaned = super().clean() or self.cleaned_data
        if cleaned.get("body") and cleaned.get("status") in WITHOUT_BODY:
            self.add_error(
                "body", _("A response with status %(status)s has no body.") % cleaned
            )
        elif (
            cleaned.get("body")
            and "content_type" in cleaned
            and not may_be_given(cleaned["content_type"])
        ):
            self.add_error(
                "content_type",
                _("A response of this type can't be entered by hand here."),
            )
        elif cleaned.get("body") and "json" in cleaned.get("content_type", ""):
            try:
                json.loads(cleaned["body"])
            except (ValueError, RecursionError) as error:
                self.add_error(
                    "body", _("This is not JSON: %(error)s") % {"error": error}
                )
        return cleaned

    def terms(self) -> dict[str, Any]:
        given = self.cleaned_data
        # Browsers send line breaks with carriage returns that were not typed.
        body = given["body"].replace("\r\n", "\n").encode()
        response = StoredResponse(
            given["status"], (("Content-Type", given["content_type"]),), body
        )
        return {"response": response, "note": given["note"]}


class Extend(Intervention):
    act = Act.EXTEND
    title = gettext_lazy("Extend lease")
    asks = gettext_lazy(
        "No retry takes over before the lease ends. Its owner keeps its claim."
    )
    button = gettext_lazy("Extend")
    do = staticmethod(extend)

    seconds = forms.IntegerField(
        label=gettext_lazy("Seconds"),
        min_value=1,
        max_value=WEEK,
        initial=300,
        help_text=gettext_lazy("Counted from now. A lease is never shortened."),
    )


class Interventions(dict[str, type[Intervention]]):
    """The decisions on the page of a record, and of the command, by their acts."""

    def register(self, *interventions: type[Intervention]) -> None:
        self.update({str(each.act): each for each in interventions})


INTERVENTIONS = Interventions()
INTERVENTIONS.register(AllowRetry, MarkFailed, Resolve, Extend)
