let drawnAt = 0, drawn = {};

function showStepNowAndThen() {
  if (!lessMotion.matches && performance.now() - drawnAt > FIGURES_EVERY) showStep();
}

/** Draws a step, by default the last one in the lane, and the histogram of all steps in the lane. */
function showStep(frame, checked = true) {
  const shown = lanes.drafted.recording?.frames.slice(0, lanes.drafted.shown).filter((one) => one.step) ?? [];
  frame ??= shown.at(-1);
  drawnAt = performance.now();
  if (frame === drawn.frame && checked === drawn.checked) return;
  drawn = { frame, checked };
  showHistogram(shown);
  const words = frame ? treeInWords(frame, checked, shown.length + !checked) : "No steps yet.";
  $("tree-words").textContent = words;
  $("tree").replaceChildren(...(frame ? [treeOf(frame, checked, words)] : []));
}

function treeInWords({ step, tokens }, checked, number) {
  const drafted = `Step ${number}: ${count(step.tokens.length - 1, "draft token")}`;
  if (!checked) return `${drafted}, not yet checked`;
  const own = tokens.filter((token) => !token.drafted).map((token) => `“${token.text}”`).join("");
  const accepted = step.path.slice(1).map((node) => step.tokens[node].text).join("");
  return `${drafted}, ${step.path.length - 1} accepted${accepted && ` (“${accepted}”)`}${own && `, then the model's own ${own}`}`;
}

/** Layout of the nodes: depth to the right, the accepted path along the top, other draft tokens below it. */
function places({ parents, path }, bonus) {
  const children = parents.map(() => []);
  parents.forEach((parent, node) => { if (node) children[parent].push(node); });
  if (bonus) children[path.at(-1)].unshift(parents.length);
  const accepted = new Set(path), result = [];
  let row = 0;
  (function visit(node, depth) {
    result[node] = { depth, row };
    const below = (children[node] ?? []).sort((a, b) => rank(a) - rank(b));
    below.forEach((child, i) => {
      if (i) row += 1;
      visit(child, depth + 1);
    });
  })(0, 0);
  return result;
  function rank(node) { return accepted.has(node) || node === parents.length ? 0 : 1; }
}

function label(token) {
  const text = visible(token.text).replace(/ /g, "·");
  return text.length > SHOWN_LABEL ? `${text.slice(0, SHOWN_LABEL - 1)}…` : text || "∅";
}

function treeOf({ step, tokens, wrong }, checked, words) {
  const own = tokens.find((token) => !token.drafted);
  const nodes = places(step, own);
  const labels = [...step.tokens, ...(own ? [own] : [])].map(label);
  const widths = [], HEIGHT = 24, GAP = 26, STEP = 32;
  nodes.forEach(({ depth }, i) => { widths[depth] = Math.max(widths[depth] ?? 0, 14 + 7.4 * labels[i].length); });
  const left = widths.map((_, depth) => 4 + widths.slice(0, depth).reduce((sum, width) => sum + width + GAP, 0));
  const top = (node) => 4 + nodes[node].row * STEP;
  const kind = (node) => {
    if (!node) return "anchor";
    if (!checked) return "";
    if (node === step.tokens.length) return wrong ? "fixed" : "";
    return step.path.includes(node) ? "draft" : "rejected";
  };
  const boxes = nodes.map((place, i) => {
    const x = left[place.depth], width = 14 + 7.4 * labels[i].length;
    const box = draw("rect", { x, y: top(i), width, height: HEIGHT });
    return draw("g", { class: kind(i) }, box, draw("text", { x: x + width / 2, y: top(i) + HEIGHT / 2 }, labels[i]));
  });
  const lines = nodes.slice(1).map((place, i) => {
    const node = i + 1, parent = node === step.tokens.length ? step.path.at(-1) : step.parents[node];
    const from = left[nodes[parent].depth] + 14 + 7.4 * labels[parent].length, to = left[place.depth];
    const bend = left[nodes[parent].depth] + widths[nodes[parent].depth] + GAP / 2;
    const d = `M${from},${top(parent) + 12} H${bend} V${top(node) + 12} H${to}`;
    return draw("path", { d, class: kind(node) });
  });
  if (own && !checked) { boxes.pop(); lines.pop(); }  // not known yet
  const width = left.at(-1) + widths.at(-1) + 4, height = Math.max(...nodes.map((_, i) => top(i))) + HEIGHT + 4;
  const svg = { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": words };
  return draw("svg", svg, ...lines.reverse(), ...boxes);
}

function showHistogram(frames) {
  const counts = [];
  for (const { step } of frames) counts[step.path.length - 1] = (counts[step.path.length - 1] ?? 0) + 1;
  const most = Math.max(...Object.values(counts), 1);
  $("no-steps").hidden = frames.length > 0;
  $("histogram").replaceChildren(...Array.from(counts, (number = 0, accepted) => {
    const bar = make("span", { className: "bar" });
    bar.style.width = `${(75 * number) / most}%`;
    return make("tr", {}, make("th", { scope: "row", textContent: accepted }), make("td", {}, bar, String(number)));
  }));
}
