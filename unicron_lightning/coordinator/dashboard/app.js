"use strict";
/* The session, the stream of changes, and orders. */

(() => {
  const { el, byId } = View;
  const tasks = new Map(), nodes = new Map(), losses = new Map();
  let cluster = null, incidents = [], stream = null, known = "", drawn = false, redraw = null;
  const changedTasks = new Set(), changedNodes = new Set();
  const KEY = "unicron-key";

  // ---- session -------------------------------------------------------------------------------------------------

  async function call(method, path, body) {
    const headers = method === "POST" ? { "X-Unicron-Key": localStorage.getItem(KEY) || "", "Content-Type": "application/json" } : {};
    const answer = await fetch(path, { method, headers, body, credentials: "same-origin", cache: "no-store" });
    let content = null;
    try { content = await answer.json(); } catch { content = null; }
    if (answer.status === 401) showLogin("The session has ended.");
    if (!answer.ok) throw new Error((content && content.error) || `HTTP ${answer.status}`);
    return content;
  }

  async function logIn(code) {
    const answer = await fetch("/dashboard/login", { method: "POST", credentials: "same-origin", body: JSON.stringify({ code }) });
    const content = await answer.json();
    if (!answer.ok) throw new Error(content.error);
    localStorage.setItem(KEY, content.key);
  }

  function showLogin(message) {
    if (stream) stream.close();
    stream = null;
    byId("main").hidden = byId("logout").hidden = byId("filter").hidden = true;
    byId("login").hidden = false;
    byId("login-error").textContent = message;
    linkState("logged out", "");
    byId("code").focus();
  }

  function linkState(text, kind) {
    byId("link").textContent = text;
    byId("link").className = `link ${kind}`;
  }

  // ---- stream --------------------------------------------------------------------------------------------------

  async function open() {
    if (!localStorage.getItem(KEY)) return showLogin("");
    const probe = await fetch("/v1/incidents?limit=200", { credentials: "same-origin", cache: "no-store" });
    if (probe.status === 401 || probe.status === 403) { localStorage.removeItem(KEY); return showLogin(""); }
    if (!probe.ok) { linkState("coordinator does not answer", "lost"); setTimeout(() => open().catch(retry), 2000); return; }
    incidents = (await probe.json()).incidents;
    byId("login").hidden = true;
    byId("main").hidden = byId("logout").hidden = byId("filter").hidden = false;
    stream = new EventSource("/dashboard/stream");
    stream.onopen = () => linkState("live", "live");
    stream.onmessage = (message) => take(JSON.parse(message.data));
    stream.onerror = () => {
      linkState("coordinator does not answer", "lost");
      stream.close();
      setTimeout(() => open().catch(retry), 1000);
    };
  }

  function retry() {
    linkState("coordinator does not answer", "lost");
    setTimeout(() => open().catch(retry), 2000);
  }

  function take(news) {
    if (news.full) {
      for (const name of tasks.keys()) changedTasks.add(name);
      tasks.clear(); nodes.clear();
    }
    for (const [key, entry] of Object.entries(news.set)) {
      const at = key.indexOf("/"), kind = at < 0 ? key : key.slice(0, at), name = key.slice(at + 1);
      if (kind === "task") { tasks.set(name, entry); changedTasks.add(name); View.hue(name); remember(name, entry); }
      else if (kind === "node") { nodes.set(name, entry); changedNodes.add(name); }
      else cluster = entry;
    }
    for (const key of news.gone) {
      const at = key.indexOf("/"), name = key.slice(at + 1);
      (key.startsWith("task/") ? tasks : nodes).delete(name);
    }
    const now = JSON.stringify([...tasks].map(([name, task]) => [name, task.incidents, task.open.map((each) => [each.incident, each.phase])]));
    if (now !== known) { known = now; refreshIncidents(); }
    if (!drawn) { drawn = true; requestAnimationFrame(draw); setTimeout(() => { if (drawn) draw(); }, 200); }
  }

  function remember(name, task) {
    if (typeof task.loss !== "number") return;
    const seen = losses.get(name) || [];
    if (seen[seen.length - 1] !== task.loss) losses.set(name, [...seen, task.loss].slice(-90));
  }

  async function refreshIncidents() {
    try { incidents = (await call("GET", "/v1/incidents?limit=200")).incidents; drawIncidents(); } catch { /* the stream reports it */ }
  }

  // ---- drawing -------------------------------------------------------------------------------------------------

  function wanted() {
    return byId("filter").value.trim().toLowerCase();
  }

  function draw() {
    drawn = false;
    const word = wanted();
    const shownTasks = [...tasks.keys()].filter((name) => name.toLowerCase().includes(word) || tasks.get(name).state.includes(word));
    const fits = (name) => name.toLowerCase().includes(word) || nodes.get(name).state.includes(word) ||
      nodes.get(name).cells.some(([, task]) => task && task.toLowerCase().includes(word));
    const order = new Intl.Collator("en", { numeric: true }).compare;
    const shownNodes = [...nodes.keys()].filter(fits).sort(order);
    View.sync(byId("task-rows"), shownTasks, (name) => View.taskRow(name, tasks.get(name), losses.get(name) || [], () => showTask(name)), changedTasks);
    View.sync(byId("nodes"), shownNodes, (name) => View.nodeButton(name, nodes.get(name), () => showNode(name)), changedNodes);
    changedTasks.clear(); changedNodes.clear();
    if (redraw && byId("dialog").open) redraw();
    byId("nodes").classList.toggle("many", nodes.size > View.MANY);
    byId("no-tasks").hidden = shownTasks.length > 0;
    byId("no-nodes").hidden = shownNodes.length > 0;
    const states = {};
    for (const node of nodes.values()) states[node.state] = (states[node.state] || 0) + 1;
    byId("node-counts").textContent = Object.entries(states).map(([state, many]) => `${many} ${state}`).join(" · ");
    if (cluster) {
      const failing = cluster.store_error ? ` · the store fails: ${cluster.store_error}` : "";
      byId("summary").textContent = `${cluster.host}:${cluster.port} · ${tasks.size} tasks · ${nodes.size} nodes${failing}`;
    }
    document.body.dataset.ready = "true";
  }

  function drawIncidents() {
    const newest = [...incidents].sort((one, other) => other.fault_at - one.fault_at).slice(0, 100);
    const keys = newest.map((each) => `${each.task}/${each.incident}/${each.fault_at}`);
    const found = new Map(keys.map((key, at) => [key, newest[at]]));
    View.sync(byId("incident-rows"), keys, (key) => View.incidentRow(found.get(key), () => showIncident(found.get(key))), new Set(keys));
    byId("no-incidents").hidden = keys.length > 0;
    View.lanes(byId("lanes"), incidents, Number(byId("window").value), Date.now() / 1000, showIncident);
  }

  // ---- dialogs -------------------------------------------------------------------------------------------------

  // redrawn: called after each change while the dialog is open
  function show(title, content, buttons, small = false, redrawn = null) {
    const dialog = byId("dialog");
    redraw = redrawn;
    const close = el("button", { text: "close", on: { click: () => dialog.close() } });
    byId("dialog-body").replaceChildren(el("h2", { id: "dialog-title", text: title }), ...content, el("div", { class: "buttons" }, ...buttons, close));
    dialog.className = small ? "small" : "";
    if (!dialog.open) dialog.showModal();
  }

  function confirmThen(question, path, body) {
    const go = el("button", { class: "primary", text: "confirm", on: { click: async () => {
      go.disabled = true;
      try { await call("POST", path, body); byId("dialog").close(); toast(`done: ${question}`); } catch (error) { say.textContent = error.message; go.disabled = false; }
    } } });
    const say = el("p", { class: "error", role: "alert" });
    show("Confirm", [el("p", { text: question }), say], [go], true);
    go.focus();
  }

  function toast(text) {
    const shown = byId("toast");
    shown.textContent = text; shown.hidden = false;
    setTimeout(() => { shown.hidden = true; }, 4000);
  }

  const part = (name) => encodeURIComponent(name);

  function showNode(name) {
    const node = nodes.get(name);
    if (!node) return;
    const order = (verb) => el("button", { class: verb === "drain" ? "danger" : "", text: `${verb}…`, on: { click: () =>
      confirmThen(verb === "drain" ? `Drain node ${name}? Its workers leave after the current step.` : `Undrain node ${name}?`, `/v1/nodes/${part(name)}/${verb}`) } });
    const cells = node.cells.map(([slot, task, state]) => `${slot ? `slot ${slot}: ` : ""}${task || "no task"}, ${state}`).join("\n");
    const known = JSON.stringify(node);
    show(`Node ${name}`, [View.facts([["state", node.state], ["host", node.host], ["daemon", node.daemon ? "yes" : "no"],
      ["why", node.why], ["health problems", node.problems.join(", ")]]), el("pre", { text: cells || "no slots" })],
      [node.state === "drained" ? order("undrain") : order("drain")], false,
      () => { if (JSON.stringify(nodes.get(name)) !== known) showNode(name); });
  }

  function taskFacts(task) {
    return View.facts([["state", task.state], ["why", task.why], ["plan and reason", View.reason(task)], ["life, epoch", `${task.life}, ${task.epoch} (${task.kind || "none"})`],
      ["workers", `${task.workers} of ${task.world} alive`], ["lost ranks", task.lost_ranks.join(", ")], ["replicas", task.replicas],
      ["slots", `${task.slots}, at most ${task.limit}`], ["step", task.step], ["step time", View.seconds(task.step_seconds)],
      ["weighted FLOP/s", View.number(task.waf)], ["loss", View.number(task.loss, 6)], ["goodput", View.share(task.goodput)],
      ["newest checkpoint", task.checkpoint === null ? null : `step ${task.checkpoint}`],
      ["last failure", task.failure && `${task.failure.kind} on ${task.failure.node}: ${task.failure.cause}`]]);
  }

  function showTask(name) {
    const task = tasks.get(name);
    if (!task) return;
    const facts = el("div", {}, taskFacts(task));
    const size = el("input", { type: "number", min: task.nodes[0], max: task.nodes[1], value: task.target ?? task.limit, "aria-label": "nodes" });
    const resize = el("button", { text: "resize…", on: { click: () =>
      confirmThen(`Resize task ${name} to ${size.value} nodes after the current step?`, `/v1/tasks/${part(name)}/resize?nodes=${part(size.value)}`) } });
    const all = el("button", { text: "all nodes…", on: { click: () => confirmThen(`Let task ${name} use all nodes that the plan gives it?`, `/v1/tasks/${part(name)}/resize?nodes=all`) } });
    const cancel = el("button", { class: "danger", text: "cancel task…", on: { click: () =>
      confirmThen(`End task ${name} now? Work since its newest checkpoint is lost.`, `/v1/tasks/${part(name)}/cancel`) } });
    const buttons = task.over === null ? [size, resize, all, cancel] : [];
    if (cluster && cluster.injection && task.over === null) {
      const fault = el("input", { placeholder: "kill rank=1", "aria-label": "fault" });
      buttons.push(fault, el("button", { class: "danger", text: "inject…", on: { click: () =>
        confirmThen(`Inject "${fault.value}" into task ${name}?`, `/v1/tasks/${part(name)}/inject`, JSON.stringify({ fault: fault.value })) } }));
    }
    const log = el("div", {});
    const newest = el("button", { text: "newest events", on: { click: () => events(log, `/v1/events?task=${part(name)}&newest=100`) } });
    let last = task;
    show(`Task ${name}`, [facts, log], [...buttons, newest], false, () => {
      const now = tasks.get(name) || { ...last, state: "ended", over: last.over || "" };
      facts.replaceChildren(taskFacts(now));
      if (now.over !== null) for (const each of buttons) each.remove();
      last = now;
    });
  }

  async function events(into, path) {
    try {
      const found = await call("GET", path);
      into.replaceChildren(...(found.length ? found.map(View.eventEntry) : [el("p", { class: "empty", text: "No events." })]));
    } catch (error) { into.replaceChildren(el("p", { class: "error", text: error.message })); }
  }

  function showIncident(each) {
    const log = el("div", {}, el("p", { class: "dim", text: "loading" }));
    const bar = el("div", { class: "split" }, ...View.split(each));
    const costs = View.PHASES.map((phase) => [phase.replace("_", "-"), `${View.seconds(each.phases[phase].seconds)}, ${View.number(each.phases[phase].worker_seconds, 1)} worker-seconds`]);
    show(`Incident ${each.incident} of ${each.task}`, [bar, View.facts([["cause", each.cause], ["began", new Date(each.fault_at * 1000).toLocaleString("en-GB")],
      ["outcome", each.outcome || "open"], ...costs, ["workers before", each.workers_before], ["failures", each.failures]]), el("h2", { text: "Event log" }), log], []);
    events(log, `/v1/events?task=${part(each.task)}&incident=${part(each.incident)}&newest=200`);
  }

  function showHelp() {
    const keys = [["/", "filter"], ["t", "light or dark"], ["Tab, Enter", "move, open"], ["Esc", "close"], ["?", "this list"]];
    show("Keys", [el("dl", { class: "facts" }, ...keys.flatMap(([key, what]) => [el("dt", {}, el("kbd", { text: key })), el("dd", { text: what })]))], [], true);
  }

  // ---- start ---------------------------------------------------------------------------------------------------

  function theme(next) {
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const now = localStorage.getItem("unicron-theme") || (dark ? "dark" : "light");
    const chosen = next ? (now === "dark" ? "light" : "dark") : now;
    if (next) localStorage.setItem("unicron-theme", chosen);
    document.documentElement.dataset.theme = chosen;
  }

  document.addEventListener("keydown", (event) => {
    if (event.target.matches("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey || byId("dialog").open) return;
    if (event.key === "/") { event.preventDefault(); byId("filter").focus(); }
    if (event.key === "t") theme(true);
    if (event.key === "?") showHelp();
  });
  byId("filter").addEventListener("input", draw);
  byId("filter").addEventListener("keydown", (event) => { if (event.key === "Escape") { byId("filter").value = ""; draw(); byId("filter").blur(); } });
  byId("theme").addEventListener("click", () => theme(true));
  byId("help").addEventListener("click", showHelp);
  byId("window").addEventListener("change", drawIncidents);
  byId("logout").addEventListener("click", async () => { try { await call("POST", "/dashboard/logout"); } finally { localStorage.removeItem(KEY); showLogin(""); } });
  byId("login-form").addEventListener("submit", (event) => {
    event.preventDefault();
    logIn(byId("code").value.trim()).then(() => { byId("code").value = ""; return open(); }, (error) => { byId("login-error").textContent = error.message; });
  });
  setInterval(() => { if (stream && tasks.size && [...tasks.values()].some((task) => task.open.length)) refreshIncidents(); }, 5000);
  theme(false);
  const code = new URLSearchParams(location.hash.slice(1)).get("code");
  if (code) {
    history.replaceState(null, "", location.pathname);
    logIn(code).then(open, (error) => showLogin(error.message));
  } else open().catch(retry);
})();
