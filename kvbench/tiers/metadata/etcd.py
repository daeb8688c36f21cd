"""Metadata in etcd, through its JSON gateway: one key per location, attached to its instance's lease."""

import base64
import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote, unquote

from kvbench.core.block_key import BlockKey
from kvbench.core.errors import MissingDependencyError
from kvbench.tiers.metadata.base import SCHEMA_VERSION, Location, MetadataUnavailableError

# What etcd takes in one transaction unless it was started with another --max-txn-ops.
_OPERATIONS = 128
# A lease for what belongs to no instance is made anew this often, so that an entry lives at most a quarter too short.
_SHARED_LEASE_SHARE = 0.25


class EtcdBackend:
    """Keys are PREFIX/v1/IDENTITY/HASH/INSTANCE/TIER, so that one range holds all locations of a block. etcd itself
    deletes the keys of a lease that ends; draining an instance is revoking its leases.
    """

    name = "etcd"

    def __init__(
        self,
        host: str,
        port: int,
        *,
        prefix: str,
        lease_s: float,
        ttl_s: float,
        timeout_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        try:
            import etcd3gw
            import requests
            from etcd3gw import exceptions
        except ImportError as error:
            raise MissingDependencyError("etcd3gw", "etcd", f"metadata in etcd://{host}:{port}") from error
        # requests would read the machine's proxy settings for every call, and a proxy has no business here.
        session = requests.Session()
        session.trust_env = False
        self._timeout: Any = exceptions.ConnectionTimeoutError
        # The last two are what an answer that is no etcd's leads to.
        self._failures: Any = (exceptions.Etcd3Exception, requests.RequestException, ValueError, KeyError)
        self._client: Any = etcd3gw.client(host=host, port=port, timeout=timeout_s, session=session)
        self._place = f"etcd://{host}:{port}"
        self._root = f"{prefix}/v{SCHEMA_VERSION}/"
        self._lease_s, self._ttl_s, self._clock = max(1, math.ceil(lease_s)), ttl_s, clock
        self._leases: dict[str, Any] = {}
        self._shared_lease: tuple[float, Any] | None = None

    def put(self, keys: Sequence[BlockKey], location: Location, sizes_bytes: Sequence[int]) -> None:
        value_of = [
            json.dumps({"bytes": size, "expires_at_s": self._clock() + self._ttl_s}, separators=(",", ":"))
            for size in sizes_bytes
        ]
        names = [self._name(key, location) for key in keys]
        for attempt in (1, 2):
            lease = self._lease(location.instance)
            puts = [
                {"request_put": {"key": _coded(name), "value": _coded(value), "lease": lease.id}}
                for name, value in zip(names, value_of, strict=True)
            ]
            try:
                self._transact(puts)
            except self._failures as error:
                # The lease has ended, by drain or by a pause of this process: its keys are gone, and so is the lease.
                if attempt == 2 or "lease not found" not in _text(error):
                    raise self._unavailable(error) from error
                self._leases.pop(location.instance, None)
                self._shared_lease = None
            else:
                return

    def find(self, keys: Sequence[BlockKey]) -> list[Location | None]:
        ranges = [
            {"request_range": {"key": _coded(start), "range_end": _coded(start[:-1] + "0")}}  # "0" follows "/"
            for start in (f"{self._root}{key}/" for key in keys)
        ]
        try:
            answers = self._transact(ranges)
        except self._failures as error:
            raise self._unavailable(error) from error
        now_s = self._clock()
        return [_newest(answer.get("response_range", {}).get("kvs", ()), now_s) for answer in answers]

    def remove(self, keys: Sequence[BlockKey], location: Location) -> None:
        try:
            self._transact(
                [{"request_delete_range": {"key": _coded(self._name(key, location))}} for key in keys],
            )
        except self._failures as error:
            raise self._unavailable(error) from error

    def drain(self, instance: str) -> None:
        start = f"{self._root}lease/{_segment(instance)}/"
        try:
            for lease_id, _ in self._client.get_prefix(start):
                self._client.post(self._client.get_url("/kv/lease/revoke"), json={"ID": int(lease_id)})
        except self._failures as error:
            raise self._unavailable(error) from error
        self._leases.pop(instance, None)

    def renew(self) -> None:
        try:
            for instance, lease in list(self._leases.items()):
                if lease.refresh() < 0:
                    self._leases.pop(instance, None)
        except self._failures as error:
            raise self._unavailable(error) from error

    def close(self) -> None:
        try:
            for lease in self._leases.values():
                lease.revoke()
        except self._failures:
            pass  # it is gone; the leases end by themselves
        finally:
            self._client.session.close()

    def _lease(self, instance: str) -> Any:
        try:
            if not instance:
                return self._lease_for_shared()
            if instance not in self._leases:
                lease = self._client.lease(ttl=self._lease_s)
                # The number as value too: what is asked for by prefix comes back without being parsed from a name.
                self._client.put(f"{self._root}lease/{_segment(instance)}/{lease.id}", str(lease.id), lease=lease)
                self._leases[instance] = lease
            return self._leases[instance]
        except self._failures as error:
            raise self._unavailable(error) from error

    def _lease_for_shared(self) -> Any:
        """A lease of the time to live, never renewed, so that entries which belong to no instance end as well."""
        now_s = self._clock()
        if self._shared_lease is None or now_s >= self._shared_lease[0]:
            lease = self._client.lease(ttl=max(1, math.ceil(self._ttl_s * (1 + _SHARED_LEASE_SHARE))))
            self._shared_lease = (now_s + self._ttl_s * _SHARED_LEASE_SHARE, lease)
        return self._shared_lease[1]

    def _transact(self, operations: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = []
        for start in range(0, len(operations), _OPERATIONS):
            part = operations[start : start + _OPERATIONS]
            answer = self._client.transaction({"compare": [], "success": part, "failure": []})
            answers += answer.get("responses", [{} for _ in part])
        return answers

    def _name(self, key: BlockKey, location: Location) -> str:
        return f"{self._root}{key}/{_segment(location.instance)}/{_segment(location.tier)}"

    def _unavailable(self, error: Exception) -> Exception:
        if isinstance(error, self._timeout):
            return TimeoutError(f"{self._place} does not answer")
        return MetadataUnavailableError(f"{self._place} does not do it ({_text(error)})")


def _newest(entries: Sequence[dict[str, Any]], now_s: float) -> Location | None:
    """The location that was published last among those whose time has not ended."""
    for entry in sorted(entries, key=lambda one: -int(one["mod_revision"])):
        instance, tier = base64.b64decode(entry["key"]).decode().rsplit("/", 2)[1:]
        value = json.loads(base64.b64decode(entry["value"]))
        if value["expires_at_s"] > now_s:
            return Location(
                instance=unquote(instance)[1:],
                tier=unquote(tier)[1:],
                num_bytes=value["bytes"],
                version=int(entry["version"]),
                expires_at_s=value["expires_at_s"],
            )
    return None


def _text(error: Any) -> str:
    return " ".join(str(getattr(error, "detail_text", None) or error).split())


def _segment(name: str) -> str:
    """One segment of a key; never empty."""
    return "=" + quote(name, safe="")


def _coded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
