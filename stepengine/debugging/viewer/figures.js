"use strict";
/* Figures as text: counts, durations, money and shares. Also the class of a status. */
const figures = (() => {
  // The names of the counts in a usage, in their order.
  const BUCKETS = ["input", "output", "from cache", "to cache", "thinking"];
  // The statuses of success.
  const GOOD = new Set(["completed", "ok"]);

  const count = (n) => n === null || n === undefined ? "" : Math.round(n).toLocaleString("en-US");
  const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;

  function shortCount(n) {
    if (n === null || n === undefined) return "";
    if (n < 10000) return count(n);
    return n < 1e6 ? `${(n / 1000).toFixed(n < 1e5 ? 1 : 0)}k` : `${(n / 1e6).toFixed(n < 1e7 ? 2 : 1)}M`;
  }

  function duration(ms) {
    if (ms === null || ms === undefined) return "";
    if (ms < 1000) return `${Math.round(ms)} ms`;
    if (ms < 60000) return `${(ms / 1000).toFixed(1)} s`;
    const seconds = Math.round(ms / 1000);
    if (seconds < 3600) return `${Math.floor(seconds / 60)}m ${String(seconds % 60).padStart(2, "0")}s`;
    return `${Math.floor(seconds / 3600)}h ${String(Math.floor(seconds / 60) % 60).padStart(2, "0")}m`;
  }

  function money(text) {
    if (text === null || text === undefined) return "unknown";
    const value = Number(text);
    return value === 0 ? "$0" : value < 0.01 ? `$${value.toPrecision(2)}` : `$${value.toFixed(value < 10 ? 4 : 2)}`;
  }

  const inputTokens = (usage) => usage[0] + usage[2] + usage[3];
  const totalTokens = (usage) => usage.reduce((a, b) => a + b, 0);
  const share = (part, whole) => whole ? `${(100 * part / whole).toFixed(0)} %` : "";
  const statusClass = (status) => GOOD.has(status) ? "good" : /suspend|pending|under way|max_steps|truncated|skipped/.test(status) ? "ask" : "bad";

  return { BUCKETS, GOOD, count, plural, shortCount, duration, money, inputTokens, totalTokens, share, statusClass };
})();
