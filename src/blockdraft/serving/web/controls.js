function showValues() {
  const text = { temperature: (v) => (v === "0" ? "0 (greedy)" : v), tree_budget: (v) => (v === "0" ? "0 (a chain)" : v), max_tokens: (v) => `${v} tokens` };
  for (const id of ["temperature", "block_size", "tree_budget", "max_tokens"]) {
    const { value } = $(id);
    $(`${id}-value`).textContent = text[id]?.(value) ?? value;
    $(id).setAttribute("aria-valuetext", $(`${id}-value`).textContent);
  }
}

const TABS = ["chat", "race", "connect"];

function openTab(name, focus = false) {
  for (const tab of TABS) {
    const chosen = tab === name;
    $(tab).hidden = !chosen;
    $(`${tab}-tab`).setAttribute("aria-selected", chosen);
    $(`${tab}-tab`).tabIndex = chosen ? 0 : -1;
    if (chosen && focus) $(`${tab}-tab`).focus();
  }
  $("drafting-row").hidden = name === "race";
  $("settings").hidden = $("legend").hidden = name === "connect";
  history.replaceState(null, "", `#view=${name}`);
}

/** Puts an example into the race. */
function choose(example) {
  $("example").value = example;
  $("prompt").value = EXAMPLES[example];
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").textContent = theme === "dark" ? "Light colours" : "Dark colours";
}

function stop() {
  job?.abort();
  if (slowMotion?.timer) slowMotion.pause();
}

/** Makes a form start `work`, or stop what runs. */
function starts(form, work) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (job) stop();
    else work();
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !job) form.requestSubmit();
  });
  form.querySelector("button").addEventListener("click", (event) => {
    if (event.detail > 1) event.preventDefault();  // a double click must not start and stop
  });
}

starts($("chat-form"), chat);
starts($("race-form"), race);
$("clear").onclick = clearChat;
$("play").onclick = () => slowMotion.toggle();
$("step").onclick = () => slowMotion.step();
$("pace").onchange = () => slowMotion.explain();
$("settings-form").oninput = showValues;
$("settings-form").onsubmit = (event) => event.preventDefault();
$("example").append(...Object.keys(EXAMPLES).map((name) => make("option", { textContent: name })));
$("example").onchange = () => choose($("example").value);
$("prompt").oninput = () => { $("prompt").dataset.edited = "yes"; };
choose("Word problem");
$("editor").append(...Object.keys(EDITORS).map((name) => make("option", { textContent: name })));
$("editor").onchange = showEditor;
showEditor();
$("theme").onclick = () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
document.addEventListener("keydown", (event) => { if (event.key === "Escape") stop(); });
TABS.forEach((name, index) => {
  const beside = { ArrowRight: 1, ArrowLeft: -1 };
  $(`${name}-tab`).onclick = () => openTab(name);
  $(`${name}-tab`).onkeydown = ({ key }) => {
    if (key in beside) openTab(TABS[(index + beside[key] + TABS.length) % TABS.length], true);
  };
});
$("key-form").onsubmit = async (event) => {
  event.preventDefault();
  sessionStorage.setItem("api-key", $("key").value.trim());
  complain("");
  await loadInfo().then(() => { $("key-form").hidden = true; say("The server accepts this key."); }, report);
};
$("settings").open = innerWidth > 900;
openTab(TABS.find((name) => location.hash === `#view=${name}`) ?? "chat");
showValues();
loadInfo().catch(report);
