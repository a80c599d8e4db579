// Streams one answer: `node generate.js PROMPT [MAX_TOKENS]`. Ctrl-C cancels it.
//
// The daemon and the credentials are those of the command line: DOWNCORE_SERVER (unix:PATH or HOST:PORT), and where it
// wants any, DOWNCORE_TOKEN_FILE, DOWNCORE_TLS_CA, DOWNCORE_TLS_CERT, DOWNCORE_TLS_KEY. The .proto files are read from
// the repository, or from DOWNCORE_PROTO.
"use strict";
const fs = require("fs");
const path = require("path");
const { setTimeout: sleep } = require("timers/promises");
const grpc = require("@grpc/grpc-js");
const protoLoader = require("@grpc/proto-loader");
const protobuf = require("protobufjs");

const ATTEMPTS = 5;
const TIMEOUT_MS = 600_000; // for the whole answer; the daemon drops what it cannot finish by then
const PROTO = process.env.DOWNCORE_PROTO || path.join(__dirname, "../../../proto");
// proto/downcore/v1/service_config.json, for the service that is called here: gRPC itself tries again where the daemon
// cannot be reached or is restarting, as long as no message has come.
const SERVICE_CONFIG = `{"methodConfig": [{
  "name": [{"service": "downcore.v1.GenerationService"}],
  "retryPolicy": {"maxAttempts": 5, "initialBackoff": "0.2s", "maxBackoff": "5s", "backoffMultiplier": 2,
                  "retryableStatusCodes": ["UNAVAILABLE"]}
}]}`;
const OPTIONS = {
  "grpc.service_config": SERVICE_CONFIG,
  "grpc.keepalive_time_ms": 30_000,
  "grpc.keepalive_timeout_ms": 10_000,
};
// The parts of google.rpc that the details of an error are made of.
const RPC = protobuf.parse(`
  syntax = "proto3";
  package google.rpc;
  message Any { string type_url = 1; bytes value = 2; }
  message Status { int32 code = 1; string message = 2; repeated Any details = 3; }
  message ErrorInfo { string reason = 1; string domain = 2; }
  message Duration { int64 seconds = 1; int32 nanos = 2; }
  message RetryInfo { Duration retry_delay = 1; }
`, { keepCase: true }).root;

async function main() {
  const [prompt, maxTokens] = process.argv.slice(2);
  const target = process.env.DOWNCORE_SERVER;
  if (prompt === undefined) fail(2, "usage: generate.js PROMPT [MAX_TOKENS]");
  if (!target) fail(1, "set DOWNCORE_SERVER to unix:PATH or HOST:PORT");
  const request = {
    text: prompt,
    sampling: { temperature: 0 },
    stopping: { max_tokens: Number(maxTokens ?? 64) },
  };
  const definition = protoLoader.loadSync("downcore/v1/generation.proto", {
    includeDirs: [PROTO],
    keepCase: true,
    longs: Number,
    enums: String,
    oneofs: true, // `event` then names the kind of a response
    defaults: true,
  });
  const { GenerationService } = grpc.loadPackageDefinition(definition).downcore.v1;
  const credentials = tls();
  const metadata = token(credentials !== null || isLocal(target));
  const client = new GenerationService(target, credentials ?? grpc.credentials.createInsecure(), OPTIONS);
  let ended;
  for (let attempt = 1; attempt <= ATTEMPTS; attempt++) {
    ended = await ask(client, request, metadata);
    if (ended.retrySeconds === null || attempt === ATTEMPTS) break;
    await sleep(ended.retrySeconds * 1000);
  }
  client.close();
  process.exitCode = ended.status;
}

// One call. Resolves to the exit status, and the seconds after which trying again makes sense, null where it does not.
function ask(client, request, metadata) {
  return new Promise((resolve) => {
    const call = client.Generate(request, metadata, { deadline: Date.now() + TIMEOUT_MS });
    const cancel = () => call.cancel();
    process.once("SIGINT", cancel);
    let hasBegun = false;
    const end = (status, retrySeconds) => {
      process.removeListener("SIGINT", cancel);
      resolve({ status, retrySeconds });
    };
    call.on("data", (response) => {
      hasBegun = true;
      if (response.event === "chunk") process.stdout.write(response.chunk.text);
      if (response.event === "summary") {
        const { prompt_tokens, cached_tokens, completion_tokens } = response.summary.usage;
        const cached = cached_tokens ? cached_tokens.device + cached_tokens.host + cached_tokens.disk : 0;
        process.stdout.write("\n");
        console.error(`prompt ${prompt_tokens} tokens, ${cached} from the cache; answer ${completion_tokens} tokens`);
      }
    });
    call.on("error", (error) => {
      if (error.code === grpc.status.CANCELLED) {
        console.error("\ncancelled");
        end(130, null);
        return;
      }
      const { reason, retrySeconds } = detailsOf(error);
      const again = retrySeconds === null ? "" : `; try again in ${retrySeconds} s`;
      console.error(`${grpc.status[error.code]}: ${error.details} [${reason}]${again}`);
      end(1, hasBegun ? null : retrySeconds); // what has begun would be answered twice
    });
    call.on("end", () => end(0, null));
  });
}

// The daemon's reason, and the seconds of its RetryInfo.
function detailsOf(error) {
  const [encoded] = error.metadata.get("grpc-status-details-bin");
  let reason = "no reason";
  let retrySeconds = null;
  for (const detail of encoded ? RPC.lookupType("google.rpc.Status").decode(encoded).details : []) {
    const name = detail.type_url.split("/").pop();
    if (name === "google.rpc.ErrorInfo") reason = RPC.lookupType(name).decode(detail.value).reason;
    if (name === "google.rpc.RetryInfo") {
      const delay = RPC.lookupType(name).decode(detail.value).retry_delay;
      retrySeconds = Number(delay.seconds) + delay.nanos / 1e9;
    }
  }
  return { reason, retrySeconds };
}

// TLS with the authority that is named, and the client's own certificate where there is one.
function tls() {
  const read = (name) => (process.env[name] ? fs.readFileSync(process.env[name]) : null);
  const authority = read("DOWNCORE_TLS_CA");
  return authority && grpc.credentials.createSsl(authority, read("DOWNCORE_TLS_KEY"), read("DOWNCORE_TLS_CERT"));
}

// The metadata of a call. A token leaves this machine over TLS only.
function token(isSafe) {
  const metadata = new grpc.Metadata();
  const file = process.env.DOWNCORE_TOKEN_FILE;
  if (file && !isSafe) fail(1, "a token leaves this machine over TLS only: set DOWNCORE_TLS_CA");
  if (file) metadata.set("authorization", `Bearer ${fs.readFileSync(file, "utf8").trim()}`);
  return metadata;
}

// Whether nothing leaves this machine on the way there.
function isLocal(target) {
  return ["unix:", "127.0.0.1:", "localhost:", "[::1]:"].some((start) => target.startsWith(start));
}

function fail(status, message) {
  console.error(message);
  process.exit(status);
}

main();
