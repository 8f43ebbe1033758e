/* Compare: this run beside another one, with the first difference of both. */
import { html, useState, useMemo, useServer, api, at, to, amend, word, when, Problem } from "../../lib.js";
import { RunPage } from "../../mounted.js";

/* The place of a difference; what a run was given has no number. */
const named = (address) => address === "#-1" ? "start" : address || "nothing";

function First({ id, other, status }) {
  // A fork that has just begun has no record for a moment, and another difference later.
  const found = useServer(at("runs", id, "difference", other), !status || status === "running" || status === "suspended" ? 2 : 0);
  const first = found.data && found.data.first;
  if (!found.data) return html`<${Problem} error=${found.error} />`;
  return html`<div class="d-bar d-first" role="status">${first ? html`<p>First difference: <b class="mono">${named(first.a)}${first.a === first.b ? "" : ` → ${named(first.b)}`}</b> ${first.what} <span class="dim">(${first.kind})</span>${found.data.changes.length > 1 ? html` <span class="dim">and ${found.data.changes.length - 1 + found.data.more} more</span>` : null}</p>${first.fields.slice(0, 3).map((field) => html`<p class="d-change"><span class="mono dim">${field.pointer}</span> <span class="mono d-was">${field.a}</span> → <span class="mono">${field.b}</span></p>`)}` : html`<p>These two runs are equal.</p>`}</div>`;
}

function Compare({ id, query, run }) {
  const other = query.get("other") || "", status = run && run.status;
  const listed = useServer(run ? `runs?limit=50&agent=${encodeURIComponent(run.agent)}` : null, 0);
  const runs = (listed.data ? listed.data.runs : []).filter((each) => each.run_id !== id);
  const [error, fail] = useState(null);
  // Which was there before stands on the left.
  const source = useMemo(() => other ? { opened: async () => { try { fail(null); return await api.get(at("runs", other, "compare", id)); } catch (problem) { fail(problem); throw problem; } }, next: async () => null } : null, [id, other, status]);
  return html`<div class="d-bar"><label class="field inline"><span>Compare with</span><select value=${other} onChange=${(event) => amend({ other: event.target.value })}><option value="">choose a run</option>${other && !runs.some((each) => each.run_id === other) ? html`<option value=${other}>${other.slice(0, 8)}</option>` : null}${runs.map((each) => html`<option value=${each.run_id}>${each.run_id.slice(0, 8)} · ${when(each.created)} · ${word(each.status)}</option>`)}</select></label>${other ? html`<a href=${to(["runs", other])}>Open it</a>` : null}</div>
    <${Problem} error=${error} />
    ${other ? html`<${First} key=${`${id} ${other}`} id=${other} other=${id} status=${status} /><${RunPage} key=${`${id} ${other} ${status}`} source=${source} label="Two runs side by side" />` : html`<p class="note scroll">Choose another run of the same agent, or create one: "Go back" continues from any place as a fork.</p>`}`;
}

export default { id: "compare", title: "Compare", scope: "debug", View: Compare };
