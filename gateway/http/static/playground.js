// The playground: settings, the conversation as it grows, and where the time of each answer went.

import { asCurl, Conversation, EXAMPLE_TOOLS, parseTools } from "./chat.js";
import { byId, el, keyed, setText } from "./dom.js";
import { duration, plural, rate } from "./format.js";
import { timelineOf } from "./requests.js";
import { waterfall } from "./waterfall.js";

const IDEAS = ["To be, or not to be", "Speak to me of the moon", "Once upon a time"];
const SMALL_MODEL = "baton-small";
/** Nodes report the stages of a request shortly after its end. */
const TIMELINE_DELAYS_MS = [150, 500, 1200, 2500];

const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/** Makes the playground; returns the function that offers models in it. */
export function makePlayground() {
  const chat = new Conversation();
  const log = byId("log"), message = byId("message"), composer = byId("composer");
  let models = [];

  const settings = () => ({
    model: models.find((model) => model.name === byId("model").value) ?? models[0],
    system: byId("system").value.trim(),
    temperature: numberOf("temperature"),
    maxTokens: numberOf("max-tokens"),
    tools: parseTools(byId("tools").value),
  });

  const showRunning = (isRunning) => {
    byId("send").hidden = isRunning;
    byId("stop").hidden = !isRunning;
    log.setAttribute("aria-busy", String(isRunning));
    byId("clear").disabled = isRunning || !chat.messages.length;
  };

  const generate = async (chosen) => {
    const view = new AnswerView(log);
    showRunning(true);
    let answer = null;
    try {
      answer = await chat.generate(chosen, (growing) => view.show(growing));
      view.finish(answer);
    } catch (error) {
      view.fail(error);
    }
    showRunning(false);
    setText(byId("curl-text"), asCurl(chat.lastRequest));
    byId("curl").hidden = false;
    if (answer?.calls.length && answer.finish === "tool_calls") {
      const length = chat.messages.length;
      view.askForResults(answer.calls, (results) => {
        if (chat.messages.length !== length) return addNote(log, "The conversation has gone on without these results.");
        for (const [id, text] of results) {
          chat.addToolResult(id, text);
          addBubble(log, "tool", text);
        }
        generate(chosen);
      });
    }
    if (answer?.rid) view.showTimeline(answer.rid);
  };

  const submit = () => {
    const text = message.value.trim();
    if (!text || chat.isRunning) return;
    if (!models.length) return addNote(log, "The models are not known yet: the page waits for the gateway, or for an API key.");
    let chosen;
    try {
      chosen = settings();
    } catch (error) {
      byId("settings").open = true;
      byId("tools").focus();
      return addNote(log, error.message);
    }
    log.querySelector(".welcome")?.remove();
    chat.addUser(text);
    addBubble(log, "user", text);
    message.value = "";
    generate(chosen);
  };

  composer.addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  byId("send").disabled = false; // until here a click would have loaded the page again, without the message
  message.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      submit();
    }
  });
  byId("stop").addEventListener("click", () => {
    chat.stop();
    message.focus();
  });
  byId("clear").addEventListener("click", () => {
    chat.clear();
    showWelcome();
    showRunning(false);
    message.focus();
  });
  byId("tools-example").addEventListener("click", () => {
    byId("tools").value = JSON.stringify(EXAMPLE_TOOLS, null, 2);
  });
  byId("curl-copy").addEventListener("click", () => copy(byId("curl-copy"), byId("curl-text").textContent));
  byId("settings").addEventListener("input", showSettings);

  function showWelcome() {
    const isSmall = models.every((model) => model.name === SMALL_MODEL);
    const text = isSmall
      ? "The small model that comes with Baton imitates old verse and knows nothing else. Start ./scripts/serve with --model for one that answers."
      : "Write to the model below. Its answer streams in, and then shows where its time went.";
    const ideas = IDEAS.map((idea) => el("button", { class: "idea", type: "button", text: idea, onclick: () => {
      message.value = idea;
      submit();
    } }));
    log.replaceChildren(el("div", { class: "welcome" }, el("p", { class: "empty", text }), el("div", { class: "ideas" }, ...ideas)));
  }

  function showSettings() {
    const model = models.find((known) => known.name === byId("model").value);
    const parts = [model?.name ?? "no model", byId("temperature").value && `temperature ${byId("temperature").value}`,
      byId("max-tokens").value && `at most ${byId("max-tokens").value} tokens`, byId("system").value.trim() && "system prompt",
      byId("tools").value.trim() && "tools", model && !model.has_chat_template && "no chat template: continues your text"];
    setText(byId("settings-note"), parts.filter(Boolean).join(" · "));
  }

  return (served) => {
    const isNew = served.map((model) => model.name).join("\n") !== models.map((model) => model.name).join("\n");
    models = served;
    if (!isNew) return;
    keyed(byId("model"), served, {
      key: (model) => model.name,
      make: (model) => el("option", { value: model.name }),
      update: (option, model) => setText(option, model.name),
    });
    showSettings();
    if (!chat.messages.length) showWelcome();
  };
}

/** The number in a field; null if it is empty. */
function numberOf(id) {
  const text = byId(id).value.trim();
  return text === "" || Number.isNaN(Number(text)) ? null : Number(text);
}

function addBubble(log, role, text) {
  log.append(el("div", { class: `message ${role}` }, el("p", { class: "bubble", text })));
  log.scrollTop = log.scrollHeight;
}

function addNote(log, text) {
  log.append(el("p", { class: "problem", role: "alert", text }));
  log.scrollTop = log.scrollHeight;
}

async function copy(button, text) {
  try {
    await navigator.clipboard.writeText(text);
    setText(button, "Copied");
  } catch {
    setText(button, "Select the text and copy it");
  }
  setTimeout(() => setText(button, "Copy"), 2000);
}

/** One answer in the log. */
class AnswerView {
  #log;
  #isDrawDue = false;
  #isFinished = false;

  constructor(log) {
    this.#log = log;
    this.reasoningText = el("p", {});
    this.reasoning = el("details", { class: "reasoning", hidden: true }, el("summary", { text: "Reasoning" }), this.reasoningText);
    this.text = el("p", { class: "bubble is-empty", text: "…" });
    this.calls = el("div", { class: "calls" });
    this.facts = el("p", { class: "facts" });
    this.root = el("div", { class: "message assistant" }, this.reasoning, this.text, this.calls, this.facts);
    log.append(this.root);
    this.#follow();
  }

  /** Draws what has come, once for each frame of the screen however fast the tokens are. */
  show(answer) {
    if (this.#isDrawDue) return;
    this.#isDrawDue = true;
    requestAnimationFrame(() => {
      this.#isDrawDue = false;
      if (!this.#isFinished) this.#draw(answer);
    });
  }

  #draw(answer) {
    const isAtEnd = this.#log.scrollHeight - this.#log.scrollTop - this.#log.clientHeight < 60;
    this.reasoning.hidden = !answer.reasoning;
    setText(this.reasoningText, answer.reasoning);
    const isEmpty = !answer.text;
    this.text.classList.toggle("is-empty", isEmpty);
    this.text.hidden = isEmpty && (answer.calls.length > 0 || answer.endedAt > 0);
    setText(this.text, isEmpty ? "…" : answer.text);
    keyed(this.calls, answer.calls.filter(Boolean), {
      key: (known) => answer.calls.indexOf(known),
      make: () => el("div", { class: "call" }, el("strong", {}), el("pre", { class: "code" })),
      update: (card, known) => {
        setText(card.querySelector("strong"), known.name);
        setText(card.querySelector("pre"), pretty(known.arguments));
      },
    });
    if (isAtEnd) this.#follow();
  }

  finish(answer) {
    this.#isFinished = true;
    this.#draw(answer);
    const ends = { length: "stopped at the token limit", stopped: "stopped by you", tool_calls: "called a tool", stop: "" };
    const seconds = (answer.endedAt - (answer.firstAt || answer.endedAt)) / 1000;
    const tokens = answer.usage?.completion_tokens;
    const cached = answer.usage?.prompt_tokens_details?.cached_tokens;
    const parts = [
      answer.firstAt && `first token after ${duration((answer.firstAt - answer.startedAt) / 1000)}`,
      tokens && plural(tokens, "token"),
      tokens > 1 && seconds > 0.05 && `${rate((tokens - 1) / seconds)} tokens/s`,
      cached && `${cached} of ${answer.usage.prompt_tokens} prompt tokens from the cache`,
      ends[answer.finish] ?? answer.finish,
    ];
    setText(this.facts, parts.filter(Boolean).join(" · ") || "The answer is empty.");
    this.#follow();
  }

  fail(error) {
    this.#isFinished = true;
    if (this.text.classList.contains("is-empty")) this.text.remove();
    const text = error instanceof TypeError ? "The connection to the gateway was lost." : error.message;
    this.root.append(el("p", { class: "problem", role: "alert", text }));
    this.#follow();
  }

  /** Adds a field for the result of each call, and a button that sends them back. */
  askForResults(calls, onResults) {
    const fields = calls.map((known, index) => {
      const field = el("textarea", { rows: 2, placeholder: '{"result": …}', "aria-label": `Result of ${known.name}` });
      this.calls.children[index].append(el("label", { class: "field" }, el("span", { text: "Its result" }), field));
      return field;
    });
    const button = el("button", { class: "primary", type: "button", text: "Send the result back", onclick: () => {
      button.remove();
      for (const field of fields) field.readOnly = true;
      onResults(calls.map((known, index) => [known.id, fields[index].value]));
    } });
    this.calls.append(button);
    this.#follow();
  }

  async showTimeline(rid) {
    const box = el("details", { class: "where", open: true },
      el("summary", { text: "Where did the time go?" }), el("p", { class: "empty", text: "Loading …" }));
    this.root.append(box);
    this.#follow();
    let shown = null;
    for (const delay of TIMELINE_DELAYS_MS) {
      await sleep(delay);
      try {
        const timeline = await timelineOf(rid);
        shown = waterfall(timeline);
        if (timeline.status !== "running" && timeline.spans.some((span) => span.process === timeline.decode)) break;
      } catch (error) {
        shown ??= el("p", { class: "empty", text: `No timeline: ${error.message}` });
      }
    }
    box.lastElementChild.replaceWith(shown);
    this.#follow();
  }

  #follow() {
    this.#log.scrollTop = this.#log.scrollHeight;
  }
}

/** Arguments of a tool call with line breaks, if they are JSON; while they stream in they often are not yet. */
function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
