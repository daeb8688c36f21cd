"""Tier `redis`: one string per block in Redis or Valkey, through redis-py."""

from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

from kvbench.core.errors import MissingDependencyError, UsageError
from kvbench.tiers.remote import (
    RemoteTier,
    StoreClient,
    StoreError,
    StoreFullError,
    StoreInterruptedError,
    StoreUnreachableError,
)
from kvbench.tiers.remote_settings import remote_settings
from kvbench.tiers.spec import TierSpec

_T = TypeVar("_T")
_PREFIX = "kvbench/"
_PAGE = 1000


def open_redis(spec: TierSpec, *, block_bytes: int, name: str) -> RemoteTier:
    """The tier that `spec` spells."""
    settings = remote_settings(spec)
    _imported(spec)
    _check_address(spec)
    return RemoteTier(
        name,
        place_of(spec),
        block_bytes,
        lambda: open_redis_client(spec, settings.concurrency, timeout_s=settings.timeout_s),
        timeout_s=settings.timeout_s,
        deadline_s=settings.deadline_s,
        concurrency=settings.concurrency,
        capacity_bytes=spec.size_bytes,
    )


async def open_redis_client(spec: TierSpec, depth: int, *, timeout_s: float) -> StoreClient:
    """A client with at most `depth` connections; it connects when it is first used."""
    redis = _imported(spec)
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    pool = redis.BlockingConnectionPool.from_url(
        f"redis://{spec.location}",
        max_connections=depth,
        timeout=timeout_s,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),  # the tier decides what is asked again, within its deadline
    )
    prefix = dict(spec.options).get("prefix", "")
    return RedisClient(
        redis.Redis(connection_pool=pool), f"{prefix.strip('/')}/" if prefix else _PREFIX, place_of(spec)
    )


def _check_address(spec: TierSpec) -> None:
    """Refuses what the client would take for another address, or for database 0."""
    try:
        address = urlsplit(f"redis://{spec.location}")
        usable = bool(address.hostname) and address.port != 0
    except ValueError:
        usable = False
    if not usable or not (address.path.strip("/") or "0").isdecimal() or address.query:
        raise UsageError(
            f"tier {place_of(spec)} is not HOST:PORT and the number of a database; write it like redis://127.0.0.1:6379/0"
        )


def place_of(spec: TierSpec) -> str:
    """The address for messages: without the password."""
    return f"redis://{spec.location.rpartition('@')[2]}"


class RedisClient:
    """Values as strings whose names begin with one prefix."""

    def __init__(self, client: Any, prefix: str, place: str) -> None:
        from redis import exceptions

        self._client, self._prefix, self._place = client, prefix, place
        self._errors: Any = exceptions

    async def put(self, name: str, *parts: bytes | memoryview) -> None:
        await self._done(self._client.set(self._prefix + name, b"".join(parts)))

    async def get(self, name: str) -> bytes | None:
        value = await self._done(self._client.get(self._prefix + name))
        if value is not None and not isinstance(value, bytes):
            raise self._no_answer(value)
        return value

    async def head(self, name: str, num_bytes: int) -> tuple[bytes, int] | None:
        async with self._client.pipeline(transaction=True) as pair:
            pair.getrange(self._prefix + name, 0, num_bytes - 1)
            pair.strlen(self._prefix + name)
            answers = await self._done(pair.execute())
        match answers:
            case [bytes() as start, int() as total]:
                return (start, total) if total else None
        raise self._no_answer(answers)

    async def delete(self, names: Sequence[str]) -> list[bool]:
        there: list[bool] = []
        for start in range(0, len(names), _PAGE):
            async with self._client.pipeline(transaction=False) as batch:
                for name in names[start : start + _PAGE]:
                    batch.unlink(self._prefix + name)
                counts = await self._done(batch.execute())
            if not all(isinstance(count, int) for count in counts):
                raise self._no_answer(counts)
            there += [count > 0 for count in counts]
        return there

    async def names(self) -> AsyncIterator[tuple[str, int]]:
        cursor, seen = 0, set()
        while True:
            pattern = "".join(f"\\{one}" if one in "*?[]^\\-" else one for one in self._prefix) + "*"
            answer = await self._done(self._client.scan(cursor, match=pattern, count=_PAGE))
            match answer:
                case [int() as cursor, [*page]] if all(isinstance(one, bytes) for one in page):
                    pass
                case _:
                    raise self._no_answer(answer)
            async with self._client.pipeline(transaction=False) as batch:
                new = [one for one in page if one not in seen]
                for one in new:
                    batch.strlen(one)
                lengths = await self._done(batch.execute(raise_on_error=False))
            seen.update(new)
            for one, length in zip(new, lengths, strict=True):
                if isinstance(length, int):  # otherwise not a string: another's
                    yield one.decode(errors="replace")[len(self._prefix) :], length
            if cursor == 0:
                return

    async def check(self) -> None:
        """Raises `StoreError` unless the server answers."""
        await self._done(self._client.ping())

    async def close(self) -> None:
        await self._client.aclose()
        await self._client.connection_pool.disconnect()

    def _no_answer(self, answer: object) -> StoreError:
        return StoreInterruptedError(f"{self._place} gives an answer that is none ({str(answer)[:40]!r})")

    async def _done(self, work: Awaitable[_T]) -> _T:
        """What `work` returns, with the client's errors as those of a store."""
        errors = self._errors
        try:
            return await work
        except errors.TimeoutError as error:
            raise TimeoutError(str(error)) from error
        except errors.OutOfMemoryError as error:
            raise StoreFullError(f"{self._place} is full ({error})") from error
        except (errors.BusyLoadingError, errors.AuthenticationError) as error:
            raise StoreError(f"{self._place} refuses ({error})") from error
        except (errors.ConnectionError, OSError) as error:
            # Error 111 connecting to …: the other side of a connection that was never made
            refused = "connecting to" in str(error) or isinstance(error, ConnectionRefusedError)
            kind: type[StoreError] = StoreUnreachableError if refused else StoreInterruptedError
            raise kind(f"{self._place} cannot be used ({error or type(error).__name__})") from error
        except (ValueError, TypeError, LookupError) as error:  # of the client, which parses what is no answer
            raise self._no_answer(error) from error
        except errors.RedisError as error:
            raise StoreError(f"{self._place} refuses ({error})") from error


def _imported(spec: TierSpec) -> Any:
    try:
        from redis import asyncio as redis
    except ImportError as error:
        raise MissingDependencyError("redis", "redis", f"tier {place_of(spec)}") from error
    return redis
