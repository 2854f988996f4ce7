"""What django-axes and django-otp have counted is the same with a fresh key for each guess as without keys."""

from __future__ import annotations

from uuid import uuid4

from axes.models import AccessAttempt
from django.conf import settings
from django.contrib.auth import get_user_model
from django.test import TransactionTestCase
from django_otp.plugins.otp_static.models import StaticDevice

WAYS = [f"/{by}/{how}/" for by in ("decorator", "middleware", "mixin") for how in ("returned", "raised")]
KEEPING = [way for way in WAYS if way.endswith("returned/") or not settings.DATABASES["default"]["ATOMIC_REQUESTS"]]


class Guesses(TransactionTestCase):
    def setUp(self):
        carol = get_user_model().objects.create_user("carol", password="right")
        self.device = StaticDevice.objects.create(user=carol)
        self.device.token_set.create(token="right")

    def guess(self, path, *, keyed, **guess):
        headers = {"Idempotency-Key": str(uuid4())} if keyed else {}
        return self.client.post(path, guess, headers=headers).status_code

    def counted(self):
        """What both have counted so far, which is forgotten then."""
        device = StaticDevice.objects.get()
        counts = (
            device.throttling_failure_count,
            sum(AccessAttempt.objects.values_list("failures_since_start", flat=True)),
        )
        device.throttle_reset()
        AccessAttempt.objects.all().delete()
        return counts

    def test_a_failure_counts_as_without_a_key(self):
        for path in WAYS:
            with self.subTest(path):
                plain = [self.guess(path, keyed=False, **wrong) for wrong in ({"code": "x"}, {"password": "x"})]
                counted = self.counted()
                keyed = [self.guess(path, keyed=True, **wrong) for wrong in ({"code": "x"}, {"password": "x"})]
                assert (keyed, self.counted()) == (plain, counted)
                assert counted == ((1, 1) if path in KEEPING else (0, 0))

    def test_a_fresh_key_for_each_guess_does_not_keep_the_door_open(self):
        for path in KEEPING:
            with self.subTest(path):
                self.guess(path, keyed=True, code="x")
                assert self.guess(path, keyed=True, code="right") >= 400
                for _guess in range(settings.AXES_FAILURE_LIMIT):
                    self.guess(path, keyed=True, password="x")
                assert self.guess(path, keyed=True, password="right") >= 400
                self.counted()
