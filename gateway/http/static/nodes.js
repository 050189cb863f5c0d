// The map of nodes: prefill nodes on one side, decode nodes on the other, and between them each pair that transfers pages.

import { byId, el, keyed, setStyle, setText, svg } from "./dom.js";
import { bytes, count, percent, plural } from "./format.js";

const ITEM_BYTES = { float32: 4, bfloat16: 2, float16: 2, fp8_e4m3: 1, int8: 1 };
const SCALE_BYTES = { fp8_e4m3: 1, int8: 1 }; // Of each key and each value.
const SILENT_S = 5; // Nodes report every second.
const MAX_FULL_CARDS = 4; // Of one role; more get short cards.

/** Bytes of one KV page, from the layout that the node registered. */
function pageBytes(layout) {
  const dims = layout.is_latent ? [layout.head_dim] : [layout.head_dim, layout.value_dim || layout.head_dim];
  const perHead = dims.map((dim) => dim * ITEM_BYTES[layout.dtype] + (SCALE_BYTES[layout.dtype] ?? 0));
  const slabBytes = layout.num_layers * layout.num_kv_heads * layout.page_size * perHead.reduce((sum, size) => sum + size);
  return slabBytes * layout.full_slabs; // Window layers with a pool of their own are not counted.
}

/** The pairs of all nodes, each once, by the incarnations of its two ends; a problem that either end reports counts. */
function pairsOf(workers) {
  const known = new Map(workers.map((worker) => [worker.incarnation, worker]));
  const pairs = new Map();
  for (const worker of workers) {
    for (const pair of worker.pairs) {
      const peer = known.get(pair.incarnation);
      if (!peer) continue;
      const [prefill, decode] = worker.role === "prefill" ? [worker, peer] : [peer, worker];
      const key = `${prefill.incarnation} ${decode.incarnation}`;
      const before = pairs.get(key);
      pairs.set(key, {
        key, prefill, decode, transport: pair.transport,
        why: pair.why || before?.why || "", problem: pair.problem || before?.problem || "",
      });
    }
  }
  return [...pairs.values()];
}

/** The pages of a node: free, cached and used by no request, which make room when it is needed, and all others. */
function poolOf({ register, heartbeat }) {
  const free = heartbeat ? heartbeat.num_free_pages : register.num_pages;
  const cached = heartbeat?.gauges.evictable_pages ?? 0;
  return { used: Math.max(0, register.num_pages - free - cached), cached, free };
}

/** The KV memory of all nodes in a few words. */
function usedMemory(workers) {
  let [used, total] = [0, 0];
  for (const worker of workers) {
    const size = pageBytes(worker.register.layout);
    total += worker.register.num_pages * size;
    used += poolOf(worker).used * size;
  }
  return `${bytes(used)} of ${bytes(total)} KV memory in use`;
}

/** Makes the map; returns the function that shows workers in it. */
export function makeMap() {
  const links = byId("links");
  const rates = new CounterRates();
  let pairs = [];
  const draw = () => drawLinks(links, pairs);
  new ResizeObserver(draw).observe(byId("map"));
  return (workers, numModels) => {
    pairs = pairsOf(workers);
    rates.update(workers);
    for (const [role, id] of [["prefill", "prefills"], ["decode", "decodes"]]) {
      const nodes = workers.filter((worker) => worker.role === role);
      nodes.sort((one, other) => one.name.localeCompare(other.name, "en", { numeric: true }));
      showColumn(byId(id), role, nodes, (card, worker) => {
        const own = pairs.filter((pair) => pair[role] === worker);
        updateCard(card, worker, { pairs: own, rates, showsModel: numModels > 1 });
      });
    }
    byId("map").classList.toggle("compact", ["prefill", "decode"].some((role) => numOf(workers, role) > MAX_FULL_CARDS));
    const failed = pairs.filter((pair) => pair.problem).length;
    const broken = failed ? `, ${failed} of them failed` : "";
    setText(byId("nodes-note"), `${plural(workers.length, "node")}, ${plural(pairs.length, "pair")}${broken} · ${usedMemory(workers)}`);
    draw();
  };
}

const numOf = (workers, role) => workers.filter((worker) => worker.role === role).length;

function showColumn(column, role, nodes, update) {
  if (!nodes.length) {
    const text = `No ${role} node has registered. Start one with ./scripts/${role}, or all with ./scripts/serve.`;
    column.replaceChildren(el("p", { class: "empty", text }));
    return;
  }
  for (const note of column.querySelectorAll(".empty")) note.remove();
  keyed(column, nodes, { key: (worker) => worker.incarnation, make: makeCard, update });
}

/** Rates of the counters that heartbeats carry, by node and counter, over the time between two heartbeats. */
class CounterRates {
  #known = new Map();

  update(workers) {
    const now = performance.now() / 1000;
    for (const { incarnation, heartbeat, seen_s_ago: age } of workers) {
      if (!heartbeat) continue;
      const at = now - age;
      const before = this.#known.get(incarnation);
      const counters = heartbeat.counters;
      if (!before) {
        this.#known.set(incarnation, { at, counters, rates: {} });
      } else if (at - before.at >= 1.9) {
        const seconds = at - before.at;
        const rates = Object.fromEntries(
          Object.entries(counters).map(([name, value]) => [name, Math.max(0, value - (before.counters[name] ?? 0)) / seconds]),
        );
        this.#known.set(incarnation, { at, counters, rates });
      }
    }
    const present = new Set(workers.map((worker) => worker.incarnation));
    for (const incarnation of this.#known.keys()) if (!present.has(incarnation)) this.#known.delete(incarnation);
  }

  of(worker, name) {
    return this.#known.get(worker.incarnation)?.rates[name] ?? 0;
  }
}

function makeCard() {
  return el("article", { class: "node", role: "listitem" },
    el("header", {}, el("span", { class: "dot" }), el("strong", { class: "node-name" }), el("span", { class: "node-tag" })),
    el("p", { class: "node-state" }),
    el("div", { class: "pages", role: "img" }, el("i", { class: "used" }), el("i", { class: "cached" })),
    el("table", { class: "pool" },
      el("thead", {}, el("tr", {}, ...["KV pool", "pages", "tokens", "memory"].map((name) => el("th", { scope: "col", text: name })))),
      el("tbody", {})),
    el("p", { class: "node-work" }),
    el("ul", { class: "pairs", "aria-label": "Pairs" }));
}

function updateCard(card, worker, { pairs, rates, showsModel }) {
  const part = (name) => card.querySelector(`.${name}`);
  const [state, words] = stateOf(worker, pairs);
  card.dataset.state = state;
  card.dataset.node = worker.incarnation;
  setText(part("node-name"), worker.name);
  part("node-name").title = worker.name;
  setText(part("node-tag"), worker.register.device + (showsModel ? ` · ${worker.model}` : ""));
  setText(part("node-state"), words);
  showPages(part("pages"), part("pool").tBodies[0], worker);
  const work = worker.role === "prefill"
    ? `${count(rates.of(worker, "prompt_tokens_computed"))} prompt tokens/s · ${bytes(rates.of(worker, "bytes_sent"))}/s out`
    : `${count(rates.of(worker, "output_tokens"))} output tokens/s`;
  setText(part("node-work"), work);
  part("pairs").classList.toggle("no-pair", !pairs.length);
  keyed(part("pairs"), pairs, { key: (pair) => pair.key, make: () => el("li"), update: (item, pair) => updatePair(item, pair, worker) });
}

function stateOf(worker, pairs) {
  if (worker.is_draining) return ["draining", `is draining: it takes no new requests and has ${worker.num_requests} left`];
  if (worker.seen_s_ago > SILENT_S) return ["bad", `has been silent for ${Math.round(worker.seen_s_ago)} s`];
  if (pairs.length && pairs.every((pair) => pair.problem)) return ["bad", "can exchange pages with no node"];
  if (!worker.heartbeat) return ["waiting", "has registered and not yet reported"];
  const { num_running: running, num_waiting: waiting } = worker.heartbeat;
  return ["good", `${count(running)} running, ${count(waiting)} waiting`];
}

/** The pool as a bar, and as a table of pages, tokens and bytes. */
function showPages(bar, table, worker) {
  const { register, heartbeat } = worker;
  const total = register.num_pages;
  const { used, cached, free } = poolOf(worker);
  setStyle(bar, { "--used": `${(100 * used) / total}%`, "--cached": `${(100 * cached) / total}%` });
  bar.title = `${count(total)} KV pages: ${percent(used / total)} in use, ${percent(cached / total)} cached`;
  bar.setAttribute("aria-label", bar.title);
  const rows = [["in use", used, "used"], ["cached", cached, "cached"], ["free", free, "free"]];
  if (heartbeat?.num_quarantined_pages) rows.push(["quarantined", heartbeat.num_quarantined_pages, "quarantined"]);
  const size = pageBytes(register.layout);
  keyed(table, rows, {
    key: ([name]) => name,
    make: ([name, , kind]) => el("tr", {}, el("th", { scope: "row" }, el("i", { class: `swatch ${kind}` }), name), el("td"), el("td"), el("td")),
    update: (row, [, pages]) => [count(pages), count(pages * register.layout.page_size), bytes(pages * size)].forEach(
      (text, index) => setText(row.children[index + 1], text)),
  });
}

function updatePair(item, pair, worker) {
  const peer = worker === pair.prefill ? pair.decode : pair.prefill;
  item.className = pair.problem ? "pair failed" : "pair";
  setText(item, pair.problem ? `${peer.name}: ${pair.transport} failed: ${pair.problem}` : `${peer.name} by ${pair.transport}`);
  item.title = pair.problem || pair.why;
}

/** Draws one curve for each pair from its prefill node's card to its decode node's. */
function drawLinks(links, pairs) {
  const box = links.getBoundingClientRect();
  if (!box.width) return;
  links.setAttribute("viewBox", `0 0 ${box.width} ${box.height}`);
  const cards = new Map([...document.querySelectorAll(".node")].map((card) => [card.dataset.node, card]));
  const middle = (worker) => {
    const card = cards.get(worker.incarnation)?.getBoundingClientRect();
    return card ? card.top + card.height / 2 - box.top : 0;
  };
  const failedLast = [...pairs].sort((one, other) => Boolean(one.problem) - Boolean(other.problem));
  const curves = failedLast.map((pair) => {
    const [from, to, half] = [middle(pair.prefill), middle(pair.decode), box.width / 2];
    const isBusy = (pair.prefill.heartbeat?.num_running ?? 0) + (pair.decode.heartbeat?.num_running ?? 0) > 0;
    return svg("path", {
      class: `link${pair.problem ? " failed" : ""}${isBusy ? " busy" : ""}`,
      d: `M0 ${from}C${half} ${from} ${half} ${to} ${box.width} ${to}`,
    });
  });
  links.replaceChildren(...curves);
}
