// The nodes as the scheduler sees them: batch, queue, memory, and which adapters are in which tier.

import { get } from "./api.js";
import { gauge, memoryMap } from "./charts.js";
import { facts, field, h, problem, redraw, table } from "./dom.js";
import { bytes, seconds, short } from "./format.js";
import { live } from "./live.js";

const SHOWN_NODES = 50;
const SHOWN_ADAPTERS = 200;

export function nodesView(main, signal) {
  const note = h("p", { class: "note", role: "status" });
  const search = h("input", { id: "search", type: "search", autocomplete: "off", input: () => draw() });
  const summary = h("p");
  const cards = h("div");
  const known = new Map();
  let nodes = [];
  const draw = () => {
    const wanted = nodes.filter(
      ({ record }) => record.id.includes(search.value) || (record.pool ?? "").includes(search.value),
    );
    const more = wanted.length > SHOWN_NODES ? `; the first ${SHOWN_NODES} are shown` : "";
    redraw(summary, `Nodes: ${nodes.length}; matching: ${wanted.length}${more}.`);
    redraw(
      cards,
      wanted.slice(0, SHOWN_NODES).map((node) => card(node, known, signal)),
    );
  };
  main.append(h("h1", {}, "Nodes"), field("Node or pool contains", search), summary, note, cards);
  live(
    (until) => get("nodes", {}, until),
    (reply) => {
      nodes = reply.nodes;
      draw();
    },
    signal,
    note,
  );
}

/** A node's card stays the same element, so that what was opened in it stays open. */
function card(node, known, signal) {
  const { record } = node;
  if (!known.has(record.id)) {
    const parts = { figures: h("div"), map: h("div"), adapters: h("div") };
    const element = h(
      "section",
      { class: "card", "aria-label": record.id },
      h("h2", {}, record.id),
      parts.figures,
      parts.map,
      h(
        "details",
        { toggle: (event) => event.target.open && list(record.id, parts.adapters, signal) },
        h("summary", {}, `Adapters of ${record.id}, as it says itself`),
        parts.adapters,
      ),
    );
    known.set(record.id, { ...parts, element });
  }
  const { element, figures, map } = known.get(record.id);
  redraw(figures, drawnFigures(node));
  redraw(map, memoryMap(record.residents, record.adapter_bytes ?? 0));
  return element;
}

function drawnFigures({ record, reserved, age, circuit }) {
  const blocks = record.kv_blocks ?? 0;
  const helpers =
    record.cpu_workers === undefined || record.cpu_workers === null
      ? "not reported"
      : `${record.cpu_workers}${record.cpu_workers_reason ? ` (${record.cpu_workers_reason})` : ""}`;
  return [
    facts([
      ["State", record.error ? `${record.state}: ${record.error}` : record.state],
      ["Last heard of", `${seconds(age)} ago`],
      ["Circuit", circuit],
      ["Device", record.device || "–"],
      ["Pool", record.pool || "–"],
      ["CPU workers", helpers],
      ["Loading", bytes(record.loading_bytes ?? 0)],
      [
        "Prefetched",
        `${bytes(record.prefetch_useful_bytes ?? 0)} useful, ${bytes(record.prefetch_wasted_bytes ?? 0)} wasted`,
      ],
    ]),
    gauge("Batch", record.running, record.max_rows ?? 0),
    gauge("Queue", record.queued + reserved, record.queue_limit),
    gauge("KV blocks", blocks - record.kv_blocks_free, blocks),
  ];
}

async function list(id, into, signal) {
  try {
    const reply = await get(`nodes/${encodeURIComponent(id)}/adapters`, {}, signal);
    const rows = reply.adapters
      .slice(0, SHOWN_ADAPTERS)
      .map((each) => [
        h("code", { title: each.digest }, short(each.digest)),
        each.tier,
        bytes(each.bytes),
        each.ranks.join(", "),
        String(each.in_use),
        String(each.waiting),
        each.layers ? layers(each.layers) : "–",
      ]);
    const more = reply.adapters.length - rows.length + reply.unnamed;
    redraw(
      into,
      table("Adapters", ["Digest", "Tier", "#Size", "#Rank", "#In use", "#Waiting", "Layers"], rows),
      more > 0 && h("p", {}, `${more} more.`),
    );
  } catch (error) {
    if (!signal.aborted) redraw(into, problem(error));
  }
}

/** How many layers have come how far. */
function layers(names) {
  const counts = new Map();
  for (const name of names) counts.set(name, (counts.get(name) ?? 0) + 1);
  return [...counts].map(([name, count]) => `${count} ${name}`).join(", ");
}
