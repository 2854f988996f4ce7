"""A check for Schemathesis. It registers itself when this module is imported."""

from __future__ import annotations

import requests
import schemathesis

from django_idempotency.contrib.testing.comparison import differences
from django_idempotency.contrib.testing.twice import UNSAFE

HEADER = "Idempotency-Key"


@schemathesis.check  # type: ignore[untyped-decorator, unused-ignore]
def replays_keyed_request(
    ctx: schemathesis.CheckContext, response: schemathesis.Response, case: schemathesis.Case
) -> bool | None:
    """Send an unsafe request that succeeded with an idempotency key once more. It must get the same response.

    Needs a server that is reached by a URL. Effects can't be seen from outside, so only status and body are compared.
    """
    request = response.request
    if request.method not in UNSAFE or HEADER not in request.headers or response.status_code >= 400:
        return True  # passed over
    with requests.Session() as session:
        session.trust_env = False  # no credentials but those of the first request
        again = session.send(request.copy(), verify=response.verify, allow_redirects=False)
    if differing := [*differences(response, again)]:
        raise AssertionError(f"A retry with the same key differs: {'; '.join(differing)}")
    return None
