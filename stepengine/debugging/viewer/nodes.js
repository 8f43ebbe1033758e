"use strict";
/*
 * Make DOM nodes: elements, buttons, long texts with search hits marked, long lists in chunks, blocks. Texts of a run reach the
 * document as text only: every node is made by el() and filled through textContent or append().
 */
function makeNodes({ state, figures }) {
  const CHUNK = 50;   // the nodes that are appended at once
  const LONG = 6000;  // the characters of a text that are shown at once
  const MARKS = 100;  // the hits that are marked in one text
  const { count } = figures;

  function el(tag, name, ...inside) {
    const node = document.createElement(tag);
    if (name) node.className = name;
    for (const each of inside) if (each !== null && each !== undefined && each !== "") node.append(each);
    return node;
  }

  function button(text, action, name) {
    const node = el("button", name || "", text);
    node.type = "button";
    node.addEventListener("click", action);
    return node;
  }

  /* The text with the hits of the search marked, at most MARKS of them. */
  function highlight(text) {
    const made = document.createDocumentFragment();
    if (state.query.length < 2) { made.append(text); return made; }
    const low = text.toLowerCase();
    let from = 0;
    for (let n = 0; n < MARKS; n++) {
      const found = low.length === text.length ? low.indexOf(state.query, from) : -1;
      if (found < 0) break;
      made.append(text.slice(from, found), el("mark", "", text.slice(found, found + state.query.length)));
      from = found + state.query.length;
    }
    made.append(text.slice(from));
    return made;
  }

  function pre(text, name) {
    const node = el("pre", name || "");
    if (text.length <= LONG) { node.append(highlight(text)); return node; }
    const box = el("div", "");
    node.append(highlight(text.slice(0, LONG)));
    const more = button(`Show all ${count(text.length)} characters`, () => { node.replaceChildren(highlight(text)); more.remove(); }, "more");
    box.append(node, more);
    return box;
  }

  /* Append the first CHUNK nodes, and a button that appends the next ones. */
  function appendInChunks(parent, many, make) {
    let from = 0;
    const more = button("", add, "more");
    function add() {
      const next = many.slice(from, from + CHUNK).map((each, n) => make(each, from + n));
      from += next.length;
      more.remove();
      parent.append(...next);
      if (from < many.length) {
        more.textContent = `Show ${Math.min(CHUNK, many.length - from)} more of ${count(many.length - from)}`;
        parent.append(more);
      }
    }
    add();
  }

  const placeholder = (text) => el("p", "none", text);
  const heading = (text, ...more) => el("h3", "", text, ...more);

  function blockNode(cap, inner, name) {
    const box = el("div", `block ${name || ""}`, el("div", "cap", ...cap));
    for (const each of inner) box.append(el("div", "inner", each));
    return box;
  }

  function foldNode(title, make) {
    const node = el("details", "fold", el("summary", "", title));
    node.addEventListener("toggle", () => { if (node.open && node.children.length === 1) node.append(make()); });
    return node;
  }

  return { CHUNK, LONG, el, button, highlight, pre, appendInChunks, placeholder, heading, blockNode, foldNode };
}
