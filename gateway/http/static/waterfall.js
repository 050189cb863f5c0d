// The waterfall of one request: each stage as a bar on the request's own time axis.

import { el } from "./dom.js";
import { duration } from "./format.js";

/** The stages in the order in which a request meets them, with a sentence for each. */
const STAGES = {
  queue: "The request waits in the gateway until the nodes have room for it.",
  decode_queue: "The request waits on the decode node until pages for it are free.",
  prefill_queue: "The request waits on the prefill node for its turn.",
  prefill: "The prefill node computes the prompt; the first token is its result.",
  prefill_chunk: "One step of the prefill: a long prompt is computed in pieces, between those of other requests.",
  prefill_wait: "The decode node has reserved pages and waits for the prompt; KV pages arrive as they are computed.",
  transfer: "The prompt is computed, and its last KV pages travel to the decode node.",
  batch_join: "Everything has arrived; the request joins the decode batch at its next step.",
  decode: "The decode node generates the rest of the answer, a token in each step.",
  retracted: "Memory ran short: the request gave its pages back and waited to resume.",
  paused: "A more urgent request had its place on the node; its pages stayed.",
};

const UNCOUNTED = new Set(["prefill_chunk", "prefill_wait", "retracted", "paused"]);

/**
 * An element with the waterfall of a timeline, as `GET /v1/requests/{rid}/timeline` returns it.
 */
export function waterfall(timeline) {
  const spans = ordered(timeline.spans);
  if (!spans.length) return el("p", { class: "empty", text: "The nodes have not reported any stage of this request." });
  const end = Math.max(timeline.duration_s ?? 0, ...spans.map((span) => span.start_s + span.duration_s), 1e-6);
  const start = Math.min(0, ...spans.map((span) => span.start_s));
  const scale = { start, length: end - start };
  return el("div", { class: "waterfall" },
    el("p", { class: "waterfall-summary", text: summary(timeline, spans) }),
    el("div", { class: "spans", role: "list", "aria-label": "Stages" }, axis(scale),
      ...spans.map((span) => row(span, scale, timeline.clocks ?? {}))),
    clockNote(timeline.clocks ?? {}),
    legend(spans));
}

function ordered(spans) {
  const names = Object.keys(STAGES);
  const rank = (span) => names.indexOf(span.name);
  const byStart = (one, other) => one.start_s - other.start_s || rank(one) - rank(other);
  const known = spans.filter((span) => Number.isFinite(span.start_s) && Number.isFinite(span.duration_s)).sort(byStart);
  const chunks = known.filter(isChild);
  const children = chunks.length > 1 ? chunks : []; // A prefill of one chunk is that chunk.
  const parents = known.filter((span) => !isChild(span));
  const placed = parents.flatMap((parent) => [parent, ...children.filter((child) => isInside(child, parent))]);
  return [...placed, ...children.filter((child) => !placed.includes(child))];
}

const isChild = (span) => span.name === "prefill_chunk";

/** Whether a chunk began during this prefill of the same node. */
function isInside(child, parent) {
  if (parent.name !== "prefill") return false;
  const end = parent.start_s + parent.duration_s;
  return child.process === parent.process && child.start_s >= parent.start_s - 1e-4 && child.start_s <= end;
}

/** The longest stages in a sentence. Parts of other stages do not count, nor does the wait for them. */
function summary(timeline, spans) {
  const totals = new Map();
  for (const span of spans) {
    if (!UNCOUNTED.has(span.name)) totals.set(span.name, (totals.get(span.name) ?? 0) + span.duration_s);
  }
  const longest = [...totals].sort((one, other) => other[1] - one[1]).slice(0, 2);
  const words = longest.map(([name, seconds]) => `${duration(seconds)} in ${name}`).join(" and ");
  return words ? `${duration(timeline.duration_s)} in all, of it ${words}.` : `${duration(timeline.duration_s)} in all.`;
}

function axis({ start, length }) {
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((share) =>
    el("span", { style: { "--at": `${100 * share}%` }, text: duration(start + share * length) }));
  return el("div", { class: "span-axis", "aria-hidden": "true" }, ...ticks);
}

function row(span, { start, length }, clocks) {
  const share = (seconds) => `${(100 * seconds) / length}%`;
  const error = clocks[span.process]?.error_s ?? 0;
  const facts = Object.entries(span.attributes ?? {}).map(([name, value]) => `${name} ${value}`).join(", ");
  const title = [STAGES[span.name], facts].filter(Boolean).join("\n");
  const place = (from, seconds) => ({ "--from": share(Math.max(0, from - start)), "--length": share(seconds) });
  return el("div", { class: `span${isChild(span) ? " child" : ""}`, role: "listitem", title },
    el("span", { class: "span-name" }, el("b", { text: span.name }), el("span", { class: "span-process", text: span.process })),
    el("span", { class: "span-track" },
      el("i", { class: `span-bar ${stageClass(span.name)}`, style: place(span.start_s, span.duration_s) }),
      error > length / 200
        ? el("i", { class: "span-error", style: place(span.start_s - error, 2 * error) })
        : null),
    el("span", { class: "span-duration", text: duration(span.duration_s) }));
}

/** The class that colours a stage. Only names of the table become part of a class. */
function stageClass(name) {
  return Object.hasOwn(STAGES, name) ? `stage-${name}` : "stage-other";
}

function clockNote(clocks) {
  const words = (error) => (error === null ? "not known yet" : `±${duration(error)}`);
  const errors = Object.entries(clocks).map(([node, clock]) => `${node} ${words(clock.error_s)}`);
  if (!errors.length) return null;
  const text = `Each machine has its own clock. The starts of stages are known to within: ${errors.join(", ")}.`;
  return el("p", { class: "clock-note", text });
}

function legend(spans) {
  const present = Object.keys(STAGES).filter((name) => spans.some((span) => span.name === name));
  return el("details", { class: "stages" }, el("summary", { text: "What do the stages mean?" }),
    el("dl", {}, ...present.flatMap((name) => [
      el("dt", {}, el("i", { class: `swatch ${stageClass(name)}` }), name), el("dd", { text: STAGES[name] })])));
}
