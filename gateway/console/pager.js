// Back and forth through the pages of a list whose pages name the next one.

import { h } from "./dom.js";

/** `shown.after`: where the pages up to the shown one begin, but for the first; `shown.next`: where the next one begins,
 * null at the last. `load` is called when the page is another. */
export function pager(shown, load) {
  const go = (change) => () => {
    change();
    load();
  };
  const back = go(() => shown.after.pop());
  const on = go(() => shown.after.push(shown.next));
  return h(
    "p",
    { class: "row" },
    h("button", { id: "back", type: "button", disabled: shown.after.length === 0, click: back }, "Back"),
    h("button", { id: "next", type: "button", disabled: shown.next === null, click: on }, "Next"),
  );
}
