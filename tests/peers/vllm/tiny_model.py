"""Makes a tiny Llama for a real vLLM: `tiny_model.py FOLDER`. Always the same weights.

Most of it is random, so that the next token depends on all before it, and on nothing else: any fault
at a seam changes the rest of the answer. Beside that it knows two answers by heart. Each token of them
has a dimension of its own, from which its successor follows whatever came before: reasoning and then
an answer (begun by `<think>`), and words and then a call of a tool (begun by `<speak>`). A request
gets there by a `logit_bias` of 100 for the first token.
"""

import json
import sys
from pathlib import Path

import numpy
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

LEARNED = 448
RANDOM = 256
STEPS = 200
LAYERS = 2
HEADS = 4

SENTENCES = """
The kernel knows first that a process has died, and the router hears of it before the engine can speak.
A worker is taken out of the list when its parent is gone, its port is closed or its health is bad.
Every stream goes on where another worker takes over from the last word that the client has seen.
Nothing is repeated and nothing is lost, neither a letter nor a number: 0 1 2 3 4 5 6 7 8 9 10 100 1000.
""".strip().splitlines()

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

thoughts = ["<think>", *(f" thought {n}," for n in range(STEPS)), "</think>"]
answer = ["\n\nSo", " it", " is", " done", "."]
words = ["<speak>", *(f" word {n}," for n in range(STEPS))]
call = ["<tool_call>", '\n{"name": "look_up", "arguments": {"place": "', "Paris", " and", " Rome", '"}}\n', "</tool_call>"]
END = "<|im_end|>"
scripts = [thoughts + answer + [END], words + call + [END]]


def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<s>", "<|im_start|>", END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(SENTENCES * 2, trainer)
    # They are text, not markers: they are seen in the answer.
    known = [token for script in scripts for token in script if token != END]
    made.add_tokens([AddedToken(token, normalized=False) for token in dict.fromkeys(known)])
    return made


def weights(made: Tokenizer) -> dict[str, numpy.ndarray]:
    random = numpy.random.default_rng(7)
    vocabulary, hidden = made.get_vocab_size(), RANDOM + LEARNED

    def normal(rows: int, columns: int, deviation: float) -> numpy.ndarray:
        return random.normal(0, deviation, (rows, columns)).astype(numpy.float32)

    def into(columns: int, deviation: float) -> numpy.ndarray:
        matrix = normal(hidden, columns, deviation)
        matrix[RANDOM:] = 0
        return matrix

    embedding, head = normal(vocabulary, hidden, 1.0), normal(vocabulary, hidden, 0.25)
    embedding[:, RANDOM:] = 0
    head[:, RANDOM:] = 0
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    for token, number in made.get_vocab().items():
        # Lone bytes of longer characters come, but not all the time.
        if token in alphabet and not token.isascii():
            head[number] *= 0.6
    # What is known by heart never comes by chance.
    for token in {token for script in scripts for token in script if token != END}:
        head[made.token_to_id(token)] = 0
    dimension = RANDOM
    for script in scripts:
        numbers = [made.token_to_id(token) for token in script]
        for this, following in zip(numbers, numbers[1:]):
            embedding[this] = 0
            embedding[this, dimension] = 100
            head[following, dimension] = 40
            dimension += 1
    assert dimension <= hidden
    tensors = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head,
        "model.norm.weight": numpy.ones(hidden, numpy.float32),
    }
    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        for part in "qkv":
            tensors[f"{name}self_attn.{part}_proj.weight"] = normal(RANDOM, hidden, 0.1)
        tensors[name + "self_attn.o_proj.weight"] = into(RANDOM, 0.1)
        for part in ("gate", "up"):
            tensors[f"{name}mlp.{part}_proj.weight"] = normal(512, hidden, 0.06)
        tensors[name + "mlp.down_proj.weight"] = into(512, 0.06)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}{norm}.weight"] = numpy.ones(hidden, numpy.float32)
    return tensors


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    made = tokenizer()
    made.save(str(folder / "tokenizer.json"))
    end = made.token_to_id(END)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": made.get_vocab_size(),
        "hidden_size": RANDOM + LEARNED,
        "intermediate_size": 512,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": RANDOM // HEADS,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": made.token_to_id("<s>"),
        "eos_token_id": end,
    }
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": END,
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    starts = {script[0]: made.token_to_id(script[0]) for script in scripts}
    for name, content in [("config", config), ("tokenizer_config", described), ("starts", starts)]:
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1))
    save_file(weights(made), folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
