// A client of @modelcontextprotocol/client (version 2): what it is shown and answered, as JSON on standard output.
//     node sdk2_client.mjs FOLDER MODE ANSWER COMMAND... or URL     MODE is auto or legacy, ANSWER "" for no elicitation
import { createRequire } from "node:module";
import path from "node:path";

const [folder, mode, answer, first, ...rest] = process.argv.slice(2);
const require = createRequire(path.join(path.resolve(folder), "here.js"));
const { Client, StreamableHTTPClientTransport } = require("@modelcontextprotocol/client");
const { StdioClientTransport } = require("@modelcontextprotocol/client/stdio");

const asked = [];
const client = new Client(
  { name: "contract", version: "1.0.0" },
  { capabilities: answer ? { elicitation: {} } : {}, versionNegotiation: { mode } },
);
if (answer)
  client.setRequestHandler("elicitation/create", async (request) => {
    asked.push(request.params.message);
    return { action: "accept", content: { answer } };
  });
const transport = first.startsWith("http")
  ? new StreamableHTTPClientTransport(new URL(first))
  : new StdioClientTransport({ command: first, args: rest, env: process.env });
await client.connect(transport);
const { tools } = await client.listTools();
const result = await client.callTool({ name: "order_taker", arguments: { prompt: "shoes" } });
console.log(
  JSON.stringify({
    server: client.getServerVersion(),
    protocol: client.getNegotiatedProtocolVersion(),
    tools: tools.map((one) => one.name),
    asked,
    texts: result.content.map((one) => one.text),
    structured: result.structuredContent ?? null,
  }),
);
await client.close();
