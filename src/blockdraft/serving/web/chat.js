async function chat() {
  const text = $("message").value;
  if (!text.trim()) return say("Write a message first.");
  const answer = make("div", { className: "answer" });
  const foot = make("div", { className: "row soft" });
  const question = turn("You", make("div", { className: "answer", textContent: text }));
  const reply = turn("Model", answer, foot);
  const recording = new Recording(), drafting = $("drafting").checked;
  $("log").append(question, reply);
  $("log").scrollTop = $("log").scrollHeight;
  $("message").value = "";
  conversation.push({ role: "user", content: text });
  await run("The answer", async (signal) => {
    say("The model is answering.");
    await record(recording, conversation, drafting, seed(), signal, (frame) => {
      append(answer, frame.pieces);
      $("log").scrollTop = $("log").scrollHeight;
    });
    say(`The answer is complete: ${inFigures(recording)}.${drafting ? pausedNote(recording) : ""}`);
  });
  if (!recording.text && !recording.metrics) {  // stopped or failed before the first token: undo the question
    conversation.pop();
    question.remove();
    reply.remove();
    $("message").value ||= text;
    return;
  }
  conversation.push({ role: "assistant", content: recording.content });
  answer.replaceChildren(...withCodeBlocks(recording.frames.flatMap((frame) => frame.pieces)));
  foot.append(inFigures(recording), copyButton(recording.text));
}

function turn(speaker, ...children) {
  const element = make("article", { className: `turn card ${speaker === "You" ? "user" : ""}` }, make("h2", { textContent: speaker }), ...children);
  element.setAttribute("aria-label", speaker);
  return element;
}

/** Returns a note for an answer without draft tokens, if drafting was on. */
function pausedNote(recording) {
  const statistics = recording.metrics?.speculative_decoding ?? {};
  const could = statistics.num_spec_tokens > 0 && recording.ids.length > 1 && Number($("block_size").value) > 1;
  return could && statistics.num_spec_steps === 0 ? " Nothing was drafted, since drafting would have been slower." : "";
}

function inFigures(recording) {
  const { tokens, accepted, speed: rate, tau } = recording.sums();
  return `${count(tokens, "token")}, ${accepted} of them accepted draft tokens, ${speed(rate)} tokens/s, tau ${tau ? tau.toFixed(2) : "–"}`;
}

/** A button that copies a text. If the browser refuses, it selects `box`. */
function copyButton(text, box = null) {
  const button = make("button", { type: "button", textContent: "Copy" });
  button.onclick = async () => {
    try {
      await navigator.clipboard.writeText(text);
      say("Copied.");
    } catch {  // browsers give pages without https no clipboard, except those of this machine
      getSelection().selectAllChildren(box ?? button.closest(".turn").querySelector(".answer"));
      say("The text is selected; Ctrl+C copies it.");
    }
  };
  return button;
}

/** A block of code with a title and a button that copies it. */
function codeBlock(title, children) {
  const code = make("pre", { tabIndex: 0 }, ...children);
  return make("div", { className: "code" }, make("div", { className: "row spread" }, make("span", { className: "soft", textContent: title }), copyButton(code.textContent, code)), code);
}

/** The elements of an answer, with its fenced parts as blocks of code. */
function withCodeBlocks(pieces) {
  const text = pieces.map((piece) => piece.text).join("");
  const elements = [];
  let at = 0;
  for (const { index, 0: fenced, 1: language, 2: code } of text.matchAll(/^```([^\n`]*)\n([^]*?)(?:^```[ \t]*(?:\n|$)|(?![^]))/gm)) {
    const begin = index + 4 + language.length;
    elements.push(...cut(pieces, at, index), codeBlock(language || "code", cut(pieces, begin, begin + code.length)));
    at = index + fenced.length;
  }
  return [...elements, ...cut(pieces, at, text.length)];
}

/** Spans of the characters from `begin` to `end` of an answer. */
function cut(pieces, begin, end) {
  const spans = [];
  let at = 0;
  for (const { text, kind } of pieces) {
    const part = text.slice(Math.max(begin - at, 0), Math.max(end - at, 0));
    if (part) spans.push(make("span", { className: kind, textContent: part }));
    at += text.length;
  }
  return spans;
}

function clearChat() {
  conversation = [];
  $("log").replaceChildren();
  complain("");
  say("The conversation is empty.");
  $("message").focus();
}
