// How editors and agents connect to this server: docs/editors.md, with this server's address and model.

const json = (value) => JSON.stringify(value, null, 2);

/** Zed's name for how a model fills in the middle, by the model's name. */
const promptFormat = (model) => (model.match(/star[-_]?coder|code[-_]?llama|deepseek[-_]?coder|codestral/i)?.[0] ?? "qwen")
  .toLowerCase().replace(/[-_]?(coder|llama)$/, "_$1");

/** The place and text of the settings of each program. `key` is "none" if the server needs none. */
const EDITORS = {
  "Any OpenAI client": ({ v1, model, key }) => ["Environment and model name", `OPENAI_BASE_URL=${v1} OPENAI_API_KEY=${key}\n# model: ${model}`],
  "VS Code: llama.vscode": ({ origin, needsKey, key }) => ["settings.json",
    `"llama-vscode.endpoint": "${origin}"` + (needsKey ? `,\n"llama-vscode.api_key": "${key}"` : "")],
  "VS Code, JetBrains: Continue": ({ origin, v1, model, key }) => ["~/.continue/config.yaml", `name: Local
version: 0.0.1
schema: v1
models:
  - name: Completion
    provider: ollama
    model: ${model}
    apiBase: ${origin}
    apiKey: ${key}
    roles: [autocomplete]
  - name: Chat
    provider: openai
    model: ${model}
    apiBase: ${v1}
    apiKey: ${key}
    roles: [chat, edit, apply]`],
  "Vim, Neovim: llama.vim": ({ origin, v1, needsKey, key }) => ["vimrc",
    `let g:llama_config = {'endpoint_fim': '${origin}/infill', 'endpoint_inst': '${v1}/chat/completions'`
    + (needsKey ? `, 'api_key': '${key}'}` : "}")],
  "Zed": ({ origin, model, needsKey, key }) => ["settings.json" + (needsKey ? `, and OLLAMA_API_KEY=${key}` : ""), json({
    edit_predictions: {
      provider: "ollama",
      ollama: { api_url: origin, model, prompt_format: promptFormat(model), max_output_tokens: 64 },
    },
    language_models: { ollama: { api_url: origin } },
  })],
  "aider": ({ v1, model, key }) => ["Command", `OPENAI_API_BASE=${v1} OPENAI_API_KEY=${key} aider --model openai/${model}`],
  "Claude Code": ({ origin, model, key }) => ["Command", `ANTHROPIC_BASE_URL=${origin} ANTHROPIC_AUTH_TOKEN=${key} ANTHROPIC_MODEL=${model} \\
    ANTHROPIC_DEFAULT_HAIKU_MODEL=${model} claude`],
  "Codex CLI": ({ v1, model, needsKey, key }) => ["~/.codex/config.toml" + (needsKey ? `, and BLOCKDRAFT_API_KEY=${key}` : ""), `model = "${model}"
model_provider = "local"

[model_providers.local]
name = "blockdraft"
base_url = "${v1}"
wire_api = "responses"${needsKey ? '\nenv_key = "BLOCKDRAFT_API_KEY"' : ""}`],
  "opencode": ({ v1, model, context, key }) => ["opencode.json", json({
    model: `local/${model}`,
    provider: { local: {
      npm: "@ai-sdk/openai-compatible", options: { baseURL: v1, apiKey: key },
      models: { [model]: { limit: { context, output: Math.min(4096, context / 2) } } },
    } },
  })],
  "llm": ({ v1, model, key }) => ["extra-openai-models.yaml, in the folder of `llm logs path`", `- model_id: local
  model_name: ${model}
  api_base: ${v1}
  supports_tools: true
  supports_schema: true

# llm -m local "Write a haiku." --key ${key}`],
  "Qwen Code": ({ v1, model, key }) => ["Command", `OPENAI_BASE_URL=${v1} OPENAI_API_KEY=${key} OPENAI_MODEL=${model} qwen`],
  "Programs for Ollama": ({ origin, model, needsKey, key }) => ["Environment and model name",
    `OLLAMA_HOST=${origin}${needsKey ? ` OLLAMA_API_KEY=${key}` : ""}\n# model: ${model}`],
};

/** Shows the settings of the chosen program. */
function showEditor() {
  const { origin } = location;
  $("base-url").textContent = `${origin}/v1`;
  $("model-name").textContent = info?.id ?? "";
  const needsKey = Boolean(sessionStorage.getItem("api-key"));
  const [place, text] = EDITORS[$("editor").value]({
    origin, v1: `${origin}/v1`, model: info?.id ?? "NAME", context: info?.blockdraft.max_context ?? 4096,
    needsKey, key: needsKey ? "YOUR_KEY" : "none",
  });
  $("editor-block").replaceChildren(codeBlock(place, [document.createTextNode(text)]));
}
