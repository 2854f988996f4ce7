from __future__ import annotations

import pytest


@pytest.fixture
def relay(server):
    """A way to the test project's server that loses what it is told to lose."""
    from tests.support.relay import running_relay

    with running_relay(server.url) as running:
        yield running
