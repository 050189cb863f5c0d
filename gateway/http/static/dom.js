// Makes and updates elements. All data goes in as text: nothing here or elsewhere on the page parses it as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** The element of the page with this id. */
export const byId = (id) => document.getElementById(id);

/**
 * A new element. `attributes` may hold `class`, `text`, `style` (custom properties and others, by name), listeners
 * (`onclick`), `data` and any attribute; false, null and undefined leave an attribute out. Children are nodes or text.
 */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** As `el`, for SVG. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (name === "text") node.textContent = value;
    else if (name === "style") setStyle(node, value);
    else if (name === "data") Object.assign(node.dataset, value);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** Sets style properties one by one, which the page's security policy allows, unlike a style attribute. */
export function setStyle(node, properties) {
  for (const [name, value] of Object.entries(properties)) node.style.setProperty(name, value);
}

/** Changes a text only if it differs, so that a selection in it survives. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/**
 * Makes the children of `parent` one for each item, in order, reusing the child of the same key.
 * `make(item)` returns a new child, `update(child, item)` brings any child up to date.
 */
export function keyed(parent, items, { key, make, update }) {
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let next = parent.firstElementChild;
  for (const item of items) {
    const name = String(key(item));
    let child = known.get(name);
    known.delete(name);
    if (!child) {
      child = make(item);
      child.dataset.key = name;
    }
    update(child, item);
    if (child === next) next = next.nextElementSibling;
    else parent.insertBefore(child, next);
  }
  for (const child of known.values()) child.remove();
}
