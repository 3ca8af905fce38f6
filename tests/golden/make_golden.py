"""Make the golden data with Hugging Face transformers, an independent implementation.

Once, in an environment of its own (neither package is a dependency of the project or its tests):

    pip install torch transformers accelerate gguf ml-dtypes safetensors tokenizers
    python -m tests.golden.make_golden tiny
    python -m tests.golden.make_golden smollm2 path/to/SmolLM2-135M-Instruct.Q4_1.gguf
"""

# mypy: ignore-errors

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.golden import smollm2_prompts, tiny_models

FOLDER = Path(__file__).parent
NEW_TOKENS = 24
SMALLEST_MARGIN = 0.005
"""Between the best two logits: far above the rounding differences of two float32 implementations."""


def make_tiny() -> None:
    """Float32 logits at every position of each tiny model's prompt: tiny_models.npz."""
    arrays = {}
    for name in tiny_models.CASES:
        with tempfile.TemporaryDirectory() as folder:
            tiny_models.write_model(Path(folder), name)
            model, report = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
            )
        for problem, names in report.items():
            if names:
                raise SystemExit(f"{name}: transformers reports {problem}: {names}")
        with torch.inference_mode():
            logits = model(torch.tensor(tiny_models.prompt(name))[None].long()).logits[0]
        arrays[name] = logits.numpy()
        arrays[f"{name}.sha256"] = np.array(tiny_models.digest(name))
        print(f"{name:28} largest logit {logits.abs().max():.2f}, spread {logits.std():.2f}")
    np.savez_compressed(FOLDER / "tiny_models.npz", **arrays)


def make_smollm2(path: Path) -> None:
    """Greedy continuations of the quantised model, de-quantised to float32: smollm2.json."""
    where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    entries = []
    for name, text in smollm2_prompts.RAW.items():
        entries.append({"name": name, "text": text, "prompt_ids": tokenizer(text, add_special_tokens=False).input_ids})
    for name, messages in smollm2_prompts.CHAT.items():
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False).input_ids
        entries.append({"name": name, "messages": messages, "text": text, "prompt_ids": ids})
    for entry in entries:
        entry["output_ids"], entry["margins"] = greedy(model, entry["prompt_ids"])
        entry["output_text"] = tokenizer.decode(entry["output_ids"])
        margin = min(entry["margins"])
        print(f"{entry['name']:12} smallest margin {margin:.4f} {entry['output_text']!r}")
        if margin < SMALLEST_MARGIN:
            raise SystemExit(f"{entry['name']}: the best two logits differ by {margin}; choose another prompt.")
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    content = {"model": path.name, "made_with": versions, "prompts": entries}
    (FOLDER / "smollm2.json").write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n")


@torch.inference_mode()
def greedy(model: torch.nn.Module, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
    """The most likely tokens, past end-of-sequence, and by how much each logit beats the second."""
    ids, cache = torch.tensor([prompt_ids]), None
    output, margins = [], []
    for _ in range(NEW_TOKENS):
        step = model(ids, cache=cache, use_cache=True)
        cache = step.past_key_values
        best = step.logits[0, -1].topk(2)
        output.append(int(best.indices[0]))
        margins.append(round(float(best.values[0] - best.values[1]), 4))
        ids = best.indices[:1][None]
    return output, margins


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["tiny"]:
            make_tiny()
        case ["smollm2", gguf]:
            make_smollm2(Path(gguf))
        case _:
            sys.exit(__doc__)
