"""The coordinator's HTTP API: queries and orders.

All answers are JSON; a refusal is ``{"error": "one sentence"}``. This module only converts requests to inputs of the
machine, and its state to answers; the machine carries out orders.

``GET /metrics`` observes the machine for `Meters`, samples the event loop's delay, and answers Prometheus. A defect of
the figures must not disturb a recovery: an observation that raises is logged once, and the figures end.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

import msgspec
from aiohttp import web

from unicron_lightning import __version__, wire
from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.access import Guard
from unicron_lightning.coordinator.allocation.answers import flops_per_step
from unicron_lightning.coordinator.api.status import cluster_status, staying, task_status, why_waiting
from unicron_lightning.coordinator.incidents import accounting
from unicron_lightning.coordinator.incidents.facts import IncidentClosed
from unicron_lightning.coordinator.machine import Machine
from unicron_lightning.coordinator.membership import slots
from unicron_lightning.coordinator.membership.memory import known, least_copies
from unicron_lightning.coordinator.metrics import Meters, encoded, families
from unicron_lightning.coordinator.orders import calibration, injection, jobs, relayout
from unicron_lightning.coordinator.state import Cluster, Task
from unicron_lightning.coordinator.storage import PAGE_BYTES, LoggedEvent
from unicron_lightning.errors import ConfigError
from unicron_lightning.faults.arrivals import draw
from unicron_lightning.faults.fault import parse, text
from unicron_lightning.jobs import MOST_TOGETHER, Job, problem, read_transformer
from unicron_lightning.wire.fields import shortened

if TYPE_CHECKING:
    from unicron_lightning.coordinator.server.server import Server

logger = logging.getLogger(__name__)


_SAMPLE_SECONDS: Final = 0.25


class Scrape:
    """The metrics of one server, in its event loop.

    Args:
        shell: the server.
    """

    def __init__(self, shell: Server) -> None:
        self.meters = Meters()
        self._shell = shell
        self._timer: asyncio.TimerHandle | None = None
        self._broken = False

    def start(self) -> None:
        """Start to sample the event loop's delay."""
        self._sample(asyncio.get_running_loop().time())

    def close(self) -> None:
        """Stop sampling."""
        if self._timer is not None:
            self._timer.cancel()

    def observe(self, event: ev.Input, actions: Iterable[ev.Action], now: float) -> None:
        """Count an input and the machine's answer."""
        if self._broken:
            return
        try:
            self.meters.observe(event, actions, self._shell.machine.cluster, now)
        except Exception:
            # Supervisor boundary, see the module's description.
            logger.exception("metrics_broken")
            self._broken = True

    def wrote(self, seconds: float) -> None:
        """Count a write to the store."""
        self.meters.store_seconds.observe(seconds)

    def goodput(self, task: str) -> float | None:
        """Return the productive share of a task's time; None if unknown."""
        counts = self.meters.tasks.get(task)
        return None if counts is None else counts.time.goodput

    async def get(self, request: web.Request) -> web.Response:
        """Answer a scrape; texts are encoded in another thread, since those of a thousand nodes take 0.1 s."""
        if self._broken:
            return web.json_response({"error": "the metrics have failed, see the coordinator's log"}, status=500)
        shell, cluster = self._shell, self._shell.machine.cluster
        self.meters.review(cluster, shell.now())
        failing = shell.store_error is not None
        found = families(
            self.meters, cluster, version=str(__version__), started_at=shell.started_at, store_failing=failing
        )
        body, content_type = await asyncio.to_thread(encoded, found, request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type, "Cache-Control": "no-store"})

    def _sample(self, due: float) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        self.meters.loop_lag.observe(max(0.0, now - due))
        self._timer = loop.call_at(now + _SAMPLE_SECONDS, self._sample, now + _SAMPLE_SECONDS)


_MOST_INCIDENTS: Final = 100_000
_MOST_EVENTS: Final = 10_000
_MOST_DIGITS: Final = 18


class _Submission(Job, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job as submitted; unknown keys are refused."""

    transformer: dict[str, Any] | None = None  # type: ignore[assignment]  # read by its own schema, as from a file


_decode_submission = msgspec.json.Decoder(_Submission | list[_Submission]).decode


def _decode_jobs(data: bytes) -> tuple[list[Job], bool]:
    """Return the submitted jobs, and whether they were submitted as a list.

    Raises:
        msgspec.DecodeError: the body has another form.
        ConfigError: a job's ``transformer`` is wrong.
    """
    given = _decode_submission(data)
    jobs = given if isinstance(given, list) else [given]
    shapes = [read_transformer(each.transformer) for each in jobs]
    plain = [msgspec.structs.asdict(each) for each in jobs]
    made = [Job(**{**each, "transformer": shape}) for each, shape in zip(plain, shapes, strict=True)]
    return made, isinstance(given, list)


def _number(word: str, digits: int = 6) -> int | None:
    """Parse a whole number of at most ``digits`` digits; None if the word is not one."""
    return int(word) if word.isascii() and word.isdecimal() and len(word) <= digits else None


def _current(request: web.Request) -> bool:
    return request.query.get("current") == "1"


def _plain(word: str) -> str:
    """Return a word of a request as given, or quoted and shortened if it is long or not printable."""
    return word if len(word) <= 20 and word.isprintable() else shortened(word)


def _refused(error: str, status: int) -> web.Response:
    return web.json_response({"error": error}, status=status)


def _drains(machine: Machine) -> dict[str, Any]:
    return {"drained": machine.drained, "staying": staying(machine.cluster)}


def _job(cluster: Cluster, name: str) -> dict[str, Any] | None:
    """Describe a job as `jobs.job_status`, with the reason of its wait."""
    status, task = jobs.job_status(cluster, name), cluster.tasks.get(name)
    if status is not None and status["ended_at"] is None and task is not None:
        status["reason"] = why_waiting(cluster, task)
    return status


class Api:
    """The routes.

    Args:
        shell: the server that owns the routes.
        guard: admits requests.
    """

    def __init__(self, shell: Server, guard: Guard) -> None:
        self._shell = shell
        self.guard = guard

    def app(self) -> web.Application:
        """Build an application with all routes; routes added later need the proof as well."""
        app = self.guard.app()
        app.router.add_get("/healthz", self._get_health)
        app.router.add_get("/v1/status", self._get_status)
        app.router.add_get("/v1/events", self._get_events)
        app.router.add_get("/v1/incidents", self._get_incidents)
        app.router.add_get("/v1/tasks/{task}/checkpoints", self._get_checkpoints)
        app.router.add_post("/v1/tasks/{task}/resize", self._post_resize)
        app.router.add_post("/v1/tasks/{task}/calibrate", self._post_calibrate)
        app.router.add_post("/v1/tasks/{task}/relayout", self._post_relayout)
        app.router.add_post("/v1/tasks/{task}/cancel", self._post_cancel)
        app.router.add_post("/v1/tasks/{task}/inject", self._post_inject)
        app.router.add_get("/v1/jobs", self._get_jobs)
        app.router.add_post("/v1/jobs", self._post_job)
        app.router.add_get("/v1/jobs/{name}", self._get_job)
        app.router.add_post("/v1/nodes/{node}/{verb:drain|undrain}", self._post_drain)
        return app

    async def _get_health(self, _request: web.Request) -> web.Response:
        return web.json_response({"ok": True})

    async def _get_status(self, _request: web.Request) -> web.Response:
        shell, machine = self._shell, self._shell.machine
        assigned = set(machine.cluster.lasting.assigned.values())
        tasks = {
            task.id: {
                **task_status(task, assigned),
                "goodput": shell.goodput(task.id),
                "flops_per_step": flops_per_step(task, machine.lasting.jobs.get(task.id)),
            }
            for task in machine.tasks.values()
        }
        coordinator = {**shell.about(), "started_at": shell.started_at, "store_error": shell.store_error}
        coordinator["embedded"] = machine.limits.exit_when_idle
        answer = {"coordinator": coordinator, "tasks": tasks, "drained": machine.drained}
        answer["cordoned"] = machine.lasting.cordoned
        return web.json_response({**answer, **cluster_status(machine.cluster)})

    async def _get_incidents(self, request: web.Request) -> web.Response:
        """Return the cost of failures; ``?task=`` selects one task, ``?limit=N`` the newest N closed incidents.

        ``?current=1`` leaves out tasks that had ended before this coordinator started.
        """
        only, limit = request.query.get("task"), _number(request.query.get("limit", str(_MOST_INCIDENTS)))
        if limit is None:
            return _refused(f"limit={shortened(request.query['limit'])}: expected a number of up to 6 digits", 400)
        most = min(limit, _MOST_INCIDENTS)
        cluster = self._shell.machine.cluster
        closed = self._shell.store.events(task=only, name=IncidentClosed.event, limit=most, newest=True)
        selected = jobs.recent(closed, cluster, self._shell.started_at) if _current(request) else closed
        return web.json_response(accounting.book(selected, cluster, self._shell.now(), only=only))

    async def _get_checkpoints(self, request: web.Request) -> web.Response:
        """Return the versions of a task's state, see `_versions_of`."""
        return web.json_response(_versions_of(self._task(request)))

    async def _post_resize(self, request: web.Request) -> web.Response:
        """``?nodes=N``: train the task on N nodes; ``nodes=all``: on as many as are available."""
        task, word = self._task(request), request.query.get("nodes", "")
        nodes = _number(word)
        if word != "all" and (nodes is None or not task.min_nodes <= nodes <= task.max_nodes):
            error = f"nodes={_plain(word)}: expected {task.min_nodes} to {task.max_nodes} (its --nnodes), or all"
            return _refused(error, 400 if nodes is None else 404)
        if nodes is not None and (refused := slots.refusal(task, nodes)) is not None:
            return _refused(refused, 404)
        return await self._ordered(ev.Resize(task=task.id, nodes=nodes), lambda: {"task": task.id, "nodes": nodes})

    async def _post_calibrate(self, request: web.Request) -> web.Response:
        """``?sizes=1,2&steps=N&seconds=S``: measure the task's speed at these sizes, without ``sizes`` at some;
        ``?stop=1``: no longer.
        """
        task, cluster = self._task(request), self._shell.machine.cluster

        def answer() -> Any:
            return calibration.plain(task)

        if "stop" in request.query:
            return await self._ordered(ev.Calibrate(task=task.id), answer)
        words = {key: request.query.get(key, str(default)) for key, default in (("steps", 20), ("seconds", 300))}
        numbers = {key: _number(word) for key, word in words.items()}
        for key, number in numbers.items():
            if not number:
                return _refused(f"{key}={_plain(words[key])}: expected a whole number, 1 or more", 400)
        given = request.query.get("sizes", "")
        sizes = [_number(word.strip()) for word in given.split(",")] if given else calibration.sizes_of(cluster, task)
        if None in sizes:
            return _refused(f"sizes={shortened(given)}: expected numbers of nodes, such as 1,2,4", 400)
        chosen = tuple(size for size in sizes if size is not None)
        if (refused := calibration.refusal(cluster, task, chosen)) is not None:
            return _refused(refused, 409)
        return await self._ordered(
            ev.Calibrate(task=task.id, sizes=chosen, steps=numbers["steps"] or 0, seconds=numbers["seconds"] or 0),
            answer,
        )

    async def _post_relayout(self, request: web.Request) -> web.Response:
        """``?tp=T&pp=P``: spread the model over T x P workers, from a checkpoint written after the current step, with
        ``&ep=E`` its experts over E times as many; ``?shards=S``: over S shards.
        """
        task = self._task(request)
        keys = ("shards",) if "shards" in request.query else ("tp", "pp", *(["ep"] if "ep" in request.query else []))
        words = {key: request.query.get(key, "") for key in keys}
        for key, word in words.items():
            if not _number(word):
                return _refused(f"{key}={_plain(word)}: expected a whole number, 1 or more", 400)
        sizes = {key: _number(word) or 1 for key, word in words.items()}
        if "shards" in sizes:
            named = wire.Layout(tensor=sizes["shards"], pipeline=1, sharded=True)
        else:
            named = wire.Layout(tensor=sizes["tp"], pipeline=sizes["pp"], expert=sizes.get("ep", 1))
        layout = relayout.completed(task, named, names_experts="ep" in sizes)
        if (refused := relayout.refusal(task, layout)) is not None:
            return _refused(refused, 409)
        return await self._ordered(
            ev.Relayout(task=task.id, layout=layout), lambda: {"task": task.id, **layout.plain()}
        )

    async def _post_cancel(self, request: web.Request) -> web.Response:
        """End a task, submitted or not: now, or with ``?save=1`` once its members have written a checkpoint."""
        name, word = self._task(request).id, request.query.get("save", "0")
        if word not in ("0", "1"):
            return _refused(f"save={_plain(word)}: expected 0 or 1", 400)
        order = ev.Cancel(task=name, save=word == "1")
        return await self._ordered(order, lambda: _job(self._shell.machine.cluster, name))

    async def _post_inject(self, request: web.Request) -> web.Response:
        """``{"fault": TEXT}``: inject the fault into the task, see docs/faults.md."""
        machine = self._shell.machine
        if not machine.limits.allow_injection:
            return _refused(injection.NOT_ALLOWED, 403)
        task = self._task(request)
        try:
            fault = parse(msgspec.json.decode(await request.read(), type=dict[str, str]).get("fault", ""))
        except (msgspec.DecodeError, UnicodeError, ConfigError) as error:
            return _refused(f"expected a fault: {error}", 400)
        order = ev.InjectFault(
            task=task.id, fault=fault, draw=random.random() if fault.seed is None else draw(fault).random()
        )
        refused = injection.refusal(task, order)
        if refused is not None:
            return _refused(refused, 409)
        targets = injection.targets(task, order)
        return await self._ordered(order, lambda: {"task": task.id, "fault": text(fault), "targets": targets})

    async def _ordered(self, order: ev.Input, answer: Callable[[], Any]) -> web.Response:
        """Carry out an order; confirm it by ``answer`` if it is durable."""
        refused = await self._shell.order(order)
        return web.json_response(answer()) if refused is None else _refused(refused, 503)

    def _task(self, request: web.Request) -> Task:
        """Return the task that a request names.

        Raises:
            web.HTTPNotFound: none of this name runs.
        """
        name, tasks = request.match_info["task"], self._shell.machine.tasks
        task = tasks.get(name)
        if task is None or task.over is not None:
            known = sorted(task.id for task in tasks.values() if task.over is None)
            error = {"error": f"no task {name!r}; expected one of: {known}"}
            raise web.HTTPNotFound(text=json.dumps(error), content_type="application/json")
        return task

    async def _post_job(self, request: web.Request) -> web.Response:
        """Submit a task, or several, all or none: the body is a `Job`, or a list of them."""
        try:
            given, several = _decode_jobs(await request.read())
        except (msgspec.DecodeError, UnicodeError, ConfigError) as error:
            return _refused(f"expected a job: {error}", 400)
        if not 1 <= len(given) <= MOST_TOGETHER:
            return _refused(f"{len(given)} jobs: expected 1 to {MOST_TOGETHER}", 400)
        wrong = next((found for job in given if (found := problem(job)) is not None), None)
        if wrong is not None:
            return _refused(wrong, 400)
        cluster = self._shell.machine.cluster
        refused = jobs.refusal(cluster, given)
        if refused is not None:
            return _refused(refused, 409)

        def answer() -> Any:
            found = [_job(cluster, job.name) for job in given]
            return found if several else found[0]

        return await self._ordered(ev.Submit(jobs=tuple(given)), answer)

    async def _get_job(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        status = _job(self._shell.machine.cluster, name)
        if status is None:
            return _refused(f"no job {name!r} is known", 404)
        return web.json_response(status)

    async def _get_jobs(self, request: web.Request) -> web.Response:
        """Return all known jobs and tasks; ``?current=1``: without those that had ended before this coordinator
        started.
        """
        cluster, since = self._shell.machine.cluster, self._shell.started_at if _current(request) else 0.0
        return web.json_response(jobs.listed(cluster, since, _job))

    async def _post_drain(self, request: web.Request) -> web.Response:
        """``drain`` or ``undrain`` a node, or an agent by its id."""
        machine = self._shell.machine
        name, drained = request.match_info["node"], request.match_info["verb"] == "drain"
        known = {word for task in machine.tasks.values() for a in task.agents.values() for word in (a.node, a.id)}
        known |= set(machine.cluster.nodes)
        if name not in known | set(machine.drained):
            return _refused(f"no node or agent {name!r}; expected one of: {sorted(known)}", 404)
        return await self._ordered(ev.Drain(node=name, drained=drained), lambda: _drains(machine))

    async def _get_events(self, request: web.Request) -> web.Response:
        """Return a page of the log: ``?since=SEQ&limit=N&task=TASK&incident=ID``, or its end: ``newest=N``.

        The next page begins after the last ``seq``.
        """
        defaults = {"since": "0", "limit": str(_MOST_EVENTS), "newest": "0"}
        words = {key: request.query.get(key, default) for key, default in defaults.items()}
        numbers = {key: _number(word, digits=_MOST_DIGITS) for key, word in words.items()}
        for key, number in numbers.items():
            if number is None:
                return _refused(f"{key}={shortened(words[key])}: expected a number of up to {_MOST_DIGITS} digits", 400)
        events: list[LoggedEvent] = self._shell.store.events(
            task=request.query.get("task"),
            incident=request.query.get("incident"),
            since=numbers["since"] or 0,
            limit=min(numbers["newest"] or numbers["limit"] or 0, _MOST_EVENTS),
            most_bytes=PAGE_BYTES,
            newest=bool(numbers["newest"]),
        )
        return web.json_response(events)


def _versions_of(task: Task) -> list[dict[str, Any]]:
    """Describe the versions of a task's state that the coordinator knows as plain JSON, newest first.

    Each has ``tier`` (memory or disk), ``step``, ``life``, ``state``, ``bytes`` and ``holders``. In memory, ``state``
    is ``complete``, ``usable`` (each part has a copy), ``incomplete`` or ``doubted``, and holders are the nodes with
    their parts. On disk it is ``reported``, ``bytes`` is None if the workers do not know it, the holder is the path.
    """
    found = []
    for version, parts in known(task).items():
        least = least_copies(version, parts)
        state = "complete" if least >= version.copies else "usable" if least else "incomplete"
        holders: dict[str, list[int]] = {}
        for part, copies in sorted(parts.items()):
            for agent, _ in copies:
                holders.setdefault(agent.node, []).append(part)
        found.append(
            {
                "tier": "memory",
                "step": version.step,
                "life": version.life,
                "state": state if version.epoch > task.memory.doubted else "doubted",
                "bytes": sum(copy.size for copies in parts.values() for _, copy in copies),
                "parts": version.parts,
                "holders": holders,
            }
        )
    for saved in task.checkpoints:
        found.append(
            {
                "tier": "disk",
                "step": saved.step,
                "life": saved.life,
                "state": "reported",
                "bytes": saved.bytes,
                "digest": saved.digest,
                "holders": {saved.path: []},
            }
        )
    return sorted(found, key=lambda each: (-each["step"], each["tier"] == "disk"))
