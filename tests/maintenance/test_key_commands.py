"""The commands for one key: what they tell apart, what they do, who is said to have done it, and what they refuse."""

from __future__ import annotations

import json
import re

import pytest
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.contrib.contenttypes.models import ContentType
from django.core.management import CommandError, call_command

from django_idempotency import engine, signals
from django_idempotency.maintenance.decisions import Act
from django_idempotency.models import IdempotencyRecord
from django_idempotency.policy import Lease, Policy
from django_idempotency.values.outcomes import Fail, Keep, StoredResponse
from tests.support.callers import claim, entry_point, heard, record, shift
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("payer")

HOLD = {"mode": Lease(on_crash="hold")}
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


def settled(key, verdict, **policy):
    policy = Policy(**policy)
    with engine.execution(claim(key, policy=policy), policy) as run:
        run.verdict = verdict


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


@pytest.fixture
def told(capsys):
    """Run a command; the objects that it printed."""

    def run(*arguments):
        call_command(*arguments, "--json")
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


@pytest.mark.parametrize("act", DECISIONS)
def test_a_decision_leaves_the_entry_that_the_admin_leaves(anna, act):
    fitting = "live" if act == "extend" else "held"
    EVERY[fitting]()
    before = record(fitting)
    run(act, fitting, *BY_ANNA)
    entry = LogEntry.objects.get()
    told = re.sub(r"Digest \S+\. ", "", entry.change_message)
    assert (entry.user, entry.action_flag, told) == (anna, CHANGE, ENTRIES[act])
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
    ("allow-retry", "live"): r"Nothing was done to public live\. In flight for .*its owner may be alive",
    ("allow-retry", "done"): r"Nothing was done to public done\. It got its response, 201",
    ("allow-retry", "unheard-of"): r"Unknown key: there is no record of it",
    ("extend", "held"): r"It is not running\. On hold for .*\(its lease ran out\)",
    ("extend", "stuck"): r"In atomic mode there is no lease to extend.* Stuck|In flight",
}


@pytest.mark.parametrize(("act", "key"), WHY_NOT)
def test_a_refusal_tells_how_the_key_stands(anna, one_of_each, act, key):
    before = records()
    with pytest.raises(CommandError, match=WHY_NOT[act, key]):
        run(act, key, *BY_ANNA)
    assert records() == before
    assert not LogEntry.objects.exists()


def test_the_scope_of_an_ambiguous_key_is_asked_for(anna):
    for scope in ("tenant:1", "tenant:2"):
        with_scope = entry_point(dying, scope=lambda request, scope=scope: scope, **HOLD)
        with pytest.raises(KeyboardInterrupt):
            with_scope()
    with pytest.raises(CommandError, match=r"--scope: custom:tenant:\d, custom:tenant:\d"):
        run("allow-retry", "k", *BY_ANNA)
    with pytest.raises(CommandError, match=r"not in that scope, but in custom:tenant:\d, custom:tenant:\d"):
        run("allow-retry", "k", "--scope=tenant:1", *BY_ANNA)
    call_command("idempotency_keys", "allow-retry", "k", *BY_ANNA, scope="custom:tenant:2", verbosity=0)
    assert record(scope="custom:tenant:1").on_hold
    assert not record(scope="custom:tenant:2").on_hold


def dying(request):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((), "Pass --by with the name"),
        (("--by=nobody\x1b",), r"There is no user nobody\\x1b"),
        (("--by=payer",), "does not have the permission django_idempotency.resolve_idempotencyrecord"),
        (("--by=gone",), "does not have the permission"),
        (("--by=anna", "--note=" + "x" * 201), "201 characters"),
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
        ("resolve", ["--status=99"], "must be from 200 to 599"),
        ("resolve", ["--body={"], "not JSON"),
        ("extend", ["--seconds=0"], "must be from 1 to"),
    ],
)
def test_an_invalid_decision_is_an_error_that_says_why(anna, act, arguments, why):
    key = "live" if act == "extend" else "held"
    EVERY[key]()
    before = records()
    with pytest.raises(CommandError, match=why):
        run(act, key, *arguments, *BY_ANNA)
    assert records() == before


def test_a_list_has_the_keys_on_hold_and_then_the_stuck_ones(one_of_each, told):
    (listed,) = told("idempotency_keys", "list")
    assert ([each["key"] for each in listed["records"]], listed["more"]) == (["held", "stuck"], False)


def test_a_list_that_is_cut_says_so(one_of_each, told, capsys):
    (listed,) = told("idempotency_keys", "list", "--limit=1")
    assert ([each["key"] for each in listed["records"]], listed["more"]) == (["held"], True)
    call_command("idempotency_keys", "list", "--limit=1")
    assert "There are more: these are the first 1" in capsys.readouterr().out
    call_command("idempotency_keys", "list", "--limit=2")
    assert "There are more" not in capsys.readouterr().out


def test_a_list_tells_how_long_and_why(capsys):
    held()
    shift("held", updated_at=-7500)
    call_command("idempotency_keys", "list")
    line = " ".join(capsys.readouterr().out.split())
    assert line == "on hold 2 h 5 min 1 public held POST /pay/ its lease ran out"


def test_show_tells_who_decided_and_why(anna, capsys, told):
    held()
    run("fail", "held", *BY_ANNA)
    capsys.readouterr()
    events = told("idempotency_keys", "show", "held")[0]["events"]
    (told_of,) = [event["what"] for event in events if event["by"] == "anna"]
    assert told_of.startswith("Marked as failed with the response 409. ")
    call_command("idempotency_keys", "show", "held")
    assert "asked the bank (by anna)" in capsys.readouterr().out


def test_show_never_has_the_response_or_the_token(told):
    settled("k", Keep(StoredResponse(200, (("X-Kept", "secret"),), b"secret")))
    claimed = live()
    for key in ("k", "live"):
        shown = json.dumps(told("idempotency_keys", "show", key))
        assert "secret" not in shown
        assert str(claimed.token) not in shown


@pytest.mark.parametrize("arguments", [("unheard-of",), ("held", "--scope=user:9")])
def test_showing_an_unknown_key_is_an_error(capsys, arguments):
    held()
    with pytest.raises(CommandError, match=r"Unknown key|not in that scope, but in public"):
        call_command("idempotency_keys", "show", *arguments, "--json")
    assert "error" in json.loads(capsys.readouterr().out)


def test_show_takes_the_id_of_the_record(told):
    held()
    assert [each["key"] for each in told("idempotency_keys", "show", f"--record={record('held').pk}")] == ["held"]
