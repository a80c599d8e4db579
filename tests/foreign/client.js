// Talks to the front with grpc-js, from the .proto files alone: `node client.js PROTO_ROOT TARGET`.
// Prints one JSON object: what it streamed, how its cancelled call ended, and the details of an error.
"use strict";
const path = require("path");
const { createRequire } = require("module");

const [protoRoot, target] = process.argv.slice(2);
const load = createRequire(path.join(process.cwd(), "package.json"));
const grpc = load("@grpc/grpc-js");
const protoLoader = load("@grpc/proto-loader");

const definition = protoLoader.loadSync("downcore/v1/generation.proto", {
  includeDirs: [protoRoot],
  keepCase: true,
  longs: String,
  enums: String,
  defaults: true,
  oneofs: true,
});
const service = grpc.loadPackageDefinition(definition).downcore.v1.GenerationService;
const client = new service(target, grpc.credentials.createInsecure());

function stream(request) {
  return new Promise((resolve) => {
    const events = [];
    const call = client.Generate(request);
    call.on("data", (response) => events.push(response));
    call.on("error", (error) => resolve({ events, code: error.code, metadata: error.metadata }));
    call.on("end", () => resolve({ events, code: 0 }));
  });
}

function cancelled(request) {
  return new Promise((resolve) => {
    let count = 0;
    const call = client.Generate(request);
    call.on("data", () => {
      count += 1;
      if (count === 5) call.cancel();
    });
    call.on("error", (error) => resolve({ code: error.code, count }));
    call.on("end", () => resolve({ code: 0, count }));
  });
}

async function main() {
  const whole = await stream({ text: "grüße", n: 2, stopping: { max_tokens: 7 } });
  const cut = await cancelled({ request_id: "cut", text: "hello", stopping: { max_tokens: 50000 } });
  const bad = await stream({ text: "x", n: 9 });
  const details = bad.metadata.get("grpc-status-details-bin")[0];
  const text = whole.events.filter((e) => e.chunk && e.chunk.index === 0).map((e) => e.chunk.text).join("");
  console.log(
    JSON.stringify({
      kinds: whole.events.map((e) => e.event),
      text,
      completion_tokens: whole.events[whole.events.length - 1].summary.usage.completion_tokens,
      cancel_code: cut.code,
      cancel_count: cut.count,
      error_code: bad.code,
      error_details: details.toString("base64"),
    }),
  );
  client.close();
}

main();
