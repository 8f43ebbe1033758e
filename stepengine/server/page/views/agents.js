/* Agents: what there is, who runs whom, and of each its tools, prompts, rules, and where it stands. */
import { html, useServer, at, to, plural, Head, Empty, Problem, Value, useMay } from "../lib.js";

/* Who runs whom, as a tree; an agent that stands above itself is named and not opened again. */
function Branch({ id, all, above }) {
  const agent = all.get(id), children = (agent ? agent.spawns : []).map((child) => child.replaceAll("_", "-"));
  return html`<li><span class="d-node">${agent ? html`<a href=${to(["agents", id])}>${agent.name}</a>` : html`<span class="mono">${id}</span>`}${agent && agent.tools.length ? html`<span class="dim">${plural(agent.tools.length, "tool")}</span>` : null}${above.includes(id) ? html`<span class="dim">again</span>` : null}</span>
    ${children.length && !above.includes(id) ? html`<ul>${children.map((child) => html`<${Branch} key=${child} id=${child} all=${all} above=${[...above, id]} />`)}</ul>` : null}</li>`;
}

function List() {
  const found = useServer("agents", 0), agents = found.data ? found.data.agents : [];
  const all = new Map(agents.map((agent) => [agent.id, agent]));
  const below = new Set(agents.flatMap((agent) => agent.spawns.map((child) => child.replaceAll("_", "-"))));
  const roots = agents.filter((agent) => !below.has(agent.id));
  return html`<${Head} title="Agents" /><${Problem} error=${found.error} />
    ${found.data && !agents.length ? html`<${Empty} title="There are no agents">This server was started without any.</${Empty}>` : html`<div class="scroll"><ul class="d-tree">${(roots.length ? roots : agents).map((agent) => html`<${Branch} key=${agent.id} id=${agent.id} all=${all} above=${[]} />`)}</ul></div>`}`;
}

const Prompt = ({ title, text, none }) => html`<h2 class="part">${title}</h2>${text ? html`<pre class="prose">${text}</pre>` : html`<p class="dim">${none}</p>`}`;

function Tool({ tool }) {
  return html`<li class="card"><h3 class="part mono tool">${tool.name}</h3>${tool.description ? html`<p class="prose">${tool.description}</p>` : null}<p class="dim">${[tool.category, tool.needs_permission ? "the rules decide whether a call is allowed" : "every call is allowed"].filter(Boolean).join(" · ")}</p><details><summary>Schema of its input</summary><pre>${JSON.stringify(tool.input_schema, null, 2)}</pre></details></li>`;
}

function One({ id }) {
  const found = useServer(at("agents", id), 0), agent = found.data, may = useMay();
  if (!agent) return html`<${Head} title="Agent" /><${Problem} error=${found.error} /><p class="note"><a href=${to(["agents"])}>All agents</a></p>`;
  const { prompts, policy } = agent;
  return html`<${Head} title=${agent.name} lead=${agent.description}>${may("run") ? html`<a class="button" href=${to(["start", agent.id])}>Start a run</a>` : null}<a class="button" href=${to(["runs"], { agent: agent.id })}>Its runs</a></${Head}>
    <div class="scroll"><p class="crumbs"><a href=${to(["agents"])}>Agents</a><span aria-hidden="true">/</span><span class="mono">${agent.id}</span></p>
    <dl class="facts">${agent.file ? html`<div><dt>Defined in</dt><dd class="mono">${agent.file}${agent.line ? `:${agent.line}` : ""}</dd></div>` : null}<div><dt>Model</dt><dd class="mono">${agent.model || "the server’s model"}</dd></div>${agent.spawns.length ? html`<div><dt>May run</dt><dd>${agent.spawns.map((child) => html`<a href=${to(["agents", child.replaceAll("_", "-")])}>${child}</a> `)}</dd></div>` : null}</dl>
    ${prompts ? html`<${Prompt} title="System prompt" text=${prompts.system} none=${prompts.system === null ? "It is computed for each run; to see it in a run, use Go back." : "None."} /><${Prompt} title="Instructions, with the engine’s additions" text=${prompts.instructions} none="None." />${prompts.step ? html`<${Prompt} title="At the end of every request" text=${prompts.step} />` : null}` : null}
    <h2 class="part">Tools</h2>${agent.tool_specs && agent.tool_specs.length ? html`<ul class="toolbox">${agent.tool_specs.map((tool) => html`<${Tool} key=${tool.name} tool=${tool} />`)}</ul>` : html`<p class="dim">${agent.tools.length ? agent.tools.join(", ") : "None."}</p>`}
    ${agent.params ? html`<h2 class="part">Params</h2><details><summary>Their schema</summary><pre>${JSON.stringify(agent.params, null, 2)}</pre></details>` : null}
    <h2 class="part">Rules</h2>${policy ? html`<${Value} value=${policy} />` : html`<p class="dim">Every call is allowed.</p>`}
    ${agent.settings && Object.keys(agent.settings).length ? html`<h2 class="part">Settings</h2><${Value} value=${agent.settings} />` : null}
    ${agent.source ? html`<h2 class="part">Handler</h2><pre class="d-handler" tabindex="0" role="group" aria-label="Source of the handler">${agent.source}</pre>` : null}</div>`;
}

function Agents({ parts }) { return parts.length ? html`<${One} key=${parts[0]} id=${parts[0]} />` : html`<${List} />`; }

export default { id: "agents", title: "Agents", key: "a", View: Agents };
