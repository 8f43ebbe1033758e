"use strict";
/*
 * The tab Handler: the position and the variables of the handler at a row. An exported page has them in its payload. The studio
 * provides source.lines(), which replays the run to find them.
 */
function makeHandler({ $, state, source, signal, nodes, payload, messages, calls, showStep }) {
  const { el, placeholder, heading } = nodes;
  const { BOUND, makeView, variableText, findProgramCall } = payload;
  const { membersNode } = messages;
  const { programNode } = calls;
  let fetchedAt = -1;      // the length of the run when the positions were fetched; -1 before that
  let isFetching = false;  // true while they are fetched, and for a pause after that

  /* The frames at a row with their local variables, built from the recorded changes; null if unknown. */
  function framesAt(view, number) {
    if (!view.locals || !view.locals[number]) return null;
    const chain = [];
    for (let n = number; n >= 0 && view.locals[n] && chain.length < BOUND; n = view.locals[n].from) chain.push(view.locals[n].frames);
    const last = chain[0];
    return last.map((frame, depth) => {
      const values = {};
      let start = 0;
      while (start + 1 < chain.length && !chain[start][depth]?.all) start++;
      for (let n = start; n >= 0; n--) {
        const each = chain[n][depth];
        if (!each) continue;
        for (const name of each.gone || []) delete values[name];
        for (const [name, value] of Object.entries(each.set || {})) values[name] = variableText(value);
      }
      return { ...frame, values };
    });
  }

  /* The local variables at a row by name; null if unknown. */
  function localsAt(view, number) {
    const frames = framesAt(view, number);
    if (!frames) return null;
    const made = {};
    for (const frame of frames) for (const [name, value] of Object.entries(frame.values)) made[frames.length > 1 ? `${frame.fn}: ${name}` : name] = value;
    return made;
  }

  /* The context of the state at a row, from the changes in its run. */
  function stateAt(view, number) {
    const made = {};
    for (let n = 0; n <= number; n++) {
      const each = view.contexts[n];
      if (!each || view.steps[n].path !== view.steps[number].path) continue;
      for (const [name, value] of Object.entries(each)) if (value === null) delete made[name]; else made[name] = variableText(value);
    }
    return { context: made };
  }

  /* Fetch the positions of the handlers, if the source provides them and the run has changed since the last time. */
  async function fetchPositions() {
    if (!source.lines || isFetching || fetchedAt === state.data.follow || signal.aborted) return;
    isFetching = true;
    const asked = state.data.follow, begun = performance.now();
    let said = null;
    try { said = await source.lines(signal); } catch (error) { said = { missing: error.message }; }
    said = { texts: [], locals: {}, contexts: {}, hooks: {}, sources: [], missing: "", ...said };
    if (signal.aborted) return;
    fetchedAt = asked;
    state.data.lines = said;
    state.data.sources = said.sources;
    state.data.missing = [...(state.data.missing || []).filter((each) => !each.handler), ...(said.missing ? [{ text: said.missing, handler: true }] : [])];
    Object.assign(state.data, { locals: said.locals, contexts: said.contexts, hooks: said.hooks });
    state.views = [makeView(state.data)];
    if (["handler", "diff"].includes(state.tab) && state.picked >= 0) { const top = $("panel").scrollTop; showStep(); $("panel").scrollTop = top; }
    // The replay of a long run takes long, so it is not repeated all the time.
    setTimeout(() => { isFetching = false; if (["handler", "diff"].includes(state.tab)) fetchPositions(); }, Math.max(1000, 10 * (performance.now() - begun)));
  }

  function showHandler(box, view, number) {
    fetchPositions();
    const frames = framesAt(view, number), call = findProgramCall(view, number);
    if (call) {
      const asks = view.steps[number].calls[0];
      box.append(heading(`Program of ${call.a}`, asks && asks.line ? el("span", "dim", `line ${asks.line}`) : ""), programNode(view, call, (asks && asks.line) || 0));
      return;
    }
    if (!frames || !frames.length) {
      if (source.lines && fetchedAt < 0) { box.append(placeholder("Looking up the handler's position…")); return; }
      const reasons = (state.data.missing || []).filter((each) => each.handler).map((each) => each.text);
      box.append(placeholder(reasons.join(" ") || "No handler was waiting here: the agent has none, or it had ended."));
      return;
    }
    for (const frame of frames.slice().reverse()) {
      const source = frame.file === undefined || frame.file === null ? null : state.data.sources[frame.file];
      box.append(heading(frame.fn, el("span", "dim", source ? `${source.name}:${frame.line}` : frame.kind), frame.kind === "handler" ? "" : el("span", "dim", frame.kind)));
      if (source) {
        const lines = source.text.split("\n"), first = Math.max(1, frame.line - 12), code = el("div", "source");
        code.tabIndex = 0;
        code.setAttribute("role", "group");
        code.setAttribute("aria-label", `Source around line ${frame.line}`);
        for (let n = first; n <= Math.min(lines.length, frame.line + 8); n++) {
          const row = el("div", n === frame.line ? "here" : "", el("span", "", String(n)), el("span", "", lines[n - 1] || " "));
          if (n === frame.line) row.setAttribute("aria-current", "true");
          code.append(row);
        }
        box.append(code);
      }
      const names = Object.keys(frame.values);
      if (names.length) box.append(el("h3", "", "Local variables"), membersNode(frame.values));
    }
  }

  return { showHandler, fetchPositions, localsAt, stateAt };
}
