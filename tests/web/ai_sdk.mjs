// Reads an answer of ours as a page made with the AI SDK does, and prints the message that it comes to, or why it does not.
// Standard input: {"root": the folder whose node_modules has it, "package": its name there, "body": the answer, "message": the page's last message or null}.
import { createRequire } from 'node:module';
import { pathToFileURL } from 'node:url';
import { text } from 'node:stream/consumers';

const given = JSON.parse(await text(process.stdin));
const entry = createRequire(given.root + '/').resolve(given.package);
const { DefaultChatTransport, readUIMessageStream } = await import(pathToFileURL(entry).href);
const headers = { 'content-type': 'text/event-stream', 'x-vercel-ai-ui-message-stream': 'v1' };
const transport = new DefaultChatTransport({ fetch: async () => new Response(given.body, { headers }) });
const problems = [];
let message = given.message;
try {
  const stream = await transport.sendMessages({
    trigger: 'submit-message', chatId: 'c', messageId: undefined, messages: message ? [message] : [], abortSignal: undefined,
  });
  const onError = (error) => problems.push(String(error));
  for await (const read of readUIMessageStream({ message: message ?? undefined, stream, onError })) message = read;
} catch (error) {
  problems.push(String(error));
}
console.log(JSON.stringify({ message, problems }));
