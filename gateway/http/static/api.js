// Calls the gateway, with the API key of this tab where the service wants one.

const KEY = "baton-api-key";

/** An answer other than 2xx, with the sentence and the code of the gateway's envelope. */
export class ApiError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export function hasKey() {
  return Boolean(sessionStorage.getItem(KEY));
}

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/** Fetches a path of the gateway. Throws ApiError for an answer other than 2xx, TypeError without a connection. */
export async function call(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const answer = await fetch(path, { cache: "no-store", ...options, headers });
  if (!answer.ok) throw await errorOf(answer);
  return answer;
}

export async function getJson(path, timeoutMs = 5000) {
  return (await call(path, { signal: AbortSignal.timeout(timeoutMs) })).json();
}

async function errorOf(answer) {
  try {
    const { error } = await answer.json();
    return new ApiError(answer.status, error.code, error.message);
  } catch {
    return new ApiError(answer.status, "", `The gateway answered with HTTP ${answer.status}.`);
  }
}

/** The JSON values of a stream of server-sent events, until `[DONE]` or its end. */
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const data = dataOf(block);
        if (data === "[DONE]") return;
        if (data) yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function dataOf(block) {
  const lines = block.split("\n").filter((line) => line.startsWith("data:"));
  return lines.map((line) => line.slice(5).trimStart()).join("\n");
}
