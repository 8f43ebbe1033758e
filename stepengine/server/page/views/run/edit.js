/* Edit and see: the agent's file is edited elsewhere, and every save shows the same place of this run, old and new. */
import { html, useState, useEffect, useServer, api, at, lasting, money, plural, Problem, useMay } from "../../lib.js";
import { useJob, Job } from "../../jobs.js";
import { useDesk, Way, Places, Source, Variables, Request, Refusal } from "./desk.js";

const short = (file) => file.split("/").slice(-2).join("/");

/* How the run goes under this code, in words. */
function Course({ look, isGone }) {
  const { changed, differs, differs_at: where, ends, is_before: isBefore } = look;
  const some = changed.slice(0, 5).join(", ");
  return html`<ul class="course">
    ${changed.length ? html`<li class="asif">Assuming the same reply, although the model's request differs at <span class="mono">${some}</span>${changed.length > 5 ? ` and ${changed.length - 5} more` : ""}.</li>` : null}
    ${differs ? html`<li class="d-differs"><b>The code diverges at ${where || "the end"}.</b>${isGone ? " There is no place before it. Showing the last version that had one." : isBefore ? " Showing the last place before it." : ""}<pre class="prose">${differs}</pre></li>` : ends.length ? html`<li>Every effect matches the record, but the run ends with <b>${ends[1]}</b> instead of ${ends[0]}.</li>` : !changed.length ? html`<li>The run equals its record to the end.</li>` : null}</ul>`;
}

/* What the model would be asked next, and what it says when it is. */
function Next({ id, desk, turn }) {
  const [next, set] = useState(null);
  const [error, fail] = useState(null);
  const [busy, wait] = useState(false);
  const job = useJob();
  const served = useServer("agents"), script = served.data && served.data.script, may = useMay();
  useEffect(() => { set(null); fail(null); job.reset(); }, [turn]);
  async function look() {
    fail(null);
    wait(true);
    try { set(await api.get(at("runs", id, "edits", desk, "next"))); } catch (problem) { fail(problem); }
    wait(false);
  }
  return html`<section class="card" aria-label="What comes next"><h2 class="part">What would the model reply now?</h2>
    ${next === null ? html`<p class="dim">The run continues from its first difference with recorded results. No model is called for this.</p><button type="button" disabled=${busy || !desk} onClick=${look}>${busy ? "Looking…" : "Show the request"}</button>` : next.request === null ? html`<p>${next.why}</p>` : html`<p>At <span class="mono">${next.address}</span>${next.price === null || script ? "" : `; reading it costs ${money(next.price)}`}${next.served ? `; ${plural(next.served, "call")} before it ${next.served === 1 ? "is" : "are"} answered by the record` : ""}.</p><details open><summary>The request</summary><${Request} request=${next.request} /></details>
      ${job.job || !may("admin") ? null : html`<button type="button" class="primary" onClick=${() => job.start({ kind: "ask", runs: [id] })}>${script ? "Show the script's reply" : "Ask the model; shows the price first"}</button>`}`}
    <${Problem} error=${error} />
    <${Job} it=${job} result=${(result) => result.why ? html`<p>${result.why}</p>` : html`<h3 class="part">The reply</h3>${result.text ? html`<pre class="prose">${result.text}</pre>` : null}${result.calls.map((call) => html`<p><span class="mono tool">${call.tool}</span> <span class="mono">${JSON.stringify(call.input)}</span></p>`)}`} /></section>`;
}

function Edit({ id, query, run }) {
  const desk = useDesk(id, query, run && run.status, { jumps: true }), { state } = desk, look = state.good;
  // Code that goes another way at its very first effect has no place, and is no problem either.
  const isGone = Boolean(state.now && !state.now.place && !state.problem);
  const names = [...new Set((look || (state.now && state.now.files.length ? state.now : { files: [] })).files.map(short))];
  return html`<${Refusal} error=${desk.error} /><${Way} desk=${desk} />
    <div class="desk"><${Places} desk=${desk} marked=${look ? look.changed : []} /><div class="scroll" aria-busy=${String(desk.busy)}>
      <p class="saves" role="status">${state.saved.length ? html`<b>${state.saved.map(short).join(", ")}</b> saved at ${state.when}, seen in <span class="d-took">${lasting(state.seconds)}</span>.` : html`Save one of <span class="mono">${names.join(" ") || "the agent's files"}</span> to see the first place that it changes.`} No tool runs, and no model is called.</p>
      ${state.problem ? html`<div class="problem broken" role="alert"><b>The edited code cannot be replayed.</b><pre class="prose">${state.problem}</pre>${look ? html`<span>Showing the last version that could be replayed.</span>` : null}</div>` : null}
      ${!look && desk.busy ? html`<p class="dim">Replaying the run…</p>` : null}
      ${look ? html`<${Course} look=${isGone ? state.now : look} isGone=${isGone} />
        <div class="beside"><div><${Source} look=${look} /><${Variables} now=${look} before=${state.problem || isGone ? null : state.before} />
          ${state.difference && state.difference.length ? html`<h2 class="part">Changes at this place</h2><ul class="d-lines mono">${state.difference.slice(0, 100).map((line) => html`<li>${line}</li>`)}</ul>` : state.difference ? html`<p class="dim">No changes at this place.</p>` : null}</div>
        <div><${Next} id=${id} desk=${state.desk} turn=${`${state.when} ${state.saved.join()}`} /></div></div>` : null}
    </div></div>`;
}

export default { id: "edit", title: "Edit and see", scope: "debug", View: Edit };
