"""The commands for one key: what they tell apart, what they do and in whose name, what
they refuse, and in English.
"""

from __future__ import annotations

import json
import re

import pytest
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.contrib.contenttypes.models import ContentType
from django.core.management import CommandError, call_command, load_command_class
from django.utils import translation

from django_idempotency import signals
from django_idempotency.maintenance import reap
from django_idempotency.maintenance.advice import shown_reason
from django_idempotency.maintenance.decisions import Act
from django_idempotency.models import IdempotencyRecord
from django_idempotency.values.outcomes import Fail, Keep, StoredResponse
from django_idempotency.values.policy import Lease, Policy
from tests.admin.pages import ended
from tests.support.callers import claim, heard, record, shift
from tests.support.commands import told
from tests.support.maintained import HOLD, settled
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("payer")

DECISIONS = {
    "allow-retry": (),
    "fail": ("--status=409", "--detail=lost"),
    "resolve": ("--status=201", '--body={"id": 7}'),
    "extend": ("--seconds=1200",),
}
ENTRIES = {
    "allow-retry": "Retry allowed. asked the bank",
    "fail": "Marked as failed with the response 409. asked the bank",
    "resolve": "Resolved with the response 201. asked the bank",
    "extend": "Lease extended to 1200 s from then. asked the bank",
}
BY_ANNA = ("--by=anna", "--note=asked the bank")


@pytest.fixture
def anna():
    """Who may decide everything, and nothing else."""
    anna = get_user_model().objects.create_user("anna")
    names = [f"{act}_idempotencyrecord" for act in Act]
    anna.user_permissions.add(*Permission.objects.filter(codename__in=names))
    return anna


def live(key="live"):
    return claim(key, policy=Policy(mode="lease"))


def held(key="held"):
    settled(key, Fail("its lease ran out", on_hold=True), **HOLD)


def done(key="done"):
    settled(key, Keep(StoredResponse(201)))


def stuck(key="stuck"):
    claim(key, policy=Policy())
    shift(key, locked_until=-3600)


def free(key="free"):
    settled(key, Fail("ValueError"))


EVERY = {"live": live, "held": held, "done": done, "stuck": stuck, "free": free}


@pytest.fixture
def one_of_each():
    for make in EVERY.values():
        make()


def run(act, key, *arguments):
    call_command("idempotency_keys", act, key, *DECISIONS[act], *arguments)


def records():
    return list(IdempotencyRecord.objects.order_by("pk").values())


@pytest.mark.parametrize("act", DECISIONS)
def test_a_decision_leaves_the_entry_that_the_admin_leaves(anna, act):
    fitting = "live" if act == "extend" else "held"
    EVERY[fitting]()
    before = record(fitting)
    run(act, fitting, *BY_ANNA)
    entry = LogEntry.objects.get()
    text = re.sub(r"Digest \S+\. ", "", entry.change_message)
    assert (entry.user, entry.action_flag, text) == (anna, CHANGE, ENTRIES[act])
    assert ("Digest" in entry.change_message) is (act in ("fail", "resolve"))
    assert (entry.object_id, entry.object_repr) == (str(before.pk), str(before.pk))
    assert entry.content_type == ContentType.objects.get_for_model(IdempotencyRecord)


def test_an_owner_whose_lease_lapsed_is_given_time_to_renew(anna, capsys):
    def is_allowed():
        try:
            run("allow-retry", "k", *BY_ANNA)
        except CommandError as error:  # on a busy machine, watching takes longer
            return "try again" not in str(error)
        return True

    live("k")
    shift("k", locked_at=-1.3, locked_until=-1)
    assert eventually(is_allowed)
    assert "watching whether its owner renews it" in capsys.readouterr().err
    assert record().status == "failed"


WHY_NOT = {
    (
        "allow-retry",
        "live",
    ): r"Nothing was done to public live\. In flight for .*its owner may be alive",
    (
        "allow-retry",
        "done",
    ): r"Nothing was done to public done\. It got its response, 201",
    ("allow-retry", "unheard-of"): r"Unknown key: there is no record of it",
    ("extend", "held"): r"It is not running\. On hold for .*\(its lease ran out\)",
    (
        "extend",
        "stuck",
    ): r"In atomic mode there is no lease to extend.* Stuck|In flight",
}


@pytest.mark.parametrize(("act", "key"), WHY_NOT)
def test_a_refusal_tells_how_the_key_stands(anna, one_of_each, act, key):
    before = records()
    with pytest.raises(CommandError, match=WHY_NOT[act, key]):
        run(act, key, *BY_ANNA)
    assert records() == before
    assert not LogEntry.objects.exists()


def test_the_scope_of_an_ambiguous_key_is_asked_for(anna):
    for scope in ("custom:tenant:1", "custom:tenant:2"):
        ended("k", Fail("crashed", on_hold=True), scope=scope)
    with pytest.raises(
        CommandError, match=r"--scope: custom:tenant:\d, custom:tenant:\d"
    ):
        run("allow-retry", "k", *BY_ANNA)
    with pytest.raises(
        CommandError,
        match=r"not in that scope, but in custom:tenant:\d, custom:tenant:\d",
    ):
        run("allow-retry", "k", "--scope=tenant:1", *BY_ANNA)
    call_command(
        "idempotency_keys",
        "allow-retry",
        "k",
        *BY_ANNA,
        scope="custom:tenant:2",
        verbosity=0,
    )
    assert record(scope="custom:tenant:1").on_hold
    assert not record(scope="custom:tenant:2").on_hold


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((), "Pass --by with the name"),
        (("--by=nobody\x1b",), r"There is no user nobody\\x1b"),
        (
            ("--by=payer",),
            "does not have the permission django_idempotency.resolve_idempotencyrecord",
        ),
        (("--by=gone",), "does not have the permission"),
        (("--by=anna", "--note=" + "x" * 201), "at most 200 characters"),
    ],
    ids=["none", "unknown", "may_not", "inactive", "note"],
)
def test_a_decision_needs_a_user_who_may_make_it(anna, arguments, why):
    get_user_model().objects.create_user("gone", is_active=False, is_superuser=True)
    held()
    before = records()
    with pytest.raises(CommandError, match=why):
        run("resolve", "held", *arguments)
    assert records() == before


@pytest.mark.parametrize("by", [(), ("--by=anna",)], ids=["nobody", "somebody"])
@pytest.mark.usefixtures("no_history")
def test_without_a_history_only_the_signal_names_the_operator(by):
    held()
    with heard(signals.operator_decided) as sent:
        run("resolve", "held", *by)
    assert record("held").response_status == 201
    assert [told["by"] for told in sent] == [by[0].partition("=")[2] if by else None]


@pytest.mark.parametrize(
    ("act", "arguments", "why"),
    [
        (
            "resolve",
            ["--status=99"],
            "status: Ensure this value is greater than or equal to 200",
        ),
        ("resolve", ["--body={"], "body: This is not JSON"),
        (
            "extend",
            ["--seconds=0"],
            "seconds: Ensure this value is greater than or equal to 1",
        ),
    ],
)
def test_an_invalid_decision_is_an_error_that_says_why(anna, act, arguments, why):
    key = "live" if act == "extend" else "held"
    EVERY[key]()
    before = records()
    with pytest.raises(CommandError, match=why):
        run(act, key, *arguments, *BY_ANNA)
    assert records() == before


def test_a_list_has_the_keys_on_hold_and_then_the_stuck_ones_and_says_whether_it_is_cut(
    one_of_each, capsys
):
    for limit, keys in (("2", ["held", "stuck"]), ("1", ["held"])):
        (listed,) = told("idempotency_keys", "list", f"--limit={limit}")
        assert ([each["key"] for each in listed["records"]], listed["more"]) == (
            keys,
            limit == "1",
        )
        call_command("idempotency_keys", "list", f"--limit={limit}")
        assert (
            "There are more: these are the first 1" in capsys.readouterr().out
        ) is listed["more"]


def test_a_list_tells_how_long_and_why(capsys):
    held()
    shift("held", updated_at=-7500)
    call_command("idempotency_keys", "list")
    line = " ".join(capsys.readouterr().out.split())
    assert line == "on hold 2 h 5 min 1 public held POST /pay/ its lease ran out"


def test_show_tells_who_decided_and_why(anna, capsys):
    held()
    run("fail", "held", *BY_ANNA)
    capsys.readouterr()
    events = told("idempotency_keys", "show", "held")[0]["events"]
    (told_of,) = [event["what"] for event in events if event["by"] == "anna"]
    assert told_of.startswith("Marked as failed with the response 409. ")
    call_command("idempotency_keys", "show", "held")
    assert "asked the bank (by anna)" in capsys.readouterr().out


def test_show_never_has_the_response_or_the_token():
    settled("k", Keep(StoredResponse(200, (("X-Kept", "secret"),), b"secret")))
    claimed = live()
    for key in ("k", "live"):
        shown = json.dumps(told("idempotency_keys", "show", key))
        assert "secret" not in shown
        assert str(claimed.token) not in shown


@pytest.mark.parametrize("arguments", [("unheard-of",), ("held", "--scope=user:9")])
def test_showing_an_unknown_key_is_an_error(capsys, arguments):
    held()
    with pytest.raises(
        CommandError, match=r"Unknown key|not in that scope, but in public"
    ):
        call_command("idempotency_keys", "show", *arguments, "--json")
    assert "error" in json.loads(capsys.readouterr().out)


def test_show_tells_that_a_key_is_kept_for_good(capsys):
    settled("k", Keep(StoredResponse(200)), retention=None)
    call_command("idempotency_keys", "show", "k")
    shown = capsys.readouterr().out
    assert "Every retry gets this response, for good" in shown
    assert "until then" not in shown


def test_show_takes_the_id_of_the_record():
    held()
    assert [
        each["key"]
        for each in told("idempotency_keys", "show", f"--record={record('held').pk}")
    ] == ["held"]


@pytest.fixture
def german():
    with translation.override("de"):
        yield


def test_commands_write_english_whatever_the_language(german, capsys):
    held()
    call_command("idempotency_keys", "list")
    call_command("idempotency_keys", "show", "held")
    call_command("idempotency_reap")
    call_command("idempotency_stats")
    printed = capsys.readouterr().out
    assert printed.startswith("on hold ")
    assert "safe to do now  Find out" in printed
    assert "Freed: 0, put on hold: 0" in printed
    assert "WHAT HAPPENED" in printed
    assert translation.get_language() == "de"
    with pytest.raises(CommandError, match="Unknown key"):
        call_command("idempotency_keys", "show", "nobody")
    load_command_class("django_idempotency", "idempotency_keys").print_help(
        "manage.py", "idempotency_keys"
    )
    assert "Mark as failed. The key never runs again" in " ".join(
        capsys.readouterr().out.split()
    )


def test_a_reason_is_stored_and_announced_in_english_and_shown_in_german(german):
    claim("stuck", policy=Policy(mode=Lease(on_crash="hold")))
    shift("stuck", locked_at=-7200, locked_until=-3600)
    with heard(signals.key_reaped) as reaped:
        reap()
    found = record("stuck")
    assert (
        found.reason == "its lease ran out while it was running" == reaped[0]["reason"]
    )
    assert shown_reason(found) == "die Lease lief während der Ausführung ab"


def test_a_reason_of_the_project_stays_as_it_is(german):
    settled("failed", Fail("ValueError\x1b"))
    assert shown_reason(record("failed")) == r"ValueError\x1b"
