"""The routes of the page: its files, log-in and log-out, and the stream of changes (server-sent events).

Queries and orders use the routes of `api`; `access` admits a session's requests to them.

**The board** is the state that the page shows: a small entry for each task and node, and the changes since a version.
Pure. An entry is sent only when it has changed, so that a page of a thousand nodes costs little.
"""

from __future__ import annotations

import asyncio
import importlib.resources
import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from unicron_lightning.coordinator.access import CODE_SECONDS, LOGIN, PAGES, SESSION_SECONDS, Visitors
from unicron_lightning.coordinator.api.status import agent_standing, node_standings, state_of_task, staying, why_waiting
from unicron_lightning.coordinator.machine import Machine
from unicron_lightning.coordinator.metrics import usual_seconds, waf_of
from unicron_lightning.coordinator.orders import calibration
from unicron_lightning.coordinator.state import Agent, Cluster, Task

if TYPE_CHECKING:
    from unicron_lightning.coordinator.server.server import Server


_MOST_LOST_RANKS = 16


def entries(machine: Machine, goodput: Callable[[str], float | None], about: Mapping[str, Any]) -> dict[str, Any]:
    """Return all entries by key: ``task/NAME``, ``node/NAME``, and ``cluster``.

    Args:
        machine: the coordinator's machine.
        goodput: returns the productive share of a task's time; None if unknown.
        about: description of the coordinator's process.
    """
    cluster = machine.cluster
    found: dict[str, Any] = {f"task/{t.id}": _task(cluster, t, goodput(t.id)) for t in cluster.tasks.values()}
    stay = staying(cluster)
    for label, node in _nodes(cluster).items():
        node["why"] = stay.get(label) or cluster.lasting.cordoned.get(label)
        found[f"node/{label}"] = node
    found["cluster"] = {
        **about,
        "injection": machine.limits.allow_injection,
        "planned": sum(cluster.lasting.allocation.values()),
        "drained": machine.drained,
    }
    return found


def _task(cluster: Cluster, task: Task, goodput: float | None) -> dict[str, Any]:
    newest, failed = task.foremost, task.severity.newest
    seconds = usual_seconds(task)
    lost = [rank for rank, member in enumerate(task.members()) if member.worker not in task.workers]
    return {
        "state": state_of_task(task, cluster.lasting.assigned.values()),
        "over": task.over,
        "why": why_waiting(cluster, task) or calibration.shown(task) or None,
        "life": task.life,
        "epoch": task.number,
        "kind": task.epoch.kind if task.epoch else None,
        "workers": len(task.live_members()),
        "world": len(task.members()),
        "lost_ranks": lost[:_MOST_LOST_RANKS],
        "slots": len(task.slots),
        "limit": task.limit,
        "nodes": [task.min_nodes, task.max_nodes],
        "target": task.target,
        "planned": cluster.lasting.allocation.get(task.id),
        "weight": task.weight,
        "step": newest.step if newest else None,
        "loss": newest.metrics.get("loss") if newest else None,
        "step_seconds": None if seconds is None else round(seconds, 6),
        "waf": waf_of(cluster, task),
        "goodput": None if goodput is None else round(goodput, 4),
        "checkpoint": task.checkpoint.step if task.checkpoint else None,
        "degraded": bool(task.watch.degraded),
        "stragglers": len(task.watch.stragglers),
        "incidents": task.incidents,
        "open": [
            {"incident": each.id, "cause": each.cause[:300], "phase": each.phase, "known_at": each.known_at}
            for each in task.accounts.open
        ],
        "failure": None if failed is None else {"kind": failed.kind, "cause": failed.cause[:300], "node": failed.node},
        "replicas": len(task.replicas) or None,
    }


def _nodes(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """Describe nodes by label: state, and cells ``[slot, task, state]`` for slots and agents."""
    agents: dict[str, list[tuple[Task, Agent]]] = defaultdict(list)
    working: set[str] = set()
    for task in cluster.tasks.values():
        for agent in task.agents.values():
            agents[agent.node].append((task, agent))
        working.update(task.workers[member.worker].agent for member in task.live_members())
    found = {}
    for label, standing in node_standings(cluster).items():
        daemon, here = cluster.nodes.get(label), agents.get(label, [])
        by_slot = {agent.slot: (task, agent) for task, agent in here if agent.slot is not None}
        cells = []
        for slot in daemon.slots if daemon is not None else ():
            owner = cluster.lasting.assigned.get(f"{label}/{slot}") or None
            task_agent = by_slot.pop(slot, None)
            state = "starting" if owner else "free"
            cells.append([slot, owner, state] if task_agent is None else _cell(slot, *task_agent, working))
        shown = {agent.id for _, agent in by_slot.values()}
        rest = [(t, a) for t, a in here if a.slot is None or a.id in shown]
        cells += [_cell(agent.slot or "", task, agent, working) for task, agent in rest]
        host = daemon.host if daemon is not None else here[0][1].host if here else None
        problems = sorted({problem for _, agent in here for problem in (agent.problems or ())})
        found[label] = {
            "state": standing.state,
            "host": host,
            "cells": cells,
            "problems": problems,
            "daemon": daemon is not None,
        }
    return found


def _cell(slot: str, task: Task, agent: Agent, working: set[str]) -> list[str | None]:
    standing = agent_standing(task, agent)
    if agent.conn is None:
        state = "away"
    elif agent.barred:
        state = "barred"
    elif standing != "granted":
        state = "warm" if standing == "warm" else "waiting"
    elif agent.id not in working and not task.plain:
        state = "starting"
    else:
        state = "running" if task.plain or task.settled else "recovering" if task.incident else "running"
    return [slot, task.id, state]


class Board:
    """Versions of entries; a viewer gets what has changed since the version that it has."""

    def __init__(self) -> None:
        self.version = 0
        self._texts: dict[str, tuple[int, str]] = {}
        self._gone: dict[str, int] = {}

    def update(self, found: Mapping[str, Any]) -> bool:
        """Take the present entries; return whether any has changed."""
        texts = {key: json.dumps(entry, separators=(",", ":")) for key, entry in found.items()}
        changed = [key for key, text in texts.items() if self._texts.get(key, (0, ""))[1] != text]
        gone = [key for key in self._texts if key not in texts]
        if not changed and not gone:
            return False
        self.version += 1
        for key in changed:
            self._texts[key] = (self.version, texts[key])
            self._gone.pop(key, None)
        for key in gone:
            del self._texts[key]
            self._gone[key] = self.version
        self._gone = dict([*self._gone.items()][-10_000:])
        return True

    def since(self, version: int) -> str:
        """Return the changes after a version as JSON: ``{"full", "set": {key: entry}, "gone": [key]}``; all for 0."""
        entries = [f"{json.dumps(key)}:{text}" for key, (at, text) in self._texts.items() if at > version]
        gone = [key for key, at in self._gone.items() if at > version] if version else []
        full = "false" if version else "true"
        return f'{{"full":{full},"set":{{{",".join(entries)}}},"gone":{json.dumps(gone)}}}'


LOOK_SECONDS: Final = 0.3
_KEEP_ALIVE_SECONDS: Final = 15.0
_MOST_VIEWERS: Final = 64
_TYPES: Final = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Dashboard:
    """The page of one server.

    Args:
        shell: the server.
        visitors: the browsers' sessions.
        secure: whether links are encrypted.
    """

    def __init__(self, shell: Server, visitors: Visitors, *, secure: bool) -> None:
        self._shell = shell
        self._visitors = visitors
        self._secure = secure
        self._board = Board()
        self._changed = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None
        self._viewers = 0

    def add_routes(self, app: web.Application) -> None:
        """Add the page's routes."""
        for path in PAGES:
            app.router.add_get(path, self._get_page)
        app.router.add_post("/v1/dashboard/code", self._post_code)
        app.router.add_post(LOGIN, self._post_login)
        app.router.add_post("/dashboard/logout", self._post_logout)
        app.router.add_get("/dashboard/stream", self._get_stream, allow_head=False)

    async def close(self) -> None:
        """End all streams."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def _get_page(self, request: web.Request) -> web.Response:
        name = PAGES[request.path]
        file = importlib.resources.files("unicron_lightning.coordinator.dashboard") / name
        kind = _TYPES[name.rpartition(".")[2]]
        return web.Response(text=file.read_text("utf-8"), content_type=kind, charset="utf-8", headers=_HEADERS)

    async def _post_code(self, _request: web.Request) -> web.Response:
        code = self._visitors.issue_code(time.monotonic())
        return web.json_response({"code": code, "seconds": CODE_SECONDS})

    async def _post_login(self, request: web.Request) -> web.Response:
        try:
            code = json.loads(await request.read())["code"]
        except (ValueError, KeyError, TypeError, RecursionError):
            code = None
        session = self._visitors.log_in(code, time.monotonic()) if isinstance(code, str) else None
        if session is None:
            error = "code: unknown, used or expired; expected one that `unicron dashboard` has just printed"
            return web.json_response({"error": error}, status=403, headers=_HEADERS)
        answer = web.json_response({"key": session.key}, headers=_HEADERS)
        answer.set_cookie(
            self._visitors.cookie, session.id,
            max_age=int(SESSION_SECONDS), httponly=True, samesite="Strict", secure=self._secure, path="/",
        )  # fmt: skip
        return answer

    async def _post_logout(self, request: web.Request) -> web.Response:
        session = self._visitors.of(request.cookies, time.monotonic())
        if session is not None:
            self._visitors.log_out(session)
        answer = web.json_response({}, headers=_HEADERS)
        answer.del_cookie(self._visitors.cookie, path="/")
        return answer

    async def _get_stream(self, request: web.Request) -> web.StreamResponse:
        """Send the state, then its changes, as server-sent events, while the session lasts."""
        if self._viewers >= _MOST_VIEWERS:
            return web.json_response({"error": f"{_MOST_VIEWERS} pages are open already"}, status=503)
        answer = web.StreamResponse(headers={**_HEADERS, "Content-Type": "text/event-stream; charset=utf-8"})
        await answer.prepare(request)
        self._viewers += 1
        try:
            self._look()
            if self._looking is None or self._looking.done():
                self._looking = asyncio.create_task(self._keep_looking())
            version = 0
            while not self._looking.done() and self._visitors.of(request.cookies, time.monotonic()) is not None:
                changed = self._changed
                newest, text = self._board.version, self._board.since(version)
                await answer.write(b": \n\n" if newest == version else f"data: {text}\n\n".encode())
                version = newest
                await self._wait(changed)
        except ConnectionError:
            pass  # The page was closed.
        finally:
            self._viewers -= 1
        return answer

    async def _wait(self, changed: asyncio.Event) -> None:
        assert self._looking is not None
        waiting = asyncio.create_task(changed.wait())
        try:
            await asyncio.wait({waiting, self._looking}, timeout=_KEEP_ALIVE_SECONDS, return_when="FIRST_COMPLETED")
        finally:
            waiting.cancel()

    async def _keep_looking(self) -> None:
        """Update the board while pages are open."""
        while self._viewers:
            await asyncio.sleep(LOOK_SECONDS)
            self._look()

    def _look(self) -> None:
        if self._board.update(entries(self._shell.machine, self._shell.goodput, self._shell.about())):
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()
