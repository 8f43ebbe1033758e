"use strict";
/* Search all texts of a run in slices, so that the page stays responsive, and move between the hits. */
function makeSearch({ $, state, figures, payload, list, step, pick, announce }) {
  const SLICE = 8;  // the milliseconds of work after which other events are handled
  const { count, plural } = figures;
  const { itemRows, compactText, rowTexts, rowWords } = payload;
  const { showStep } = step;
  const { scheduleDraw } = list;
  let hits = [];          // the items with hits
  let hitIndex = -1;      // the hit that was moved to; -1 for none
  let searchNumber = 0;   // a later search ends this one
  let searching = false;  // true while a search is running

  // A message returns sooner than a timer.
  const channel = new MessageChannel();
  const waiting = [];
  channel.port1.onmessage = () => waiting.shift()();
  const yieldToEvents = () => new Promise((go) => { waiting.push(go); channel.port2.postMessage(0); });

  async function startSearch(wanted) {
    const mine = ++searchNumber;
    state.query = wanted.trim().toLowerCase();
    hits = []; state.hitSet = new Set(); hitIndex = -1; searching = state.query.length > 0;
    const found = new Map();
    let from = performance.now(), painted = from;
    if (state.query) {
      for (let n = 0; n < state.items.length; n++) {
        for (const [view, row] of itemRows(state.items[n])) {
          let is = rowWords(view, row).toLowerCase().includes(state.query);
          for (const number of is ? [] : rowTexts(view, row)) {
            if (!found.has(number)) found.set(number, compactText(number).toLowerCase().includes(state.query));
            if (found.get(number)) { is = true; break; }
          }
          if (is) { hits.push(n); state.hitSet.add(n); break; }
        }
        const now = performance.now();
        if (now - from > SLICE) {
          if (now - painted > 100) { painted = now; showHitCount(); scheduleDraw(); }
          await yieldToEvents();
          if (mine !== searchNumber) return;
          from = performance.now();
        }
      }
    }
    searching = false;
    showHitCount();
    scheduleDraw();
    if (state.picked >= 0) showStep();
    announce(state.query ? `${plural(hits.length, "hit")} for ${state.query}` : "");
  }

  function showHitCount() {
    const more = searching ? "…" : "";
    $("hits").textContent = !state.query ? "" : hitIndex < 0 ? `${count(hits.length)}${more} ${hits.length === 1 ? "step" : "steps"}` : `${count(hitIndex + 1)} of ${count(hits.length)}${more}`;
  }

  function moveHit(by) {
    if (!hits.length) { announce(state.query ? "no hit" : "search first"); return; }
    if (hitIndex < 0) {
      const next = hits.findIndex((n) => n >= state.picked);
      hitIndex = by > 0 ? Math.max(0, next) : (next <= 0 ? hits.length - 1 : next - (hits[next] === state.picked ? 0 : 1));
    } else hitIndex = (hitIndex + by + hits.length) % hits.length;
    pick(hits[hitIndex]);
    showHitCount();
    const mark = $("panel").querySelector("mark");
    if (mark) mark.scrollIntoView({ block: "nearest" });
  }

  const stopSearch = () => { searchNumber++; };

  return { startSearch, moveHit, stopSearch };
}
