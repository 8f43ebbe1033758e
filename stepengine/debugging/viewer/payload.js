"use strict";
/*
 * Read the payload, which payload.py makes: texts, the messages of a request, rows and their runs. Nothing here touches the document.
 *
 * A view is one run of the payload. A row is one of its steps: a model call, an action of the handler, or an input.
 */
function makePayload({ state }) {
  const BOUND = 1e6;  // the steps after which loops over references end, even in a damaged payload

  /* A run of the payload, with the requests that were assembled last. */
  function makeView(part) {
    return { ...part, built: new Map() };
  }

  /* The view and the row number of an item: those of the first run, if the item has a row there. */
  function itemRow(item) {
    const which = item.i === null ? 1 : 0;
    return [state.views[which], which ? item.j : item.i];
  }

  /* The view and the row number of an item in each run that has it. */
  const itemRows = (item) => [...(item.i === null ? [] : [[state.views[0], item.i]]), ...(item.j === null || item.j === undefined ? [] : [[state.views[1], item.j]])];

  /* A text by its number: a string, or JSON. */
  const text = (number) => state.data.texts[number];

  /* A text of a variable. In the studio these texts are fetched separately, by fetchPositions(). */
  const variableText = (number) => (state.data.lines || state.data).texts[number];

  const json = (value) => JSON.stringify(value, null, 2);

  function partText(part) {
    for (const name of ["text", "thinking", "refusal", "media", "unreadable"]) if (name in part) return part[name];
    if ("call" in part) return `${part.call} ${JSON.stringify(part.input)}`;
    if ("json" in part) return typeof part.json === "string" ? part.json : JSON.stringify(part.json);
    if ("error" in part) return `${part.error.type}: ${part.error.message}`;
    return JSON.stringify(part);
  }

  /* A text as one string with compact JSON, for search and rows. */
  function compactText(number) {
    const value = text(number);
    if (typeof value === "string") return value;
    if (Array.isArray(value)) return value.map((each) => typeof each === "object" && each !== null ? partText(each) : String(each)).join("\n");
    return JSON.stringify(value);
  }

  /* A text as one string with indented JSON, for readers. */
  function readableText(number) {
    const value = text(number);
    if (typeof value === "string") return value;
    if (!Array.isArray(value)) return json(value);
    return value.map((each) => each !== null && typeof each === "object" && "json" in each && typeof each.json !== "string" ? json(each.json) : typeof each === "object" && each !== null ? partText(each) : String(each)).join("\n");
  }

  function oneLine(value) {
    return value.slice(0, 400).replace(/\s+/g, " ").trim();
  }

  /* The values of an input in one line, without their names. */
  function inputLine(number) {
    const value = text(number);
    if (value !== null && typeof value === "object" && Array.isArray(value.options) && "text" in value) return oneLine([value.text, ...value.options].join("  "));
    if (value === null || typeof value !== "object") return oneLine(String(value));
    const values = Object.values(value).filter((each) => each !== null && each !== "" && !(Array.isArray(each) && !each.length));
    return oneLine(values.map((each) => typeof each === "string" ? each : JSON.stringify(each)).join("  "));
  }

  /* The prompt of an agent in one line. It distinguishes children of one kind. */
  function agentPrompt(each) {
    const said = compactText(each.prompt).trim(), params = each.params === undefined ? null : text(each.params);
    if (!said && params !== null && typeof params.code === "string") return oneLine(params.code).slice(0, 120);
    return (said || params === null ? said : compactText(each.params)).slice(0, 120);
  }

  /* The messages of the request of a row, in order. References to earlier requests are resolved without recursion. */
  function requestMessages(view, number) {
    if (view.built.has(number)) return view.built.get(number);
    const made = [], waiting = [[number, 0, Infinity]];
    for (let n = 0; waiting.length; n++) {
      if (n > BOUND) { made.push({ role: "user", t: -1 }); break; }
      const entry = waiting.pop();
      if (!Array.isArray(entry)) { made.push(entry); continue; }
      const [source, from, to] = entry, list = source < 0 ? view.run.previous : view.steps[source].m || [], inner = [];
      let position = 0;
      for (const item of list) {
        const end = position + (Array.isArray(item) ? item[2] - item[1] : 1);
        const first = Math.max(from, position), last = Math.min(to, end);
        if (first < last) inner.push(Array.isArray(item) ? [item[0], item[1] + first - position, item[1] + last - position] : item);
        position = end;
      }
      for (let i = inner.length - 1; i >= 0; i--) waiting.push(inner[i]);
    }
    if (view.built.size > 8) view.built.clear();
    view.built.set(number, made);
    return made;
  }

  const messageKey = (message) => `${message.role} ${message.t} ${message.status || ""}`;

  /* The number of messages at the start that two requests share. */
  function commonPrefix(a, b) {
    let n = 0;
    while (n < a.length && n < b.length && messageKey(a[n]) === messageKey(b[n])) n++;
    return n;
  }

  /* The row of the previous model call in the same run; -1 for the first. */
  function previousModelRow(view, number) {
    const path = view.steps[number].path;
    for (let n = number - 1; n >= 0; n--) if (view.steps[n].path === path && view.steps[n].m) return n;
    return -1;
  }

  /* The row of the model call that a row belongs to: the row itself, else the previous model call. */
  const modelRow = (view, number) => view.steps[number].m ? number : previousModelRow(view, number);

  /* The call whose program a row belongs to; undefined for any other row. */
  function findProgramCall(view, number) {
    const path = view.steps[number].path;
    if (!path) return undefined;
    for (const row of view.steps) for (const call of row.calls) if (call.child === path) return call.program === undefined ? undefined : call;
    return undefined;
  }

  /* True for a run at the path, and for its children. */
  const isWithin = (own, path) => path === "" || own === path || own.startsWith(`${path}.`);

  const isUnfinished = (call) => call.at === undefined;
  const callFailed = (call) => call.error !== undefined || !["ok", "completed", "pending", undefined].includes(call.status);
  const rowFailed = (row) => row.status === "error" || row.error !== undefined || row.calls.some(callFailed);

  /* The numbers of the texts that are new in a row. Search reads these. */
  function rowTexts(view, number) {
    const row = view.steps[number], made = [];
    const last = row.m ? previousModelRow(view, number) : -1;
    if (row.m) {
      const old = last >= 0 ? view.steps[last] : {};
      for (const name of ["system", "tools", "settings", "choice"]) if (row[name] !== undefined && row[name] !== old[name]) made.push(row[name]);
      for (const item of row.m) if (!Array.isArray(item)) made.push(item.t);
      for (const item of row.tail || []) made.push(item.t);
    }
    for (const name of ["reply", "error", "attempts", "input"]) if (row[name] !== undefined) made.push(row[name]);
    for (const item of row.inputs || []) made.push(item.t);
    for (const call of row.calls) for (const name of ["input", "result", "error", "did", "change", "attempts"]) if (call[name] !== undefined) made.push(call[name]);
    return made;
  }

  /* The words of a row that are no texts, for search. */
  function rowWords(view, number) {
    const row = view.steps[number];
    return [row.a, row.kind, row.model, row.purpose, row.name, row.stop, view.agents[row.agent].id, ...row.calls.map((c) => `${c.name} ${c.a}`)].filter(Boolean).join(" ");
  }

  return { BOUND, makeView, itemRow, itemRows, text, variableText, json, partText, compactText, readableText, oneLine, inputLine, agentPrompt, requestMessages, messageKey, commonPrefix, previousModelRow, modelRow, findProgramCall, isWithin, isUnfinished, callFailed, rowFailed, rowTexts, rowWords };
}
