from __future__ import annotations

import sentry_sdk
from django.urls import path

from tests.compatibility.project import Project, pay, write
from tests.compatibility.sentry.settings import SENT


def fail(_request):
    write("r-failed")
    raise LookupError("the reason")


class Sentry(Project):
    def take_bookings(self):
        sentry_sdk.flush()
        found = sum(envelope.get_transaction_event() is not None for envelope in SENT)
        SENT.clear()
        return found

    def check(self):
        self._a_run_is_traced_with_its_statements()
        self._an_exception_is_reported_once()

    def _a_run_is_traced_with_its_statements(self):
        self.take_bookings()
        self.send("r-traced", "traced")
        sentry_sdk.flush()
        (transaction,) = filter(
            None, [envelope.get_transaction_event() for envelope in SENT]
        )
        assert any(
            "auth_group" in span.get("description", "") for span in transaction["spans"]
        )

    def _an_exception_is_reported_once(self):
        self.path = "/fail/"
        self.take_bookings()
        for attempt in (1, 2):
            assert self.send("r-failed", "failed").status_code == 500
            sentry_sdk.flush()
            events = [
                event
                for envelope in SENT
                if (event := envelope.get_event()) and "exception" in event
            ]
            assert [event["exception"]["values"][-1]["value"] for event in events] == [
                "the reason"
            ] * attempt
        assert self.effects("r-failed") == 0


PROJECTS = {"sentry-sdk": Sentry()}
urlpatterns = [path("pay/", pay), path("fail/", fail)]
