"use strict";
/* Show calls of tools and agents, and programs with the calls of each line. */
function makeCalls({ state, nodes, figures, payload, messages, pick }) {
  const LINES = 150;  // the length up to which a program is shown as a whole
  const NEAR = 6;     // in longer programs, the lines that are shown around a line with calls
  const FEW = 5;      // the calls of one line that are shown at once
  const { count, plural, duration, statusClass } = figures;
  const { el, button, highlight, pre, blockNode, foldNode } = nodes;
  const { itemRow, text, compactText, oneLine, inputLine, isUnfinished, callFailed } = payload;
  const { membersNode, partNodes } = messages;

  function callNode(view, call) {
    const cap = [el("span", `call ${call.kind}`, call.name), el("span", "dim", call.kind), el("span", "mono dim", call.a)];
    const bad = callFailed(call);
    if (call.status && call.status !== "ok") cap.push(el("span", `tag ${statusClass(call.status)}`, call.status));
    if (call.purpose) cap.push(el("span", "tag", call.purpose));
    if (call.line !== undefined) cap.push(el("span", "dim", `line ${call.line} of its program`));
    if (call.together !== undefined) cap.push(el("span", "dim", `together with others from #${call.together} on`));
    cap.push(el("span", "end", isUnfinished(call) ? view.run.ended ? "never finished" : "no result yet" : duration(call.at - call.began)));
    const inner = call.program === undefined ? [membersNode(text(call.input))] : [programNode(view, call, 0)];
    if (call.program !== undefined && text(call.input).restart) inner.unshift(membersNode({ restart: true }));
    if (call.origins !== undefined) inner.push(originsNode(text(call.origins)));
    if (call.attempts !== undefined) inner.push(el("div", "", el("span", "tag bad", "failed attempts"), ...text(call.attempts).map((each) => pre(`${each.type}: ${each.message}`))));
    if (call.result !== undefined) inner.push(...partNodes(call.result, call.kind === "spawn" ? "prose" : ""));
    if (call.error !== undefined) inner.push(el("div", "", el("span", "tag bad", text(call.error).type), pre(text(call.error).message)));
    if (call.did !== undefined) inner.push(el("div", "", el("span", "tag", "did"), ...text(call.did).map((each) => pre(each))));
    if (call.change !== undefined) inner.push(el("div", "", el("span", "tag", "changed in its run"), membersNode(text(call.change))));
    if (call.child !== undefined) {
      const first = state.items.findIndex((item) => { const [v, n] = itemRow(item); return v === view && v.steps[n].path === call.child; });
      if (first >= 0) inner.push(button(call.program === undefined ? "Go to the first step of this child" : "Go to the first call of this program", () => pick(first)));
    }
    return blockNode(cap, inner, bad ? "bad" : "");
  }

  /* Sentences about the origins of arguments, untrusted ones first. */
  function originsNode(said) {
    const bad = said.filter(([, trusted]) => !trusted).length;
    return foldNode(`Where the arguments come from${bad ? `: ${bad} untrusted` : ""}`, () => {
      const list = el("ul", "");
      for (const [sentence, trusted] of said) list.append(el("li", "", ...(trusted ? [] : [el("span", "tag bad", "untrusted"), " "]), highlight(sentence)));
      return list;
    });
  }

  /* The lines of a program, each with its calls. It waits at lines whose calls have no result, or at the line *here*. */
  function programNode(view, call, here) {
    const box = el("div", ""), code = el("div", "source program"), asked = new Map(), below = [];
    const lines = String(text(call.input).code).split("\n"), fits = lines.length === call.program;
    if (lines.length > 1 && !lines[lines.length - 1]) lines.pop();
    view.steps.forEach((row, n) => {
      if (row.path !== call.child) return;
      for (const each of row.calls) {
        const line = fits && each.line <= lines.length ? each.line : 0;
        if (!line) below.push([each, n]);
        else if (asked.has(line)) asked.get(line).push([each, n]);
        else asked.set(line, [[each, n]]);
      }
    });
    const waits = new Set(here ? [here] : [...asked].filter(([, calls]) => calls.some(([each]) => isUnfinished(each))).map(([line]) => line));
    const near = (n) => { for (let k = n - NEAR; k <= n + NEAR; k++) if (asked.has(k) || k === here) return true; return n <= NEAR; };
    code.tabIndex = 0;
    code.setAttribute("role", "group");
    code.setAttribute("aria-label", waits.size ? `Program, at line ${[...waits].join(", ")}` : `Program of ${plural(lines.length, "line")}`);
    const written = (all) => {
      const made = [];
      let left = 0;
      const leave = () => { if (left) made.push(el("div", "left", el("span", "", "…"), el("span", "", plural(left, "line")))); left = 0; };
      lines.forEach((line, k) => {
        if (!all && !near(k + 1)) { left++; return; }
        leave();
        const node = el("div", waits.has(k + 1) ? "here" : "", el("span", "", String(k + 1)), el("span", "", highlight(line || " ")));
        if (waits.has(k + 1)) node.setAttribute("aria-current", "true");
        made.push(node, ...callLines(view, asked.get(k + 1) || []));
      });
      leave();
      return made;
    };
    const isLong = lines.length > LINES;
    code.append(...written(!isLong));
    box.append(code);
    if (isLong) {
      const more = button(`Show all ${count(lines.length)} lines`, () => { code.replaceChildren(...written(true)); more.remove(); }, "more");
      box.append(more);
    }
    if (below.length) {
      const rest = el("div", "source program", ...callLines(view, below));
      rest.tabIndex = 0;
      rest.setAttribute("role", "group");
      rest.setAttribute("aria-label", "Calls of the program");
      box.append(el("p", "dim", fits ? "No line is recorded for these:" : "Parts of the program were redacted, so line numbers differ:"), rest);
    }
    return box;
  }

  /* The calls of one line. Of many, the first ones and those that failed or have no result; a button shows the others. */
  function callLines(view, calls) {
    const isFew = calls.length <= FEW + 1, shown = calls.filter(([each], n) => isFew || n < FEW || isUnfinished(each) || callFailed(each));
    const made = shown.map(([each, n]) => callLine(view, each, n));
    if (shown.length < calls.length) {
      const more = button(`${plural(calls.length - shown.length, "more call")}`, () => node.replaceWith(...calls.filter((one) => !shown.includes(one)).map(([each, n]) => callLine(view, each, n))), "link more");
      const node = el("div", "asked", el("span", ""), el("span", "", more));
      made.push(node);
    }
    return made;
  }

  function callLine(view, each, n) {
    const go = button("", () => { const at = state.items.findIndex((item) => { const [v, row] = itemRow(item); return v === view && row === n; }); if (at >= 0) { state.tab = "calls"; pick(at); } }, "link");
    go.append(el("span", "mono", each.a), " ", el("span", `call ${each.kind}`, each.kind === "ask" ? each.purpose || "ask" : each.name), " ", el("span", "given", each.kind === "sleep" ? "" : inputLine(each.input).slice(0, 160)));
    const line = el("span", "", go, el("span", "came", " → "));
    if (each.error !== undefined) line.append(el("span", "tag bad", text(each.error).type), " ", oneLine(text(each.error).message));
    else if (isUnfinished(each)) line.append(el("span", "tag ask", view.run.ended ? "never finished" : "no result yet"));
    else {
      if (callFailed(each)) line.append(el("span", "tag bad", each.status), " ");
      line.append(each.result === undefined ? "" : oneLine(compactText(each.result)).slice(0, 200));
    }
    return el("div", "asked", el("span", ""), line);
  }

  return { callNode, programNode };
}
