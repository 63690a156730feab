"""The whole engine in this process, for a batch of prompts."""

from __future__ import annotations

from trencadis.engine import LLM, SamplingParams, default_model


def main() -> None:
    llm = LLM(default_model(), max_model_len=512)  # or a directory, a .gguf file, a hub id
    prompts = ["The capital of France is", "Two and two are"]
    greedy = SamplingParams(temperature=0, max_tokens=8)
    for prompt, answer in zip(prompts, llm.generate(prompts, greedy), strict=True):
        print(prompt + answer.completions[0].text)


if __name__ == "__main__":
    main()
