"""How scripts get to Redis, Redis Cluster or Valkey, how durable a write has to be, and
what their errors mean.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import redis
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string
from redis import exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from django_idempotency import StoreUnavailable
from django_idempotency.contrib.redis.scripts import Script
from django_idempotency.extending import (
    Options,
    number,
    one_of,
    option,
    or_none,
    seconds,
    text,
)
from django_idempotency.extending.stores import StoreRefused

ID_LENGTH = 32  # of a record's id, with which its key ends
# seconds for which a server is not asked for new keys after it did not respond in time
PAUSE = 5.0


@dataclass(frozen=True, kw_only=True)
class RedisOptions(Options):
    """The ``OPTIONS`` of a Redis store. Times are in seconds.

    ``url``: the URL of a Redis or Valkey server, or of one node of a cluster.
    ``cluster``: whether it is a cluster. ``client``: instead of both, the path of a
    callable that returns a redis-py client, such as one from a Sentinel. ``prefix``:
    what its keys begin with. ``timeout``: how long a connection, and each response, may
    take. ``durability``: ``"none"``, the master's memory; ``"replicas"``, WAIT for as
    many ``replicas``; ``"disk"``, WAITAOF for the master's disk.
    ``durability_timeout``: how long to wait for that.
    """

    url: str | None = option(None, or_none(text("the URL of a Redis")), secret=True)
    cluster: bool = option(False)
    client: str | None = option(None, or_none(text("the path of a callable")))
    prefix: str = option("idempotency:", text("the beginning of a key"))
    timeout: float = option(2.0, seconds(0.01, 600))
    durability: str = option("none", one_of(("none", "replicas", "disk")))
    replicas: int = option(1, number(1, 100))
    durability_timeout: float = option(0.5, seconds(0.001, 600))

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.url is None) == (self.client is None):
            raise ImproperlyConfigured("set either url or client, not both.")
        if self.durability != "none" and self.durability_timeout >= self.timeout:
            raise ImproperlyConfigured(
                f"durability_timeout is {self.durability_timeout}; it must be less than"
                f" the timeout of {self.timeout}, within which the server must respond."
            )

    def make_client(self) -> Any:
        client = (
            import_string(self.client)()
            if self.client is not None
            else self._new_client()
        )
        if client.get_encoder().decode_responses:
            raise ImproperlyConfigured(
                "The client of a Redis store has decode_responses=True, but responses"
                " are bytes."
            )
        return client

    def _new_client(self) -> Any:
        kind = Cluster if self.cluster else redis.Redis
        # Retry once, immediately, if a connection breaks: no script does harm when it
        # is run again with the same token. Don't retry after a timeout: the caller has
        # already waited as long as ``timeout`` says.
        limits = {
            "socket_timeout": self.timeout,
            "socket_connect_timeout": self.timeout,
            "retry": Retry(NoBackoff(), 1, (exceptions.ConnectionError,)),
        }
        return kind.from_url(str(self.url), **limits)


class Cluster(redis.RedisCluster):
    """Retries nothing after a timeout, for the reason in ``_new_client``."""

    ERRORS_ALLOW_RETRY: Any = tuple(
        error
        for error in redis.RedisCluster.ERRORS_ALLOW_RETRY
        if error is not exceptions.TimeoutError
    )


# Another connection, or a later attempt, may succeed after these. Any other error of a
# server would come back.
TRANSIENT = (
    exceptions.ReadOnlyError,
    exceptions.MovedError,
    exceptions.AskError,
    exceptions.TryAgainError,
    exceptions.ClusterDownError,
    exceptions.MasterDownError,
)


@contextmanager
def redis_errors() -> Iterator[None]:
    """Turn what redis-py raises into ``StoreUnavailable``, or into ``StoreRefused`` if
    the server refused.
    """
    try:
        yield
    except exceptions.ResponseError as error:
        raise (StoreUnavailable if isinstance(error, TRANSIENT) else StoreRefused)(
            _described(error)
        ) from error
    except (exceptions.RedisError, exceptions.RedisClusterException, OSError) as error:
        raise StoreUnavailable(_described(error)) from error


def _described(error: Exception) -> str:
    return f"Redis: {type(error).__name__}: {str(error)[:200]}"


class TooFew(StoreUnavailable):
    """The write was not acknowledged by enough replicas, or disks, in time. It has
    taken place all the same.

    It is repeated when there are replicas, as after any ``StoreUnavailable``.
    """


def _keys(key: str) -> tuple[int, str, str, str]:
    """Return how many keys a script has, that of a record, that of the set of
    unfinished records, and that of the token that the record was given to.
    """
    return 3, key, key[:-ID_LENGTH], f"{key}:given"


def _reply(connection: Any) -> Any:
    try:
        return connection.read_response()
    except exceptions.ResponseError as error:
        return error


class Connection:
    """A client, and the commands to send by it. Threads and forks share it."""

    def __init__(self, options: RedisOptions) -> None:
        self.options = options
        with redis_errors():
            self.client = options.make_client()
        self.is_cluster = isinstance(self.client, redis.RedisCluster)
        self._paused_until: dict[str, float] = {}  # by node, "" without a cluster

    @contextmanager
    def pausing(self, key: str) -> Iterator[None]:
        """Don't ask the server of ``key`` for a while after it did not respond in time:
        each request would wait for it. One of them asks it again.

        Raises ``StoreUnavailable`` meanwhile. For what begins a run: owners always ask.
        """
        with redis_errors():
            node = self._node_of(key).name if self.is_cluster else ""
        until, now = self._paused_until.get(node, 0.0), time.monotonic()
        if now < until:
            raise StoreUnavailable("Redis did not respond in time a moment ago.")
        if until:
            self._paused_until[node] = now + PAUSE
        try:
            yield
        except StoreUnavailable as error:
            if isinstance(error.__cause__, exceptions.TimeoutError):
                self._paused_until[node] = time.monotonic() + PAUSE
            raise
        self._paused_until.pop(node, None)

    def _node_of(self, key: str) -> Any:
        try:
            return self.client.get_node_from_key(key)
        except exceptions.SlotNotCoveredError:  # another node may have it by now
            self.client.nodes_manager.initialize()
            return self.client.get_node_from_key(key)

    def run(self, script: Script, key: str, *values: Any) -> Any:
        """Run ``script`` on ``key``."""
        with redis_errors():
            try:
                return self.execute("EVALSHA", script.sha, *_keys(key), *values)
            except exceptions.NoScriptError:  # restarted, flushed, or another master
                return self.execute("EVAL", script.source, *_keys(key), *values)

    def execute(self, *command: Any) -> Any:
        if self.is_cluster:
            return self.client.execute_command(*command)
        (reply,) = self._ask(self.client, command)
        if isinstance(reply, Exception):
            raise reply
        return reply

    def _ask(self, client: Any, *commands: tuple[Any, ...]) -> list[Any]:
        """Send commands to one server in one round trip. Return each reply, which may
        be an error.

        A connection whose replies may not all have been read is closed: they would be
        taken for those of the next commands. redis-py's pool does not always look for
        them, and they may not have come yet.
        """
        connection = client.connection_pool.get_connection()

        def ask() -> list[Any]:
            connection.send_packed_command(connection.pack_commands(commands))
            return [_reply(connection) for _command in commands]

        try:
            replies = connection.retry.call_with_retry(
                ask, lambda _error: connection.disconnect()
            )
            if any(isinstance(reply, TRANSIENT) for reply in replies):
                connection.disconnect()
            return list(replies)
        except BaseException:
            connection.disconnect()
            raise
        finally:
            client.connection_pool.release(connection)

    def run_each(self, script: Script, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Run ``script`` on many keys, in one round trip except on a cluster. Each call
        is a key and its values.
        """
        if self.is_cluster or len(calls) < 2:
            return [self.run(script, *call) for call in calls]
        with redis_errors():
            results = self._ask(
                self.client,
                *(
                    ("EVALSHA", script.sha, *_keys(key), *values)
                    for key, *values in calls
                ),
            )
            for number, result in enumerate(results):
                if isinstance(result, exceptions.NoScriptError):
                    results[number] = self.run(script, *calls[number])
                elif isinstance(result, Exception):
                    raise result
        return results

    def run_durably(self, script: Script, key: str, *values: Any) -> Any:
        """Run ``script``, and wait for what ``durability`` asks for.

        Raises ``TooFew`` if that is not reached in time. The write has taken place
        then, too.
        """
        if self.options.durability == "none":
            return self.run(script, key, *values)
        with redis_errors():
            node = self.client
            if self.is_cluster:
                node = self.client.get_redis_connection(self._node_of(key))
            result, acknowledged = self._run_and_wait(node, script, key, *values)
        wanted = self.options.replicas if self.options.durability == "replicas" else 1
        if acknowledged < wanted:
            raise TooFew(
                f"Redis: {acknowledged} of {wanted} acknowledgements within the"
                " durability_timeout."
            )
        return result

    def _run_and_wait(
        self, node: Any, script: Script, key: str, *values: Any
    ) -> tuple[Any, int]:
        for name, text_or_sha in (("EVALSHA", script.sha), ("EVAL", script.source)):
            # On one connection: WAIT applies to its own writes.
            result, acknowledged = self._ask(
                node, (name, text_or_sha, *_keys(key), *values), self._wait()
            )
            if not isinstance(result, exceptions.NoScriptError):
                break
        for reply in (result, acknowledged):
            if isinstance(reply, Exception):
                # another node may have the key
                if self.is_cluster and isinstance(reply, TRANSIENT):
                    self.client.nodes_manager.initialize()
                raise reply
        return result, (
            acknowledged[0] if isinstance(acknowledged, list) else int(acknowledged)
        )

    def _wait(self) -> tuple[Any, ...]:
        milliseconds = max(1, round(self.options.durability_timeout * 1000))
        if self.options.durability == "disk":
            return ("WAITAOF", 1, 0, milliseconds)
        return ("WAIT", self.options.replicas, milliseconds)

    def reconnect(self) -> None:
        """Drop idle connections, which may be stale."""
        with redis_errors():
            if self.is_cluster:
                self.client.nodes_manager.initialize()
                return
            self.client.connection_pool.disconnect(inuse_connections=False)

    def each_master(self, ask: Callable[[Any], Any]) -> list[Any]:
        """Return what ``ask`` returns for a client of each master."""
        with redis_errors():
            if not self.is_cluster:
                return [ask(self.client)]
            return [
                ask(self.client.get_redis_connection(node))
                for node in self.client.get_primaries()
            ]


@lru_cache(maxsize=16)
def connection(options: RedisOptions) -> Connection:
    """Return this process's connection for ``options``."""
    return Connection(options)
