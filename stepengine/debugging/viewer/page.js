"use strict";
/*
 * What shows a recorded run: in a page of its own, and in the studio. Texts of the run reach the document as text only: every node is
 * made by el() and filled through textContent. Nothing is stored, and nothing is loaded here: what comes later is asked of the source.
 */
const runPage = (() => {

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

    const nodes = makeNodes({ state, figures });
    const markdown = makeMarkdown({ state, nodes });
    const payload = makePayload({ state });
    const { makeView, itemRow } = payload;
    const messages = makeMessages({ state, nodes, figures, payload, markdown });
    const calls = makeCalls({ state, nodes, figures, payload, messages, pick });
    const handler = makeHandler({ $, state, source, signal, nodes, payload, messages, calls, showStep: () => step.showStep() });
    const diff = makeDiff({ nodes, figures, payload, messages, handler });
    const step = makeStep({ $, state, nodes, figures, payload, messages, markdown, calls, handler, diff, showsCommands, chooseTab });
    const { TABS, showTabs, currentRow, showStep } = step;
    const list = makeList({ $, state, nodes, figures, payload, pick, announce });
    const { setItems, filterItems, scheduleDraw, scrollToItem } = list;
    const overview = makeOverview({ $, state, nodes, figures, payload, pickAgent });
    const { showBanner, showMissing, showFacts, showAgents, showAbout } = overview;
    const search = makeSearch({ $, state, figures, payload, list, step, pick, announce });
    const { startSearch, stopSearch } = search;
    const charts = makeCharts({ $, state, nodes, figures, payload, pickAgent });
    const { drawCharts, drawTimeline, markPicked } = charts;
    addControls({ $, state, options, signal, nodes, step, list, search, charts, pick, chooseTab, moveAgent, announce });

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
