// An editor made of the TypeScript SDK of the protocol: it takes the steps that a test names, and says what it saw.
import { spawn } from "node:child_process";
import { createRequire } from "node:module";
import { Readable, Writable } from "node:stream";
import { pathToFileURL } from "node:url";

const given = JSON.parse(await new Promise((done) => {
  let text = "";
  process.stdin.on("data", (piece) => (text += piece)).on("end", () => done(text));
}));
const require = createRequire(given.root + "/");
const sdk = await import(pathToFileURL(require.resolve(given.package)));
const seen = { results: [], updates: [], asked: [], forms: [], terminals: [], problems: [] };
const terminals = new Map();
console.error = (...words) => seen.problems.push(words.map(String).join(" "));

const agent = spawn(given.command[0], given.command.slice(1), { stdio: ["pipe", "pipe", "ignore"], env: given.env });
const stream = sdk.ndJsonStream(Writable.toWeb(agent.stdin), Readable.toWeb(agent.stdout));

const handlers = {
  "session/update": (params) => void seen.updates.push(params.update),
  "session/request_permission": async (params) => {
    seen.asked.push(params);
    const wanted = given.choose?.[seen.asked.length - 1] ?? given.otherwise ?? "allow_once";
    if (wanted === "wait") return await new Promise((done) => (release = () => done({ outcome: { outcome: "cancelled" } })));
    const option = params.options.find((one) => one.kind === wanted || one.name === wanted);
    return { outcome: option ? { outcome: "selected", optionId: option.optionId } : { outcome: "cancelled" } };
  },
  "elicitation/create": (params) => (seen.forms.push(params), given.form),
};
let release = () => {};

// Terminals of the editor: real processes, in an environment that has a variable of the editor's own.
const ended = (one) => ({ exitCode: one.exitCode, signal: one.signalCode });
Object.assign(handlers, {
  "terminal/create": (params) => {
    const env = { EDITOR_OWN: "yes", ...Object.fromEntries((params.env ?? []).map(({ name, value }) => [name, value])) };
    const process = spawn(params.command, params.args ?? [], { cwd: params.cwd, env });
    const id = `terminal-${terminals.size + 1}`;
    const made = { process, output: "", exit: new Promise((done) => process.on("exit", done).on("error", done)) };
    for (const stream of [process.stdout, process.stderr]) stream?.on("data", (piece) => (made.output += piece));
    terminals.set(id, made);
    seen.terminals.push({ id, command: params.command, args: params.args, cwd: params.cwd, ends: [] });
    return { terminalId: id };
  },
  "terminal/output": ({ terminalId }) => {
    const { process, output } = terminals.get(terminalId);
    return { output, truncated: false, exitStatus: process.exitCode === null && !process.signalCode ? null : ended(process) };
  },
  "terminal/wait_for_exit": async ({ terminalId }) => {
    const made = terminals.get(terminalId);
    await made.exit;
    return ended(made.process);
  },
  "terminal/kill": async ({ terminalId }) => {
    seen.terminals.find((one) => one.id === terminalId).ends.push("killed");
    terminals.get(terminalId).process.kill("SIGKILL");
    await terminals.get(terminalId).exit;
    return {};
  },
  "terminal/release": ({ terminalId }) => {
    seen.terminals.find((one) => one.id === terminalId).ends.push("released");
    terminals.get(terminalId).process.kill("SIGKILL");
    return {};
  },
});

const V1 = {
  initialize: "initialize", authenticate: "authenticate", "session/new": "newSession", "session/load": "loadSession",
  "session/list": "listSessions", "session/delete": "deleteSession", "session/resume": "resumeSession", "session/close": "closeSession",
  "session/set_mode": "setSessionMode", "session/set_config_option": "setSessionConfigOption", "session/prompt": "prompt",
  "session/cancel": "cancel",
};

async function connected() {
  if (sdk.ClientSideConnection) {
    const names = {
      "session/update": "sessionUpdate", "session/request_permission": "requestPermission", "elicitation/create": "createElicitation",
      "terminal/create": "createTerminal", "terminal/output": "terminalOutput", "terminal/wait_for_exit": "waitForTerminalExit",
      "terminal/kill": "killTerminal", "terminal/release": "releaseTerminal",
    };
    const client = Object.fromEntries(Object.entries(names).map(([method, name]) => [name, handlers[method]]));
    client.unstable_createElicitation = client.createElicitation;
    const connection = new sdk.ClientSideConnection(() => client, stream);
    return { request: (method, params) => connection[V1[method]](params), notify: (method, params) => connection[V1[method]](params) };
  }
  let app = sdk.client({ name: "editor" });
  for (const [method, handle] of Object.entries(handlers)) {
    const of = ({ params }) => handle(params);
    app = method === "session/update" ? app.onNotification(method, of) : app.onRequest(method, of);
  }
  const connection = app.connect(stream);
  const context = connection.agent;
  return { request: (...all) => context.request(...all), notify: (...all) => context.notify(...all) };
}

const peer = await connected();
const told = async (call) => {
  try {
    return (await call) ?? {};
  } catch (error) {
    return { error: { code: error.code, message: error.message } };
  }
};
let session = null;
let open = [];
const until = async (holds) => {
  while (!holds()) await new Promise((done) => setTimeout(done, 5));
};
for (const step of given.steps) {
  const params = JSON.parse(JSON.stringify(step.params ?? {}).replaceAll("$session", session ?? ""));
  if (step.until === "asked") await until(() => seen.asked.length >= step.count);
  else if (step.until === "terminals")
    await until(() => seen.updates.filter((one) => one.content?.[0]?.type === "terminal").length >= step.count);
  else if (step.until === "update") await until(() => seen.updates.some((one) => one.sessionUpdate === step.kind));
  else if (step.notify) await peer.notify(step.notify, params);
  else if (step.release) release();
  else if (step.wait) seen.results.push(...(await Promise.all(open.splice(0))));
  else if (step.given_up) {
    const control = new AbortController();
    open.push(told(peer.request(step.method, params, { cancellationSignal: control.signal })));
    await until(() => seen.asked.length > 0);
    control.abort();
  } else if (step.background) open.push(told(peer.request(step.method, params)));
  else {
    const result = await told(peer.request(step.method, params));
    session = result.sessionId ?? session;
    seen.results.push(result);
  }
}
agent.stdin.end();
await new Promise((done) => agent.on("exit", done));
process.stdout.write(JSON.stringify(seen), () => process.exit(0));
