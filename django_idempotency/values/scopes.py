"""Whose key it is: the scope of a user or of a token's subject, within the tenant in
whose schema the connection is.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import quote

from django.core.exceptions import ImproperlyConfigured
from django.db import connections

# prefix of scopes from a project's own callables; this package's scopes never have it
CUSTOM = "custom:"
PATH = " /"  # begins the path in a scope that has one


class BuiltInScope(str):
    """A scope returned by one of this package's own callables."""


def caller_scope(request: Any, using: str | None) -> str | None:
    """Return the scope of the caller of ``request``, which its framework may have
    authenticated as ``request.auth``.

    That is a user, something with a ``user``, or the claims of a JSON Web Token, whose
    issuer and subject are the same in the caller's next token. Any other
    ``request.auth`` may be a secret, may be replaced at its next renewal or may stand
    for several callers, so ``None`` is returned. See ``user_scope`` for ``using`` and
    errors.
    """
    if (scope := user_scope(getattr(request, "user", None), using)) is not None:
        return scope
    # not before: REST framework may authenticate now, and set another user
    auth = getattr(request, "auth", None)
    return (
        user_scope(auth, using)
        or user_scope(getattr(auth, "user", None), using)
        or _subject_scope(auth, using)
    )


def _subject_scope(claims: object, using: str | None) -> str | None:
    if not isinstance(claims, Mapping):
        return None
    issuer, subject = claims.get("iss"), claims.get("sub")
    if not (
        isinstance(issuer, str) and isinstance(subject, str) and issuer and subject
    ):
        return None
    return f"{tenant_schema(using)}jwt:{quote(issuer, safe='')}:{subject}"


def user_scope(user: Any, using: str | None) -> str | None:
    """Return the scope of a user's keys, such as ``auth.user:7``, or
    ``acme/auth.user:7`` in the schema ``acme``.

    ``using``: the database of the records; ``None`` if there are several. Returns
    ``None`` for a user who is not authenticated or has no primary key, which is the
    case with some token authentication.

    Raises ``ImproperlyConfigured`` if the tenant can't be determined.
    """
    pk = getattr(user, "pk", None)
    if pk in (None, "") or not getattr(user, "is_authenticated", False):
        return None
    return f"{tenant_schema(using)}{_label(user)}:{pk}"


def is_own(scope: str, user: Any) -> bool:
    """Return whether ``scope`` is the default scope of ``user`` in any tenant."""
    pk = getattr(user, "pk", None)
    if pk in (None, ""):
        return False
    own = f"{_label(user)}:{pk}"
    identity = scope.rpartition(PATH)[0] or scope
    return any(own in (each, each.partition("/")[2]) for each in (scope, identity))


def with_path(scope: str, path: str) -> str:
    """Return the scope of the caller ``scope`` at one path. In ``path`` there will be
    no space, so that no other caller has the same.
    """
    return f"{scope} {quote(path, errors='surrogatepass')}"


def _label(user: Any) -> str:
    """Return the label of the user's concrete model, or the name of its class if it is
    not a model.
    """
    model = getattr(user, "_meta", None)
    if model is not None:
        label: str = model.concrete_model._meta.label_lower
        return label
    return f"{user.__class__.__module__}.{user.__class__.__qualname__}"


def tenant_schema(using: str | None) -> str:
    """Return the prefix of a tenant's scopes: its quoted schema and a slash. Empty if
    no connection has schemas.

    Raises ``ImproperlyConfigured`` if the tenant can't be determined.
    """
    databases = tenant_databases()
    if not databases:
        return ""
    if using not in databases and len(databases) > 1:
        raise ImproperlyConfigured(
            f"The tenant is unknown: the records are in {_named(using)}, and"
            f" {' and '.join(map(repr, sorted(databases)))} have tenants. Set a scope"
            " that names tenant and user."
        )
    database: Any = connections[using if using in databases else databases.pop()]
    if not database.schema_name:
        raise ImproperlyConfigured(
            f"The tenant is unknown: the database {database.alias!r} has tenants, but"
            " no schema is set. Put the tenants' middleware before the view, or set a"
            " scope that names tenant and user."
        )
    return quote(database.schema_name, safe="") + "/"


def _named(using: str | None) -> str:
    return (
        "several databases"
        if using is None
        else f"the database {using!r}, which has no tenants"
    )


def tenant_databases() -> list[str]:
    """Return the databases whose connections are in a tenant's schema, as with
    django-tenants.
    """
    return [
        using
        for using, stated in connections.settings.items()
        if has_schemas(using, stated["ENGINE"])
    ]


@lru_cache(maxsize=64)
def has_schemas(using: str, _engine: str) -> bool:
    """Whether the connections of a database have tenants. Its backend says so, once for
    the process.
    """
    return hasattr(connections[using], "schema_name")
