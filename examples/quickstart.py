"""Answer a question, and see how many tokens were drafted.

python examples/quickstart.py
"""

import blockdraft

QUESTION = "Tom has 3 boxes of 12 pens. He gives away 5 pens. How many are left?"


def main() -> None:
    target = blockdraft.load_target()  # the default model; or a folder, hub name or GGUF file
    drafter = blockdraft.load_drafter(target=target)  # its bundled drafter
    engine = blockdraft.Engine(target, drafter)
    params = blockdraft.SamplingParams(max_new_tokens=128)

    [answer] = engine.generate([QUESTION], params)
    print(answer.text)
    print(f"{len(answer.token_ids)} tokens, {sum(answer.drafted)} of them drafted, tau {answer.tau:.2f}")

    # The same without a drafter gives the same tokens.
    plain = blockdraft.Engine(target, blockdraft.load_drafter("none", target=target))
    [expected] = plain.generate([QUESTION], params)
    assert answer.token_ids == expected.token_ids

    # A stream, sampled, a few tokens at a time.
    for chunk in engine.stream(QUESTION, blockdraft.SamplingParams(temperature=0.7, seed=1)):
        print(chunk.text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
