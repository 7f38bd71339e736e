// The functions: a page at a time, by the API's own paging, so that tens of thousands are as quick as ten.

import { get, session } from "./api.js";
import { field, h, problem, redraw, table } from "./dom.js";
import { bytes, percent, pointed, seconds } from "./format.js";
import { live } from "./live.js";
import { functionFigures } from "./metrics.js";
import { pager } from "./pager.js";
import { before, canBegin } from "./search.js";

const PAGE = 50;
const SHOWN_ALIASES = 3;

export function functionsView(main, signal) {
  const state = { asked: 0, prefix: "", after: [], next: null, items: [], usage: new Map(), figures: null };
  const rows = h("div");
  const note = h("p", { class: "note", role: "status" });
  const search = h("input", { id: "search", type: "search", autocomplete: "off", spellcheck: "false" });
  const load = () =>
    loadPage(state, signal).then(
      () => draw(),
      (error) => signal.aborted || redraw(rows, problem(error)),
    );
  const draw = () => redraw(rows, drawn(state), pager(state, load));
  main.append(
    h("h1", {}, "Functions"),
    h(
      "form",
      {
        class: "row",
        role: "search",
        submit: (event) => {
          event.preventDefault();
          Object.assign(state, { prefix: search.value.trim(), after: [] });
          load();
        },
      },
      field("Name begins with", search),
      h("button", {}, "Search"),
      h("a", { href: "#/deploy" }, "Deploy a function"),
    ),
    rows,
    note,
  );
  load();
  live(figures, (loaded) => draw(Object.assign(state, loaded)), signal, note);
}

/** One request: an admin key may read the metrics; of a tenant's key the usage is what tells of all functions. */
async function figures(signal) {
  if (session.admin) return { figures: functionFigures(await get("metrics", {}, signal), session.tenant) };
  return { usage: await usage(signal) };
}

/** Requests and cold starts of this hour and the one before, by function. */
async function usage(signal) {
  const now = Date.now() / 1000;
  const reply = await get("usage", { from: Math.floor(now - 3600), group_by: "function" }, signal);
  const minutes = Math.max(1, (now - reply.from) / 60);
  return new Map(
    reply.rows.map((row) => [
      row.function,
      {
        rate: row.requests / minutes,
        cold: row.requests ? row.cold_starts / row.requests : null,
      },
    ]),
  );
}

async function loadPage(state, signal) {
  if (!canBegin(state.prefix)) return Object.assign(state, { items: [], next: null });
  const asked = (state.asked += 1);
  const after = state.after.at(-1) ?? before(state.prefix);
  const [page, used] = await Promise.all([
    get("functions", { limit: PAGE, after }, signal),
    session.admin ? usage(signal) : state.usage,
  ]);
  if (asked !== state.asked) return state; // a later search is under way
  const wanted = page.functions.filter((each) => each.name.startsWith(state.prefix));
  return Object.assign(state, {
    items: wanted,
    usage: used,
    next: wanted.length < page.functions.length ? null : page.next,
  });
}

function drawn(state) {
  const columns = ["Function", "Versions", "Aliases", "#Rank", "#Size", "On nodes", "#Calls/min", "#Cold"];
  if (session.admin) columns.push("#TTFT p50", "#p95", "#Errors");
  if (state.items.length === 0) return h("p", {}, state.prefix ? "No function's name begins so." : "No functions yet.");
  return table(
    "By name",
    columns,
    state.items.map((item) => row(item, state)),
  );
}

function row(item, { usage: used, figures: measured }) {
  const link = h("a", { id: `function-${item.name}`, href: `#/functions/${encodeURIComponent(item.name)}` }, item.name);
  if (item.error) return [link, item.error];
  const told = used.get(item.name);
  const cells = [
    link,
    String(item.versions.length),
    aliases(item.aliases),
    item.ranks.join(", "),
    bytes(item.bytes),
    tiers(item.residency),
    told ? told.rate.toFixed(told.rate < 10 ? 2 : 0) : "0",
    told ? percent(told.cold) : "–",
  ];
  if (!session.admin) return cells;
  const own = measured?.get(item.name);
  return [...cells, seconds(own?.p50), seconds(own?.p95), own ? percent(own.errors) : "–"];
}

function aliases(all) {
  const entries = Object.entries(all);
  const more = entries.length > SHOWN_ALIASES ? ` and ${entries.length - SHOWN_ALIASES} more` : "";
  return (
    entries
      .slice(0, SHOWN_ALIASES)
      .map(([name, target]) => `${name}: ${pointed(target)}`)
      .join("; ") + more
  );
}

function tiers(residency) {
  const counts = new Map();
  for (const { tier } of residency) counts.set(tier, (counts.get(tier) ?? 0) + 1);
  return [...counts].map(([tier, count]) => `${count} ${tier}`).join(", ") || "–";
}
