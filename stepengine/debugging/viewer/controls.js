"use strict";
/* The keys and buttons of the page. */
function addControls({ $, state, options, signal, nodes, step, list, search, charts, pick, chooseTab, moveAgent, announce }) {
  const { el } = nodes;
  const { TABS, forkCommand, showStep } = step;
  const { scheduleDraw, movePick, pickNextError } = list;
  const { startSearch, moveHit } = search;
  const { drawCharts, itemAt, showTable } = charts;

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

  function handleArrows(event, by, ends) {
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 15, PageUp: -15, Home: -1e9, End: 1e9 }[event.key];
    if (step === undefined || (!ends && Math.abs(step) > 1)) return;
    event.preventDefault();
    by(step);
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
    const best = itemAt(event.offsetX, event.offsetY);
    if (best >= 0) pick(best);
  });
}
