"use strict";
/* Rendering. All texts that came from elsewhere are set with textContent: names and errors are never markup. */

const View = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const GOOD = ["running"], WARN = ["joining", "leaving", "starting", "forming", "queued", "plain"];
  const BAD = ["recovering", "restarting", "holding"];
  const PHASES = ["detection", "transition", "sub_healthy"];
  const MANY = 150;

  /** Make an element: attributes, a text or children, listeners. */
  function el(tag, options = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(options)) {
      if (name === "text") made.textContent = value;
      else if (name === "class") made.className = value;
      else if (name === "on") for (const [event, listener] of Object.entries(value)) made.addEventListener(event, listener);
      else if (value !== null && value !== undefined) made.setAttribute(name, value);
    }
    made.append(...children.filter((child) => child !== null));
    return made;
  }

  const byId = (id) => document.getElementById(id);

  /** Hue of a task: neighbours in the order of creation differ by the golden angle. */
  const hues = new Map();
  function hue(task) {
    if (!hues.has(task)) hues.set(task, Math.round((210 + hues.size * 137.5) % 360));
    return hues.get(task);
  }

  function number(value, digits = 2) {
    if (value === null || value === undefined) return "";
    if (value !== 0 && (Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3)) return value.toExponential(2);
    return value.toLocaleString("en", { maximumFractionDigits: digits, useGrouping: false });
  }

  function seconds(value) {
    if (value === null || value === undefined) return "";
    if (value < 1) return `${Math.round(value * 1000)} ms`;
    if (value < 100) return `${value.toFixed(1)} s`;
    if (value < 7200) return `${Math.round(value / 60)} min`;
    return `${(value / 3600).toFixed(1)} h`;
  }

  const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");
  const share = (value) => (value === null || value === undefined ? "" : `${(100 * value).toFixed(1)} %`);

  function tone(state) {
    if (GOOD.includes(state)) return "good";
    if (BAD.includes(state)) return "bad";
    return WARN.includes(state) ? "warn" : "";
  }

  function pill(text, kind) {
    return el("span", { class: `pill ${kind}`, text });
  }

  function trend(values) {
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("class", "trend");
    svg.setAttribute("viewBox", "0 0 90 20");
    if (values.length > 1) {
      const low = Math.min(...values), high = Math.max(...values), range = high - low || 1;
      const line = document.createElementNS(SVG, "polyline");
      const point = (value, at) => `${(90 * at) / (values.length - 1)},${18 - (16 * (value - low)) / range}`;
      line.setAttribute("points", values.map(point).join(" "));
      svg.append(line);
    }
    return svg;
  }

  function reason(task) {
    const parts = [];
    if (task.planned !== null) parts.push(`plan: ${task.planned} ${task.planned === 1 ? "place" : "places"}`);
    if (task.target !== null) parts.push(`ordered: ${task.target} nodes`);
    if (task.why) parts.push(task.why);
    for (const each of task.open) parts.push(`${each.incident}: ${each.cause}`);
    if (task.degraded) parts.push("degraded");
    if (task.stragglers) parts.push(`${task.stragglers} stragglers`);
    return parts.join(" · ");
  }

  function taskRow(name, task, losses, open) {
    const pills = [pill(task.state, tone(task.state))];
    if (task.open.length && task.state === "running") pills.push(" ", pill("sub-healthy", "warn"));
    const label = el("button", { class: "name", text: name });
    label.style.setProperty("--hue", hue(name));
    const cell = (text) => el("td", { class: "n", text });
    const row = el("tr", { on: { click: open } },
      el("td", {}, label), el("td", {}, ...pills),
      cell(`${task.workers} / ${task.world}`), cell(`${task.slots} of ${task.nodes[0]}:${task.nodes[1]}`),
      cell(task.step === null ? "" : String(task.step)),
      cell(task.step_seconds ? number(1 / task.step_seconds) : ""), cell(number(task.loss, 4)),
      el("td", {}, trend(losses)), cell(share(task.goodput)), cell(String(task.incidents)),
      el("td", { class: "reason", text: reason(task), title: reason(task) }));
    row.dataset.task = name;
    return row;
  }

  function nodeButton(name, node, open) {
    const cells = el("span", { class: "cells" }, ...node.cells.map(([slot, task, state]) => {
      const cell = el("i", { class: `cell ${state}`, title: [slot, task, state].filter(Boolean).join(" · ") });
      if (task) cell.style.setProperty("--hue", hue(task));
      return cell;
    }));
    const words = node.cells.map(([, task, state]) => `${task || ""} ${state}`.trim()).join(", ");
    const bad = node.problems.length ? "problems" : "";
    const made = el("button", { class: `node ${node.state} ${bad}`, title: `${name}: ${node.state}`, on: { click: open },
      "aria-label": `node ${name}, ${node.state}: ${words}` },
      el("span", { class: "label", text: node.state === "ready" ? name : `${name} · ${node.state}` }), cells);
    made.dataset.node = name;
    return made;
  }

  /** Replace the children that have changed, by key, and keep the others and the focus. */
  function sync(parent, keys, make, changed) {
    const focused = document.activeElement && parent.contains(document.activeElement) ? document.activeElement : null;
    const focusedKey = focused && focused.closest("[data-key]") ? focused.closest("[data-key]").dataset.key : null;
    const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
    let before = parent.firstElementChild;
    for (const key of keys) {
      let child = known.get(key);
      if (!child || changed.has(key)) {
        const made = make(key);
        made.dataset.key = key;
        if (child) { if (before === child) before = child.nextElementSibling; child.replaceWith(made); known.delete(key); }
        child = made;
        if (key === focusedKey) queueMicrotask(() => (child.matches("button") ? child : child.querySelector("button")).focus());
      }
      known.delete(key);
      if (before === child) before = before.nextElementSibling;
      else parent.insertBefore(child, before);
    }
    for (const child of known.values()) if (child.parentNode === parent) child.remove();
  }

  function phasesOf(incident) {
    return PHASES.map((phase) => [phase, incident.phases[phase].seconds]);
  }

  function split(incident) {
    const total = phasesOf(incident).reduce((sum, [, value]) => sum + value, 0) || 1;
    return phasesOf(incident).map(([phase, value]) => {
      const part = el("i", { class: phase, title: `${phase.replace("_", "-")}: ${seconds(value)}` });
      part.style.setProperty("width", `${(100 * value) / total}%`);
      return part;
    });
  }

  function lanes(parent, incidents, span, now, open) {
    const shown = incidents.filter((each) => (each.closed_at || now) > now - span);
    const tasks = [...new Set(shown.map((each) => each.task))].slice(0, 40);
    const rows = tasks.map((task) => {
      const bar = el("span", { class: "bar" });
      for (const each of shown.filter((incident) => incident.task === task)) {
        const from = Math.max(0, (each.fault_at - now + span) / span), to = ((each.closed_at || now) - now + span) / span;
        const mark = el("button", { title: `${each.incident} ${each.cause}`, "aria-label": `incident ${each.incident} of ${task}`,
          on: { click: () => open(each) } }, ...split(each));
        mark.style.setProperty("left", `${Math.min(99.6, 100 * from)}%`);
        mark.style.setProperty("width", `${Math.max(0, 100 * (to - from))}%`);
        bar.append(mark);
      }
      const who = el("span", { class: "who name", text: task });
      who.style.setProperty("--hue", hue(task));
      return el("div", { class: "lane" }, who, bar);
    });
    const ticks = [1, 0.75, 0.5, 0.25, 0].map((part) => el("span", { text: part ? clock(now - part * span) : "now" }));
    parent.replaceChildren(...rows, ...(rows.length ? [el("div", { class: "axis" }, ...ticks)] : []));
  }

  function incidentRow(each, open) {
    const cell = (text) => el("td", { class: "n", text });
    const lost = PHASES.reduce((sum, phase) => sum + each.phases[phase].worker_seconds, 0);
    return el("tr", { on: { click: open } }, el("td", { text: new Date(each.fault_at * 1000).toLocaleString("en-GB") }),
      el("td", { text: each.task }), el("td", {}, el("button", { class: "plain", text: each.incident })),
      el("td", { class: "reason", text: each.cause, title: each.cause }),
      ...phasesOf(each).map(([, value]) => cell(seconds(value))), cell(number(lost, 1)),
      el("td", {}, each.outcome ? pill(each.outcome, each.outcome === "restored" ? "good" : "") : pill("open", "bad")));
  }

  /** An entry of the event log; long texts, such as the stacks of a rank that hangs, as they are. */
  function eventEntry(event) {
    const texts = [], rest = {};
    const sort = (name, value) => {
      if (typeof value === "string" && value.includes("\n")) texts.push([name, value]);
      else rest[name] = value;
    };
    for (const [name, value] of Object.entries(event.fields)) {
      if (name === "details" && value && typeof value === "object") {
        for (const [inner, detail] of Object.entries(value)) sort(inner, detail);
      } else sort(name, value);
    }
    const about = ["node", "worker", "agent", "kind", "cause"].map((name) => event.fields[name]).filter((each) => typeof each === "string");
    return el("details", texts.length ? { open: "" } : {},
      el("summary", {}, el("span", { class: "dim", text: clock(event.at) }), el("b", { text: event.name }),
        el("span", { class: "dim", text: `  ${about.join(" · ")}` })),
      ...texts.flatMap(([name, text]) => [el("p", { class: "dim", text: name }), el("pre", { text })]),
      el("pre", { text: JSON.stringify(rest, null, 1) }));
  }

  function facts(pairs) {
    const known = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
    return el("dl", { class: "facts" }, ...known.flatMap(([name, value]) => [el("dt", { text: name }), el("dd", { text: String(value) })]));
  }

  return { el, byId, hue, number, seconds, clock, share, pill, tone, taskRow, nodeButton, sync, split, lanes, incidentRow, eventEntry, facts, reason, MANY, PHASES };
})();
