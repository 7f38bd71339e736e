// Batches: many calls in one file each, how far they have come, and what was wrong.

import { ask, get } from "./api.js";
import { gauge } from "./charts.js";
import { confirmed } from "./confirm.js";
import { facts, h, problem, redraw, table, text } from "./dom.js";
import { when } from "./format.js";
import { live } from "./live.js";
import { pager } from "./pager.js";

const PAGE = 20;
const OPEN = ["validating", "in_progress"];

export function batchesView(main, signal, id) {
  return id ? oneBatch(main, signal, id) : allBatches(main, signal);
}

function allBatches(main, signal) {
  const shown = { asked: 0, after: [], items: [], next: null };
  const rows = h("div");
  const note = h("p", { class: "note", role: "status" });
  const draw = () => redraw(rows, drawn(shown.items), pager(shown, load));
  const load = () =>
    loadPage(shown, signal).then(draw, (error) => {
      if (!signal.aborted) redraw(rows, problem(error));
    });
  main.append(h("h1", {}, "Batches"), rows, note);
  live((until) => loadPage(shown, until), draw, signal, note);
}

/** Asks for the page that is to be shown; a later question's answer counts. */
async function loadPage(shown, signal) {
  const asked = (shown.asked += 1);
  const page = await get("v1/batches", { limit: PAGE, after: shown.after.at(-1) }, signal);
  if (asked === shown.asked) Object.assign(shown, { items: page.data, next: page.has_more ? page.last_id : null });
}

function drawn(batches) {
  if (batches.length === 0) return h("p", {}, "No batches.");
  return table(
    "The latest first",
    ["Batch", "Endpoint", "Status", "#Calls", "#Done", "#Failed", "Made"],
    batches.map((batch) => [
      h("a", { id: `batch-${batch.id}`, href: `#/batches/${encodeURIComponent(batch.id)}` }, batch.id),
      batch.endpoint,
      batch.status,
      String(batch.request_counts.total),
      String(batch.request_counts.completed),
      String(batch.request_counts.failed),
      when(batch.created_at),
    ]),
  );
}

function oneBatch(main, signal, id) {
  const answer = h("div", { role: "status" });
  const note = h("p", { class: "note", role: "status" });
  const told = h("div");
  const load = (until) => get(`v1/batches/${encodeURIComponent(id)}`, {}, until);
  const draw = (batch) => redraw(told, drawnBatch(batch, end));
  const end = async () => {
    const ended = await cancel(id, answer, signal);
    if (ended) draw(ended);
  };
  main.append(h("h1", {}, id), h("p", {}, h("a", { href: "#/batches" }, "All batches")), answer, note, told);
  live(load, draw, signal, note);
}

/** Returns the batch as it is then; null when it was not asked to end. */
async function cancel(id, answer, signal) {
  if (!(await confirmed(`Cancel ${id}? The answers that it has are kept.`, "Cancel the batch", signal))) return null;
  try {
    const { data } = await ask("POST", `v1/batches/${encodeURIComponent(id)}/cancel`, { signal });
    redraw(answer, `${id} is ${data.status}.`);
    return data;
  } catch (error) {
    if (!signal.aborted) redraw(answer, problem(error));
    return null;
  }
}

function drawnBatch(batch, end) {
  const { total, completed, failed } = batch.request_counts;
  const done = completed + failed;
  return [
    facts([
      ["Status", batch.status],
      ["Endpoint", batch.endpoint],
      ["Made", when(batch.created_at)],
      ["Expires", when(batch.expires_at)],
      ["Input", batch.input_file_id],
      ["Output", text(batch.output_file_id)],
      ["Errors", text(batch.error_file_id)],
      ...Object.entries(batch.metadata ?? {}),
    ]),
    total > 0 && gauge("Calls", done, total, `${done} of ${total}, ${failed} failed`),
    OPEN.includes(batch.status) && h("p", {}, h("button", { id: "cancel", type: "button", click: end }, "Cancel")),
    (batch.output_file_id || batch.error_file_id) &&
      h("p", {}, "Its files: ", h("code", {}, `garnish batch get ${batch.id}`), " prints them."),
    batch.errors &&
      table(
        "What is wrong",
        ["Line", "Code", "Message", "Field"],
        batch.errors.data.map((each) => [text(each.line), each.code, each.message, text(each.param)]),
      ),
  ].flat();
}
