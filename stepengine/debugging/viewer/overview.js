"use strict";
/* The header and the left column: the figures of the run, its agents, its prompt and output, and what is not recorded. */
function makeOverview({ $, state, nodes, figures, payload, pickAgent }) {
  const { GOOD, count, shortCount, duration, money, inputTokens, totalTokens, share, statusClass } = figures;
  const { LONG, el, appendInChunks } = nodes;
  const { compactText, readableText } = payload;

  function showBanner(message) {
    $("banner").textContent = message;
    $("banner").hidden = !message;
  }

  /* Show in the banner the missing parts that the payload marks for it. */
  function showMissing() {
    showBanner((state.data.missing || []).filter((each) => each.banner).map((each) => each.text).join(" · "));
  }

  /* The names and values of the header. */
  function runFacts(view) {
    const run = view.run, usage = run.usage;
    return [
      ["steps", count(run.steps)],
      ["time", duration(run.milliseconds)],
      ["tokens", totalTokens(usage) ? `${shortCount(inputTokens(usage))} in, ${shortCount(usage[1] + usage[4])} out` : "none"],
      ["cost", money(run.cost)],
      ["from cache", share(usage[2], inputTokens(usage)) || "none"],
      run.models.length > 1 ? ["models", count(run.models.length)] : ["model", run.models[0] || "none"],
    ];
  }

  function showFacts() {
    const rows = runFacts(state.data), other = state.views[1] ? runFacts(state.views[1]) : null;
    $("facts").replaceChildren(...rows.map(([name, value], n) => {
      const both = other && other[n][1] !== value ? `${value} → ${other[n][1]}` : value;
      return el("div", "", el("dt", "", name), el("dd", "", both));
    }));
    const run = state.data.run;
    $("status").textContent = other && state.views[1].run.status !== run.status ? `${run.status} → ${state.views[1].run.status}` : run.status;
    $("status").className = `state ${statusClass(run.status)}`;
    $("lead").textContent = run.ended || state.data.follow === undefined ? "" : "under way";
  }

  function showAgents() {
    const all = { id: "All agents", steps: state.data.run.steps, depth: 0, n: -1 };
    const lines = state.data.agents.length > 1 ? [all] : [];
    const depths = [];
    state.data.agents.forEach((each, n) => {
      depths[n] = each.parent === null ? 0 : depths[each.parent] + 1;
    });
    const children = new Map();
    state.data.agents.forEach((each, n) => { if (children.has(each.parent)) children.get(each.parent).push(n); else children.set(each.parent, [n]); });
    const waiting = [...(children.get(null) || [])].reverse();
    while (waiting.length && lines.length < 2000) {
      const n = waiting.pop(), each = state.data.agents[n];
      lines.push({ id: each.id, steps: each.steps, depth: depths[n] + (state.data.agents.length > 1 ? 1 : 0), n, status: each.status });
      waiting.push(...[...(children.get(n) || [])].reverse());
    }
    state.shownAgents = lines;
    const box = $("tree");
    box.replaceChildren();
    appendInChunks(box, lines, (line) => {
      const node = el("li", "", el("span", "", line.id));
      if (line.status && !GOOD.has(line.status)) node.append(el("span", `tag ${statusClass(line.status)}`, line.status));
      node.append(el("span", "count", count(line.steps)));
      node.style.paddingLeft = `${6 + 12 * Math.min(line.depth, 8)}px`;
      node.setAttribute("role", "option");
      node.id = `agent-${line.n}`;
      node.setAttribute("aria-selected", String(line.n === state.agent || state.data.agents.length === 1));
      node.addEventListener("click", () => pickAgent(line.n));
      return node;
    });
    box.querySelector("button")?.setAttribute("role", "option");
    box.setAttribute("aria-activedescendant", `agent-${state.data.agents.length === 1 ? 0 : state.agent}`);
  }

  /* Show which agent is picked. */
  function markAgent(number) {
    for (const node of $("tree").children) node.setAttribute("aria-selected", String(node.id === `agent-${number}`));
    $("tree").setAttribute("aria-activedescendant", `agent-${number}`);
    $(`agent-${number}`)?.scrollIntoView({ block: "nearest" });
  }

  function showAbout() {
    const made = [], run = state.data.run;
    const clip = (number) => { const node = el("div", "clip", readableText(number).slice(0, LONG)); node.tabIndex = 0; node.setAttribute("role", "group"); return node; };
    const part = (title, number) => { const node = clip(number); node.setAttribute("aria-label", title); made.push(el("h2", "", title), node); };
    if (compactText(run.prompt)) part("Prompt", run.prompt);
    if (run.params !== undefined) part("Params", run.params);
    if (run.output !== undefined && compactText(run.output)) part("Output", run.output);
    if (run.questions !== undefined) part("Waiting for an answer", run.questions);
    made.push(el("h2", "", "Run"), el("p", "mono", run.run), el("p", "dim", run.created.replace("T", " ").replace("Z", " UTC")));
    if (run.parent) made.push(el("p", "dim", `forked from ${run.parent.run} at ${run.parent.at}`));
    if (run.models.length > 1) made.push(el("h2", "", "Models"), el("p", "", run.models.join(", ")));
    const list = el("ul", "");
    for (const each of state.data.missing || []) list.append(el("li", "", each.text));
    made.push(el("h2", "", "Not recorded"), list);
    $("about").replaceChildren(...made);
  }

  return { showBanner, showMissing, showFacts, showAgents, markAgent, showAbout };
}
