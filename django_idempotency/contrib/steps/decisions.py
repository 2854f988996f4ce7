"""What an operator decides about a step. Each decision allows a retry, too, and has a
form, which the admin and the command ``idempotency_keys`` show.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from uuid import UUID, uuid4

from django import forms
from django.db.models import TextChoices
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_idempotency.contrib.steps.operators import opened, sealed, steps_of
from django_idempotency.contrib.steps.values import (
    LONGEST_NAME,
    StepError,
    check_name,
    dumped,
)
from django_idempotency.extending.operators import (
    TEXT,
    Act,
    Intervention,
    OperatorDecision,
    objection_to,
    response_digest,
)
from django_idempotency.extending.stores import (
    DatabaseNow,
    IdempotencyRecord,
    StoredResponse,
)

NOT_DONE: Any = object()


class StepAct(StrEnum):
    RESOLVE = "resolve_step"
    RENAME = "rename_step"

    @property
    def permission(self) -> str:
        return Act.RESOLVE.permission


class StepRefusal(TextChoices):
    """Why nothing was done, apart from what a ``Refusal`` says."""

    ABSENT = "step_absent", gettext_lazy("The operation has no such step.")
    DONE = "step_done", gettext_lazy("The step is done: it can only get a result.")
    TAKEN = "name_taken", gettext_lazy("The operation has a step of that name already.")


def resolve(
    id: UUID, step: str, result: Any, **terms: Any
) -> IdempotencyRecord | TextChoices:
    """Give a step of a record on hold the ``result`` that it had, and allow a retry,
    which continues after it.

    ``step``: its name. ``result``: ``NOT_DONE`` if it did not take place, so that the
    retry runs it. ``terms``: those of ``allow_retry``, except ``store``. Return the
    record as it was, or why nothing was done. Raises ``StepError`` for a result that
    JSON can't hold.
    """
    text = None if result is NOT_DONE else dumped(step, result)
    decision = _StepDecision(id=id, act=StepAct.RESOLVE, step=step, text=text, **terms)
    return decision.carry_out()


def rename(
    id: UUID, step: str, new: str, **terms: Any
) -> IdempotencyRecord | TextChoices:
    """Give a step of a record on hold its ``new`` name, because the code has changed,
    and allow a retry. The rest is as for ``resolve``.
    """
    check_name(new)
    decision = _StepDecision(id=id, act=StepAct.RENAME, step=step, new=new, **terms)
    return decision.carry_out()


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepDecision(OperatorDecision):
    """``text``: the result; ``None`` for a step that was not done."""

    step: str
    text: bytes | None = None
    new: str = ""

    @property
    def digest(self) -> str:
        about = (("Step", self.step), ("New", self.new))
        return response_digest(StoredResponse(200, about, self.text))

    def entry(self) -> str:
        done = "resolved with a result" if self.text is not None else "was not done"
        done = f"renamed to {self.new!r}" if self.new else done
        return f"Step {self.step!r} {done}; retry allowed."

    def objection(self, record: Any) -> TextChoices | None:
        if why := objection_to(Act.ALLOW_RETRY, record, self.by):
            return why
        found = dict(steps_of(record).values_list("name", "finished_at"))
        if self.step not in found:
            return StepRefusal.ABSENT
        if self.new:
            return StepRefusal.TAKEN if self.new in found else None
        is_done = self.text is None and found[self.step] is not None
        return StepRefusal.DONE if is_done else None

    def changed(self, record: Any) -> dict[str, Any]:
        rows = steps_of(record).filter(name=self.step)
        step, using = rows.get(), rows.db
        if self.new:
            text = opened(step, using)
            again = {} if text is None else sealed(text, step, self.new, using)
            rows.update(name=self.new, **again)
        elif self.text is None:
            rows._raw_delete(using)
        else:
            finished = {"finished_at": DatabaseNow(), "token": uuid4()}
            rows.update(**sealed(self.text, step, self.step, using), **finished)
        return OperatorDecision.changed(self, record)


# --- Their forms ----------------------------------------------------------------------


class OfStep(Intervention):
    is_of_one = True

    step = forms.CharField(
        label=gettext_lazy("Step"), max_length=LONGEST_NAME, widget=TEXT
    )

    def __init__(self, data: Any = None, *, record: Any = None) -> None:
        super().__init__(data, record=record)
        self.names: list[str] = []
        if record is not None:
            steps = steps_of(record).order_by("finished_at", "started_at")
            self.names = [*steps.reverse().values_list("name", flat=True)]
            shown = [(name, name) for name in self.names]
            self.fields["step"].widget = forms.Select(choices=shown)

    @classmethod
    def objection(cls, record: Any, by: Any = None) -> TextChoices | None:
        why = objection_to(Act.ALLOW_RETRY, record, by)
        has_steps = why is not None or steps_of(record).exists()
        return why if has_steps else StepRefusal.ABSENT

    def clean_step(self) -> str:
        name: str = self.cleaned_data["step"]
        if self.record is not None and name not in self.names:
            text = _("The operation has no step %(step)s. Its steps: %(steps)s.")
            has = {"step": name, "steps": ", ".join(self.names)}
            raise forms.ValidationError(text % has)
        return name


class ResolveStep(OfStep):
    act = StepAct.RESOLVE
    title = gettext_lazy("Resolve a step")
    asks = gettext_lazy(
        "The next request with the key continues after the step if it was done, and"
        " with the step if it was not. Find out which of the two is true."
    )
    button = gettext_lazy("Resolve and allow retry")
    do = staticmethod(resolve)

    outcome = forms.ChoiceField(
        label=gettext_lazy("Outcome"),
        choices={
            "done": gettext_lazy("It was done"),
            "not-done": gettext_lazy("It was not done"),
        },
        widget=forms.RadioSelect,
        help_text=gettext_lazy("Whether the step took place."),
    )
    result = forms.CharField(
        label=gettext_lazy("Result"),
        required=False,
        widget=forms.Textarea(attrs={"class": "vLargeTextField", "rows": 4}),
        help_text=gettext_lazy(
            "JSON, as the step would have returned it; only if it was done."
        ),
    )

    def clean(self) -> dict[str, Any]:
        given = self.cleaned_data
        if (outcome := given.pop("outcome", "")) != "done":
            if outcome and given["result"]:
                self.add_error("result", _("A step that was not done has no result."))
            return {**given, "result": NOT_DONE}
        try:
            given["result"] = json.loads(given["result"])
            dumped(given.get("step", ""), given["result"])
        except StepError as error:
            self.add_error("result", str(error))
        except (ValueError, RecursionError) as error:
            text = _("This is not JSON: %(error)s") % {"error": error}
            self.add_error("result", text)
        return given


class RenameStep(OfStep):
    act = StepAct.RENAME
    title = gettext_lazy("Rename a step")
    asks = gettext_lazy(
        "The code now has another name for the step. The next request with the key"
        " uses the result under the new name."
    )
    button = gettext_lazy("Rename and allow retry")
    do = staticmethod(rename)

    new = forms.CharField(
        label=gettext_lazy("New name"),
        max_length=LONGEST_NAME,
        widget=TEXT,
        help_text=gettext_lazy("As the code has it."),
    )
