// colab_utils/diagnosis/simulator.py in JavaScript: the same random times, so the same batches.
// tests/site/test_simulator.py compares the two. See the Python for what the arguments mean.
"use strict";

const ROUNDING_S = 1e-9;
// A step keeps this share of a core busy; a thread beside it holds Python's lock for that share of its work.
const BUSY = 0.9;
const LOCK = 0.3;

// Images that the streams of a worker read before those of the batch that it loads.
const AHEAD_IMAGES = 256;

/** Simulates a PyTorch DataLoader that feeds a training step, event by event. */
function simulate({
  workers, step_s, load_s = 0, load_cv = 0, step_cv = 0, prefetch = 2, batch_size = 1, streams = 1, read_s = 0,
  work_s = 0, handoff_s = 0, cores = Infinity, in_order = true, seconds = 30, seed = 0,
}) {
  const reads = [].concat(read_s);
  const read_ahead = workers ? AHEAD_IMAGES : streams;
  const loop = {
    workers, prefetch, batch_size, streams, work_s, handoff_s, cores, in_order, read_ahead,
    waits: load_s > 0,
    load: drawByNumber(drawTimes(load_s, load_cv, seed, 0)),
    step: drawTimes(step_s, step_cv, seed, 1),
    read: drawByNumber(drawReads(reads, seed, 2)),
  };
  const { loads, steps } = play(loop, seconds);
  const begun = (span) => span.start < seconds - ROUNDING_S;
  const shownSteps = steps.filter(begun);
  let workedS = 0;
  for (const step of shownSteps) workedS += Math.min(step.end, seconds) - step.start;
  return {
    workers,
    prefetch,
    seconds,
    batches: steps.filter((step) => step.end <= seconds + ROUNDING_S).length,
    utilisation: workedS / seconds,
    loads: loads.map((spans) => spans.filter(begun)),
    steps: shownSteps,
  };
}

/** Runs the processes of a loop for so many seconds; returns the spans of its workers and steps. */
function play(loop, seconds) {
  const lanes = Math.max(1, loop.workers);
  const makeList = (make) => Array.from({ length: lanes }, make);
  // Of the threads beside a step, only one holds Python's lock.
  const clock = new Clock(loop.workers ? loop.cores : Math.min(loop.cores, 1 / LOCK));
  const loads = makeList(() => []);
  const steps = [];
  // Batches that each worker is asked for. In any order, the next worker that is free begins.
  const anyone = makeQueue();
  const asked = makeList(() => (loop.in_order ? makeQueue() : anyone));
  // Images of each worker that its streams must read, and the images that are on their way.
  const unread = makeList(makeQueue);
  const planned = makeList(() => 0);
  const coming = new Map();
  // Without workers, a batch in any order takes the images that come first.
  const anything = loop.in_order || loop.workers ? null : makeQueue();
  // Batches that each worker has loaded, and not handed over.
  const loaded = makeList(makeQueue);
  // Batches that can be taken, and those that come after a batch that is not ready.
  const line = makeQueue();
  const early = new Set();
  let due = 0;
  let next = 0;

  const ask = (number) => {
    for (let left = number; left > 0; left -= 1) {
      clock.put(asked[next % loop.workers], next);
      next += 1;
    }
  };

  function* train() {
    ask(loop.workers * loop.prefetch);
    for (let number = 0; ; number += 1) {
      let batch = number;
      if (loop.workers) {
        batch = yield line;
        ask(1);
      } else {
        yield* load(0, batch);
      }
      const span = { batch, start: clock.nowS, end: Infinity };
      steps.push(span);
      yield makeActivity(loop.step(), BUSY);
      span.end = clock.nowS;
    }
  }

  function* work(lane) {
    for (;;) {
      const batch = yield asked[lane];
      yield* load(lane, batch);
      clock.put(loaded[lane], batch);
    }
  }

  function* handOver(lane) {
    for (;;) {
      const batch = yield loaded[lane];
      if (loop.handoff_s) yield makeActivity(loop.handoff_s, 1);
      if (!loop.in_order) due = batch;
      early.add(batch);
      while (early.delete(due)) {
        clock.put(line, due);
        due += 1;
      }
    }
  }

  function* load(lane, batch) {
    const spans = loads[lane];
    const first = (spans.length * lanes + lane) * loop.batch_size;
    const span = { batch, start: clock.nowS, end: Infinity };
    spans.push(span);
    if (loop.waits) yield makeActivity(loop.load(batch));
    if (loop.streams > 1) plan(lane, loop.batch_size);
    for (let image = first; image < first + loop.batch_size; image += 1) {
      if (loop.streams > 1) {
        const ready = coming.get(image);
        coming.delete(image);
        yield ready;
      } else {
        yield* read(image);
      }
      if (loop.work_s && (loop.streams === 1 || loop.workers)) yield makeActivity(loop.work_s, 1);
    }
    span.end = clock.nowS;
  }

  const plan = (lane, number) => {
    const size = loop.batch_size;
    for (let place = planned[lane]; place < planned[lane] + number; place += 1) {
      const image = (Math.floor(place / size) * lanes + lane) * size + (place % size);
      const ready = anything || makeQueue();
      coming.set(image, ready);
      clock.put(unread[lane], [image, ready]);
    }
    planned[lane] += number;
  };

  function* stream(lane) {
    for (;;) {
      const [image, ready] = yield unread[lane];
      yield* read(image);
      if (loop.work_s && !loop.workers) yield makeActivity(loop.work_s, 1);
      clock.put(ready, image);
    }
  }

  function* read(image) {
    const readS = loop.read(image);
    if (readS) yield makeActivity(readS);
  }

  clock.start(train());
  for (let lane = 0; lane < loop.workers; lane += 1) {
    clock.start(work(lane));
    clock.start(handOver(lane));
  }
  for (let lane = 0; lane < lanes && loop.streams > 1; lane += 1) {
    plan(lane, loop.read_ahead);
    for (let number = 0; number < loop.streams; number += 1) clock.start(stream(lane));
  }
  while (clock.advance(seconds));
  // What has begun goes on until it ends, so that a picture can show how far it is.
  const isOpen = (span) => span.start < seconds && span.end === Infinity;
  while ([...loads, steps].some((spans) => spans.some(isOpen))) clock.advance(seconds);
  return { loads, steps };
}

/** A wait, or work, that takes so many seconds if it has its share of a core. */
function makeActivity(seconds, share = 0) {
  return { seconds, share, end: 0, speed: 1, process: null };
}

/** Items that processes take, the first come first. */
function makeQueue() {
  return { items: [], takers: [] };
}

/** Simulated time, and the cores that processes share in it. */
class Clock {
  constructor(cores) {
    this.nowS = 0;
    this.cores = cores;
    this.active = [];
    this.ready = [];
  }

  start(process, item) {
    this.ready.push([process, item]);
  }

  put(queue, item) {
    if (queue.takers.length) this.start(queue.takers.shift(), item);
    else queue.items.push(item);
  }

  /** Lets all processes go on that can, then goes to the next event; returns whether one comes until then. */
  advance(untilS) {
    while (this.ready.length) this.resume(...this.ready.shift());
    this.nowS = Math.min(...this.active.map((activity) => activity.end));
    const done = this.active.filter((activity) => activity.end === this.nowS);
    this.active = this.active.filter((activity) => activity.end !== this.nowS);
    for (const activity of done) this.start(activity.process);
    this.shareCores();
    return this.nowS <= untilS + ROUNDING_S;
  }

  resume(process, item) {
    const wanted = process.next(item).value;
    if (wanted.items === undefined) {
      wanted.end = this.nowS + wanted.seconds;
      wanted.process = process;
      this.active.push(wanted);
      this.shareCores();
    } else if (wanted.items.length) {
      this.start(process, wanted.items.shift());
    } else {
      wanted.takers.push(process);
    }
  }

  /** Gives work its share of the cores. If they are short, who wants little gets it, the others equal shares. */
  shareCores() {
    const work = this.active.filter((activity) => activity.share).sort((a, b) => a.share - b.share);
    let left = this.cores;
    work.forEach((activity, place) => {
      const given = Math.min(activity.share, left / (work.length - place));
      left -= given;
      const speed = given / activity.share;
      if (speed === activity.speed) return;
      const restS = (activity.end - this.nowS) * activity.speed;
      activity.end = this.nowS + restS / speed;
      activity.speed = speed;
    });
  }
}

/** Returns a function that gives what is drawn by its number. All is drawn in the order of the numbers. */
function drawByNumber(draw) {
  const drawn = [];
  return (number) => {
    while (drawn.length <= number) drawn.push(draw());
    return drawn[number];
  };
}

/** Returns a function that draws these times; each comes once before any comes again. */
function drawReads(reads, seed, stream) {
  const draw = makePcg64(seed, stream);
  let half = null;
  const drawHalf = () => {
    if (half !== null) {
      const kept = half;
      half = null;
      return kept;
    }
    const bits = draw();
    half = Number(bits >> 32n);
    return Number(bits & 0xffffffffn);
  };
  // As numpy's shuffle: random bits, as many as the largest number has, until they are small enough.
  const drawUpTo = (most) => {
    const shift = Math.clz32(most);
    for (;;) {
      const number = (drawHalf() << shift) >>> shift;
      if (number <= most) return number;
    }
  };
  let waiting = [];
  return () => {
    if (!waiting.length) {
      waiting = [...reads];
      for (let last = waiting.length - 1; last > 0; last -= 1) {
        const other = drawUpTo(last);
        [waiting[last], waiting[other]] = [waiting[other], waiting[last]];
      }
    }
    return waiting.shift();
  };
}

/** Returns a function that draws lognormal times with this mean and coefficient of variation. */
function drawTimes(meanS, cv, seed, stream) {
  const logVariance = Math.log1p(cv * cv);
  const drawNormal = makeNormal(makePcg64(seed, stream));
  return () => meanS * Math.exp(-logVariance / 2 + Math.sqrt(logVariance) * drawNormal());
}

/** Returns the 64 random bits at a time of numpy's default_rng([seed, stream]): PCG64, XSL-RR. */
function makePcg64(seed, stream) {
  const words = mixSeed([seed >>> 0, stream]);
  const join = (parts) => parts.reduceRight((high, word) => (high << 32n) | BigInt(word), 0n);
  const swap = (number) => ((number & MASK_64) << 64n) | (number >> 64n);
  const increment = ((swap(join(words.slice(4))) << 1n) | 1n) & MASK_128;
  const advance = (from) => (from * PCG_MULTIPLIER + increment) & MASK_128;
  let state = advance((increment + swap(join(words.slice(0, 4)))) & MASK_128);
  return () => {
    state = advance(state);
    const folded = (state >> 64n) ^ (state & MASK_64);
    const turn = state >> 122n;
    return ((folded >> turn) | (folded << (64n - turn))) & MASK_64;
  };
}

/** Returns eight 32-bit words made from a seed, as numpy's SeedSequence makes them. */
function mixSeed(entropy) {
  let factor = 0x43b0d7e5;
  const hash = (value) => {
    let mixed = value ^ factor;
    factor = Math.imul(factor, 0x931e8875);
    mixed = Math.imul(mixed, factor);
    return mixed ^ (mixed >>> 16);
  };
  const pool = [0, 1, 2, 3].map((place) => hash(entropy[place] ?? 0));
  for (let source = 0; source < 4; source += 1) {
    for (let target = 0; target < 4; target += 1) {
      if (source === target) continue;
      const mixed = Math.imul(0xca01f9dd, pool[target]) - Math.imul(0x4973f715, hash(pool[source]));
      pool[target] = mixed ^ (mixed >>> 16);
    }
  }
  factor = 0x8b51f9dd;
  return [0, 1, 2, 3, 4, 5, 6, 7].map((place) => {
    let word = pool[place % 4] ^ factor;
    factor = Math.imul(factor, 0x58f38ded);
    word = Math.imul(word, factor);
    return (word ^ (word >>> 16)) >>> 0;
  });
}

/** Returns normal numbers by numpy's ziggurat: 256 layers, and the tail beyond the last. */
function makeNormal(draw) {
  const drawShare = () => Number(draw() >> 11n) * 2 ** -53;
  return () => {
    for (;;) {
      const bits = draw();
      const layer = Number(bits & 0xffn);
      const sign = (bits >> 8n) & 1n ? -1 : 1;
      const distance = (bits >> 9n) & 0xfffffffffffffn;
      const x = Number(distance) * (layer ? EDGES[layer] : ZIGGURAT_AREA / HEIGHTS[255]) * 2 ** -52;
      const inner = layer ? EDGES[layer - 1] : ZIGGURAT_EDGE;
      if (x < inner) return sign * x;
      if (layer === 0) {
        const tailSign = (distance >> 8n) & 1n ? -1 : 1;
        for (;;) {
          const beyond = -Math.log1p(-drawShare()) / ZIGGURAT_EDGE;
          const height = -Math.log1p(-drawShare());
          if (2 * height > beyond * beyond) return tailSign * (ZIGGURAT_EDGE + beyond);
        }
      }
      const fall = (HEIGHTS[layer - 1] - HEIGHTS[layer]) * drawShare() + HEIGHTS[layer];
      if (fall < Math.exp(-0.5 * x * x)) return sign * x;
    }
  };
}

const MASK_64 = (1n << 64n) - 1n;
const MASK_128 = (1n << 128n) - 1n;
const PCG_MULTIPLIER = (2549297995355413924n << 64n) + 4865540595714422341n;
const ZIGGURAT_EDGE = 3.6541528853610088;
const ZIGGURAT_AREA = 8.68362706080130616677e-16 * 2 ** 52 * Math.exp(-0.5 * ZIGGURAT_EDGE ** 2);
// Layers of the same area, from the tail (255) to the peak (0).
const EDGES = new Array(256).fill(0);
const HEIGHTS = new Array(256).fill(1);
EDGES[255] = ZIGGURAT_EDGE;
HEIGHTS[255] = Math.exp(-0.5 * ZIGGURAT_EDGE ** 2);
for (let layer = 254; layer > 0; layer -= 1) {
  HEIGHTS[layer] = HEIGHTS[layer + 1] + ZIGGURAT_AREA / EDGES[layer + 1];
  EDGES[layer] = Math.sqrt(-2 * Math.log(HEIGHTS[layer]));
}

if (typeof module !== "undefined") module.exports = { drawTimes, simulate };
