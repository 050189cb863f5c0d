// The API's description, drawn from /openapi.json without any other server's script.

import { byId, el, setText } from "./dom.js";

const FIRST = ["generate", "models", "tokens"]; // the other groups follow in the order of the document
const LIMITS = {
  minimum: (value) => `≥ ${value}`, exclusiveMinimum: (value) => `> ${value}`,
  maximum: (value) => `≤ ${value}`, exclusiveMaximum: (value) => `< ${value}`,
  minLength: (value) => `${value} characters or more`, maxLength: (value) => `at most ${value} characters`,
  minItems: (value) => `${value} items or more`, maxItems: (value) => `at most ${value} items`,
  pattern: (value) => `matches ${value}`,
};
const IS_NO_LIMIT = 2 ** 31 - 1; // the bounds of the number format itself are not worth reading

let schemas = {};

async function start() {
  const answer = await fetch("/openapi.json");
  if (!answer.ok) throw new Error(`The gateway answered with HTTP ${answer.status}.`);
  const document_ = await answer.json();
  schemas = document_.components?.schemas ?? {};
  if (!document_.info.version.includes("unknown")) setText(byId("version"), `version ${document_.info.version}`);
  byId("groups").append(...groupsOf(document_.paths).map(group));
  byId("filter").addEventListener("input", filter);
  filter(); // what was typed before the description arrived
  document.getElementById(decodeURIComponent(location.hash.slice(1)))?.setAttribute("open", "");
}

/** The operations as [name of the group, operations], those that most readers look for first. */
function groupsOf(paths) {
  const groups = new Map(FIRST.map((name) => [name, []]));
  for (const [path, operations] of Object.entries(paths)) {
    for (const [method, operation] of Object.entries(operations)) {
      const name = operation.tags?.[0] ?? "others";
      if (!groups.has(name)) groups.set(name, []);
      groups.get(name).push({ path, method, ...operation });
    }
  }
  return [...groups].filter(([, operations]) => operations.length);
}

function group([name, operations]) {
  const head = el("div", { class: "panel-head" }, el("h2", { text: name[0].toUpperCase() + name.slice(1) }));
  return el("section", { class: "panel group" }, head, ...operations.map(operationOf));
}

function operationOf(operation) {
  const summary = el(
    "summary", {},
    el("span", { class: "method", text: operation.method.toUpperCase() }),
    el("span", { class: "path", text: operation.path }),
    el("span", { class: "operation-title", text: operation.summary ?? "" }),
  );
  const words = `${operation.method} ${operation.path} ${operation.summary ?? ""}`.toLowerCase();
  const node = el("details", { class: "operation", id: operation.operationId, data: { words } }, summary);
  return filledOnce(node, () => el("div", { class: "operation-body" }, ...partsOf(operation)));
}

/** Draws what a part folds away when it is first opened: types may contain themselves. */
function filledOnce(node, make) {
  node.addEventListener("toggle", () => node.open && node.append(make()), { once: true });
  return node;
}

function partsOf(operation) {
  const parts = [];
  if (operation.description) parts.push(el("p", { text: operation.description }));
  parts.push(el("p", { class: "panel-note", text: operation.security?.length ? "Needs an API key where there are keys." : "Needs no key." }));
  const parameters = operation.parameters ?? [];
  if (parameters.length) {
    parts.push(el("h3", { text: "Parameters" }));
    parts.push(list(parameters.map((each) => field(`${each.name} (${each.in})`, { description: each.description, ...each.schema }, each.required))));
  }
  for (const [type, { schema }] of Object.entries(operation.requestBody?.content ?? {})) {
    parts.push(el("h3", { text: `Body, ${type}` }), typed(schema));
  }
  parts.push(el("h3", { text: "Answers" }), list(Object.entries(operation.responses).map(answerOf)));
  return parts;
}

function answerOf([status, answer]) {
  const kinds = Object.entries(answer.content ?? {}).map(([type, { schema, itemSchema }]) =>
    el("div", {}, el("span", { class: "field-type", text: type }), typed(schema ?? itemSchema)));
  const head = el("p", {}, el("span", { class: "field-name", text: status }), ` ${answer.description}`);
  return status.startsWith("2") ? el("div", {}, head, ...kinds) : head;
}

function list(children) {
  return el("div", { class: "fields-of" }, ...children);
}

/** The fields of a type, or its name where it has none. */
function typed(schema) {
  const target = resolved(schema);
  return target.properties ? fieldsOf(target) : el("p", { class: "field-type", text: nameOf(schema) }, ...nested(schema));
}

function fieldsOf(schema) {
  const required = new Set(schema.required);
  return list(Object.entries(schema.properties).map(([name, each]) => field(name, each, required.has(name))));
}

function field(name, schema, isRequired) {
  const line = el("p", {}, el("span", { class: "field-name", text: name }), " ", el("span", { class: "field-type", text: described(schema) }));
  if (isRequired) line.append(" ", el("span", { class: "is-required", text: "required" }));
  const note = schema.description ? el("p", { class: "panel-note", text: schema.description }) : null;
  return el("div", {}, line, note, ...nested(schema));
}

/** A folded list of fields for each structured type that this one mentions. */
function nested(schema) {
  const found = partsOfType(schema).map((each) => [nameOf(each), resolved(each)]).filter(([, target]) => target.properties);
  return found.map(([name, target]) => filledOnce(el("details", { class: "nested" }, el("summary", { text: name })), () => fieldsOf(target)));
}

function partsOfType(schema) {
  const choices = resolved(schema).properties ? undefined : resolved(schema).anyOf ?? resolved(schema).oneOf;
  if (choices) return choices.flatMap(partsOfType);
  const inner = schema.items ?? (typeof schema.additionalProperties === "object" ? schema.additionalProperties : null);
  return inner && Object.keys(inner).length ? partsOfType(inner) : [schema];
}

function resolved(schema) {
  return schema.$ref ? schemas[schema.$ref.split("/").pop()] ?? {} : schema;
}

function nameOf(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  const choices = schema.anyOf ?? schema.oneOf;
  if (choices) return [...new Set(choices.map(described))].join(" | ");
  if (schema.type === "array") return schema.items && Object.keys(schema.items).length ? `array of ${nameOf(schema.items)}` : "array";
  return [schema.type ?? "any"].flat().join(" | ");
}

/** The type with its limits and its default. */
function described(schema) {
  const limits = Object.entries(LIMITS)
    .filter(([key]) => schema[key] !== undefined && !(Math.abs(schema[key]) >= IS_NO_LIMIT))
    .map(([key, say]) => say(schema[key]));
  if (schema.default !== undefined && schema.default !== null) limits.push(`default ${JSON.stringify(schema.default)}`);
  return [nameOf(schema), ...limits].join(", ");
}

function filter() {
  const wanted = byId("filter").value.trim().toLowerCase();
  for (const each of document.querySelectorAll(".operation")) each.hidden = !each.dataset.words.includes(wanted);
  for (const each of document.querySelectorAll(".group")) each.hidden = !each.querySelector(".operation:not([hidden])");
}

start().catch((error) => {
  setText(byId("problem"), error.message);
  byId("problem").hidden = false;
});
