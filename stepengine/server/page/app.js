/*
 * The frame of the studio: which view an address shows, the way between them, keys, light and dark.
 *
 * A view is a file in views/ that is named in views/index.js.
 */
import { html, render, useEffect, useState, useRoute, useServer, go, to, api, May } from "./lib.js";
import { enter, leave, token } from "./session.js";
import { restoreTheme, turnTheme } from "./theme.js";
import { VIEWS } from "./views/index.js";

function Keys({ close }) {
  const rows = [["g, then a letter", "go to a view"], ...VIEWS.filter((view) => view.key).map((view) => [`g ${view.key}`, view.title]), ["/", "search"], ["t", "light, dark, as the system"], ["?", "these keys"], ["Esc", "close"]];
  return html`<dialog class="keys" aria-label="Keys" ref=${(node) => { if (node && !node.open) node.showModal(); }} onClose=${close}>
    <h2>Keys</h2><dl>${rows.map(([key, what]) => html`<dt><kbd>${key}</kbd></dt><dd>${what}</dd>`)}</dl>
    <button type="button" onClick=${close}>Close</button></dialog>`;
}

function useKeys(help) {
  useEffect(() => {
    let first = 0;
    const pressed = (event) => {
      if (event.ctrlKey || event.altKey || event.metaKey || event.defaultPrevented) return;
      if (/^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName) || document.querySelector("dialog[open]")) return;
      if (event.key === "g") { first = event.timeStamp; event.preventDefault(); return; }
      if (first && event.timeStamp - first < 1500) {
        first = 0;
        const view = VIEWS.find((each) => each.key === event.key);
        if (view) { event.preventDefault(); go([view.id]); return; }
      }
      // A run on the screen has keys of its own, these among them.
      if (document.querySelector(".run[data-ready]")) return;
      if (event.key === "?") { event.preventDefault(); help(true); }
      else if (event.key === "t") turnTheme();
      else if (event.key === "/") {
        const field = document.querySelector("main input[type=search]");
        if (field) { event.preventDefault(); field.focus(); }
      }
    };
    // Before the keys of a run: what follows a g is meant for the studio.
    addEventListener("keydown", pressed, { capture: true });
    return () => removeEventListener("keydown", pressed, { capture: true });
  }, []);
}

function Frame() {
  const { parts, query } = useRoute();
  const [helps, help] = useState(false);
  const open = useServer("questions?limit=100", 2);
  const served = useServer("agents", 30), script = served.data && served.data.script;
  const caller = useServer("caller", 30), scopes = caller.data ? caller.data.scopes : [];
  const may = (scope) => scopes.includes(scope) || scopes.includes("admin");
  useKeys(help);
  const view = VIEWS.find((each) => each.id === parts[0]) || VIEWS[0];
  const waiting = open.data ? open.data.questions.length : 0;
  useEffect(() => { document.title = `${waiting ? `(${waiting}) ` : ""}${view.title} · studio`; }, [view, waiting]);
  const out = async () => { try { await api.post("logout"); } catch { /* whoever is out is out */ } leave(); };
  return html`
    <a class="skip" href="#content" onClick=${(event) => { event.preventDefault(); document.getElementById("content").focus(); }}>Skip to the content</a>
    <nav class="side" aria-label="Studio">
      <a class="brand" href=${to(["runs"])} aria-label="stepengine studio"><img src="studio/icon.svg" alt="" width="22" height="22" /><span>stepengine</span></a>
      <ul>${VIEWS.filter((each) => each.nav !== false && (!each.scope || may(each.scope))).map((each) => html`<li><a href=${to([each.id])} aria-current=${each === view ? "page" : undefined} title=${`g ${each.key}`}>${each.title}${each.id === "inbox" && waiting ? html`<span class="badge" aria-label=${`${waiting} open`}>${waiting > 99 ? "99+" : waiting}</span>` : null}</a></li>`)}</ul>
      <div class="foot"><button type="button" class="quiet" onClick=${turnTheme} title="Light, dark, or system theme (t)">Theme</button><button type="button" class="quiet" onClick=${() => help(true)} title="Keys (?)">Keys</button><button type="button" class="quiet" onClick=${out}>Leave</button></div>
    </nav>
    <main id="content" tabindex="-1" class=${`view ${view.id}`}>
      ${open.error && open.error.status === 0 ? html`<p class="problem" role="status">${open.error.message}</p>` : null}
      ${script ? html`<p class="scripted" role="note">A script replaces the models here: <span class="mono">${script}</span>. No model is called.</p>` : null}
      <${May.Provider} value=${may}><${view.View} key=${view.id} parts=${parts.slice(1)} query=${query} inbox=${open} /><//>
    </main>
    ${helps ? html`<${Keys} close=${() => help(false)} />` : null}
    <p id="announced" class="unseen" role="status" aria-live="polite"></p>`;
}

/* What a browser without a session is shown: how its person logs in. */
function Door({ problem }) {
  return html`<main id="content" tabindex="-1" class="view door"><div class="empty"><h1>stepengine studio</h1>
    <p role="status">${problem || "This browser is not logged in."}</p>
    <p>Open the link that <code>stepengine studio</code> printed. It works once, in one browser, and expires after a minute.</p>
    <p>For a new link, run <code>stepengine studio --link</code> on the machine of the studio.</p></div></main>`;
}

function Studio({ problem }) {
  const [own, set] = useState(token());
  const [wrong, say] = useState(problem);
  useEffect(() => {
    const look = () => set(token());
    // A link that is opened in a tab which shows the studio already only changes what is behind the #.
    const opened = async () => { const failed = await enter(); say(failed); look(); };
    const names = [["studio:out", look], ["storage", look], ["hashchange", opened]];
    for (const [name, act] of names) addEventListener(name, act);
    return () => { for (const [name, act] of names) removeEventListener(name, act); };
  }, []);
  return own ? html`<${Frame} key=${own} />` : html`<${Door} problem=${wrong} />`;
}

restoreTheme();
const problem = await enter();
render(html`<${Studio} problem=${problem} />`, document.getElementById("studio"));
document.documentElement.dataset.ready = "yes";
