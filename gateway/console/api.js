// Requests to the gateway that this page came from. The key is in this module's memory and nowhere else.

const ROOT = new URL("../", import.meta.url);
const REQUEST_SECONDS = 15;
const DEPLOY_SECONDS = 600;
const SILENT_SECONDS = 60; // a stream says something every 15 s
const MAX_EVENT_CHARACTERS = 4 << 20;

/** Who is signed in, once the gateway has taken the key. `tenant`: whose functions an admin key means; it stays empty
 * with a tenant's key. */
export const session = { key: null, taken: false, tenant: "", admin: false };

export class ApiError extends Error {
  constructor(status, content) {
    super(content.message);
    Object.assign(this, { status, type: content.type, details: content.details, requestId: content.request_id });
  }
}

/** An admin key is one that may ask for the pools; a tenant's key is answered 403 there. Throws ApiError. */
export async function signIn(key, tenant) {
  Object.assign(session, { key, taken: false, tenant: "", admin: false });
  try {
    await get("pools");
    Object.assign(session, { taken: true, admin: true, tenant });
  } catch (error) {
    if (error.status !== 403) {
      signOut();
      throw error;
    }
    session.taken = true;
  }
}

export function signOut() {
  Object.assign(session, { key: null, taken: false, tenant: "", admin: false });
}

/** Returns the reply of a route that answers with JSON, as {data, etag}. Throws ApiError. */
export async function ask(method, path, { query = {}, json, form, headers = {}, signal, everyone } = {}) {
  const limit = AbortSignal.timeout((form ? DEPLOY_SECONDS : REQUEST_SECONDS) * 1000);
  const reply = await sent(method, path, {
    query,
    headers,
    signal: signal ? AbortSignal.any([signal, limit]) : limit,
    body: form ?? body(json),
    type: json === undefined ? null : "application/json",
    everyone,
  });
  const data = reply.headers.get("content-type")?.startsWith("application/json")
    ? await reply.json()
    : await reply.text();
  return { data, etag: reply.headers.get("etag") };
}

export async function get(path, query = {}, signal = undefined) {
  return (await ask("GET", path, { query, signal })).data;
}

/** As `get`, of all tenants and not of the one that is shown: with an admin key. */
export async function getOfAll(path, query, signal) {
  return (await ask("GET", path, { query, signal, everyone: true })).data;
}

/** Yields the events of a stream as {event, data}. Throws ApiError before the first one. */
export async function* events(path, json, signal) {
  const silence = new AbortController();
  const hush = () => silence.abort(new Error(`nothing came for ${SILENT_SECONDS} s`));
  let timer = setTimeout(hush, SILENT_SECONDS * 1000);
  try {
    const both = AbortSignal.any([signal, silence.signal]);
    const reply = await sent("POST", path, {
      query: {},
      headers: { accept: "text/event-stream" },
      signal: both,
      body: body(json),
      type: "application/json",
    });
    const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      clearTimeout(timer);
      timer = setTimeout(hush, SILENT_SECONDS * 1000);
      rest += value;
      if (rest.length > MAX_EVENT_CHARACTERS) throw new Error("an event of the stream is too long");
      for (let end = rest.indexOf("\n\n"); end >= 0; end = rest.indexOf("\n\n")) {
        const made = event(rest.slice(0, end));
        rest = rest.slice(end + 2);
        if (made) yield made;
      }
    }
  } finally {
    clearTimeout(timer);
    silence.abort();
  }
}

/** Returns null for a comment. */
function event(lines) {
  const made = { event: "message", data: "" };
  for (const line of lines.split("\n")) {
    if (line.startsWith("event: ")) made.event = line.slice(7);
    if (line.startsWith("data: ")) made.data += line.slice(6);
  }
  return made.data === "" ? null : { event: made.event, data: JSON.parse(made.data) };
}

function body(json) {
  return json === undefined ? undefined : JSON.stringify(json);
}

async function sent(method, path, { query, headers, signal, body, type, everyone }) {
  const url = new URL(path, ROOT);
  for (const [name, value] of Object.entries(query)) {
    if (value !== "" && value !== null && value !== undefined) url.searchParams.set(name, value);
  }
  const own = { ...headers };
  if (session.key) own.authorization = `Bearer ${session.key}`;
  if (session.tenant && !everyone) own["x-garnish-tenant"] = session.tenant;
  if (type) own["content-type"] = type;
  const reply = await fetch(url, {
    method,
    headers: own,
    body,
    signal,
    cache: "no-store",
    credentials: "omit",
    redirect: "error",
  });
  if (!reply.ok) throw await failure(reply);
  return reply;
}

async function failure(reply) {
  let content = { message: `the gateway answered ${reply.status}` };
  try {
    content = (await reply.json()).error ?? content;
  } catch {
    // A proxy's page, not the gateway's JSON: the status is all that is known.
  }
  const error = new ApiError(reply.status, content);
  if (reply.status === 401 && session.taken) document.dispatchEvent(new CustomEvent("refused", { detail: error }));
  return error;
}
