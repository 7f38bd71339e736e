// Asynchronous calls: a page of them at a time; those that wait are cancelled, those that failed queued again.

import { ask, get } from "./api.js";
import { confirmed } from "./confirm.js";
import { facts, field, h, problem, redraw, table } from "./dom.js";
import { isName, when } from "./format.js";
import { live } from "./live.js";
import { pager } from "./pager.js";

const PAGE = 20;
const STATES = ["queued", "running", "succeeded", "failed", "cancelled", "expired"];
const DEAD = ["failed", "expired"];
const OPEN = ["queued", "running"];

export function eventsView(main, signal, id) {
  return id ? oneEvent(main, signal, id) : allEvents(main, signal);
}

function allEvents(main, signal) {
  const shown = { asked: 0, state: "", function: "", after: [], items: [], next: null };
  const rows = h("div");
  const answer = h("div", { role: "status" });
  const note = h("p", { class: "note", role: "status" });
  const state = h(
    "select",
    { id: "state" },
    h("option", { value: "" }, "any"),
    STATES.map((each) => h("option", {}, each)),
  );
  const of = h("input", { id: "of", autocomplete: "off", spellcheck: "false" });
  const draw = () => redraw(rows, drawn(shown, change), pager(shown, load));
  const load = () =>
    loadPage(shown, signal).then(draw, (error) => {
      if (!signal.aborted) redraw(rows, problem(error));
    });
  const change = (work) => done(answer, signal, work).then(load);
  main.append(
    h("h1", {}, "Events"),
    h(
      "form",
      {
        class: "row",
        role: "search",
        submit: (event) => {
          event.preventDefault();
          Object.assign(shown, { state: state.value, function: of.value.trim(), after: [] });
          load();
        },
      },
      field("State", state),
      field("Function", of),
      h("button", {}, "Show"),
      h(
        "button",
        { id: "redrive-all", type: "button", click: () => change(() => redriveAll(shown.function, signal)) },
        "Queue all that failed again",
      ),
    ),
    answer,
    rows,
    note,
  );
  live((until) => loadPage(shown, until), draw, signal, note);
}

/** Asks for the page that is to be shown; a later question's answer counts. */
async function loadPage(shown, signal) {
  if (shown.function && !isName(shown.function)) {
    Object.assign(shown, { items: [], next: null });
    return;
  }
  const asked = (shown.asked += 1);
  const query = { state: shown.state, function: shown.function, limit: PAGE, after: shown.after.at(-1) };
  const page = await get("invocations", query, signal);
  if (asked === shown.asked) Object.assign(shown, { items: page.invocations, next: page.next });
}

function drawn({ items }, change) {
  if (items.length === 0) return h("p", {}, "No asynchronous calls.");
  return table(
    "Those that run or wait first, then the latest that ended",
    ["Call", "Function", "State", "Accepted", "#Attempts", "Error", "Change"],
    items.map((item) => [
      h("a", { id: `event-${item.id}`, href: `#/events/${encodeURIComponent(item.id)}` }, item.id),
      target(item),
      item.state,
      when(item.created),
      attempts(item),
      item.error ? `${item.error.type}: ${item.error.message}` : "–",
      button(item, change) ?? "–",
    ]),
  );
}

/** Returns null for a call of which nothing can be changed. */
function button(item, change) {
  if (DEAD.includes(item.state)) {
    const click = () => change((signal) => redrive(item.id, signal));
    return h(
      "button",
      { id: `redrive-${item.id}`, type: "button", "aria-label": `Queue again ${item.id}`, click },
      "Queue again",
    );
  }
  if (!OPEN.includes(item.state)) return null;
  const click = () => change((signal) => cancel(item.id, signal));
  return h("button", { id: `cancel-${item.id}`, type: "button", "aria-label": `Cancel ${item.id}`, click }, "Cancel");
}

function target({ function: name, qualifier }) {
  return qualifier ? `${name}:${qualifier}` : name;
}

function attempts(item) {
  return `${item.attempts.length} of ${item.retries + 1}`;
}

/** Says what `work` has come to; `work` returns a text, or an empty one if it was not done. */
async function done(answer, signal, work) {
  try {
    redraw(answer, await work(signal));
  } catch (error) {
    if (!signal.aborted) redraw(answer, problem(error));
  }
}

async function redrive(id, signal) {
  await ask("POST", `dead-letters/${encodeURIComponent(id)}/redrive`, { signal });
  return `${id} is queued again.`;
}

async function redriveAll(name, signal) {
  const whose = name ? `of ${name}` : "of all functions";
  if (!(await confirmed(`Queue the calls ${whose} again that failed or expired?`, "Queue again", signal))) return "";
  const { data } = await ask("POST", "dead-letters/redrive", { query: { function: name }, signal });
  return `${data.redriven} queued again${data.more ? "; there may be more" : ""}.`;
}

async function cancel(id, signal) {
  if (!(await confirmed(`Cancel ${id}?`, "Cancel the call", signal))) return "";
  await ask("DELETE", `invocations/${encodeURIComponent(id)}`, { signal });
  return `${id} is cancelled.`;
}

function oneEvent(main, signal, id) {
  const answer = h("div", { role: "status" });
  const note = h("p", { class: "note", role: "status" });
  const told = h("div");
  const load = (until) => get(`invocations/${encodeURIComponent(id)}`, {}, until);
  const change = (work) =>
    done(answer, signal, work)
      .then(() => load(signal))
      .then(draw, () => {}); // the live figures say what is wrong
  const draw = (event) => redraw(told, drawnEvent(event, change));
  main.append(h("h1", {}, id), h("p", {}, h("a", { href: "#/events" }, "All events")), answer, note, told);
  live(load, draw, signal, note);
}

function drawnEvent(event, change) {
  const { delivery } = event;
  return [
    facts([
      ["Function", target(event)],
      ["State", event.state],
      ["Accepted", when(event.created)],
      [event.ended === null ? "Too old from" : "Ended", when(event.ended ?? event.deadline)],
      ["Attempts", attempts(event)],
      ["Destination", delivery ? `${delivery.state}, ${delivery.attempts} tries` : "none"],
    ]),
    event.error && h("p", { class: "problem" }, `${event.error.type}: ${event.error.message}`),
    delivery?.problem && h("p", { class: "problem" }, `Its destination: ${delivery.problem}`),
    h("p", {}, button(event, change)),
    event.attempts.length > 0 &&
      table(
        "Attempts",
        ["Began", "Ended", "Error"],
        event.attempts.map((each) => [
          when(each.started),
          each.ended === null ? "–" : when(each.ended),
          each.error ? `${each.error.type}: ${each.error.message}` : "–",
        ]),
      ),
    event.result && h("h2", {}, "Output"),
    event.result && h("pre", { class: "output", tabindex: "0", "aria-label": "Output" }, event.result.output.text),
  ].flat();
}
