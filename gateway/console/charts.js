// Charts as inline SVG. Each says in words what it shows, for those who do not see it.

import { h, svg } from "./dom.js";
import { bytes, ms } from "./format.js";

const WIDTH = 900;
const LANE = 18;
const GAP = 4;
const BESIDE = ["fetch", "load", "exposed"]; // of the adapter's load, which goes on beside the other steps
const AFTER = "decode"; // the first token; it would make all others too narrow to see
const MAX_CELLS = 300;
const TIERS = ["device", "host", "disk"];

/** Returns the steps of a Server-Timing text as [{name, ms}]. */
export function steps(serverTiming) {
  return [...serverTiming.matchAll(/([\w-]+);dur=([\d.]+)/g)].map(([, name, value]) => ({ name, ms: Number(value) }));
}

/** Returns a call until its first token as a waterfall: its steps one behind the other; below them the adapter's load,
 * which begins when the call reaches its node, and what of it the prompt had to wait for. */
export function waterfall(call) {
  const all = steps(call.serverTiming);
  const inLine = all.filter((step) => !BESIDE.includes(step.name) && step.name !== AFTER);
  const [fetch, load, exposed] = BESIDE.map((name) => all.find((step) => step.name === name)?.ms ?? 0);
  const starts = new Map();
  let total = 0;
  for (const step of inLine) {
    starts.set(step.name, total);
    total += step.ms;
  }
  const onNode = starts.get("queue") ?? 0;
  const bars = inLine.map((step) => ({ ...step, lane: 0, at: starts.get(step.name) }));
  if (load > 0) {
    bars.push({ name: "fetch", ms: fetch, lane: 1, at: onNode });
    bars.push({ name: "load", ms: Math.max(0, load - fetch), lane: 1, at: onNode + fetch });
    bars.push({ name: "exposed", ms: exposed, lane: 2, at: starts.get("prefill") ?? onNode });
  }
  const end = Math.max(total, ...bars.map((bar) => bar.at + bar.ms), 0.001);
  const shown = bars.filter((bar) => bar.ms > 0);
  const said = shown.map((bar) => `${bar.name} ${ms(bar.ms)}`).join(", ");
  return h(
    "figure",
    { class: "waterfall" },
    lanes(
      load > 0 ? 3 : 1,
      said,
      shown.map((bar) => rectangle(bar, WIDTH / end)),
    ),
    h(
      "figcaption",
      {},
      shown.flatMap((bar) => [h("span", { class: `key step-${bar.name}` }), `${bar.name} ${ms(bar.ms)} `]),
    ),
  );
}

function lanes(count, said, children) {
  const height = count * (LANE + GAP);
  return svg(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": said, preserveAspectRatio: "none" },
    children,
  );
}

function rectangle(bar, scale) {
  return svg(
    "rect",
    {
      class: `step-${bar.name}`,
      x: (bar.at * scale).toFixed(2),
      y: bar.lane * (LANE + GAP),
      height: LANE,
      width: Math.max(1, bar.ms * scale).toFixed(2),
    },
    svg("title", {}, `${bar.name}: ${ms(bar.ms)}`),
  );
}

/** Returns the adapters on a node, a row per tier: each cell is as wide as its adapter is large, those in use first.
 * `capacity`: bytes of adapter memory on the device; 0 where the node does not say. */
export function memoryMap(residents, capacity) {
  return h(
    "div",
    { class: "memory" },
    TIERS.map((tier) => {
      const held = residents.filter((each) => each.tier === tier);
      const sum = held.reduce((bytesSoFar, each) => bytesSoFar + each.bytes, 0);
      const whole = tier === "device" ? Math.max(capacity, sum) : sum;
      const inUse = held.filter((each) => each.in_use > 0).length;
      const of = tier === "device" && capacity ? ` of ${bytes(capacity)}` : "";
      const said = `${tier}: ${held.length} adapters, ${bytes(sum)}${of}, ${inUse} in use`;
      return h("div", { class: "tier" }, h("span", {}, said), lanes(1, said, cells(held, tier, WIDTH / (whole || 1))));
    }),
  );
}

function cells(held, tier, scale) {
  const sorted = [...held].sort((one, other) => other.in_use - one.in_use || other.bytes - one.bytes);
  const shown = sorted.slice(0, MAX_CELLS).map((each) => ({
    bytes: each.bytes,
    busy: each.in_use > 0,
    said: `${each.digest.slice(0, 12)}: ${bytes(each.bytes)}, ${each.in_use} requests`,
  }));
  const rest = sorted.slice(MAX_CELLS);
  if (rest.length > 0) {
    const sum = rest.reduce((bytesSoFar, each) => bytesSoFar + each.bytes, 0);
    shown.push({ bytes: sum, busy: false, said: `${rest.length} more: ${bytes(sum)}` });
  }
  let at = 0;
  return [
    svg("rect", { class: "free", x: 0, y: 0, width: WIDTH, height: LANE }),
    ...shown.map((cell) => {
      const x = at;
      at += cell.bytes * scale;
      const width = Math.max(0.5, cell.bytes * scale - 1).toFixed(2);
      return svg(
        "rect",
        { class: `tier-${tier}${cell.busy ? " busy" : ""}`, x: x.toFixed(2), y: 0, width, height: LANE },
        svg("title", {}, cell.said),
      );
    }),
  ];
}

/** Returns how much of something is taken, as a bar and in words. */
export function gauge(label, value, max, said = `${value} of ${max}`) {
  return h(
    "div",
    { class: "gauge" },
    h("span", {}, label),
    h("meter", { min: 0, max: Math.max(max, 1), value, "aria-label": `${label}: ${said}` }),
    h("span", {}, said),
  );
}
