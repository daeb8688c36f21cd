"""Tier `mooncake`: one object per block in a Mooncake store, through its own client and registered memory."""

import contextlib
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.core.block_key import BlockKey, parse_block_key
from kvbench.core.errors import MissingDependencyError, UsageError
from kvbench.core.units import MIB, parse_bytes
from kvbench.tiers.base import EXISTS, MISS, OK, Block, Outcome, Result, Wanted
from kvbench.tiers.envelope import HEADER_BYTES
from kvbench.tiers.remote_settings import remote_settings
from kvbench.tiers.spec import TierSpec
from kvbench.tiers.staged import Call, StagedTier, UnavailableError
from kvbench.tiers.staging import Staging

_BUFFER_BYTES = 64 * MIB
# What the client allocates for calls that copy; this tier makes none.
_LOCAL_BUFFER_BYTES = 16 * MIB
# Codes of the client. A lease that ends while its object is read makes the bytes untrustworthy, not the object bad.
_RESULTS: dict[int, Result] = {
    -200: "full",  # no segment has room
    -703: "miss",  # a put that has not ended
    -704: "miss",
    -707: "timeout",  # the lease ended before the read did
    -801: "corrupt",
}
_ABSENT = -704
_EXISTED = -705
_MEANINGS = {
    -200: "no segment has room",
    -600: "the arguments are refused, or the master is not there",
    -703: "the replica is not ready",
    -705: "the object exists already",
    -706: "the object is leased",
    -707: "the lease ended before the read",
    -800: "the transfer failed",
    -801: "the client's checksum differs",
    -900: "the master was not reached",
    -901: "the master did not answer",
}
_UNREACHABLE = frozenset({-900, -901})
_AGAIN = frozenset({-707, -800})
# setup() holds Python's lock for seconds when the master takes the connection and says nothing, so another process
# tries it first and is killed when that takes too long.
_TRIAL = (
    "import sys; from mooncake.store import MooncakeDistributedStore; store = MooncakeDistributedStore(); "
    "code = store.setup(sys.argv[1], 'P2PHANDSHAKE', 0, 1 << 24, sys.argv[2], sys.argv[3], sys.argv[4]); "
    "code or store.close(); sys.exit(code != 0)"
)


def open_mooncake(spec: TierSpec, *, block_bytes: int, name: str) -> StagedTier:
    """The tier that `mooncake://MASTER:PORT` spells. The client is set up when it is first needed."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # it tells of every client that it makes
    try:
        import mooncake.store
    except ImportError as error:
        raise MissingDependencyError("mooncake-transfer-engine-non-cuda", "mooncake", f"tier {spec}") from error
    del mooncake
    options, settings = dict(spec.options), remote_settings(spec)
    host, colon, port = spec.location.rpartition(":")
    if not colon or not port.isdecimal() or not host:
        raise UsageError(f"tier {spec}: the master is spelled HOST:PORT, like mooncake://127.0.0.1:50051")
    place = Place(
        master=spec.location,
        protocol=options.get("protocol", "tcp"),
        devices=options.get("devices", ""),
        host=options.get("host"),
        segment_bytes=parse_bytes(options["segment"]) if "segment" in options else 0,
        replicas=int(options.get("replicas", 1)),
        metrics=options.get("metrics"),
        prefix=f"{options['prefix'].strip('/')}/" if "prefix" in options else "",
    )
    return StagedTier(
        lambda: MooncakeClient(place),
        name=name,
        description=place.name,
        block_bytes=block_bytes,
        buffer_bytes=parse_bytes(options["buffer"]) if "buffer" in options else max(_BUFFER_BYTES, 2 * block_bytes),
        capacity_bytes=spec.size_bytes,
        timeout_s=settings.timeout_s,
        deadline_s=settings.deadline_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which store, and what this client brings to it: `segment_bytes` of its own memory, by default none."""

    master: str
    protocol: str
    devices: str
    host: str | None
    segment_bytes: int
    replicas: int
    metrics: str | None
    prefix: str

    @property
    def name(self) -> str:
        return f"mooncake://{self.master}"


class MooncakeClient:
    """A `StagedClient` of one Mooncake store."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._client: Any = None
        self._staging: Any = None

    def set_up(self, staging: Staging, timeout_s: float) -> None:
        """Asks the master by connecting, by a trial in another process, and only then by the set-up itself."""
        from mooncake.store import MooncakeDistributedStore

        place = self._place
        host, _, port = place.master.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), timeout=timeout_s) as connection:
                mine = place.host or connection.getsockname()[0]
        except OSError as error:
            raise UnavailableError(f"the master cannot be reached ({error})") from error
        try:
            tried = subprocess.run(
                [sys.executable, "-c", _TRIAL, _own_address(mine), place.protocol, place.devices, place.master],
                capture_output=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise UnavailableError(f"the master did not answer within {timeout_s:g} s") from error
        if tried.returncode != 0:
            reason = tried.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise UnavailableError(f"the client cannot be set up ({reason})")
        client = MooncakeDistributedStore()
        code = client.setup(
            _own_address(mine), "P2PHANDSHAKE", place.segment_bytes, _LOCAL_BUFFER_BYTES, place.protocol,
            place.devices, place.master,
        )  # fmt: skip
        if code != 0:
            raise UnavailableError(f"the client cannot be set up (code {code})")
        code = client.register_buffer(staging.address, staging.num_bytes)
        if code != 0:
            client.close()
            raise UnavailableError(f"the client does not register memory (code {code})")
        self._client, self._staging = client, staging

    def store(self, blocks: Sequence[Block], call: Call) -> list[Outcome]:
        """Puts what is not there, with as many replicas as asked for, or as there are segments."""
        from mooncake.store import ReplicateConfig

        client, names = self._client, self._names([block.key for block in blocks])
        held = call(lambda: client.batch_is_exist(names))
        new = [index for index, one in enumerate(held) if one != 1]
        outcomes = [EXISTS if one == 1 else OK for one in held]
        if not new:
            return outcomes
        sizes = self._staging.put([blocks[index] for index in new])
        addresses = self._staging.addresses(len(new))
        config = ReplicateConfig()
        config.replica_num = self._place.replicas
        chosen = [names[index] for index in new]
        codes = call(lambda: client.batch_put_from(chosen, addresses, sizes, config))
        for index, code in zip(new, codes, strict=True):
            outcomes[index] = EXISTS if code == _EXISTED else OK if code == 0 else self._refusal(code)
        return outcomes

    def load(self, wanted: Sequence[Wanted], call: Call) -> list[Outcome]:
        """Gets into registered memory. What a lease or a transfer spoilt is asked for once more."""
        outcomes = [MISS] * len(wanted)
        again = self._loaded(wanted, range(len(wanted)), outcomes, call)
        if again:
            self._loaded(wanted, again, outcomes, call)
        damaged = self._names([want.key for want, one in zip(wanted, outcomes, strict=True) if one.result == "corrupt"])
        if damaged:
            call(lambda: self._client.batch_remove(damaged, True))
        return outcomes

    def contains(self, keys: Sequence[BlockKey], call: Call) -> list[Outcome]:
        """Whether there are objects of these names; what is in them only a load can tell."""
        names = self._names(keys)
        codes = call(lambda: self._client.batch_is_exist(names))
        return [OK if code == 1 else MISS if code == 0 else self._refusal(code) for code in codes]

    def evict(self, keys: Sequence[BlockKey], call: Call) -> list[Outcome]:
        """Removes by force: an object that was read a moment ago is leased, and would stay where it is."""
        names = self._names(keys)
        codes = call(lambda: self._client.batch_remove(names, True))
        return [OK if code == 0 else self._refusal(code) for code in codes]

    def entries(self, call: Call) -> list[tuple[BlockKey, int]] | None:
        """What the master lists at its HTTP port, which `metrics=` names; the client itself cannot list."""
        url = self._place.metrics
        if url is None:
            return None
        try:
            names = call(lambda: _text_of(f"{url.rstrip('/')}/get_all_keys")).split()
        except OSError as error:
            raise UnavailableError(f"{url} does not answer ({error})") from error
        found = []
        for name in names:
            with contextlib.suppress(ValueError):
                key = parse_block_key(name.strip('",[]').removeprefix(self._place.prefix))
                (own_name,) = self._names([key])
                size = call(lambda own_name=own_name: self._client.get_size(own_name))  # type: ignore[misc]
                if size >= HEADER_BYTES:
                    found.append((key, size - HEADER_BYTES))
        return found

    def replicas(self, key: BlockKey, call: Call) -> int:
        """How many replicas the store has of a block; fewer than asked for where there are too few segments."""
        return len(call(lambda: self._client.get_replica_desc(*self._names([key]))))

    def close(self) -> None:
        """Takes the memory back and says good-bye."""
        if self._client is not None:
            self._client.unregister_buffer(self._staging.address)
            self._client.close()

    def _loaded(
        self, wanted: Sequence[Wanted], indices: Sequence[int], outcomes: list[Outcome], call: Call
    ) -> list[int]:
        """Fills in the outcomes of some blocks; those that are worth asking for again."""
        names = self._names([wanted[index].key for index in indices])
        addresses, sizes = self._staging.addresses(len(indices)), [self._staging.slot_bytes] * len(indices)
        codes = call(lambda: self._client.batch_get_into(names, addresses, sizes))
        again = []
        for slot, (index, code) in enumerate(zip(indices, codes, strict=True)):
            if code >= 0:
                outcomes[index] = self._staging.take(slot, code, wanted[index], self._place.name)
            else:
                outcomes[index] = self._refusal(code)
                again += [index] if code in _AGAIN else []
        return again

    def _names(self, keys: Sequence[BlockKey]) -> list[str]:
        return [f"{self._place.prefix}{key}" for key in keys]

    def _refusal(self, code: int) -> Outcome:
        reason = f"{_MEANINGS.get(code, 'the client refuses')} (code {code})"
        if code in _UNREACHABLE:
            raise UnavailableError(reason)
        return MISS if code == _ABSENT else Outcome(_RESULTS.get(code, "failed"), f"{self._place.name}: {reason}")


def _text_of(url: str) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=60) as answer:
        text: str = answer.read().decode(errors="replace")
    return text


def _own_address(host: str) -> str:
    """An address of this client with a port that is free now; without one the client tries twenty, seconds each."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return f"{host}:{probe.getsockname()[1]}"
