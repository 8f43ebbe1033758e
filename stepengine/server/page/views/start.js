/* Start a run: a form of the agent's own schema. */
import { html, useState, useServer, api, to, go, Head, Empty, Problem, Broken, announce, useMay } from "../lib.js";

/* The fields of a schema of JSON that a form can have; what it cannot is typed as JSON. */
function fieldsOf(schema) {
  const properties = (schema && schema.properties) || {}, required = new Set((schema && schema.required) || []);
  return Object.entries(properties).map(([name, given]) => {
    const options = (given.anyOf || given.oneOf || []).filter((each) => each.type !== "null");
    const one = options.length === 1 ? { ...given, ...options[0] } : given;
    const kind = Array.isArray(one.enum) ? "enum" : one.type === "boolean" ? "boolean" : one.type === "integer" || one.type === "number" ? "number" : one.type === "string" ? "string" : "json";
    return { name, kind, schema: one, about: given.description || one.description || "", isNeeded: required.has(name), first: given.default };
  });
}

const written = (value, kind) => value === undefined || value === null ? "" : kind === "json" ? JSON.stringify(value, null, 2) : value;

/* What the fields say as JSON; raises an Error that names the field. */
function valuesOf(fields, typed) {
  const made = {};
  for (const field of fields) {
    const value = field.name in typed ? typed[field.name] : written(field.first, field.kind);
    if (field.kind === "boolean") { if (field.name in typed || field.first !== undefined) made[field.name] = Boolean(value); continue; }
    if (value === "" || value === undefined) { if (field.isNeeded && field.kind !== "string") throw new Error(`${field.name} is required`); if (field.isNeeded) made[field.name] = ""; continue; }
    if (field.kind === "number") { const number = Number(value); if (Number.isNaN(number)) throw new Error(`${field.name} must be a number`); made[field.name] = number; }
    else if (field.kind === "json") { try { made[field.name] = JSON.parse(value); } catch (error) { throw new Error(`${field.name} is not valid JSON: ${error.message}`); } }
    else if (field.kind === "enum") made[field.name] = field.schema.enum.find((each) => String(each) === String(value));
    else made[field.name] = value;
  }
  return made;
}

function Field({ field, value, change }) {
  const { name, kind, schema, about, isNeeded } = field;
  const label = html`<span>${schema.title && schema.title !== name ? schema.title : name}${isNeeded ? html`<em> required</em>` : null}</span>`;
  const input = kind === "enum" ? html`<select value=${String(value)} onChange=${(event) => change(event.target.value)} required=${isNeeded}>${isNeeded ? null : html`<option value=""></option>`}${schema.enum.map((each) => html`<option value=${String(each)}>${String(each)}</option>`)}</select>`
    : kind === "boolean" ? html`<input type="checkbox" checked=${Boolean(value)} onChange=${(event) => change(event.target.checked)} />`
    : kind === "number" ? html`<input type="number" step=${schema.type === "integer" ? 1 : "any"} min=${schema.minimum} max=${schema.maximum} value=${value} required=${isNeeded} onInput=${(event) => change(event.target.value)} />`
    : html`<textarea class=${kind === "json" ? "mono" : ""} rows=${kind === "json" ? 4 : String(value).length > 80 ? 4 : 1} value=${value} required=${isNeeded} spellcheck=${kind === "json" ? "false" : undefined} onInput=${(event) => change(event.target.value)}></textarea>`;
  return html`<label class=${`field ${kind}`}>${label}${input}${about ? html`<small>${about}</small>` : kind === "json" ? html`<small>JSON</small>` : null}</label>`;
}

export function Form({ agent, session, broken, script }) {
  const fields = fieldsOf(agent.params);
  const [typed, type] = useState({});
  const [prompt, say] = useState("");
  const [error, fail] = useState(null);
  const [busy, turn] = useState(false);
  const [steps, limit] = useState("");
  const [cost, afford] = useState("");
  const [model, choose] = useState(""), may = useMay();
  async function start(event) {
    event.preventDefault();
    fail(null);
    let params = null;
    try { params = fields.length ? valuesOf(fields, typed) : null; } catch (problem) { fail(problem); return; }
    const limits = { ...(steps ? { max_steps: Number(steps) } : {}), ...(cost ? { max_cost_usd: Number(cost) } : {}) };
    turn(true);
    try {
      const made = await api.post("runs", { agent: agent.id, prompt, params, ...(session ? { session_id: session } : {}), ...(Object.keys(limits).length ? { limits } : {}), ...(model.trim() ? { model: model.trim() } : {}) });
      announce("started");
      go(["runs", made.run_id]);
    } catch (problem) { fail(problem); turn(false); }
  }
  return html`<form class="card form" onSubmit=${start}>
    ${agent.description ? html`<p class="dim">${agent.description}</p>` : null}
    <label class="field"><span>Prompt</span><textarea rows="4" value=${prompt} placeholder=${agent.prompt || "What it should do"} onInput=${(event) => say(event.target.value)} onKeyDown=${(event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) start(event); }}></textarea></label>
    ${fields.map((field) => html`<${Field} key=${field.name} field=${field} value=${field.name in typed ? typed[field.name] : written(field.first, field.kind)} change=${(value) => type({ ...typed, [field.name]: value })} />`)}
    <details><summary>Model, limits and permissions</summary>${may("admin") ? html`<label class="field"><span>Model</span><input type="text" class="mono" maxlength="200" value=${model} placeholder=${agent.model || "provider/model"} autocomplete="off" spellcheck="false" onInput=${(event) => choose(event.target.value)} />${script ? html`<small>The script <span class="mono">${script}</span> answers in its place.</small>` : html`<small>For this run; default: the agent’s own.</small>`}</label>` : null}<div class="pair"><label class="field"><span>Steps at most</span><input type="number" min="1" step="1" value=${steps} onInput=${(event) => limit(event.target.value)} /></label><label class="field"><span>US dollars at most</span><input type="number" min="0.000001" step="any" value=${cost} onInput=${(event) => afford(event.target.value)} /></label></div>
    <p class="dim">The server’s own limits and permissions apply as well. ${agent.tools.length ? html`Its tools: ${agent.tools.map((name) => html`<span class="mono tool">${name}</span> `)}` : "It has no tools."} A tool call that the server's rules do not allow is denied, or waits for approval in the inbox.</p></details>
    <${Broken} text=${error && error.message === broken ? null : broken} />${agent.missing && !error ? html`<p class="problem" role="status">This agent cannot be started yet: ${agent.missing}</p>` : null}<${Problem} error=${error} />
    <div class="answers"><button type="submit" class="primary" disabled=${busy}>${busy ? "Starting…" : "Start"}</button></div>
  </form>`;
}

function Start({ parts }) {
  const agents = useServer("agents", 2), list = agents.data ? agents.data.agents : [];
  const chosen = list.find((each) => each.id === parts[0]) || list[0];
  return html`<${Head} title="Start a run" />
    <${Problem} error=${agents.error} />
    ${agents.data && !list.length ? html`<${Empty} title="There are no agents">This server was started without any.</${Empty}>` : null}
    ${chosen ? html`<div class="scroll"><div class="narrow">
      <label class="field"><span>Agent</span><select value=${chosen.id} onChange=${(event) => go(["start", event.target.value])}>${list.map((each) => html`<option value=${each.id}>${each.name === each.id ? each.id : `${each.name} (${each.id})`}</option>`)}</select></label>
      <${Form} key=${chosen.id} agent=${chosen} broken=${agents.data.broken} script=${agents.data.script} /></div></div>` : null}`;
}

export default { id: "start", title: "Start", key: "s", scope: "run", View: Start };
