"""The coordinator's page in a real browser: Debian's chromium, driven by playwright."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from coordinator.dashboard.serving import FakeShell, serving
from coordinator.driver import World, running
from coordinator.shell import Coordinator, ask, connected, train

from unicron_lightning import wire
from unicron_lightning.coordinator import events as ev

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
HOSTILE = "<img src=x onerror=alert(1)>"

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no browser is installed: apt-get install chromium"),
    pytest.mark.allow_leak("threads", reason="playwright ends its own ones later"),
]


@asynccontextmanager
async def page_of(size: tuple[int, int] = (1400, 1000), **options: Any) -> AsyncIterator[tuple[Any, list[str]]]:
    """A page of a new browser, and its console's errors."""
    playwright = pytest.importorskip(
        "playwright.async_api", reason="playwright is not installed: pip install playwright"
    )
    async with playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            context = await browser.new_context(viewport={"width": size[0], "height": size[1]}, **options)
            page = await context.new_page()
            errors: list[str] = []
            page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.on("dialog", lambda dialog: errors.append(f"a dialog: {dialog.message}"))
            page.set_default_timeout(20_000)
            yield page, errors
        finally:
            await browser.close()


async def enter(page: Any, shell: FakeShell) -> None:
    await page.goto(f"{shell.url}/dashboard#code={shell.code()}")
    await page.wait_for_selector("body[data-ready]")


async def test_log_in_a_kill_and_an_incident(tmp_path):
    with Coordinator(tmp_path / "state") as coordinator:
        url = coordinator.url
        async with connected(url, "a", "b", nodes=(2, 2)) as (a, b), page_of() as (page, errors):
            await train([a, b])
            await page.goto(f"{url}/dashboard")
            await page.wait_for_selector("#login:not([hidden])")
            assert await page.locator("#task-rows tr").count() == 0
            _, answer = await ask(url.removeprefix("http://"), "POST", "/v1/dashboard/code")
            await page.fill("#code", answer["code"])
            await page.keyboard.press("Enter")
            await page.wait_for_selector('tr[data-task="t"]')
            assert await page.evaluate("document.cookie") == ""  # scripts cannot read it
            began = time.monotonic()
            await b.say(wire.WorkerDied(worker=b.worker, cause="signal", code=9, at=time.time()))
            await page.wait_for_selector("#task-rows .pill.bad")
            assert time.monotonic() - began < 1
            await page.click("#incident-rows tr")
            await page.wait_for_selector("dialog summary")
            assert "worker_died" in await page.inner_text("dialog")
            await page.keyboard.press("Escape")
            await a.hear(wire.Epoch)
            assert errors == []


async def test_orders_are_confirmed_and_names_are_no_markup(tmp_path):
    world = World()
    agents = running(world, 3)
    hostile = world.agent("z", task=f"{HOSTILE}t", nodes=(1, 1))
    hostile.node = HOSTILE
    hostile.start()
    about = {"type": "E", "message": HOSTILE, "stacks": f"Thread 1\n  {HOSTILE}\n  all_reduce"}
    agents[0].say(
        wire.ErrorReport(worker=agents[0].worker(), kind="task_hang", cause=HOSTILE, phase="compute", step=3,
                         at=world.now, details=about)
    )  # fmt: skip
    async with serving(world, tmp_path) as shell, page_of() as (page, errors):
        shell.store.write(
            save=[], forget=[], events=[(world.now, event) for event in world.events if event.task == "t"]
        )
        await enter(page, shell)
        assert "code" not in page.url
        assert await page.locator("img").count() == 0
        assert HOSTILE in await page.inner_text("#task-rows")
        assert hostile.node in await page.inner_text("#nodes")
        await page.click("#incident-rows tr")
        await page.wait_for_selector("dialog pre")
        assert "all_reduce" in await page.inner_text("dialog")
        await page.keyboard.press("Escape")

        node = agents[2].node
        await page.click(f'[data-node="{node}"]')
        await page.click("dialog button.danger")
        assert shell.orders == []
        await page.click("dialog button.primary")
        await page.wait_for_selector(f'.node.drained[data-node="{node}"]')
        await page.click('tr[data-task="t"] .name')
        await page.fill('dialog input[type="number"]', "3")
        await page.click("text=resize…")
        await page.click("dialog button.primary")
        await page.wait_for_selector("#toast:not([hidden])")
        await page.click('tr[data-task="t"] .name')
        await page.click("text=cancel task…")
        await page.keyboard.press("Escape")
        assert shell.orders == [ev.Drain(node=node, drained=True), ev.Resize(task="t", nodes=3)]
        assert await page.locator("img").count() == 0
        assert errors == []


@pytest.mark.parametrize("allowed", [False, True])
async def test_faults_are_offered_where_they_are_allowed(allowed, tmp_path):
    world = World(allow_injection=allowed)
    running(world, 2)
    async with serving(world, tmp_path) as shell, page_of() as (page, errors):
        await enter(page, shell)
        await page.click('tr[data-task="t"] .name')
        await page.wait_for_selector("text=cancel task…")
        assert await page.locator("text=inject…").count() == allowed
        if allowed:
            await page.fill('dialog input[aria-label="fault"]', "kill rank=1")
            await page.click("text=inject…")
            assert shell.orders == []
            await page.click("dialog button.primary")
            await page.wait_for_selector("#toast:not([hidden])")
            assert [type(order) for order in shell.orders] == [ev.InjectFault]
        assert errors == []


async def test_an_open_dialog_follows_its_task_to_the_end(tmp_path):
    world = World()
    running(world, 2)
    async with serving(world, tmp_path) as shell, page_of() as (page, errors):
        await enter(page, shell)
        await page.click('tr[data-task="t"]')
        await page.wait_for_selector('dialog button:has-text("cancel task")')
        world.do(ev.Cancel(task="t", save=False))
        await page.wait_for_selector('dialog button:has-text("cancel task")', state="detached")
        assert "running" not in await page.inner_text("dialog dl")
        assert errors == []


async def test_keys_theme_and_filter(tmp_path):
    world = World()
    running(world, 3)
    async with serving(world, tmp_path) as shell, page_of(color_scheme="dark") as (page, errors):
        await enter(page, shell)
        shade = "getComputedStyle(document.body).backgroundColor"
        dark = await page.evaluate(shade)
        assert sum(map(int, re.findall(r"\d+", dark)[:3])) < 150
        await page.keyboard.press("t")
        light = await page.evaluate(shade)
        assert sum(map(int, re.findall(r"\d+", light)[:3])) > 600
        await page.keyboard.press("/")
        await page.keyboard.type("node-b")
        assert await page.locator(".node").count() == 1
        await page.keyboard.press("Escape")
        assert await page.locator(".node").count() == 3
        await page.keyboard.press("?")
        await page.wait_for_selector("dialog[open]")
        await page.keyboard.press("Escape")
        await page.focus(".node")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("dialog[open]")
        assert errors == []


async def test_a_thousand_nodes_and_a_hundred_tasks(tmp_path):
    world = World()
    agents = running(world, 2)
    model = world.task()
    for number in range(100):
        task = model if number == 0 else msgspec.json.decode(msgspec.json.encode(model), type=type(model))
        task.id = f"task-{number}" if number else "t"
        world.machine.cluster.tasks[task.id] = task
        template = next(iter(task.agents.values()))
        for place in range(10):
            agent = msgspec.structs.replace(
                template, id=f"{number}-{place}", node=f"n{10 * number + place}", waiting=True
            )
            agent.task = task.id
            task.agents[agent.id] = agent
    async with serving(world, tmp_path) as shell, page_of() as (page, errors):
        began = time.monotonic()
        await enter(page, shell)
        assert await page.locator(".node").count() == 1002
        assert await page.locator("#task-rows tr").count() == 100
        assert time.monotonic() - began < 10
        began = time.monotonic()
        death = wire.WorkerDied(worker=agents[1].worker(), cause="signal", code=9, at=world.now)
        world.machine.handle(ev.AgentMessage(conn=agents[1].conn, message=death), world.now)
        await page.wait_for_selector('tr[data-task="t"] .pill.bad')
        assert time.monotonic() - began < 2
        assert errors == []
