/* Judge one run: what a change does to it, which step lost it, and a test of it. */
import { html, useState, to, Problem } from "../../lib.js";
import { useJob, Job, Impact, Lines } from "../../jobs.js";

function Ask({ title, about, children, go, job, result, name, isReady = true }) {
  return html`<section class="card form" aria-label=${title}><h2 class="part">${title}</h2><p class="dim">${about}</p><form class="form" onSubmit=${(event) => { event.preventDefault(); go(); }}>${children}<div class="answers"><button type="submit" disabled=${!isReady}>${name}</button></div></form><${Job} it=${job} result=${result} /></section>`;
}

function Judge({ id }) {
  const impact = useJob(), blame = useJob(), pin = useJob();
  const [samples, count] = useState(3);
  const [check, say] = useState("");
  const [called, name] = useState("");
  const link = (run) => html`<a href=${to(["runs", run])}>${run.slice(0, 8)}</a>`;
  return html`<div class="scroll"><div class="cards">
    <${Ask} title="Impact" about="How the agent's current file affects this run: its first difference, and what models do from there on." go=${() => impact.start({ kind: "impact", runs: [id], samples })} job=${impact} name="Look" result=${(made) => html`<${Impact} result=${made} link=${link} />`}>
      <label class="field inline"><span>Samples</span><input type="number" min="1" max="50" value=${samples} onInput=${(event) => count(Number(event.target.value) || 1)} /></label></${Ask}>
    <section class="card form" aria-label="What it had to do"><label class="field"><span>Condition for success of this run</span><input type="text" class="mono" value=${check} placeholder="output == 42" onInput=${(event) => say(event.target.value)} /><small>An expression over output, text, status, tools, steps, cost, error and result. Blame and pin need it.</small></label></section>
    <${Ask} title="Blame" about="Continues the run from each step: the step after which it mostly fails is to blame. Needs the code that the run was recorded with." go=${() => blame.start({ kind: "blame", runs: [id], check, samples })} job=${blame} name="Find the step" isReady=${check.trim() !== ""} result=${(made) => html`<p><b>${made.why}</b></p>${made.blamed ? html`<p><a href=${to(["runs", id, "back"], { place: made.blamed.address })}>Go back to ${made.blamed.address}</a></p>` : null}<${Lines} lines=${made.lines} />`} />
    <${Ask} title="Pin" about="Writes a test that fails until the agent is fixed, with this run as its data. No model is called." go=${() => pin.start({ kind: "pin", runs: [id], check, name: called })} job=${pin} name="Write the test" isReady=${check.trim() !== ""} result=${(made) => html`<p>Written: <span class="mono">${made.file}</span> and <span class="mono">${made.journal}</span></p><${Lines} lines=${made.lines} />`}>
      <label class="field inline"><span>Name</span><input type="text" maxlength="60" value=${called} placeholder=${id.slice(0, 12)} onInput=${(event) => name(event.target.value)} /></label></${Ask}>
  </div></div>`;
}

export default { id: "judge", title: "Judge", scope: "admin", View: Judge };
