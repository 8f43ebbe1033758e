"use strict";
/* The picked step: its header, its tabs, and the panels of the tabs. */
function makeStep({ $, state, nodes, figures, payload, messages, markdown, calls, handler, diff, showsCommands, chooseTab }) {
  const TABS = ["request", "reply", "thinking", "calls", "diff", "handler", "raw"];
  const TITLES = { request: "Request", reply: "Reply", thinking: "Thinking", calls: "Calls", diff: "State diff", handler: "Handler", raw: "Raw" };
  const { BUCKETS, count, plural, duration, money, inputTokens } = figures;
  const { CHUNK, el, button, pre, appendInChunks, placeholder, heading, blockNode, foldNode } = nodes;
  const { renderMarkdown } = markdown;
  const { text, compactText, oneLine, requestMessages, commonPrefix, previousModelRow, modelRow, findProgramCall, rowFailed } = payload;
  const { partNode, membersNode, messageNode } = messages;
  const { callNode } = calls;
  const { showHandler } = handler;
  const { showDiff } = diff;

  function showTabs() {
    $("tabs").replaceChildren(...TABS.map((name) => {
      const node = button("", () => chooseTab(name));
      node.id = `tab-${name}`;
      node.setAttribute("role", "tab");
      node.setAttribute("aria-controls", "panel");
      return node;
    }));
    $("tabs").addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!by) return;
      event.preventDefault();
      chooseTab(TABS[(TABS.indexOf(state.tab) + by + TABS.length) % TABS.length]);
      $(`tab-${state.tab}`).focus();
    });
  }

  /* The view and the row number that are shown: in a pair, those of the selected run. */
  function currentRow() {
    const item = state.items[state.picked];
    const which = item.i === null ? 1 : item.j === null ? 0 : state.side;
    return [state.views[which], which ? item.j : item.i];
  }

  /* The command that forks the run at the picked step. */
  function forkCommand() {
    if (state.picked < 0) return state.data.run.fork;
    const [view, number] = currentRow(), row = view.steps[number], last = row.calls.length ? row.calls[row.calls.length - 1] : row;
    // A step without a result cannot be kept in a fork. The run itself is resumed there.
    if (row.at === undefined) return view.run.resume;
    const kept = row.kind === "input" ? row.a : (last.at === undefined ? row.a : last.a) || row.a;
    return `${view.run.fork} --at '${kept}'`;
  }

  function showStep() {
    if (state.picked < 0) return;
    const [view, number] = currentRow(), row = view.steps[number], model = modelRow(view, number);
    const runs = findProgramCall(view, number);
    const name = row.kind === "model" ? `Step ${row.n}` : row.kind === "input" ? "From outside" : runs ? `In the program of ${runs.a}` : row.n ? `After step ${row.n}` : "Before the first step";
    const head = [el("h2", "", name), el("span", "mono dim", row.a), el("span", "dim", view.agents[row.agent].id)];
    if (row.model) head.push(el("span", "dim", row.answered ? `${row.model}, answered by ${row.answered}` : row.model));
    if (row.at !== undefined) head.push(el("span", "dim", `at ${duration(row.began)}, took ${duration(row.at - row.began)}`));
    if (row.usage) head.push(el("span", "dim", `${count(inputTokens(row.usage))} tokens in, ${count(row.usage[1] + row.usage[4])} out`));
    if (row.cost !== undefined && row.cost !== null) head.push(el("span", "dim", money(row.cost)));
    if (rowFailed(row)) head.push(el("span", "tag bad", "error"));
    const item = state.items[state.picked];
    if (item.i !== null && item.j !== null && item.j !== undefined) {
      const choice = el("span", "sides", ...["A", "B"].map((label, n) => {
        const node = button(label, () => { state.side = n; showStep(); });
        node.title = state.views[n].run.file;
        node.setAttribute("aria-pressed", String(state.side === n));
        return node;
      }));
      head.push(choice);
    } else if (state.data.pairs) head.push(el("span", "tag", item.i === null ? "only in B" : "only in A"));
    if (showsCommands) head.push(el("code", "command", forkCommand()));
    $("head").replaceChildren(...head);
    showFields(item);
    const open = openTab(row);
    for (const each of TABS) {
      const node = $(`tab-${each}`), n = tabCount(each, view, number, model);
      node.replaceChildren(TITLES[each], ...(n ? [el("span", "count", n)] : []));
      node.setAttribute("aria-selected", String(each === open));
      node.tabIndex = each === open ? 0 : -1;
    }
    $("panel").setAttribute("aria-labelledby", `tab-${open}`);
    const made = el("div", "");
    PANELS[open](made, view, number, model);
    $("panel").replaceChildren(...made.childNodes);
    $("panel").scrollTop = 0;
  }

  /* The tab that is open. Actions of the handler have no request and no reply. */
  function openTab(row) {
    if (row.m || !["request", "reply", "thinking"].includes(state.tab)) return state.tab;
    return row.kind === "input" ? "reply" : "calls";
  }

  function tabCount(name, view, number, model) {
    const row = view.steps[number];
    if (name === "request" && row.m) return count(requestMessages(view, number).length + (row.tail || []).length);
    if (name === "calls" && row.calls.length) return count(row.calls.length);
    if (name === "thinking" && row.reply !== undefined) return count(text(row.reply).filter((p) => "thinking" in p).length || null);
    return "";
  }

  function showFields(item) {
    const box = $("fields");
    box.replaceChildren();
    if (!item.fields) return;
    const table = el("table", ""), top = el("tr", "", ...["what differs", "A", "B"].map((name) => el("th", "", name)));
    table.append(el("thead", "", top));
    const body = el("tbody", "");
    for (const [pointer, a, b] of text(item.fields).slice(0, CHUNK)) body.append(el("tr", "", el("td", "mono", pointer), el("td", "mono", a), el("td", "mono", b)));
    table.append(body);
    box.append(table);
    box.tabIndex = 0;
    box.setAttribute("role", "region");
    box.setAttribute("aria-label", "What differs");
  }

  /* By tab: append the content of the tab to a box. */
  const PANELS = {
    request(box, view, number) {
      const row = view.steps[number];
      if (!row.m) { box.append(placeholder("No model was called here: this is an action of the handler.")); return; }
      const last = previousModelRow(view, number), all = requestMessages(view, number);
      const fresh = last < 0 ? 0 : commonPrefix(requestMessages(view, last), all);
      if (row.settings !== undefined || row.choice !== undefined) box.append(foldNode("Settings", () => membersNode({ ...(row.settings === undefined ? {} : text(row.settings)), ...(row.choice === undefined ? {} : { tool_choice: text(row.choice) }) })));
      if (row.system !== undefined) {
        const changed = last >= 0 && view.steps[last].system !== row.system;
        box.append(foldNode(`System prompt, ${plural(compactText(row.system).length, "character")}${changed ? ", changed since the last step" : ""}`, () => renderMarkdown(compactText(row.system))));
      }
      if (row.tools !== undefined) {
        const tools = text(row.tools);
        box.append(foldNode(`${plural(tools.length, "tool")}: ${oneLine(tools.map((t) => t.name).join(", "))}`, () => {
          const inner = el("div", "");
          appendInChunks(inner, tools, (each) => blockNode([el("span", "call", each.name)], [renderMarkdown(each.description), membersNode(each.input_schema)]));
          return inner;
        }));
      }
      const news = all.slice(fresh), old = all.slice(0, fresh);
      box.append(heading(last < 0 ? plural(all.length, "message") : `${plural(news.length, "message")} new since the last step`));
      if (row.tail) for (const each of row.tail) box.append(messageNode({ ...each, tags: [...(each.tags || []), "for this step only"] }, true));
      const made = el("div", "");
      appendInChunks(made, news, (each) => messageNode(each, last >= 0));
      box.append(made);
      if (old.length) {
        box.append(heading(`${plural(old.length, "message")} as before, the latest first`));
        const rest = el("div", "");
        appendInChunks(rest, old.slice().reverse(), (each) => messageNode(each, false));
        box.append(rest);
      }
    },
    reply(box, view, number) {
      const row = view.steps[number];
      for (const each of row.inputs || []) box.append(heading("Sent to the run during this step"), messageNode(each, false));
      if (row.kind === "input") { box.append(heading(row.name), membersNode(text(row.input))); return; }
      if (!row.m) { box.append(placeholder("No model was called here; see Calls.")); return; }
      if (row.attempts !== undefined) {
        box.append(heading(plural(text(row.attempts).length, "failed attempt") + " before"));
        for (const each of text(row.attempts)) box.append(blockNode([el("span", "tag bad", each.type)], [pre(each.message)], "bad"));
      }
      if (row.error !== undefined) box.append(blockNode([el("span", "tag bad", text(row.error).type)], [pre(text(row.error).message)], "bad"));
      if (row.reply === undefined) { if (row.error === undefined) box.append(placeholder("No reply: the record ends here, or the run is still running.")); return; }
      const list = text(row.reply).filter((p) => !("thinking" in p));
      if (!list.length) box.append(placeholder("The reply is empty."));
      appendInChunks(box, list, (part) => {
        if ("call" in part) return blockNode([el("span", "call", part.call), el("span", "dim", "call")], ["unreadable" in part ? partNode(part) : membersNode(part.input)]);
        return blockNode([el("span", "name", "refusal" in part ? "refusal" : "text" in part ? "text" : "provider-specific part")], [partNode(part)]);
      });
      const tail = el("dl", "members");
      const note = (name, value) => { if (value) tail.append(el("dt", "", name), el("dd", "", value)); };
      note("stopped for", row.stop);
      if (row.usage) BUCKETS.forEach((name, n) => note(`${name} tokens`, row.usage[n] ? count(row.usage[n]) : ""));
      note("cost", row.cost === null || row.cost === undefined ? "unknown" : money(row.cost));
      box.append(heading("How it ended"), tail);
    },
    thinking(box, view, number) {
      const row = view.steps[number], list = row.reply === undefined ? [] : text(row.reply).filter((p) => "thinking" in p);
      if (!list.length) box.append(placeholder("No thinking was recorded with this step."));
      appendInChunks(box, list, (part) => blockNode([el("span", "name", "thinking")], [renderMarkdown(part.thinking || "(hidden by the provider)")]));
    },
    calls(box, view, number) {
      const row = view.steps[number];
      if (!row.calls.length) { box.append(placeholder("No call was performed. Control tools of the engine, such as set_output, are in the reply.")); return; }
      appendInChunks(box, row.calls, (call) => callNode(view, call));
    },
    diff(box, view, number, model) { showDiff(box, view, model, model < 0 ? -1 : previousModelRow(view, model), number); },
    handler(box, view, number) { showHandler(box, view, number); },
    raw(box, view, number) {
      const row = view.steps[number], resolve = (name, value) => typeof value === "number" && ["t", "input", "result", "error", "reply", "system", "tools", "settings", "choice", "attempts", "did", "change", "origins"].includes(name) && value >= 0 ? text(value) : value;
      const all = row.m ? requestMessages(view, number) : null;
      const whole = { ...row, agent: view.agents[row.agent].id };
      if (all) { delete whole.m; whole.messages = all.length > CHUNK ? [`${all.length - CHUNK} earlier messages`, ...all.slice(-CHUNK)] : all; }
      box.append(heading("The data of this step, with the last 50 messages"), pre(JSON.stringify(whole, resolve, 2)));
    },
  };

  return { TABS, showTabs, currentRow, forkCommand, showStep };
}
