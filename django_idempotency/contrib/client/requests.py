"""An adapter for requests.

    session = requests.Session()
    session.mount("https://api.example.com", IdempotentAdapter())

Mount it only for servers that support keys. With any other server, a retried POST may
take effect twice.
"""

from __future__ import annotations

import time
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from requests.exceptions import ChunkedEncodingError, ConnectionError, Timeout

from django_idempotency.contrib.client import Call, Retries

NO_RESPONSE = (ConnectionError, Timeout, ChunkedEncodingError)


class IdempotentAdapter(HTTPAdapter):
    """Sends requests with one key for each call and all of its retries.

    ``options`` are those of ``HTTPAdapter``. The body of a request that may be retried
    is read into memory, so that it can be sent again. The response to a request with a
    key is read into memory too. Raises the error of the last attempt.
    """

    __attrs__ = [*HTTPAdapter.__attrs__, "retries"]  # what is pickled

    def __init__(self, retries: Retries | None = None, **options: Any) -> None:
        self.retries = retries or Retries()
        super().__init__(**options)

    def send(
        self, request: requests.PreparedRequest, *args: Any, **options: Any
    ) -> requests.Response:
        headers: Any = request.headers
        call = Call(self.retries, request.method or "", headers)
        if call.repeatable:
            _read_body(request)
        while True:
            try:
                response = super().send(request, *args, **options)
                if call.keyed:
                    _ = response.content  # one that was cut off counts as no response
            except NO_RESPONSE:
                if (wait := call.after_failure()) is None:
                    raise
            else:
                if (
                    wait := call.after_response(response.status_code, response.headers)
                ) is None:
                    return response
                response.close()
            time.sleep(wait)


def _read_body(request: Any) -> None:
    body = request.body
    if hasattr(body, "read"):
        request.body = body.read()
    elif body is not None and not isinstance(
        body, bytes | bytearray | memoryview | str
    ):
        request.body = b"".join(
            part.encode() if isinstance(part, str) else part for part in body
        )
    # the position in a file, which a redirect would rewind
    request._body_position = None
