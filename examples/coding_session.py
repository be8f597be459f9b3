"""Edit code in a conversation with Qwen2.5-Coder, drafted by lookup, since an edit repeats most of the code.

    blockdraft pull qwen2.5-coder-1.5b
    python examples/coding_session.py [TARGET]

Needs that model (1 GB), or another one as TARGET.
"""

import sys

import blockdraft
from blockdraft.engine import Conversation, chat_engine

CODE = '''def mean(values):
    """Return the mean of the values."""
    total = 0
    for value in values:
        total += value
    return total / len(values)
'''
EDITS = (
    f"Rename `values` to `numbers` in this function, and return the whole function:\n```python\n{CODE}```",
    "Now add type hints, and return the whole function again.",
)


def main(path: str = "qwen2.5-coder-1.5b", max_new_tokens: int = 300) -> None:
    try:
        target = blockdraft.load_target(path)
    except ValueError as error:
        sys.exit(f"{error}\nThis example needs the model: blockdraft pull qwen2.5-coder-1.5b")
    drafter = blockdraft.load_drafter("lookup", target=target)
    with chat_engine(target, drafter, blockdraft.Drafting(block_size="auto")) as engine:
        conversation = Conversation(engine)
        for edit in EDITS:
            turn = conversation.ask(edit, blockdraft.SamplingParams(max_new_tokens=max_new_tokens))
            answer = conversation.keep(turn)  # waits for the answer
            drafted = sum(answer.drafted)
            print(f"> {edit}\n{answer.text}\n[{len(answer.token_ids)} tokens, {drafted} of them drafted]\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
