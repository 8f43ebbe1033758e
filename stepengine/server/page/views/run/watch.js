/* Watch: what a run does now, and under it all that it did. */
import { html, useState, useEffect, useRef, useMemo, api, at, follow, Problem, Status, plural, lasting, useNow, shown, useMay } from "../../lib.js";
import { RunPage, followed } from "../../mounted.js";
import { Card } from "../../questions.js";

const KEPT = 6000;
const tail = (text) => text.length > KEPT ? `…${text.slice(-KEPT)}` : text;

/*
 * What every agent of the run does now, by its path. Events change it in place: a thousand of them between two frames are one
 * change of the page.
 */
export function liveState() {
  return { agents: new Map(), news: 0, isOver: false, files: [] };
}

export function take(state, events) {
  for (const { type, data } of events) {
    const own = state.agents.get(data.path) || { id: "", path: data.path, text: "", thinking: "", tools: new Map(), word: "", isDone: false, model: "" };
    state.agents.set(data.path, own);
    switch (type) {
      case "run_started": own.id = data.agent_id; own.isDone = false; own.word = "starts"; break;
      case "agent_spawned": state.agents.set(data.child_path, { id: data.display_name || data.agent_id, path: data.child_path, text: "", thinking: "", tools: new Map(), word: "starts", isDone: false, model: "" }); break;
      case "agent_finished": { const child = state.agents.get(data.child_path); if (child) { child.isDone = true; child.word = data.status; child.tools.clear(); } break; }
      case "model_started": own.text = ""; own.thinking = ""; own.model = data.model; own.word = "waits for a reply"; break;
      case "text_delta": own.text = tail(own.text + data.text); own.word = "writes"; break;
      case "thinking_delta": own.thinking = tail(own.thinking + data.text); own.word = "thinks"; break;
      case "text_completed": own.text = tail(data.text); break;
      case "reply_discarded": own.text = ""; own.thinking = ""; break;
      case "model_retry": own.word = `retries: ${data.error}`; break;
      case "rate_limited": own.word = `waits for ${data.provider}`; break;
      case "model_finished": own.word = data.error ? "got no reply" : "has a reply"; break;
      case "tool_started": own.tools.set(data.tool_call_id || String(data.seq), { name: data.tool_name, input: data.input, word: "" }); own.word = `runs ${data.tool_name}`; break;
      case "tool_progress": { const tool = own.tools.get(data.tool_call_id); if (tool) tool.word = data.percent === null || data.percent === undefined ? data.message : `${data.message} ${Math.round(data.percent)} %`; break; }
      case "tool_finished": own.tools.delete(data.tool_call_id || String(data.seq)); own.word = `has the result of ${data.tool_name}`; break;
      case "file_changed": state.files = [...state.files.filter((each) => each.file !== data.file), { file: data.file, action: data.action }].slice(-20); break;
      case "wait_started": own.word = data.kind === "time" ? `sleeps until ${data.wakes_at}` : data.topic ? `waits for a message on ${data.topic}` : "waits"; break;
      case "question_asked": case "permission_requested": own.word = "asks"; break;
      case "notification": own.word = data.message; break;
      case "run_finished": own.isDone = data.status !== "suspended"; own.word = data.status; state.isOver = own.isDone; for (const each of state.agents.values()) each.tools.clear(); break;
      default: break;
    }
    if (!type.endsWith("_delta") && type !== "tool_progress") state.news++;
  }
  return state;
}

/* Follow a run's events: { state, error }, drawn at most once a frame. */
export function useLive(id, isWatched, told) {
  const [shown, show] = useState({ state: liveState(), turn: 0, error: null });
  useEffect(() => {
    if (!isWatched) return undefined;
    const state = liveState();
    return follow(at("runs", id, "events"), (events) => {
      const before = state.news;
      take(state, events);
      show((last) => ({ state, turn: last.turn + 1, error: null }));
      if (state.news !== before && told) told();
    }, { failed: (error) => show((last) => ({ ...last, error })) });
  }, [id, isWatched]);
  return shown;
}

/* The agents at work: a line each, indented by who runs whom, with what it writes under it. */
export function Now({ state }) {
  const agents = [...state.agents.values()].filter((each) => !each.isDone).sort((a, b) => a.path < b.path ? -1 : 1);
  if (!agents.length) return null;
  return html`<section class="now" aria-label="At work now"><ul>${agents.slice(0, 30).map((each) => html`<li key=${each.path} style=${{ "--deep": each.path ? each.path.split(".").length : 0 }}>
      <p class="line"><span class="dot" aria-hidden="true"></span><b>${each.id || "the run"}</b><span class="dim">${each.word}</span>${[...each.tools.values()].slice(0, 6).map((tool) => html`<span class="mono tool">${tool.name}${tool.word ? html` <small>${tool.word}</small>` : null}</span>`)}${each.tools.size > 6 ? html`<span class="dim">and ${each.tools.size - 6} more</span>` : null}</p>
      ${each.thinking && each.word === "thinks" ? html`<details class="thinks"><summary>thinks</summary><pre class="prose">${each.thinking}</pre></details>` : null}
      ${each.text && each.word === "writes" ? html`<${Stream} text=${each.text} />` : null}</li>`)}${agents.length > 30 ? html`<li class="dim">and ${agents.length - 30} more agents</li>` : null}</ul>
      ${state.files.length ? html`<p class="files dim">${state.files.slice(-5).map((each) => html`<span class="mono">${each.action} ${each.file}</span>`)}</p>` : null}</section>`;
}

/* Text that comes: the end of it stays in sight. */
export function Stream({ text }) {
  const box = useRef(null);
  useEffect(() => { const node = box.current; if (node) node.scrollTop = node.scrollHeight; }, [text]);
  return html`<pre class="prose stream" ref=${box} tabindex="0" role="group" aria-label="Text as it comes">${text}</pre>`;
}

/* Where the handlers stand: asked again when something happened, and not more often than every second or so. */
function Standing({ id, news }) {
  const [said, set] = useState(null), last = useRef({ at: 0, news: -1, timer: 0, cost: 0 });
  useEffect(() => {
    const mine = last.current;
    if (mine.timer || mine.news === news) return undefined;
    const wait = Math.max(0, mine.at + Math.max(1000, 10 * mine.cost) - performance.now());
    mine.timer = setTimeout(async () => {
      const begun = performance.now();
      mine.news = news;
      try { set(await api.get(`${at("runs", id, "lines")}?last=1`)); } catch { set(null); }
      mine.at = performance.now();
      mine.cost = mine.at - begun;
      mine.timer = 0;
    }, wait);
    return undefined;
  }, [id, news]);
  useEffect(() => () => clearTimeout(last.current.timer), []);
  const frame = said && said.frames.length ? said.frames[said.frames.length - 1] : null;
  if (!frame) return null;
  return html`<details class="standing" open><summary>${frame.function} is at <span class="mono">${frame.file}:${frame.line}</span></summary><div class="source" tabindex="0" role="group" aria-label=${`Source around line ${frame.line}`}>${frame.lines.map((line, n) => html`<div class=${frame.first + n === frame.line ? "here" : ""} aria-current=${frame.first + n === frame.line ? "true" : undefined}><span>${frame.first + n}</span><span>${line || " "}</span></div>`)}</div></details>`;
}

function Watch({ id, run, again }) {
  const sees = useMay()("debug");
  const source = useMemo(() => followed(at("runs", id, "view"), { lines: at("runs", id, "lines") }), [id]);
  const isOpen = Boolean(run) && ["running", "started", "suspended"].includes(run.status);
  const { state, error } = useLive(id, isOpen, () => source.nudge());
  const status = run && run.status;
  useEffect(() => { source.nudge(); }, [status]);
  return html`${run && run.error ? html`<p class="problem">${run.error}</p>` : null}
    <div class="top"><div class="acts">${run && run.questions.length ? html`<div class="cards">${run.questions.map((question) => html`<${Card} key=${question.id} question=${question} run=${run} headed=${false} answered=${again} />`)}</div>` : null}
    ${isOpen && status !== "suspended" ? html`<${Now} state=${state} />` : null}
    </div>${isOpen && sees ? html`<${Standing} id=${id} news=${state.news} />` : null}</div>
    ${sees ? html`<${RunPage} source=${source} label="All steps of the run" />` : null}`;
}

export default { id: "watch", title: "Watch", View: Watch };
