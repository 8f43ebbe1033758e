/* Judge: reports of evaluations, with cases that open as runs; and what the agent's file as it is now does to chosen runs. */
import { html, useState, useMemo, useServer, api, at, to, amend, money, plural, when, word, Head, Empty, Problem, Status } from "../lib.js";
import { RunPage } from "../mounted.js";
import { useJob, Job, Impact } from "../jobs.js";

const Tabs = ({ open }) => html`<nav class="tabs" aria-label="Judge">${[["", "Reports"], ["impact", "Impact"]].map(([id, title]) => html`<a href=${to(["reports", ...(id ? [id] : [])])} aria-current=${open === id ? "page" : undefined}>${title}</a>`)}</nav>`;

function List() {
  const found = useServer("reports?limit=100", 5), reports = found.data ? found.data.reports : [];
  return html`<${Head} title="Judge"><${Tabs} open="" /></${Head}><${Problem} error=${found.error} />
    ${found.data && !reports.length ? html`<${Empty} title="No reports yet"><span class="mono">stepengine eval</span> writes them into the folder that this server shows.</${Empty}>` : html`<div class="scroll"><ul class="threads">${reports.map((report) => html`<li><a class="card" href=${to(["reports", "of", report.id])}><b>${report.name}</b><span>${plural(report.cases, "case")} × ${report.n}</span><span>${report.sides.join(" · ")}</span>${report.stopped ? html`<span class="waits">${report.stopped}</span>` : null}<span class="dim">${money(report.spent)} · ${when(report.created)}</span></a></li>`)}</ul></div>`}`;
}

const verdict = (sample) => sample.passed === null ? "not judged" : sample.passed ? "passes" : "fails";

function Report({ id }) {
  const found = useServer(`reports/${id.split("/").map(encodeURIComponent).join("/")}`, 0), report = found.data;
  if (!report) return html`<${Head} title="Report"><${Tabs} open="" /></${Head}><${Problem} error=${found.error} />`;
  const share = (side, item) => item.samples.filter((each) => each.side === side.name);
  return html`<${Head} title=${report.name} lead=${`${plural(report.cases.length, "case")}, ${plural(report.n, "sample")} each, ${money(report.spent)}`}><${Tabs} open="" /></${Head}>
    <div class="scroll">${report.stopped ? html`<p class="problem">${report.stopped}</p>` : null}
    <div class="sheet" tabindex="0" role="group" aria-label="Cases"><table class="wide"><thead><tr><th scope="col">Case</th>${report.sides.map((side) => html`<th scope="col">${side.name}</th>`)}</tr></thead><tbody>${report.cases.map((item) => html`<tr><th scope="row">${item.id}${item.tags.length ? html` <small class="dim">${item.tags.join(" ")}</small>` : null}</th>${report.sides.map((side) => html`<td><span class="samples">${share(side, item).map((sample) => html`<a class=${`state ${sample.passed === null ? "" : sample.passed ? "good" : "bad"}`} href=${to(["reports", "sample", id, sample.journal])} title=${`${sample.status}, ${plural(sample.steps, "step")}, ${Object.values(sample.scores).map((score) => score.reason).filter(Boolean).join("; ")}`}>${verdict(sample)}</a>`)}</span></td>`)}</tr>`)}</tbody></table></div></div>`;
}

function Sample({ report, journal }) {
  const source = useMemo(() => ({ opened: () => api.get(`samples?report=${encodeURIComponent(report)}&journal=${encodeURIComponent(journal)}`), next: async () => null }), [report, journal]);
  return html`<header class="head of-run"><p class="crumbs"><a href=${to(["reports", "of", report])}>${report}</a><span aria-hidden="true">/</span><span class="mono">${journal}</span></p></header><${RunPage} source=${source} label="The run of a case" />`;
}

function Chosen({ query }) {
  const found = useServer("runs?limit=100&details=1", 4), agent = query.get("agent") || "";
  const agents = useServer("agents", 0), list = agents.data ? agents.data.agents : [];
  const runs = (found.data ? found.data.runs : []).filter((run) => (!agent || run.agent === agent) && !["running", "started"].includes(run.status));
  const [chosen, choose] = useState(new Set());
  const [samples, count] = useState(3);
  const job = useJob();
  const turn = (id) => { const next = new Set(chosen); if (!next.delete(id)) next.add(id); choose(next); };
  const picked = runs.filter((run) => chosen.has(run.run_id)).map((run) => run.run_id);
  const link = (run) => html`<a href=${to(["runs", run])}>${run.slice(0, 8)}</a>`;
  return html`<${Head} title="Judge"><${Tabs} open="impact" /></${Head}><${Problem} error=${found.error} /><div class="scroll"><form class="form cards" onSubmit=${(event) => { event.preventDefault(); job.start({ kind: "impact", runs: picked, samples }); }}>
    <p class="dim">How the agents' current files affect recorded runs. Where a request differs, ${agents.data && agents.data.script ? "the script answers from there, once you approve it." : "models are called again from there, once you approve the price."}</p>
    <div class="answers"><label class="field inline"><span>Agent</span><select value=${agent} onChange=${(event) => amend({ agent: event.target.value })}><option value="">every agent</option>${list.map((each) => html`<option value=${each.id}>${each.name}</option>`)}</select></label><label class="field inline"><span>Samples</span><input type="number" min="1" max="50" value=${samples} onInput=${(event) => count(Number(event.target.value) || 1)} /></label><button type="submit" class="primary" disabled=${!picked.length}>Judge ${plural(picked.length, "run")}</button></div>
    <fieldset class="options picks"><legend class="unseen">Runs</legend><label class="field boolean"><span>All ${plural(runs.length, "run")}</span><input type="checkbox" checked=${runs.length > 0 && picked.length === runs.length} onChange=${(event) => choose(new Set(event.target.checked ? runs.map((run) => run.run_id) : []))} /></label>${runs.map((run) => html`<label class="field boolean" key=${run.run_id}><span><span class="mono">${run.run_id.slice(0, 8)}</span> <b>${run.agent}</b> ${(run.details && run.details.prompt) || ""} <${Status} status=${run.status} /></span><input type="checkbox" checked=${chosen.has(run.run_id)} onChange=${() => turn(run.run_id)} /></label>`)}</fieldset></form>
    <${Job} it=${job} result=${(made) => html`<${Impact} result=${made} link=${link} />`} /></div>`;
}

function Reports({ parts, query }) {
  if (parts[0] === "impact") return html`<${Chosen} query=${query} />`;
  if (parts[0] === "of" && parts[1]) return html`<${Report} key=${parts[1]} id=${parts[1]} />`;
  if (parts[0] === "sample" && parts[2]) return html`<${Sample} report=${parts[1]} journal=${parts[2]} />`;
  return html`<${List} />`;
}

export default { id: "reports", title: "Judge", key: "j", View: Reports };
