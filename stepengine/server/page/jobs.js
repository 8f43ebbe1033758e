/* Jobs: runs that are judged by the code as it is now. What asks models waits with its price until somebody agrees. */
import { html, useState, useEffect, useServer, api, at, money, plural, Problem, announce } from "./lib.js";

export const isOver = (job) => job && ["done", "failed", "cancelled"].includes(job.status);

/* { job, error, start(asked), reset() }: one job, looked at until it is over. */
export function useJob() {
  const [id, set] = useState(null);
  const [error, fail] = useState(null);
  const [over, end] = useState(false);
  const seen = useServer(id === null ? null : at("jobs", id), id === null || over ? 0 : 0.4);
  const job = seen.data;
  useEffect(() => { if (isOver(job) && !over) { end(true); announce(`${job.kind}: ${job.status}`); } }, [job && job.status]);
  async function start(asked) {
    fail(null);
    end(false);
    set(null);
    try { set((await api.post("jobs", asked)).id); } catch (problem) { fail(problem); }
  }
  return { job, error: error || seen.error, start, again: seen.again, reset: () => { set(null); end(false); fail(null); } };
}

const priced = ({ calls, low, high }) => `${plural(calls, "model call")}${low === null ? ", at an unknown price" : high === null ? `, at least ${money(low)}` : `, for about ${money(low)} to ${money(high)}`}`;

/* How a job stands, and what somebody may say to it; what came of it is shown by `result`. */
export function Job({ it, result }) {
  const { job, error } = it;
  const served = useServer(job ? "agents" : null), script = served.data && served.data.script;
  const [budget, afford] = useState("");
  const [problem, fail] = useState(null);
  const say = async (what, body) => { fail(null); try { await api.post(at("jobs", job.id, what), body); it.again(); } catch (refused) { fail(refused); } };
  if (!job) return html`<${Problem} error=${error} />`;
  const { progress } = job;
  return html`<section class="card job" aria-label=${`${job.kind}: ${job.status}`}>
    ${job.status === "begun" ? html`<p role="status">The runs are replayed with the current code${progress.runs ? `: ${progress.runs} of ${progress.of_runs}` : "…"}</p>` : null}
    ${job.status === "priced" ? html`<form onSubmit=${(event) => { event.preventDefault(); say("agree", { budget: budget || null }); }}><p>${script ? html`<b>It takes about ${plural(job.price.calls, "reply", "replies")}</b> of the script <span class="mono">${script}</span>, at no cost.` : html`<b>It takes about ${priced(job.price)}</b>, estimated from the record.`}</p>
      ${job.price.low !== null && !script ? html`<label class="field inline"><span>US dollars at most</span><input type="text" inputmode="decimal" pattern="[0-9]+([.][0-9]+)?" value=${budget} placeholder="no limit" onInput=${(event) => afford(event.target.value)} /></label>` : null}
      <div class="answers"><button type="submit" class="primary">${script ? "Use the script" : "Ask the model"}</button><button type="button" onClick=${() => say("cancel")}>Leave it</button></div></form>` : null}
    ${job.status === "running" ? html`<p role="status">${progress.calls ? `${progress.calls} of about ${plural(progress.of, "call")}${progress.spent ? `, ${money(progress.spent)}` : ""}` : script ? "Running the script…" : "Calling the model…"}</p><progress max=${(job.price && job.price.calls) || 1} value=${progress.calls || 0} aria-label="Calls made"></progress>` : null}
    ${["begun", "running"].includes(job.status) ? html`<button type="button" onClick=${() => say("cancel")}>Cancel</button>` : null}
    ${job.status === "failed" ? html`<div class="problem" role="alert"><pre class="prose">${job.error}</pre></div>` : null}
    ${job.status === "cancelled" ? html`<p class="dim">It was cancelled.</p>` : null}
    ${job.status === "done" ? result(job.result) : null}
    <${Problem} error=${problem || error} /></section>`;
}

export const Lines = ({ lines }) => html`<ul class="d-lines">${(lines || []).map((line) => html`<li>${line}</li>`)}</ul>`;

/* What a change does to runs. */
export function Impact({ result, link }) {
  return html`<${Lines} lines=${result.lines} /><div class="sheet" tabindex="0" role="group" aria-label="Runs"><table class="wide"><thead><tr><th scope="col">Run</th><th scope="col">Under this code</th><th scope="col">First difference</th><th scope="col">Samples</th></tr></thead><tbody>${result.journals.map((one) => html`<tr><td class="mono">${link(one.file)}</td><td>${one.class}</td><td>${one.break ? html`<span class="mono">${one.break}</span> ` : null}${one.difference.slice(0, 2).map((each) => html`<span class="d-change"><span class="mono">${each.pointer}</span> ${each.recorded} → ${each.now}</span>`)}${one.difference.length ? "" : one.message || ""}</td><td>${one.samples.length ? `${one.samples.filter((each) => each.changed).length} of ${one.samples.length} chose another tool; ${[...new Set(one.samples.map((each) => each.status))].join(", ")}` : ""}</td></tr>`)}</tbody></table></div>`;
}
