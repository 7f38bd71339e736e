// The calls that were made from this page, the latest first. The API tells of no others; they go when the page does.

const KEPT = 50;
let kept = [];

export function keepCall(call) {
  kept = [call, ...kept].slice(0, KEPT);
}

export function callsOf(name) {
  return kept.filter((call) => call.function === name);
}

export function forgetCalls() {
  kept = [];
}
