/* Schedules, and the runs that sleep: what goes on by itself, and when. */
import { html, useServer, to, when, Head, Empty, Problem, plural, useNow, lasting } from "../lib.js";

const until = (text, now) => { const seconds = (Date.parse(text) - now) / 1000; return seconds > 0 ? `in ${lasting(seconds)}` : "now"; };

function Schedules() {
  const found = useServer("schedules", 5), sleeping = useServer("runs?status=suspended&details=1&limit=100", 5), now = useNow(1);
  const all = found.data ? found.data.schedules : [];
  const sleepers = (sleeping.data ? sleeping.data.runs : []).filter((run) => run.details.wakes).sort((a, b) => a.details.wakes < b.details.wakes ? -1 : 1);
  return html`<${Head} title="Schedules" lead=${found.data ? `${plural(all.length, "schedule")}, ${plural(sleepers.length, "sleeping run")}` : "…"} />
    <${Problem} error=${found.error || sleeping.error} />
    <div class="scroll">
    ${found.data && sleeping.data && !all.length && !sleepers.length ? html`<${Empty} title="Nothing is scheduled">This page lists the schedules of the agents, and runs that sleep until a time.<//>` : null}
    ${all.length ? html`<h2>Scheduled agents</h2><table class="wide"><thead><tr><th>Schedule</th><th>Agent</th><th>Times</th><th>Next</th><th>Last</th><th>Missed</th></tr></thead><tbody>${all.map((each) => html`<tr><td>${each.id}</td><td>${each.agent}</td><td class="mono">${each.cron || "—"} <small class="dim">${each.timezone}</small></td><td>${each.enabled ? each.next ? html`${when(each.next)} <small class="dim">${until(each.next, now)}</small>` : "—" : "off"}</td><td>${each.last ? html`<a href=${to(["runs", each.last.run])}>${when(each.last.at)}</a> <small class="dim">${each.last.status}</small>` : "never"}</td><td>${each.missed || ""}</td></tr>`)}</tbody></table>` : null}
    ${sleepers.length ? html`<h2>Sleeping</h2><table class="wide"><thead><tr><th>Run</th><th>Agent</th><th>Resumes</th><th>Waits for</th></tr></thead><tbody>${sleepers.map((run) => html`<tr><td><a href=${to(["runs", run.run_id])}>${run.details.prompt || run.run_id.slice(0, 8)}</a></td><td>${run.agent}</td><td>${when(run.details.wakes)} <small class="dim">${until(run.details.wakes, now)}</small></td><td>${run.details.waits.join(" · ")}</td></tr>`)}</tbody></table>` : null}
    </div>`;
}

export default { id: "schedules", title: "Schedules", key: "d", View: Schedules };
