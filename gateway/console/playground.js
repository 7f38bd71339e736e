// Try a function: its answer as it streams, and the calls made so far, step by step.

import { events, get } from "./api.js";
import { callKeeper, callsOf } from "./calls.js";
import { waterfall } from "./charts.js";
import { field, h, problem, redraw, table } from "./dom.js";
import { ms, seconds } from "./format.js";

const MAX_SHOWN_CHARACTERS = 200000;
const MAX_LISTED = 20;

export function playground(name, signal) {
  const form = {
    prompt: h("textarea", { id: "prompt", rows: 4, required: true }, "Once upon a time"),
    qualifier: h("select", { id: "qualifier" }, h("option", { value: "" }, "latest")),
    chat: h(
      "select",
      { id: "chat" },
      h("option", { value: "" }, "the prompt as it is"),
      h("option", { value: "chat" }, "a message of a chat"),
    ),
    tokens: h("input", { id: "tokens", type: "number", min: 1, value: 64 }),
    temperature: h("input", { id: "temperature", type: "number", min: 0, max: 2, step: "any", value: 0 }),
    call: h("button", { class: "primary", id: "call" }, "Call"),
    stop: h("button", { id: "stop", type: "button", disabled: true, click: () => run?.abort() }, "Stop"),
    output: h("pre", { id: "output", class: "output", tabindex: "0", "aria-label": "Answer" }),
    status: h("div", { id: "call-status", role: "status" }),
    calls: h("div"),
  };
  let run = null;
  signal.addEventListener("abort", () => run?.abort(), { once: true });
  const submit = async (event) => {
    event.preventDefault();
    run = new AbortController();
    await stream(name, form, run.signal);
    if (!signal.aborted) redraw(form.calls, drawnCalls(name, signal));
  };
  redraw(form.calls, drawnCalls(name, signal));
  return { element: laidOut(form, submit), offer: (record) => offer(form.qualifier, record) };
}

function laidOut(form, submit) {
  return h(
    "section",
    { class: "card" },
    h("h2", {}, "Try it"),
    h(
      "form",
      { submit },
      field("Prompt", form.prompt),
      h(
        "div",
        { class: "row" },
        field("Version or alias", form.qualifier),
        field("Sent as", form.chat),
        field("Most tokens", form.tokens),
        field("Temperature", form.temperature),
        form.call,
        form.stop,
      ),
    ),
    form.status,
    form.output,
    h("h3", {}, "Calls from this page"),
    form.calls,
  );
}

/** The choices of the qualifier; what was chosen stays chosen while it exists. */
function offer(select, record) {
  const chosen = select.value;
  const names = [...Object.keys(record.aliases), ...record.versions.map((each) => String(each.version)).reverse()];
  redraw(
    select,
    names.map((each) => h("option", { value: each }, each)),
  );
  select.value = names.includes(chosen) ? chosen : "latest";
}

async function stream(name, form, signal) {
  const shown = new Text("");
  form.output.replaceChildren(shown);
  form.call.disabled = true;
  form.stop.disabled = false;
  redraw(form.status, "Waiting for the first token …");
  const keepCall = callKeeper();
  const call = { function: name, at: Date.now(), serverTiming: "", error: null, done: null };
  try {
    for await (const { event, data } of events(target(name, form.qualifier.value), asked(form), signal)) {
      if (event === "token") {
        if (shown.length === 0) redraw(form.status, "Streaming …");
        if (shown.length < MAX_SHOWN_CHARACTERS) shown.appendData(data.text);
      } else if (event === "error")
        throw Object.assign(new Error(data.error.message), { requestId: data.error.request_id });
      else if (event === "done") Object.assign(call, { done: data, serverTiming: data.server_timing });
    }
    if (call.done === null) throw new Error("the stream ended before the answer did");
    redraw(form.status, said(call.done));
  } catch (error) {
    call.error = signal.aborted ? "stopped" : error.message;
    redraw(form.status, signal.aborted ? "Stopped." : problem(error));
  } finally {
    form.call.disabled = false;
    form.stop.disabled = true;
    keepCall(call);
  }
}

function target(name, qualifier) {
  return `invoke/${encodeURIComponent(name)}${qualifier ? `:${encodeURIComponent(qualifier)}` : ""}`;
}

function asked(form) {
  const content = form.prompt.value;
  const source = form.chat.value ? { messages: [{ role: "user", content }] } : { prompt: content };
  return {
    ...source,
    stream: true,
    max_tokens: Number(form.tokens.value),
    temperature: Number(form.temperature.value),
  };
}

function said(done) {
  const cold = done.timing.cold_start;
  const warmth =
    cold.state === "none"
      ? "warm"
      : `cold from ${cold.state} (${cold.plan}): ${ms(cold.load_ms)} of loading, ${ms(cold.exposed_ms)} of it exposed`;
  return (
    `${done.output.finish_reason}, ${done.usage.completion_tokens} tokens; TTFT ${ms(done.timing.ttft_ms)}, ` +
    `TPOT ${ms(done.timing.tpot_ms)}; ${warmth}; ${done.node ?? "no node"}`
  );
}

function drawnCalls(name, signal) {
  const calls = callsOf(name).slice(0, MAX_LISTED);
  if (calls.length === 0) return h("p", {}, "None yet.");
  return h(
    "ol",
    { class: "calls", reversed: true },
    calls.map((call) => drawnCall(call, signal)),
  );
}

function drawnCall(call, signal) {
  const at = new Date(call.at).toLocaleTimeString();
  if (call.done === null) return h("li", {}, `${at}: ${call.error}`);
  const why = h("div");
  return h(
    "li",
    {},
    h("p", {}, `${at}: version ${call.done.version ?? "–"}, ${said(call.done)}`),
    waterfall(call),
    h(
      "details",
      { toggle: (event) => event.target.open && explain(call.done.id, why, signal) },
      h("summary", {}, "Why this node"),
      why,
    ),
  );
}

async function explain(id, why, signal) {
  try {
    const reply = await get(`explain/${encodeURIComponent(id)}`, {}, signal);
    redraw(
      why,
      reply.decisions.map((each) => drawnDecision(each.decision)),
    );
  } catch (error) {
    if (!signal.aborted) redraw(why, problem(error));
  }
}

function drawnDecision(decision) {
  const columns = ["Node", "Adapter", "#Running", "#Queued", "#Wait", "#Prefill", "#Exposed load", "#Decode", "#Cost"];
  const rows = decision.candidates.map((each) => [
    each.chosen ? `${each.node} (chosen)` : each.node,
    each.tier,
    String(each.running),
    String(each.queued),
    ...[each.wait, each.prefill, each.exposed_load, each.decode, each.total].map(seconds),
  ]);
  return table(`${decision.policy}: ${decision.outcome}, in ${seconds(decision.took)}`, columns, rows);
}
