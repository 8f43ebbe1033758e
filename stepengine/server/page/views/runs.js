/* Runs: the list of them, live, and the page of one with its sections. */
import { html, useState, useEffect, useRef, useMemo, useServer, useNow, api, at, to, go, amend, count, money, lasting, when, plural, Status, Head, Empty, Problem, Rows, announce, download, useMay } from "../lib.js";
import watch from "./run/watch.js";
import back from "./run/back.js";
import edit from "./run/edit.js";
import compare from "./run/compare.js";
import judge from "./run/judge.js";

/* The sections of a run, in the order of their tabs: each is { id, title, View }, with the scope that it needs. */
export const SECTIONS = [watch, back, edit, compare, judge];

const STATES = [["", "all"], ["running,started", "running"], ["suspended", "waiting"], ["completed", "completed"], ["failed,stranded,max_steps,truncated", "failed"], ["cancelled", "cancelled"]];
const HEIGHT = 58, PIECE = 100;

/* All pages of the list that were asked for: the first one again and again, the others when somebody comes near. */
function useRuns(base) {
  const first = useServer(`${base}&limit=${PIECE}`, 2);
  const [more, set] = useState({ base, runs: [], next: undefined, busy: false });
  const mine = more.base === base ? more : { base, runs: [], next: undefined, busy: false };
  const next = mine.next === undefined ? first.data && first.data.next : mine.next;
  async function ask() {
    if (mine.busy || !next) return;
    set({ ...mine, busy: true });
    try {
      const found = await api.get(`${base}&limit=${PIECE}&cursor=${encodeURIComponent(next)}`);
      set({ base, runs: [...mine.runs, ...found.runs], next: found.next, busy: false });
    } catch { set({ ...mine, busy: false }); }
  }
  const known = new Set((first.data ? first.data.runs : []).map((run) => run.run_id));
  const runs = [...(first.data ? first.data.runs : []), ...mine.runs.filter((run) => !known.has(run.run_id))];
  return { runs, data: first.data, error: first.error, again: first.again, more: ask, isAll: first.data && !next };
}

export function Row({ run, now }) {
  const more = run.details, isLive = run.status === "running" || run.status === "started";
  const seconds = isLive ? (now - Date.parse(run.created)) / 1000 : more && more.seconds;
  const waits = more && (run.status === "suspended" || isLive) ? [...more.waits.filter((each) => each !== "its time"), ...(more.wakes ? [`until ${when(more.wakes)}`] : [])].join(" · ") : "";
  const output = more && run.status === "completed" && more.output ? more.output : "";
  return html`<div role="listitem"><a class="row-link" href=${to(["runs", run.run_id])} style=${{ height: `${HEIGHT}px` }}>
    <${Status} status=${isLive && more && more.asks ? "suspended" : run.status} />
    <span class="main"><span class="title">${(more && more.prompt) || html`<span class="dim">without a prompt</span>`}</span><span class="sub"><b>${run.agent}</b>${run.session_id ? html` · ${run.session_id}` : null}${more && more.agents > 1 ? ` · ${more.agents} agents` : ""}${more && more.forked_from ? html` · <span class="fork" title=${`Forked from ${more.forked_from}`}>fork of ${more.forked_from.slice(0, 8)}</span>` : null}${waits ? html` · <span class="waits">${waits}</span>` : null}${output ? html` · <span class="output">${output}</span>` : null}</span></span>
    <span class="fig"><span>${more && more.steps !== null ? count(more.steps) : ""}</span><small>${more && more.steps !== null ? "steps" : ""}</small></span>
    <span class="fig"><span>${more ? money(more.cost_usd) : ""}</span><small>${more && more.tokens ? `${count(more.tokens)} tokens` : ""}</small></span>
    <span class="fig wide"><span>${lasting(seconds)}</span><small>${when(run.created)}</small></span>
  </a></div>`;
}

function List({ query }) {
  const search = query.get("search") || "", status = query.get("status") || "", agent = query.get("agent") || "", session = query.get("session") || "";
  const asked = new URLSearchParams({ details: "1", ...(search ? { search } : {}), ...(status ? { status } : {}), ...(agent ? { agent } : {}), ...(session ? { session } : {}) });
  const { runs, data, error, more, isAll } = useRuns(`runs?${asked}`);
  const agents = useServer("agents", 0), may = useMay();
  const [typed, type] = useState(search);
  const now = useNow(1);
  useEffect(() => { const timer = setTimeout(() => { if (typed !== search) amend({ search: typed }); }, 250); return () => clearTimeout(timer); }, [typed]);
  return html`<${Head} title="Runs">
      <label class="field inline grow"><span class="unseen">Search</span><input type="search" placeholder="Search in prompts, agents, ids" value=${typed} onInput=${(event) => type(event.target.value)} /></label>
      <label class="field inline"><span class="unseen">Agent</span><select value=${agent} onChange=${(event) => amend({ agent: event.target.value })}><option value="">every agent</option>${(agents.data ? agents.data.agents : []).map((each) => html`<option value=${each.id}>${each.name}</option>`)}</select></label>
      ${may("run") ? html`<a class="button primary" href=${to(["start"])}>Start a run</a>` : null}
    </${Head}>
    <div class="filters" role="group" aria-label="State">${STATES.map(([value, name]) => html`<button type="button" class="chip" aria-pressed=${String(status === value)} onClick=${() => amend({ status: value })}>${name}</button>`)}${session ? html`<button type="button" class="chip" aria-pressed="true" onClick=${() => amend({ session: "" })} aria-label=${`conversation ${session}, leave`}>conversation ${session} ×</button>` : null}</div>
    <${Problem} error=${error} />
    ${data && !runs.length ? html`<${Empty} title=${search || status || agent ? "No matching runs" : "No runs yet"}>${search || status || agent ? html`<button type="button" onClick=${() => { type(""); amend({ search: "", status: "", agent: "" }); }}>Show all</button>` : may("run") ? html`<a class="button primary" href=${to(["start"])}>Start the first one</a>` : null}</${Empty}>` : html`<${Rows} items=${runs} height=${HEIGHT} label=${isAll ? `${plural(runs.length, "run")}` : "Runs"} more=${more} row=${(run) => html`<${Row} key=${run.run_id} run=${run} now=${now} />`} />`}`;
}

/* What a run waits for in words, with the time as this browser writes it. */
function waitingFor({ kind, topic, said, wakes_at: wakes }) {
  const until = wakes ? `until ${when(wakes)}` : "";
  if (kind === "time") return `sleeps ${until}`;
  return [kind === "message" ? `waits for a message on ${topic}` : said, until].filter(Boolean).join(", ");
}

/* How a replay went: the same, or the first difference. */
function Replayed({ id, difference }) {
  if (!difference) return html`<p class="note replayed" role="status">The current code matches the record.</p>`;
  return html`<div class="note replayed" role="status"><p>First difference: step ${difference.step}, <a class="mono" href=${to(["runs", id, "back"], { place: difference.address })}>${difference.address}</a>${difference.site ? html`, at <span class="mono">${difference.site}</span>` : null}. ${difference.message}</p>
    ${difference.fields.slice(0, 3).map((field) => html`<p class="d-change"><span class="mono dim">${field.pointer}</span> <span class="mono d-was">${field.recorded}</span> → <span class="mono">${field.now}</span></p>`)}</div>`;
}

function One({ id, section, query }) {
  const run = useServer(at("runs", id), 1), may = useMay();
  const sections = SECTIONS.filter((each) => !each.scope || may(each.scope));
  const open = sections.find((each) => each.id === section) || SECTIONS[0];
  const [error, fail] = useState(null);
  const [replayed, show] = useState(null);
  const view = run.data;
  const isOver = view && !["running", "started", "suspended"].includes(view.status);
  async function act(what) {
    fail(null);
    try { await api.post(at("runs", id, what)); announce(what); run.again(); } catch (problem) { fail(problem); }
  }
  async function replay() {
    fail(null);
    try { show(await api.post(at("runs", id, "replay"))); announce("replayed"); } catch (problem) { fail(problem); }
  }
  async function save() {
    fail(null);
    try { await download(at("runs", id, "journal"), `${id}.jsonl`); } catch (problem) { fail(problem); }
  }
  if (run.error && !view) return html`<${Head} title="Run" /><${Problem} error=${run.error} /><p><a href=${to(["runs"])}>All runs</a></p>`;
  return html`<header class="head of-run"><div class="crumbs"><a href=${to(["runs"])}>Runs</a><span aria-hidden="true">/</span>${view ? html`<h1>${view.agent}</h1><${Status} status=${view.questions.length && !isOver ? "suspended" : view.status} />` : null}<span class="mono dim" title=${id}>${id.slice(0, 8)}</span>${view && view.forked_from ? html`<a class="fork" href=${to(["runs", view.forked_from.run])}>fork of ${view.forked_from.run.slice(0, 8)}</a>` : null}${view && view.session_id ? html`<a href=${to(["chat", view.agent, view.session_id])}>conversation ${view.session_id}</a>` : null}</div>
      <nav class="tabs" aria-label="Parts of the run">${sections.map((each) => html`<a href=${to(["runs", id, ...(each === SECTIONS[0] ? [] : [each.id])], Object.fromEntries(["step", "tab"].filter((name) => query.get(name)).map((name) => [name, query.get(name)])))} aria-current=${each === open ? "page" : undefined}>${each.title}</a>`)}</nav>
      <div class="tools">${view && !isOver && may("run") ? html`<button type="button" class="danger" onClick=${() => act("cancel")}>Cancel</button>` : null}${view && view.status === "stranded" && may("run") ? html`<button type="button" onClick=${() => act("resume")}>Resume</button>` : null}${may("debug") ? html`${isOver ? html`<button type="button" onClick=${replay} title="Compare the run with the current code. No effect is performed.">Replay</button>` : null}<button type="button" onClick=${save}>Journal</button>` : null}</div>
    </header>
    <${Problem} error=${error || run.error} />
    ${replayed ? html`<${Replayed} id=${id} difference=${replayed.difference} />` : null}
    ${view && view.waits_for.some((each) => each.kind !== "question") ? html`<p class="standing" role="status">${view.waits_for.filter((each) => each.kind !== "question").map((each) => html`<span class="waits">${waitingFor(each)}</span>`)}</p>` : null}
    ${view && view.warnings.length ? html`<ul class="warnings" aria-label="Warnings of the run">${view.warnings.map((each) => html`<li>${each}</li>`)}</ul>` : null}
    <${open.View} id=${id} run=${view} query=${query} again=${run.again} />`;
}

function Runs({ parts, query }) {
  return parts.length ? html`<${One} key=${parts[0]} id=${parts[0]} section=${parts[1]} query=${query} />` : html`<${List} query=${query} />`;
}

export default { id: "runs", title: "Runs", key: "r", View: Runs };
