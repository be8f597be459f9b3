// Answers of llm-checker: questions as JSON on the standard input, one answer a line. The argument is the folder in
// which npm installed it. Its estimate of speed knows no kinds of weights, and its simulated devices no fit.
const fs = require("fs");
const path = require("path");

const source = path.resolve(process.argv[2], "node_modules", "llm-checker", "src");
const { buildCustomHardwareObject } = require(path.join(source, "hardware", "profiles"));
const { estimateTokenSpeedFromHardware } = require(path.join(source, "utils", "token-speed-estimator"));

for (const question of JSON.parse(fs.readFileSync(0, "utf8"))) {
  const name = question.apple ? `Apple ${question.device}` : question.device;
  const hardware = question.apple
    ? buildCustomHardwareObject({ cpu: name, gpu: name, ram: question.memory_gb })
    : buildCustomHardwareObject({ gpu: name, ram: 64, vram: question.memory_gb });
  const found = estimateTokenSpeedFromHardware(hardware, { modelSizeB: question.parameters / 1e9 });
  console.log(JSON.stringify({ speed: found.tokensPerSecond }));
}
