"""Tier `nixl`: NIXL moves the bytes, to files (POSIX plugin) or to a bucket (OBJ plugin); names are kept here."""

import asyncio
import contextlib
import os
import re
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from kvbench.core.block_key import BlockKey, parse_block_key
from kvbench.core.errors import MissingDependencyError
from kvbench.core.units import KIB, MIB, parse_bytes
from kvbench.tiers.base import EXISTS, MISS, OK, Block, Outcome, Wanted
from kvbench.tiers.envelope import HEADER_BYTES, header_damage, stored_bytes
from kvbench.tiers.remote import StoreClient, StoreError
from kvbench.tiers.remote_settings import RemoteSettings, remote_settings
from kvbench.tiers.s3 import open_s3_client
from kvbench.tiers.spec import TierSpec
from kvbench.tiers.staged import Call, StagedTier, UnavailableError
from kvbench.tiers.staging import Staging

_T = TypeVar("_T")
_BUFFER_BYTES = 64 * MIB
_PAGE_BYTES = 4 * KIB
# How long to sleep between two looks at a transfer: longer each time, so that small ones end at once.
_FIRST_SLEEP_S, _MOST_SLEEP_S = 10e-6, 1e-3
# A transfer that its caller gave up is waited for so long before its memory is left to it for good.
_LATE_S, _LATE_SLEEP_S = 600.0, 0.05
_SUFFIX = ".block"
_UNFINISHED = re.compile(r"[0-9a-f]{64}\.[0-9a-f]+-[0-9]+\.tmp")
_LEFT_BEHIND_S = 86400.0


def open_nixl(spec: TierSpec, *, block_bytes: int, name: str) -> StagedTier:
    """The tier that `nixl+posix:DIRECTORY` or `nixl+obj://BUCKET/PREFIX` spells."""
    _imported(spec)
    options, settings = dict(spec.options), remote_settings(spec)
    new_places: dict[str | None, Callable[[], Places]] = {
        "posix": lambda: Files(Path(spec.location), io=options.get("io"), direct=bool(spec.direct)),
        "obj": lambda: Objects(spec, settings),
    }
    return StagedTier(
        lambda: NixlClient(spec, new_places[spec.plugin](), settings.timeout_s),
        name=name,
        description=str(spec).partition("?")[0],
        block_bytes=block_bytes,
        buffer_bytes=parse_bytes(options["buffer"]) if "buffer" in options else max(_BUFFER_BYTES, 2 * block_bytes),
        capacity_bytes=spec.size_bytes,
        timeout_s=settings.timeout_s,
        deadline_s=settings.deadline_s,
    )


class Places(Protocol):
    """Where a plugin's blocks lie, and how they are named to it. All methods run in the client's thread."""

    backend: str
    memory: str

    def parameters(self) -> dict[str, str]:
        """What the plugin is created with."""
        ...

    def start(self) -> None: ...

    def held(self, keys: Sequence[BlockKey]) -> list[tuple[bytes, int] | None]:
        """The header and the whole length of each block; None where there is none."""
        ...

    def sizes(self, keys: Sequence[BlockKey]) -> list[int | None]:
        """The whole length of each block."""
        ...

    def stored_length(self, num_bytes: int) -> int:
        """How many bytes are moved for so many."""
        ...

    def open(
        self, keys: Sequence[BlockKey], lengths: Sequence[int], *, new: bool
    ) -> contextlib.AbstractContextManager[list[tuple[int, int, int, str]]]:
        """What NIXL registers for each block: (offset, length, number, name). New blocks exist once all went well."""
        ...

    def remove(self, keys: Sequence[BlockKey]) -> list[bool]: ...

    def listed(self) -> list[tuple[BlockKey, int]]:
        """Every block and its whole length."""
        ...

    def close(self) -> None: ...


class NixlClient:
    """A `StagedClient` over one NIXL agent."""

    def __init__(self, spec: TierSpec, places: Places, timeout_s: float) -> None:
        self._spec, self._places, self._timeout_s = spec, places, timeout_s
        self._place = str(spec).partition("?")[0]
        self._agent: Any = None
        self._memory: Any = None
        self._errors: Any = ()
        self._staging: Any = None
        self._late: list[Any] = []

    def set_up(self, staging: Staging, timeout_s: float) -> None:
        """Makes the agent, its plugin, and registers the memory."""
        agent_of, config_of, self._errors = _imported(self._spec)
        try:
            self._places.start()
            agent = agent_of(f"kvbench-{os.getpid()}-{id(self)}", config_of(backends=[]))
            agent.create_backend(self._places.backend, self._places.parameters())
            self._memory = agent.register_memory([(staging.address, staging.num_bytes, 0, "")], "DRAM")
        except (*self._errors, OSError, StoreError) as error:
            raise UnavailableError(f"cannot be used ({error})") from error
        self._agent, self._staging = agent, staging

    def store(self, blocks: Sequence[Block], call: Call) -> list[Outcome]:
        """Writes what is not there."""
        held = self._asked(call, lambda: self._places.held([block.key for block in blocks]))
        outcomes = [
            EXISTS if one is not None and self._is_whole(one, block.key) else OK
            for one, block in zip(held, blocks, strict=True)
        ]
        new = [index for index, outcome in enumerate(outcomes) if outcome is OK]
        if new:
            lengths = self._staging.put([blocks[index] for index in new])
            moved = [self._places.stored_length(length) for length in lengths]
            keys = [blocks[index].key for index in new]
            for index, outcome in zip(new, call(lambda: self._moved("WRITE", keys, moved)), strict=True):
                outcomes[index] = outcome
        return outcomes

    def load(self, wanted: Sequence[Wanted], call: Call) -> list[Outcome]:
        """Reads whole blocks, header included."""
        keys = [want.key for want in wanted]
        sizes = self._asked(call, lambda: self._places.sizes(keys))
        outcomes = [MISS if size is None else self._misfit(size) for size in sizes]
        there = [index for index, outcome in enumerate(outcomes) if outcome is OK]
        if there:
            lengths = [sizes[index] or 0 for index in there]
            chosen = [keys[index] for index in there]
            read = call(lambda: self._moved("READ", chosen, lengths))
            for slot, (index, outcome, length) in enumerate(zip(there, read, lengths, strict=True)):
                outcomes[index] = (
                    self._staging.take(slot, self._exact(slot, length), wanted[index], self._place)
                    if outcome is OK
                    else outcome
                )
        damaged = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome.result == "corrupt"]
        if damaged:
            self._asked(call, lambda: self._places.remove(damaged))
        return outcomes

    def contains(self, keys: Sequence[BlockKey], call: Call) -> list[Outcome]:
        """Whether there are blocks whose header and length are right."""
        held = self._asked(call, lambda: self._places.held(keys))
        return [
            OK if one is not None and self._is_whole(one, key) else MISS for one, key in zip(held, keys, strict=True)
        ]

    def evict(self, keys: Sequence[BlockKey], call: Call) -> list[Outcome]:
        """Removes; NIXL itself cannot."""
        return [OK if there else MISS for there in self._asked(call, lambda: self._places.remove(keys))]

    def entries(self, call: Call) -> list[tuple[BlockKey, int]]:
        """Every block, by its name and length; NIXL itself cannot list."""
        return self._asked(call, self._places.listed)

    def close(self) -> None:
        """Gives the memory back, once nothing moves to or from it any more."""
        until_s = time.monotonic() + _LATE_S
        for handle in self._late:
            with contextlib.suppress(*self._errors):
                while self._agent.check_xfer_state(handle) == "PROC":
                    if time.monotonic() > until_s:
                        _left_behind.append(self)
                        return
                    time.sleep(_LATE_SLEEP_S)
        if self._agent is not None:
            with contextlib.suppress(*self._errors):
                self._agent.deregister_memory(self._memory)
            self._agent = None
        self._places.close()

    def _moved(self, operation: str, keys: Sequence[BlockKey], lengths: Sequence[int]) -> list[Outcome]:
        """Moves the first slots; where that fails as a whole, one by one, so that one block fails no other."""
        until_s = time.monotonic() + self._timeout_s
        outcome = self._transfer(operation, keys, lengths, 0, until_s)
        if outcome is OK or len(keys) == 1:
            return [outcome] * len(keys)
        return [
            self._transfer(operation, [key], [length], slot, until_s)
            for slot, (key, length) in enumerate(zip(keys, lengths, strict=True))
        ]

    def _transfer(
        self, operation: str, keys: Sequence[BlockKey], lengths: Sequence[int], first: int, until_s: float
    ) -> Outcome:
        agent, memory = self._agent, self._places.memory
        slots = [self._staging.address + (first + index) * self._staging.slot_bytes for index in range(len(keys))]
        try:
            with self._places.open(keys, lengths, new=operation == "WRITE") as targets:
                registered = agent.register_memory(targets, memory)
                try:
                    handle = agent.initialize_xfer(
                        operation,
                        agent.get_xfer_descs(
                            [(slot, length, 0) for slot, length in zip(slots, lengths, strict=True)], "DRAM"
                        ),
                        agent.get_xfer_descs([target[:3] for target in targets], memory),
                        agent.name,
                    )
                    self._finish(handle, until_s)
                    handle.release()
                finally:
                    with contextlib.suppress(*self._errors):
                        agent.deregister_memory(registered)
        except FileNotFoundError as error:
            return MISS if operation == "READ" else Outcome("failed", f"{self._place}: {error}")
        except TimeoutError:
            raise
        except (*self._errors, OSError, StoreError) as error:
            result: Any = "full" if isinstance(error, OSError) and error.errno in _FULL else "failed"
            return Outcome(result, f"{self._place}: {error}")
        return OK

    def _finish(self, handle: Any, until_s: float) -> None:
        state, sleep_s = self._agent.transfer(handle), _FIRST_SLEEP_S
        while state == "PROC":
            if time.monotonic() > until_s:
                self._late.append(handle)
                raise TimeoutError(f"a transfer took longer than {self._timeout_s:g} s")
            time.sleep(sleep_s)
            sleep_s = min(1.5 * sleep_s, _MOST_SLEEP_S)
            state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            raise OSError(f"a transfer ended as {state}")

    def _asked(self, call: Call, ask: Callable[[], _T]) -> _T:
        try:
            return call(ask)
        except TimeoutError:
            raise
        except (OSError, StoreError) as error:
            raise UnavailableError(str(error)) from error

    def _misfit(self, size: int) -> Outcome:
        if HEADER_BYTES <= size <= self._staging.slot_bytes:
            return OK
        return Outcome("corrupt", f"{self._place}: the object has {size} bytes, no block of this tier")

    def _is_whole(self, held: tuple[bytes, int], key: BlockKey) -> bool:
        header, size = held
        return not header_damage(header, key) and size == self._places.stored_length(
            HEADER_BYTES + stored_bytes(header)
        )

    def _exact(self, slot: int, length: int) -> int:
        """The length of what was stored, without what was added to fill a page."""
        header = self._staging.header(slot)
        exact = HEADER_BYTES + stored_bytes(header)
        return exact if exact <= length == self._places.stored_length(exact) else length


class Files:
    """Blocks as files `DIRECTORY/IDENTITY/HH/HASH.block`, written beside and renamed."""

    backend, memory = "POSIX", "FILE"

    def __init__(self, directory: Path, *, io: str | None, direct: bool) -> None:
        self._directory, self._io, self._direct = directory, io, direct
        self._own = secrets.token_hex(8)  # process numbers repeat between containers that share a directory
        self._late: list[int] = []

    def parameters(self) -> dict[str, str]:
        """Which of the plugin's three ways; without one, its own choice."""
        return {} if self._io is None else {f"use_{self._io}": "true"}

    def start(self) -> None:
        """Makes the directory."""
        self._directory.mkdir(parents=True, exist_ok=True)

    def held(self, keys: Sequence[BlockKey]) -> list[tuple[bytes, int] | None]:
        """Header and length by reading the file's first bytes."""
        return [self._held(key) for key in keys]

    def sizes(self, keys: Sequence[BlockKey]) -> list[int | None]:
        """Lengths of the files."""
        sizes: list[int | None] = []
        for key in keys:
            try:
                sizes.append(self._path(key).stat().st_size)
            except (FileNotFoundError, NotADirectoryError):
                sizes.append(None)
        return sizes

    def stored_length(self, num_bytes: int) -> int:
        """Whole pages for direct I/O, which takes nothing else."""
        return (num_bytes + _PAGE_BYTES - 1) // _PAGE_BYTES * _PAGE_BYTES if self._direct else num_bytes

    @contextlib.contextmanager
    def open(
        self, keys: Sequence[BlockKey], lengths: Sequence[int], *, new: bool
    ) -> Iterator[list[tuple[int, int, int, str]]]:
        """File descriptors; new files under another name until they are complete."""
        flags = os.O_CLOEXEC | (os.O_DIRECT if self._direct else 0)
        flags |= os.O_WRONLY | os.O_CREAT | os.O_TRUNC if new else os.O_RDONLY
        paths = [self._path(key) for key in keys]
        opened = [path.with_suffix(f".{self._own}-{index}.tmp") if new else path for index, path in enumerate(paths)]
        descriptors: list[int] = []
        try:
            for path in opened:
                if new:
                    path.parent.mkdir(parents=True, exist_ok=True)
                descriptors.append(os.open(path, flags, 0o600))
            yield [(0, length, number, "") for length, number in zip(lengths, descriptors, strict=True)]
            if new:
                for path, final in zip(opened, paths, strict=True):
                    path.replace(final)
        except BaseException as error:
            if new:
                for path in opened[: len(descriptors)]:
                    path.unlink(missing_ok=True)
            if isinstance(error, TimeoutError):
                # What still moves goes by the number of the descriptor, which must not become another file's.
                self._late += descriptors
                descriptors = []
            raise
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def remove(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Unlinks."""
        there = []
        for key in keys:
            try:
                self._path(key).unlink()
            except (FileNotFoundError, NotADirectoryError):
                there.append(False)
            else:
                there.append(True)
        return there

    def listed(self) -> list[tuple[BlockKey, int]]:
        """Every file that is named like a block, with the length of the block without its header."""
        self._remove_left_behind()
        found = []
        for path in self._directory.glob(f"*/*/*{_SUFFIX}"):
            with contextlib.suppress(ValueError, FileNotFoundError):
                key = parse_block_key(f"{path.parent.parent.name}/{path.stem}")
                held = self._held(key)
                if held is not None and not header_damage(held[0], key):
                    found.append((key, stored_bytes(held[0])))
        return found

    def _remove_left_behind(self) -> None:
        """Removes what killed processes were writing. No living one writes a block for so long."""
        oldest_s = time.time() - _LEFT_BEHIND_S
        for path in self._directory.glob("*/*/*.tmp"):
            with contextlib.suppress(OSError):
                if _UNFINISHED.fullmatch(path.name) and path.stat().st_mtime < oldest_s:
                    path.unlink()

    def close(self) -> None:
        """Closes what late transfers had; nothing moves any more."""
        while self._late:
            os.close(self._late.pop())

    def _held(self, key: BlockKey) -> tuple[bytes, int] | None:
        try:
            with self._path(key).open("rb") as file:
                return file.read(HEADER_BYTES), os.fstat(file.fileno()).st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _path(self, key: BlockKey) -> Path:
        name = key.prefix.hex()
        return self._directory / key.identity.hex() / name[:2] / f"{name}{_SUFFIX}"


class Objects:
    """Blocks as objects of a bucket. NIXL moves their bytes; an S3 client looks, lists and removes."""

    backend, memory = "OBJ", "OBJ"

    def __init__(self, spec: TierSpec, settings: RemoteSettings) -> None:
        self._spec, self._settings = spec, settings
        prefix = spec.location.partition("/")[2].strip("/")
        self._prefix = f"{prefix}/" if prefix else ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: StoreClient | None = None

    def parameters(self) -> dict[str, str]:
        """Bucket, endpoint, and the credentials of the environment; without those, the plugin looks for its own."""
        options = dict(self._spec.options)
        found = {"bucket": self._spec.location.partition("/")[0], "num_threads": str(self._settings.concurrency)}
        if endpoint := options.get("endpoint"):
            found |= {"endpoint_override": endpoint, "scheme": endpoint.partition(":")[0]}
        found["region"] = options.get("region") or os.environ.get("AWS_DEFAULT_REGION", "us-east-1")
        for name, variable in _CREDENTIALS.items():
            if value := os.environ.get(variable):
                found[name] = value
        return found

    def start(self) -> None:
        """Makes the S3 client, in an event loop that runs only while it is asked."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            opening = open_s3_client(self._spec, self._settings.concurrency, timeout_s=self._settings.timeout_s)
            self._client = self._loop.run_until_complete(opening)

    def held(self, keys: Sequence[BlockKey]) -> list[tuple[bytes, int] | None]:
        """Header and length by a ranged read."""
        return self._each([self._store.head(str(key), HEADER_BYTES) for key in keys])

    def sizes(self, keys: Sequence[BlockKey]) -> list[int | None]:
        """Lengths, from the same."""
        return [None if one is None else one[1] for one in self.held(keys)]

    def stored_length(self, num_bytes: int) -> int:
        """As it is."""
        return num_bytes

    @contextlib.contextmanager
    def open(
        self, keys: Sequence[BlockKey], lengths: Sequence[int], *, new: bool
    ) -> Iterator[list[tuple[int, int, int, str]]]:
        """The objects' names; a number each, since NIXL tells objects apart by it."""
        yield [
            (0, length, number, f"{self._prefix}{key}")
            for number, (key, length) in enumerate(zip(keys, lengths, strict=True), start=1)
        ]

    def remove(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Deletes objects."""
        return [one for (one,) in self._each([self._store.delete([str(key)]) for key in keys])]

    def listed(self) -> list[tuple[BlockKey, int]]:
        """Every object that is named like a block."""

        async def names() -> list[tuple[str, int]]:
            return [one async for one in self._store.names()]

        found = []
        for name, num_bytes in self._run(names()):
            with contextlib.suppress(ValueError):
                if num_bytes >= HEADER_BYTES:
                    found.append((parse_block_key(name), num_bytes - HEADER_BYTES))
        return found

    def close(self) -> None:
        """Ends the client's connections."""
        if self._loop is not None:
            if self._client is not None:
                with contextlib.suppress(StoreError, OSError):
                    self._run(self._client.close())
            self._loop.close()
            self._loop = None

    @property
    def _store(self) -> StoreClient:
        if self._client is None:
            raise StoreError("the S3 client is not set up")
        return self._client

    def _each(self, work: Sequence[Coroutine[Any, Any, _T]]) -> list[_T]:
        """The results of all, some at a time; the first failure is raised once all have ended."""

        async def all_of_them() -> list[_T | BaseException]:
            limit = asyncio.Semaphore(self._settings.concurrency)

            async def limited(one: Coroutine[Any, Any, _T]) -> _T:
                async with limit:
                    return await one

            return await asyncio.gather(*(limited(one) for one in work), return_exceptions=True)

        results = self._run(all_of_them())
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results  # type: ignore[return-value]

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        if self._loop is None:
            work.close()
            raise StoreError("the S3 client is closed")
        return self._loop.run_until_complete(asyncio.wait_for(work, self._settings.timeout_s))


_left_behind: list[NixlClient] = []
_FULL = (28, 122)  # no space, no quota
_CREDENTIALS = {
    "access_key": "AWS_ACCESS_KEY_ID",
    "secret_key": "AWS_SECRET_ACCESS_KEY",
    "session_token": "AWS_SESSION_TOKEN",
}


def _imported(spec: TierSpec) -> tuple[Any, Any, Any]:
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")  # it greets at every agent
    try:
        from nixl_cu12 import _api, _bindings  # type: ignore[attr-defined]
    except ImportError as error:
        raise MissingDependencyError("nixl-cu12", "nixl", f"tier {spec}") from error
    found = (one for one in vars(_bindings).values() if isinstance(one, type) and issubclass(one, Exception))
    return _api.nixl_agent, _api.nixl_agent_config, tuple(found)
