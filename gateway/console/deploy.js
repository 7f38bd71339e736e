// Deploy: a folder with an adapter's two files becomes a version of a function.

import { ask } from "./api.js";
import { field, h, problem, redraw } from "./dom.js";
import { bytes, isName } from "./format.js";

const CONFIG = "adapter_config.json";
const WEIGHTS = "adapter_model.safetensors";
const MAX_ENTRIES = 1000; // of a dropped folder

export function deployView(main, signal, name) {
  const files = new Map();
  const found = h("p", { id: "found", role: "status" });
  const answer = h("div", { id: "answer", role: "status" });
  const take = (chosen) => redraw(found, keep(files, chosen));
  const text = { autocomplete: "off", spellcheck: "false", maxlength: 64 };
  const parts = {
    name: h("input", { id: "name", required: true, value: name, ...text }),
    alias: h("input", { id: "alias", ...text }),
  };
  const send = (dryRun) => deploy({ ...parts, answer, files, signal }, dryRun);
  const submit = (event) => {
    event.preventDefault();
    send(false);
  };
  const form = h(
    "form",
    { class: "card", submit },
    field("Function", parts.name, "New or known: 1 to 64 of a-z, 0-9, '.', '_' and '-'."),
    field("Alias", parts.alias, "Empty: latest, which calls use that name no version."),
    dropZone(take, found),
    h(
      "p",
      { class: "row" },
      h("button", { id: "deploy", class: "primary" }, "Deploy"),
      h("button", { id: "check", type: "button", click: () => send(true) }, "Check only"),
    ),
    answer,
  );
  main.append(h("h1", {}, "Deploy"), form);
}

function dropZone(take, found) {
  const change = (event) => take(event.target.files);
  const drop = (event) => {
    event.preventDefault();
    const entries = [...event.dataTransfer.items].map((item) => item.webkitGetAsEntry()).filter(Boolean);
    dropped(entries).then(take, (error) => redraw(found, `It can't be read: ${error.message}`));
  };
  return h(
    "div",
    { id: "drop", class: "drop", dragover: (event) => event.preventDefault(), drop },
    h("p", {}, `Drop a folder with ${CONFIG} and ${WEIGHTS} here, or choose:`),
    h(
      "div",
      { class: "row" },
      field("A folder", h("input", { id: "folder", type: "file", webkitdirectory: true, change })),
      field("The two files", h("input", { id: "pair", type: "file", multiple: true, change })),
    ),
    found,
  );
}

/** Keeps the adapter's files of those chosen; returns what there is now, in words. */
function keep(files, chosen) {
  for (const file of chosen) if (file.name === CONFIG || file.name === WEIGHTS) files.set(file.name, file);
  const missing = [CONFIG, WEIGHTS].filter((each) => !files.has(each));
  const there = [...files.values()].map((file) => `${file.name} (${bytes(file.size)})`).join(" and ");
  return `${there || "Nothing"} chosen.${missing.length ? ` Still missing: ${missing.join(" and ")}.` : ""}`;
}

/** Returns the files that were dropped, and those directly in folders that were. */
async function dropped(entries) {
  const found = [];
  for (const entry of entries) {
    if (entry.isFile) found.push(entry);
    else found.push(...(await listed(entry.createReader())).filter((each) => each.isFile));
  }
  const wanted = found.filter((each) => each.name === CONFIG || each.name === WEIGHTS);
  return Promise.all(wanted.map((each) => new Promise((resolve, reject) => each.file(resolve, reject))));
}

/** A reader gives a folder's entries some at a time, and none when there are no more. */
async function listed(reader) {
  const entries = [];
  while (entries.length < MAX_ENTRIES) {
    const more = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (more.length === 0) break;
    entries.push(...more);
  }
  return entries;
}

async function deploy({ name, alias, files, answer, signal }, dryRun) {
  if (!isName(name.value)) return redraw(answer, problem(new Error("No function can have this name.")));
  if (files.size < 2) return redraw(answer, problem(new Error(`Choose ${CONFIG} and ${WEIGHTS} first.`)));
  redraw(answer, "Sending …");
  const form = new FormData();
  if (alias.value) form.set("alias", alias.value);
  for (const each of [CONFIG, WEIGHTS]) form.set(each, files.get(each), each);
  try {
    const { data } = await ask("POST", `deploy/${encodeURIComponent(name.value)}`, {
      form,
      query: { dry_run: dryRun ? "true" : "" },
      signal,
    });
    return redraw(answer, done(data));
  } catch (error) {
    return signal.aborted ? undefined : redraw(answer, problem(error));
  }
}

function done(reply) {
  const what = `${bytes(reply.bytes)}, rank ${reply.ranks.join(", ")}, on ${reply.targets.join(", ")}`;
  const link = h("a", { href: `#/functions/${encodeURIComponent(reply.function)}` }, reply.function);
  return [
    reply.version === null
      ? h("p", {}, `It can be deployed: ${what}.`)
      : h("p", {}, link, ` has version ${reply.version}: ${what}.`),
    reply.warnings.length > 0 &&
      h(
        "ul",
        {},
        reply.warnings.map((warning) => h("li", {}, warning)),
      ),
  ];
}
