// The last requests. A click on one opens its waterfall below it; the list then holds still until it is closed.

import { getJson } from "./api.js";
import { byId, el, keyed, setText } from "./dom.js";
import { ago, count, duration } from "./format.js";
import { waterfall } from "./waterfall.js";

const SHOWN = 10;
const FINISHED = { stop: "end of answer", length: "length limit", running: "running" };
const COLUMNS = ["Request", "Ended with", "Started", "First token", "Duration", "Prompt tokens", "Output tokens", "Nodes"];
const NUMBERS = new Set(["Started", "First token", "Duration", "Prompt tokens", "Output tokens"]);

export function timelineOf(rid) {
  return getJson(`/v1/requests/${encodeURIComponent(rid)}/timeline`);
}

/** Makes the list; returns the function that shows requests in it. */
export function makeRequests() {
  const body = byId("requests-body");
  let openRid = null;

  const close = () => {
    body.querySelector(".timeline-row")?.remove();
    body.querySelector('[aria-expanded="true"]')?.setAttribute("aria-expanded", "false");
    openRid = null;
    setText(byId("requests-note"), "choose one to see where its time went");
  };

  const open = async (row, rid) => {
    close();
    openRid = rid;
    setText(byId("requests-note"), "the list holds still while one is open");
    row.querySelector("button").setAttribute("aria-expanded", "true");
    const cell = el("td", { colspan: COLUMNS.length }, el("p", { class: "empty", text: "Loading …" }));
    row.after(el("tr", { class: "timeline-row" }, cell));
    let shown;
    try {
      shown = waterfall(await timelineOf(rid));
    } catch (error) {
      shown = el("p", { class: "empty", text: `No timeline: ${error.message}` });
    }
    if (openRid === rid) cell.replaceChildren(shown);
  };

  const makeRow = (request) => {
    const button = el("button", { class: "rid", type: "button", "aria-expanded": "false", title: request.rid, text: request.rid });
    const row = el("tr", {}, ...COLUMNS.map((name) => el("td", { class: NUMBERS.has(name) ? "number" : false, data: { label: name } })));
    row.firstElementChild.append(button);
    row.addEventListener("click", (event) => {
      if (String(getSelection())) return; // The user marks text.
      if (openRid === request.rid) close();
      else open(row, request.rid);
      event.stopPropagation();
    });
    return row;
  };

  return (requests) => {
    byId("requests-empty").hidden = requests.length > 0;
    byId("requests-table").hidden = requests.length === 0;
    if (openRid !== null) return;
    setText(byId("requests-note"), requests.length ? "choose one to see where its time went" : "");
    const newest = new Map();
    for (const request of requests) if (!newest.has(request.rid)) newest.set(request.rid, request);
    keyed(body, [...newest.values()].slice(0, SHOWN), { key: (request) => request.rid, make: makeRow, update: updateRow });
  };
}

function updateRow(row, request) {
  const [, status, started, first, whole, prompt, output, nodes] = row.children;
  const isDone = request.status in FINISHED;
  if (!status.firstElementChild) status.append(el("span", { class: "status" }));
  status.firstElementChild.dataset.status = request.status === "running" ? "running" : isDone ? "good" : "bad";
  setText(status.firstElementChild, FINISHED[request.status] ?? request.status);
  setText(started, ago(Date.now() / 1000 - request.started_at));
  setText(first, duration(request.ttft_s));
  setText(whole, duration(request.duration_s));
  const cached = request.cached_tokens ? `, ${count(request.cached_tokens)} cached` : "";
  setText(prompt, count(request.prompt_tokens) + cached);
  setText(output, count(request.output_tokens));
  nodes.title = [request.prefill, request.decode].filter(Boolean).join(" → ");
  setText(nodes, nodes.title || "–");
}
