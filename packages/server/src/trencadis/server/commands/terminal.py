"""``engine-serve complete`` and ``engine-serve chat``: ask a running server in the terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import openai

from trencadis.engine.settings import CommandParser
from trencadis.server.commands.connection import (
    add_connection_flags,
    client_options,
    first_of,
    reason_of,
)

EXIT = "/exit"
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


def complete(argv: Sequence[str]) -> int:
    """Print the continuation of a text while it is generated; returns the exit code."""
    parser = _parser("complete", "Print the continuation of a text.")
    parser.add_argument(
        "prompt", metavar="TEXT", help="the text to continue; - reads it from stdin"
    )
    args = parser.parse_args(argv)
    return _run(args, _complete)


def chat(argv: Sequence[str]) -> int:
    """Converse until ``/exit`` or the end of the input; returns the exit code."""
    parser = _parser("chat", f"Converse with a model, until {EXIT} or Ctrl-D.")
    parser.add_argument("--system", metavar="TEXT", help="instructions for the model")
    args = parser.parse_args(argv)
    return _run(args, _chat)


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = CommandParser(prog=f"engine-serve {name}", description=description)
    add_connection_flags(parser)
    parser.add_argument("--max-tokens", metavar="N", type=int, help="most tokens of an answer")
    parser.add_argument("--temperature", metavar="T", type=float, help="0 is greedy")
    return parser


def _run(
    args: argparse.Namespace, work: Callable[[openai.OpenAI, str, argparse.Namespace], None]
) -> int:
    try:
        with openai.OpenAI(**client_options(args)) as client:
            model = args.model or first_of([each.id for each in client.models.list()], args.url)
            work(client, model, args)
    except (openai.OpenAIError, ValueError) as error:
        print(f"engine-serve: error: {reason_of(error, args.url)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print()
        return 130
    return 0


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    given = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    return {name: value for name, value in given.items() if value is not None}


def _complete(client: openai.OpenAI, model: str, args: argparse.Namespace) -> None:
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    stream = client.completions.create(model=model, prompt=prompt, stream=True, **_sampling(args))
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.text, end="", flush=True)
    print()


def _chat(client: openai.OpenAI, model: str, args: argparse.Namespace) -> None:
    messages: list[Any] = []
    if args.system is not None:
        messages.append({"role": "system", "content": args.system})
    print(f"{model} at {args.url} ({EXIT} ends, Ctrl-C ends an answer)")
    for question in _questions():
        asked = [*messages, {"role": "user", "content": question}]
        try:
            answer = _answer(client, model, asked, args)
        except openai.APIError as error:  # the conversation goes on without this question
            print(f"error: {reason_of(error, args.url)}", file=sys.stderr)
            continue
        messages = [*asked, {"role": "assistant", "content": answer}]


def _questions() -> Iterator[str]:
    """What is typed, line by line, without blank lines."""
    while True:
        try:
            question = input("> ").strip()
        except EOFError:
            print()
            return
        if question == EXIT:
            return
        if question:
            yield question


def _answer(
    client: openai.OpenAI, model: str, messages: list[Any], args: argparse.Namespace
) -> str:
    """Print an answer while it is generated, its reasoning dimmed; returns what there is of it."""
    parts: list[str] = []
    is_dim = False
    try:
        stream = client.chat.completions.create(
            model=model, messages=messages, stream=True, **_sampling(args)
        )
        with stream:
            for chunk in stream:
                for choice in chunk.choices:
                    reasoning = getattr(choice.delta, "reasoning", None)
                    is_dim = _print(reasoning or "", is_dim, dim=True)
                    is_dim = _print(choice.delta.content or "", is_dim, dim=False)
                    parts.append(choice.delta.content or "")
    except KeyboardInterrupt:
        pass
    print(_PLAIN if is_dim else "")
    return "".join(parts)


def _print(text: str, is_dim: bool, *, dim: bool) -> bool:
    """Print a part of an answer; returns whether the terminal prints dimmed after it."""
    if not text:
        return is_dim
    if dim != is_dim and sys.stdout.isatty():
        print(_DIM if dim else f"{_PLAIN}\n", end="")
    print(text, end="", flush=True)
    return dim
