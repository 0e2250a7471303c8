"""Streams one answer through LiteLLM and prints each piece as a line of JSON.

usage: litellm_reads.py BASE_URL
"""

import json
import sys

import litellm

for chunk in litellm.completion(
    model="openai/tiny",
    api_base=sys.argv[1],
    api_key="none",
    messages=[{"role": "user", "content": "Hi"}],
    max_tokens=200,
    temperature=0,
    stream=True,
    extra_body={"ignore_eos": True},
):
    for choice in chunk.choices:
        print(json.dumps({"text": choice.delta.content or "", "finish": choice.finish_reason}), flush=True)
