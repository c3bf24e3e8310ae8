// The five pictures of the machine, each drawn anew from a `History`.

import { Frame, format, roundUp, shape, text } from "./draw.js";
import { peak } from "./history.js";

export function drawPool(place, history) {
  const guesses = history.pool();
  const step = history.last;
  if (!step || (!guesses.length && !step.theta)) {
    empty(place, step ? "This step guessed nothing: plain decoding is foretold to be as fast." : "Waiting for a step.");
    return;
  }
  const count = Math.max(guesses.length, (step.theta?.length ?? 1) - 1, 1);
  const frame = new Frame({
    width: 1080,
    height: 158,
    xEnd: count,
    yEnd: 1,
    whole: true,
    xName: "guesses checked, all answers together",
    yName: "chance",
  });
  guesses.forEach(({ chance, planned }, i) => {
    const width = Math.max(0.6, frame.x(1) - frame.x(0) - (count > 150 ? 0 : 1));
    frame.add(
      shape("rect", {
        class: planned ? "kept" : "dropped",
        x: frame.x(i),
        y: frame.y(chance),
        width,
        height: Math.max(0, frame.box.bottom - frame.y(chance)),
      }),
    );
  });
  let words = `${guesses.length} guesses, ${step.budget} checked.`;
  if (step.theta) {
    const best = peak(step.theta);
    const high = Math.max(...step.theta);
    const low = Math.min(...step.theta);
    const spread = Math.max(high - low, high * 0.02);
    // the curve takes its own height: its shape is what matters
    const y = (value) => 0.12 + (0.8 * (value - low)) / spread;
    frame.line(step.theta.map((value, budget) => [budget, y(value)]));
    frame.add(
      shape("line", { class: "mark", x1: frame.x(best), x2: frame.x(best), y1: frame.y(y(high)), y2: frame.box.bottom }),
    );
    frame.dot(best, y(high), "now", 5);
    const side = best > count * 0.7 ? "end" : "start";
    const shift = side === "end" ? -9 : 9;
    frame.add(
      text(frame.x(best) + shift, frame.y(y(high)) - 4, `peak: ${format(high)} tokens/s with ${best}`, {
        class: "strong",
        "text-anchor": side,
      }),
    );
    words += ` Predicted speed is highest, ${format(high)} tokens a second, with ${best} checked.`;
  }
  frame.show(place, words);
}

export function drawLoad(place, history) {
  const loads = history.byLoad();
  if (!loads.length) return empty(place, "Waiting for a step.");
  const frame = new Frame({
    whole: true,
    xEnd: Math.max(4, ...loads.map((item) => item.load)),
    yEnd: Math.max(2, history.hello?.block_size ?? 0),
    xName: "answers at once",
    yName: "checked per answer",
  });
  frame.line(loads.map((item) => [item.load, item.planned]));
  for (const item of loads) frame.dot(item.load, item.planned);
  const here = loads.find((item) => item.load === decodingNow(history));
  if (here) frame.dot(here.load, here.planned, "now", 5.5);
  const ends = [loads[0], loads.at(-1)].map((item) => `${format(item.planned)} at ${item.load}`);
  return frame.show(place, `Guesses checked per answer: ${ends.join(", ")} answers at once.`);
}

export function drawFrontier(place, history) {
  const loads = history.byLoad();
  if (!loads.length) return empty(place, "Waiting for a step.");
  const frame = new Frame({
    xEnd: roundUp(Math.max(...loads.map((item) => item.perUser))),
    yEnd: roundUp(Math.max(...loads.map((item) => item.total))),
    xName: "one user",
    yName: "all users",
  });
  frame.line(loads.map((item) => [item.perUser, item.total]));
  const now = decodingNow(history);
  loads.forEach((item, i) => {
    frame.dot(item.perUser, item.total, item.load === now ? "now" : "dot", item.load === now ? 5.5 : 3.5);
    if (loads.length < 10 || i % 2 === 0 || item.load === now) {
      frame.add(text(frame.x(item.perUser) + 7, frame.y(item.total) - 5, item.load));
    }
  });
  const best = loads.at(-1);
  return frame.show(
    place,
    `With ${loads[0].load} answers at once one user gets ${format(loads[0].perUser)} tokens a second; ` +
      `with ${best.load}, ${format(best.perUser)}, and all together ${format(best.total)}.`,
  );
}

export function drawReliability(place, history) {
  const bins = history.bins.filter((bin) => bin.count >= 5);
  if (!bins.length) return empty(place, "Waiting for guesses that were checked.");
  const frame = new Frame({ xEnd: 1, yEnd: 1, xName: "chance foretold", yName: "share that survived" });
  frame.line([[0, 0], [1, 1]], "ideal");
  const most = Math.max(...bins.map((bin) => bin.count));
  const width = frame.x(0.1) - frame.x(0) - 3;
  for (const bin of bins) {
    const share = bin.kept / bin.count;
    const x = Math.min(0.9, Math.floor((bin.foretold / bin.count) * 10) / 10);
    frame.add(
      shape("rect", {
        class: "bar",
        x: frame.x(x) + 1.5,
        y: frame.y(share),
        width,
        height: frame.box.bottom - frame.y(share),
      }),
    );
    frame.dot(bin.foretold / bin.count, share, "dot", 2.5 + 3 * Math.sqrt(bin.count / most));
  }
  const total = bins.reduce((sum, bin) => sum + bin.count, 0);
  const error = bins.reduce((sum, bin) => sum + Math.abs(bin.foretold - bin.kept), 0) / total;
  frame.add(text(frame.box.left + 8, frame.box.top + 6, `mean error ${error.toFixed(3)}`, { class: "strong" }));
  return frame.show(place, `Foretold and measured survival differ by ${error.toFixed(3)} on average over ${total} guesses.`);
}

export function drawTimes(place, history) {
  const times = history.times;
  if (times.length < 5) {
    return empty(place, history.last && history.last.predicted_seconds === null ? "This policy foretells no time." : "Waiting for steps.");
  }
  const real = times.map(([, seconds]) => seconds * 1e3).sort((a, b) => a - b);
  const end = roundUp(real[Math.floor(0.97 * (real.length - 1))] * 1.1);
  const frame = new Frame({ xEnd: end, yEnd: end, xName: "predicted", yName: "real" });
  frame.line([[0, 0], [end, end]], "ideal");
  for (const [predicted, seconds] of times) {
    if (predicted * 1e3 <= end) frame.dot(predicted * 1e3, Math.min(seconds * 1e3, end), "dot faint", 2.5);
  }
  const errors = times.map(([p, r]) => Math.abs(p / r - 1)).sort((a, b) => a - b);
  const middle = errors[Math.floor(errors.length / 2)];
  frame.add(text(frame.box.left + 8, frame.box.top + 6, `median error ${(100 * middle).toFixed(0)} %`, { class: "strong" }));
  return frame.show(place, `Half of the last ${times.length} step times were foretold within ${(100 * middle).toFixed(0)} percent.`);
}

function decodingNow(history) {
  return history.last?.rounds.filter((round) => !round.prefill).length;
}

function empty(place, words) {
  const note = document.createElement("p");
  note.className = "empty";
  note.textContent = words;
  place.replaceChildren(note);
}
