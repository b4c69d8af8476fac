"""Which chunk files exist, in which order they were used, and which are pinned: SQLite, for several processes.

The files are the truth; the index only serves eviction and is rebuilt from them when it is lost or damaged.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from qcfuse.store.file_io import TEMPORARY_SUFFIX

log = logging.getLogger(__name__)

SCHEMA = """
CREATE TABLE IF NOT EXISTS chunks (path TEXT PRIMARY KEY, num_bytes INTEGER NOT NULL, used INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS chunks_used ON chunks (used);
CREATE TABLE IF NOT EXISTS pins (token TEXT, path TEXT, pid INTEGER, started TEXT, PRIMARY KEY (token, path));
CREATE INDEX IF NOT EXISTS pins_path ON pins (path);
"""
TOUCH = """
INSERT INTO chunks VALUES (:path, :num_bytes, (SELECT COALESCE(MAX(used), 0) + 1 FROM chunks))
ON CONFLICT (path) DO UPDATE SET num_bytes = excluded.num_bytes, used = excluded.used
"""
BUSY_TIMEOUT_S = 30.0


def process_started(pid: int) -> str | None:
    """Start time of a process in clock ticks since boot (pids are reused, pairs are not); None where it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else fields[19]


class ChunkIndex:
    """Paths are relative to root. Every method may raise sqlite3.Error; threads and forks may share an object."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._pid: int | None = None
        root.mkdir(parents=True, exist_ok=True)
        try:
            self._adopt_files()
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError as err:
            log.warning("chunk index %s is damaged (%s): rebuilt from the files", self.path, err)
            self._discard()
            self._adopt_files()

    @property
    def path(self) -> Path:
        return self._root / "index.sqlite"

    def _connect(self) -> sqlite3.Connection:
        # A connection must not cross a fork: the child opens its own.
        if self._connection is None or self._pid != os.getpid():
            self._connection = sqlite3.connect(self.path, BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
            self._pid = os.getpid()
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=NORMAL")
            self._connection.executescript(SCHEMA)
        return self._connection

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            connection = self._connect()
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")

    def _discard(self) -> None:
        self.close()
        for suffix in ("", "-wal", "-shm"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)

    def _adopt_files(self) -> None:
        """Lists files that have no row (a process died between rename and commit) and removes dead writers' rests."""
        found = {str(path.relative_to(self._root)): path for path in self._root.glob("*/*/*/*.safetensors")}
        for rest in self._root.glob(f"*/*/*/*{TEMPORARY_SUFFIX}"):
            writer = rest.name.split(".")[-3]
            if writer.isdigit() and process_started(int(writer)) is None:
                rest.unlink(missing_ok=True)
        with self._transaction() as db:
            known = {row[0] for row in db.execute("SELECT path FROM chunks")}
            db.executemany("DELETE FROM chunks WHERE path = ?", [(path,) for path in known - found.keys()])
            for path in sorted(found.keys() - known):
                if found[path].exists():
                    db.execute(TOUCH, {"path": path, "num_bytes": found[path].stat().st_size})

    def touch(self, path: str, num_bytes: int) -> None:
        """Lists a file, or marks it as the one used last."""
        with self._transaction() as db:
            db.execute(TOUCH, {"path": path, "num_bytes": num_bytes})

    def forget(self, path: str) -> None:
        with self._transaction() as db:
            db.execute("DELETE FROM chunks WHERE path = ?", (path,))

    def pin(self, paths: Sequence[str]) -> str:
        """Keeps paths, present or not, from eviction until unpin(token) or the end of this process."""
        token = uuid.uuid4().hex
        pid = os.getpid()
        started = process_started(pid)
        with self._transaction() as db:
            db.executemany("INSERT OR IGNORE INTO pins VALUES (?, ?, ?, ?)",
                           [(token, path, pid, started) for path in paths])
        return token

    def unpin(self, token: str) -> None:
        with self._transaction() as db:
            db.execute("DELETE FROM pins WHERE token = ?", (token,))

    def evict(self, capacity_bytes: int) -> tuple[list[str], int]:
        """Deletes the least recently used files without pins until the rest fits.

        Returns the deleted paths and the bytes that pins keep above the capacity. Files go before the commit: no
        other process can pin a file between the choice and its deletion.
        """
        evicted = []
        with self._transaction() as db:
            for pid, started in db.execute("SELECT DISTINCT pid, started FROM pins").fetchall():
                if process_started(pid) != started:
                    db.execute("DELETE FROM pins WHERE pid = ? AND started IS ?", (pid, started))
            excess = db.execute("SELECT COALESCE(SUM(num_bytes), 0) FROM chunks").fetchone()[0] - capacity_bytes
            victims = db.execute("SELECT path, num_bytes FROM chunks WHERE path NOT IN (SELECT path FROM pins) "
                                 "ORDER BY used") if excess > 0 else []
            for path, num_bytes in list(victims):
                if excess <= 0:
                    break
                (self._root / path).unlink(missing_ok=True)
                db.execute("DELETE FROM chunks WHERE path = ?", (path,))
                evicted.append(path)
                excess -= num_bytes
        return evicted, max(0, excess)

    def num_bytes(self) -> int:
        with self._transaction() as db:
            return db.execute("SELECT COALESCE(SUM(num_bytes), 0) FROM chunks").fetchone()[0]

    def close(self) -> None:
        if self._connection is not None and self._pid == os.getpid():
            self._connection.close()
        self._connection = None
