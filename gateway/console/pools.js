// Node pools: what calls ask of them now.

import { get } from "./api.js";
import { facts, h, redraw, table } from "./dom.js";
import { percent, seconds } from "./format.js";
import { live } from "./live.js";

const COLUMNS = [
  "Pool",
  "#Nodes",
  "#Ready",
  "#Open requests",
  "#Longest wait",
  "#Demand (nodes)",
  "#Backlog",
  "#SLO attained",
];

export function poolsView(main, signal) {
  const note = h("p", { class: "note", role: "status" });
  const told = h("div");
  main.append(h("h1", {}, "Pools"), note, told);
  live(
    (until) => get("pools", {}, until),
    (reply) => redraw(told, drawn(reply)),
    signal,
    note,
  );
}

function drawn({ pools, unplaced, workers, stale, autoscaler }) {
  const rows = pools.map((pool) => [pool.pool ?? "no pool", String(pool.nodes), String(pool.ready), ...load(pool)]);
  return [
    table("Pools, over the last ten seconds", COLUMNS, [...rows, ["routed to no node", "–", "–", ...load(unplaced)]]),
    facts([
      ["Gateway workers", String(workers)],
      ["Autoscaler", autoscaler ?? "none"],
      ["Workers in step", stale === null ? "yes" : `not for ${seconds(stale)}`],
    ]),
  ];
}

function load(of) {
  return [
    String(of.open_requests),
    seconds(of.queue_wait),
    of.demand.toFixed(2),
    seconds(of.backlog),
    percent(of.attainment),
  ];
}
