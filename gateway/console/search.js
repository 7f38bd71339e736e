// Search by the beginning of a name, with nothing but the API's paging: `after` is the greatest name below the first
// one that can match.

const ORDER = "-.0123456789_abcdefghijklmnopqrstuvwxyz";
const EDGES = "0123456789abcdefghijklmnopqrstuvwxyz"; // of which a name begins and ends
const MAX_NAME = 64;

/** Whether any name can begin so. */
export function canBegin(prefix) {
  return (
    prefix.length <= MAX_NAME && EDGES.includes(prefix.at(0) ?? "") && [...prefix].every((each) => ORDER.includes(each))
  );
}

/** Returns the name behind which names with this beginning come; "" where they are the first of all. */
export function before(prefix) {
  if (prefix === "") return "";
  const rest = prefix.slice(0, -1);
  const last = prefix.at(-1);
  const letters = rest === "" || prefix.length === MAX_NAME ? EDGES : ORDER;
  const at = letters.indexOf(last);
  if (at > 0) return (rest + letters[at - 1]).padEnd(MAX_NAME, "z");
  return EDGES.includes(rest.at(-1) ?? "") ? rest : before(rest);
}
