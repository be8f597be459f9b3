// Decodes token ids with llama.cpp, greedily: plainly, or with one of its speculators. The first argument is JSON:
// {"model": file, "threads": n, "max_length": n, "type": of keys and values, "flash_attention": false to do without, and, to speculate, "speculator": name,
// "draft": file or null, "draft_tokens": most in a block, or null for llama.cpp's default}. Requests and answers are JSON lines, as the README of this folder has them.
// Or it rounds a model's weights: {"quantize": file, "to": file, "weights": "Q8_0", "threads": n}.

#include "build-info.h"
#include "common.h"
#include "llama.h"
#include "log.h"
#include "speculative.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <map>
#include <string>
#include <unistd.h>
#include <vector>

using nlohmann::json;

namespace {

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Peer {
    common_params params;
    common_init_result_ptr target;
    common_speculative_init_result_ptr draft;
    llama_context * ctx = nullptr;
    llama_context * draft_ctx = nullptr;
    int n_vocab = 0;
    bool speculates = false;

    bool load(const json & settings);
    json decode(const json & request);

    llama_token best(int index) const {
        const float * logits = llama_get_logits_ith(ctx, index);
        return (llama_token) (std::max_element(logits, logits + n_vocab) - logits);
    }

    void forget_from(llama_pos position) const {
        llama_memory_seq_rm(llama_get_memory(ctx), 0, position, -1);
        if (draft_ctx) {
            llama_memory_seq_rm(llama_get_memory(draft_ctx), 0, position, -1);
        }
    }
};

bool Peer::load(const json & settings) {
    const ggml_type type = std::map<std::string, ggml_type>{
        {"f32", GGML_TYPE_F32}, {"f16", GGML_TYPE_F16}, {"bf16", GGML_TYPE_BF16}}.at(settings.at("type"));
    auto & drafting = params.speculative.draft;
    params.model.path = settings.at("model");
    params.n_ctx = settings.at("max_length");
    params.fit_params = false; // all settings are given
    if (!settings.value("flash_attention", true)) {
        params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    }
    params.cache_type_k = params.cache_type_v = drafting.cache_type_k = drafting.cache_type_v = type;
    for (auto * cpu : {&params.cpuparams, &params.cpuparams_batch, &drafting.cpuparams, &drafting.cpuparams_batch}) {
        cpu->n_threads = settings.at("threads");
    }
    if (settings.contains("speculator")) {
        speculates = true;
        params.speculative.types = {common_speculative_type_from_name(settings.at("speculator"))};
        if (!settings.at("draft").is_null()) {
            drafting.mparams.path = settings.at("draft");
        }
        if (!settings.at("draft_tokens").is_null()) {
            drafting.n_max = settings.at("draft_tokens");
        }
    }
    const int most = speculates ? common_speculative_n_max(&params.speculative) : 0;
    const auto limits = common_speculative_get_output_limits(params.n_batch, 1, most);
    params.n_outputs_max = limits.total;
    params.n_outputs_max_per_seq = limits.per_seq;
    target = common_init_from_params(params);
    ctx = target->context();
    if (!ctx || (speculates && common_context_can_seq_rm(ctx) == COMMON_CONTEXT_SEQ_RM_TYPE_FULL)) {
        return false; // states that cannot be rolled back by a few tokens take another loop
    }
    const auto & types = params.speculative.types;
    const bool in_target = speculates && std::count(types.begin(), types.end(), COMMON_SPECULATIVE_TYPE_DRAFT_MTP) > 0;
    if (params.speculative.has_dft() || in_target) {
        common_params own = common_base_params_to_speculative(params);
        draft = common_speculative_init_from_params(own, target->model(), ctx);
        draft_ctx = draft->context();
        if (!draft_ctx) {
            return false;
        }
    }
    params.speculative.draft.ctx_tgt = ctx;
    params.speculative.draft.ctx_dft = draft_ctx;
    n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(target->model()));
    return true;
}

json Peer::decode(const json & request) {
    const auto prompt = request.at("prompt").get<llama_tokens>();
    const auto stops = request.at("stops").get<llama_tokens>();
    const size_t max_new_tokens = request.at("max_new_tokens");
    const auto accept = request.value("accept", std::vector<int>()); // right draft tokens of each step, whatever they are
    const auto is_stop = [&](llama_token token) { return std::count(stops.begin(), stops.end(), token) > 0; };

    // A request knows nothing of those before it.
    llama_memory_clear(llama_get_memory(ctx), false);
    if (draft_ctx) {
        llama_memory_clear(llama_get_memory(draft_ctx), false);
    }
    common_speculative_ptr spec(speculates ? common_speculative_init(params.speculative, 1) : nullptr);
    if (speculates && !spec) {
        throw std::runtime_error("the speculator cannot be set up");
    }
    common_batch batch(ctx);
    const auto score = [&] {
        if (llama_process(ctx, LLAMA_PROCESS_TYPE_DECODE, batch.get()) != 0) {
            throw std::runtime_error("llama_process failed");
        }
        if (spec && !common_speculative_process(spec.get(), batch)) {
            throw std::runtime_error("the speculator failed");
        }
        llama_synchronize(ctx);
    };

    const double began = now();
    const size_t piece = llama_n_batch(ctx); // most tokens that can be scored at once
    for (size_t first = 0; first < prompt.size(); first += piece) {
        batch.clear();
        for (size_t i = first; i < std::min(first + piece, prompt.size()); i++) {
            batch.add(prompt[i], (llama_pos) i, 0, i + 1 == prompt.size());
        }
        score();
    }
    llama_tokens past = prompt; // what both contexts hold; `anchor` comes next
    llama_token anchor = best((int) ((prompt.size() - 1) % piece));
    if (spec) {
        common_speculative_begin(spec.get(), 0, past);
    }
    llama_tokens answer = {anchor};
    const double first = now();

    int steps = 0;
    llama_tokens draft_tokens;
    while (!is_stop(anchor) && answer.size() < max_new_tokens) {
        const auto n_past = (llama_pos) past.size();
        const int room = std::min((int) llama_n_ctx(ctx) - n_past - 2, (int) (max_new_tokens - answer.size()) - 1);
        draft_tokens.clear();
        if (spec && room > 0) {
            common_speculative_get_draft_params(spec.get(), 0) = {true, room, n_past, anchor, &past, &draft_tokens};
            common_speculative_draft(spec.get());
            draft_tokens.resize(std::min(draft_tokens.size(), (size_t) room));
            forget_from(n_past);
        }
        batch.clear();
        batch.add(anchor, n_past, 0, true);
        for (size_t i = 0; i < draft_tokens.size(); i++) {
            batch.add(draft_tokens[i], n_past + 1 + (llama_pos) i, 0, true);
        }
        score();
        const int known = accept.empty() ? -1 : accept[steps % accept.size()];
        int accepted = 0;
        while (true) {
            past.push_back(anchor);
            anchor = best(accepted);
            bool right = accepted < (int) draft_tokens.size() && draft_tokens[accepted] == anchor;
            if (known >= 0) {
                right = accepted < std::min((int) draft_tokens.size(), known);
                anchor = right ? draft_tokens[accepted] : anchor;
            }
            answer.push_back(anchor);
            if (is_stop(anchor) || !right) {
                break;
            }
            accepted++;
        }
        if (spec) {
            common_speculative_accept(spec.get(), 0, (uint16_t) accepted);
        }
        forget_from((llama_pos) past.size());
        steps++;
    }
    return {
        {"tokens", answer},
        {"first", 1},
        {"steps", steps},
        {"prefill_seconds", first - began},
        {"decode_seconds", now() - first},
    };
}

bool quantize(const json & settings) {
    auto params = llama_model_quantize_default_params();
    params.ftype = std::map<std::string, llama_ftype>{
        {"Q8_0", LLAMA_FTYPE_MOSTLY_Q8_0}, {"Q4_0", LLAMA_FTYPE_MOSTLY_Q4_0}, {"Q4_K", LLAMA_FTYPE_MOSTLY_Q4_K_M},
    }.at(settings.at("weights"));
    params.nthread = settings.at("threads");
    const std::string from = settings.at("quantize"), to = settings.at("to");
    return llama_model_quantize(from.c_str(), to.c_str(), &params) == 0;
}

} // namespace

int main(int argc, char ** argv) {
    // Whatever llama.cpp prints must not end up among the answers.
    FILE * lines = fdopen(dup(1), "w");
    dup2(2, 1);
    const auto say = [&](const json & message) {
        fprintf(lines, "%s\n", message.dump().c_str());
        fflush(lines);
    };
    Peer peer;
    common_init();
    common_log_set_verbosity_thold(LOG_LEVEL_WARN);
    if (argc == 2 && json::parse(argv[1]).contains("quantize")) {
        return quantize(json::parse(argv[1])) ? 0 : 1;
    }
    if (argc != 2 || !peer.load(json::parse(argv[1]))) {
        say({{"missing", "llama.cpp does not load the model or the speculator"}});
        return 0;
    }
    say({{"ready", {{"llama.cpp", llama_commit()}, {"system", llama_print_system_info()}}}});
    std::string line;
    while (std::getline(std::cin, line)) {
        try {
            say(peer.decode(json::parse(line).at("decode")));
        } catch (const std::exception & error) {
            say({{"error", error.what()}});
            return 1;
        }
    }
}
