"use strict";
/*
 * Render a subset of Markdown: headings, paragraphs, lists, code and emphasis. There are no links, pictures or HTML, through which
 * text could load something or leave the page; they stay text. A line break stays one, since models mean it.
 */
function makeMarkdown({ state, nodes }) {
  const PROSE = 20000;  // the length up to which a text is formatted
  const DEEP = 8;       // the depth of lists in lists, and of emphasis in emphasis
  const { el, highlight, pre } = nodes;

  /* Formatted text. It stays source where the reader wants that, where it is very long, and where it has no formatting. */
  function renderMarkdown(text) {
    if (state.asWritten || text.length > PROSE) return pre(text, "prose");
    const made = renderBlocks(text.split("\n"));
    if (!made.querySelector("ul, ol, pre, code, em, strong, .title")) return pre(text, "prose");
    // A hit that includes signs of Markdown cannot be marked in formatted text, so the source is shown.
    if (state.query.length > 1 && text.toLowerCase().includes(state.query) && !made.querySelector("mark")) return pre(text, "prose");
    return made;
  }

  const FENCE = /^ {0,3}(```+|~~~+)/, TITLE = /^ {0,3}#{1,6} +(?=\S)/, ITEM = /^( *)([-*+]|\d{1,9}[.)]) +(?=\S)/;

  function renderBlocks(lines) {
    const box = el("div", "md");
    let lists = [], run = [];
    const inside = () => lists.length ? lists[lists.length - 1].item : box;
    function ended() {
      if (run.length) inside().append(el("p", "", renderSpans(run.join("\n"))));
      run = [];
    }
    for (let n = 0; n < lines.length; n++) {
      const line = lines[n], fence = FENCE.exec(line), item = ITEM.exec(line), indent = line.length - line.trimStart().length;
      if (line.trim() && !item && lists.length && (indent === 0 && (!run.length || fence || TITLE.test(line)))) { ended(); lists = []; }
      if (fence) {
        ended();
        const mark = fence[1], body = [];
        for (n++; n < lines.length && !(lines[n].trim().startsWith(mark) && !lines[n].trim().slice(mark.length).replaceAll(mark[0], "")); n++) body.push(lines[n]);
        inside().append(pre(body.join("\n"), "code"));
      } else if (line.startsWith("|")) {
        // Tables keep their columns.
        ended();
        const body = [];
        for (; n < lines.length && lines[n].startsWith("|"); n++) body.push(lines[n]);
        n--;
        inside().append(pre(body.join("\n"), "code"));
      } else if (item) {
        ended();
        startItem(box, lists, item);
        run.push(line.slice(item[0].length));
      } else if (!line.trim()) ended();
      else if (TITLE.test(line)) {
        ended();
        inside().append(el("p", "title", renderSpans(line.replace(TITLE, ""))));
      } else run.push(lists.length ? line.trimStart() : line);
    }
    ended();
    return box;
  }

  /* Start an item in the list of its indent, and close deeper lists. */
  function startItem(box, lists, [, indent, sign]) {
    const ordered = /\d/.test(sign), deep = indent.length;
    while (lists.length && (lists[lists.length - 1].deep > deep + 1 || lists.length > DEEP)) lists.pop();
    const last = lists[lists.length - 1];
    if (!last || deep > last.deep + 1 || last.ordered !== ordered) {
      if (last && deep <= last.deep + 1) lists.pop();
      const list = el(ordered ? "ol" : "ul", "");
      if (ordered && parseInt(sign, 10) !== 1) list.start = parseInt(sign, 10);
      (lists.length ? lists[lists.length - 1].item : box).append(list);
      lists.push({ list, deep, ordered, item: null });
    }
    const own = lists[lists.length - 1];
    own.item = el("li", "");
    own.list.append(own.item);
  }

  const SPANS = /\\[!-/:-@[-`{-~]|`+|\*{1,3}|_{1,3}/g;

  /* Render code and emphasis in one pass. A sign without a partner stays text. */
  function renderSpans(text) {
    const top = { node: document.createDocumentFragment(), sign: "" }, open = [top], closed = lastBackticks(text);
    let from = 0, plain = "";
    const add = (node) => open[open.length - 1].node.append(node);
    const flush = () => { if (plain) add(highlight(plain)); plain = ""; };
    SPANS.lastIndex = 0;
    for (let found; (found = SPANS.exec(text));) {
      const sign = found[0], at = found.index, after = at + sign.length;
      plain += text.slice(from, at);
      from = after;
      if (sign[0] === "\\") plain += sign[1];
      else if (sign[0] === "`") {
        const end = closed.get(sign.length) > at ? findClosing(text, sign, after) : -1;
        if (end < 0) { plain += sign; continue; }
        flush();
        add(el("code", "", highlight(text.slice(after, end).replace(/^ (?=.*\S)(.*) $/s, "$1"))));
        from = SPANS.lastIndex = end + sign.length;
      } else {
        const before = text[at - 1] || " ", next = text[after] || " ", inWord = sign[0] === "_" || sign.length > 2;
        const partner = /\s/.test(before) || (inWord && /\w/.test(next)) ? -1 : open.findLastIndex((each) => each.sign === sign);
        flush();
        if (partner > 0) {
          for (const each of open.splice(partner + 1)) open[partner].node.append(each.sign, ...each.node.childNodes);
          const { node } = open.pop();
          const inner = el(sign.length === 1 ? "em" : "strong", "", ...node.childNodes);
          add(sign.length === 3 ? el("em", "", inner) : inner);
        } else if (/\s/.test(next) || (inWord && /\w/.test(before)) || open.length > DEEP) plain += sign;
        else open.push({ node: document.createDocumentFragment(), sign });
      }
    }
    plain += text.slice(from);
    flush();
    for (const each of open.splice(1)) top.node.append(each.sign, ...each.node.childNodes);
    return top.node;
  }

  /* The position of the last run of backticks by its length, so that no unclosed run is searched for to the end of the text. */
  function lastBackticks(text) {
    const known = new Map();
    for (const found of text.matchAll(/`+/g)) known.set(found[0].length, found.index);
    return known;
  }

  function findClosing(text, sign, from) {
    const runs = /`+/g;
    runs.lastIndex = from;
    for (let found; (found = runs.exec(text));) if (found[0].length === sign.length) return found.index;
    return -1;
  }

  return { renderMarkdown };
}
