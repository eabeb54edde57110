// colab_utils/diagnosis/simulator.py in JavaScript: the same random times, so the same batches.
// tests/site/test_simulator.py compares the two. See the Python for what the arguments mean.
"use strict";

const ROUNDING_S = 1e-9;

/** Simulates a PyTorch DataLoader that feeds a training step, second by second. */
function simulate({
  workers, load_s, step_s, load_cv = 0, step_cv = 0, prefetch = 2, seconds = 30, seed = 0,
}) {
  // Without workers the training process loads: one lane, one batch ahead.
  const lanes = Math.max(1, workers);
  const ahead = Math.max(1, workers * prefetch);
  const drawLoad = drawTimes(load_s, load_cv, seed, 0);
  const drawStep = drawTimes(step_s, step_cv, seed, 1);
  const loads = [];
  const steps = [];
  for (;;) {
    const batch = steps.length;
    let askedS = 0;
    if (batch >= ahead) {
      const earlier = steps[batch - ahead];
      askedS = workers ? earlier.start : earlier.end;
    }
    if (askedS > seconds - ROUNDING_S) break;
    let loadStartS = askedS;
    if (batch >= lanes) loadStartS = Math.max(askedS, loads[batch - lanes].end);
    const load = { batch, start: loadStartS, end: loadStartS + drawLoad() };
    loads.push(load);
    let stepStartS = load.end;
    if (batch) stepStartS = Math.max(load.end, steps[batch - 1].end);
    steps.push({ batch, start: stepStartS, end: stepStartS + drawStep() });
  }
  const begun = (span) => span.start < seconds - ROUNDING_S;
  const shownSteps = steps.filter(begun);
  let workedS = 0;
  for (const step of shownSteps) workedS += Math.min(step.end, seconds) - step.start;
  const byLane = [];
  for (let lane = 0; lane < lanes; lane += 1) {
    byLane.push(loads.filter((load) => load.batch % lanes === lane && begun(load)));
  }
  return {
    workers,
    prefetch,
    seconds,
    batches: steps.filter((step) => step.end <= seconds + ROUNDING_S).length,
    utilisation: workedS / seconds,
    loads: byLane,
    steps: shownSteps,
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
