"""A conversation with the bundled model, in which each turn reads only the new part.

    python examples/chat.py

`blockdraft chat` does the same with colours, commands and a line to edit.
"""

import sys

import blockdraft
from blockdraft.engine import Conversation, chat_engine


def main() -> None:
    target = blockdraft.load_target()
    drafter = blockdraft.load_drafter(target=target)
    with chat_engine(target, drafter, blockdraft.Drafting(block_size="auto")) as engine:
        conversation = Conversation(engine)
        print("Write a message and press Enter; Ctrl-D ends.")
        for line in sys.stdin:
            turn = conversation.ask(line.strip(), blockdraft.SamplingParams(max_new_tokens=200))
            answer = conversation.keep(turn)  # waits for the answer
            print(answer.text)
            print(
                f"[{answer.prompt_tokens - answer.stats.remembered} tokens read, {answer.stats.remembered} remembered]"
            )


if __name__ == "__main__":
    main()
