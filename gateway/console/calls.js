// The calls that were made from this page, the latest first. The API tells of no others; they go when the page does.

const KEPT = 50;
let kept = [];

/** Returns what keeps a call that begins now, once it has ended; not if the calls were forgotten meanwhile. */
export function callKeeper() {
  const calls = kept;
  return (call) => {
    calls.unshift(call);
    calls.splice(KEPT);
  };
}

export function callsOf(name) {
  return kept.filter((call) => call.function === name);
}

export function forgetCalls() {
  kept = [];
}
