"""The URLs of the test project, with its metrics; figures of the table are read more
often.
"""

from __future__ import annotations

from django.urls import path

from django_idempotency.instrumentation import metrics
from django_idempotency.instrumentation.prometheus import unguarded_scrape
from testproject.urls import urlpatterns as of_the_project
from tests.gameday.rules import PACE

metrics.FRESH /= PACE
urlpatterns = [path("metrics/", unguarded_scrape), *of_the_project]
