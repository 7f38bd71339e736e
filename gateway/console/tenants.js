// Tenants, for administrators: who used how much, and of one tenant its SLO, shares, limits and keys.

import { get, getOfAll } from "./api.js";
import { gauge } from "./charts.js";
import { facts, field, h, problem, redraw, table, text } from "./dom.js";
import { isName, ms, percent, when } from "./format.js";
import { live } from "./live.js";

const SHOWN = 200;

export function tenantsView(main, signal, name) {
  return name ? oneTenant(main, signal, name) : allTenants(main, signal);
}

function allTenants(main, signal) {
  const rows = h("div");
  const wanted = h("input", { id: "wanted", autocomplete: "off", spellcheck: "false" });
  main.append(
    h("h1", {}, "Tenants"),
    h(
      "form",
      {
        class: "row",
        submit: (event) => {
          event.preventDefault();
          location.hash = `#/tenants/${encodeURIComponent(wanted.value.trim())}`;
        },
      },
      field("Tenant", wanted),
      h("button", {}, "Show this tenant"),
    ),
    rows,
  );
  getOfAll("usage", { group_by: "tenant" }, signal).then(
    (reply) => redraw(rows, drawnUsage(reply)),
    (error) => signal.aborted || redraw(rows, problem(error)),
  );
}

function drawnUsage({ rows, total }) {
  const columns = ["Tenant", "#Requests", "#Share", "#Tokens in", "#Tokens out", "#Cold"];
  const most = [...rows].sort((one, other) => other.requests - one.requests).slice(0, SHOWN);
  if (most.length === 0) return h("p", {}, "Nobody has called anything in the last 24 hours.");
  return table(
    "Used in the last 24 hours",
    columns,
    most.map((row) => [
      h("a", { href: `#/tenants/${encodeURIComponent(row.tenant)}` }, row.tenant),
      String(row.requests),
      percent(row.requests / total.requests),
      String(row.prompt_tokens),
      String(row.completion_tokens),
      percent(row.requests ? row.cold_starts / row.requests : null),
    ]),
  );
}

function oneTenant(main, signal, name) {
  main.append(h("h1", {}, name), h("p", {}, h("a", { href: "#/tenants" }, "All tenants")));
  if (!isName(name)) {
    main.append(h("p", { class: "problem", role: "alert" }, "No tenant can have this name."));
    return;
  }
  const note = h("p", { class: "note", role: "status" });
  const told = h("div");
  main.append(note, told);
  live(
    (until) => get(`tenants/${encodeURIComponent(name)}`, {}, until),
    (reply) => redraw(told, drawn(reply)),
    signal,
    note,
  );
}

function drawn({ slo, limits, weight, declared, keys, attainment }) {
  return [
    facts([
      ["SLO class", slo.class],
      ["TTFT", ms(slo.ttft_ms)],
      ["TPOT", ms(slo.tpot_ms)],
      ["For", percent(slo.attain)],
      ["Weight", String(weight)],
      ["Declared in serverless.yml", declared ? "yes" : "no"],
      ...Object.entries(limits)
        .filter(([, limit]) => limit !== null)
        .map(([limit, value]) => [`Limit: ${limit}`, text(value)]),
    ]),
    h("h2", {}, "SLO attainment"),
    attainment.length === 0
      ? h("p", {}, "Nothing is promised to this tenant.")
      : h(
          "div",
          {},
          attainment.map((window) => drawnWindow(window, slo.attain)),
        ),
    h("h2", {}, "Keys"),
    table(
      "Keys, without their text",
      ["Key", "Made", "Ended"],
      keys.map((key) => [key.key_id, when(key.created), key.revoked === null ? "–" : when(key.revoked)]),
    ),
  ];
}

function drawnWindow(window, goal) {
  const of = `last ${window.window_seconds / 60} min, ${window.calls} calls`;
  if (window.all === null) return h("p", {}, `${of}: nothing to measure`);
  const parts = [
    ["TTFT", window.ttft],
    ["TPOT", window.tpot],
  ]
    .filter(([, share]) => share !== null)
    .map(([name, share]) => `${name} ${percent(share)}`);
  return gauge(of, window.all, 1, `${percent(window.all)} of ${percent(goal)} wanted (${parts.join(", ")})`);
}
