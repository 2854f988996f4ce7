"""Send every situation to every package, and print what came of it: ``python -m
tests.migrating`` prints JSON.

Needs ``DATABASE_URL``: an empty database.
"""

from __future__ import annotations

import json
import os

import django


def main() -> None:
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.migrating.settings"
    django.setup()

    import drf_idempotency.settings
    from django.core.management import call_command
    from django.test import override_settings
    from django.test.utils import setup_test_environment

    drf_idempotency.settings.USER_SETTINGS_NAME = "DRF_IDEMPOTENCY"

    from tests.migrating.peers import PEERS, Peer
    from tests.migrating.situations import (
        SITUATIONS,
        both,
        kept,
        new,
        old,
        switch,
        while_running,
    )

    def observed(peer: Peer) -> dict[str, object]:
        with override_settings(**peer.settings):
            before, after = old(peer), new(peer)
            return {
                "situations": {
                    name: (ask(before), ask(after)) for name, ask in SITUATIONS.items()
                },
                "kept": kept(peer),
                "unprepared": while_running(new(peer), both(peer)),
            }

    def switched(peer: Peer) -> dict[str, object]:
        with override_settings(**peer.settings | peer.switch):
            return {"switch": switch(peer)}

    call_command("migrate", verbosity=0)
    setup_test_environment()
    print(
        json.dumps(
            {name: observed(peer) | switched(peer) for name, peer in PEERS.items()},
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
