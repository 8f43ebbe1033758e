// A page made with the AI SDK, without the page: the Chat of @ai-sdk/react. It is told one line of JSON ("do" and more), and answers what
// the page shows then. First: {"do": "begin", "root": the folder of node_modules, "version": 5, 6 or 7, "api": the address, "id": the chat's,
// "headers": what it sends to be known}.
import { createRequire } from 'node:module';
import { createInterface } from 'node:readline';
import { pathToFileURL } from 'node:url';

let about, chat, cut, coming, finished = 0;
const problems = [];
const load = async (from, name) => {
  const entry = createRequire(from).resolve(name);
  return [entry, await import(pathToFileURL(entry).href)];
};
const pause = () => new Promise((resolve) => setTimeout(resolve, 10));
const isTool = (part) => part.type === 'dynamic-tool' || part.type.startsWith('tool-');

async function fetched(url, options) { // as fetch, but its answer breaks off where cut() is called
  const response = await fetch(url, options);
  if (!response.body) return response;
  const through = new TransformStream({ start(controller) { cut = () => controller.error(new TypeError('network error')); } });
  response.body.pipeTo(through.writable).catch(() => {});
  return new Response(through.readable, { status: response.status, headers: response.headers });
}

async function begin(given) {
  const { root, version, api, id, messages, headers } = about = { ...about, ...given };
  const [entry, react] = await load(`${root}/`, `react${version}`);
  const [, ai] = await load(entry, 'ai');
  chat = new react.Chat({
    id, messages,
    transport: new ai.DefaultChatTransport({ api, headers, fetch: fetched }),
    sendAutomaticallyWhen: ai.lastAssistantMessageIsCompleteWithApprovalResponses,
    onError: (error) => problems.push(String(error)),
    onFinish: () => { finished += 1; },
  });
}

async function decide({ approved, reason, question }) {
  const open = chat.messages.flatMap((message) => message.parts).filter((part) => part.state === 'approval-requested');
  const before = finished;
  const asked = question ? open.filter((part) => part.approval.id === question) : open;
  await chat.addToolApprovalResponse({ id: asked[0].approval.id, approved, reason });
  if (open.length === 1) while (finished === before) await pause();
}

async function until({ state, text }) {
  const shows = (part) => (state ? isTool(part) && part.state === state : part.type === 'text' && part.text.includes(text));
  while (!chat.messages.some((message) => message.role === 'assistant' && message.parts.some(shows))) await pause();
}

const does = {
  begin, decide, until,
  send: ({ text, messageId }) => chat.sendMessage({ text, messageId }),
  post: ({ text }) => { chat.sendMessage({ text }); }, // and does not wait for the answer
  cut: async () => { const before = finished; cut(); while (finished === before) await pause(); },
  stop: () => chat.stop(),
  reload: async () => { await does.cut(); await begin({ messages: chat.messages }); },
  resume: () => chat.resumeStream(),
  come: () => { coming = chat.resumeStream(); },
  finish: () => coming,
  regenerate: () => chat.regenerate(),
  look: () => {},
};

for await (const line of createInterface({ input: process.stdin })) {
  const told = JSON.parse(line);
  try {
    await does[told.do](told);
    console.log(JSON.stringify({ messages: chat.messages, status: chat.status, problems: problems.splice(0) }));
  } catch (error) {
    console.log(JSON.stringify({ failed: String(error.stack ?? error) }));
  }
}
process.exit();
