"""Speaks the protocol without a model. The answer to a prompt is a row of numbers from the prompt's first one on.

Options: `starts`, a file that gets a line at each start; `interrupt`, a request at which its parent gets Ctrl-C;
`many`, to answer several prompts at once; `missing` or `crash` (a text) instead of loading; `differ`, `die`,
`fail`, `hang` and `loop`: a prompt's first number to which the answer has another third token, the process ends, it
reports an error, never answers, or answers in circles.
"""

import json
import os
import signal
import sys
import time

settings = json.loads(sys.argv[1])
options = settings["options"]
if "starts" in options:
    with open(options["starts"], "a") as starts:
        starts.write(sys.argv[0] + "\n")
if "crash" in options:
    sys.exit(options["crash"])
if "missing" in options:
    print(json.dumps({"missing": options["missing"]}))
    sys.exit()
answers = ["decode", "decode_many"] if options.get("many") else ["decode"]
print(json.dumps({"ready": {"fake": "1.0"}, "answers": answers}), flush=True)
for line in sys.stdin:
    [(name, request)] = json.loads(line).items()
    with open(settings.get("log", "/dev/null"), "a") as log:
        log.write(line)
    if options.get("interrupt") == name:
        os.kill(os.getppid(), signal.SIGINT)
    if name == "margin":
        answer = {"margin": 0.25}
    elif name == "decode_many":
        answer = {"tokens": 5 * len(request["prompts"]), "seconds": 0.5}
    else:
        number = request["prompt"][0]
        if options.get("hang") == number:
            time.sleep(3600)
        if options.get("die") == number:
            sys.exit("out of memory")
        tokens = [number + i for i in range(min(5, request["max_new_tokens"]))]
        if options.get("loop") == number:
            tokens = list(range(8)) * 6
        if options.get("differ") == number:
            tokens[2] = 0
        answer = {"tokens": tokens, "first": 1, "steps": 2, "prefill_seconds": 0.5, "decode_seconds": 0.1}
        if options.get("fail") == number:
            answer = {"error": "ValueError: no"}
    print(json.dumps(answer), flush=True)
