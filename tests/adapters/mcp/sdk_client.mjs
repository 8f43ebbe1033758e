// A client of @modelcontextprotocol/sdk: what it is shown and answered, as JSON on standard output.
//     node sdk_client.mjs FOLDER ANSWER COMMAND...     node sdk_client.mjs FOLDER ANSWER URL     ANSWER is "" for no elicitation
import { createRequire } from "node:module";
import path from "node:path";

const [folder, answer, first, ...rest] = process.argv.slice(2);
const require = createRequire(path.join(path.resolve(folder), "here.js"));
const { Client } = require("@modelcontextprotocol/sdk/client/index.js");
const { StdioClientTransport } = require("@modelcontextprotocol/sdk/client/stdio.js");
const { StreamableHTTPClientTransport } = require("@modelcontextprotocol/sdk/client/streamableHttp.js");
const { ElicitRequestSchema } = require("@modelcontextprotocol/sdk/types.js");

const asked = [];
const client = new Client(
  { name: "contract", version: "1.0.0" },
  { capabilities: answer ? { elicitation: {} } : {} },
);
if (answer)
  client.setRequestHandler(ElicitRequestSchema, async (request) => {
    asked.push(request.params.message);
    return { action: "accept", content: { answer } };
  });
const transport = first.startsWith("http")
  ? new StreamableHTTPClientTransport(new URL(first))
  : new StdioClientTransport({ command: first, args: rest, env: process.env });
await client.connect(transport);
const { tools } = await client.listTools();
const told = [];
const result = await client.callTool({ name: "order_taker", arguments: { prompt: "shoes" } }, undefined, {
  onprogress: (one) => told.push(one.message),
});
console.log(
  JSON.stringify({
    server: client.getServerVersion(),
    tools: tools.map((one) => one.name),
    asked,
    told,
    texts: result.content.map((one) => one.text),
    structured: result.structuredContent ?? null,
  }),
);
await client.close();
