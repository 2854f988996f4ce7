"""What an export of a caller has, what it leaves out, and who is told."""

from __future__ import annotations

import base64
import json

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth import get_user_model
from django.core.management import CommandError, call_command
from django.http import HttpResponse

from django_idempotency import signals
from django_idempotency.maintenance import export
from django_idempotency.models import IdempotencyRecord
from django_idempotency.values.policy import Body
from django_idempotency.values.scopes import BuiltInScope
from tests.support.callers import entry_point, heard, record

MINE, OTHERS = "user:7", "user:70"
KEYS = {"ENCRYPTION_KEYS": [base64.b64encode(b"k" * 32).decode()]}


def send(key, content=b"{}", scope=MINE, **policy):
    def view(request):
        return HttpResponse(content, status=201, headers={"X-Kept": "kept"})

    assert (
        entry_point(view, scope=lambda request: BuiltInScope(scope), **policy)(
            key
        ).status_code
        == 201
    )


@pytest.fixture
def sent(db):
    send("a", "né".encode())
    send("b", b"\xff\0")
    send("none", body=Body(store=False))
    send("a", scope=OTHERS)


def exported(**options):
    return {one["key"]: one for one in export(MINE, **options)}


@pytest.mark.parametrize("batch", [1, 2, 100])
def test_an_export_has_the_records_of_the_scope_alone(sent, batch):
    found = list(export(MINE, batch=batch))
    assert sorted((one["scope"], one["key"]) for one in found) == [
        (MINE, "a"),
        (MINE, "b"),
        (MINE, "none"),
    ]
    assert [one["scope"] for one in export(key="a", scope=OTHERS)] == [OTHERS]
    with pytest.raises(ValueError, match="to select records"):
        list(export())


def test_an_export_has_all_columns_but_digests_and_tokens(sent):
    one = exported()["a"]
    columns = {field.name for field in IdempotencyRecord._meta.fields}
    left_out = {
        "fingerprint",
        "token",
        "hold_on_crash",
        "response_status",
        "response_headers",
        "response_body",
    }
    assert set(one) - {"response", "steps"} == columns - left_out
    of = record("a", MINE)
    assert (one["id"], one["path"], one["created_at"]) == (
        str(of.pk),
        "/pay/",
        of.created_at.isoformat(),
    )
    assert json.loads(json.dumps(one)) == one


@pytest.mark.parametrize(
    "policy",
    [{}, pytest.param({"body": Body(encrypt=True)}, marks=pytest.mark.cryptography)],
    ids=str,
)
def test_bodies_and_headers_are_exported_only_where_it_is_said(sent, settings, policy):
    settings.IDEMPOTENCY = KEYS
    send("c", b"secret", **policy)
    with heard(signals.response_viewed) as viewed:
        assert {key: one["response"] for key, one in exported().items()} == {
            **{key: {"status": 201, "has_body": True} for key in "abc"},
            **{"none": {"status": 201, "has_body": False}},
        }
        assert viewed == []
        responses = {key: one["response"] for key, one in exported(bodies=True).items()}
    headers = [["X-Kept", "kept"], ["Content-Type", "text/html; charset=utf-8"]]
    stored = {"status": 201, "has_body": True, "headers": headers}
    assert responses == {
        "a": stored | {"body": "né"},
        "b": stored | {"body": None, "body_base64": "/wA="},
        "c": stored | {"body": "secret"},
        "none": stored | {"has_body": False, "body": None},
    }
    assert sorted((told["operation"].key, told["user"]) for told in viewed) == [
        (key, None) for key in "abc"
    ]


@pytest.mark.cryptography
def test_a_body_that_can_not_be_decrypted_is_exported_as_none(db, settings):
    settings.IDEMPOTENCY = KEYS
    send("a", b"secret", body=Body(encrypt=True))
    settings.IDEMPOTENCY = {}
    assert exported(bodies=True)["a"]["response"] == {
        "status": 201,
        "has_body": True,
        "headers": [],
        "body": None,
    }


def test_a_record_without_a_response_is_exported(db):
    send("a")
    IdempotencyRecord.objects.update(
        status="failed",
        response_status=None,
        response_headers=None,
        response_body=None,
        reason="lost",
    )
    for bodies in (False, True):
        assert (
            exported(bodies=bodies)["a"]["response"],
            exported()["a"]["reason"],
        ) == (None, "lost")


def test_the_command_prints_a_line_for_each_record(sent, capsys):
    anna = get_user_model().objects.create_superuser("anna")
    call_command("idempotency_privacy", "export", f"--scope={MINE}")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line.pop("database") for line in lines} == {"default"}
    assert lines == list(export(MINE))
    call_command(
        "idempotency_privacy",
        "export",
        f"--scope={MINE}",
        "--bodies",
        "--key=a",
        "--by=anna",
        "--note=asked for it",
    )
    said = capsys.readouterr()
    assert json.loads(said.out)["response"]["body"] == "né"
    assert [(entry.user, entry.change_message) for entry in LogEntry.objects.all()] == [
        (anna, "Response body viewed. asked for it")
    ]
    assert said.err == "default: records exported: 1.\n"


@pytest.mark.parametrize(
    ("by", "why"), [((), "Pass --by"), (("--by=bob",), "does not have the permission")]
)
def test_bodies_are_exported_only_for_a_user_who_may_view_them(sent, capsys, by, why):
    get_user_model().objects.create_user("bob")
    with pytest.raises(CommandError, match=why):
        call_command(
            "idempotency_privacy", "export", f"--scope={MINE}", "--bodies", *by
        )
    assert capsys.readouterr().out == ""


def test_bodies_are_exported_only_with_a_note_where_the_settings_require_it(
    sent, settings
):
    settings.IDEMPOTENCY = {"DECISIONS": ["note"]}
    get_user_model().objects.create_superuser("anna")
    with pytest.raises(ValueError, match="DECISIONS requires a note"):
        list(export(MINE, bodies=True))
    with pytest.raises(CommandError, match="DECISIONS requires a note"):
        call_command(
            "idempotency_privacy", "export", f"--scope={MINE}", "--bodies", "--by=anna"
        )
