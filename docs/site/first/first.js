// The first page: the plain loop in real time, the guess, three animations, and sliders.
"use strict";

const FILE_S = 0.606;
const FILES_A_BATCH = 4;
const STEP_S = 0.1;
const LOOP_S = 10;
const SEED = 4;
const SPEED = 3;
const find = (name) => document.getElementById(name);
const percent = (share) => `${Math.round(100 * share)} %`;

/** Makes an element with properties and children. */
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

/** Reads a number that somebody typed; says in words what is wrong with it. */
function readGuess(text, most, unit) {
  const typed = text.trim().replace(",", ".").replace(/\s*%$/, "");
  if (typed === "") return { problem: `You have not guessed yet. Type a number from 0 to ${most}.` };
  const number = Number(typed);
  if (!Number.isFinite(number)) {
    return { problem: `“${text.trim()}” is no number. Type ${unit} as a number from 0 to ${most}.` };
  }
  if (number < 0 || number > most) {
    return { problem: `${typed} is not possible here. Type a number from 0 to ${most}.` };
  }
  return { number };
}

/** Draws rows of spans as one picture with a text that says the same. */
function drawRows(rows, seconds, description) {
  const height = 58 / rows.length;
  const at = (time) => ((960 * Math.min(time, seconds)) / seconds).toFixed(1);
  const paths = rows.map(({ kind, spans }, place) => {
    const top = (place * height).toFixed(1);
    const bottom = ((place + 1) * height - Math.min(2, height / 5)).toFixed(1);
    const boxes = spans.filter((span) => span.start < seconds);
    const shape = boxes.map((span) => `M${at(span.start)} ${top}H${at(span.end)}V${bottom}H${at(span.start)}Z`);
    return `<path class="row-${kind}" d="${shape.join("")}"/>`;
  });
  const picture = make("div");
  picture.innerHTML = `<svg viewBox="0 0 960 58" preserveAspectRatio="none" role="img">${paths.join("")}</svg>`;
  picture.firstChild.setAttribute("aria-label", description);
  return picture.firstChild;
}

const plainLoop = simulate({ workers: 0, load_s: FILE_S * FILES_A_BATCH, step_s: STEP_S, seconds: LOOP_S });

function setUpLoop() {
  const button = find("loop-run");
  const lines = find("loop-lines");
  button.onclick = () => {
    button.disabled = true;
    lines.replaceChildren();
    const started = performance.now();
    let shown = 0;
    const draw = () => {
      const now = Math.min(LOOP_S, (performance.now() - started) / 1000);
      find("loop-bar").style.width = `${(100 * now) / LOOP_S}%`;
      const trains = plainLoop.steps.some((step) => step.start <= now && now < step.end);
      find("loop-now").textContent = trains ? "The GPU trains." : `The GPU waits … ${now.toFixed(1)} s`;
      while (shown < plainLoop.batches && plainLoop.steps[shown].end <= now) {
        const { start, end } = plainLoop.steps[shown];
        const waitedS = start - (shown ? plainLoop.steps[shown - 1].end : 0);
        lines.append(make("div", {
          textContent: `batch ${shown}: waited ${waitedS.toFixed(1)} s, trained ${(end - start).toFixed(1)} s`,
        }));
        shown += 1;
      }
      if (now < LOOP_S) {
        requestAnimationFrame(draw);
        return;
      }
      find("loop-now").textContent = `${shown} batches of ${FILES_A_BATCH} photos in ${LOOP_S} s. How much of it was waiting?`;
      button.disabled = false;
      button.textContent = "Run it again";
    };
    draw();
  };
}

function setUpGuess() {
  find("guess-form").onsubmit = (event) => {
    event.preventDefault();
    const guess = readGuess(find("guess").value, 100, "the percentage");
    find("guess").setAttribute("aria-invalid", String("problem" in guess));
    find("guess-picture").replaceChildren();
    if (guess.problem) {
      find("guess-answer").textContent = guess.problem;
      return;
    }
    const loadS = FILE_S * FILES_A_BATCH;
    const waited = loadS / (loadS + STEP_S);
    find("guess-answer").textContent =
      `You guessed ${guess.number} %. The GPU waits ${percent(waited)}: ` +
      `${loadS.toFixed(1)} s of loading, then ${STEP_S} s of training, one after the other.`;
    const description = `The first ${LOOP_S} s: ${plainLoop.batches} thin bars of training, and between them gaps of ` +
      `${loadS.toFixed(1)} s in which the GPU waits.`;
    find("guess-picture").append(
      drawRows([{ kind: "step", spans: plainLoop.steps }], LOOP_S, description),
      make("p", {}, make("small", { textContent: description })),
    );
  };
}

const CASES = [
  { letter: "a", loadS: 2, spread: 0, why: "Loading is too slow: seven workers bring 3.5 batches a second, the step takes 10." },
  { letter: "b", loadS: 0.35, spread: 0, why: "The step is the limit: what is missing to 300 is the first batch." },
  { letter: "c", loadS: 0.7, spread: 0.22, why: "In balance on the mean, but one slow batch makes all wait. A spread of 22 % costs two seconds." },
];

function setUpCase({ letter, loadS, spread, why }) {
  const run = simulate({ workers: 7, load_s: loadS, load_cv: spread, step_s: STEP_S, seed: SEED });
  const unit = spread ? `, with a spread of ${percent(spread)}` : ", always the same";
  const guess = make("input", { type: "text", inputMode: "decimal", autocomplete: "off", id: `guess-${letter}` });
  const label = make("label", { htmlFor: guess.id, textContent: "Your guess, batches" });
  const answer = make("p", { className: "answer" });
  answer.setAttribute("role", "status");
  const loads = run.loads.map(() => make("i"));
  const places = Array.from({ length: 14 }, () => make("i"));
  const model = make("i", { className: "model" });
  const stage = make("div", { className: "stage" }, ...loads, "→", ...places, "→", model);
  stage.setAttribute("aria-hidden", "true");
  const past = drawRows([{ kind: "step", spans: run.steps }], run.seconds, "");
  const button = make("button", { type: "button", textContent: "Play" });
  const slider = make("input", { type: "range", min: 0, max: run.seconds, step: "any", value: 0 });
  slider.setAttribute("aria-label", `Time of case ${letter}, seconds`);
  const count = make("p", { className: "now" });
  find("cases").append(make(
    "div", { className: "case" },
    make("h3", { textContent: `(${letter}) Loading a batch takes ${loadS}\u00a0s${unit}` }),
    make("form", { onsubmit: (event) => { event.preventDefault(); play(true); } }, label, guess),
    stage, make("div", { className: "past" }, past), make("div", { className: "controls" }, button, slider), count, answer,
  ));

  const readyAt = new Map();
  for (const lane of run.loads) for (const load of lane) readyAt.set(load.batch, load.end);
  const fill = (box, colour, share, text) => {
    box.style.background = `linear-gradient(to top, var(${colour}) ${100 * share}%, transparent 0)`;
    box.textContent = text;
  };
  const show = (box, colour, spans, time, idle) => {
    const span = spans.findLast((each) => each.start <= time);
    const busy = span && time < span.end;
    fill(box, colour, busy ? (time - span.start) / (span.end - span.start) : 0, busy ? span.batch : idle);
  };
  let time = 0;
  let playing = false;
  let before = 0;
  const draw = () => {
    loads.forEach((box, lane) => show(box, "--load-soft", run.loads[lane], time, ""));
    show(model, "--step-soft", run.steps, time, "waits");
    const taken = run.steps.filter((step) => step.start <= time).length;
    const done = run.steps.filter((step) => step.end <= Math.min(time, run.seconds) + 1e-9).length;
    places.forEach((box, place) => {
      const batch = taken + places.length - 1 - place;
      const ready = readyAt.get(batch) <= time;
      fill(box, "--load-soft", ready ? 1 : 0, ready ? batch : "");
    });
    past.style.clipPath = `inset(0 ${100 - (100 * time) / run.seconds}% 0 0)`;
    const told = `${done} batches in ${time.toFixed(1)} s`;
    past.setAttribute("aria-label", `Steps so far: ${told}`);
    count.textContent = told;
    slider.value = time;
    slider.setAttribute("aria-valuetext", told);
    if (time >= run.seconds) tell();
  };
  const tell = () => {
    const read = readGuess(guess.value, 300, "the batches");
    const said = read.problem ? read.problem : `You guessed ${read.number}.`;
    answer.textContent = `${run.batches} batches; the model waited ${percent(1 - run.utilisation)}. ${said} ${why}`;
  };
  const advance = (now) => {
    if (!playing) return;
    time = Math.min(run.seconds, time + (SPEED * Math.max(0, now - before)) / 1000);
    before = now;
    draw();
    if (time < run.seconds) requestAnimationFrame(advance);
    else play(false);
  };
  const play = (on) => {
    if (on && time >= run.seconds) time = 0;
    if (on) answer.textContent = "";
    playing = on;
    before = performance.now();
    button.textContent = on ? "Pause" : "Play";
    if (on) requestAnimationFrame(advance);
  };
  button.onclick = () => play(!playing);
  slider.oninput = () => {
    play(false);
    time = Number(slider.value);
    answer.textContent = "";
    draw();
  };
  draw();
}

const BATCH_SIZE = 4;
const KNOBS = [
  { name: "workers", label: "Workers", least: 0, most: 16, step: 1, start: 2, show: (value) => `${value}` },
  { name: "streams", label: "Reads at once, a worker", least: 0, most: 5, step: 1, start: 0, power: 2 },
  { name: "order", label: "Order of the batches", least: 0, most: 1, step: 1, start: 0, show: (value) => (value ? "any" : "as asked") },
  { name: "file_s", label: "Reading a file", least: -2.5, most: 0.5, step: 0.02, start: -0.22, power: 10 },
  { name: "spread", label: "Its spread", least: 0, most: 1.5, step: 0.01, start: 0.8, show: percent },
  { name: "step_s", label: "A step", least: -2, most: 0.5, step: 0.02, start: -1, power: 10 },
  { name: "prefetch", label: "Prefetch, a worker", least: 1, most: 8, step: 1, start: 2, show: (value) => `${value}` },
];

/** Returns times of 64 files: lognormal, with this mean and spread. */
function listReads(meanS, cv) {
  const draw = drawTimes(1, cv, SEED, 3);
  const times = Array.from({ length: 64 }, draw);
  const mean = times.reduce((sum, time) => sum + time) / times.length;
  return times.map((time) => (time / mean) * meanS);
}

function setUpKnobs() {
  const settings = {};
  const draw = () => {
    const { workers, streams, step_s, prefetch } = settings;
    const lanes = Math.max(1, workers);
    const readS = (BATCH_SIZE * settings.file_s) / streams;
    const seconds = Math.ceil(Math.max(30, 50 * Math.max(step_s, readS / lanes)));
    const run = simulate({
      workers, streams, step_s, prefetch, seconds, batch_size: BATCH_SIZE, seed: SEED,
      read_s: listReads(settings.file_s, settings.spread), in_order: !settings.order,
    });
    find("knobs-answer").textContent =
      `${run.batches} batches of ${BATCH_SIZE} in ${seconds} s: the GPU works ${percent(run.utilisation)} of the time, ` +
      `and waits ${percent(1 - run.utilisation)}. ` +
      `The law: at least max(${(readS / lanes).toPrecision(2)} s, ${step_s.toPrecision(2)} s) a batch.`;
    const shownS = run.steps.length > 25 ? run.steps[25].start : seconds;
    const rows = run.loads.map((spans) => ({ kind: "load", spans }));
    const who = workers ? `${workers} workers load` : "the training process loads";
    const description = `The first ${shownS.toPrecision(2)} s: ${who} (blue), and the steps (orange, the lowest row). ` +
      "A gap between steps is waiting.";
    const picture = drawRows([...rows, { kind: "step", spans: run.steps }], shownS, description);
    picture.style.height = `${Math.max(58, 14 * (rows.length + 1))}px`;
    find("knobs-picture").replaceChildren(picture, make("p", {}, make("small", { textContent: description })));
  };
  for (const knob of KNOBS) {
    const slider = make("input", { type: "range", id: `knob-${knob.name}`, min: knob.least, max: knob.most, step: knob.step });
    slider.value = knob.start;
    const shown = make("output");
    const read = () => {
      const value = knob.power ? knob.power ** Number(slider.value) : Number(slider.value);
      const told = knob.show ? knob.show(value) : knob.name.endsWith("_s") ? `${value.toPrecision(2)} s` : `${value}`;
      settings[knob.name] = value;
      shown.textContent = told;
      slider.setAttribute("aria-valuetext", told);
    };
    slider.oninput = () => { read(); draw(); };
    read();
    const label = make("label", { htmlFor: slider.id }, `${knob.label}: `, shown);
    find("knobs").append(make("div", { className: "knob" }, label, slider));
  }
  draw();
}

setUpLoop();
setUpGuess();
CASES.forEach(setUpCase);
setUpKnobs();
