"""Reads one answer through a real client library and prints what it saw as one line of JSON.

usage: read.py CLIENT BASE_URL
"""

import asyncio
import json
import sys

client, base = sys.argv[1:]
messages = [{"role": "user", "content": "Hi"}]
seen = {"text": "", "ids": [], "finish": [], "roles": 0, "usage": None}


def note(chunk):
    if chunk.id not in seen["ids"]:
        seen["ids"].append(chunk.id)
    if chunk.usage:
        assert seen["usage"] is None, "two usages"
        seen["usage"] = [chunk.usage.prompt_tokens, chunk.usage.completion_tokens, chunk.usage.total_tokens]
    for choice in chunk.choices:
        if hasattr(choice, "delta"):
            seen["text"] += choice.delta.content or ""
            seen["roles"] += 1 if choice.delta.role else 0
        else:
            seen["text"] += choice.text
        if choice.finish_reason:
            seen["finish"].append(choice.finish_reason)


def openai_chat():
    from openai import OpenAI

    api = OpenAI(base_url=base, api_key="none", max_retries=0)
    for chunk in api.chat.completions.create(
        model="m", messages=messages, stream=True, stream_options={"include_usage": True}
    ):
        note(chunk)


def openai_completions():
    from openai import OpenAI

    api = OpenAI(base_url=base, api_key="none", max_retries=0)
    for chunk in api.completions.create(
        model="m", prompt="Hi", max_tokens=30, stream=True, stream_options={"include_usage": True}
    ):
        note(chunk)


def openai_async():
    from openai import AsyncOpenAI

    async def run():
        api = AsyncOpenAI(base_url=base, api_key="none", max_retries=0)
        stream = await api.chat.completions.create(
            model="m", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        async for chunk in stream:
            note(chunk)

    asyncio.run(run())


def openai_error():
    from openai import APIError, OpenAI

    api = OpenAI(base_url=base, api_key="none", max_retries=0)
    try:
        for chunk in api.completions.create(
            model="m", prompt="Hi", max_tokens=30, stream=True, extra_body={"guided_regex": "x"}
        ):
            note(chunk)
    except APIError as error:
        seen["error"] = error.code


def langchain():
    from langchain_openai import ChatOpenAI

    api = ChatOpenAI(base_url=base, api_key="none", model="m", max_retries=0, stream_usage=True)
    whole = None
    for chunk in api.stream([("user", "Hi")]):
        whole = chunk if whole is None else whole + chunk
    seen["text"] = whole.content
    seen["finish"] = [whole.response_metadata["finish_reason"]]
    seen["model"] = whole.response_metadata["model_name"]
    usage = whole.usage_metadata
    seen["usage"] = [usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]]


globals()[client]()
print(json.dumps(seen))
