"""Metadata in Redis or Valkey: one hash per block, one key per lease; the server's clock decides what has ended."""

import os
from collections.abc import Sequence
from typing import Any

from kvbench.core.block_key import BlockKey
from kvbench.core.errors import MissingDependencyError
from kvbench.core.units import seconds_from_ms, whole_ms_from_seconds
from kvbench.tiers.metadata.base import SCHEMA_VERSION, Location, MetadataUnavailableError

# A field is INSTANCE NUL TIER, its value SESSION NUL BYTES NUL VERSION NUL ENDS_MS NUL PUBLISHED. One script per batch:
# one round trip, and no entry is seen half written. Fields whose lease or time has ended are deleted when they are met.
_FIND = """
local clock = redis.call('TIME')
local now_ms = clock[1] * 1000 + math.floor(clock[2] / 1000)
local answer = {}
for i, key in ipairs(KEYS) do
  local fields = redis.call('HGETALL', key)
  local best, newest = false, -1
  for f = 1, #fields, 2 do
    local instance, tier = fields[f]:match('^(.-)%z(.*)$')
    local session, bytes, version, ends_ms, published = fields[f + 1]:match('^(.-)%z(.-)%z(.-)%z(.-)%z(.*)$')
    local left_ms = tonumber(ends_ms) - now_ms
    if left_ms > 0 and instance ~= '' then
      left_ms = math.min(left_ms, redis.call('PTTL', ARGV[1] .. instance .. '/' .. session))
    end
    if left_ms <= 0 then
      redis.call('HDEL', key, fields[f])
    elseif tonumber(published) > newest then
      newest = tonumber(published)
      best = {instance, tier, bytes, version, tostring(now_ms + left_ms)}
    end
  end
  answer[i] = best
end
return answer
"""
_PUT = """
local clock = redis.call('TIME')
local now_ms = clock[1] * 1000 + math.floor(clock[2] / 1000)
local ttl_ms = tonumber(ARGV[5])
if ARGV[2] ~= '' then
  local lease = ARGV[1] .. ARGV[2] .. '/' .. ARGV[4]
  if ARGV[8] ~= 'new' and redis.call('EXISTS', lease) == 0 then
    return 0
  end
  redis.call('SET', lease, '', 'PX', ARGV[6])
end
local field = ARGV[2] .. '\\0' .. ARGV[3]
local published = redis.call('INCR', ARGV[7])
for i, key in ipairs(KEYS) do
  local version = 1
  local old = redis.call('HGET', key, field)
  if old then
    local _, _, before = old:match('^(.-)%z(.-)%z(.-)%z')
    version = tonumber(before) + 1
  end
  local value = ARGV[4] .. '\\0' .. ARGV[8 + i] .. '\\0' .. version .. '\\0' .. string.format('%.0f', now_ms + ttl_ms)
  redis.call('HSET', key, field, value .. '\\0' .. published)
  redis.call('PEXPIRE', key, ARGV[5])
end
return 1
"""


class RedisBackend:
    """A connection that is made when it is first needed, and again after a failure."""

    name = "redis"

    def __init__(self, url: str, *, prefix: str, lease_s: float, ttl_s: float, timeout_s: float) -> None:
        try:
            import redis
        except ImportError as error:
            raise MissingDependencyError("redis", "redis", f"metadata in {url}") from error
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        self._redis: Any = redis
        self._client: Any = redis.Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            single_connection_client=False,
            max_connections=1,
        )
        self._url = url
        self._prefix = f"{prefix}:{SCHEMA_VERSION}:"
        self._lease_ms, self._ttl_ms = whole_ms_from_seconds(lease_s), whole_ms_from_seconds(ttl_s)
        self._sessions: dict[str, str] = {}
        self._find = self._client.register_script(_FIND)
        self._put = self._client.register_script(_PUT)

    def put(self, keys: Sequence[BlockKey], location: Location, sizes_bytes: Sequence[int]) -> None:
        if "\0" in location.instance + location.tier:
            raise ValueError("the name of an instance or a tier has no NUL")
        known = self._sessions.get(location.instance)
        if known is None or not self._put_under(known, "old", keys, location, sizes_bytes):
            # A lease that has ended took its entries with it. Only a new session keeps these from coming back.
            session = os.urandom(8).hex()
            self._put_under(session, "new", keys, location, sizes_bytes)
            if location.instance:
                self._sessions[location.instance] = session

    def _put_under(
        self, session: str, lease: str, keys: Sequence[BlockKey], location: Location, sizes_bytes: Sequence[int]
    ) -> bool:
        arguments: list[str | int] = [
            self._prefix + "lease:", location.instance, location.tier, session, self._ttl_ms, self._lease_ms,
            self._prefix + "published", lease,
        ]  # fmt: skip
        return bool(self._do(lambda: self._put(keys=self._names(keys), args=[*arguments, *sizes_bytes])))

    def find(self, keys: Sequence[BlockKey]) -> list[Location | None]:
        found = self._do(lambda: self._find(keys=self._names(keys), args=[self._prefix + "lease:"]))
        return [_location(one) for one in found]

    def remove(self, keys: Sequence[BlockKey], location: Location) -> None:
        field = f"{location.instance}\0{location.tier}"

        def deleted() -> None:
            with self._client.pipeline(transaction=False) as batch:
                for name in self._names(keys):
                    batch.hdel(name, field)
                batch.execute()

        self._do(deleted)

    def drain(self, instance: str) -> None:
        """Ends the leases of `instance`: nobody finds its entries from then on, and look-ups delete them."""

        def ended() -> None:
            names = list(self._client.scan_iter(match=f"{self._prefix}lease:{_literal(instance)}/*", count=1000))
            if names:
                self._client.delete(*names)

        self._do(ended)
        self._sessions.pop(instance, None)

    def renew(self) -> None:
        if not self._sessions:
            return

        def renewed() -> None:
            with self._client.pipeline(transaction=False) as batch:
                for name in self._leases():
                    batch.set(name, "", px=self._lease_ms, xx=True)
                batch.execute()

        self._do(renewed)

    def close(self) -> None:
        try:
            if self._sessions:
                self._client.delete(*self._leases())
        except (self._redis.RedisError, OSError):
            pass  # it is gone; the leases end by themselves
        finally:
            self._client.close()

    def _names(self, keys: Sequence[BlockKey]) -> list[str]:
        return [f"{self._prefix}{key}" for key in keys]

    def _leases(self) -> list[str]:
        return [f"{self._prefix}lease:{instance}/{session}" for instance, session in self._sessions.items()]

    def _do(self, call: Any) -> Any:
        try:
            return call()
        except self._redis.TimeoutError as error:
            raise TimeoutError(str(error)) from error
        except (self._redis.RedisError, OSError) as error:
            raise MetadataUnavailableError(f"{self._url} does not do it ({error})") from error


def _location(found: Sequence[bytes] | None) -> Location | None:
    if not found:
        return None
    instance, tier, num_bytes, version, ends_ms = found
    return Location(
        instance=instance.decode(),
        tier=tier.decode(),
        num_bytes=int(num_bytes),
        version=int(version),
        expires_at_s=seconds_from_ms(float(ends_ms)),
    )


def _literal(text: str) -> str:
    """`text` for a match pattern of Redis."""
    return "".join(f"\\{letter}" if letter in "*?[]^\\-" else letter for letter in text)
