/**
 * A recorded answer. Each frame holds one step of the model: when it came, in ms after the request (`at`) and in ms of
 * the model's own steps (`when`), `pieces` of text by kind, `tokens`, the `step`, and whether it ended at a
 * `wrong` draft token.
 */
class Recording {
  constructor() {
    this.begin = performance.now();
    this.frames = [];
    this.text = "";
    this.content = "";
    this.ids = [];
    this.metrics = null;
    this.waiting = [];  // tokens whose text has not come yet
  }

  add(data) {
    this.metrics = data.metrics ?? this.metrics;
    const choice = data.choices?.[0];
    if (!choice) return null;
    const { tokens = [], step = null } = data.trace ?? {};
    const at = performance.now() - this.begin;
    const last = this.frames.at(-1);
    const when = last ? last.when + (step ? step.seconds * 1000 : at - last.at) : 0;
    const wrong = step ? step.parents.some((parent, node) => node && parent === step.path.at(-1)) : false;
    for (const { id, text, drafted } of tokens) {
      this.ids.push(id);
      this.waiting.push({ text, kind: drafted ? "draft" : wrong ? "fixed" : "own" });
    }
    const { reasoning, reasoning_content, content } = choice.delta ?? { content: choice.text };
    this.content += content ?? "";
    const pieces = [...this.coloured(reasoning ?? reasoning_content ?? "", "thought"), ...this.coloured(content ?? "")];
    if (!tokens.length && !pieces.length) return null;
    const frame = { at, when, pieces, tokens, step, wrong };
    this.frames.push(frame);
    return frame;
  }

  /** Text in pieces, with the kinds of their tokens. Some tokens have no text, such as those that end the reasoning. */
  coloured(text, manner = "") {
    const pieces = [];
    this.text += text;
    while (text) {
      const index = this.waiting.findIndex((token) => shared(text, token.text));
      if (index < 0) return [...pieces, { text, kind: manner }];
      const token = this.waiting[index];
      const length = shared(text, token.text);
      pieces.push({ text: text.slice(0, length), kind: `${token.kind} ${manner}` });
      token.text = token.text.slice(length);
      this.waiting.splice(0, token.text ? index : index + 1);
      text = text.slice(length);
    }
    return pieces;
  }

  /** Counts over the first `frames` frames. */
  sums(frames = this.frames.length) {
    const seen = this.frames.slice(0, frames);
    const steps = seen.filter((frame) => frame.step);
    const total = (list) => list.reduce((sum, frame) => sum + frame.tokens.length, 0);
    const took = seen.at(-1)?.when ?? 0;
    const whole = frames === this.frames.length;
    return {
      tokens: total(seen),
      speed: (whole && this.metrics?.tokens_per_second) || (took ? (1000 * total(seen.slice(1))) / took : 0),
      tau: steps.length ? total(steps) / steps.length : 0,
      accepted: seen.flatMap((frame) => frame.tokens).filter((token) => token.drafted).length,
      at: seen.at(-1)?.at ?? 0,
      when: took,
    };
  }
}

/** Number of characters at the beginning of a text that belong to a token. The token may lack the space before a word. */
function shared(text, token) {
  if (!token || text.startsWith(token)) return token.length;
  if (token.startsWith(text)) return text.length;
  const spaces = text.length - text.trimStart().length;
  return text.startsWith(token, spaces) ? spaces + token.length : 0;
}

/** Requests an answer and records it. `onFrame` gets each frame as it comes. */
async function record(recording, messages, drafting, fixedSeed, signal, onFrame = () => {}) {
  const [path, body] = requestFor(messages, drafting, fixedSeed);
  recording.begin = performance.now();
  const response = await ask(path, body, signal);
  for await (const data of serverEvents(response, signal)) {
    if (data.error) throw new Problem(`The answer failed: ${data.error.message}`);
    const frame = recording.add(data);
    if (frame) onFrame(frame);
  }
}

function append(box, pieces) {
  const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  box.append(...pieces.map(({ text, kind }) => make("span", { className: kind, textContent: text })));
  if (atEnd) box.scrollTop = box.scrollHeight;
}

/** Runs `work` until it ends, fails, or is stopped by the button or by Esc. */
async function run(name, work) {
  complain("");
  job = new AbortController();
  showButtons();
  try {
    if (!info) await loadInfo();
    await work(job.signal);
  } catch (error) {
    if (job.signal.aborted) say(`${name} was stopped.`);
    else report(error);
  } finally {
    job = null;
    showButtons();
    showPrefill();
  }
}

function report(error) {
  say("");
  if (!(error instanceof Problem)) console.warn(error);
  complain(error instanceof Problem ? error.message : `The server's answer cannot be read: ${error.message}`);
  if (error.status === 401) {
    $("key-form").hidden = false;
    $("key").focus();
  }
}

function showButtons() {
  $("send").textContent = job ? "Stop" : "Send";
  $("start").textContent = job ? "Stop" : "Race";
  $("clear").disabled = $("play").disabled = $("step").disabled = Boolean(job);
}
