"""Who is calling. Tokens are DRF's; a middleware reads them for the plain views, as it
would in a real project.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from inspect import iscoroutinefunction
from typing import Any, cast

from asgiref.sync import sync_to_async
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.utils.decorators import sync_and_async_middleware
from rest_framework.authentication import TokenAuthentication
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.request import Request

FORM = "/orders/new/"
# what receipts for the plain views have to be asked for with, too
PLAIN = ("/orders/", "/async/orders/", "/legacy/refunds/", "/api/operations/")


class SecretKeyAuthentication(TokenAuthentication):
    """``sk_test_alice`` is alice's secret key, as with Stripe."""

    keyword = "Bearer"
    prefix = "sk_test_"

    def authenticate_credentials(self, key: str) -> tuple[Any, Any]:
        if not key.startswith(self.prefix):
            raise AuthenticationFailed("Invalid API Key provided.")
        return super().authenticate_credentials(
            f"{key.removeprefix(self.prefix)}-token"
        )


@sync_and_async_middleware
def token_authentication(
    get_response: Callable[[HttpRequest], Any],
) -> Callable[[HttpRequest], Any]:
    if not iscoroutinefunction(get_response):
        return lambda request: _refusal(request) or get_response(request)
    refusal = sync_to_async(_refusal)

    async def middleware(request: HttpRequest) -> HttpResponse:
        return await refusal(request) or await cast(
            "Awaitable[HttpResponse]", get_response(request)
        )

    return middleware


def _refusal(request: HttpRequest) -> HttpResponse | None:
    """Set the user of a request to a plain view, or return a 401."""
    if not request.path_info.startswith(PLAIN):
        return None
    try:
        found = TokenAuthentication().authenticate(cast("Request", request))
    except AuthenticationFailed as error:
        return _unauthorized(str(error.detail))
    if found is None and request.path_info == FORM and request.user.is_authenticated:
        return None  # signed in by a session, in a browser
    if found is None:
        return _unauthorized("Authentication credentials were not provided.")
    user = found[0]

    async def auser() -> Any:
        return user

    request.user, request.auser = user, auser
    return None


def _unauthorized(detail: str) -> HttpResponse:
    return JsonResponse(
        {"detail": detail}, status=401, headers={"WWW-Authenticate": "Token"}
    )
