"use strict";

const FILE = `"""Prices of an order."""

import math

RATES = {"book": 0.07, "food": 0.07, "toy": 0.19}

class Order:
    """The items of one customer."""

    def __init__(self, customer):
        self.customer = customer
        self.items = []

    def add(self, name, kind, price, amount=1):
        if price < 0:
            raise ValueError(f"price must not be negative, got {price}")
        self.items.append((name, kind, price, amount))

    def net(self):
        total = 0
        for name, kind, price, amount in self.items:
            total += price * amount
        return total

    def tax(self):
        total = 0
        for name, kind, price, amount in self.items:
            total += price * amount * RATES[kind]
        return math.ceil(total * 100) / 100

    def gross(self):
        return self.net() + self.tax()

def receipt(order):
    lines = [f"Receipt for {order.customer}"]
    for name, kind, price, amount in order.items:
        lines.append(f"{amount} x {name}: {price * amount:.2f}")
    lines.append(f"Total: {order.gross():.2f}")
    return "\\n".join(lines)`;
const EDIT = "Edit of a file";
const EXAMPLES = {
  [EDIT]: `Rename the variable amount to quantity everywhere in this file. Write the whole file.\n\n\`\`\`python\n${FILE}\n\`\`\``,
  "Word problem": "Tom has 3 boxes of 12 pens. He gives away 5 pens. How many are left?",
  "Another word problem": "Ben reads 15 pages a day. His book has 180 pages. After 7 days, how many pages are left to read?",
  "Python function":
    'Complete this function:\n```python\ndef factorial(n):\n    """Compute the factorial of n."""\n```',
  "Function with an example":
    'Complete this function:\n```python\ndef running_total(numbers):\n    """Return the list of running sums of numbers.\n\n'
    + '    >>> running_total([1, 2, 3])\n    [1, 3, 6]\n    """\n```',
};
const DRAW_EVERY = 50;       // ms
const FIGURES_EVERY = 400;   // ms between drawings of tree and histogram; more would flicker, and slow the model down
const PATIENCE = 20000;      // ms of silence until the page says that it is still waiting
const BLINK = 3000;          // ms; a shorter race is too fast to watch
const SHOWN_LABEL = 12;      // most characters of a token in the tree

const $ = (id) => document.getElementById(id);
const sleep = (ms) => new Promise((wake) => setTimeout(wake, ms));
const lessMotion = matchMedia("(prefers-reduced-motion: reduce)");

let info = null;             // about the model: {id, blockdraft: {...}}
let job = null;              // AbortController of the running request
let conversation = [];

/** Makes an element. Strings become text nodes, never HTML. */
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

function draw(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const say = (text) => { $("status").textContent = text; };
const complain = (text) => { $("problem").textContent = text; };
const count = (number, noun, nouns = `${noun}s`) => `${number.toLocaleString("en")} ${number === 1 ? noun : nouns}`;
const seconds = (ms) => `${(ms / 1000).toFixed(ms < 10000 ? 3 : 1)} s`;
const visible = (text) => text.replace(/\n/g, "⏎").replace(/\t/g, "⇥");
const speed = (value) => (value ? value.toFixed(value < 100 ? 1 : 0) : "–");

// The server

/** An error whose message is shown to the user. */
class Problem extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

async function ask(path, body, signal) {
  const headers = {};
  const key = sessionStorage.getItem("api-key");
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  const request = { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal, cache: "no-store" };
  const response = await patiently(fetch(path, request), signal, "The server does not answer. Is it still running?");
  if (!response.ok) throw new Problem(await inWords(response, key), response.status);
  return response;
}

/** Waits for the server. Tells the user when that takes long; `meaning` is the error if the connection is lost. */
async function patiently(work, signal, meaning) {
  const timer = setTimeout(() => say("The server is silent; still waiting. Esc stops."), PATIENCE);
  try {
    return await work;
  } catch (error) {
    throw signal?.aborted ? error : new Problem(meaning);
  } finally {
    clearTimeout(timer);
  }
}

async function inWords(response, key) {
  const answer = await response.json().catch(() => null);
  const message = answer?.error?.message ?? response.statusText;
  if (response.status === 401) return key ? "The server refuses this API key." : "The server needs an API key.";
  if (response.status === 429) {
    const wait = Number(response.headers.get("Retry-After"));
    return `The server is busy: ${message} ${wait ? `Try again in ${count(wait, "second")}.` : "Try again later."}`;
  }
  if (response.status < 500) return `The server refused this (${response.status}): ${message}`;
  return `The server failed (${response.status}): ${message}`;
}

/** The objects in a stream of server-sent events, up to its mark [DONE]. Comments report the progress of a prefill. */
async function* serverEvents(response, signal) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const broken = "The connection broke during the answer. Is the server still running?";
  let rest = "";
  for (;;) {
    const { done, value } = await patiently(reader.read(), signal, broken);
    if (done) throw new Problem(broken);
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith(": prefill ")) showPrefill(...line.slice(10).split("/").map(Number));
      if (!line.startsWith("data:")) continue;
      showPrefill();
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

/** Shows how much of a long prompt has been read. Without numbers, hides it. */
function showPrefill(done, total) {
  const bar = $("prefill");
  if (done === undefined) {
    bar.hidden = true;
    return;
  }
  Object.assign(bar, { value: done, max: total, hidden: false });
  say(`The model is reading the prompt: ${done.toLocaleString("en")} of ${count(total, "token")}.`);
}

async function loadInfo() {
  const models = (await (await ask("/v1/models")).json()).data;
  info = models[0];
  const { target, drafter, parameters, drafter_parameters, max_context, block_size, tree_budget, recording, backends = [] } = info.blockdraft;
  const millions = (number) => (number ? ` (${(number / 1e6).toFixed(1)} M parameters)` : "");
  $("about").textContent = `${target}${millions(parameters)}, drafter ${drafter}${millions(drafter_parameters)}, `
    + `context of ${count(max_context, "token")}${recording ? ". Conversations are recorded to train drafters." : ""}`;
  limit("block_size", block_size);
  limit("tree_budget", tree_budget);
  limit("max_tokens", max_context);
  $("system-row").hidden = !info.blockdraft.has_chat_template;
  $("backend-row").hidden = backends.length < 2;
  if (drafter.split("+").includes("lookup") && !$("prompt").dataset.edited) choose(EDIT);  // what lookup is good at
  $("backend").replaceChildren(...backends.map((name) => make("option", { value: name, textContent: name })));
  showValues();
  showEditor();
}

/** Sets the maximum of a slider. A slider that was at its maximum stays there. */
function limit(id, most) {
  const slider = $(id);
  if (most === undefined) return;
  slider.disabled = Number(slider.min) === most;
  const atEnd = slider.value === slider.max;
  slider.max = most;
  if (atEnd) slider.value = most;
}

/** Path and body of a request. Without a seed (null), the server samples with a random one. */
function requestFor(messages, drafting, fixedSeed) {
  const number = (id) => Number($(id).value);
  const speculation = { enabled: drafting, statistics: true, trace: true };
  if ($("backend").value) speculation.backend = $("backend").value;
  if (drafting) Object.assign(speculation, { block_size: number("block_size"), tree_budget: number("tree_budget") });
  const body = {
    model: info.id, stream: true, stream_options: { include_usage: true },
    max_tokens: number("max_tokens"), temperature: number("temperature"), speculation,
  };
  if (fixedSeed !== null) body.seed = fixedSeed;
  const system = $("system").value.trim() ? [{ role: "system", content: $("system").value }] : [];
  if (info.blockdraft.has_chat_template) return ["/v1/chat/completions", { ...body, messages: [...system, ...messages] }];
  return ["/v1/completions", { ...body, prompt: messages.map((message) => message.content).join("") }];
}

const seed = () => ($("seed").value === "" ? null : Number($("seed").value));
