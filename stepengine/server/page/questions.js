/*
 * One open question as a card: who asks, what it would do, and every way to answer it. The inbox and the page of a run have it.
 */
import { html, useState, useId, api, at, to, announce, when, Problem, Value, shown, useMay } from "./lib.js";

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

/* The preview of a call in its parts: what it would do, commands and diffs, then members. */
function Preview({ parts }) {
  const members = parts.filter(({ kind }) => kind === "member");
  return html`${parts.map(({ kind, value }) => kind === "action" ? html`<p class="would">${value}</p>` : kind === "diff" ? html`<${Diff} text=${value} />` : kind === "command" ? html`<pre>$ ${value}</pre>` : null)}
    ${members.length ? html`<${Value} value=${asDetails(members)} />` : null}`;
}

/* Members as the value that they are the members of. */
const asDetails = (members) => members.length === 1 && !members[0].name ? members[0].value : Object.fromEntries(members.map(({ name, value }) => [name, value]));
const showsAll = (parts, details) => parts.every(({ kind }) => kind === "member") && JSON.stringify(asDetails(parts)) === JSON.stringify(details);

/* An approval of later calls. One of any input is sent only when the person has read its warning and confirmed it. */
function Lasting({ choice, busy, say }) {
  const [chosen, choose] = useState(null), may = useMay();
  const pick = (remember) => choice.confirm ? choose(remember) : say({ ...choice.answer, remember });
  return html`<li><span title=${choice.rule.id}>${choice.scope}</span>${chosen === null
    ? html`<span class="answers"><button type="button" disabled=${busy} onClick=${() => pick("session")}>For this run</button>${may("admin") ? html`<button type="button" disabled=${busy} onClick=${() => pick("always")}>Always</button>` : null}</span>`
    : html`<span class="answers" role="alert"><span class="problem">${choice.confirm}</span><button type="button" class="danger" disabled=${busy} onClick=${() => say({ ...choice.answer, remember: chosen })}>${chosen === "always" ? "Confirm: always" : "Confirm: for this run"}</button><button type="button" disabled=${busy} onClick=${() => choose(null)}>Cancel</button></span>`}</li>`;
}

export function Card({ question, run, answered, headed = true }) {
  const id = useId(), may = useMay();
  const [busy, turn] = useState(false);
  const [error, fail] = useState(null);
  const [first, tell] = useState(null);
  const [text, type] = useState("");
  const [chosen, choose] = useState([]);
  const [edits, edit] = useState(null);
  const [reason, give] = useState(""), [denies, deny] = useState(false);
  const answers = may("answer"), isPermission = question.tool_name !== null, lasting = question.choices.filter(({ kind }) => kind === "always");
  const several = answers && question.multi_select ? question.choices.filter(({ kind }) => kind === "option") : [];
  // To do again what may have happened is for who may do everything.
  const isFree = (choice) => may("admin") || !question.id.startsWith("doubt:") || choice.label !== "yes";
  const offered = question.choices.filter((choice) => choice.kind !== "always" && !several.includes(choice) && isFree(choice)), isWhole = showsAll(question.preview_parts, question.details);
  const denial = offered.find(({ kind }) => kind === "deny"), takesText = answers && !isPermission && (!question.options.length || question.allow_text || question.number !== null);

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

  if (first) return html`<article class="card question done" aria-live="polite"><p><b>${first.by || "Somebody else"}</b> answered first${first.answer ? html`: <q>${first.answer}</q>` : ""}. Your answer was not accepted.</p><button type="button" onClick=${() => answered(question)}>OK</button></article>`;
  return html`<article class="card question" aria-labelledby=${`${id}-q`}>
    ${headed ? html`<p class="cap"><a href=${to(["runs", run.run_id])}>${run.agent}</a>${question.path ? html`<span class="dim">child ${question.path}</span>` : null}${question.tool_name ? html`<span class="mono tool">${question.tool_name}</span>` : null}<span class="end dim">${run.since ? when(run.since) : ""}</span></p>` : null}
    <h2 id=${`${id}-q`} class="asks">${question.text}</h2>
    ${question.origins.length ? html`<ul class="origins" aria-label="Where the arguments come from">${question.origins.map((origin, n) => html`<li class=${question.provenance[n].trusted ? "dim" : "problem"}>${origin}</li>`)}</ul>` : null}
    ${question.program ? html`<${Program} code=${question.program} line=${question.line} />` : null}
    ${edits === null || !isWhole ? html`<${Preview} parts=${question.preview_parts} />` : null}
    ${question.details !== null && edits === null && !isWhole ? html`<details><summary>The whole input</summary><${Value} value=${question.details} /></details>` : null}
    ${edits === null ? null : html`<label class="field"><span>Run it with this input</span><textarea class="mono" rows=${Math.min(16, lines(edits).length + 1)} value=${edits} onInput=${(event) => edit(event.target.value)} spellcheck="false"></textarea></label>`}
    ${several.length ? html`<fieldset class="options"><legend class="unseen">Options</legend>${several.map(({ label, description }) => html`<label><input type="checkbox" checked=${chosen.includes(label)} onChange=${(event) => choose(event.target.checked ? [...chosen, label] : chosen.filter((each) => each !== label))} /> ${label}${description ? html`<small>${description}</small>` : null}</label>`)}</fieldset>` : null}
    ${takesText ? html`<label class="field"><span>${question.number ? "A number" : question.options.length ? "Or type an answer" : "Your answer"}</span><textarea rows="2" value=${text} onInput=${(event) => type(event.target.value)}></textarea></label>` : null}
    ${isPermission && edits === null && denies ? html`<label class="field reason"><span>Reason, shown to the model</span><input type="text" value=${reason} onInput=${(event) => give(event.target.value)} autocomplete="off" ref=${(node) => { if (node && !node.dataset.seen) { node.dataset.seen = "yes"; node.focus(); } }} /></label>` : null}
    ${answers ? html`<div class="answers">
      ${edits !== null ? html`<button type="button" class="primary" disabled=${busy} onClick=${sayEdited}>Allow with this input</button><button type="button" disabled=${busy} onClick=${() => edit(null)}>Discard the changes</button>` : html`
      ${several.length ? html`<button type="button" class="primary" disabled=${busy || !chosen.length} onClick=${() => say({ selected: chosen })}>Answer with ${chosen.length}</button>` : null}
      ${offered.map((choice, n) => choice === denial && !isPermission ? null : html`<button type="button" class=${n === 0 ? "primary" : ""} disabled=${busy} title=${choice.description || undefined} onClick=${() => say(choice.answer)}>${choice.label}</button>`)}
      ${takesText ? html`<button type="button" class=${question.options.length ? "" : "primary"} disabled=${busy || !text.trim()} onClick=${() => say({ text: text.trim() })}>Answer</button>` : null}
      ${isPermission ? denies ? html`<button type="button" class="danger" disabled=${busy || !reason.trim()} onClick=${() => say({ ...denial.answer, reason: reason.trim() })}>Deny for this reason</button>` : html`<button type="button" disabled=${busy} onClick=${() => deny(true)}>Deny with a reason</button>` : null}
      ${question.tool_name && question.details !== null && may("admin") ? html`<button type="button" disabled=${busy} onClick=${() => edit(JSON.stringify(question.details, null, 2))}>Edit and allow</button>` : null}
      ${denial && !isPermission ? html`<button type="button" class="quiet" disabled=${busy} onClick=${() => say(denial.answer)}>${denial.label}</button>` : null}`}
    </div>` : null}
    ${answers && lasting.length && edits === null ? html`<details class="always"><summary>Allow from now on</summary><ul>${lasting.map((choice) => html`<${Lasting} key=${choice.id} choice=${choice} busy=${busy} say=${say} />`)}</ul></details>` : null}
    <${Problem} error=${error} />
  </article>`;
}
