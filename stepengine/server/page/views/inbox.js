/* The inbox: every open question of every run, answered where it stands. */
import { html, useState, useServer, Head, Empty, Problem, plural, amend } from "../lib.js";
import { Card } from "../questions.js";

function Inbox({ query }) {
  const open = useServer("questions?limit=100", 1.5);
  const [gone, go] = useState([]);
  const agent = query.get("agent") || "";
  const key = (each) => `${each.run_id} ${each.id}`;
  const all = (open.data ? open.data.questions : []).filter((each) => !gone.includes(key(each)));
  const agents = [...new Set(all.map((each) => each.agent))].sort();
  const shown = all.filter((each) => !agent || each.agent === agent);
  return html`<${Head} title="Inbox" lead=${open.data ? all.length ? `${plural(all.length, "question")} ${all.length === 1 ? "waits" : "wait"} for an answer` : "" : "…"}>
      ${agents.length > 1 || agent ? html`<label class="field inline"><span>Agent</span><select value=${agent} onChange=${(event) => amend({ agent: event.target.value })}><option value="">all</option>${agents.map((each) => html`<option value=${each}>${each}</option>`)}</select></label>` : null}
    </${Head}>
    <${Problem} error=${open.error} />
    <div class="scroll"><div class="cards">
      ${open.data && !shown.length ? html`<${Empty} title="Nothing waits for you">This page lists what runs ask: permissions, questions of agents, and effects in doubt.</${Empty}>` : null}
      ${shown.map((each) => html`<${Card} key=${key(each)} question=${each} run=${each} answered=${() => { go((before) => [...before, key(each)]); open.again(); }} />`)}
    </div></div>`;
}

export default { id: "inbox", title: "Inbox", key: "i", View: Inbox };
