/** One side of the race. It shows a recording up to a given time. */
class Lane {
  constructor(id) {
    this.box = make("div", { className: "answer", tabIndex: 0 });
    this.box.setAttribute("role", "region");
    this.box.setAttribute("aria-label", `Answer of ${$(`${id}-name`).textContent}`);
    const cells = ["Tokens", "Time", "Tokens/s", "tau"].map((name) => [make("dt", { textContent: name }), make("dd")]);
    this.cells = cells.map(([, value]) => value);
    $(id).append(make("dl", {}, ...cells.flat()), this.box);
    this.load(null);
  }

  /** Shows a recording from its beginning. Time is measured by `axis`, the field "at" or "when" of its frames. */
  load(recording, axis = "at") {
    this.recording = recording;
    this.axis = axis;
    this.box.replaceChildren();
    this.shown = 0;
    this.showFigures();
  }

  showUntil(time) {
    const { frames } = this.recording;
    const begin = this.shown;
    while (this.shown < frames.length && frames[this.shown][this.axis] <= time) this.shown += 1;
    if (this.shown === begin) return;
    append(this.box, frames.slice(begin, this.shown).flatMap((frame) => frame.pieces));
    this.showFigures();
  }

  get ended() { return this.shown === this.recording.frames.length; }

  showFigures() {
    const sums = this.recording?.sums(this.shown) ?? { tokens: 0, at: 0 };
    const values = [sums.tokens, seconds(sums[this.axis]), speed(sums.speed), sums.tau ? sums.tau.toFixed(2) : "–"];
    values.forEach((value, i) => { this.cells[i].textContent = value; });
  }
}

const lanes = { drafted: new Lane("drafted"), plain: new Lane("plain") };
const HOW = $("how").textContent;
let slowMotion = null;

async function race() {
  const prompt = $("prompt").value;
  if (!prompt.trim()) return say("Write a prompt first.");
  const messages = [{ role: "user", content: prompt }];
  const fixedSeed = seed() ?? Math.floor(Math.random() * 2 ** 31);
  const drafted = new Recording(), plain = new Recording();
  slowMotion?.stop();
  slowMotion = null;
  $("replay").hidden = $("result").hidden = true;
  $("how").textContent = HOW;
  lanes.drafted.load(drafted);
  lanes.plain.load(plain);
  $("clock").textContent = `Clock: ${seconds(0)}`;
  showStep();
  await run("The race", async (signal) => {
    say("First blockdraft runs alone and is recorded.");
    await live(lanes.drafted, messages, true, fixedSeed, signal);
    lanes.drafted.load(drafted);
    say("Now plain decoding runs live, beside the recording.");
    const begin = performance.now();
    const playing = setInterval(() => {
      $("clock").textContent = `Clock: ${seconds(performance.now() - begin)}`;
      lanes.drafted.showUntil(performance.now() - begin);
      showStepNowAndThen();
    }, DRAW_EVERY);
    try {
      await live(lanes.plain, messages, false, fixedSeed, signal);
      while (!lanes.drafted.ended && !signal.aborted) await sleep(DRAW_EVERY);
      signal.throwIfAborted();
    } finally {
      clearInterval(playing);
    }
    $("clock").textContent = `Clock: ${seconds(Math.max(drafted.sums().at, plain.sums().at))}`;
    showResult(drafted, plain);
    slowMotion = new SlowMotion(drafted, plain);
    $("replay").hidden = false;
  });
  lanes.drafted.showUntil(Infinity);
  for (const lane of Object.values(lanes)) lane.showFigures();
  showStep();
}

/** Runs one lane live. Its text is drawn at intervals, since drawing slows the model down. */
async function live(lane, messages, drafting, fixedSeed, signal) {
  const drawing = setInterval(() => {
    lane.showUntil(Infinity);
    if (drafting) showStepNowAndThen();
  }, DRAW_EVERY);
  try {
    await record(lane.recording, messages, drafting, fixedSeed, signal);
  } finally {
    clearInterval(drawing);
    lane.showUntil(Infinity);
  }
}

function showResult(drafted, plain) {
  const equal = drafted.text === plain.text && drafted.ids.join() === plain.ids.join();
  const greedy = Number($("temperature").value) === 0;
  const [one, other] = [drafted.sums(), plain.sums()];
  $("result").hidden = false;
  $("difference").textContent = "";
  if (equal) {
    $("verdict").textContent = `✓ Both texts are equal: ${count(plain.ids.length, "token")}, ${count(plain.text.length, "character")}.`;
  } else {
    $("verdict").textContent = "✗ The texts differ.";
    $("difference").textContent = firstDifference(drafted, plain) + (greedy
      ? "\nRounding decides between tokens of almost equal probability. A target compiled for a CPU never differs, and no target does with --exact."
      : "\nAt a temperature above 0 both texts are samples of the same distribution, which rounding or sampled draft tokens can make different.");
  }
  $("gain").textContent = one.speed && other.speed ? `${(one.speed / other.speed).toFixed(2)} times the speed` : "";
  $("times").textContent = `blockdraft ${speed(one.speed)} tokens/s, plain decoding ${speed(other.speed)} tokens/s, as the server measured them.`
    + (greedy ? "" : " Both lanes had the same seed.") + pausedNote(drafted);
  say(Math.max(one.at, other.at) < BLINK ? "That was quick. Slow motion replays it at a readable pace." : "The race has ended.");
}

function firstDifference(drafted, plain) {
  let at = 0;
  while (at < drafted.text.length && drafted.text[at] === plain.text[at]) at += 1;
  if (at === drafted.text.length && at === plain.text.length) return "The tokens differ, but spell the same text.";
  const around = ({ text }) => visible(`…${text.slice(Math.max(0, at - 30), at)}▸${text.slice(at, at + 30) || "(end)"}`);
  return `From character ${at + 1} on, marked by ▸:\nblockdraft: ${around(drafted)}\nplain:      ${around(plain)}`;
}

/** Replays the recorded steps of both lanes, slowed down by one factor. */
class SlowMotion {
  constructor(drafted, plain) {
    this.recordings = { drafted, plain };
    this.end = Math.max(drafted.frames.at(-1)?.when ?? 0, plain.frames.at(-1)?.when ?? 0);
    this.mean = (drafted.frames.at(-1)?.when ?? 0) / Math.max(1, drafted.frames.length - 1) || 1;  // ms of a step
    this.time = Infinity;
    this.timer = null;
  }

  get pace() { return Number($("pace").value) * this.mean; }  // recorded ms in a second

  rewind() {
    for (const [name, lane] of Object.entries(lanes)) lane.load(this.recordings[name], "when");
    this.time = 0;
    this.show();
  }

  toggle() {
    if (this.timer) return this.pause();
    if (this.time >= this.end) this.rewind();
    this.timer = setInterval(() => this.goTo(this.time + (this.pace * DRAW_EVERY) / 1000), DRAW_EVERY);
    $("play").textContent = "Pause";
    this.explain();
    say("Slow motion plays.");
  }

  pause() {
    this.stop();
    say(this.time < this.end ? "Slow motion is paused." : "Slow motion has ended.");
  }

  stop() {
    clearInterval(this.timer);
    this.timer = null;
    $("play").textContent = "Slow motion";
  }

  /** Moves to the end of the next step: of blockdraft, or of plain decoding once blockdraft has ended. */
  step() {
    this.stop();
    if (this.time >= this.end) this.rewind();
    else {
      const lane = lanes.drafted.ended ? lanes.plain : lanes.drafted;
      this.goTo(lane.recording.frames[lane.shown].when);
    }
    this.explain();
    say($("tree-words").textContent);
  }

  goTo(time) {
    this.time = time;
    this.show();
    if (this.time >= this.end) this.pause();
  }

  show() {
    for (const lane of Object.values(lanes)) lane.showUntil(this.time);
    $("clock").textContent = `Clock: ${seconds(Math.min(this.time, this.end))} of the recording`;
    const { frames } = lanes.drafted.recording;
    const [last, next] = [frames[lanes.drafted.shown - 1], frames[lanes.drafted.shown]];
    const share = next?.step && last ? (this.time - last.when) / (next.when - last.when) : 0;
    if (share > 0.4 && !lessMotion.matches) showStep(next, false);  // drafted, and not yet checked
    else showStep();
  }

  explain() {
    const slower = 1000 / this.pace;
    $("how").textContent = `Slow motion: these are the recorded steps, shown ${slower < 10 ? slower.toFixed(1) : Math.round(slower)} `
      + "times slower than they ran. The figures are those of the real run, without the time to read the prompt.";
  }
}
