// A server of @modelcontextprotocol/server (version 2), on standard input and output: node sdk_server.mjs FOLDER
import { createRequire } from "node:module";
import path from "node:path";

const require = createRequire(path.join(path.resolve(process.argv[2]), "here.js"));
const { McpServer, acceptedContent, fromJsonSchema, inputRequired } = require("@modelcontextprotocol/server");
const { serveStdio } = require("@modelcontextprotocol/server/stdio");

const what = fromJsonSchema({ type: "object", properties: { what: { type: "string" } }, required: ["what"] });
const size = fromJsonSchema({
  type: "object",
  properties: { size: { type: "string", oneOf: [{ const: "s", title: "Small" }, { const: "l", title: "Large" }], default: "s" } },
  required: ["size"],
});
const said = (text) => ({ content: [{ type: "text", text }] });

serveStdio(() => {
  const server = new McpServer({ name: "sdk", version: "1.0.0" });
  server.registerTool("order", { description: "Order something.", inputSchema: what }, async (given, ctx) => {
    const answer = acceptedContent(ctx.mcpReq.inputResponses, "size", size);
    if (answer === undefined)
      return inputRequired({
        inputRequests: { size: inputRequired.elicit({ message: `Which size of ${given.what}?`, requestedSchema: size }) },
      });
    return said(`${given.what} in ${answer.size}`);
  });
  server.registerTool("roots", { description: "Name the roots." }, async (ctx) => {
    const roots = ctx.mcpReq.inputResponses?.roots;
    if (roots === undefined) return inputRequired({ inputRequests: { roots: inputRequired.listRoots() } });
    return said(JSON.stringify(roots));
  });
  server.registerTool("grow", { description: "Have one tool more." }, async () => {
    server.registerTool("grown", { description: "Be new." }, async () => said("new"));
    return said("grew");
  });
  return server;
});
