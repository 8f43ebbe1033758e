/*
 * The renderer of a run as a component. It is the one of `stepengine show --html`, mounted on an element of the studio: see runPage in
 * run.js, which joins the scripts in stepengine/debugging/viewer.
 */
import { html, useEffect, useRef, api, amend, route } from "./lib.js";
import { turnTheme } from "./theme.js";

/* Its step and tab stand in the query of the studio's own address. */
const address = {
  read: () => { const { query } = route(), kept = new URLSearchParams(); for (const name of ["step", "tab"]) if (query.get(name)) kept.set(name, query.get(name)); return kept.toString(); },
  write: (text) => amend(Object.fromEntries(new URLSearchParams(text))),
  changed: (tell, signal) => addEventListener("hashchange", tell, { signal }),
};

/* source: see runPage.mount. onPicked is told of the row that is shown whenever that is another one; onData of every new payload. */
export function RunPage({ source, onData, label, handle }) {
  const box = useRef(null);
  useEffect(() => {
    const root = document.createElement("section");
    root.className = "run loading";
    root.setAttribute("aria-label", label || "The run");
    root.append(document.getElementById("run-parts").content.cloneNode(true));
    // In a page of its own it is what the page is about; here it is a part.
    const main = root.querySelector("main"), parts = document.createElement("div");
    parts.className = main.className;
    parts.append(...main.childNodes);
    main.replaceWith(parts);
    box.current.replaceChildren(root);
    const mounted = runPage.mount(root, source, { address, commands: false, latest: true, theme: turnTheme, told: onData });
    if (handle) handle.current = mounted;
    const redraw = () => mounted.redraw();
    addEventListener("studio:theme", redraw);
    return () => { removeEventListener("studio:theme", redraw); if (handle) handle.current = null; mounted.destroy(); root.remove(); };
  }, [source]);
  return html`<div class="mount" ref=${box}></div>`;
}

const pause = (milliseconds, signal) => new Promise((done) => {
  const timer = setTimeout(done, milliseconds);
  if (signal) signal.addEventListener("abort", () => { clearTimeout(timer); done(); }, { once: true });
});

/*
 * A source that follows a run of the server at `path`: asked again when nudge() says that something came, at most eight times a
 * second however often that is said, and every few seconds without it.
 */
export function followed(path, { seconds = 4, lines = null } = {}) {
  let wake = null, isNews = false;
  return {
    ...(lines ? { lines: (signal) => api.get(lines, { signal }) } : {}),
    nudge() { isNews = true; if (wake) wake(); },
    async opened() {
      for (;;) {
        try {
          const found = await api.get(path);
          if (found) return found;
        } catch (error) {
          if (error.kind !== "away") throw error;
        }
        await pause(400);
      }
    },
    async next(after, signal) {
      if (!isNews) await Promise.race([pause(seconds * 1000, signal), new Promise((go) => { wake = go; })]);
      wake = null;
      await pause(120, signal);
      isNews = false;
      if (signal.aborted) return null;
      try {
        return await api.get(`${path}?after=${after}`, { signal }) || { after };
      } catch (error) {
        if (signal.aborted) return null;
        if (error.kind !== "away" && error.status !== 429 && error.status < 500) throw error;
        await pause(1000, signal);
        return { after };
      }
    },
  };
}
