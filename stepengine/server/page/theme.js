/* Light, dark, or as the system has it. */
const THEMES = [undefined, "dark", "light"];

export function turnTheme() {
  const root = document.documentElement, next = THEMES[(THEMES.indexOf(root.dataset.theme) + 1) % 3];
  if (next) root.dataset.theme = next; else delete root.dataset.theme;
  try { if (next) localStorage.setItem("theme", next); else localStorage.removeItem("theme"); } catch { /* where nothing may be kept, it is not */ }
  dispatchEvent(new Event("studio:theme"));
}

export function restoreTheme() {
  try {
    const kept = localStorage.getItem("theme");
    if (kept === "dark" || kept === "light") document.documentElement.dataset.theme = kept;
  } catch { /* it is as the system has it */ }
}
