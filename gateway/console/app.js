// The frame: who is signed in, which view is shown. A view is a function (main, signal, parameter, query) that fills
// `main` and stops what it does when `signal` is aborted.

import { session, signIn, signOut } from "./api.js";
import { batchesView } from "./batches.js";
import { forgetCalls } from "./calls.js";
import { deployView } from "./deploy.js";
import { field, h, problem, redraw } from "./dom.js";
import { eventsView } from "./events.js";
import { functionView } from "./function.js";
import { functionsView } from "./functions.js";
import { nodesView } from "./nodes.js";
import { poolsView } from "./pools.js";
import { tenantsView } from "./tenants.js";

const PLACES = [
  { name: "functions", title: "Functions", view: functionsView },
  { name: "deploy", title: "Deploy", view: deployView },
  { name: "events", title: "Events", view: eventsView },
  { name: "batches", title: "Batches", view: batchesView },
  { name: "nodes", title: "Nodes", view: nodesView, admin: true },
  { name: "tenants", title: "Tenants", view: tenantsView, admin: true },
  { name: "pools", title: "Pools", view: poolsView, admin: true },
];
const header = document.getElementById("header");
const main = document.getElementById("main");
let leave = new AbortController();

/** Draws what the address names; the focus goes to its heading, so that it is read out. */
function show() {
  leave.abort();
  leave = new AbortController();
  if (!session.taken) return main.querySelector("#key") ? undefined : showSignIn();
  const [first, rest = ""] = split(location.hash.slice(2) || "functions");
  const place = PLACES.find((each) => each.name === first && (session.admin || !each.admin)) ?? PLACES[0];
  drawHeader(place);
  main.replaceChildren();
  const view = place.name === "functions" && rest ? functionView : place.view;
  view(main, leave.signal, rest);
  const heading = main.querySelector("h1");
  document.title = `${heading.textContent} – Garnish console`;
  heading.tabIndex = -1;
  heading.focus();
}

function split(path) {
  const at = path.indexOf("/");
  if (at < 0) return [path];
  try {
    return [path.slice(0, at), decodeURIComponent(path.slice(at + 1))];
  } catch {
    return [path.slice(0, at)]; // not an address of this page's making
  }
}

function drawHeader(current) {
  const links = PLACES.filter((place) => session.admin || !place.admin).map((place) =>
    h("li", {}, h("a", { href: `#/${place.name}`, "aria-current": place === current && "page" }, place.title)),
  );
  redraw(
    header,
    h("strong", {}, "Garnish"),
    h("nav", { "aria-label": "Console" }, h("ul", {}, links)),
    session.admin && tenantForm(),
    h("a", { href: "docs" }, "API"),
    h("button", { type: "button", click: () => end("Signed out.") }, "Sign out"),
  );
}

function tenantForm() {
  const tenant = h("input", {
    id: "of-tenant",
    autocomplete: "off",
    spellcheck: "false",
    size: 14,
    value: session.tenant,
  });
  return h(
    "form",
    {
      class: "inline",
      submit: (event) => {
        event.preventDefault();
        session.tenant = tenant.value.trim();
        forgetCalls();
        show();
      },
    },
    h("label", { for: "of-tenant" }, "Tenant"),
    tenant,
    h("button", {}, "Show"),
  );
}

function end(message) {
  signOut();
  forgetCalls();
  leave.abort();
  showSignIn(message);
}

function showSignIn(message = "") {
  redraw(header, h("strong", {}, "Garnish"), h("a", { href: "docs" }, "API"));
  const key = h("input", { id: "key", type: "password", autocomplete: "off", spellcheck: "false" });
  const tenant = h("input", { id: "tenant", autocomplete: "off", spellcheck: "false" });
  const answer = h("div", { role: "status" }, message);
  const form = h(
    "form",
    {
      class: "card narrow",
      submit: (event) => {
        event.preventDefault();
        enter(key.value.trim(), tenant.value.trim(), answer);
      },
    },
    h("h1", {}, "Sign in"),
    field("Key", key, "A tenant's key or an admin key. It is kept in this page's memory until you leave it."),
    field("Tenant", tenant, "With an admin key: whose functions to show."),
    h("button", { class: "primary" }, "Sign in"),
    answer,
  );
  main.replaceChildren(form);
  document.title = "Sign in – Garnish console";
  key.focus();
}

async function enter(key, tenant, answer) {
  redraw(answer, "Asking the gateway …");
  try {
    await signIn(key, tenant);
    show();
  } catch (error) {
    redraw(answer, problem(error));
  }
}

document.addEventListener("refused", (event) => end(`Signed out: ${event.detail.message}`));
window.addEventListener("hashchange", () => {
  if (location.hash !== "#main") show();
});
window.addEventListener("pagehide", () => end("")); // a browser may keep the page for its back button: not with the key
show();
