"""Transports for httpx.

    client = httpx.Client(mounts={"https://api.example.com": IdempotentTransport()})

Mount them for servers that heed keys, and for no others: with another server a retried POST may take effect twice.
"""

from __future__ import annotations

import time

import httpx

from django_idempotency.client.retries import Call, Retries, is_problem

# What another attempt can't help.
FINAL = (httpx.UnsupportedProtocol, httpx.LocalProtocolError)


class IdempotentTransport(httpx.BaseTransport):
    """Sends requests through ``transport``, with one key for each call and all of its retries.

    ``transport``: ``httpx.HTTPTransport()`` by default; certificates, proxies and limits are its arguments. A body is
    read into memory before it is sent, so that it can be sent again, and so is the response to a request with a key.
    Raises what ``transport`` raised last.
    """

    def __init__(self, transport: httpx.BaseTransport | None = None, retries: Retries | None = None) -> None:
        self.transport = transport or httpx.HTTPTransport()
        self.retries = retries or Retries()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        call = self.retries.begin(request.method, request.headers)
        if call.repeatable:
            request.read()
        while True:
            try:
                response = self._attempt(request, call)
            except FINAL:
                raise
            except httpx.TransportError:
                wait = call.after_failure()
                if wait is None:
                    raise
            else:
                wait = _wait(call, response)
                if wait is None:
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
    """``IdempotentTransport`` for ``httpx.AsyncClient``, through ``httpx.AsyncHTTPTransport()`` by default."""

    def __init__(self, transport: httpx.AsyncBaseTransport | None = None, retries: Retries | None = None) -> None:
        self.transport = transport or httpx.AsyncHTTPTransport()
        self.retries = retries or Retries()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        import anyio  # which httpx itself needs for this

        call = self.retries.begin(request.method, request.headers)
        if call.repeatable:
            await request.aread()
        while True:
            try:
                response = await self._attempt(request, call)
            except FINAL:
                raise
            except httpx.TransportError:
                wait = call.after_failure()
                if wait is None:
                    raise
            else:
                wait = _wait(call, response)
                if wait is None:
                    return response
                await response.aclose()
            await anyio.sleep(wait)

    async def _attempt(self, request: httpx.Request, call: Call) -> httpx.Response:
        response = await self.transport.handle_async_request(request)
        if not call.keyed or response.is_stream_consumed:
            return response
        try:
            return _whole(response, b"".join([chunk async for chunk in response.aiter_raw()]))
        finally:
            await response.aclose()

    async def aclose(self) -> None:
        await self.transport.aclose()


def _whole(response: httpx.Response, body: bytes) -> httpx.Response:
    """The response with a body that has arrived: one that was cut off on its way is no response."""
    stream = httpx.ByteStream(body)
    return httpx.Response(response.status_code, headers=response.headers, stream=stream, extensions=response.extensions)


def _wait(call: Call, response: httpx.Response) -> float | None:
    body = b""
    if call.keyed and is_problem(response.headers):
        copy = httpx.Response(response.status_code, headers=response.headers, stream=response.stream)
        body = response.content if response.is_stream_consumed else copy.read()
    return call.after_response(response.status_code, response.headers, body)
