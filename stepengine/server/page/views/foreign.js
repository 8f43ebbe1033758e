/* Journals that this server did not start: shown like any run, and resumed only when somebody has seen what would happen next. */
import { html, useState, useMemo, useServer, api, at, to, go, when, count, money, Head, Empty, Problem, Value, Status, plural, announce } from "../lib.js";
import { RunPage, followed } from "../mounted.js";
import { Program } from "../questions.js";

function List() {
  const [cursors, turn] = useState([""]);
  const cursor = cursors[cursors.length - 1];
  const found = useServer(`foreign?limit=50${cursor ? `&cursor=${encodeURIComponent(cursor)}` : ""}`, 10);
  const all = found.data ? found.data.journals : [];
  return html`<${Head} title="Journals of others" lead="Journals in the store of this server that it did not start. None of them resumes automatically." />
    <${Problem} error=${found.error} />
    <div class="scroll">${found.data && !all.length ? html`<${Empty} title="There are none">Journals from elsewhere in the folder of runs are listed here.<//>` : null}
    ${all.length ? html`<table class="wide"><thead><tr><th>Journal</th><th>State</th><th>Agent</th><th>Asked</th><th class="num">Steps</th><th>Started</th></tr></thead><tbody>${all.map((each) => html`<tr><td><a class="mono" href=${to(["foreign", each.name])}>${each.name}</a></td><td>${each.error ? html`<span class="tag bad">${each.error}</span>` : html`<${Status} status=${each.status} />`}</td><td>${each.agent}</td><td>${each.prompt.slice(0, 200)}</td><td class="num">${count(each.steps)}</td><td>${when(each.created)}</td></tr>`)}</tbody></table>` : null}
    <p class="answers">${cursors.length > 1 ? html`<button type="button" onClick=${() => turn(cursors.slice(0, -1))}>Newer</button>` : null}${found.data && found.data.next ? html`<button type="button" onClick=${() => turn([...cursors, found.data.next])}>Older</button>` : null}</p></div>`;
}

/* Next effects, and the yes to it. */
function Next({ look, again }) {
  const [error, fail] = useState(null), [busy, turn] = useState(false), [open, show] = useState(false);
  async function resume() {
    turn(true);
    fail(null);
    try {
      const made = await api.post(at("foreign", look.name, "resume"), { seen: look.seen });
      announce("resumed");
      go(["runs", made.run_id]);
    } catch (problem) { fail(problem); turn(false); if (problem.kind === "changed") again(); }
  }
  if (!look.may_resume) return html`<p class="note">${look.why} You can view it, but not resume it.</p>`;
  return html`<section class="card question next" aria-label="Next effects">
    <p>This journal was written elsewhere. You may resume it as your own run; its approvals are asked for again.</p>
    ${open ? html`<h2 class="asks">${look.pending.length ? `On resume, ${plural(look.pending.length, "effect")} that ${look.pending.length === 1 ? "was" : "were"} started ${look.pending.length === 1 ? "is" : "are"} handled first` : "On resume, its agent decides what comes next"}</h2>
      ${look.pending.map((each) => html`<div class="block"><div class="cap"><span class="call">${each.name || each.kind}</span><span class="dim">${each.kind}</span><span class="mono dim">${each.address}</span>${each.is_asked ? html`<span class="tag">asks a person</span>` : html`<span class="tag bad">may happen, or asks a person as interrupted</span>`}</div><div class="inner"><${Value} value=${each.input && each.input.input !== undefined ? each.input.input : each.input} /></div></div>`)}
      <div class="answers"><button type="button" class="primary" disabled=${busy} onClick=${resume}>Resume with exactly this</button><button type="button" onClick=${() => show(false)}>Leave it</button></div>` : html`<div class="answers"><button type="button" onClick=${() => show(true)}>Show the next effects</button></div>`}
    <${Problem} error=${error} /></section>`;
}

function One({ name }) {
  const look = useServer(at("foreign", name));
  const source = useMemo(() => followed(at("foreign", name, "view"), { seconds: 15 }), [name]);
  return html`<header class="head of-run"><div class="crumbs"><a href=${to(["foreign"])}>Journals of others</a><span aria-hidden="true">/</span><h1 class="mono">${name}</h1></div></header>
    <${Problem} error=${look.error} />
    ${look.data ? html`<div class="cards of-run"><${Next} key=${look.data.seen} look=${look.data} again=${look.again} /></div>` : null}
    ${look.data && !look.data.error ? html`<${RunPage} source=${source} label="All steps of the journal" />` : null}`;
}

const Foreign = ({ parts }) => parts.length ? html`<${One} key=${parts[0]} name=${parts[0]} />` : html`<${List} />`;

export default { id: "foreign", title: "Others' journals", key: "o", scope: "admin", View: Foreign };
