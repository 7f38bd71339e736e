// Live figures: one request at a time, asked again. Polling and not a stream of events: each page needs one route that
// exists, a page that is left or hidden asks nothing, and a gateway that is slow is asked less often by itself.

import { redraw } from "./dom.js";

const PERIOD_MS = 2000;
const SHARE = 5; // a request that takes long is followed by a pause of so many times that

/** Draws what `load` answers until `signal` ends it. `note` is the line that says whether the figures are current. */
export async function live(load, draw, signal, note) {
  while (!signal.aborted) {
    await visible(signal);
    const began = performance.now();
    try {
      const loaded = await load(signal);
      if (signal.aborted) return;
      draw(loaded);
      redraw(note, "");
    } catch (error) {
      if (signal.aborted) return;
      redraw(note, `These figures are not current: ${error.message}`);
      if ([400, 401, 403, 404].includes(error.status)) return;
    }
    await pause(Math.max(PERIOD_MS, SHARE * (performance.now() - began)), signal);
  }
}

function pause(milliseconds, signal) {
  return new Promise((resolve) => {
    const end = () => {
      clearTimeout(timer);
      signal.removeEventListener("abort", end); // or a page that stays open collects one for each pause
      resolve();
    };
    const timer = setTimeout(end, milliseconds);
    signal.addEventListener("abort", end);
  });
}

function visible(signal) {
  if (!document.hidden) return Promise.resolve();
  return new Promise((resolve) => {
    signal.addEventListener("abort", resolve, { once: true });
    document.addEventListener("visibilitychange", resolve, { once: true, signal });
  });
}
