"""Pages of the admin, and records to show on them."""

from __future__ import annotations

from django.contrib.auth.models import Permission

from django_idempotency import engine
from django_idempotency.maintenance.decisions import version
from django_idempotency.models import IdempotencyRecord
from django_idempotency.values.keys import record_id
from django_idempotency.values.outcomes import Operation
from django_idempotency.values.policy import Lease, Policy

LIST = "/admin/django_idempotency/idempotencyrecord/"
LEASE = Policy(mode=Lease(seconds=60))
BODY = b"<b>secret</b>\xff\0"


def claimed(key, scope="user:1", **policy):
    operation = Operation(scope, key, b"f" * 32, "POST", f"/pay/{key}/")
    return engine.claim(operation, Policy(**policy).over(LEASE))


def ended(key, verdict, **named):
    claim = claimed(key, **named)
    policy = {name: value for name, value in named.items() if name != "scope"}
    with engine.execution(claim, Policy(**policy).over(LEASE)) as run:
        run.verdict = verdict
    return claim


def page(client, key, scope="user:1"):
    response = client.get(f"{LIST}{record_id(scope, key)}/change/")
    assert response.status_code == 200
    return response.content.decode()


def allow(staff, *codenames):
    staff.user_permissions.add(*Permission.objects.filter(codename__in=codenames))


GIVEN = {
    "allow_retry": {},
    "fail": {"status": 410, "detail": "lost"},
    "resolve": {"status": 201, "content_type": "application/json", "body": '{"id": 7}'},
    "extend": {"seconds": 600},
}


def found(key, scope="user:1"):
    return IdempotencyRecord.objects.get(pk=record_id(scope, key))


def act(client, name, *keys, seen=None, follow=True, **given):
    """Confirm an action on records of these keys, as they are or as they were ``seen``;
    the page after it.
    """
    chosen = [f"{found(key).pk} {seen or version(found(key))}" for key in keys]
    return client.post(
        f"{LIST}intervene/{name}/",
        {"record": chosen, **GIVEN[name], **given},
        follow=follow,
    )
