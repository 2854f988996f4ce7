"""A view behind the middleware that watches requests."""

from __future__ import annotations

from asgiref.sync import iscoroutinefunction

from django_idempotency.contrib.dashboard.middleware import ObservingMiddleware


def watched(view):
    def get_response(request):
        middleware.process_view(request, view, (), {})
        return view(request)

    async def aget_response(request):
        middleware.process_view(request, view, (), {})
        return await view(request)

    middleware = ObservingMiddleware(aget_response if iscoroutinefunction(view) else get_response)
    return middleware
