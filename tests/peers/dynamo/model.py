"""Writes a model folder that Dynamo's mocker takes: a configuration and a tokenizer, no weights."""

import json
import pathlib
import sys

from tokenizers import Tokenizer, models, pre_tokenizers

# The mocker answers with ids of its own choice; each has a word here, so that each token is an event.
WORDS = 32000

folder = pathlib.Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
special = ["<unk>", "<s>", "</s>"]
words = special + [f"w{number}" for number in range(len(special), WORDS)]
vocabulary = {word: number for number, word in enumerate(words)}
tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer.save(str(folder / "tokenizer.json"))

configuration = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "vocab_size": WORDS,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
of_tokenizer = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "chat_template": "{% for message in messages %}{{ message['content'] }}\n{% endfor %}",
}
generation = {"bos_token_id": 1, "eos_token_id": 2}
contents = {"config": configuration, "tokenizer_config": of_tokenizer, "generation_config": generation}
for name, content in contents.items():
    (folder / f"{name}.json").write_text(json.dumps(content))
