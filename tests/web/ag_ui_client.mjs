// A page that speaks AG-UI, without the page: the HttpAgent of @ag-ui/client. It is told one line of JSON ("do" and more), and answers what
// the page knows then. First: {"do": "begin", "root": the folder of node_modules, "url": the address, "thread": the conversation's id,
// "headers": what it sends to be known}.
import { createRequire } from 'node:module';
import { createInterface } from 'node:readline';
import { pathToFileURL } from 'node:url';

let page, about, abort;
let told = { events: [], states: [], problems: [], outcome: null };
const warned = (...words) => told.problems.push(words.map(String).join(' ').slice(0, 500));
console.warn = console.error = warned;
const pause = () => new Promise((resolve) => setTimeout(resolve, 10));

const listener = {
  onEvent: ({ event }) => { told.events.push(event.type); },
  onStateChanged: ({ state }) => { told.states.push(structuredClone(state)); },
  onRunFailed: ({ error }) => { warned(error); },
  onRunErrorEvent: ({ event }) => { warned(event.code, event.message); },
  onRunFinishedEvent: ({ event, outcome, pendingToolCallIds, interrupts }) => {
    told.outcome = { is: outcome, pending: pendingToolCallIds ?? null, interrupts: interrupts ?? null, result: event.result ?? null };
  },
};

async function begin(given) {
  about = { ...about, ...given };
  const entry = createRequire(`${about.root}/`).resolve('@ag-ui/client');
  const client = await import(pathToFileURL(entry).href);
  class Page extends client.HttpAgent {
    connect(input) { // the package leaves it to applications where they come back to
      const asked = () => fetch(`${about.url}/connect`, this.requestInit(input));
      return client.transformHttpEventStream(client.runHttpRequest(asked));
    }
  }
  page = new Page({ url: about.url, threadId: about.thread, headers: about.headers, initialState: about.state ?? {} });
  page.subscribe(listener);
}

const run = ({ tools, context, resume, forwardedProps }) => {
  abort = new AbortController();
  return page.runAgent({ tools, context, resume, forwardedProps, abortController: abort });
};
const say = (text) => { if (text !== undefined) page.addMessage({ id: crypto.randomUUID(), role: 'user', content: text }); };

const does = {
  begin,
  run: async (given) => { say(given.text); await run(given).catch(() => {}); },
  post: (given) => { say(given.text); run(given).catch(() => {}); }, // and does not wait for the end
  give: ({ call, content, error }) => { page.addMessage({ id: crypto.randomUUID(), role: 'tool', toolCallId: call, content, error }); },
  state: ({ state }) => { page.setState(state); },
  until: async ({ event }) => { while (!told.events.includes(event)) await pause(); },
  abort: async () => { page.abortRun(); while (page.isRunning) await pause(); },
  connect: () => page.connectAgent(),
  come: () => { page.connectAgent(); },
  finish: async () => { while (page.isRunning) await pause(); },
  look: () => {},
};

for await (const line of createInterface({ input: process.stdin })) {
  const asked = JSON.parse(line);
  try {
    await does[asked.do](asked);
    process.stdout.write(JSON.stringify({ ...told, messages: page.messages, state: page.state }) + '\n');
    if (asked.do !== 'post' && asked.do !== 'come') told = { events: [], states: [], problems: [], outcome: null };
  } catch (error) {
    process.stdout.write(JSON.stringify({ failed: String(error.stack ?? error) }) + '\n');
  }
}
process.exit();
