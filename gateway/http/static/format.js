// Numbers with units, short and of steady width.

const DASH = "–";

/** A duration in seconds: "850 µs", "42 ms", "1.25 s", "3 min 05 s". */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return DASH;
  if (seconds === 0) return "0 ms";
  if (seconds < 0.001) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 0.01) return `${(seconds * 1e3).toFixed(1)} ms`;
  if (seconds < 1) return `${Math.round(seconds * 1e3)} ms`;
  if (seconds < 10) return `${seconds.toFixed(2)} s`;
  if (seconds < 120) return `${seconds.toFixed(1)} s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)} min ${String(Math.floor(seconds % 60)).padStart(2, "0")} s`;
  if (seconds < 172800) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} days`;
}

/** A time in whole seconds: "now", "4 s ago", "3 min 05 s ago". */
export function ago(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  return whole ? `${span(whole)} ago` : "now";
}

/** A duration in whole seconds: "42 s", "3 min 05 s". */
export function span(seconds) {
  return seconds < 120 ? `${Math.floor(seconds)} s` : duration(seconds);
}

/** A count with separators: "12,480". */
export function count(value) {
  return value === null || value === undefined ? DASH : Math.round(value).toLocaleString("en-US");
}

/** A rate without its unit: "0", "2.4", "128", "12.4k". */
export function rate(value) {
  if (value === null || value === undefined) return DASH;
  if (value >= 10000) return `${(value / 1000).toFixed(1)}k`;
  if (value >= 100 || value === 0) return String(Math.round(value));
  return value.toFixed(1);
}

/** Bytes in binary units: "16 MiB". */
export function bytes(value) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (value < 1024 || unit === "GiB") return `${value >= 100 || unit === "B" ? Math.round(value) : value.toFixed(1)} ${unit}`;
    value /= 1024;
  }
  return DASH;
}

/** A share as a percentage; small ones are not rounded away. */
export function percent(share) {
  if (share > 0 && share < 0.01) return "<1 %";
  return `${Math.round(100 * share)} %`;
}

/** "1 node", "2 nodes". */
export function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}
