"use strict";
/* Show messages and their parts, and JSON values by their members. */
function makeMessages({ state, nodes, figures, payload, markdown }) {
  const { count } = figures;
  const { el, button, highlight, pre, placeholder, blockNode } = nodes;
  const { renderMarkdown } = markdown;
  const { text, json } = payload;

  /* Texts of people and models are Markdown. Texts of tools keep their columns. */
  function partNode(part, kind = "prose") {
    if ("text" in part) return kind === "prose" ? renderMarkdown(part.text) : pre(part.text, kind);
    if ("thinking" in part) return el("div", "", el("span", "tag", "thinking"), renderMarkdown(part.thinking || "(hidden by the provider)"));
    if ("refusal" in part) return el("div", "", el("span", "tag bad", "refusal"), renderMarkdown(part.refusal));
    if ("unreadable" in part) return el("div", "", el("span", "tag bad", `call of ${part.call} that could not be read: ${part.why}`), pre(part.unreadable));
    if ("call" in part) return el("div", "", el("span", "tag", `call ${part.call}`), membersNode(part.input));
    if ("json" in part) return typeof part.json === "string" ? pre(part.json) : membersNode(part.json);
    if ("error" in part) return el("div", "", el("span", "tag bad", part.error.type), pre(part.error.message));
    if ("media" in part) return mediaNode(part);
    return pre(json(part));
  }

  function mediaNode(part) {
    const box = el("div", "", el("p", "dim", part.media));
    const source = part.image === undefined ? "" : state.data.images[part.image];
    // The media type in the journal is not trusted: make_payload set this one from the first bytes.
    if (/^data:image\/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/=]+$/.test(source)) {
      const open = button("Show the picture", () => { const image = el("img", ""); image.alt = part.media; image.src = source; open.replaceWith(image); });
      box.append(open);
    }
    return box;
  }

  function membersNode(value) {
    if (value === null || typeof value !== "object" || Array.isArray(value)) return pre(typeof value === "string" ? value : json(value));
    const names = Object.keys(value);
    if (!names.length) return placeholder("{}");
    const list = el("dl", "members");
    appendMembers(list, names, (name) => {
      const each = value[name];
      return [el("dt", "", highlight(name)), el("dd", "", pre(typeof each === "string" ? each : json(each)))];
    });
    return list;
  }

  function appendMembers(list, names, make) {
    for (const name of names.slice(0, 200)) list.append(...make(name));
    if (names.length > 200) list.append(el("dt", "", "…"), el("dd", "", `${count(names.length - 200)} more members; the tab Raw has all`));
  }

  const partNodes = (number, kind) => number < 0 ? [placeholder("left out: too many messages")] : [].concat(text(number)).map((part) => typeof part === "object" && part !== null ? partNode(part, kind) : pre(String(part)));

  function messageNode(each, isNew) {
    const cap = [el("span", "name", each.role === "tool" ? `result of ${each.name}` : each.role)];
    if (isNew) cap.push(el("span", "tag", "new"));
    if (each.status) cap.push(el("span", "tag bad", each.status));
    if (each.tags) cap.push(el("span", "dim", each.tags.join(", ")));
    return blockNode(cap, partNodes(each.t, each.role === "tool" ? "" : "prose"), isNew ? "new" : "");
  }

  return { partNode, membersNode, partNodes, messageNode };
}
