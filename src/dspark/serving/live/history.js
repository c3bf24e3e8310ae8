// What the steps of the feed add up to. It knows no document: numbers in, numbers out.

const FORGET = 0.98; // of an average by load, each step of that load
const LINGER_S = 2; // an answer that no step mentions any more
const WINDOW_S = 2; // of the speeds shown
const NUM_FEW = 6; // steps of a load that was only passed through
const NUM_BINS = 10;
const NUM_TIMES = 240;

export class History {
  constructor() {
    this.hello = null;
    this.last = null; // the last step in which an answer decoded
    this.time = 0; // of the last step, by the server's clock
    this.running = 0;
    this.waiting = 0;
    this.dropped = 0;
    this.answers = new Map(); // by id: what each answer did last, and its words
    this.loads = new Map(); // by answers at once: forgetful sums
    this.bins = Array.from({ length: NUM_BINS }, () => ({ count: 0, foretold: 0, kept: 0 }));
    this.times = []; // [predicted, real] seconds
    this.window = []; // steps of the last seconds
  }

  greet(hello) {
    this.hello = hello;
  }

  add(step) {
    this.time = step.time;
    this.running = step.running;
    this.waiting = step.waiting;
    this.dropped += step.dropped ?? 0;
    const decoding = step.rounds.filter((round) => !round.prefill);
    const tokens = step.rounds.reduce((sum, round) => sum + round.tokens.length, 0);
    for (const round of step.rounds) this.#addAnswer(round, step);
    for (const [id, answer] of this.answers) {
      // finished, or cancelled, of which the feed says nothing
      if (step.time - answer.time > LINGER_S) this.answers.delete(id);
    }
    if (step.predicted_seconds !== null && step.seconds > 0) {
      this.times.push([step.predicted_seconds, step.seconds]);
      if (this.times.length > NUM_TIMES) this.times.shift();
    }
    const own = decoding.reduce((sum, round) => sum + round.tokens.length, 0);
    this.window.push({
      time: step.time,
      seconds: step.seconds,
      tokens,
      own,
      answers: decoding.length,
      offered: decoding.reduce((sum, round) => sum + round.offered, 0),
      planned: step.budget,
    });
    while (this.window.length && step.time - this.window[0].time > WINDOW_S) this.window.shift();
    if (!decoding.length) return;
    this.last = step;
    this.#addLoad(step, decoding, own);
    for (const round of decoding) this.#addReliability(round);
  }

  // Means over the last seconds; null where nothing decoded.
  now() {
    const sum = (name) => this.window.reduce((total, item) => total + item[name], 0);
    const answers = sum("answers");
    const busy = sum("seconds");
    const decoding = this.window.reduce((total, item) => total + item.answers * item.seconds, 0);
    if (!answers || !busy) return null;
    return {
      offered: sum("offered") / answers,
      planned: sum("planned") / answers,
      tau: sum("own") / answers,
      perUser: sum("own") / decoding,
      total: sum("tokens") / busy,
    };
  }

  // Averages by load, fewest answers first.
  byLoad() {
    return [...this.loads.entries()]
      .sort(([a], [b]) => a - b)
      .filter(([, item]) => item.steps > NUM_FEW)
      .map(([load, item]) => ({
        load,
        planned: item.planned / item.answers,
        perUser: item.own / item.decoding,
        total: item.own / item.seconds,
      }));
  }

  // Guesses of the last step, surest first: chance, whether checked and kept.
  pool() {
    const guesses = [];
    for (const round of this.last?.rounds ?? []) {
      (round.survival ?? []).forEach((chance, k) => {
        guesses.push({ chance, planned: k < round.planned, kept: k < round.accepted });
      });
    }
    return guesses.sort((a, b) => b.chance - a.chance || b.planned - a.planned);
  }

  #addAnswer(round, step) {
    const answer = this.answers.get(round.id) ?? { words: [], since: step.time };
    answer.time = step.time;
    answer.finish = round.finish;
    if (!round.prefill) answer.round = round;
    round.tokens.forEach((text, i) => answer.words.push([text, round.origins[i]]));
    this.answers.set(round.id, answer);
  }

  #addLoad(step, decoding, own) {
    const load = decoding.length;
    const item = this.loads.get(load) ?? { steps: 0, planned: 0, answers: 0, own: 0, seconds: 0, decoding: 0 };
    for (const name of Object.keys(item)) item[name] *= FORGET;
    item.steps += 1;
    item.planned += step.budget;
    item.answers += load;
    item.own += own;
    item.seconds += step.seconds;
    item.decoding += load * step.seconds;
    this.loads.set(load, item);
  }

  // A guess counts if it was checked, and its answer did not end inside the block.
  #addReliability(round) {
    if (!round.survival || round.finish) return;
    for (let k = 0; k < round.planned; k += 1) {
      const chance = round.survival[k];
      const bin = this.bins[Math.min(NUM_BINS - 1, Math.floor(chance * NUM_BINS))];
      bin.count += 1;
      bin.foretold += chance;
      bin.kept += k < round.accepted ? 1 : 0;
    }
  }
}

// Index of the largest value; null of an empty list.
export function peak(values) {
  if (!values?.length) return null;
  return values.reduce((best, value, i) => (value > values[best] ? i : best), 0);
}
