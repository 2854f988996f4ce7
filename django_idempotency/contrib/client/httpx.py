"""Transports for httpx.

    client = httpx.Client(mounts={"https://api.example.com": IdempotentTransport()})

Mount them only for servers that support keys. With any other server, a retried POST may
take effect twice.
"""

from __future__ import annotations

import time

import httpx

from django_idempotency.contrib.client import Call, Retries

NO_RESPONSE = (
    httpx.NetworkError,
    httpx.TimeoutException,
    httpx.ProxyError,
    httpx.RemoteProtocolError,
)


class IdempotentTransport(httpx.BaseTransport):
    """Sends requests through ``transport``, with one key for each call and all of its
    retries.

    ``transport``: ``httpx.HTTPTransport()`` by default; certificates, proxies and
    limits are its arguments. The body of a request that may be retried is read into
    memory, so that it can be sent again. The response to a request with a key is read
    into memory too. Raises the last error of ``transport``.
    """

    def __init__(
        self,
        transport: httpx.BaseTransport | None = None,
        retries: Retries | None = None,
    ) -> None:
        self.transport = transport or httpx.HTTPTransport()
        self.retries = retries or Retries()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        call = Call(self.retries, request.method, request.headers)
        if call.repeatable:
            request.read()
        while True:
            try:
                response = self._attempt(request, call)
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

    def _attempt(self, request: httpx.Request, call: Call) -> httpx.Response:
        response = self.transport.handle_request(request)
        if not call.keyed or response.is_stream_consumed:
            return response
        try:
            return _whole(response, b"".join(response.iter_raw()))
        finally:
            response.close()

    def close(self) -> None:
        self.transport.close()


class AsyncIdempotentTransport(httpx.AsyncBaseTransport):
    """``IdempotentTransport`` for ``httpx.AsyncClient``. It uses
    ``httpx.AsyncHTTPTransport()`` by default.
    """

    def __init__(
        self,
        transport: httpx.AsyncBaseTransport | None = None,
        retries: Retries | None = None,
    ) -> None:
        self.transport = transport or httpx.AsyncHTTPTransport()
        self.retries = retries or Retries()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        import anyio  # httpx itself needs it for async

        call = Call(self.retries, request.method, request.headers)
        if call.repeatable:
            await request.aread()
        while True:
            try:
                response = await self._attempt(request, call)
            except NO_RESPONSE:
                if (wait := call.after_failure()) is None:
                    raise
            else:
                if (
                    wait := call.after_response(response.status_code, response.headers)
                ) is None:
                    return response
                await response.aclose()
            await anyio.sleep(wait)

    async def _attempt(self, request: httpx.Request, call: Call) -> httpx.Response:
        response = await self.transport.handle_async_request(request)
        if not call.keyed or response.is_stream_consumed:
            return response
        try:
            return _whole(
                response, b"".join([chunk async for chunk in response.aiter_raw()])
            )
        finally:
            await response.aclose()

    async def aclose(self) -> None:
        await self.transport.aclose()


def _whole(response: httpx.Response, body: bytes) -> httpx.Response:
    """Return the response with its complete body. A response that was cut off counts as
    no response.
    """
    stream = httpx.ByteStream(body)
    return httpx.Response(
        response.status_code,
        headers=response.headers,
        stream=stream,
        extensions=response.extensions,
    )
