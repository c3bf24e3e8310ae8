// Each answer's last block: a cell for every guess, one for the target's own word.

const MOST_ROWS = 5;
const SILENT_S = 0.5; // an answer that is not in the steps any more

export function drawBlocks(place, history, isMine) {
  const isThere = (answer) => answer.round && !answer.finish && history.time - answer.time < SILENT_S;
  const found = [...history.answers.entries()].filter(([, answer]) => isThere(answer));
  if (!found.length) {
    if (!place.querySelector(".empty")) place.replaceChildren(note("empty", "No answer runs. Ask something, or press Busier."));
    return;
  }
  found.sort(([a, one], [b, other]) => isMine(b) - isMine(a) || one.since - other.since);
  const size = history.hello?.block_size ?? 0;
  const rows = found.slice(0, MOST_ROWS).map(([id, answer]) => row(id, answer, size, isMine(id)));
  if (found.length > MOST_ROWS) rows.push(note("more", `and ${found.length - MOST_ROWS} answers more`));
  place.replaceChildren(...rows);
}

function row(id, answer, size, mine) {
  const { round } = answer;
  const found = document.createElement("div");
  found.className = mine ? "row mine" : "row";
  const who = document.createElement("div");
  who.className = "who";
  who.textContent = `${mine ? "you" : nameOf(id)} · ${answer.words.length}`;
  who.title = `${answer.words.length} words so far`;
  const cells = document.createElement("div");
  cells.className = "cells";
  cells.setAttribute("role", "img");
  cells.setAttribute(
    "aria-label",
    `${round.offered} guessed, ${round.planned} checked, ${round.accepted} kept`,
  );
  for (let k = 0; k < size; k += 1) cells.append(guess(round, k));
  cells.append(own(round));
  found.append(who, cells);
  return found;
}

function guess(round, k) {
  if (k >= round.offered) return cell("none", "", "", null);
  const kind = k < round.accepted ? "accepted" : k < round.planned ? "rejected" : "dropped";
  const sign = { accepted: "✓", rejected: "✕", dropped: "·" }[kind];
  const word = round.drafted?.[k] ?? (k < round.accepted ? round.tokens[k] : "");
  return cell(kind, word, sign, round.survival?.[k] ?? null);
}

function own(round) {
  const origin = round.origins.at(-1);
  if (origin === "accepted" || origin === "copied") return cell("none", "", "", null);
  return cell("own", round.tokens.at(-1), "+", null);
}

function cell(kind, word, sign, chance) {
  const found = document.createElement("div");
  found.className = `cell ${kind}`;
  if (kind === "none") return found;
  const top = document.createElement("span");
  top.className = "word-text";
  top.textContent = visible(word);
  top.title = visible(word);
  const bottom = document.createElement("span");
  bottom.className = "sign";
  const left = document.createElement("span");
  left.textContent = sign;
  bottom.append(left);
  if (chance !== null) {
    const fill = document.createElement("span");
    fill.className = "fill";
    fill.style.height = `${Math.round(100 * chance)}%`;
    const right = document.createElement("span");
    right.textContent = `${Math.round(100 * chance)}%`;
    bottom.append(right);
    found.append(fill);
  }
  found.append(top, bottom);
  return found;
}

export function visible(word) {
  if (word === " ") return "␣";
  return (word ?? "").replace(/^ /, "").replaceAll("\n", "⏎");
}

function nameOf(id) {
  return id.startsWith("crowd-") ? `user ${id.slice(6, 9)}` : "another";
}

function note(kind, words) {
  const found = document.createElement("p");
  found.className = kind;
  found.textContent = words;
  return found;
}
