"""Count the calls of Python functions in one request to ``$CONTENDER``: the same number
on every machine.

``python -m testproject.benchmarks.calls 20`` prints, as JSON, the total of a first
request and of a replay, and the 20 functions that each calls most often. A call of a
function in C counts as nothing.
"""

from __future__ import annotations

import io
import json
import sys
import uuid
from collections import Counter
from typing import Any

from testproject.benchmarks.servers import BODY, PATH

# Statements are prepared from the third request on.
WARM_UP = 5


def main() -> None:
    listed = json.loads(sys.argv[1])
    for _ in range(WARM_UP):
        key = str(uuid.uuid4())
        counts = {"a first request": count(key), "a replay": count(key)}
    print(
        json.dumps(
            {
                name: {"total": calls.total(), "most": calls.most_common(listed)}
                for name, calls in counts.items()
            }
        )
    )


def count(key: str) -> Counter[str]:
    """Count the calls of one request with ``key``."""
    from django.test import RequestFactory

    from testproject.benchmarks.project import wsgi

    calls: Counter[str] = Counter()

    def note(frame: Any, event: str, _argument: object) -> None:
        if event == "call":
            code = frame.f_code
            calls[f"{code.co_filename}:{code.co_qualname}"] += 1

    headers = {"Idempotency-Key": key}
    environ = RequestFactory().post(PATH, BODY, "application/json", headers=headers)
    asked = environ.environ | {"wsgi.input": io.BytesIO(BODY.encode())}
    application: Any = wsgi.application
    sys.setprofile(note)
    try:
        response = application(asked, lambda *_: None)
        b"".join(response)
        response.close()
    finally:
        sys.setprofile(None)
    assert response.status_code == 201, response.content
    return calls


if __name__ == "__main__":
    main()
