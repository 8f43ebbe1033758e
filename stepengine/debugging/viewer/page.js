"use strict";
/*
 * What shows a recorded run: in a page of its own, and in the studio. Texts of the run reach the document as text only: every node is
 * made by el() and filled through textContent. Nothing is stored, and nothing is loaded here: what comes later is asked of the source.
 */
const runPage = (() => {
  const LANE = 20, LANES = 200;

  /*
   * Show a run in an element that holds what run.html says.
   *
   * source: { opened() -> payload, next(after) -> what came behind that, or nothing when nothing comes any more }
   * options: { address: { read() -> text, write(text), changed(tell, signal) }, ready(), theme() -> name, commands: false, latest: true, told(data) }
   * gives: { destroy(), pick(address), data() -> payload, picked() -> { path, seq, row } }
   */
  function mount(root, source, options = {}) {
    const $ = (id) => root.querySelector(`#${id}`);
    const aborter = new AbortController(), signal = aborter.signal;
    const address = options.address || hashAddress;
    const showsCommands = options.commands !== false;

    /* What several parts read and write. */
    const state = {
      data: null,             // the payload; null until the source has returned it
      views: [],              // one view of the payload per run: two when runs are compared
      items: [],              // the steps of the list, or pairs of steps: { i, j, mark, fields }, rows of the first and second run
      picked: -1,             // the item whose step is shown; -1 for none
      side: 0,                // the run of a pair that is shown: 0 or 1
      tab: "reply",           // the selected tab
      agent: -1,              // the agent whose steps are listed; -1 for all
      shownAgents: [],        // the lines of the list of agents, in their order
      query: "",              // the search text in lower case; empty for no search
      hitSet: new Set(),      // the items that contain it
      asWritten: false,       // true shows texts unformatted
    };

    const { GOOD, count, plural, shortCount, duration, money, share, statusClass } = figures;
    const nodes = makeNodes({ state, figures });
    const { el } = nodes;
    const markdown = makeMarkdown({ state, nodes });
    const payload = makePayload({ state });
    const { makeView, itemRow, agentPrompt, isWithin, rowFailed } = payload;
    const messages = makeMessages({ state, nodes, figures, payload, markdown });
    const calls = makeCalls({ state, nodes, figures, payload, messages, pick });
    const handler = makeHandler({ $, state, source, signal, nodes, payload, messages, calls, showStep: () => step.showStep() });
    const diff = makeDiff({ nodes, figures, payload, messages, handler });
    const step = makeStep({ $, state, nodes, figures, payload, messages, markdown, calls, handler, diff, showsCommands, chooseTab });
    const { TABS, showTabs, currentRow, forkCommand, showStep } = step;
    const list = makeList({ $, state, nodes, figures, payload, pick, announce });
    const { setItems, filterItems, scheduleDraw, scrollToItem, movePick, pickNextError } = list;
    const overview = makeOverview({ $, state, nodes, figures, payload, pickAgent });
    const { showBanner, showMissing, showFacts, showAgents, showAbout } = overview;
    const search = makeSearch({ $, state, figures, payload, list, step, pick, announce });
    const { startSearch, moveHit, stopSearch } = search;

    // --- opening --------------------------------------------------------------------------------------------------------

    async function start() {
      try {
        state.data = await source.opened();
        if (signal.aborted) return;
      } catch (error) {
        showBanner(error.message || String(error));
        return;
      }
      state.views = [makeView(state.data), ...(state.data.other ? [makeView(state.data.other)] : [])];
      root.classList.remove("loading");
      setItems();
      showFacts();
      showAgents();
      showAbout();
      showTabs();
      root.classList.toggle("compared", Boolean(state.data.pairs) && state.views.every((view) => view.agents.length < 2));
      if (state.data.pairs) $("legend").textContent = "A solid, B dashed; above A, below B";
      showMissing();
      const wanted = readHash();
      const first = state.data.pairs ? Math.max(0, state.items.findIndex((item) => item.mark && item.mark !== "=")) : options.latest && !state.data.run.ended ? state.items.length - 1 : 0;
      filterItems();
      pick(wanted >= 0 ? wanted : state.items.length ? first : -1, false);
      drawCharts();
      root.dataset.ready = "yes";
      if (options.ready) options.ready();
      if (options.told) options.told(state.data);
      if (state.data.follow !== undefined) follow();
    }

    // --- agents and the run ---------------------------------------------------------------------------------------------

    function pickAgent(number) {
      state.agent = number;
      overview.markAgent(number);
      filterItems();
      drawTimeline();
      const first = list.firstShown();
      if (state.picked >= 0 && !list.isShown(state.picked) && first !== undefined) pick(first);
      else scheduleDraw();
      markPicked();
    }

    function moveAgent(by) {
      const now = state.shownAgents.findIndex((line) => line.n === state.agent);
      const next = state.shownAgents[Math.min(state.shownAgents.length - 1, Math.max(0, now + by))];
      if (next) pickAgent(next.n);
    }

    // --- the list -------------------------------------------------------------------------------------------------------

    function pick(n, follows = true) {
      if (n < 0 || n >= state.items.length) return;
      const same = n === state.picked;
      state.picked = n;
      state.side = state.items[n].i === null ? 1 : state.items[n].j === null ? 0 : state.side;
      if (!list.isShown(n)) {
        const item = state.items[n];
        if (item.mark === "=" && item.many) list.unfold(item.first);
        if (!list.isShown(n)) { state.agent = -1; pickAgent(-1); }
      }
      scrollToItem(n);
      scheduleDraw();
      showStep();
      markPicked();
      if (follows && !same) address.write(formatHash());
    }

    // --- addresses ------------------------------------------------------------------------------------------------------

    function formatHash() {
      const [view, number] = itemRow(state.items[state.picked]), row = view.steps[number];
      const step = row.kind === "model" && !row.path ? String(row.n) : encodeURIComponent(row.a);
      return `step=${step}&tab=${state.tab}`;
    }

    function readHash() {
      const params = new URLSearchParams(address.read());
      if (TABS.includes(params.get("tab"))) state.tab = params.get("tab");
      const step = params.get("step");
      if (!step) return -1;
      return state.items.findIndex((item) => {
        const [view, number] = itemRow(item), row = view.steps[number];
        return /^\d+$/.test(step) ? row.kind === "model" && !row.path && row.n === Number(step) : row.a === step;
      });
    }

    // --- one step -------------------------------------------------------------------------------------------------------

    function chooseTab(name) {
      state.tab = name;
      showStep();
      if (state.picked >= 0) address.write(formatHash());
    }

    // --- search ---------------------------------------------------------------------------------------------------------

    let last = 0, later = 0;

    /* Say something to who does not see, once a second at most. */
    function announce(message) {
      clearTimeout(later);
      const wait = Math.max(0, last + 1000 - performance.now());
      later = setTimeout(() => { last = performance.now(); $("said").textContent = message; }, wait);
    }

    // --- charts ---------------------------------------------------------------------------------------------------------

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

    function timeScale(view) {
      const last = Math.max(1, view.run.milliseconds, ...[view.steps.length ? view.steps[view.steps.length - 1].began : 0]);
      return view.run.milliseconds > 20 ? (ms, n) => ms / last : (ms, n) => n / Math.max(1, view.steps.length);
    }

    /* The agents that have a lane of their own: that of the picked one, and those below it; none where two runs are compared. */
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
      drawTimeline.rows = new Map(lanes.slice(0, LANES).map((n, k) => [state.data.agents[n].path, k]));
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
        const level = (row) => lanes.length ? drawTimeline.rows.get(row.path) : depth(row);
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
          bar(Math.min(from, own.began), Math.max(to, end), drawTimeline.rows.get(own.path) * each + 1, each - 3, statusClass(own.status) === "bad" ? ill : soft, false, first, last);
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

    /* The first and last row of each run, and its times: where nothing took time, lanes are drawn by rows. */
    function laneEnds(view) {
      const found = new Map();
      view.steps.forEach((row, n) => {
        const known = found.get(row.path) || [n, n, row.began, row.began];
        found.set(row.path, [known[0], n, Math.min(known[2], row.began), Math.max(known[3], row.at === undefined ? row.began : row.at)]);
      });
      return found;
    }

    function markPicked() {
      if (!drawTimeline.rows) return;
      const [view, number] = state.picked < 0 ? [null, -1] : itemRow(state.items[state.picked]);
      $("now").hidden = state.picked < 0;
      if (state.picked < 0) return;
      const row = view.steps[number], at = drawTimeline.rows.get(row.path), box = $("lanes");
      $("now").style.left = `${timeScale(view)(row.began, number) * Math.max(0, $("lane").clientWidth - 2)}px`;
      [...$("names").children].forEach((node, k) => node.classList.toggle("here", k === at));
      if (at !== undefined && box.clientHeight) box.scrollTop = Math.min(at * LANE, Math.max(box.scrollTop, (at + 1) * LANE - box.clientHeight));
      showUsage(view, number);
    }

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
      // A chart without a value is hidden; the others get its room.
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

    /* What the charts show in figures, in at most 40 lines. */
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

    /* What the lanes show in figures: which run was under way when. */
    function runsTable() {
      const head = el("thead", "", el("tr", "", ...["run", "prompt", "started", "ended", "state"].map((name) => el("th", "", name))));
      const rows = state.data.agents.slice(0, 40).map((each) => el("tr", "", ...[`${each.id}${each.path ? ` at ${each.path}` : ""}`, agentPrompt(each), duration(each.began), each.at === undefined ? "" : duration(each.at), each.status].map((cell) => el("td", "", cell))));
      return el("table", "", head, el("tbody", "", ...rows));
    }

    // --- a run under way ------------------------------------------------------------------------------------------------

    async function follow() {
      for (;;) {
        let said;
        try {
          said = await source.next(state.data.follow, signal);
        } catch (error) {
          if (!signal.aborted) $("lead").textContent = error.message;
          return;
        }
        if (signal.aborted || !said) return;
        if (said.error) { showBanner(said.error); return; }
        if (said.after !== state.data.follow) merge(said);
      }
    }

    function merge(said) {
      const atEnd = state.picked >= 0 && list.isLastShown(state.picked);
      state.data.texts.length = said.from;
      state.data.texts.push(...said.texts);
      state.data.images.length = said.images_from;
      state.data.steps.length = Math.min(state.data.steps.length, said.rows);
      state.data.images.push(...said.images);
      for (const [n, row] of said.steps) state.data.steps[n] = row;
      for (const name of ["row", "context", "cached", "cost"]) {
        const known = state.data.series[name], from = said.series.from ?? 0;
        said.series[name] = known.slice(0, from).concat(said.series[name]);
      }
      Object.assign(state.data, { run: said.run, agents: said.agents, series: said.series, follow: said.after });
      state.views = [makeView(state.data)];
      setItems();
      showFacts();
      showAgents();
      showAbout();
      const now = state.picked, top = $("panel").scrollTop, stays = !atEnd && now >= 0;
      filterItems();
      // Who reads a step goes on reading it, where they were.
      const programs = new Set(stays ? state.data.steps[now].calls.filter((c) => c.program !== undefined).map((c) => c.child) : []);
      if (!stays || said.steps.some(([n, row]) => n === now || programs.has(row.path))) {
        state.picked = -1;
        pick(stays ? now : state.items.length - 1, false);
        if (stays) $("panel").scrollTop = top;
      }
      drawCharts();
      if (state.query) startSearch(state.query);
      if (options.told) options.told(state.data);
    }

    // --- keys -----------------------------------------------------------------------------------------------------------

    const KEYS = [
      ["j", "next step", () => movePick(1)], ["k", "previous step", () => movePick(-1)],
      ["J", "next agent", () => moveAgent(1)], ["K", "previous agent", () => moveAgent(-1)],
      ["/", "search", () => $("search").focus()], ["n", "next hit", () => moveHit(1)], ["N", "previous hit", () => moveHit(-1)],
      ["e", "next error", pickNextError], ["m", "plain or formatted text", () => { state.asWritten = !state.asWritten; announce(state.asWritten ? "plain text" : "formatted text"); if (state.picked >= 0) showStep(); }], ["t", "light, dark, as the system", switchTheme], ["y", "copy the fork command", copyCommand], ["?", "these keys", showHelp],
    ];

    function switchTheme() {
      if (options.theme) { options.theme(); drawCharts(); return; }
      const order = [undefined, "dark", "light"], now = order.indexOf(document.documentElement.dataset.theme);
      const next = order[(now + 1) % 3];
      if (next) document.documentElement.dataset.theme = next; else delete document.documentElement.dataset.theme;
      $("theme").textContent = next ? `Theme: ${next}` : "Theme";
      drawCharts();
    }

    async function copyCommand() {
      const written = forkCommand();
      try {
        await navigator.clipboard.writeText(written);
      } catch {
        const node = $("head").querySelector(".command");
        if (node) { getSelection().selectAllChildren(node); document.execCommand("copy"); }
      }
      $("fork").textContent = "Copied";
      announce(`copied: ${written}`);
      setTimeout(() => { $("fork").textContent = "Copy fork command"; }, 1500);
    }

    function showHelp() {
      const list = [...KEYS.map(([key, what]) => [key, what]), ["1–7", "tab"], ["Esc", "leave the search, close the dialog"]];
      $("help-keys").replaceChildren(...list.flatMap(([key, what]) => [el("dt", "", el("kbd", "", key)), el("dd", "", what)]));
      $("help").showModal();
    }

    document.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.altKey || event.metaKey || event.defaultPrevented || !state.data) return;
      const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName) || $("help").open;
      if (event.key === "Escape") {
        if (typing && event.target === $("search")) { $("search").value = ""; startSearch(""); $("list").focus(); }
        return;
      }
      if (typing) return;
      if (/^[1-7]$/.test(event.key)) { chooseTab(TABS[Number(event.key) - 1]); return; }
      const known = KEYS.find(([key]) => key === event.key);
      if (known) { event.preventDefault(); known[2](); }
    }, { signal });

    function handleArrows(event, by, ends) {
      const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 15, PageUp: -15, Home: -1e9, End: 1e9 }[event.key];
      if (step === undefined || (!ends && Math.abs(step) > 1)) return;
      event.preventDefault();
      by(step);
    }

    $("list").addEventListener("keydown", (event) => handleArrows(event, movePick, true));
    $("tree").addEventListener("keydown", (event) => handleArrows(event, moveAgent, false));
    $("list").addEventListener("scroll", scheduleDraw, { passive: true });
    $("search").addEventListener("input", () => startSearch($("search").value));
    $("search").addEventListener("keydown", (event) => { if (event.key === "Enter") { event.preventDefault(); moveHit(event.shiftKey ? -1 : 1); } });
    $("next").addEventListener("click", () => moveHit(1));
    $("previous").addEventListener("click", () => moveHit(-1));
    $("fork").addEventListener("click", copyCommand);
    $("theme").addEventListener("click", switchTheme);
    $("keys").addEventListener("click", showHelp);
    $("close").addEventListener("click", () => $("help").close());
    $("twin").addEventListener("toggle", () => { if (state.data && $("twin").open) showTable(); });

    $("lane").addEventListener("click", (event) => {
      const part = event.offsetX / $("lane").clientWidth, x = timeScale(state.data), here = Math.floor(event.offsetY / LANE);
      const inLane = (row) => !drawTimeline.rows.size || drawTimeline.rows.get(row.path) === here;
      let best = -1, far = Infinity;
      state.items.forEach((item, n) => { if (item.i === null || !inLane(state.data.steps[item.i])) return; const d = Math.abs(x(state.data.steps[item.i].began, item.i) - part); if (d < far) { far = d; best = n; } });
      if (best >= 0) pick(best);
    });

    address.changed(() => { if (state.data) { const n = readHash(); if (n >= 0) pick(n, false); else showStep(); } }, signal);
    let sized = 0;
    const sizes = new ResizeObserver(() => { clearTimeout(sized); sized = setTimeout(() => { if (state.data && !signal.aborted) { scheduleDraw(); drawCharts(); } }, 60); });
    sizes.observe(root);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (state.data) drawCharts(); }, { signal });
    $("fork").hidden = !showsCommands;
    start();

    return {
      destroy() { aborter.abort(); sizes.disconnect(); clearTimeout(sized); clearTimeout(later); stopSearch(); },
      data: () => state.data,
      /* The step that is shown: its row, and the address of its first effect. */
      picked() {
        if (state.picked < 0) return null;
        const [view, number] = currentRow();
        return { row: view.steps[number], number };
      },
      pick(wanted) {
        const n = state.items.findIndex((item) => { const [view, number] = itemRow(item); return view.steps[number].a === wanted; });
        if (n >= 0) pick(n);
        return n >= 0;
      },
      redraw() { if (state.data) { scheduleDraw(); drawCharts(); } },
    };
  }

  const hashAddress = {
    read: () => location.hash.slice(1),
    write: (text) => history.replaceState(null, "", `#${text}`),
    changed: (tell, signal) => addEventListener("hashchange", tell, { signal }),
  };

  /* A payload that stands packed in the page. */
  async function unpackPayload(node) {
    const written = node.textContent.trim();
    if (typeof DecompressionStream === "undefined") throw new Error("This browser cannot unpack the run, because it lacks DecompressionStream. Use a browser from 2023 or later.");
    const raw = atob(written), bytes = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  }

  const written = document.getElementById("payload");
  if (written) {
    mount(document.body, {
      opened: () => unpackPayload(written),
      /* The command that serves the page is asked once a second for what came. */
      async next(after) {
        await new Promise((go) => setTimeout(go, 1000));
        try {
          return await (await fetch(`records?after=${after}`)).json();
        } catch {
          throw new Error("no longer updated: the command has ended");
        }
      },
    }, { ready: () => { document.documentElement.dataset.ready = "yes"; } });
  }
  return { mount };
})();
