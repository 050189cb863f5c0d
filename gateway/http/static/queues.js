// The queue of the gateway by priority class, and errors by code.

import { byId, el, keyed, setStyle, setText } from "./dom.js";
import { count, duration } from "./format.js";

/** What the codes of errors mean, in a few words. */
const CODES = {
  aborted: "the client ended it, or closed its connection",
  authentication: "no valid API key",
  body_too_large: "the body is larger than the limit",
  context_length_exceeded: "prompt and output do not fit into the model's context",
  deadline_exceeded: "not finished by its deadline",
  idempotency_key_reused: "the key of another request",
  invalid_request: "a field is wrong",
  model_not_found: "no such model",
  internal: "a bug: see the gateway's log",
  no_route: "no usable pair of nodes",
  node_lost: "a node died while it worked on the request",
  not_found: "no such path or request",
  not_supported: "the request asks for something that the service does not do",
  out_of_pages: "the KV pool ran short of pages",
  permission_denied: "it needs an admin's key, or a page of another site sent it",
  pool_too_small: "the prompt does not fit into a node's KV pool",
  previous_response_not_found: "the response to continue is no longer kept",
  queue_full: "too many requests, or a tenant's quota is used up",
  shutting_down: "the service is stopping",
  taken_over: "the client has sent it to another gateway too, which goes on with it",
  transfer_failed: "KV pages did not arrive",
};

/** Rows of a label with a bar and a number. */
function showRows(parent, rows) {
  keyed(parent, rows, {
    key: (row) => row.key,
    make: () => el("div", { class: "bar-row" },
      el("span", { class: "bar-name" }), el("span", { class: "bar-note" }), el("span", { class: "bar-value" }), el("i", { class: "bar" })),
    update: (node, row) => {
      node.classList.toggle("is-bad", Boolean(row.isBad));
      setText(node.querySelector(".bar-name"), row.name);
      setText(node.querySelector(".bar-note"), row.note);
      setText(node.querySelector(".bar-value"), row.value);
      setStyle(node, { "--share": `${100 * row.share}%` });
    },
  });
}

export function showQueues(queues, numModels) {
  const most = Math.max(1, ...queues.map((queue) => queue.waiting));
  showRows(byId("queues"), queues.map((queue) => ({
    key: `${queue.model} ${queue.priority_class}`,
    name: (numModels > 1 ? `${queue.model} · ` : "") + (queue.priority_class || "all requests"),
    note: queue.waiting ? `the oldest waits ${duration(queue.oldest_wait_s)}` : `none waits · order: ${queue.policy}`,
    value: `${count(queue.waiting)} waiting`,
    share: queue.waiting / most,
  })));
}

export function showErrors(errors) {
  const parent = byId("errors");
  if (!errors.length) {
    parent.replaceChildren(el("p", { class: "empty", text: "No request has failed or been refused since the gateway started." }));
    return;
  }
  for (const note of parent.querySelectorAll(".empty")) note.remove();
  const most = Math.max(1, ...errors.map((error) => error.last_minute));
  showRows(parent, errors.map((error) => ({
    key: error.code,
    name: error.code,
    note: CODES[error.code] ?? "",
    value: `${count(error.last_minute)} in the last minute, ${count(error.total)} in all`,
    share: error.last_minute / most,
    isBad: error.last_minute > 0 && error.code !== "aborted",
  })));
}
