// A conversation with a model: builds the requests, reads the streams, and keeps the messages. Draws nothing.

import { call, events, hasKey } from "./api.js";

/** Tools that the text area offers as an example. */
export const EXAMPLE_TOOLS = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "The weather of a city now",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];

/**
 * The tools of a text area; undefined for an empty one. Throws Error with a sentence: the text is no list of tools.
 */
export function parseTools(text) {
  if (!text.trim()) return undefined;
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    throw new Error(`Tools: this is not JSON: ${error.message}`);
  }
  if (!Array.isArray(tools)) throw new Error("Tools: give a list, [ … ], as the example shows.");
  return tools;
}

/** One answer of the model as it grows. */
class Answer {
  rid = "";
  text = "";
  reasoning = "";
  calls = []; // {id, name, arguments}
  finish = "";
  usage = null;
  firstAt = 0;
  startedAt = performance.now();
  endedAt = 0;

  /** Takes one event of the stream. Throws Error: the gateway reports a failure. */
  add(event) {
    if (event.error) throw new Error(event.error.message);
    this.rid ||= event.id ?? "";
    this.usage = event.usage ?? this.usage;
    const choice = event.choices?.[0];
    if (!choice) return;
    const delta = choice.delta ?? { content: choice.text };
    this.text += delta.content ?? "";
    this.reasoning += delta.reasoning_content ?? "";
    for (const part of delta.tool_calls ?? []) this.#addCall(part);
    this.finish = choice.finish_reason ?? this.finish;
    const isFilled = delta.content || delta.reasoning_content || delta.tool_calls;
    if (isFilled && !this.firstAt) this.firstAt = performance.now();
  }

  #addCall(part) {
    const known = (this.calls[part.index] ??= { id: "", name: "", arguments: "" });
    known.id ||= part.id ?? "";
    known.name += part.function?.name ?? "";
    known.arguments += part.function?.arguments ?? "";
  }

  /** The answer as a message of the conversation. */
  message() {
    const calls = this.calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
    return { role: "assistant", content: this.text, ...(calls.length ? { tool_calls: calls } : {}) };
  }
}

export class Conversation {
  messages = [];
  lastRequest = null; // {path, body}
  #abort = null;

  get isRunning() {
    return this.#abort !== null;
  }

  addUser(text) {
    this.messages.push({ role: "user", content: text });
  }

  addToolResult(id, text) {
    this.messages.push({ role: "tool", tool_call_id: id, content: text });
  }

  /** Ends the answer that is being generated; the gateway frees its pages at once. */
  stop() {
    this.#abort?.abort();
  }

  clear() {
    this.stop();
    this.messages = [];
  }

  /**
   * Generates the next message, and calls `onEvent(answer)` as it grows. What has come before a stop or a failure stays
   * in the conversation.
   *
   * settings: {model, system, temperature, maxTokens, tools}
   */
  async generate(settings, onEvent) {
    const answer = new Answer();
    const request = (this.lastRequest = requestOf(settings, this.messages));
    this.#abort = new AbortController();
    try {
      const response = await call(request.path, {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify(request.body),
        signal: this.#abort.signal,
      });
      for await (const event of events(response)) {
        answer.add(event);
        onEvent(answer);
      }
    } catch (error) {
      if (error.name !== "AbortError") throw error;
      answer.finish = "stopped";
    } finally {
      answer.endedAt = performance.now();
      this.#abort = null;
      if (answer.text || answer.calls.length) this.messages.push(answer.message());
    }
    return answer;
  }
}

/** The path and the body of the next request. A model without a chat template continues the text of all messages. */
function requestOf({ model, system, temperature, maxTokens, tools }, messages) {
  const options = { stream: true, stream_options: { include_usage: true } };
  if (temperature !== null) options.temperature = temperature;
  if (maxTokens !== null) options.max_tokens = maxTokens;
  if (model && !model.has_chat_template) {
    const prompt = [system, ...messages.map((message) => message.content)].filter(Boolean).join("\n");
    return { path: "/v1/completions", body: { model: model.name, prompt, ...options } };
  }
  const all = system ? [{ role: "system", content: system }, ...messages] : messages;
  const body = { model: model?.name, messages: [...all], ...(tools ? { tools } : {}), ...options };
  return { path: "/v1/chat/completions", body };
}

/** A request as a command for a shell. The API key is named and never shown. */
export function asCurl({ path, body }) {
  const data = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  const key = hasKey() ? ' \\\n  -H "Authorization: Bearer $BATON_API_KEY"' : "";
  return `curl -N ${location.origin}${path} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d '${data}'`;
}
