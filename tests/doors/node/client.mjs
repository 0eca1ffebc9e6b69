// A client of somebody else's making, led through everything by commands on standard input, one JSON array a line:
//   node client.mjs SDK MODE URL TOKEN       SDK: v1 or v2; MODE (v2 only): auto, legacy or a protocol version
// Each command is answered by one line of JSON: {"ok": …} or {"error": …}. What happens by itself is told as {"event": …}.
import { createInterface } from "node:readline";

const [sdk, mode, url, token] = process.argv.slice(2);
const say = (line) => process.stdout.write(JSON.stringify(line) + "\n");
const requestInit = { headers: { Authorization: `Bearer ${token}` } };
let answer = { action: "accept", content: { confirm: true } };
let client, transport, listening;

async function connect() {
  const info = { name: `foreign-${sdk}`, version: "1" };
  const capabilities = { elicitation: { form: {} } };
  const asked = (request) => (say({ event: "asked", message: request.params.message }), answer);
  const updated = (notice) => say({ event: "updated", uri: notice.params.uri });
  if (sdk === "v1") {
    const { Client } = await import("@modelcontextprotocol/sdk/client/index.js");
    const { StreamableHTTPClientTransport } = await import("@modelcontextprotocol/sdk/client/streamableHttp.js");
    const types = await import("@modelcontextprotocol/sdk/types.js");
    client = new Client(info, { capabilities });
    client.setRequestHandler(types.ElicitRequestSchema, asked);
    client.setNotificationHandler(types.ResourceUpdatedNotificationSchema, updated);
    transport = new StreamableHTTPClientTransport(new URL(url), { requestInit });
  } else {
    const { Client, StreamableHTTPClientTransport } = await import("@modelcontextprotocol/client");
    const versionNegotiation = { mode: mode === "auto" || mode === "legacy" ? mode : { pin: mode } };
    client = new Client(info, { capabilities, versionNegotiation });
    client.setRequestHandler("elicitation/create", asked);
    client.setNotificationHandler("notifications/resources/updated", updated);
    transport = new StreamableHTTPClientTransport(new URL(url), { requestInit });
  }
  client.onerror = (error) => say({ event: "error", message: String(error.message ?? error) });
  await client.connect(transport);
  return { server: client.getServerVersion()?.name, session: transport.sessionId ?? null };
}

const modern = () => transport.sessionId === undefined;
const acts = {
  connect,
  list: async () => (await client.listTools()).tools.map((tool) => tool.name),
  call: async (name, args, seconds = 60) => {
    const params = { name, arguments: args };
    const options = { onprogress: (progress) => say({ event: "progress", progress: progress.progress }), timeout: seconds * 1000 };
    return sdk === "v1" ? client.callTool(params, undefined, options) : client.callTool(params, options);
  },
  answer: async (next) => ((answer = next), "noted"),
  read: async (uri) => JSON.parse((await client.readResource({ uri })).contents[0].text),
  resources: async () => (await client.listResources()).resources.map((resource) => resource.uri),
  prompts: async () => (await client.listPrompts()).prompts.map((prompt) => prompt.name),
  prompt: async (name, args) => (await client.getPrompt({ name, arguments: args })).messages[0].content.text,
  complete: async (uri, name, value) =>
    (await client.complete({ ref: { type: "ref/resource", uri }, argument: { name, value } })).completion.values,
  subscribe: async (uri) => {
    if (sdk === "v2" && modern()) {
      listening = await client.listen({ resourceSubscriptions: [uri] });
      return "listening";
    }
    await client.subscribeResource({ uri });
    return "subscribed";
  },
  close: async () => (await listening?.close?.(), await client.close(), "closed"),
};

for await (const line of createInterface({ input: process.stdin })) {
  const [act, ...args] = JSON.parse(line);
  try {
    say({ ok: (await acts[act](...args)) ?? null });
  } catch (error) {
    say({ error: String(error.message ?? error), code: error.code ?? null });
  }
  if (act === "close") break;
}
process.exit(0);
