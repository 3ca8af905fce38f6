"""Make golden.json: token ids from implementations that the project does not use.

Once, in an environment of its own (none of the packages is a dependency of the project or its tests):

    pip install llama-cpp-python sentencepiece transformers gguf
    python -m tests.text.make_golden path/to/SmolLM2-135M-Instruct.Q4_1.gguf

It holds the ids of the samples: for the real model by llama.cpp; and for two small vocabularies, trained here
on the samples and kept as GGUF metadata, by llama.cpp, and by transformers or sentencepiece.
"""

# mypy: ignore-errors

import io
import json
import sys
import tempfile
from pathlib import Path

import gguf
import llama_cpp
import sentencepiece
import tokenizers
import transformers

from tests.text.samples import DECOMPOSED, SAMPLES, SPECIAL

TEXTS = list(SAMPLES.values())
# To train on: the samples, and enough repetition that whole words become tokens.
CORPUS = [*TEXTS, *(word for text in TEXTS for word in text.split(" ") for _ in range(3))]


def llama_cpp_ids(path: str) -> dict[str, list[int]]:
    model = llama_cpp.Llama(path, vocab_only=True, verbose=False)
    texts = SAMPLES | {"special": SPECIAL}
    return {name: model.tokenize(text.encode(), add_bos=False, special=True) for name, text in texts.items()}


def llama_cpp_ids_of(metadata: dict[str, object]) -> dict[str, list[int]]:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "vocabulary.gguf")
        writer = gguf.GGUFWriter(path, "llama")
        for key, value in metadata.items():
            match value:
                case bool():
                    writer.add_bool(key, value)
                case int():
                    writer.add_uint32(key, value)
                case str():
                    writer.add_string(key, value)
                case list():
                    writer.add_array(key, value)
        for add in (writer.add_context_length, writer.add_embedding_length, writer.add_block_count):
            add(32)
        writer.add_feed_forward_length(32)
        writer.add_head_count(1)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return llama_cpp_ids(path)


def byte_level() -> dict[str, object]:
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    special = ["<|begin|>", "<|end|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=900, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    trained.train_from_iterator([*CORPUS, *(str(n) for n in range(100, 2100, 7))], trainer)
    vocabulary = trained.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = json.loads(trained.to_str())["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


def transformers_ids(metadata: dict[str, object]) -> dict[str, dict[str, list[int]]]:
    vocabulary = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    kinds = {"gpt-2": transformers.GPT2Tokenizer, "qwen2": transformers.Qwen2Tokenizer}
    texts = SAMPLES | {"decomposed": DECOMPOSED}
    ids = {}
    for name, kind in kinds.items():
        tokenizer = kind(vocab=vocabulary, merges=merges)
        ids[name] = {key: tokenizer.encode(text, add_special_tokens=False) for key, text in texts.items()}
    return ids


def sentencepiece_style() -> tuple[dict[str, object], dict[str, list[int]]]:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in CORPUS for line in text.splitlines() if line),
        model_writer=model,
        model_type="bpe",
        vocab_size=900,
        character_coverage=0.98,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(processor.vocab_size())
    types = [
        2 if processor.is_unknown(i) else 3 if processor.is_control(i) else 6 if processor.is_byte(i) else 1
        for i in ids
    ]
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [processor.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [processor.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": processor.bos_id(),
        "tokenizer.ggml.eos_token_id": processor.eos_id(),
        "tokenizer.ggml.unknown_token_id": processor.unk_id(),
    }
    return metadata, {name: processor.encode(text) for name, text in SAMPLES.items()}


def main() -> None:
    bytes_metadata = byte_level()
    pieces_metadata, sentencepiece_ids = sentencepiece_style()
    golden = {
        "smollm2": {"llama.cpp": llama_cpp_ids(sys.argv[1])},
        "byte_level": {
            "metadata": bytes_metadata,
            "llama.cpp": {
                name: llama_cpp_ids_of(bytes_metadata | {"tokenizer.ggml.pre": name})
                for name in ("gpt-2", "smollm", "llama-bpe", "qwen2")
            },
            "transformers": transformers_ids(bytes_metadata),
        },
        "sentencepiece": {
            "metadata": pieces_metadata,
            "llama.cpp": llama_cpp_ids_of(pieces_metadata),
            "sentencepiece": sentencepiece_ids,
        },
    }
    target = Path(__file__).with_name("golden.json")
    target.write_text(json.dumps(golden, ensure_ascii=True, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
