/*
 * One open question as a card: who asks, what it would do, and every way to answer it. The inbox and the page of a run have it.
 */
import { html, useState, useId, api, at, to, announce, when, Problem, Value, shown } from "./lib.js";

const NAMES = { yes: "Allow", no: "Deny" };
const lines = (text) => String(text).split("\n");

/* A unified diff, or any text that looks like one, with its signs coloured as words and not by colour alone. */
export function Diff({ text }) {
  return html`<div class="diff" tabindex="0" role="group" aria-label="Changes">${lines(text).slice(0, 600).map((line) => html`<div class=${line.startsWith("+") && !line.startsWith("+++") ? "plus" : line.startsWith("-") && !line.startsWith("---") ? "minus" : line.startsWith("@@") ? "at" : ""}>${line || " "}</div>`)}${lines(text).length > 600 ? html`<div class="dim">and ${lines(text).length - 600} more lines</div>` : null}</div>`;
}

/* A program with the line that waits. */
export function Program({ code, line }) {
  const all = lines(code), first = Math.max(1, line ? line - 8 : 1), last = Math.min(all.length, line ? line + 8 : 24);
  const made = [];
  for (let n = first; n <= last; n++) made.push(html`<div class=${n === line ? "here" : ""} aria-current=${n === line ? "true" : undefined}><span>${n}</span><span>${all[n - 1] || " "}</span></div>`);
  return html`<div class="source" tabindex="0" role="group" aria-label=${line ? `Program, waiting at line ${line}` : "Program"}>${made}</div>`;
}

/* What a preview says: texts that are diffs as diffs, the rest as members. */
function Preview({ preview }) {
  const { action, details, problem, ...rest } = preview;
  const isDiff = (value) => typeof value === "string" && /^(@@|--- |\+\+\+ )/m.test(value);
  const given = typeof details === "object" && details !== null && !Array.isArray(details) ? details : details === undefined || details === null ? {} : { details };
  const all = { ...rest, ...given };
  const diffs = Object.keys(all).filter((name) => isDiff(all[name]));
  const others = Object.fromEntries(Object.entries(all).filter(([name]) => !diffs.includes(name)));
  return html`${action ? html`<p class="would">${shown(action)}</p>` : null}${problem ? html`<p class="problem">${problem}</p>` : null}
    ${diffs.map((name) => html`<${Diff} text=${all[name]} />`)}${Object.keys(others).length ? html`<${Value} value=${others} />` : null}`;
}

export function Card({ question, run, answered, headed = true }) {
  const id = useId();
  const [busy, turn] = useState(false);
  const [error, fail] = useState(null);
  const [first, tell] = useState(null);
  const [text, type] = useState("");
  const [chosen, choose] = useState([]);
  const [edits, edit] = useState(null);
  const [reason, give] = useState(""), [denies, deny] = useState(false);
  const isPermission = question.tool_name !== null || question.id.startsWith("doubt:");

  async function say(answer) {
    turn(true);
    fail(null);
    try {
      await api.post(at("runs", run.run_id, "answers"), { answers: { [question.id]: answer } });
      announce("answered");
      answered(question);
    } catch (problem) {
      const theirs = problem.document && (problem.document.answered || []).find((each) => each.id === question.id);
      if (theirs) tell(theirs);
      else if (problem.kind === "answer_rejected" && !(problem.document.open || []).some((each) => each.id === question.id)) tell({ by: "somebody else", answer: "" });
      else fail(problem);
    }
    turn(false);
  }

  function sayEdited() {
    let input;
    try { input = JSON.parse(edits); } catch (problem) { fail({ message: `This is not JSON: ${problem.message}` }); return; }
    say({ edited_input: input });
  }

  if (first) return html`<article class="card question done" aria-live="polite"><p><b>${first.by || "Somebody else"}</b> was first${first.answer ? html`: <q>${first.answer}</q>` : ""}. Your answer was not taken.</p><button type="button" onClick=${() => answered(question)}>Good</button></article>`;
  const options = question.options, isYesNo = isPermission && options.length === 0;
  const rules = question.remember ? [question.remember, ...question.wider] : [];
  return html`<article class="card question" aria-labelledby=${`${id}-q`}>
    ${headed ? html`<p class="cap"><a href=${to(["runs", run.run_id])}>${run.agent}</a>${question.path ? html`<span class="dim">child ${question.path}</span>` : null}${question.tool_name ? html`<span class="mono tool">${question.tool_name}</span>` : null}<span class="end dim">${run.since ? when(run.since) : ""}</span></p>` : null}
    <h2 id=${`${id}-q`} class="asks">${question.text}</h2>
    ${question.origins.length ? html`<ul class="origins" aria-label="Where the arguments come from">${question.origins.map((origin, n) => html`<li class=${question.provenance[n].trusted ? "dim" : "problem"}>${origin}</li>`)}</ul>` : null}
    ${question.program ? html`<${Program} code=${question.program} line=${question.line} />` : null}
    ${question.preview ? html`<${Preview} preview=${question.preview} />` : null}
    ${question.details !== null && question.details !== undefined && edits === null ? question.preview ? html`<details><summary>The whole input</summary><${Value} value=${question.details} /></details>` : html`<${Value} value=${question.details} />` : null}
    ${edits === null ? null : html`<label class="field"><span>Run it with this input</span><textarea class="mono" rows=${Math.min(16, lines(edits).length + 1)} value=${edits} onInput=${(event) => edit(event.target.value)} spellcheck="false"></textarea></label>`}
    ${options.length && question.multi_select ? html`<fieldset class="options"><legend class="unseen">Options</legend>${options.map((option, n) => html`<label><input type="checkbox" checked=${chosen.includes(option)} onChange=${(event) => choose(event.target.checked ? [...chosen, option] : chosen.filter((each) => each !== option))} /> ${option}${question.descriptions[n] ? html`<small>${question.descriptions[n]}</small>` : null}</label>`)}</fieldset>` : null}
    ${(!options.length && !isPermission) || question.allow_text || question.number ? html`<label class="field"><span>${question.number ? "A number" : options.length ? "Or type an answer" : "Your answer"}</span><textarea rows="2" value=${text} onInput=${(event) => type(event.target.value)}></textarea></label>` : null}
    ${isPermission && edits === null && denies ? html`<label class="field reason"><span>Reason, shown to the model</span><input type="text" value=${reason} onInput=${(event) => give(event.target.value)} autocomplete="off" ref=${(node) => { if (node && !node.dataset.seen) { node.dataset.seen = "yes"; node.focus(); } }} /></label>` : null}
    <div class="answers">
      ${edits !== null ? html`<button type="button" class="primary" disabled=${busy} onClick=${sayEdited}>Allow with this input</button><button type="button" disabled=${busy} onClick=${() => edit(null)}>Leave it as it was</button>` : html`
      ${isYesNo ? html`<button type="button" class="primary" disabled=${busy} onClick=${() => say(true)}>Allow</button><button type="button" disabled=${busy} onClick=${() => say(false)}>Deny</button>` : null}
      ${!question.multi_select ? options.map((option, n) => html`<button type="button" class=${n === 0 ? "primary" : ""} disabled=${busy} title=${question.descriptions[n] || undefined} onClick=${() => say({ selected: [option] })}>${isPermission && NAMES[option] || option}</button>`) : html`<button type="button" class="primary" disabled=${busy || !chosen.length} onClick=${() => say({ selected: chosen })}>Answer with ${chosen.length}</button>`}
      ${(!options.length && !isPermission) || question.allow_text || question.number ? html`<button type="button" class=${options.length ? "" : "primary"} disabled=${busy || !text.trim()} onClick=${() => say({ text: text.trim() })}>Answer</button>` : null}
      ${isPermission ? denies ? html`<button type="button" class="danger" disabled=${busy || !reason.trim()} onClick=${() => say({ selected: ["no"], reason: reason.trim() })}>Deny for this reason</button>` : html`<button type="button" disabled=${busy} onClick=${() => deny(true)}>Deny with a reason</button>` : null}
      ${question.tool_name && question.details !== null ? html`<button type="button" disabled=${busy} onClick=${() => edit(JSON.stringify(question.details, null, 2))}>Edit and allow</button>` : null}
      ${isPermission ? null : html`<button type="button" class="quiet" disabled=${busy} onClick=${() => say({ declined: true })}>Decline</button>`}`}
    </div>
    ${rules.length && edits === null ? html`<details class="always"><summary>Allow from now on</summary><ul>${rules.map((rule, n) => html`<li><span title=${rule.id}>${question.scopes[n]}</span><span class="answers"><button type="button" disabled=${busy} onClick=${() => say({ remember: "session", ...(n ? { covers: rule.id } : {}) })}>For this run</button><button type="button" disabled=${busy} onClick=${() => say({ remember: "always", ...(n ? { covers: rule.id } : {}) })}>Always</button></span></li>`)}</ul></details>` : null}
    <${Problem} error=${error} />
  </article>`;
}
