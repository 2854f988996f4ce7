"""The headers of a response: which are stored, and which a replay repeats."""

from __future__ import annotations

from functools import lru_cache
from wsgiref.util import is_hop_by_hop

# Besides the hop-by-hop headers, of which wsgiref lacks Trailer: those that the server
# sets anew, and the age in caches. The policy decides about cookies.
UNSTORED_HEADERS = frozenset({"age", "content-length", "date", "set-cookie", "trailer"})
# These carry credentials, or what credentials are made of. So do all that start with
# "proxy-".
SENSITIVE_HEADERS = frozenset(
    {
        "authentication-control",
        "authentication-info",
        "authorization",
        "cookie",
        "cookie2",
        "set-cookie2",
        "www-authenticate",
    }
)
# These make the server send a file instead of the body: a replay would send what the
# file contains by then.
FILE_HEADERS = frozenset(
    {
        "x-accel-redirect",
        "x-lighttpd-send-file",
        "x-lighttpd-send-tempfile",
        "x-litespeed-location",
        "x-reproxy-file",
        "x-reproxy-url",
        "x-sendfile",
    }
)
# A response with one of these statuses has no body, whatever was stored.
WITHOUT_BODY = (204, 205, 304)
# These describe a body, and make no sense with another one.
BODY_HEADERS = frozenset(
    {
        "accept-ranges",
        "content-disposition",
        "content-encoding",
        "content-range",
        "content-type",
        "etag",
    }
)


_NEVER_STORED = UNSTORED_HEADERS | SENSITIVE_HEADERS | FILE_HEADERS


@lru_cache(maxsize=256)
def may_be_stored(header: str) -> bool:
    """Whether a header of this name is kept. Headers by which a view instructs its
    server are not.
    """
    name = header.lower()
    return not (
        name in _NEVER_STORED
        or is_hop_by_hop(name)
        or name.startswith(("proxy-", "x-accel-", ":"))
    )


@lru_cache(maxsize=256)
def is_about_caching(name: str) -> bool:
    """Whether a header says how long a response is fresh, including those of RFC 9213,
    which go first in caches.
    """
    return name in ("expires", "pragma", "surrogate-control") or name.endswith(
        "cache-control"
    )
