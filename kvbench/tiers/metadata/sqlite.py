"""Metadata in one SQLite file: several processes of one machine, no service."""

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvbench.core.block_key import BlockKey
from kvbench.tiers.metadata.base import SCHEMA_VERSION, Location, MetadataUnavailableError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS lease (
    instance TEXT NOT NULL, session BLOB NOT NULL, expires_at_s REAL NOT NULL, PRIMARY KEY (instance, session)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS location (
    schema INTEGER NOT NULL, identity BLOB NOT NULL, prefix BLOB NOT NULL, instance TEXT NOT NULL, tier TEXT NOT NULL,
    session BLOB NOT NULL, num_bytes INTEGER NOT NULL, version INTEGER NOT NULL, expires_at_s REAL NOT NULL,
    published_s REAL NOT NULL,
    PRIMARY KEY (schema, identity, prefix, instance, tier)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS location_by_instance ON location (instance);
"""
_FIND = """
SELECT location.instance, tier, num_bytes, version,
       MIN(location.expires_at_s, COALESCE(lease.expires_at_s, location.expires_at_s)) AS ends_s
FROM location LEFT JOIN lease ON lease.instance = location.instance AND lease.session = location.session
WHERE schema = ? AND identity = ? AND prefix = ? AND location.expires_at_s > ?
      AND (location.instance = '' OR lease.expires_at_s > ?)
ORDER BY published_s DESC LIMIT 1
"""
_PUT = """
INSERT INTO location VALUES (?, ?, ?, ?, ?, ?, ?, 1, ?, ?)
ON CONFLICT DO UPDATE SET session = excluded.session, num_bytes = excluded.num_bytes, version = version + 1,
    expires_at_s = excluded.expires_at_s, published_s = excluded.published_s
"""
_RENEW = "UPDATE lease SET expires_at_s = ? WHERE instance = ? AND session = ? AND expires_at_s > ?"


class SqliteBackend:
    """Rows in write-ahead mode: readers never wait for a writer. Times are this machine's, which all users share."""

    name = "sqlite"

    def __init__(
        self, path: Path, *, lease_s: float, ttl_s: float, busy_s: float, clock: Callable[[], float] = time.time
    ) -> None:
        self._path, self._lease_s, self._ttl_s, self._busy_s, self._clock = path, lease_s, ttl_s, busy_s, clock
        self._sessions: dict[str, bytes] = {}
        self._open: sqlite3.Connection | None = None

    def put(self, keys: Sequence[BlockKey], location: Location, sizes_bytes: Sequence[int]) -> None:
        now_s = self._clock()
        ends_s = now_s + self._ttl_s
        with self._using() as database, database:
            session = self._leased(database, location.instance, now_s) if location.instance else b""
            place = (location.instance, location.tier, session)
            database.executemany(
                _PUT,
                (
                    (SCHEMA_VERSION, key.identity, key.prefix, *place, size, ends_s, now_s)
                    for key, size in zip(keys, sizes_bytes, strict=True)
                ),
            )

    def find(self, keys: Sequence[BlockKey]) -> list[Location | None]:
        now_s = self._clock()
        with self._using() as database:
            rows = [
                database.execute(_FIND, (SCHEMA_VERSION, key.identity, key.prefix, now_s, now_s)).fetchone()
                for key in keys
            ]
        return [
            None
            if row is None
            else Location(instance=row[0], tier=row[1], num_bytes=row[2], version=row[3], expires_at_s=row[4])
            for row in rows
        ]

    def remove(self, keys: Sequence[BlockKey], location: Location) -> None:
        with self._using() as database, database:
            database.executemany(
                "DELETE FROM location WHERE schema = ? AND identity = ? AND prefix = ? AND instance = ? AND tier = ?",
                ((SCHEMA_VERSION, key.identity, key.prefix, location.instance, location.tier) for key in keys),
            )

    def drain(self, instance: str) -> None:
        with self._using() as database, database:
            database.execute("DELETE FROM location WHERE instance = ?", (instance,))
            database.execute("DELETE FROM lease WHERE instance = ?", (instance,))
        self._sessions.pop(instance, None)

    def renew(self) -> None:
        if not self._sessions:
            return
        now_s = self._clock()
        with self._using() as database, database:
            database.executemany(_RENEW, ((now_s + self._lease_s, *one, now_s) for one in self._sessions.items()))
            database.execute("DELETE FROM lease WHERE expires_at_s <= ?", (now_s,))
            database.execute(
                "DELETE FROM location WHERE expires_at_s <= ? OR (instance <> '' AND NOT EXISTS (SELECT 1 FROM lease "
                "WHERE lease.instance = location.instance AND lease.session = location.session))",
                (now_s,),
            )

    def close(self) -> None:
        if self._open is None:
            return
        with contextlib.suppress(MetadataUnavailableError), self._using() as database, database:
            database.executemany("DELETE FROM lease WHERE instance = ? AND session = ?", self._sessions.items())
        if self._open is not None:
            self._open.close()
            self._open = None

    def _leased(self, database: sqlite3.Connection, instance: str, now_s: float) -> bytes:
        """The session of `instance`, with its lease renewed.

        A lease that has ended took its entries with it, and only a new session keeps these from coming back.
        """
        session = self._sessions.get(instance)
        ends_s = now_s + self._lease_s
        if session is None or not database.execute(_RENEW, (ends_s, instance, session, now_s)).rowcount:
            session = os.urandom(16)
            database.execute("INSERT INTO lease VALUES (?, ?, ?)", (instance, session, ends_s))
            self._sessions[instance] = session
        return session

    @contextlib.contextmanager
    def _using(self) -> Iterator[sqlite3.Connection]:
        """The connection, opened when first needed; after a failure the next use opens it anew."""
        try:
            if self._open is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._open = sqlite3.connect(self._path, timeout=self._busy_s, check_same_thread=False)
                self._open.execute("PRAGMA journal_mode = WAL")
                # What a crash of the machine takes is at most a hint that the next load would have made again.
                self._open.execute("PRAGMA synchronous = NORMAL")
                self._open.executescript(_SCHEMA)
            yield self._open
        except (sqlite3.Error, OSError) as error:
            if self._open is not None:
                self._open.close()
                self._open = None
            raise MetadataUnavailableError(f"sqlite:{self._path} cannot be used ({error})") from error
