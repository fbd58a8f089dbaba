"""lm-eval, unmodified, on a running cluster: `python -m benchmarks.lm_eval URL --lm-eval PATH`.

PATH is the `lm_eval` command of an environment with `lm-eval[api]` and `transformers`; the cluster serves the default model,
best in float32. The task is multiple choice on a file of this repository, so lm-eval asks for `echo` with `logprobs`, in lists
of prompts, several requests at a time. Each loglikelihood that it got is compared with `transformers` on the same weights.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from benchmarks.lib.environment import ROOT, write_result
from configs.models import resolve

TASK = "tandem_capitals"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--lm-eval", default="lm_eval")
    given = parser.parse_args()
    gguf = resolve("smollm2").facts.weight_files[0]
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(f"{folder}/tokenizer")
        scores, samples = evaluate(given.lm_eval, given.url, Path(folder))
    errors = differences(reference(gguf), tokenizer, samples)
    result = {
        "task": TASK,
        "questions": len(samples),
        "accuracy": scores["acc,none"],
        "accuracy_by_length": scores["acc_norm,none"],
        "loglikelihoods": len(errors),
        "largest_difference": max(errors),
        "mean_difference": sum(errors) / len(errors),
    }
    write_result("lm_eval", result, table(result))


def evaluate(command: str, url: str, folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """lm-eval's scores of the task, and each question with what was answered."""
    model = f"model=smollm2,base_url={url}/v1/completions,tokenizer={folder}/tokenizer,tokenizer_backend=huggingface"
    options = {
        "--model": "local-completions",
        "--model_args": f"{model},num_concurrent=4,max_retries=1",
        "--batch_size": "8",
        "--tasks": TASK,
        "--include_path": "benchmarks/lm_eval_task",
        "--output_path": str(folder / "out"),
    }
    words = [word for option in options.items() for word in option]
    subprocess.run([command, "run", *words, "--log_samples"], cwd=ROOT, check=True, timeout=900)
    [scores] = (folder / "out").rglob("results_*.json")
    [samples] = (folder / "out").rglob(f"samples_{TASK}_*.jsonl")
    return json.loads(scores.read_text())["results"][TASK], [json.loads(line) for line in samples.read_text().splitlines()]


def reference(gguf: Path) -> Any:
    """The model in `transformers`, float32, read with its own code."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name), dtype=torch.float32)
    tensors = load_gguf_checkpoint(gguf, return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    return model.eval()


def differences(model: Any, tokenizer: Any, samples: list[dict[str, Any]]) -> list[float]:
    """Of each choice's loglikelihood from the reference's, in nats."""
    found = []
    for sample in samples:
        for number, answer in enumerate(sample["filtered_resps"]):
            context, continuation = (sample["arguments"][f"gen_args_{number}"][f"arg_{i}"] for i in range(2))
            num_context = len(tokenizer.encode(context))
            token_ids = torch.tensor([tokenizer.encode(context + continuation)])
            with torch.inference_mode():
                logprobs = torch.log_softmax(model(token_ids).logits[0, :-1], dim=-1)
            expected = logprobs.gather(1, token_ids[0, 1:, None])[num_context - 1 :].sum()
            found.append(abs(float(answer[0]) - float(expected)))
    return found


def table(result: dict[str, Any]) -> str:
    return "\n".join(
        [
            f"| lm-eval, local-completions, {result['task']} | |",
            "|---|---|",
            f"| questions, four choices each | {result['questions']} |",
            f"| accuracy; normalized by length | {result['accuracy']:.3f}; {result['accuracy_by_length']:.3f} |",
            f"| loglikelihoods compared with transformers | {result['loglikelihoods']} |",
            f"| largest difference; mean | {result['largest_difference']:.1e}; {result['mean_difference']:.1e} nats |",
        ]
    )


if __name__ == "__main__":
    main()
