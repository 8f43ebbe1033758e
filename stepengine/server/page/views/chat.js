/* Conversations: sessions as threads, text as it comes, thinking folded, pictures in and out. */
import { html, useState, useEffect, useRef, useMemo, useServer, api, at, to, go, when, plural, base64Of, follow, Head, Empty, Problem, Status, announce, shown, useMay } from "../lib.js";
import { followed } from "../mounted.js";
import { Card } from "../questions.js";
import { liveState, take } from "./run/watch.js";

const PICTURES = ["image/png", "image/jpeg", "image/gif", "image/webp"], MOST = 8, SHOWN = 20;

/* What the root agent said and did in a run, of the payload of its page: [{ kind, ... }]. */
export function saidIn(payload) {
  const made = [], text = (number) => payload.texts[number];
  for (const row of payload.steps) {
    if (row.path) continue;
    for (const part of row.reply === undefined ? [] : text(row.reply)) {
      if ("text" in part && part.text) made.push({ kind: "text", text: part.text });
      else if ("refusal" in part) made.push({ kind: "text", text: part.refusal });
      else if ("thinking" in part) made.push({ kind: "thinking", text: part.thinking || "(hidden by the provider)" });
      else if ("media" in part) made.push({ kind: "image", about: part.media, source: part.image === undefined ? null : payload.images[part.image] });
    }
    if (row.error !== undefined) made.push({ kind: "error", text: text(row.error).message });
    for (const call of row.calls) {
      if (call.kind === "ask") {
        const asked = text(call.input), answers = call.result === undefined ? [] : [].concat(text(call.result));
        if (call.at !== undefined) made.push({ kind: "asked", text: [].concat(asked).map((each) => each.text).join(" · "), answer: answers.map((each) => each.text).join(" · ") });
        continue;
      }
      const result = call.result === undefined ? [] : [].concat(text(call.result));
      made.push({ kind: "call", name: call.name, what: call.kind, status: call.status || (call.at === undefined ? "…" : "ok"), input: text(call.input) });
      for (const part of result) if (part && part.media) made.push({ kind: "image", about: part.media, source: part.image === undefined ? null : payload.images[part.image] });
    }
  }
  return made;
}

const isPicture = (source) => typeof source === "string" && /^data:image\/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/=]+$/.test(source);

function Said({ part }) {
  switch (part.kind) {
    case "text": return html`<div class="bubble"><pre class="prose">${part.text}</pre></div>`;
    case "thinking": return html`<details class="thinks"><summary>Thinking</summary><pre class="prose">${part.text}</pre></details>`;
    case "image": return isPicture(part.source) ? html`<figure><img src=${part.source} alt=${part.about} /></figure>` : html`<p class="dim">${part.about}</p>`;
    case "asked": return html`<p class="dim">${part.text} <b>${part.answer}</b></p>`;
    case "error": return html`<p class="problem">${part.text}</p>`;
    default: return html`<details class="did"><summary><span class="mono tool">${part.name}</span> <span class="dim">${part.status}</span></summary><pre>${shown(part.input)}</pre></details>`;
  }
}

/* A turn: what was said, and what the run made of it; of one under way also the text that comes. */
function Turn({ run, settled }) {
  const id = run.run_id, isLive = ["running", "started"].includes(run.status), waits = run.status === "suspended";
  const [payload, set] = useState(null), [live, show] = useState(null), [error, fail] = useState(null);
  const look = useServer(waits || isLive ? at("runs", id) : null, 1);
  useEffect(() => {
    const gone = new AbortController(), source = followed(at("runs", id, "view"));
    let timer = 0, end = () => {};
    const read = async () => { try { const found = await source.opened(); if (!gone.signal.aborted) set(found); } catch (problem) { fail(problem); } };
    read();
    if (isLive) {
      const state = liveState();
      end = follow(at("runs", id, "events"), (events) => {
        const before = state.news;
        take(state, events);
        const root = state.agents.get("");
        show(root ? { text: root.word === "writes" ? root.text : "", thinking: root.word === "thinks" ? root.thinking : "", word: root.word } : null);
        if (state.news !== before && !timer) timer = setTimeout(() => { timer = 0; read(); }, 250);
        if (state.isOver || events.some((event) => event.type === "run_finished" && !event.data.path)) settled();
      }, { ended: settled });
    }
    return () => { gone.abort(); clearTimeout(timer); end(); };
  }, [id, run.status]);
  const asked = payload ? payload.texts[payload.run.prompt] : run.details ? run.details.prompt : "";
  const pictures = payload ? payload.run.previous.slice(-1).filter((each) => each && each.role === "user").flatMap((each) => [].concat(payload.texts[each.t]).filter((part) => part && part.media)) : [];
  const said = payload ? saidIn(payload) : [];
  const last = [...said].reverse().find((part) => part.kind === "text");
  return html`<article class="turn">
    <div class="mine"><div class="bubble"><pre class="prose">${typeof asked === "string" ? asked : shown(asked)}</pre>${pictures.map((part) => html`<${Said} part=${{ kind: "image", about: part.media, source: part.image === undefined ? null : payload.images[part.image] }} />`)}</div></div>
    ${said.map((part, n) => html`<${Said} key=${n} part=${part} />`)}
    ${isLive && live && live.thinking ? html`<details class="thinks"><summary>Thinking…</summary><pre class="prose">${live.thinking}</pre></details>` : null}
    ${isLive && live && live.text && !(last && last.text.startsWith(live.text)) ? html`<div class="bubble coming"><pre class="prose">${live.text}</pre></div>` : null}
    ${look.data && look.data.questions.length ? look.data.questions.map((question) => html`<${Card} key=${question.id} question=${question} run=${look.data} headed=${false} answered=${() => { look.again(); settled(); }} />`) : null}
    <${Problem} error=${error} />
    <p class="under dim"><${Status} status=${run.status} />${isLive && live ? live.word : ""} <a href=${to(["runs", id])}>the run</a></p>
  </article>`;
}

function Composer({ agent, session, isBusy, sent }) {
  const [text, type] = useState(""), [pictures, choose] = useState([]), [error, fail] = useState(null), [busy, turn] = useState(false);
  async function add(files) {
    const good = [...files].filter((file) => PICTURES.includes(file.type)).slice(0, MOST);
    const made = await Promise.all(good.map(async (file) => ({ mime_type: file.type, data: await base64Of(file), name: file.name })));
    choose([...pictures, ...made].slice(0, MOST));
  }
  async function send(event) {
    event.preventDefault();
    if (!text.trim() && !pictures.length) return;
    turn(true);
    fail(null);
    try {
      await api.post("runs", { agent, prompt: text, session_id: session, turn: true, images: pictures.map(({ mime_type, data }) => ({ mime_type, data })) });
      type("");
      choose([]);
      announce("sent");
      sent();
    } catch (problem) { fail(problem); }
    turn(false);
  }
  return html`<form class="composer" onSubmit=${send}>
    <${Problem} error=${error} />
    ${pictures.length ? html`<p class="chosen">${pictures.map((each, n) => html`<span><img src=${`data:${each.mime_type};base64,${each.data}`} alt=${each.name} /><button type="button" aria-label=${`Leave ${each.name} out`} onClick=${() => choose(pictures.filter((_, k) => k !== n))}>×</button></span>`)}</p>` : null}
    <div class="line"><label class="field grow"><span class="unseen">Say something</span><textarea rows="2" value=${text} placeholder=${isBusy ? "The agent is working; you can type meanwhile" : "Say something"} onInput=${(event) => type(event.target.value)} onPaste=${(event) => { if (event.clipboardData && event.clipboardData.files.length) add(event.clipboardData.files); }} onKeyDown=${(event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event); }}></textarea></label>
    <label class="button file"><input type="file" accept=${PICTURES.join(",")} multiple onChange=${(event) => { add(event.target.files); event.target.value = ""; }} />Picture</label>
    <button type="submit" class="primary" disabled=${busy || isBusy || (!text.trim() && !pictures.length)}>Send</button></div>
  </form>`;
}

function Thread({ agent, session, owner }) {
  const runs = useServer(`runs?details=1&limit=${SHOWN}&session=${encodeURIComponent(session)}${owner ? `&owner=${encodeURIComponent(owner)}` : ""}`, 2);
  const all = runs.data ? [...runs.data.runs].reverse() : [], last = all[all.length - 1], box = useRef(null), stays = useRef(true);
  const isOpen = Boolean(last) && ["running", "started", "suspended"].includes(last.status), may = useMay();
  useEffect(() => {
    const node = box.current, grown = new ResizeObserver(() => { if (stays.current) node.scrollTop = node.scrollHeight; });
    grown.observe(node.firstElementChild);
    const look = () => { stays.current = node.scrollHeight - node.scrollTop - node.clientHeight < 60; };
    node.addEventListener("scroll", look, { passive: true });
    return () => { grown.disconnect(); node.removeEventListener("scroll", look); };
  }, []);
  return html`<${Head} title=${session} lead=${agent}><a class="button" href=${to(["chat"])}>All conversations</a><//>
    <${Problem} error=${runs.error} />
    <div class="scroll thread" ref=${box} tabindex="0" role="log" aria-label="Conversation"><div class="turns">${runs.data && runs.data.next ? html`<p class="dim">Turns before the last ${SHOWN} are in the list of <a href=${to(["runs"], { session })}>its runs</a>.</p>` : null}${all.map((run) => html`<${Turn} key=${run.run_id} run=${run} settled=${runs.again} />`)}${runs.data && !all.length ? html`<${Empty} title="No messages yet">Your messages go to <b>${agent}</b>.<//>` : null}</div></div>
    ${may("run") ? html`<${Composer} agent=${agent} session=${session} isBusy=${isOpen} sent=${runs.again} />` : null}`;
}

function Threads() {
  const found = useServer("sessions?limit=100", 3), agents = useServer("agents");
  const list = agents.data ? agents.data.agents : [], all = found.data ? found.data.sessions : [];
  const [agent, choose] = useState("");
  const named = () => `${new Date().toISOString().slice(0, 16).replace("T", " ")} ${Math.random().toString(36).slice(2, 5)}`;
  return html`<${Head} title="Conversations" lead=${found.data ? plural(all.length, "conversation") : "…"}>
      <label class="field inline"><span class="unseen">Agent</span><select value=${agent} onChange=${(event) => choose(event.target.value)}>${list.map((each) => html`<option value=${each.id}>${each.name}</option>`)}</select></label>
      <button type="button" class="primary" disabled=${!list.length} onClick=${() => go(["chat", agent || list[0].id, named()])}>New conversation</button><//>
    <${Problem} error=${found.error || agents.error} />
    <div class="scroll">${found.data && !all.length ? html`<${Empty} title="No conversations yet">Each turn of a conversation is a run that continues the last one.<//>` : html`<ul class="threads">${all.map((each) => html`<li><a class="card" href=${to(["chat", each.agent, each.session_id], { owner: each.owner })}><b>${each.session_id}</b><span>${each.agent}</span><${Status} status=${each.status} /><span class="dim">${plural(each.runs, "run")}, ${when(each.changed)}</span></a></li>`)}</ul>`}</div>`;
}

const Chat = ({ parts, query }) => parts.length > 1 ? html`<${Thread} key=${parts.join("/")} agent=${parts[0]} session=${parts[1]} owner=${query.get("owner")} />` : html`<${Threads} />`;

export default { id: "chat", title: "Conversations", key: "c", View: Chat };
