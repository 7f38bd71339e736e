// What the Prometheus text says of functions.

const LINE = /^([A-Za-z_:][\w:]*)\{(.*)\} (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;
const ESCAPED = { n: "\n" };

/** Returns function -> {p50, p95, errors} of a tenant, since the gateway started: seconds, and a share of the calls. */
export function functionFigures(text, tenant) {
  const found = new Map();
  for (const line of text.split("\n")) {
    if (!line.startsWith("garnish_ttft_seconds_bucket{") && !line.startsWith("garnish_invocations_total{")) continue;
    const [, name, inner, value] = LINE.exec(line) ?? [];
    if (!name) continue;
    const labels = Object.fromEntries([...inner.matchAll(LABEL)].map(([, key, raw]) => [key, plain(raw)]));
    if (labels.tenant !== tenant) continue;
    const own = found.get(labels.function) ?? { buckets: [], calls: 0, failed: 0 };
    found.set(labels.function, own);
    if (name.endsWith("_bucket"))
      own.buckets.push([labels.le === "+Inf" ? Infinity : Number(labels.le), Number(value)]);
    else add(own, labels.outcome, Number(value));
  }
  return new Map(
    [...found].map(([name, own]) => [
      name,
      {
        p50: quantile(own.buckets, 0.5),
        p95: quantile(own.buckets, 0.95),
        errors: own.calls ? own.failed / own.calls : null,
      },
    ]),
  );
}

function add(own, outcome, count) {
  own.calls += count;
  if (outcome !== "ok" && outcome !== "cancelled") own.failed += count;
}

function plain(raw) {
  return raw.replace(/\\(.)/g, (_, letter) => ESCAPED[letter] ?? letter);
}

/** Returns a quantile of a cumulative histogram, evenly within a bucket as PromQL has it; null when it is empty. */
export function quantile(buckets, share) {
  const sorted = [...buckets].sort(([one], [other]) => one - other);
  const rank = share * (sorted.at(-1)?.[1] ?? 0);
  if (rank === 0) return null;
  const at = sorted.findIndex(([, count]) => count >= rank);
  const [low, under] = at > 0 ? sorted[at - 1] : [0, 0];
  const [high, count] = sorted[at];
  return high === Infinity ? low : low + ((high - low) * (rank - under)) / (count - under);
}
