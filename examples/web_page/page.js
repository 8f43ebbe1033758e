// A page for one agent. It inserts the model's output as text, never as HTML.
const thread = crypto.randomUUID();
const log = document.getElementById("log");
const lines = {};

async function enter() {
  const code = location.hash.replace("#login=", "");
  if (!code) return;
  history.replaceState(null, "", location.pathname);
  const headers = { "content-type": "application/json" };
  const response = await fetch("/login", { method: "POST", headers, body: JSON.stringify({ code }) });
  if (response.ok) sessionStorage.setItem("token", (await response.json()).token);
}

const entered = enter();

function add(kind, text) {
  const line = document.createElement("p");
  line.className = kind;
  line.textContent = text;
  log.append(line);
  return line;
}

async function run(body) {
  const given = { threadId: thread, runId: crypto.randomUUID(), messages: [], ...body };
  await entered;
  const authorization = `Bearer ${sessionStorage.getItem("token")}`;
  const headers = { "content-type": "application/json", authorization };
  const response = await fetch("/ag-ui/painter", { method: "POST", headers, body: JSON.stringify(given) });
  if (!response.ok) return add("error", await response.text());
  let rest = "";
  for await (const bytes of response.body.pipeThrough(new TextDecoderStream())) {
    const events = (rest + bytes).split("\n\n");
    rest = events.pop();
    for (const event of events) show(JSON.parse(event.slice("data: ".length)));
  }
}

function show(event) {
  switch (event.type) {
    case "TEXT_MESSAGE_START": lines[event.messageId] = add("text", ""); break;
    case "TEXT_MESSAGE_CONTENT": lines[event.messageId].textContent += event.delta; break;
    case "TOOL_CALL_START": lines[event.toolCallId] = add("tool", event.toolCallName + " "); break;
    case "TOOL_CALL_ARGS": lines[event.toolCallId].textContent += event.delta; break;
    case "TOOL_CALL_RESULT": lines[event.toolCallId].textContent += " → " + event.content; break;
    case "RUN_ERROR": add("error", event.message); break;
    case "RUN_FINISHED": (event.outcome?.interrupts ?? []).forEach(ask); break;
  }
}

function ask(interrupt) {
  const { choices, details } = interrupt.metadata.stepengine;
  const line = add("question", interrupt.message + "\n" + JSON.stringify(details) + "\n");
  // This page offers no approvals of later calls.
  for (const { label, answer } of choices.filter(({ kind }) => kind !== "always")) {
    const button = document.createElement("button");
    button.textContent = label;
    button.onclick = () => {
      line.querySelectorAll("button").forEach((each) => each.remove());
      run({ resume: [{ interruptId: interrupt.id, status: "resolved", payload: answer }] });
    };
    line.append(button, " ");
  }
}

document.getElementById("form").onsubmit = (submit) => {
  submit.preventDefault();
  const text = document.getElementById("prompt").value || "Paint the door";
  add("user", text);
  run({ messages: [{ id: crypto.randomUUID(), role: "user", content: text }] });
};
