"""Records and users of the admin's tests."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.contrib import admin
from django.contrib.auth.models import Permission
from django.urls import path
from django.utils import timezone

from django_idempotency.models import IdempotencyRecord
from django_idempotency.values.outcomes import Fail, Keep, StoredResponse
from tests.admin.pages import BODY, claimed, ended
from tests.support.callers import stop_heartbeat


@pytest.fixture(autouse=True)
def no_heartbeat():
    """Replays that are not counted yet are forgotten with the test."""
    yield
    stop_heartbeat()


@pytest.fixture
def staff(client, django_user_model, settings):
    """A member of staff who may see records."""
    settings.ROOT_URLCONF = (path("admin/", admin.site.urls),)
    user = django_user_model.objects.create_user("staff", is_staff=True)
    user.user_permissions.add(Permission.objects.get(codename="view_idempotencyrecord"))
    client.force_login(user)
    return user


@pytest.fixture
def superuser(staff):
    staff.is_superuser = True
    staff.save()
    return staff


@pytest.fixture
def records(db):
    """One of each: running, stuck, done, failed, on hold."""
    claimed("running")
    claimed("stuck")
    ended("done", Keep(StoredResponse(201, (("X-Kept", "kept"),), BODY)))
    ended("done", Keep(StoredResponse(201)), scope="user:2")
    ended("failed", Fail("ValueError"))
    ended("on_hold", Fail("its lease ran out", on_hold=True))
    hours_ago = timezone.now() - timedelta(hours=3, minutes=7)
    IdempotencyRecord.objects.filter(key="stuck").update(
        locked_at=hours_ago, locked_until=hours_ago
    )
