/* Go back: any place of the run with its variables, state and request; another reply, result, answer, prompt or setting goes on as a fork. */
import { html, useState, useEffect, useServer, api, at, go, plural, lasting, Problem, Broken, Value, announce, useMay } from "../../lib.js";
import { useDesk, Way, Places, Source, Variables, Messages, Request, Refusal } from "./desk.js";

const NAMES = { reply: "Reply of the model", result: "Result", answer: "Answer" };
const written = (value) => value === null || value === undefined ? "" : typeof value === "string" ? value : JSON.stringify(value, null, 2);

/* What was typed, as a fork takes it: a text where a text was given, else JSON where it is some. */
function taken(text, first) {
  if (typeof first === "string") return text;
  try { return JSON.parse(text); } catch { if (first === null) return text; throw new Error("This value must be JSON; the input is not."); }
}

/* The last effect that is kept so that the one of an address is done anew. */
function before(address) {
  const [path, number] = address.split("#");
  if (Number(number) > 0) return `${path}#${Number(number) - 1}`;
  return path ? address : -1;
}

function Fork({ id, look, agent }) {
  const { whole, place } = look;
  // What was typed belongs to a place and what is recorded there: the same place, told again, takes nothing back, and neither does
  // an effect that runs when somebody has begun to type.
  const recorded = written(whole.value), stands = `${place.address} ${recorded}`;
  const [typed, type] = useState({ stands, text: recorded });
  const text = typed.stands === stands ? typed.text : recorded;
  const [changes, change] = useState({});
  const [repeats, repeat] = useState(false);
  const [error, fail] = useState(null);
  const [busy, turn] = useState(false);
  const own = useServer(agent ? at("agents", agent) : null, 0).data;
  const agents = useServer("agents", 2).data;
  useEffect(() => fail(null), [stands]);
  async function run(asked) {
    fail(null);
    turn(true);
    try {
      const made = await api.post(at("runs", id, "fork"), { ...asked(), allow_repeat: repeats });
      announce("fork started");
      go(["runs", made.run_id, "compare"], { other: id });
    } catch (problem) { fail(problem); turn(false); }
  }
  const set = (name) => (event) => change({ ...changes, [name]: event.target.value });
  const given = () => Object.fromEntries(Object.entries(changes).filter(([, value]) => value !== "").map(([name, value]) => [name, ["temperature", "max_tokens"].includes(name) ? Number(value) : value]));
  const prompts = (own && own.prompts) || {};
  return html`<section class="card runon" aria-label="Continue from here">
    <h2 class="part">Continue from here</h2>
    ${whole.kind ? html`<form class="form" onSubmit=${(event) => { event.preventDefault(); run(() => ({ at: place.address, edit: taken(text, whole.value) })); }}>
      <label class="field"><span>${NAMES[whole.kind]} <em>at ${place.address}, instead of the recorded one</em></span><textarea class="mono" rows=${Math.min(12, Math.max(3, text.split("\n").length))} value=${text} onInput=${(event) => type({ stands, text: event.target.value })}></textarea>${whole.value === null ? html`<small>The recorded value is too long for this field or contains redacted text. Your input replaces it completely.</small>` : null}</label>
      <div class="answers"><button type="submit" class="primary" disabled=${busy}>Continue with this ${whole.kind}</button></div></form>` : html`<p class="dim">This result follows from effects of its own; go to one of them.</p>`}
    <details><summary>Another prompt, model or setting</summary><form class="form" onSubmit=${(event) => { event.preventDefault(); run(() => ({ at: before(place.address), changes: given() })); }}>
      <p class="dim">Replies before this place are kept; this effect and everything after it run again with the new prompt.</p>
      <label class="field"><span>System prompt</span><textarea rows="3" value=${changes.system_prompt ?? prompts.system ?? ""} onInput=${set("system_prompt")}></textarea></label>
      <label class="field"><span>Instructions</span><textarea rows="2" value=${changes.instructions_prompt ?? ""} placeholder=${prompts.instructions || ""} onInput=${set("instructions_prompt")}></textarea></label>
      <div class="pair"><label class="field"><span>Model</span><input type="text" value=${changes.model ?? ""} placeholder=${(own && own.model) || ""} onInput=${set("model")} /></label><label class="field"><span>Temperature</span><input type="number" min="0" max="2" step="any" value=${changes.temperature ?? ""} onInput=${set("temperature")} /></label></div>
      <label class="field"><span>Max. tokens of a reply</span><input type="number" min="1" step="1" value=${changes.max_tokens ?? ""} onInput=${set("max_tokens")} /></label>
      <div class="answers"><button type="submit" disabled=${busy || !Object.keys(given()).length}>Continue with these</button></div></form></details>
    <label class="field boolean"><span>Effects on the outside world after this place may happen again</span><input type="checkbox" checked=${repeats} onChange=${(event) => repeat(event.target.checked)} /></label>
    <p class="dim">A fork is a new run: ${agents && agents.script ? "the script answers" : "models are called"} and tools run, with the current code.</p>
    <${Broken} text=${agents && agents.broken} />    <${Problem} error=${error} /></section>`;
}

function Facts({ look }) {
  const { place } = look;
  return html`<dl class="facts"><div><dt>Asked</dt><dd>${place.asked}</dd></div><div><dt>Agent</dt><dd>${place.agent_id}</dd></div><div><dt>After</dt><dd>${lasting(place.at / 1000)}</dd></div><div><dt>In view</dt><dd>${plural(place.messages, "message")}</dd></div>${place.cost !== null ? html`<div><dt>Spent</dt><dd>$${place.cost}</dd></div>` : null}</dl>`;
}

function Back({ id, query, run }) {
  const may = useMay();
  const desk = useDesk(id, query, run && run.status), { state } = desk, look = state.good;
  return html`<${Refusal} error=${desk.error} /><${Way} desk=${desk} />
    <div class="desk"><${Places} desk=${desk} /><div class="scroll" aria-busy=${String(desk.busy)}>
      ${state.problem ? html`<p class="problem" role="status">${state.problem}</p>` : null}
      ${!look && desk.busy ? html`<p class="dim">Replaying the run…</p>` : null}
      ${look ? html`<${Facts} look=${look} />
        ${look.is_before ? html`<p class="note">This is the last place before the code diverges from the record, at ${look.differs_at}.</p>` : null}
        <div class="beside"><div><${Source} look=${look} /><${Variables} now=${look} />
          ${look.whole && look.whole.outcome.length ? html`<h2 class="part">Outcome</h2><pre class="prose">${look.whole.outcome.join("\n")}</pre>` : null}
          ${look.place.hooks.length ? html`<h2 class="part">Hooks</h2><ul>${look.place.hooks.map((hook) => html`<li><span class="mono">${hook.point} ${hook.hook}</span> ${hook.said}</li>`)}</ul>` : null}</div>
        <div>${look.whole ? html`${may("admin") ? html`<${Fork} id=${id} look=${look} agent=${run && run.agent} />` : null}
          ${look.whole.request ? html`<details open><summary>What the model saw</summary><${Request} request=${look.whole.request} /></details>` : null}
          <details><summary>State</summary><${Messages} messages=${look.whole.state.messages} left=${look.whole.state.left_out} /><h3 class="part">Context</h3><${Value} value=${look.whole.state.context} /><h3 class="part">Output</h3><pre class="prose">${look.whole.state.output}</pre><p class="dim">${look.whole.state.steps_remaining} steps remain</p></details>` : null}</div></div>` : null}
    </div></div>`;
}

export default { id: "back", title: "Go back", scope: "debug", View: Back };
