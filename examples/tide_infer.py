"""Answer a long prompt with tidekv.

python examples/tide_infer.py traces/demo-prompt.txt --schedule layer_major --selector snapkv
"""

import argparse
from pathlib import Path

import tidekv
from memtrace import scopes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt_file", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--schedule", default="layer_major", help="or whole_prompt")
    parser.add_argument("--selector", default="snapkv", help="or none")
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--max-new-tokens", type=int, default=24)
    args = parser.parse_args()

    model, tokenizer = tidekv.load_model(args.model)
    input_ids = tidekv.encode(tokenizer, args.prompt_file.read_text(encoding="utf-8"))
    prompt_tokens = input_ids.shape[1]
    selector = None if args.selector == "none" else args.selector
    with scopes.request("demo", prompt_tokens=prompt_tokens) as request:
        prefilled = tidekv.prefill(
            model, input_ids, schedule=args.schedule, selector=selector, budget=args.budget
        )
        request.first_token()
        output = tidekv.decode(
            model, input_ids, prefilled, max_new_tokens=args.max_new_tokens, do_sample=False
        )
        request.generated_tokens = output.shape[1] - prompt_tokens
    print(tokenizer.decode(output[0, prompt_tokens:], skip_special_tokens=True))


if __name__ == "__main__":
    main()
