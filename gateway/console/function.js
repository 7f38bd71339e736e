// One function: where it points and where it is, calls that stream, what is expected of it, back to an earlier version.

import { ask, get } from "./api.js";
import { confirmed } from "./confirm.js";
import { facts, field, h, problem, redraw, table, text } from "./dom.js";
import { bytes, isName, ms, percent, pointed, short, when } from "./format.js";
import { live } from "./live.js";
import { playground } from "./playground.js";

export function functionView(main, signal, name) {
  main.append(h("h1", {}, name));
  if (!isName(name)) {
    main.append(h("p", { class: "problem", role: "alert" }, "No function can have this name."));
    return;
  }
  const shared = {
    name,
    path: `functions/${encodeURIComponent(name)}`,
    signal,
    etag: null,
    record: null,
    answer: h("div", { role: "status" }),
  };
  const note = h("p", { class: "note", role: "status" });
  const [overview, aliases, versions] = [h("div"), h("div"), h("div")];
  const player = playground(name, signal);
  main.append(
    links(name),
    note,
    section("Now", overview),
    player.element,
    section("Aliases", aliases, shared.answer),
    section("Versions", versions),
    warmth(shared),
  );
  const draw = ({ data, etag }) => {
    redraw(overview, drawnOverview(data));
    if (etag === shared.etag) return;
    Object.assign(shared, { etag, record: data });
    redraw(aliases, drawnAliases(shared));
    redraw(versions, drawnVersions(data));
    player.offer(data);
  };
  live((until) => ask("GET", shared.path, { signal: until }), draw, signal, note);
}

function links(name) {
  const deploy = h("a", { href: `#/deploy/${encodeURIComponent(name)}` }, "Deploy a version");
  return h("p", {}, h("a", { href: "#/functions" }, "All functions"), " · ", deploy);
}

function section(title, ...children) {
  return h("section", { class: "card" }, h("h2", {}, title), ...children);
}

function drawnOverview(record) {
  const hour = record.last_hour;
  const places = record.residency.map((place) => [place.node, `version ${place.version}`, place.tier]);
  return [
    facts([
      ["Calls, last hour", String(hour.invocations)],
      ["Calls per minute", (hour.invocations / 60).toFixed(2)],
      ["Errors", hour.invocations ? percent(hour.failures / hour.invocations) : "–"],
      ["Mean TTFT", ms(hour.mean_ttft_ms)],
      ["Tokens in", String(hour.prompt_tokens)],
      ["Tokens out", String(hour.completion_tokens)],
    ]),
    places.length
      ? table("On nodes", ["Node", "Version", "Tier"], places)
      : h("p", {}, "On no node, as far as your calls tell."),
  ].flat();
}

function drawnAliases(shared) {
  const rows = Object.entries(shared.record.aliases).map(([alias, target]) => [
    alias,
    pointed(target),
    h(
      "button",
      { id: `rollback-${alias}`, type: "button", click: () => rollBack(shared, alias) },
      `Roll back ${alias}`,
    ),
  ]);
  return table("Where each one points", ["Alias", "Points to", "Change"], rows);
}

/** Says first where the alias would point; then `If-Match` refuses it if somebody else has changed the function. */
async function rollBack(shared, alias) {
  const { answer } = shared;
  try {
    const { data: now, etag } = await ask("GET", `${shared.path}/aliases/${encodeURIComponent(alias)}`, {
      signal: shared.signal,
    });
    if (now.history.length === 0) return redraw(answer, `${alias} has pointed to nothing else yet.`);
    const question = `${alias} of ${shared.name} points to ${targets(now)}. Point it to what it was before?`;
    if (!(await confirmed(question, "Roll back", shared.signal))) return undefined;
    const { data } = await ask("POST", `${shared.path}/rollback`, {
      json: { alias },
      headers: { "if-match": etag },
      signal: shared.signal,
    });
    return redraw(answer, `${alias} points to ${targets(data)} now.`);
  } catch (error) {
    return shared.signal.aborted ? undefined : redraw(answer, problem(error));
  }
}

function targets(alias) {
  return pointed(alias.version ?? alias.weights);
}

function drawnVersions(record) {
  const rows = [...record.versions]
    .reverse()
    .map((version) => [
      `version ${version.version}`,
      when(version.created),
      version.ranks.join(", "),
      bytes(version.bytes),
      version.targets.join(", "),
      h("code", { title: version.digest }, short(version.digest)),
    ]);
  const columns = ["Version", "Deployed", "#Rank", "#Size", "Projections", "Digest"];
  const policy = h("pre", { tabindex: "0", "aria-label": "Policy" }, JSON.stringify(record.policy, null, 2));
  return [table("The latest first", columns, rows), h("details", {}, h("summary", {}, "Policy"), policy)];
}

function warmth(shared) {
  const answer = h("div", { role: "status" });
  const told = h("div");
  const tier = h(
    "select",
    { id: "tier" },
    ["device", "host"].map((each) => h("option", {}, each)),
  );
  const copies = h("input", { id: "copies", type: "number", min: 1, max: 16, value: 1 });
  const form = h(
    "form",
    {
      class: "row",
      submit: (event) => {
        event.preventDefault();
        order(shared, { tier: tier.value, copies: Number(copies.value) }, answer).then(() => forecast(shared, told));
      },
    },
    field("Tier", tier),
    field("Nodes", copies),
    h("button", {}, "Warm now"),
  );
  const again = h("button", { type: "button", click: () => forecast(shared, told) }, "Forecast again");
  forecast(shared, told);
  return section("Warm", form, answer, h("h3", {}, "Forecast"), told, again);
}

async function order(shared, json, answer) {
  redraw(answer, "Asking the nodes …");
  try {
    const { data } = await ask("POST", `${shared.path}/warm`, { json, signal: shared.signal });
    const rows = data.places.map((place) => [place.node, `version ${place.version}`, place.tier, text(place.error)]);
    redraw(
      answer,
      data.ready ? "It is warm." : "It is on its way.",
      table("Places", ["Node", "Version", "Tier", "Error"], rows),
    );
  } catch (error) {
    if (!shared.signal.aborted) redraw(answer, problem(error));
  }
}

async function forecast(shared, told) {
  try {
    const reply = await get(`${shared.path}/forecast`, {}, shared.signal);
    redraw(told, drawnForecast(reply));
  } catch (error) {
    if (!shared.signal.aborted) redraw(told, problem(error));
  }
}

function drawnForecast(reply) {
  const chances = Object.entries(reply.chances ?? {}).map(([horizon, chance]) => [
    horizon.replaceAll("_", " "),
    percent(chance),
  ]);
  const wanted = reply.wanted.map((place) => [place.node, place.tier, place.cause, when(place.since)]);
  return [
    chances.length
      ? facts(chances)
      : h("p", {}, "Nothing is expected: it was not called in the last 30 minutes, or calls are not watched yet."),
    wanted.length > 0 && table("Wanted on nodes", ["Node", "Tier", "Because of", "Since"], wanted),
  ].flat();
}
