/*
 * A desk: this page looks into a run under the agent's code as it is in its files. The server walks the run in processes that end with
 * this page, and tells by itself what is there after every save.
 */
import { html, useState, useEffect, useRef, useCallback, useServer, api, at, amend, follow, announce, plural, Rows } from "../../lib.js";

const PAUSE = 120;
const NOTHING = { first: "", saves: 0, desk: null, now: null, before: null, good: null, saved: [], seconds: 0, difference: null, problem: "", when: "" };

/* { places, index, go(index), step(count), state, error, busy }: the places of the run, and the selected one. With `jumps` a save selects the first changed place. */
export function useDesk(id, query, status, { jumps = false } = {}) {
  const listed = useServer(at("runs", id, "places"), 0);
  const [state, set] = useState(NOTHING);
  const [error, fail] = useState(null);
  const [busy, turn] = useState(true);
  const wanted = useRef(query.get("place") || "");
  const desk = useRef(null), last = useRef(0), timer = useRef(0);
  const take = useCallback((events) => {
    for (const { type, data } of events) {
      if (type === "desk") { desk.current = data.desk; fail(null); set((before) => ({ ...before, desk: data.desk })); }
      else if (type === "look") {
        turn(false);
        set((before) => ({ ...before, ...data, problem: data.now.problem, good: data.now.place ? data.now : before.good, first: data.saved.length ? changedFirst(data.now) : "", saves: before.saves + (data.saved.length ? 1 : 0), when: new Date().toLocaleTimeString([], { hourCycle: "h23" }) }));
        if (data.saved.length) announce(data.now.problem ? `saved: ${data.now.problem}` : data.difference && data.difference.length ? `saved: ${data.difference.length} differences here` : "saved: nothing differs here");
      } else { turn(false); set((before) => ({ ...before, problem: data.problem, saved: data.saved || [] })); }
    }
  }, []);
  useEffect(() => {
    desk.current = null;
    set(NOTHING);
    turn(true);
    return follow(`${at("runs", id, "edits")}?at=${encodeURIComponent(wanted.current)}`, take, { failed: (problem) => { turn(false); fail(problem); }, ended: () => turn(false) });
  }, [id]);
  useEffect(() => { if (status) listed.again(); }, [status]);
  const places = listed.data ? listed.data.places : [];
  const address = state.good && state.good.place ? state.good.place.address : "";
  const [picked, pick] = useState(null);
  const found = places.findIndex((each) => each.address === (picked === null ? address || wanted.current : picked));
  const index = found < 0 ? 0 : found;
  const go = useCallback((number) => {
    const place = places[Math.max(0, Math.min(number, places.length - 1))];
    if (!place) return;
    wanted.current = place.address;
    pick(place.address);
    amend({ place: place.address });
    clearTimeout(timer.current);
    timer.current = setTimeout(async () => {
      const turnOf = ++last.current;
      if (desk.current === null) return;
      turn(true);
      try {
        const found = await api.post(at("runs", id, "edits", desk.current), { at: place.address });
        // Who moves on before the answer is there wants the answer to the last move alone.
        if (turnOf === last.current) { fail(null); set((before) => ({ ...before, now: found.now, before: found.before, difference: null, problem: found.now.problem, good: found.now.place ? found.now : before.good })); }
      } catch (problem) { if (turnOf === last.current) fail(problem); }
      if (turnOf === last.current) turn(false);
    }, PAUSE);
  }, [places, id]);
  useEffect(() => {
    const first = jumps && state.first ? places.findIndex((each) => each.address === state.first) : -1;
    if (first >= 0 && first !== index) go(first);
  }, [state.saves]);
  const step = useCallback((count) => {
    const steps = places.map((each, number) => [each, number]).filter(([each]) => each.is_step).map(([, number]) => number);
    const next = count > 0 ? steps.find((number) => number > index) : steps.filter((number) => number < index).pop();
    go(next === undefined ? count > 0 ? places.length - 1 : 0 : next);
  }, [places, index, go]);
  useEffect(() => {
    const pressed = (event) => {
      if (event.ctrlKey || event.altKey || event.metaKey || /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName) || document.querySelector("dialog[open]")) return;
      const way = event.key === "ArrowLeft" ? -1 : event.key === "ArrowRight" ? 1 : 0;
      if (!way) return;
      event.preventDefault();
      if (event.shiftKey) step(way); else go(index + way);
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, [index, go, step]);
  return { places, index, go, step, state, error: error || listed.error, busy, agent: listed.data && listed.data.agent, steps: listed.data ? listed.data.steps : 0 };
}

/* The address of the first place that a save changed; "" for none, or when the page already shows the last place before it. */
function changedFirst(look) {
  if (look.problem || look.is_before && !look.changed.length) return "";
  return look.changed[0] || look.differs_at || "";
}

export const placeName = (place) => place ? `${place.step ? `step ${place.step} · ` : ""}${place.address} · ${place.name || place.type}` : "";

/* The way through the places: a slider, and steps on and back. */
export function Way({ desk }) {
  const { places, index, go, step } = desk, place = places[index];
  if (!places.length) return null;
  return html`<div class="way"><button type="button" onClick=${() => step(-1)} title="One step back (Shift ←)" aria-label="One step back">⇤</button><button type="button" onClick=${() => go(index - 1)} title="One effect back (←)" aria-label="One effect back">←</button>
    <input type="range" min="0" max=${places.length - 1} value=${index} aria-label="Place in the run" aria-valuetext=${placeName(place)} onInput=${(event) => go(Number(event.target.value))} />
    <button type="button" onClick=${() => go(index + 1)} title="One effect forward (→)" aria-label="One effect forward">→</button><button type="button" onClick=${() => step(1)} title="One step forward (Shift →)" aria-label="One step forward">⇥</button>
    <output class="mono">${placeName(place)}</output></div>`;
}

/* All places, one below the other; only those in sight are made. */
export function Places({ desk, marked = [] }) {
  const { places, index, go } = desk, marks = new Set(marked);
  return html`<nav class="places" aria-label="Places"><${Rows} items=${places} height=${30} label=${plural(places.length, "place")} row=${(place, number) => html`<div role="listitem" key=${place.address} class="d-place" style=${{ height: "30px" }}><button type="button" class=${place.is_step ? "quiet step" : "quiet"} aria-current=${number === index ? "step" : undefined} onClick=${() => go(number)}><span class="mono">${place.address}</span><span class="d-what">${place.name || place.type}</span>${marks.has(place.address) ? html`<small class="d-mark">request differs</small>` : null}</button></div>`} /></nav>`;
}

/* Lines of the author's source around the one that waits. */
export function Source({ look }) {
  const frame = look.place && look.place.frames[0];
  if (!frame) return null;
  const file = frame.file.split("/").pop();
  return html`<h2 class="part">Source</h2><figure class="d-code"><figcaption><span class="mono">${file}:${frame.line}</span> <span class="dim">${frame.function}</span></figcaption>
    <div class="source" tabindex="0" role="group" aria-label=${`${file}, waiting at line ${frame.line}`}>${look.lines.map(([number, text]) => html`<div class=${number === frame.line ? "here" : ""} aria-current=${number === frame.line ? "true" : undefined}><span>${number}</span><span>${text || " "}</span></div>`)}</div></figure>`;
}

export const localsOf = (look) => look && look.place && look.place.frames.length ? look.place.frames[0].locals : {};

/* Variables of the frame that waits; with what they were under the code before, what is different is marked. */
export function Variables({ now, before }) {
  const new_ = localsOf(now), old = localsOf(before), all = [...new Set([...Object.keys(new_), ...Object.keys(old)])];
  // The context of a run is long, hardly ever what somebody looks for, and mostly the first of them.
  const isContext = (name) => (new_[name] || old[name] || "").startsWith("StepContext(");
  const names = [...all.filter((name) => !isContext(name)), ...all.filter(isContext)];
  if (!names.length) return null;
  const sign = (name) => !(name in old) ? "new" : !(name in new_) ? "gone" : old[name] !== new_[name] ? "changed" : "";
  const row = (name) => html`<tr class=${before && sign(name) ? "d-other" : ""}><th scope="row" class="mono">${name}${before && sign(name) ? html`<small class="d-mark">${sign(name)}</small>` : null}</th>${before ? html`<td class="mono d-was">${name in old ? old[name] : "–"}</td>` : null}<td class="mono">${name in new_ ? new_[name] : "–"}</td></tr>`;
  return html`<h2 class="part">Variables</h2><div class="sheet" tabindex="0" role="group" aria-label="Variables"><table class="wide"><caption class="unseen">Variables of ${now.place ? now.place.frames[0].function : "the handler"}</caption><thead><tr><th scope="col">Variable</th>${before ? html`<th scope="col">Before the save</th>` : null}<th scope="col">${before ? "Now" : "Value"}</th></tr></thead><tbody>${names.map(row)}</tbody></table></div>`;
}

export const Messages = ({ messages, left }) => html`${left ? html`<p class="dim">${plural(left, "message")} before these</p>` : null}<ol class="d-said">${messages.map((message) => html`<li><b>${message.role}</b><pre class="prose">${message.text || " "}</pre></li>`)}</ol>`;

/* What a model is sent. */
export function Request({ request }) {
  return html`<p class="mono">${request.model}</p>${request.system ? html`<h3 class="part">System prompt</h3><pre class="prose">${request.system}</pre>` : null}<h3 class="part">Messages</h3><${Messages} messages=${request.messages} left=${request.left_out} />
    ${request.tools.length ? html`<details><summary>${plural(request.tools.length, "tool")}</summary><dl class="members">${request.tools.map((tool) => html`<dt class="mono">${tool.name}</dt><dd>${tool.description}</dd>`)}</dl></details>` : null}
    <details><summary>Settings</summary><pre class="prose">${request.settings}</pre></details>`;
}

/* What the page says where the server cannot look: it was not told how its engine is made again, or keeps others out. */
export function Refusal({ error }) {
  if (!error) return null;
  const text = error.kind === "not_found" || error.status === 405 ? "This server does not know how to reload its agents, so it cannot go back in runs. `stepengine studio` can." : error.message;
  return html`<p class="problem" role="alert">${text}</p>`;
}
