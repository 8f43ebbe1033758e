"use strict";
/* The tab State diff: the differences between two steps in messages, prompts, tools, settings and variables. */
function makeDiff({ nodes, figures, payload, messages, handler }) {
  const { BUCKETS, count } = figures;
  const { el, appendInChunks, placeholder, heading, blockNode } = nodes;
  const { text, variableText, json, compactText, oneLine, requestMessages, messageKey, commonPrefix } = payload;
  const { membersNode } = messages;
  const { fetchPositions, localsAt, stateAt } = handler;

  function showDiff(box, view, model, last, number) {
    fetchPositions();
    const steps = view.steps, path = steps[number].path;
    const own = steps.map((row, n) => [row, n]).filter(([row]) => row.path === path && row.m);
    if (model < 0) { box.append(placeholder("No earlier model call to compare with.")); return; }
    const line = el("p", "");
    const label = el("label", "", "Compared with step "), input = el("input", "mono");
    input.type = "number"; input.min = "1"; input.max = String(own.length); input.id = "other";
    input.value = last < 0 ? "" : String(steps[last].n);
    input.addEventListener("change", () => {
      const found = own.find(([row]) => row.n === Number(input.value));
      const rest = el("div", "");
      if (found) appendDiff(rest, view, model, found[1], number);
      else rest.append(placeholder(`step ${input.value} does not exist; use 1 to ${own.length}`));
      body.replaceChildren(...rest.childNodes);
    });
    label.append(input);
    line.append(label, " of this agent");
    const body = el("div", "");
    box.append(line, body);
    if (last < 0) body.append(placeholder("This is the first step: its whole request is new."));
    else appendDiff(body, view, model, last, number);
  }

  function appendDiff(box, view, now, then, number) {
    const a = view.steps[then], b = view.steps[now], old = requestMessages(view, then), all = requestMessages(view, now);
    const same = commonPrefix(old, all), gone = old.slice(same), come = all.slice(same);
    const left = new Map();
    for (const each of come) left.set(messageKey(each), (left.get(messageKey(each)) || 0) + 1);
    const removed = gone.filter((each) => { const n = left.get(messageKey(each)) || 0; left.set(messageKey(each), n - 1); return n <= 0; });
    const kept = new Map();
    for (const each of gone) kept.set(messageKey(each), (kept.get(messageKey(each)) || 0) + 1);
    const added = come.filter((each) => { const n = kept.get(messageKey(each)) || 0; kept.set(messageKey(each), n - 1); return n <= 0; });
    box.append(heading("Messages", el("span", "tag good", `+ ${added.length} added`), el("span", "tag bad", `− ${removed.length} removed`), el("span", "dim", `${count(all.length)} in the request`)));
    const lines = [...removed.map((each) => ["− ", "minus", each]), ...added.map((each) => ["+ ", "plus", each])];
    appendInChunks(box, lines, ([sign, kind, each]) => el("div", "diff", el("span", kind, `${sign}${each.role === "tool" ? `result of ${each.name}` : each.role}  ${oneLine(each.t < 0 ? "" : compactText(each.t)).slice(0, 240)}`)));
    if (a.system !== b.system) { box.append(heading("System prompt")); box.append(textDiff(a.system === undefined ? "" : compactText(a.system), b.system === undefined ? "" : compactText(b.system))); }
    if (a.tools !== b.tools) {
      const was = new Map((a.tools === undefined ? [] : text(a.tools)).map((t) => [t.name, json(t)])), is = new Map((b.tools === undefined ? [] : text(b.tools)).map((t) => [t.name, json(t)]));
      const list = [...[...was.keys()].filter((n) => !is.has(n)).map((n) => `− ${n}`), ...[...is.keys()].filter((n) => !was.has(n)).map((n) => `+ ${n}`), ...[...is.keys()].filter((n) => was.has(n) && was.get(n) !== is.get(n)).map((n) => `~ ${n}`)];
      box.append(heading("Tools"), el("div", "diff", list.join("\n")));
    }
    if (a.settings !== b.settings) box.append(heading("Settings"), textDiff(a.settings === undefined ? "" : json(text(a.settings)), b.settings === undefined ? "" : json(text(b.settings))));
    const changes = [];
    for (let n = Math.min(then, now); n < Math.max(then, now); n++) if (view.steps[n].path === b.path) for (const call of view.steps[n].calls) if (call.change !== undefined) changes.push(call);
    if (changes.length) {
      box.append(heading("Changed by tools"));
      appendInChunks(box, changes, (call) => blockNode([el("span", "call", call.name), el("span", "mono dim", call.a)], [membersNode(text(call.change))]));
    }
    const context = view.contexts;
    if (context) {
      const was = stateAt(view, then), is = stateAt(view, now);
      appendEntries(box, "Context of the state", was.context, is.context);
    }
    const locals = localsAt(view, now), others = localsAt(view, then);
    if (locals && others) appendEntries(box, "Local variables", others, locals);
    if (a.usage && b.usage) {
      const list = el("dl", "members");
      BUCKETS.forEach((name, n) => { if (a.usage[n] !== b.usage[n]) list.append(el("dt", "", `${name} tokens`), el("dd", "mono", `${count(a.usage[n])} → ${count(b.usage[n])}`)); });
      if (list.children.length) box.append(heading("Usage of the call"), list);
    }
    const hooks = view.hooks && view.hooks[number];
    if (hooks && hooks.length) {
      box.append(heading("Changed by hooks"));
      appendInChunks(box, hooks, (each) => blockNode([el("span", "name", each.name), el("span", "dim", each.point)], [membersNode(variableText(each.change))]));
    }
  }

  function appendEntries(box, title, was, is) {
    const names = [...new Set([...Object.keys(was), ...Object.keys(is)])].filter((name) => was[name] !== is[name]).sort();
    if (!names.length) return;
    box.append(heading(title));
    const list = el("div", "diff");
    appendInChunks(list, names, (name) => el("div", "", name in was ? el("span", "minus", `− ${name} = ${was[name]}\n`) : "", name in is ? el("span", "plus", `+ ${name} = ${is[name]}`) : ""));
    box.append(list);
  }

  /* The lines between the common start and the common end of two texts. */
  function textDiff(a, b) {
    const old = a.split("\n"), now = b.split("\n");
    let from = 0, end = 0;
    while (from < old.length && from < now.length && old[from] === now[from]) from++;
    while (end < old.length - from && end < now.length - from && old[old.length - 1 - end] === now[now.length - 1 - end]) end++;
    const box = el("div", "diff");
    const lines = [...old.slice(from, old.length - end).map((l) => ["minus", `− ${l}`]), ...now.slice(from, now.length - end).map((l) => ["plus", `+ ${l}`])];
    appendInChunks(box, lines, ([kind, l]) => el("div", kind, l));
    return box;
  }

  return { showDiff };
}
