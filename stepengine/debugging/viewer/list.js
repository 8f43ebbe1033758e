"use strict";
/* The list of steps: selects the items of an agent, folds equal pairs, and draws only the rows in sight. */
function makeList({ $, state, nodes, figures, payload, pick, announce }) {
  const ROW = 30;    // the height of a row in pixels
  const OVER = 8;    // the rows that are drawn above and below the visible ones
  const MOST = 190;  // the rows that are drawn at most
  const { plural, shortCount, duration, totalTokens } = figures;
  const { el } = nodes;
  const { itemRow, text, partText, oneLine, inputLine, isWithin, rowFailed } = payload;
  let shown = [];              // the shown items in their order; ~n is a fold that starts at item n
  let positions = new Map();   // the position of each shown item
  const unfolded = new Set();  // the first item of each fold that was opened

  /* Set the items of the list: steps, or pairs of steps of two runs. */
  function setItems() {
    if (!state.data.pairs) {
      state.items = state.data.steps.map((_, i) => ({ i, j: null, mark: "" }));
    } else {
      state.items = state.data.pairs.map(([i, j, mark, fields]) => ({ i, j, mark, fields }));
    }
  }

  /* Select the shown items: those of the agent and its children. More than three equal pairs in a row are folded. */
  function filterItems() {
    const path = state.agent < 0 ? null : state.data.agents[state.agent].path;
    shown = [];
    let equal = [];
    const flush = () => {
      if (equal.length > 3 && !unfolded.has(equal[0])) shown.push(~equal[0]);
      else shown.push(...equal);
      equal = [];
    };
    state.items.forEach((item, n) => {
      const [view, row] = itemRow(item), own = view.steps[row].path;
      if (path !== null && !isWithin(own, path)) return;
      if (item.mark === "=") { item.first = equal.length ? equal[0] : n; equal.push(n); item.many = equal; return; }
      flush();
      shown.push(n);
    });
    flush();
    positions = new Map(shown.map((n, spot) => [n, spot]));
    $("space").style.height = `${shown.length * ROW}px`;
    scheduleDraw();
  }

  let pending = 0;

  /* Draw the rows in the next frame. */
  function scheduleDraw() {
    if (!pending) pending = requestAnimationFrame(() => { pending = 0; drawRows(); });
  }

  function drawRows() {
    const list = $("list"), space = $("space");
    const first = Math.max(0, Math.floor(list.scrollTop / ROW) - OVER);
    const last = Math.min(shown.length, Math.min(first + MOST, Math.ceil((list.scrollTop + list.clientHeight) / ROW) + OVER));
    const nodes = [];
    for (let spot = first; spot < last; spot++) nodes.push(rowNode(shown[spot], spot));
    space.replaceChildren(...nodes);
    const there = positions.get(state.picked);
    if (there !== undefined && there >= first && there < last) list.setAttribute("aria-activedescendant", `row-${state.picked}`);
    else list.removeAttribute("aria-activedescendant");
  }

  function rowNode(n, spot) {
    const node = el("div", "row");
    node.setAttribute("role", "option");
    node.setAttribute("aria-setsize", String(shown.length));
    node.setAttribute("aria-posinset", String(spot + 1));
    node.style.transform = `translateY(${spot * ROW}px)`;
    if (n < 0) {
      const many = state.items[~n].many.length;
      node.classList.add("fold");
      node.id = `fold-${~n}`;
      node.setAttribute("aria-selected", "false");
      node.append(el("span", "no", ""), el("span", "what", `${plural(many, "equal step")} — open`));
      node.addEventListener("click", () => unfold(~n));
      return node;
    }
    const item = state.items[n], [view, number] = itemRow(item), row = view.steps[number];
    node.id = `row-${n}`;
    node.setAttribute("aria-selected", String(n === state.picked));
    if (rowFailed(row)) node.classList.add("bad");
    if (state.hitSet.has(n)) node.classList.add("hit");
    const what = el("span", "what");
    if (state.data.pairs) {
      const kind = { "=": "equal", "~": "changed", "+": "added", "-": "removed" }[item.mark];
      node.classList.add(kind);
      const mark = el("span", "mark", item.mark);
      mark.title = kind;
      what.append(mark, el("span", "unseen", kind));
    }
    appendSummary(what, view, row);
    const step = row.kind === "model" ? String(row.n) : row.a;
    const no = el("span", "no", step);
    no.title = row.a;
    node.append(no, what, el("span", "num tokens", row.usage ? shortCount(totalTokens(row.usage)) : ""), el("span", "num", row.at === undefined ? "…" : duration(row.at - row.began)));
    what.style.paddingLeft = `${12 * Math.min(6, row.path ? row.path.split(".").length : 0)}px`;
    node.addEventListener("click", () => pick(n));
    return node;
  }

  /* Append the content of a row in one line: errors, calls, and the text or the input of the first call. */
  function appendSummary(what, view, row) {
    if (row.path) what.append(el("span", "word", view.agents[row.agent].id));
    if (row.kind === "input") {
      what.append(el("span", "word", "from outside"), el("span", "call ask", row.name), el("span", "given", inputLine(row.input)));
      return;
    }
    if (row.purpose) what.append(el("span", "word", row.purpose));
    if (rowFailed(row)) what.append(el("span", "bad", "error"));
    if (row.error !== undefined && row.kind === "model") what.append(el("span", "", oneLine(`${text(row.error).type}: ${text(row.error).message}`)));
    if (row.kind === "model" && row.reply === undefined && row.error === undefined) what.append(el("span", "word", "no reply yet"));
    const parts = row.reply === undefined ? [] : text(row.reply);
    const said = oneLine(parts.filter((p) => "text" in p || "refusal" in p).map(partText).join(" "));
    if (row.kind !== "model") what.append(el("span", "word", row.calls[0].kind === "tool" ? row.calls[0].by || "handler" : row.calls[0].kind));
    const asked = parts.filter((p) => "call" in p);
    const calls = row.calls.length ? row.calls.map((c) => [c.name, c.kind, c.input]) : [];
    const names = calls.length >= asked.length ? calls : asked.map((p) => [p.call, "tool", null]);
    for (const [name, kind] of names.slice(0, 4)) what.append(el("span", `call ${kind}`, name));
    if (names.length > 4) what.append(el("span", "word", `and ${names.length - 4} more`));
    if (said) what.append(el("span", "said", said));
    else if (calls.length) what.append(el("span", "given", inputLine(calls[0][2])));
  }

  function scrollToItem(n) {
    const list = $("list"), top = positions.get(n) * ROW;
    if (top < list.scrollTop) list.scrollTop = top;
    else if (top + ROW > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW - list.clientHeight;
  }

  function movePick(by) {
    let spot = positions.get(state.picked);
    if (spot === undefined) spot = 0;
    else spot = Math.min(shown.length - 1, Math.max(0, spot + by));
    while (shown[spot] < 0 && spot + Math.sign(by || 1) >= 0 && spot + Math.sign(by || 1) < shown.length) spot += Math.sign(by || 1);
    if (shown[spot] >= 0) pick(shown[spot]);
  }

  function pickNextError() {
    for (let k = 1; k <= state.items.length; k++) {
      const n = (state.picked + k) % state.items.length, [view, row] = itemRow(state.items[n]);
      if (rowFailed(view.steps[row])) { pick(n); return; }
    }
    announce("no step failed");
  }

  function unfold(n) {
    unfolded.add(n);
    filterItems();
  }

  const isShown = (n) => positions.has(n);
  const isLastShown = (n) => positions.get(n) === shown.length - 1;
  const firstShown = () => shown[0];

  return { setItems, filterItems, unfold, isShown, isLastShown, firstShown, scheduleDraw, scrollToItem, movePick, pickNextError };
}
