/*
 * What every view of the studio uses: nodes, addresses, the server, what it says, and small parts of pages.
 *
 * Texts reach the document as text only: htm and Preact make nodes, and nothing here makes HTML of a text.
 */
import { refused, token, withToken } from "./session.js";

export const { h, render, Fragment, createContext } = preact;
export const { useState, useEffect, useLayoutEffect, useRef, useMemo, useCallback, useReducer, useContext, useId } = preactHooks;
export const html = htm.bind(h);

// --- addresses: every state of the page has one, behind the # ----------------------------------------------------------

/* The address as parts and a query: #/runs/ID/watch?step=3 is { parts: ["runs", "ID", "watch"], query }. */
export function route() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?", 2);
  const parts = path.split("/").filter(Boolean).map((part) => { try { return decodeURIComponent(part); } catch { return part; } });
  return { parts, query: new URLSearchParams(query || "") };
}

/* The address of a state: to(["runs", id], { step: 3 }); what is null or "" is left out. */
export function to(parts, query = {}) {
  const asked = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== ""));
  const text = asked.toString();
  return `#/${parts.map(encodeURIComponent).join("/")}${text ? `?${text}` : ""}`;
}

export function go(parts, query) { location.hash = to(parts, query).slice(1); }

/* Put another query into the address without a new entry of the browser's history. */
export function amend(changes) {
  const { parts, query } = route();
  const next = { ...Object.fromEntries(query), ...changes };
  history.replaceState(null, "", to(parts, next));
  dispatchEvent(new Event("studio:amended"));
}

export function useRoute() {
  const [now, set] = useState(route);
  useEffect(() => {
    const change = () => set(route());
    addEventListener("hashchange", change);
    addEventListener("studio:amended", change);
    return () => { removeEventListener("hashchange", change); removeEventListener("studio:amended", change); };
  }, []);
  return now;
}

// --- the server ---------------------------------------------------------------------------------------------------------

/* What the server refused: its problem document. `kind` is the last part of its type. */
export class Refused extends Error {
  constructor(status, document) {
    super(document.detail || document.title || `the server answered ${status}`);
    this.status = status;
    this.kind = String(document.type || "").split(":").pop();
    this.document = document;
  }
}

/* Fetch a path with the token of the session, and without cookies; a session that the server does not know ends here. */
async function send(path, { headers, ...options }) {
  const used = token();
  const answer = await fetch(path, { headers: withToken(headers), credentials: "omit", cache: "no-store", ...options });
  if (answer.status === 401) refused(used);
  return answer;
}

async function asked(method, path, body, signal, headers = {}) {
  let answer;
  const sent = body === undefined ? { headers } : { body: JSON.stringify(body), headers: { ...headers, "content-type": "application/json" } };
  try {
    answer = await send(path, { method, signal, ...sent });
  } catch (error) {
    if (signal && signal.aborted) throw error;
    throw new Refused(0, { type: "urn:stepengine:problem:away", detail: "The server does not answer. This page reconnects automatically." });
  }
  const text = await answer.text();
  let read = null;
  try { read = text ? JSON.parse(text) : null; } catch { read = null; }
  if (!answer.ok) throw new Refused(answer.status, read || {});
  return { read, text };
}

/* Paths have no slash in front: the page may be mounted below any path. */
export const api = {
  get: async (path, { signal } = {}) => (await asked("GET", path, undefined, signal)).read,
  post: async (path, body = {}, { signal, headers } = {}) => (await asked("POST", path, body, signal, headers)).read,
  remove: async (path) => (await asked("DELETE", path)).read,
};

/* Save what a path gives as a file: a plain link would be asked for without the token. */
export async function download(path, name) {
  const answer = await send(path, {});
  if (!answer.ok) {
    let said = {};
    try { said = await answer.json(); } catch { said = {}; }
    throw new Refused(answer.status, said);
  }
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await answer.blob());
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

/* A path with its parts escaped: at("runs", id, "events"). */
export const at = (...parts) => parts.map(encodeURIComponent).join("/");

/*
 * What a path says, asked again every `seconds` while somebody looks at the page: { data, error, again }.
 * What says the same as before changes nothing, so nothing flickers. A path of null asks nothing.
 */
export function useServer(path, seconds = 0) {
  const [state, set] = useState({ path, data: undefined, error: null });
  const [turn, next] = useReducer((n) => n + 1, 0);
  useEffect(() => {
    if (path === null) return undefined;
    const gone = new AbortController();
    let last = null, timer = 0;
    async function look() {
      try {
        const { read, text } = await asked("GET", path, undefined, gone.signal);
        if (text !== last) set({ path, data: read, error: null });
        last = text;
      } catch (error) {
        if (gone.signal.aborted) return;
        last = null;
        set((before) => ({ path, data: before.path === path ? before.data : undefined, error }));
      }
      if (seconds && !gone.signal.aborted) timer = setTimeout(wait, seconds * 1000);
    }
    function wait() {
      if (document.hidden) addEventListener("visibilitychange", look, { once: true, signal: gone.signal });
      else look();
    }
    look();
    return () => { gone.abort(); clearTimeout(timer); };
  }, [path, seconds, turn]);
  const is = state.path === path;
  return { data: is ? state.data : undefined, error: is ? state.error : null, again: next };
}

/*
 * Follow server-sent events: take([{ id, type, data }, ...]) is called with all that came since the last frame, at most once a frame,
 * however many there are. It comes back by itself with the last id; `ended` is called when there is nothing more.
 * Gives a function that ends it.
 */
export function follow(path, take, { ended = () => {}, failed = () => {} } = {}) {
  const gone = new AbortController();
  let last = null, waiting = [], frame = 0;
  const flush = () => { frame = 0; const all = waiting; waiting = []; if (all.length && !gone.signal.aborted) take(all); };
  const soon = () => { if (!frame) frame = document.hidden ? setTimeout(flush, 250) : requestAnimationFrame(flush); };
  async function once() {
    const headers = { accept: "text/event-stream", ...(last === null ? {} : { "last-event-id": last }) };
    const answer = await send(path, { headers, signal: gone.signal });
    if (answer.status === 204) return true;
    if (!answer.ok) {
      let said = {};
      try { said = await answer.json(); } catch { said = {}; }
      const refused = new Refused(answer.status, said);
      refused.isFinal = answer.status < 500 && answer.status !== 429;
      throw refused;
    }
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return false;
      const pieces = (rest + value).split("\n\n");
      rest = pieces.pop();
      for (const piece of pieces) {
        const event = { id: null, type: "message", data: "" };
        for (const line of piece.split("\n")) {
          if (line.startsWith("id: ")) event.id = line.slice(4);
          else if (line.startsWith("event: ")) event.type = line.slice(7);
          else if (line.startsWith("data: ")) event.data += line.slice(6);
        }
        if (!event.data) continue;
        if (event.id !== null) last = event.id;
        event.data = JSON.parse(event.data);
        waiting.push(event);
      }
      if (waiting.length) soon();
    }
  }
  (async () => {
    for (let pause = 500; !gone.signal.aborted;) {
      try {
        if (await once()) { flush(); if (!gone.signal.aborted) ended(); return; }
        pause = 500;
      } catch (error) {
        if (gone.signal.aborted) return;
        failed(error);
        if (error.isFinal) return;
        pause = Math.min(pause * 2, 8000);
      }
      await new Promise((done) => setTimeout(done, pause));
    }
  })();
  return () => { gone.abort(); cancelAnimationFrame(frame); };
}

/* What the token of this session may do: may("run"). Nothing until the server has said it. */
export const May = createContext(() => false);
export const useMay = () => useContext(May);

// --- words and figures --------------------------------------------------------------------------------------------------

export const count = (n) => n === null || n === undefined ? "" : Math.round(n).toLocaleString("en-US");
export const plural = (n, word, many = `${word}s`) => `${count(n)} ${n === 1 ? word : many}`;

export function money(text) {
  if (text === null || text === undefined) return "";
  const value = Number(text);
  return value === 0 ? "$0" : value < 0.01 ? `$${value.toPrecision(2)}` : `$${value.toFixed(value < 10 ? 3 : 2)}`;
}

export function lasting(seconds) {
  if (seconds === null || seconds === undefined || !(seconds >= 0)) return "";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)}m ${String(Math.floor(seconds % 60)).padStart(2, "0")}s`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)}h ${String(Math.floor(seconds / 60) % 60).padStart(2, "0")}m`;
  return `${Math.floor(seconds / 86400)}d ${Math.floor(seconds / 3600) % 24}h`;
}

export function when(text) {
  if (!text) return "";
  const date = new Date(text), today = new Date();
  const clock = date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
  return date.toDateString() === today.toDateString() ? clock : `${date.getFullYear()}-${String(date.getMonth() + 1).padStart(2, "0")}-${String(date.getDate()).padStart(2, "0")} ${clock.slice(0, 5)}`;
}

export const shown = (value) => typeof value === "string" ? value : JSON.stringify(value, null, 2);
export const tone = (status) => status === "completed" ? "good" : ["running", "started"].includes(status) ? "live" : ["suspended", "max_steps", "truncated", "waits"].includes(status) ? "ask" : "bad";
const WORDS = { started: "starting", max_steps: "out of steps", suspended: "waiting", stranded: "stranded" };
export const word = (status) => WORDS[status] || status;

/* A number that stands for now, and changes every second. */
export function useNow(seconds = 1) {
  const [now, set] = useState(Date.now());
  useEffect(() => { const timer = setInterval(() => set(Date.now()), seconds * 1000); return () => clearInterval(timer); }, [seconds]);
  return now;
}

// --- small parts --------------------------------------------------------------------------------------------------------

export const Status = ({ status }) => html`<span class=${`state ${tone(status)}`}>${word(status)}</span>`;

/* Why the agents' files cannot be loaded as they are now. */
export const Broken = ({ text }) => text ? html`<p class="problem" role="status">${text}</p>` : null;

/* What went wrong, said where it happened. */
export const Problem = ({ error, children }) => error ? html`<p class="problem" role="alert">${error.message}${error.document && error.document.issues && error.document.issues.length > 1 ? html`<span>${error.document.issues.join(" · ")}</span>` : null}${children}</p>` : null;

export const Empty = ({ title, children }) => html`<div class="empty"><h2>${title}</h2><p>${children}</p></div>`;

/* The head of a view: its title, what it says, and what can be done. */
export const Head = ({ title, lead, children }) => html`<header class="head"><h1>${title}</h1>${lead ? html`<p class="dim">${lead}</p>` : null}<div class="tools">${children}</div></header>`;

/* A value of JSON, its members one below the other. */
export function Value({ value }) {
  if (value === null || value === undefined) return null;
  if (typeof value !== "object" || Array.isArray(value)) return html`<pre>${shown(value)}</pre>`;
  const names = Object.keys(value);
  if (!names.length) return html`<p class="dim">nothing</p>`;
  return html`<dl class="members">${names.slice(0, 200).map((name) => html`<dt>${name}</dt><dd><pre>${shown(value[name])}</pre></dd>`)}</dl>`;
}

/* A picture's bytes as base64, of a file that somebody chose. */
export async function base64Of(file) {
  const bytes = new Uint8Array(await file.arrayBuffer());
  let text = "";
  for (let from = 0; from < bytes.length; from += 32768) text += String.fromCharCode(...bytes.subarray(from, from + 32768));
  return btoa(text);
}

/* Say something to who does not see. */
export function announce(text) {
  const node = document.getElementById("announced");
  if (node) node.textContent = text;
}

/* Rows of one height of which those that are seen are made alone: items, row(item, index) -> node, height. */
export function Rows({ items, row, height, label, more, ...rest }) {
  const box = useRef(null);
  const [seen, set] = useState({ top: 0, room: 900 });
  useLayoutEffect(() => {
    const node = box.current;
    let frame = 0;
    const look = () => { frame = 0; set((before) => { const next = { top: node.scrollTop, room: node.clientHeight }; return before.top === next.top && before.room === next.room ? before : next; }); };
    const soon = () => { if (!frame) frame = requestAnimationFrame(look); };
    node.addEventListener("scroll", soon, { passive: true });
    const sizes = new ResizeObserver(soon);
    sizes.observe(node);
    look();
    return () => { node.removeEventListener("scroll", soon); sizes.disconnect(); cancelAnimationFrame(frame); };
  }, []);
  const first = Math.max(0, Math.floor(seen.top / height) - 6), last = Math.min(items.length, Math.ceil((seen.top + seen.room) / height) + 6);
  useEffect(() => { if (more && last >= items.length - 10) more(); });
  const made = [];
  for (let n = first; n < last; n++) made.push(row(items[n], n));
  return html`<div class="rows" ref=${box} role="list" aria-label=${label} tabindex="0" ...${rest}><div class="space" role="presentation" style=${{ height: `${items.length * height}px` }}><div role="presentation" style=${{ transform: `translateY(${first * height}px)` }}>${made}</div></div></div>`;
}
