// `step.py`, `memory.py` and `project.py` in JavaScript, with the same names. A test compares the results.
function makeRadar(data) {
  const N = data.numbers;

  const expected = (prob, size) => (prob === 1 ? size : (1 - prob ** size) / (1 - prob));

  function acceptanceProb(tau, size) {
    let low = 0, high = 1;
    for (let i = 0; i < 40; i++) {
      const middle = (low + high) / 2;
      if (expected(middle, size) < tau) low = middle; else high = middle;
    }
    return low;
  }

  const tauAt = (tau, size) => [tau.low, tau.mid, tau.high].map((value) =>
    size === tau.block_size ? value : expected(acceptanceProb(value, tau.block_size), size));

  const kvCacheBytes = (s, tokens) => 2 * (s.full_layers * s.full_numbers * tokens +
    s.window_layers * s.window_numbers * Math.min(tokens, s.window));

  function draftWeights(s, cost) {
    const attention = 2 * s.hidden * s.heads * s.head_size + Math.floor(s.hidden * s.hidden / 2);
    const width = s.experts ? 3 * s.hidden : Math.min(s.intermediate, 4 * s.hidden);
    return cost.layers * (attention + 3 * s.hidden * width) + cost.target_layers * s.hidden * s.hidden;
  }

  const headWeights = (s, cost) => s.hidden * Math.min(cost.head_vocabulary || s.vocabulary, s.vocabulary);

  function makeRoofline(s, m, constant, bits, weights, context, batch) {
    const step = {};
    step.experts = (size) => s.experts * (1 - (1 - s.experts_per_token / s.experts) ** (size * batch));
    step.weightsRead = (size) => {
      const embedding = s.tied ? 0 : s.vocabulary * s.hidden;
      if (!s.experts || s.experts === s.experts_per_token) return s.active - embedding;
      const expert = (s.parameters - s.active) / (s.experts - s.experts_per_token);
      return s.parameters - embedding - (s.experts - step.experts(size)) * expert;
    };
    step.readBytes = (size) => step.weightsRead(size) * bits / 8 +
      batch * (kvCacheBytes(s, context) + s.recurrent_layers * s.state_numbers * 4 * (1 + size));
    step.flops = (size, rows = batch) => {
      const tokens = size * rows;
      const used = s.tied ? s.active : s.active - s.vocabulary * s.hidden;
      const attended = s.full_layers * context + s.window_layers * Math.min(context, s.window);
      return 2 * tokens * used + 4 * tokens * attended * s.heads * s.head_size;
    };
    const reading = (read, resident) => {
      if (m.cache_gbs && resident < 1e6 * m.cache_mb) return read / (1e9 * m.cache_gbs);
      return read / (1e9 * m.bandwidth_gbs * (m.measured ? 1 : constant.bandwidth));
    };
    step.memorySeconds = (size) => reading(step.readBytes(size), s.parameters * bits / 8);
    const rate = (draftBits, prompt) => {
      const packed = (draftBits || bits) < 16;
      const wide = m.kind === "cpu" ? (m.measured ? ["bf16", "fp32"] : ["fp32", "bf16"]) : data.arithmetic[draftBits ? "" : weights] || ["bf16", "fp32"];
      const kinds = packed && m.kind === "cpu" ? data.on_cpus : wide;
      const kind = [...kinds, "fp32", "bf16"].find((name) => m[name] !== null);
      if (m.measured) return 1e12 * m[kind] * N.OF_KERNELS * (prompt ? 2 : 1);
      return 1e12 * m[kind] * (prompt ? constant.prompt : constant.arithmetic) * (packed && kind !== "fp8" && kind !== "fp4" ? N.UNPACKING : 1);
    };
    step.arithmeticSeconds = (size) => step.flops(size) / rate();
    const overlapped = (reading, computing) => Math.max(reading, computing) + (1 - constant.overlap) * Math.min(reading, computing);
    const overhead = (layers) => layers * (constant.layer_us + (m.count > 1 ? N.LINK_US : 0)) / 1e6;
    step.forward = (size) => overlapped(step.memorySeconds(size), step.arithmeticSeconds(size)) +
      overhead(s.layers) + constant.step_ms / 1e3 + batch * constant.text_us / 1e6 + (s.experts ? s.layers * constant.expert_us / 1e6 : 0) +
      s.recurrent_layers * (size - 1) * constant.recurrent_us / 1e6;
    step.draft = (cost, size) => {
      const [passes, tokens] = cost.serial ? [size - 1, batch] : [1, size * batch];
      const layers = cost.layers, network = draftWeights(s, cost), head = headWeights(s, cost);
      const width = bits < 16 && m.kind === "cpu" ? bits / 8 : 2;
      const headBytes = head * (cost.head_vocabulary === null ? bits / 8 : width);
      const window = Math.floor(batch * context * layers * 2 * s.hidden / 4) * 2;
      const read = reading(width * network + headBytes + window, width * network);
      return passes * (overlapped(read, 2 * tokens * (network / rate(8 * width) + head / rate())) + overhead(layers));
    };
    step.prompt = () => {
      const alone = makeRoofline(s, m, constant, bits, weights, context, 1);
      return overlapped(alone.memorySeconds(Math.min(context, 256)), alone.flops(context) / rate(null, true)) +
        (overhead(s.layers) + constant.step_ms / 1e3) * Math.ceil(context / N.PREFILL_TOKENS);
    };
    return step;
  }

  function memoryOf(s, bits, context, batch, size, cost) {
    const prefill = Math.min(N.PREFILL_TOKENS, context), slots = batch * (context + size);
    const states = 4 * s.recurrent_layers * s.state_numbers, layers = cost === null ? 0 : cost.layers;
    const count = Math.ceil(slots / context);
    const caches = count * kvCacheBytes(s, Math.ceil(slots / count)) + batch * states +
      slots * layers * 2 * Math.floor(s.hidden / 4) * 2;
    const widths = 4 * s.hidden + 3 * s.intermediate + 3 * s.heads * s.head_size;
    const forwardBytes = (sequences, nodes) => 2 * sequences * nodes * widths + states * sequences * Math.min(nodes, 64);
    const longest = Math.min(slots, context + size);
    const forward = Math.max(forwardBytes(batch, size), forwardBytes(1, Math.min(prefill, longest)));
    const logits = Math.max(batch * size, N.MAX_OWN_NODES) * s.vocabulary * (2 + 2 * 4);
    const tokens = Math.max(prefill, batch * size);
    const hiddenStates = 2 * tokens * (cost === null ? 0 : cost.target_layers) * s.hidden * 2;
    const workspace = forward + logits + hiddenStates + (cost === null ? 0 : 2 * tokens * 4 * s.hidden);
    let drafter = cost === null ? 0 : 2 * draftWeights(s, cost);
    if (cost !== null && cost.head_vocabulary !== null) drafter += 2 * headWeights(s, cost);
    return { weights: Math.floor(s.parameters * bits / 8), drafter, caches, workspace };
  }

  function choose(step, drafter, task, batch, constant) {
    const tau = drafter.tau[task], maxSize = Math.max(tau.block_size, drafter.block_size || 0);
    let best = null;
    for (const size of data.sizes.filter((size) => size <= maxSize)) {
      const taus = tauAt(tau, size);
      const seconds = step.forward(size) + step.draft(drafter.cost, size) + constant.draft_ms / 1e3;
      const speed = batch * taus[1] / seconds;
      if (best === null || speed > best.speed) best = { drafter, tau, taus, size, seconds, speed };
    }
    return best;
  }

  function project(s, m, weights, context, batch, task) {
    const constant = data.constants[m.kind], bits = data.bits[weights];
    const step = makeRoofline(s, m, constant, bits, weights, context, batch), plain = step.forward(1);
    let best = null;
    for (const drafter of s.drafters) {
      const choice = choose(step, drafter, task, batch, constant);
      if (best === null || choice.speed > best.speed) best = choice;
    }
    const drafting = best.size <= context;
    const memory = memoryOf(s, bits, context, batch, drafting ? best.size : 1, drafting ? best.drafter.cost : null);
    const total = memory.weights + memory.drafter + memory.caches + memory.workspace;
    const device = m.name.split("x ").pop();
    const confidence = m.measured ? "measured" : constant.devices.includes(device) ? "device" :
      constant.reported ? "class" : "extrapolated";
    const [low, high] = data.bands[confidence], speed = batch / plain;
    let drafted = null;
    if (drafting) {
      const [lowTau, midTau, highTau] = best.taus;
      const down = Math.hypot(1 - low, 1 - lowTau / midTau), up = Math.hypot(high - 1, highTau / midTau - 1);
      drafted = { low: best.speed * Math.max(1 - down, 0.1), mid: best.speed, high: best.speed * (1 + up) };
    }
    const gain = drafting ? best.speed / speed : 1;
    return {
      device: m.name, model: s.name, weights, context, batch, task,
      fits: total <= N.SHARE * m.memory_gb * 1e9, memory_bytes: total, first_token_seconds: step.prompt(),
      plain: { low: speed * low, mid: speed, high: speed * high }, drafted,
      block_size: drafting ? best.size : 1, confidence,
      why: {
        memory, step_seconds: plain, drafted_step_seconds: best.seconds, read_bytes: step.readBytes(1), flops: step.flops(1),
        bound: step.memorySeconds(1) >= step.arithmeticSeconds(1) ? "memory" : "arithmetic",
        block_bound: step.memorySeconds(best.size) >= step.arithmeticSeconds(best.size) ? "memory" : "arithmetic",
        experts_read: s.experts ? [step.experts(1), step.experts(best.size)] : null,
        drafter: best.drafter.hub, tau: best.taus, tau_source: best.tau.where || best.tau.source, speedup: gain,
        least_tau: drafting ? best.seconds / plain : null,
        drafting: gain < N.LOSES ? "loses" : gain > N.WINS ? "wins" : "neither",
      },
    };
  }

  // `shape_of_config` of shape.py.
  function shapeOf(config, name) {
    if (typeof config !== "object" || config === null || Array.isArray(config)) {
      throw new Error(`${name} is not a JSON object; give the config.json of a language model.`);
    }
    const inner = config.text_config, text = inner && typeof inner === "object" ? { ...config, ...inner } : config;
    const number = (keys, fallback = null) => {
      for (const key of keys) {
        const value = text[key];
        if (value === undefined || value === null) continue;
        if (!Number.isInteger(value) || value < 0 || (value === 0 && fallback === null)) {
          throw new Error(`${name}: ${key} must be a positive integer, got ${JSON.stringify(value)}.`);
        }
        return value;
      }
      if (fallback === null) throw new Error(`${name} lacks ${keys[0]}; give the config.json of a language model.`);
      return fallback;
    };
    const hidden = number(["hidden_size", "n_embd", "d_model"]), layers = number(["num_hidden_layers", "n_layer"]);
    const heads = number(["num_attention_heads", "n_head"]), vocabulary = number(["vocab_size"]);
    const kvHeads = number(["num_key_value_heads"], heads) || heads;
    const headSize = number(["head_dim"], 0) || Math.max(Math.floor(hidden / heads), 1);
    const intermediate = number(["intermediate_size", "n_inner"], 0) || 4 * hidden;
    const experts = number(data.keys_of_moe, 0);
    const perToken = experts ? number(["num_experts_per_tok", "num_experts_per_token"], 1) : 0;
    if (perToken > Math.max(experts, 1)) {
      throw new Error(`${name}: num_experts_per_tok is ${perToken}, but there are ${experts} experts.`);
    }
    const width = number(["moe_intermediate_size"], 0) || intermediate;
    const dense = experts ? Math.min(number(["first_k_dense_replace", "num_dense_layers"], 0), layers) : layers;
    const shared = number(["n_shared_experts"], 0) * width + number(["shared_expert_intermediate_size"], 0);
    const latent = number(["kv_lora_rank"], 0), rotated = latent ? number(["qk_rope_head_dim"], 64) : 0;
    const kinds = Array.isArray(text.layer_types) ? text.layer_types.map(String) : [];
    const recurrent = kinds.filter((kind) => data.recurrent.includes(kind)).length;
    const window = (text.use_sliding_window === undefined ? true : text.use_sliding_window)
      ? number(["sliding_window"], 0) : 0;
    let windowed = kinds.length ? kinds.filter((kind) => kind.includes("sliding")).length : window ? layers : 0;
    const pattern = text.sliding_window_pattern;
    if (!kinds.length && window && Number.isInteger(pattern) && pattern > 1) {
      windowed = layers - Math.floor(layers / pattern);
    }
    if (!window) windowed = 0;
    let attention = 2 * hidden * headSize * (heads + kvHeads);
    if (latent) {
      const nope = number(["qk_nope_head_dim"], 128), values = number(["v_head_dim"], 128);
      const lora = number(["q_lora_rank"], 0), queries = heads * (nope + rotated);
      attention = (lora ? (hidden + queries) * lora : hidden * queries) + hidden * (latent + rotated) +
        latent * heads * (nope + values) + heads * values * hidden;
    }
    const stateWidth = number(["linear_num_value_heads"], 0) * number(["linear_value_head_dim"], 128) ||
      Math.floor(1.25 * hidden);
    const keys = number(["linear_num_key_heads"], 0) * number(["linear_key_head_dim"], 128);
    let mixing = hidden * (2 * (keys || stateWidth) + 3 * stateWidth), stateNumbers = stateWidth * 128;
    if (kinds.includes("conv")) {
      mixing = 4 * hidden * hidden;
      stateNumbers = number(["conv_L_cache"], 3) * hidden;
    }
    const tied = text.tie_word_embeddings === undefined ? true : Boolean(text.tie_word_embeddings);
    let outside = vocabulary * hidden * (tied ? 1 : 2) + (layers - recurrent) * attention + recurrent * mixing +
      dense * 3 * hidden * intermediate;
    const routed = 3 * hidden * width * (layers - dense);
    outside += (layers - dense) * hidden * (experts + 3 * shared);
    const numbers = latent ? latent + rotated : 2 * kvHeads * headSize;
    return {
      name, parameters: outside + experts * routed, active: outside + perToken * routed, hidden, intermediate, layers,
      heads, head_size: headSize, vocabulary, context: number(["max_position_embeddings", "n_positions"], 0), tied,
      experts, experts_per_token: perToken, full_layers: layers - recurrent - windowed, full_numbers: numbers,
      window_layers: windowed, window_numbers: numbers, window: windowed ? window : 0, recurrent_layers: recurrent,
      state_numbers: recurrent ? stateNumbers : 0, stored_bytes: 0, licence: null, drafters: [data.unknown],
    };
  }

  return { project, shapeOf };
}
