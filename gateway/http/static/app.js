// The page: asks the gateway once a second, and hands what it says to the parts of the page.

import { ApiError, getJson, hasKey, setKey } from "./api.js";
import { byId, setText } from "./dom.js";
import { span } from "./format.js";
import { makeMap } from "./nodes.js";
import { makePlayground } from "./playground.js";
import { showErrors, showQueues } from "./queues.js";
import { makeRequests } from "./requests.js";
import { makeTiles } from "./tiles.js";

const INTERVAL_MS = 1000;
const LONGEST_PAUSE_MS = 8000;

const showSamples = makeTiles();
const showWorkers = makeMap();
const showRequests = makeRequests();
const offerModels = makePlayground();
let numFailures = 0;
let lostAt = 0;
let refusedKey = false;

async function refresh() {
  const [live, { workers }, { requests }] = await Promise.all([
    getJson("/v1/live"), getJson("/v1/workers"), getJson("/v1/requests?limit=50"),
  ]);
  const models = live.models;
  showSamples(live.samples);
  showWorkers(workers, models.length);
  showRequests(requests);
  showQueues(live.queues, models.length);
  showErrors(live.errors);
  offerModels(models);
  const ready = models.filter((model) => model.is_ready);
  showState(ready.length ? "ready" : "waiting", ready.length ? "Ready" : "Waiting for nodes");
  setText(byId("served"), models.map((model) => model.name).join(", "));
  setText(byId("footer"), `Baton ${live.version.replace("0+unknown", "")} · up for ${span(live.uptime_s)}`);
  numFailures = lostAt = 0;
  byId("lost").hidden = true;
  document.body.classList.remove("is-stale");
}

function showState(state, text) {
  byId("state").dataset.state = state;
  setText(byId("state-text"), text);
}

async function poll() {
  if (!document.hidden) {
    await refresh().catch(onFailure);
  }
  setTimeout(poll, Math.min(INTERVAL_MS * 2 ** Math.max(0, numFailures - 3), LONGEST_PAUSE_MS));
}

function onFailure(error) {
  numFailures += 1;
  if (error instanceof ApiError && error.status === 401) {
    lostAt = 0;
    byId("lost").hidden = true;
    showState("locked", "API key needed");
    byId("key-button").hidden = false;
    if (!refusedKey) askForKey(hasKey() ? "The gateway does not know this key." : "");
    return;
  }
  lostAt ||= Date.now();
  const since = span(Math.max(1, (Date.now() - lostAt) / 1000));
  const text = error instanceof ApiError
    ? `The gateway answers with an error: ${error.message}`
    : `No connection to the gateway for ${since}. The numbers below are the last known ones; the page tries again by itself.`;
  showState("lost", "No connection");
  document.body.classList.add("is-stale");
  byId("lost").hidden = false;
  setText(byId("lost"), text);
}

function askForKey(problem) {
  const dialog = byId("key-dialog");
  setText(byId("key-problem"), problem);
  if (!dialog.open) dialog.showModal();
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value.trim());
  byId("key").value = "";
  refusedKey = false;
  byId("key-dialog").close("used");
});
byId("key-cancel").addEventListener("click", () => byId("key-dialog").close(""));
byId("key-dialog").addEventListener("close", (event) => {
  refusedKey = event.target.returnValue !== "used";
  event.target.returnValue = "";
});
byId("key-button").addEventListener("click", () => askForKey(""));
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) refresh().catch(onFailure);
});

poll();
