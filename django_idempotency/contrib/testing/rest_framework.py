"""A client for REST framework that sends keys, as the clients of an API do."""

from __future__ import annotations

import uuid
from typing import Any

from rest_framework.test import APIClient

from django_idempotency.conf import conf
from django_idempotency.contrib.testing.twice import UNSAFE


class KeyedAPIClient(APIClient):
    """An ``APIClient`` that sends each unsafe request with a key of its own, unless the test specifies one.

    ``key``: the key of the last unsafe request. ``retry()`` sends that request once more with the same key.
    """

    key: str | None = None

    def generic(self, method: str, path: str, *args: Any, **options: Any) -> Any:  # type: ignore[override]
        if method.upper() in UNSAFE:
            options = self._with_key(options)
            self._last = (method, path, args, options)
        return super().generic(method, path, *args, **options)

    def retry(self) -> Any:
        """Send the last unsafe request once more, with its key, and return the response.

        Raises ``RuntimeError`` if there was none.
        """
        if self.key is None:
            raise RuntimeError("There is no request to retry: nothing unsafe has been sent yet.")
        method, path, args, options = self._last
        return super().generic(method, path, *args, **options)

    def _with_key(self, options: dict[str, Any]) -> dict[str, Any]:
        header, meta_name = conf().header, conf().meta_name
        headers = dict(options.get("headers") or {})
        stated = next((value for name, value in headers.items() if name.lower() == header.lower()), None)
        stated = stated or options.get(meta_name) or vars(self)["_credentials"].get(meta_name)
        if stated is None:
            stated = f'"{uuid.uuid4()}"'
            options = {**options, "headers": {**headers, header: stated}}
        self.key = str(stated).strip('"')
        return options
