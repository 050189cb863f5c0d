// The number tiles at the top: each a headline, a second number, and the last 60 seconds as a line.

import { byId, el, setText, svg } from "./dom.js";
import { count, duration, rate } from "./format.js";

const NUM_SAMPLES = 60;
const WIDTH = 118, HEIGHT = 34;
const STEADY_S = 5; // A headline of a rate is the mean of so many seconds, so that it can be read.

const TILES = [
  {
    name: "Requests", unit: "/s", help: "Outputs that ended, each second.",
    lines: ["requests_per_s"], headline: (samples) => rate(mean(samples, "requests_per_s")),
    note: (samples) => `${count(sum(samples, "requests_per_s"))} in the last minute`, show: (value) => `${rate(value)}/s`,
  },
  {
    name: "Output tokens", unit: "/s", help: "Tokens that the nodes generated, each second.",
    lines: ["tokens_per_s"], headline: (samples) => rate(mean(samples, "tokens_per_s")),
    note: (samples) => `${count(sum(samples, "tokens_per_s"))} in the last minute`, show: (value) => `${rate(value)}/s`,
  },
  {
    name: "Time to first token", help: "Median and 99th percentile of the requests that ended in the last 10 seconds.",
    lines: ["ttft_p99_s", "ttft_p50_s"], headline: (samples) => duration(last(samples)?.ttft_p50_s),
    note: (samples) => `p50 (p99: ${duration(last(samples)?.ttft_p99_s)})`, show: duration,
  },
  {
    name: "Inter-token latency", help: "99th percentile and median of the last 10 seconds: how smoothly streams flow.",
    lines: ["inter_token_p99_s", "inter_token_p50_s"], headline: (samples) => duration(last(samples)?.inter_token_p99_s),
    note: (samples) => `p99 (p50: ${duration(last(samples)?.inter_token_p50_s)})`, show: duration,
  },
  {
    name: "Running", help: "Requests at the nodes, and requests that wait in the gateway until the nodes have room.",
    lines: ["running", "waiting"], headline: (samples) => count(last(samples)?.running),
    note: (samples) => `${count(last(samples)?.waiting)} waiting`, show: count,
  },
  {
    name: "Errors", help: "Requests that were refused or failed in the last minute.",
    lines: ["errors_per_s"], headline: (samples) => count(sum(samples, "errors_per_s")),
    note: () => "in the last minute", show: (value) => `${rate(value)}/s`, isBad: (samples) => sum(samples, "errors_per_s") >= 1,
  },
];

const last = (samples) => samples[samples.length - 1];
const sum = (samples, name) => samples.reduce((total, sample) => total + sample[name], 0);
const mean = (samples, name) => {
  const recent = samples.slice(-STEADY_S);
  return recent.length ? sum(recent, name) / recent.length : null;
};

/** Makes the tiles; returns the function that shows samples in them. */
export function makeTiles() {
  const tiles = TILES.map(makeTile);
  byId("tiles").append(...tiles.map((tile) => tile.root));
  return (samples) => tiles.forEach((tile) => tile.update(samples));
}

function makeTile(spec) {
  const headline = el("span", { class: "headline", text: "–" });
  const note = el("span", { class: "tile-note", text: " " });
  const chart = svg("svg", { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
  const area = svg("path", { class: "spark-area" });
  const paths = spec.lines.map((_, index) => svg("path", { class: `spark-line line-${index}` }));
  const mark = svg("line", { class: "spark-mark", y1: 0, y2: HEIGHT });
  chart.append(area, ...paths, mark);
  const scale = el("span", { class: "spark-scale", title: "the highest value of the last 60 seconds" });
  const root = el("article", { class: "tile", title: spec.help },
    el("h3", { text: spec.name }),
    el("p", { class: "number-line" }, headline, spec.unit ? el("span", { class: "unit", text: spec.unit }) : null, scale),
    note, el("div", { class: "spark-box" }, chart));

  let shown = [], pointed = null;
  const describe = () => {
    const sample = pointed === null ? null : shown[shown.length - 1 - pointed];
    mark.classList.toggle("is-shown", Boolean(sample));
    if (!sample) return setText(note, spec.note(shown));
    const values = [...spec.lines].reverse().map((name) => spec.show(sample[name])).join(" · ");
    setText(note, `${pointed} s ago: ${values}`);
    mark.setAttribute("x1", xAt(pointed));
    mark.setAttribute("x2", xAt(pointed));
  };
  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect();
    pointed = Math.round((1 - (event.clientX - box.left) / box.width) * (NUM_SAMPLES - 1));
    describe();
  });
  chart.addEventListener("pointerleave", () => {
    pointed = null;
    describe();
  });

  const update = (samples) => {
    shown = samples;
    const top = Math.max(...samples.flatMap((sample) => spec.lines.map((name) => sample[name] ?? 0)), 0);
    paths.forEach((path, index) => path.setAttribute("d", line(samples, spec.lines[index], top)));
    area.setAttribute("d", filled(samples, spec.lines[0], top));
    setText(headline, samples.length ? spec.headline(samples) : "–");
    setText(scale, top ? `≤ ${spec.show(top)}` : "");
    chart.setAttribute("aria-label", `${spec.name}, last 60 seconds: at most ${spec.show(top)}`);
    root.classList.toggle("is-bad", Boolean(spec.isBad?.(samples)));
    describe();
  };
  return { root, update };
}

const xAt = (secondsAgo) => (WIDTH * (NUM_SAMPLES - 1 - secondsAgo)) / (NUM_SAMPLES - 1);
const yAt = (value, top) => HEIGHT - 2 - (top ? (HEIGHT - 5) * (value / top) : 0);

/** Runs of samples that have a value; each point is [x, y]. */
function runs(samples, name, top) {
  const found = [[]];
  samples.forEach((sample, index) => {
    if (sample[name] === null) found.push([]);
    else found[found.length - 1].push([xAt(samples.length - 1 - index), yAt(sample[name], top)]);
  });
  return found.filter((run) => run.length);
}

const drawn = (run) => "M" + run.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L");

function line(samples, name, top) {
  return runs(samples, name, top).map((run) => drawn(run.length > 1 ? run : [[run[0][0] - 1, run[0][1]], run[0]])).join("");
}

function filled(samples, name, top) {
  const closed = (run) => [...run, [run[run.length - 1][0], HEIGHT], [run[0][0], HEIGHT]];
  return runs(samples, name, top).map((run) => `${drawn(closed(run))}Z`).join("");
}
