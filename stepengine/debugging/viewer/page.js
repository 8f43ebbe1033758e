"use strict";
/*
 * Mount the page of a recorded run: create its parts, load the payload, pick steps and agents, and follow a live run.
 *
 * The page is shown in a file of its own and in the studio. Each other script declares one part: a factory that receives the parts it
 * uses. page.py joins the scripts. They store nothing and load nothing: later records come from the source.
 */
const runPage = (() => {
  /*
   * Show a run in an element with the content of run.html.
   *
   * source: {
   *   opened() -> payload,
   *   next(after, signal) -> the changes since the length *after*; nothing when the run has ended,
   *   lines(signal) -> the positions of the handlers; optional
   * }
   * options: { address: { read() -> text, write(text), changed(tell, signal) }, ready(), theme() -> name, commands: false, latest: true, told(data) }
   * Returns { destroy(), pick(address), data() -> payload, picked() -> { row, number }, redraw() }.
   */
  function mount(root, source, options = {}) {
    const $ = (id) => root.querySelector(`#${id}`);
    const aborter = new AbortController(), signal = aborter.signal;
    const address = options.address || hashAddress;
    const showsCommands = options.commands !== false;

    // The state that several parts share. State of one part is in that part.
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

    const nodes = makeNodes({ state, figures });
    const markdown = makeMarkdown({ state, nodes });
    const payload = makePayload({ state });
    const messages = makeMessages({ state, nodes, figures, payload, markdown });
    const calls = makeCalls({ state, nodes, figures, payload, messages, pick });
    const handler = makeHandler({ $, state, source, signal, nodes, payload, messages, calls, showStep: () => step.showStep() });
    const diff = makeDiff({ nodes, figures, payload, messages, handler });
    const step = makeStep({ $, state, nodes, figures, payload, messages, markdown, calls, handler, diff, showsCommands, chooseTab });
    const list = makeList({ $, state, nodes, figures, payload, pick, announce });
    const overview = makeOverview({ $, state, nodes, figures, payload, pickAgent });
    const search = makeSearch({ $, state, figures, payload, list, step, pick, announce });
    const charts = makeCharts({ $, state, nodes, figures, payload, pickAgent });
    addControls({ $, state, options, signal, nodes, step, list, search, charts, pick, chooseTab, moveAgent, announce });

    // --- opening --------------------------------------------------------------------------------------------------------

    async function start() {
      try {
        state.data = await source.opened();
        if (signal.aborted) return;
      } catch (error) {
        overview.showBanner(error.message || String(error));
        return;
      }
      state.views = [payload.makeView(state.data), ...(state.data.other ? [payload.makeView(state.data.other)] : [])];
      root.classList.remove("loading");
      list.setItems();
      overview.showFacts();
      overview.showAgents();
      overview.showAbout();
      step.showTabs();
      root.classList.toggle("compared", Boolean(state.data.pairs) && state.views.every((view) => view.agents.length < 2));
      if (state.data.pairs) $("legend").textContent = "A solid, B dashed; above A, below B";
      overview.showMissing();
      const wanted = readHash();
      const first = state.data.pairs ? Math.max(0, state.items.findIndex((item) => item.mark && item.mark !== "=")) : options.latest && !state.data.run.ended ? state.items.length - 1 : 0;
      list.filterItems();
      pick(wanted >= 0 ? wanted : state.items.length ? first : -1, false);
      charts.drawCharts();
      root.dataset.ready = "yes";
      if (options.ready) options.ready();
      if (options.told) options.told(state.data);
      if (state.data.follow !== undefined) follow();
    }

    // --- picking --------------------------------------------------------------------------------------------------------

    function pickAgent(number) {
      state.agent = number;
      overview.markAgent(number);
      list.filterItems();
      charts.drawTimeline();
      const first = list.firstShown();
      if (state.picked >= 0 && !list.isShown(state.picked) && first !== undefined) pick(first);
      else list.scheduleDraw();
      charts.markPicked();
    }

    function moveAgent(by) {
      const now = state.shownAgents.findIndex((line) => line.n === state.agent);
      const next = state.shownAgents[Math.min(state.shownAgents.length - 1, Math.max(0, now + by))];
      if (next) pickAgent(next.n);
    }

    /* Show the step of an item, in the list of all agents if the picked one does not have it. *follows* false keeps the address. */
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
      list.scrollToItem(n);
      list.scheduleDraw();
      step.showStep();
      charts.markPicked();
      if (follows && !same) address.write(formatHash());
    }

    function chooseTab(name) {
      state.tab = name;
      step.showStep();
      if (state.picked >= 0) address.write(formatHash());
    }

    // --- addresses ------------------------------------------------------------------------------------------------------

    function formatHash() {
      const [view, number] = payload.itemRow(state.items[state.picked]), row = view.steps[number];
      const shown = row.kind === "model" && !row.path ? String(row.n) : encodeURIComponent(row.a);
      return `step=${shown}&tab=${state.tab}`;
    }

    /* Set the tab from the address, and return the item of the step in it; -1 for none. */
    function readHash() {
      const params = new URLSearchParams(address.read());
      if (step.TABS.includes(params.get("tab"))) state.tab = params.get("tab");
      const wanted = params.get("step");
      if (!wanted) return -1;
      return state.items.findIndex((item) => {
        const [view, number] = payload.itemRow(item), row = view.steps[number];
        return /^\d+$/.test(wanted) ? row.kind === "model" && !row.path && row.n === Number(wanted) : row.a === wanted;
      });
    }

    // --- messages for screen readers ------------------------------------------------------------------------------------

    let last = 0, later = 0;

    /* Report something to screen readers, at most once a second. */
    function announce(message) {
      clearTimeout(later);
      const wait = Math.max(0, last + 1000 - performance.now());
      later = setTimeout(() => { last = performance.now(); $("said").textContent = message; }, wait);
    }

    // --- a live run -----------------------------------------------------------------------------------------------------

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
        if (said.error) { overview.showBanner(said.error); return; }
        if (said.after !== state.data.follow) merge(said);
      }
    }

    /* Merge the changes of a live run into the payload, and show them. */
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
      state.views = [payload.makeView(state.data)];
      list.setItems();
      overview.showFacts();
      overview.showAgents();
      overview.showAbout();
      const now = state.picked, top = $("panel").scrollTop, stays = !atEnd && now >= 0;
      list.filterItems();
      // A reader of an earlier step stays there, at the same scroll position.
      const programs = new Set(stays ? state.data.steps[now].calls.filter((c) => c.program !== undefined).map((c) => c.child) : []);
      if (!stays || said.steps.some(([n, row]) => n === now || programs.has(row.path))) {
        state.picked = -1;
        pick(stays ? now : state.items.length - 1, false);
        if (stays) $("panel").scrollTop = top;
      }
      charts.drawCharts();
      if (state.query) search.startSearch(state.query);
      if (options.told) options.told(state.data);
    }

    // --- the page around it ---------------------------------------------------------------------------------------------

    address.changed(() => { if (state.data) { const n = readHash(); if (n >= 0) pick(n, false); else step.showStep(); } }, signal);
    let sized = 0;
    const sizes = new ResizeObserver(() => { clearTimeout(sized); sized = setTimeout(() => { if (state.data && !signal.aborted) { list.scheduleDraw(); charts.drawCharts(); } }, 60); });
    sizes.observe(root);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (state.data) charts.drawCharts(); }, { signal });
    $("fork").hidden = !showsCommands;
    start();

    return {
      destroy() { aborter.abort(); sizes.disconnect(); clearTimeout(sized); clearTimeout(later); search.stopSearch(); },
      data: () => state.data,
      /* The step that is shown: its row, and the number of the row. */
      picked() {
        if (state.picked < 0) return null;
        const [view, number] = step.currentRow();
        return { row: view.steps[number], number };
      },
      /* Pick the step at an address of the journal; false if there is none. */
      pick(wanted) {
        const n = state.items.findIndex((item) => { const [view, number] = payload.itemRow(item); return view.steps[number].a === wanted; });
        if (n >= 0) pick(n);
        return n >= 0;
      },
      redraw() { if (state.data) { list.scheduleDraw(); charts.drawCharts(); } },
    };
  }

  /* The address of a page of its own. */
  const hashAddress = {
    read: () => location.hash.slice(1),
    write: (text) => history.replaceState(null, "", `#${text}`),
    changed: (tell, signal) => addEventListener("hashchange", tell, { signal }),
  };

  /* Decompress the payload that is in the page. */
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
      /* Poll the command that serves the page, once a second. */
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
