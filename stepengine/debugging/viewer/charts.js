"use strict";
/* The time line of the run and the charts of its usage, and the same values as a table. */
function makeCharts({ $, state, nodes, figures, payload, pickAgent }) {
  const LANE = 20;    // the height of a lane in pixels
  const LANES = 200;  // the lanes that are drawn at most
  const { GOOD, count, plural, shortCount, duration, money, share, statusClass } = figures;
  const { el } = nodes;
  const { itemRow, agentPrompt, isWithin, rowFailed } = payload;
  let laneRows = null;  // the number of the lane by the path of its run; null before the first drawing

  /* A color of the style sheet as canvas needs it. */
  function cssColor(name) {
    const probe = $("said");
    probe.style.color = `var(--${name})`;
    const found = getComputedStyle(probe).color;
    probe.style.color = "";
    return found;
  }

  function prepareCanvas(id) {
    const canvas = $(id), box = canvas.getBoundingClientRect(), scale = devicePixelRatio || 1;
    const wide = Math.max(1, Math.round(box.width)), high = Math.max(1, Math.round(box.height));
    canvas.width = wide * scale; canvas.height = high * scale;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.clearRect(0, 0, wide, high);
    return { pen, wide, high, canvas };
  }

  /* The function from a time and a row to a position from 0 to 1: by time, or by rows where nothing took time. */
  function timeScale(view) {
    const last = Math.max(1, view.run.milliseconds, ...[view.steps.length ? view.steps[view.steps.length - 1].began : 0]);
    return view.run.milliseconds > 20 ? (ms, n) => ms / last : (ms, n) => n / Math.max(1, view.steps.length);
  }

  /* The agents that have a lane: the picked one and its children; none when two runs are compared. */
  function agentsWithLane() {
    if (state.views.length > 1 || state.data.agents.length < 2) return [];
    const path = state.agent < 0 ? "" : state.data.agents[state.agent].path;
    return state.shownAgents.map((line) => line.n).filter((n) => n >= 0 && isWithin(state.data.agents[n].path, path));
  }

  function showLaneNames(lanes) {
    const rows = lanes.slice(0, LANES).map((n) => {
      const each = state.data.agents[n], node = el("li", GOOD.has(each.status) ? "" : statusClass(each.status), each.id, el("span", "given", agentPrompt(each)));
      node.title = `${each.id}: ${each.status}, ${duration(each.began)} to ${each.at === undefined ? "now" : duration(each.at)}`;
      node.addEventListener("click", () => pickAgent(n));
      return node;
    });
    if (lanes.length > LANES) rows.push(el("li", "dim", `and ${count(lanes.length - LANES)} more: pick an agent`));
    $("names").replaceChildren(...rows);
    $("lanes").classList.toggle("many", lanes.length > 0);
    $("lanes").tabIndex = lanes.length ? 0 : -1;
    $("lane").style.height = lanes.length ? `${rows.length * LANE}px` : "";
    laneRows = new Map(lanes.slice(0, LANES).map((n, k) => [state.data.agents[n].path, k]));
  }

  function drawTimeline() {
    const lanes = agentsWithLane();
    showLaneNames(lanes);
    const { pen, wide, high, canvas } = prepareCanvas("lane");
    const two = state.views.length > 1, colors = { model: cssColor("accent"), tool: cssColor("tool"), ask: cssColor("ask"), spawn: cssColor("spawn"), perform: cssColor("perform"), input: cssColor("dim"), sleep: cssColor("edge"), receive: cssColor("edge"), wait: cssColor("edge") };
    const bad = cssColor("bad"), line = cssColor("line"), soft = cssColor("soft"), ill = cssColor("bad-soft"), card = cssColor("card");
    let errors = 0;
    state.views.forEach((view, which) => {
      const x = timeScale(view), top = two ? which * high / 2 : 0, tall = two ? high / 2 - 2 : high;
      const depth = (row) => Math.min(2, row.path ? row.path.split(".").length : 0), levels = 1 + peak(view.agents.map((a) => Math.min(2, a.path ? a.path.split(".").length : 0)));
      const each = lanes.length ? LANE : (tall - 4) / levels;
      const level = (row) => lanes.length ? laneRows.get(row.path) : depth(row);
      pen.fillStyle = line;
      pen.fillRect(0, top + tall - 1, wide, 1);
      const done = new Set();
      const bar = (from, to, y, h, fill, hatched, n, m = n) => {
        const x1 = Math.floor(x(from, n) * (wide - 2)), x2 = Math.max(x1 + 1.5, x(to, m + 0.8) * (wide - 2));
        const key = `${x1} ${Math.round(x2)} ${y} ${fill}`;
        if (done.has(key)) return;
        done.add(key);
        pen.fillStyle = fill;
        pen.fillRect(x1, y, x2 - x1, h);
        if (hatched) {
          pen.strokeStyle = card; pen.lineWidth = 1; pen.beginPath();
          for (let k = x1 - h; k < x2; k += 4) { pen.moveTo(Math.max(x1, k), y + h - Math.max(0, x1 - k)); pen.lineTo(Math.min(x2, k + h), y + Math.max(0, k + h - x2)); }
          pen.stroke();
        }
      };
      const ends = laneEnds(view);
      for (const n of lanes.slice(0, LANES)) {
        const own = view.agents[n], [first, last, from, to] = ends.get(own.path) || [0, 0, own.began, own.began];
        const end = own.at === undefined ? view.run.milliseconds : own.at;
        bar(Math.min(from, own.began), Math.max(to, end), laneRows.get(own.path) * each + 1, each - 3, statusClass(own.status) === "bad" ? ill : soft, false, first, last);
      }
      view.steps.forEach((row, n) => {
        if (rowFailed(row)) errors++;
        const at = level(row);
        if (at === undefined) return;
        const y = top + 2 + at * each, end = row.at === undefined ? view.run.milliseconds : row.at;
        if (row.kind === "model") bar(row.began, row.replied === undefined ? end : row.replied, y, Math.max(3, each * 0.5), colors.model, row.error !== undefined, n);
        for (const call of row.calls.slice(0, 50)) if (colors[call.kind] && call.kind !== "spawn") {
          const waits = colors[call.kind] === colors.sleep, wrong = call.error !== undefined || !["ok", "completed", "pending", undefined].includes(call.status);
          bar(call.began, call.at === undefined ? end : call.at, y + each * 0.5, Math.max(wrong ? 5 : 3, each * 0.25), wrong ? bad : colors[call.kind], wrong || waits, n);
        }
      });
    });
    const many = lanes.length ? `, a lane for each of ${plural(Math.min(lanes.length, LANES), "run")}` : "";
    canvas.setAttribute("aria-label", `Time line: ${plural(state.data.run.steps, "step")} in ${duration(state.data.run.milliseconds)}, ${plural(errors, "step")} with an error${many}`);
  }

  /* The first and last row of each run, and its times. Where nothing took time, lanes are drawn by rows. */
  function laneEnds(view) {
    const found = new Map();
    view.steps.forEach((row, n) => {
      const known = found.get(row.path) || [n, n, row.began, row.began];
      found.set(row.path, [known[0], n, Math.min(known[2], row.began), Math.max(known[3], row.at === undefined ? row.began : row.at)]);
    });
    return found;
  }

  /* Mark the picked step in the time line, and show the usage there. */
  function markPicked() {
    if (!laneRows) return;
    const [view, number] = state.picked < 0 ? [null, -1] : itemRow(state.items[state.picked]);
    $("now").hidden = state.picked < 0;
    if (state.picked < 0) return;
    const row = view.steps[number], at = laneRows.get(row.path), box = $("lanes");
    $("now").style.left = `${timeScale(view)(row.began, number) * Math.max(0, $("lane").clientWidth - 2)}px`;
    [...$("names").children].forEach((node, k) => node.classList.toggle("here", k === at));
    if (at !== undefined && box.clientHeight) box.scrollTop = Math.min(at * LANE, Math.max(box.scrollTop, (at + 1) * LANE - box.clientHeight));
    showUsage(view, number);
  }

  /* Show the usage at a row above the charts. */
  function showUsage(view, number) {
    const s = view.series;
    let k = s.row.findIndex((n) => n >= number);
    if (k < 0) k = s.row.length - 1;
    const windows = s.windows || {}, path = view.steps[number].path, room = windows[path];
    const now = k < 0 ? null : s.context[k];
    $("context-now").textContent = now === null ? "unknown" : `${shortCount(now)}${room ? `, ${share(now, room)} of ${shortCount(room)}` : " tokens"}`;
    $("cost-now").textContent = k < 0 || s.cost[k] === null ? "unknown" : money(s.cost[k]);
    $("cache-now").textContent = k < 0 || now === null ? "unknown" : share(s.cached[k], s.context[k]) || "0 %";
  }

  function drawSeries(id, pickOf, most, name) {
    const { pen, wide, high } = prepareCanvas(id);
    const line = cssColor("line"), inks = [cssColor(name), cssColor("spawn")];
    pen.fillStyle = line;
    pen.fillRect(0, high - 1, wide, 1);
    const top = most || Math.max(0, ...state.views.flatMap((view) => peak(pickOf(view.series))));
    if (!top) return;
    state.views.forEach((view, which) => {
      const values = pickOf(view.series), n = values.length;
      pen.strokeStyle = inks[which]; pen.fillStyle = inks[which]; pen.lineWidth = 1.5; pen.setLineDash(which ? [4, 3] : []);
      pen.beginPath();
      let pen1 = false, lastX = -1, high1 = -1;
      for (let k = 0; k < n; k++) {
        if (values[k] === null) { pen1 = false; continue; }
        const x = n < 2 ? wide / 2 : k / (n - 1) * (wide - 2) + 1, y = high - 2 - values[k] / top * (high - 6);
        if (pen1 && x - lastX < 0.7 && k < n - 1 && Math.abs(y - high1) < 0.5) continue;
        if (pen1) pen.lineTo(x, y); else pen.moveTo(x, y);
        if (n < 2) pen.fillRect(x - 2, y - 2, 4, 4);
        pen1 = true; lastX = x; high1 = y;
      }
      pen.stroke();
      if (!which && state.views.length < 2 && n > 1) { pen.globalAlpha = 0.14; pen.lineTo(wide - 1, high - 1); pen.lineTo(1, high - 1); pen.fill(); pen.globalAlpha = 1; }
      pen.setLineDash([]);
    });
  }

  const peak = (values) => { let top = 0; for (const v of values) if (v !== null && v > top) top = v; return top; };

  function drawCharts() {
    const room = peak(Object.values(state.data.series.windows || {}));
    // A chart without a value is hidden; the others get its width.
    const drawn = { context: (s) => s.context, cost: (s) => s.cost, cache: (s) => s.cached };
    const full = Object.keys(drawn).filter((id) => { const some = state.views.some((view) => peak(drawn[id](view.series)) > 0); $(id).parentElement.hidden = !some; return some; });
    $("charts").classList.toggle("alone", !full.length);
    $("charts").style.setProperty("--charts", full.length || 1);
    drawTimeline();
    drawSeries("context", (s) => s.context, room > 0 && peak(state.data.series.context) > room / 20 ? room : 0, "accent");
    drawSeries("cost", (s) => s.cost, 0, "good");
    drawSeries("cache", (s) => s.context.map((all, n) => all ? s.cached[n] / all : all), 1, "tool");
    if (state.picked >= 0) markPicked();
  }

  /* Show the values of the charts as a table of at most 40 lines. */
  function showTable() {
    const s = state.data.series, table = el("table", ""), lines = Math.min(40, s.row.length), body = el("tbody", "");
    table.append(el("thead", "", el("tr", "", ...["step", "tokens sent", "from cache", "cost so far"].map((name, n) => el("th", n ? "num" : "", name)))));
    for (let k = 0; k < lines; k++) {
      const n = lines < 2 ? 0 : Math.round(k * (s.row.length - 1) / (lines - 1)), row = state.data.steps[s.row[n]];
      const cells = [`${row.n}${row.path ? ` of ${row.path}` : ""}`, count(s.context[n]) || "unknown", s.context[n] ? share(s.cached[n], s.context[n]) : "unknown", s.cost[n] === null ? "unknown" : money(s.cost[n])];
      body.append(el("tr", "", ...cells.map((cell, m) => el("td", m ? "num" : "", cell))));
    }
    table.append(body);
    $("table").replaceChildren(table, ...(state.data.agents.length > 1 ? [runsTable()] : []));
  }

  /* The values of the lanes as a table: when each run was running. */
  function runsTable() {
    const head = el("thead", "", el("tr", "", ...["run", "prompt", "started", "ended", "state"].map((name) => el("th", "", name))));
    const rows = state.data.agents.slice(0, 40).map((each) => el("tr", "", ...[`${each.id}${each.path ? ` at ${each.path}` : ""}`, agentPrompt(each), duration(each.began), each.at === undefined ? "" : duration(each.at), each.status].map((cell) => el("td", "", cell))));
    return el("table", "", head, el("tbody", "", ...rows));
  }

  /* The item nearest to a position in the time line; -1 for none. */
  function itemAt(left, top) {
    const part = left / $("lane").clientWidth, x = timeScale(state.data), here = Math.floor(top / LANE);
    const inLane = (row) => !laneRows.size || laneRows.get(row.path) === here;
    let best = -1, far = Infinity;
    state.items.forEach((item, n) => { if (item.i === null || !inLane(state.data.steps[item.i])) return; const d = Math.abs(x(state.data.steps[item.i].began, item.i) - part); if (d < far) { far = d; best = n; } });
    return best;
  }

  return { drawCharts, drawTimeline, itemAt, markPicked, showTable };
}
