// A question before what can't be taken back at once.

import { h } from "./dom.js";

/** Returns whether the question was answered with yes; leaving the view is a no. */
export function confirmed(question, yes, signal) {
  return new Promise((resolve) => {
    const dialog = h(
      "dialog",
      {
        "aria-labelledby": "question",
        close: () => {
          dialog.remove();
          resolve(dialog.returnValue === "yes");
        },
      },
      h("p", { id: "question" }, question),
      h(
        "p",
        { class: "row" },
        h("button", { id: "yes", class: "primary", type: "button", click: () => dialog.close("yes") }, yes),
        h("button", { type: "button", click: () => dialog.close("") }, "Cancel"),
      ),
    );
    document.body.append(dialog);
    signal.addEventListener("abort", () => dialog.close(""), { once: true });
    dialog.showModal();
  });
}
