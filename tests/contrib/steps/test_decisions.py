"""What an operator decides about a step: in the admin, by the command, and in code."""

from __future__ import annotations

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth import get_user_model
from django.core.management import CommandError, call_command
from django.utils.html import strip_tags

from django_idempotency import signals
from django_idempotency.contrib import steps
from django_idempotency.contrib.steps.decisions import StepAct, StepRefusal
from django_idempotency.contrib.steps.models import Step
from django_idempotency.contrib.steps.values import MOST, StepError
from django_idempotency.maintenance.decisions import Refusal, version
from tests.admin.pages import LIST, allow
from tests.contrib.steps.conftest import run
from tests.support.callers import SCOPE, heard, record
from tests.support.commands import told

pytestmark = pytest.mark.postgresql
HELD = "idempotency_key_on_hold"
DONE = {"step": "fax", "outcome": "done", "result": '{"page": 1}'}
NOT_DONE = {"step": "fax", "outcome": "not-done"}
BY_ANNA = ("--by=anna", "--note=asked")


class Faxing:
    """A step that is done, and a fax of which nobody knows."""

    def __init__(self):
        self.sent = 0

    def __call__(self, name="reserve"):
        steps.atomic(name, lambda: name)
        return steps.call("fax", self.send, at_most_once=True)

    def send(self):
        self.sent += 1
        if self.sent == 1:
            raise TimeoutError
        return "sent again"


@pytest.fixture
def faxing():
    work = Faxing()
    assert run(work)["code"] == HELD
    return work


@pytest.fixture
def anna():
    return get_user_model().objects.create_superuser("anna")


def renamed(work):
    """The key is held because the code has another name for a step."""
    steps.resolve(record().pk, "fax", "sent")
    assert run(lambda: work("book"))["code"] == HELD


def decide(client, act, **given):
    seen = {"record": [f"{record().pk} {version(record())}"]}
    return client.post(f"{LIST}intervene/{act}/", {**seen, **given}, follow=True)


def page_of(client):
    return client.get(f"{LIST}{record().pk}/change/").content.decode()


def messages(response):
    return [strip_tags(str(message)) for message in response.context["messages"]]


@pytest.mark.parametrize(
    ("given", "result", "sent"), [(DONE, {"page": 1}, 1), (NOT_DONE, "sent again", 2)]
)
def test_the_admin_resolves_a_step(client, superuser, faxing, given, result, sent):
    assert "intervene/resolve_step/" in page_of(client)
    asked = client.get(f"{LIST}intervene/resolve_step/?id={record().pk}")
    shown = asked.content.decode()
    # what nobody knows comes first
    assert shown.index('<option value="fax"') < shown.index('<option value="reserve"')
    after = decide(client, StepAct.RESOLVE, **given, note="asked")
    assert messages(after) == ["Resolve a step: done for one record."]
    entry = LogEntry.objects.get()
    assert entry.get_change_message().startswith("Step 'fax' ")
    assert entry.get_change_message().endswith(" asked")
    assert (run(faxing), faxing.sent) == (result, sent)


def test_the_admin_renames_a_step(client, superuser, faxing):
    renamed(faxing)
    decide(client, StepAct.RENAME, step="reserve", new="book")
    assert run(lambda: faxing("book")) == "sent"


WRONG = [
    ("resolve_step", {**NOT_DONE, "step": "fex"}, "step", "fax, re"),
    ("resolve_step", {**DONE, "result": "{"}, "result", "not JSON"),
    ("resolve_step", {**DONE, "result": ""}, "result", "not JSON"),
    ("resolve_step", {**DONE, "result": "NaN"}, "result", "be kept as JSON"),
    ("resolve_step", {**DONE, "result": f'"{"x" * MOST}"'}, "result", str(MOST)),
    ("resolve_step", {**NOT_DONE, "result": "1"}, "result", "has no result"),
    ("resolve_step", {"step": "fax"}, "outcome", "required"),
    ("rename_step", {"step": "fax", "new": "x" * 101}, "new", "100"),
]


@pytest.mark.parametrize(("act", "given", "field", "why"), WRONG)
def test_the_admin_says_what_is_wrong(
    client, superuser, faxing, act, given, field, why
):
    before = version(record())
    errors = decide(client, act, **given).context["form"].errors
    assert [*errors] == [field]
    assert why in str(errors[field])
    assert version(record()) == before


def test_the_admin_refuses_a_name_that_another_step_has(client, superuser, faxing):
    after = decide(client, StepAct.RENAME, step="fax", new="reserve")
    assert "has a step of that name already" in messages(after)[0]


@pytest.mark.parametrize("act", StepAct)
def test_the_admin_asks_for_the_permission_to_resolve(client, staff, faxing, act):
    given = {"step": "fax", "outcome": "not-done", "new": "book"}
    assert decide(client, act, **given).status_code == 403
    assert f"intervene/{act}/" not in page_of(client)
    allow(staff, "resolve_idempotencyrecord")
    assert "done for one record" in messages(decide(client, act, **given))[0]


def test_records_without_steps_get_no_forms_for_them(client, superuser):
    def lost():
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        run(lost)
    type(record()).objects.update(on_hold=True)
    assert "intervene/resolve/" in page_of(client)
    assert "resolve_step" not in page_of(client)


def test_the_confirmation_is_in_german(client, superuser, faxing, settings):
    settings.LANGUAGE_CODE = "de"
    link = f"{LIST}intervene/resolve_step/?id={record().pk}"
    shown = client.get(link).content.decode()
    for text in ("Einen Schritt auflösen", "Er wurde ausgeführt", "Ergebnis"):
        assert text in shown


def test_the_command_resolves_and_renames(faxing, anna):
    name = f"--scope={SCOPE}"
    given = ("--step=fax", "--outcome=done", '--result="sent"')
    (said,) = told("idempotency_keys", "resolve-step", "k", name, *given, *BY_ANNA)
    assert said["resolve_step"] == [SCOPE]
    assert run(lambda: faxing("book"))["code"] == HELD
    given = ("--step=reserve", "--new=book")
    told("idempotency_keys", "rename-step", "k", *given, *BY_ANNA)
    assert run(lambda: faxing("book")) == "sent"
    (shown,) = told("idempotency_keys", "show", "k")
    by = [event["what"] for event in shown["events"] if event["by"] == "anna"]
    assert by[0].startswith("Step 'fax' resolved with a result; retry allowed. Digest ")
    assert by[1].startswith("Step 'reserve' renamed to 'book'; retry allowed. ")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (("--step=fex", "--outcome=not-done"), "step: The operation has no step fex"),
        (("--step=fax", "--outcome=done"), "result: This is not JSON"),
        (("--step=fax", "--outcome=maybe"), "invalid choice: 'maybe'"),
        (("--step=reserve", "--outcome=not-done"), "The step is done"),
    ],
)
def test_the_command_says_what_is_wrong(faxing, anna, given, why):
    before = version(record())
    with pytest.raises(CommandError, match=why):
        call_command("idempotency_keys", "resolve-step", "k", *given, *BY_ANNA)
    assert version(record()) == before


def test_code_is_refused_with_the_reason(faxing):
    id = record().pk
    assert steps.resolve(id, "fex", 1) is StepRefusal.ABSENT
    assert steps.resolve(id, "reserve", steps.NOT_DONE) is StepRefusal.DONE
    assert steps.rename(id, "fax", "reserve") is StepRefusal.TAKEN
    assert steps.resolve(id, "fax", 1, as_seen="earlier") is Refusal.CHANGED
    with pytest.raises(StepError, match="1 to 100"):
        steps.rename(id, "fax", "")
    with heard(signals.operator_decided) as sent:
        steps.resolve(id, "fax", 1, by="ops")
    assert [one["act"] for one in sent] == [StepAct.RESOLVE]
    assert steps.resolve(id, "fax", 1) is Refusal.FREE


def test_nobody_decides_about_a_step_of_a_key_of_their_own(faxing, anna):
    type(record()).objects.update(scope=f"auth.user:{anna.pk}")
    assert steps.resolve(record().pk, "fax", 1, by=anna) is Refusal.OWN_KEY
    assert Step.objects.get(name="fax").finished_at is None


def test_two_operators_have_to_give_the_same_result(settings, faxing, anna):
    settings.IDEMPOTENCY = {**settings.IDEMPOTENCY, "DECISIONS": ["second_operator"]}
    bob = get_user_model().objects.create_superuser("bob")
    id = record().pk
    assert steps.resolve(id, "fax", 1, by=anna) is Refusal.PROPOSED
    assert steps.resolve(id, "fax", 2, by=bob) is Refusal.PROPOSED
    assert steps.resolve(id, "fax", steps.NOT_DONE, by=bob) is Refusal.PROPOSED
    assert run(faxing)["code"] == HELD
    steps.resolve(id, "fax", 1, by=bob)
    assert run(faxing) == 1


@pytest.mark.browser
def test_an_operator_resolves_a_step_in_a_browser(browser, admin_user, faxing):
    browser.sign_in("admin", "password")
    browser.open(f"{LIST}{record().pk}/change/")
    browser.click("a[href*=resolve_step]")
    browser.find("#id_outcome input[value=done]").click()
    browser.find("#id_result").send_keys('"sent"')
    browser.click(".submit-row input[type=submit]")
    assert "done for one record" in browser.find(".messagelist").text
    assert run(faxing) == "sent"
