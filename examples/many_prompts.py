"""Answer many prompts: as one batch, and as requests that arrive in an event loop, as in a server.

python examples/many_prompts.py
"""

import asyncio

import blockdraft

PROMPTS = [f"Ann has {n} apples and buys {n + 3} more. How many apples does she have now?" for n in range(2, 14)]
PARAMS = blockdraft.SamplingParams(max_new_tokens=96)


async def answer(engine: blockdraft.Engine, number: int, prompt: str) -> str:
    """Send one user's request; the engine decodes concurrent requests together."""
    await asyncio.sleep(0.01 * number)  # users do not arrive all at once
    parts = [chunk.text async for chunk in engine.astream(prompt, PARAMS)]
    return "".join(parts)


async def serve(engine: blockdraft.Engine) -> list[str]:
    return await asyncio.gather(*(answer(engine, number, prompt) for number, prompt in enumerate(PROMPTS)))


def main() -> None:
    target = blockdraft.load_target()
    drafter = blockdraft.load_drafter(target=target)
    with blockdraft.Engine(target, drafter, max_batch_size=8) as engine:
        batch = [completion.text for completion in engine.generate(PROMPTS, PARAMS)]
        served = asyncio.run(serve(engine))
    for prompt, text in zip(PROMPTS, batch, strict=True):
        print(f"{prompt}\n  {text.splitlines()[-1] if text else ''}")
    print("same answers both ways:", batch == served)


if __name__ == "__main__":
    main()
