"""`unicron state`: write a coordinator's whole state to a file, or begin a store with it.

The file is one JSON object, readable by any version that knows its number. It has jobs' environments: it is private.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from unicron_lightning.errors import ConfigError, UnicronError
from unicron_lightning.private_files import default_state_dir, open_private

if TYPE_CHECKING:
    from unicron_lightning.coordinator.config import CoordinatorConfig

_FORMAT: Final = "unicron-state-1"
_FILE: Final = "coordinator.sqlite"
_LEAD_SECONDS: Final = 30.0
_EVENT: Final = "seq, at, name, task, incident, fields"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("state", help="export a coordinator's stored state to a file, or import it")
    parser.add_argument("verb", choices=("export", "import"))
    parser.add_argument("file", type=Path, metavar="FILE", help="export: a new file; import: one of an export")
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="the store, as of `unicron coordinator`, e.g. store=etcd"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    config = _composed(options.overrides)
    if options.verb == "export":
        content = asyncio.run(_of_etcd(config)) if config.store.kind == "etcd" else _of_sqlite(config)
        try:
            descriptor = open_private(options.file, os.O_WRONLY | os.O_EXCL)
        except OSError as error:
            raise ConfigError(f"{options.file}: {error.strerror or error}; expected a new file") from error
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(content, file)
    else:
        content = read_export(options.file)
        if config.store.kind == "etcd":
            asyncio.run(_into_etcd(config, content))
        else:
            _into_sqlite(config, content)
    print(f"{options.file}: {len(content['tasks'])} tasks, {len(content['events'])} events")
    return 0


def _composed(overrides: list[str]) -> CoordinatorConfig:
    from hydra import compose, initialize_config_module
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from unicron_lightning.coordinator.__main__ import explain, from_composed, register_schema

    register_schema()
    try:
        with initialize_config_module(config_module="unicron_lightning.conf", version_base="1.3"):
            return from_composed(compose(config_name="coordinator", overrides=overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error)) from error


def _state_dir(config: CoordinatorConfig) -> Path:
    own = config.coordinator
    return Path(config.store.state_dir) if config.store.state_dir else default_state_dir(own.host, own.port)


def rows_of(database: sqlite3.Connection) -> dict[str, Any]:
    """Return all that a coordinator's database has, as of one moment, as plain JSON."""
    database.execute("BEGIN")
    lasting = database.execute("SELECT state FROM lasting").fetchone()
    unreadable = database.execute("SELECT id, at, reason, state FROM unreadable").fetchall()
    found = {
        "format": _FORMAT,
        "tasks": [[n, json.loads(s)] for n, s in database.execute("SELECT id, state FROM tasks ORDER BY rowid")],
        "lasting": None if lasting is None else json.loads(lasting[0]),
        "events": [list(row) for row in database.execute(f"SELECT {_EVENT} FROM events ORDER BY seq")],
        "unreadable": [[*about, base64.b64encode(blob).decode()] for *about, blob in unreadable],
    }
    database.execute("ROLLBACK")
    return found


def filling(content: dict[str, Any]) -> Callable[[sqlite3.Connection], None]:
    """Return a function that writes the content of an export into an empty database."""

    def fill(database: sqlite3.Connection) -> None:
        for table in ("tasks", "lasting", "events"):
            if database.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone() is not None:
                raise ConfigError("unicron state import: expected an empty store; this one has state already")
        database.execute("BEGIN")
        database.executemany(
            "INSERT INTO tasks VALUES (?, ?)", [(name, json.dumps(task).encode()) for name, task in content["tasks"]]
        )
        if content["lasting"] is not None:
            database.execute("INSERT INTO lasting VALUES (1, ?)", (json.dumps(content["lasting"]).encode(),))
        database.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?)", content["events"])
        database.executemany(
            "INSERT INTO unreadable VALUES (?, ?, ?, ?)",
            [(*about, base64.b64decode(blob)) for *about, blob in content["unreadable"]],
        )
        database.execute("COMMIT")

    return fill


def read_export(path: Path) -> dict[str, Any]:
    """Read a file of an export, and check that a coordinator can load it.

    Raises:
        ConfigError: it is not one.
    """
    from unicron_lightning.coordinator import state
    from unicron_lightning.coordinator.storage import create_tables

    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise ValueError(f"its format is not {_FORMAT}")
        for name, task in content["tasks"]:
            if state.decode_task(json.dumps(task).encode()).id != name:
                raise ValueError(f"task {name!r} has another name inside")
        if content["lasting"] is not None:
            state.decode_lasting(json.dumps(content["lasting"]).encode())
        with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as database:
            create_tables(database)
            filling(content)(database)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, msgspec.DecodeError, sqlite3.Error) as error:
        raise ConfigError(f"{path}: {error}; expected a file of `unicron state export`") from error
    return content


def _of_sqlite(config: CoordinatorConfig) -> dict[str, Any]:
    path = _state_dir(config).absolute() / _FILE
    try:
        with contextlib.closing(
            sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, isolation_level=None)
        ) as database:
            return rows_of(database)
    except sqlite3.Error as error:
        raise ConfigError(f"{path}: {error}; expected the database of a coordinator") from error


def _into_sqlite(config: CoordinatorConfig, content: dict[str, Any]) -> None:
    from unicron_lightning.coordinator.storage import Store, prepare_state_dir

    folder = _state_dir(config)
    prepare_state_dir(folder)
    with contextlib.closing(Store(folder)) as store:
        store.replace(filling(content))


async def _of_etcd(config: CoordinatorConfig) -> dict[str, Any]:
    from unicron_lightning.coordinator.replicated import leader_store

    store = leader_store(config)
    try:
        return rows_of(await store.copy())
    finally:
        await store.release()


async def _into_etcd(config: CoordinatorConfig, content: dict[str, Any]) -> None:
    from unicron_lightning.coordinator.replicated import leader_store

    store = leader_store(config)
    try:
        leader = await store.leader()
        if leader is not None:
            raise ConfigError(f"unicron state import: {leader} leads; expected no coordinator, neither a stand-by")
        try:
            await asyncio.wait_for(store.lead(), _LEAD_SECONDS)
        except asyncio.TimeoutError:
            raise ConfigError("unicron state import: another coordinator came first; expected none") from None
        store.replace(filling(content))
        lost = await store.durable()
        if lost is not None:
            raise UnicronError(f"unicron state import: perhaps incomplete: {lost}")
    finally:
        await store.release()
