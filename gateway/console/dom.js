// Elements. What users typed becomes text nodes and values of attributes here, never markup.

const SVG = "http://www.w3.org/2000/svg";

/** Returns an element. Functions among the attributes listen to the event of that name; null and false are left out. */
export function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...present(children));
  return element;
}

function present(children) {
  return children.flat().filter((child) => child !== null && child !== undefined && child !== false);
}

/** Replaces what `container` holds. What looks the same stays, and the focus stays on the element of the same id. */
export function redraw(container, ...children) {
  const made = present(children).map((child) => (child instanceof Node ? child : new Text(child)));
  const old = [...container.childNodes];
  if (made.length === old.length && made.every((node, index) => node.isEqualNode(old[index]))) return;
  const focused = container.contains(document.activeElement) ? document.activeElement.id : "";
  container.replaceChildren(...made);
  if (focused) document.getElementById(focused)?.focus();
}

/** Returns a table in a region that scrolls sideways. Columns are texts; one that begins with "#" holds numbers. */
export function table(caption, columns, rows) {
  const numeric = columns.map((column) => column.startsWith("#"));
  const head = columns.map((column, index) =>
    h("th", { scope: "col", class: numeric[index] && "number" }, column.replace(/^#/, "")),
  );
  const body = rows.map((cells) =>
    h(
      "tr",
      {},
      cells.map((cell, index) =>
        index === 0 ? h("th", { scope: "row" }, cell) : h("td", { class: numeric[index] && "number" }, cell),
      ),
    ),
  );
  return h(
    "div",
    { class: "scroll", role: "region", tabindex: "0", "aria-label": caption },
    h("table", {}, h("caption", {}, caption), h("thead", {}, h("tr", {}, head)), h("tbody", {}, body)),
  );
}

/** Returns a list of names and values. */
export function facts(entries) {
  return h(
    "dl",
    { class: "facts" },
    entries.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))),
  );
}

/** Returns a labelled control; the label is above it. */
export function field(label, control, hint = "") {
  if (hint) control.setAttribute("aria-describedby", `${control.id}-hint`);
  return h(
    "p",
    { class: "field" },
    h("label", { for: control.id }, label),
    control,
    hint && h("small", { id: `${control.id}-hint` }, hint),
  );
}

/** Returns an error as people read it, with its list of problems when there are several. */
export function problem(error) {
  const details = error.details ?? [];
  const columns = [...new Set(details.flatMap((each) => Object.keys(each)))];
  return h(
    "div",
    { class: "problem", role: "alert" },
    h("p", {}, error.message, error.requestId ? ` (request ${error.requestId})` : ""),
    details.length > 0 &&
      table(
        `${details.length} problems`,
        columns,
        details.map((each) => columns.map((column) => text(each[column]))),
      ),
  );
}

/** Returns a value of JSON as text. */
export function text(value) {
  if (value === null || value === undefined) return "–";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}
