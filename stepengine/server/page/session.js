/*
 * The token of this browser's session. Each request sends it in a header. A cookie would go to every server on this host.
 *
 * It is in the storage of this origin, which no other host and no other port can read, so that a link opens in another tab, too.
 */
const KEY = `stepengine ${new URL(".", location.href).pathname}`;
const LINK = /^#login=([\w-]+)$/;

export const token = () => localStorage.getItem(KEY) || "";

/* The headers of a request: those given, and the token. */
export function withToken(headers = {}) {
  const own = token();
  return own ? { ...headers, authorization: `Bearer ${own}` } : headers;
}

/* The server does not know `used` any more: forget it, unless another tab has logged in since, and show how to log in. */
export function refused(used) {
  if (token() === used) localStorage.removeItem(KEY);
  dispatchEvent(new Event("studio:out"));
}

export function leave() {
  localStorage.removeItem(KEY);
  dispatchEvent(new Event("studio:out"));
}

/* Exchange the code of a login link for a token, where the address has one; return why that failed, or "". */
export async function enter() {
  const found = LINK.exec(location.hash);
  if (!found) return "";
  // The code is good once. Neither the history nor a bookmark keeps it.
  history.replaceState(null, "", location.pathname + location.search);
  try {
    const answer = await fetch("login", { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ code: found[1] }), credentials: "omit", cache: "no-store" });
    const said = await answer.json();
    if (!answer.ok) return said.detail || "This link cannot be used.";
    localStorage.setItem(KEY, said.token);
    return "";
  } catch {
    return "The server does not answer.";
  }
}
