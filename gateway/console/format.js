// Numbers as people read them.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
const NAME = /^[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?$/;

export function isName(value) {
  return NAME.test(value);
}

export function bytes(count) {
  let unit = 0;
  let value = count;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value >= 100 || unit === 0 ? value.toFixed(0) : value.toFixed(1)} ${UNITS[unit]}`;
}

/** Milliseconds; null where nothing was measured. */
export function ms(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 10000) return `${(value / 1000).toFixed(1)} s`;
  return `${value >= 100 ? value.toFixed(0) : value.toFixed(1)} ms`;
}

export function seconds(value) {
  return value === null || value === undefined ? "–" : ms(value * 1000);
}

/** A share of 1; null where there was none. */
export function percent(share) {
  if (share === null || share === undefined || Number.isNaN(share)) return "–";
  return `${(share * 100).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
}

export function when(unix) {
  return new Date(unix * 1000).toLocaleString();
}

export function short(digest) {
  return digest.slice(0, 12);
}

/** Where an alias points: a version, or the shares of several. */
export function pointed(target) {
  if (typeof target === "number") return `version ${target}`;
  return Object.entries(target)
    .map(([version, share]) => `version ${version} (${percent(share)})`)
    .join(", ");
}
