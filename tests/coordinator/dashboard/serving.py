"""The page's routes, the API and the guard in this process, around a machine with fake agents."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from coordinator.driver import World

from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.access import Guard, Visitors
from unicron_lightning.coordinator.api.dashboard import Dashboard
from unicron_lightning.coordinator.api.routes import Api
from unicron_lightning.coordinator.storage import Store
from unicron_lightning.credentials import Token


class FakeShell:
    """The server that owns the routes: orders go to the fake world."""

    def __init__(self, world: World, store: Store) -> None:
        self.world = world
        self.store = store
        self.started_at = time.time()
        self.store_error = None
        self.orders: list[ev.Input] = []
        self.visitors = Visitors("unicron-test")
        self.url = ""

    @property
    def machine(self) -> Any:
        return self.world.machine

    def now(self) -> float:
        return self.world.now

    async def order(self, event: ev.Input) -> str | None:
        self.orders.append(event)
        self.world.do(event)
        return None

    def about(self) -> dict[str, Any]:
        return {"host": "127.0.0.1", "port": 1, "pid": 1}

    def goodput(self, task: str) -> float | None:
        return None

    def code(self) -> str:
        return self.visitors.issue_code(time.monotonic())


@asynccontextmanager
async def serving(world: World, folder: Path) -> AsyncIterator[FakeShell]:
    """Serve on a free loopback port."""
    shell = FakeShell(world, Store(folder))
    guard = Guard(Token(secret="s" * 32, origin="a test"), "127.0.0.1", visitors=shell.visitors)
    app = Api(shell, guard).app()  # type: ignore[arg-type]
    dashboard = Dashboard(shell, shell.visitors, secure=False)  # type: ignore[arg-type]
    dashboard.add_routes(app)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        shell.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield shell
    finally:
        await dashboard.close()
        await runner.cleanup()
        shell.store.close()
