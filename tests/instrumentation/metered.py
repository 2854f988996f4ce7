"""Requests and messages to be measured."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from django.http import HttpResponse
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from django_idempotency.instrumentation import metrics
from django_idempotency.values.policy import Lease, Policy
from tests.support.callers import claim, entry_point, paying, shift

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "docs" / "monitoring"
LEASE = {"mode": Lease(seconds=60)}
KEY, SECRET_SCOPE, SECRET = "the-raw-key", "user:4711", "s3cret"


def samples(text):
    """Sample name → labels → value, of a scrape."""
    found: dict[str, dict[frozenset, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[frozenset(sample.labels.items())] = (
                sample.value
            )
    return found


def total(text, name):
    return sum(samples(text).get(f"idempotency_{name}_total", {}).values())


def counted(registry):
    """The counters that are not nought."""
    text = generate_latest(registry).decode()
    return {
        counter.name: total(text, counter.name)
        for counter in metrics.counters_of(None)
        if total(text, counter.name)
    }


def refusing(request):
    return HttpResponse(status=422)


def everything():
    """One of most things that can happen to a key, as somebody with a secret."""
    policy = {"scope": SECRET_SCOPE_OF, **LEASE}
    send = entry_point(paying, **policy)
    send(KEY, path=f"/pay/{SECRET}/")
    send(KEY, path=f"/pay/{SECRET}/")
    send(KEY, SECRET.encode())
    entry_point(refusing, **policy)("released")
    claim("reaped", policy=Policy(**LEASE))
    shift("reaped", locked_until=-1)
    entry_point(paying, **LEASE)("reaped")
    claim("busy", policy=Policy(**LEASE))
    entry_point(paying, **LEASE)("busy")


def SECRET_SCOPE_OF(request):
    return SECRET_SCOPE


def scraped(registry):
    return generate_latest(registry).decode()


def alert_rules():
    return yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"][0]["rules"]


def panel_expressions():
    board = json.loads((MONITORING / "grafana.json").read_text())
    return [
        target["expr"]
        for panel in board["panels"]
        for target in panel.get("targets", ())
    ]
