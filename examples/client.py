"""Call `blockdraft serve` from a program: a stream by httpx, then a request by OpenAI's client if it is installed.

    blockdraft serve --target smollm2     # in another terminal
    python examples/client.py [URL]

Needs a running server.
"""

import json
import sys
from importlib.util import find_spec

import httpx

QUESTION = "What is the capital of Norway?"


def stream_with_httpx(url: str, model: str) -> str:
    """Print the answer as it comes, and return it."""
    body = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "stream": True}
    text = ""
    with httpx.stream("POST", f"{url}/chat/completions", json=body, timeout=None) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    part = choice["delta"].get("content") or ""
                    print(part, end="", flush=True)
                    text += part
    print()
    return text


def ask_with_openai(url: str, model: str) -> None:
    """Print the answer, and how many draft tokens were accepted."""
    from openai import OpenAI  # pip install openai

    chat = OpenAI(base_url=url, api_key="none").chat.completions.create(
        model=model, messages=[{"role": "user", "content": QUESTION}], temperature=0
    )
    print(chat.choices[0].message.content)
    print(chat.usage.completion_tokens_details.accepted_prediction_tokens, "draft tokens were accepted")


def main(url: str = "http://127.0.0.1:8000/v1") -> None:
    try:
        model = httpx.get(f"{url}/models").raise_for_status().json()["data"][0]["id"]
    except httpx.HTTPError as error:
        sys.exit(f"No server answers at {url} ({error}). Start one: blockdraft serve --target smollm2")
    stream_with_httpx(url, model)
    if find_spec("openai"):
        ask_with_openai(url, model)


if __name__ == "__main__":
    main(*sys.argv[1:])
